# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Means of the depth weights over text, a batch at a time, so that memory does not grow with the text."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..configuration_attnres import AttnResConfig
from ..conversion.parity import read_sample
from ..outputs import write_file


SCHEMA = 1
SMALL = 0.01  # a weight below is as good as none


@dataclass
class SiteStatistics:
    """One read, averaged over tokens.

    Attributes:
        site: its number; even ones feed an attention, odd ones an MLP, the last one the final norm.
        kind: `attention`, `mlp` or `final`.
        layer: number of the layer; that of the last one for the final read.
        sources: what is read: `embedding`, `block 1` ... and `partial`, the open block.
        weights: mean weight of each source; they sum to 1.
        entropy: mean entropy of the weights in nats, and as a part of its largest value (1 with a single source).
        effective_sources: mean of exp(entropy): over so many sources the weights are spread.
        small_weights: part of the weights below 0.01.
        embedding_weight, predecessor_weight: mean weight of the first and of the newest source.
        distance: mean number of sources between the newest one and what is read.
        rms: root mean square of what is read, over tokens and hidden dimensions.
        stream_rms: of the residual stream of the PreNorm model at the same place, where there is one.
    """

    site: int
    kind: str
    layer: int
    sources: list[str]
    weights: list[float]
    entropy: float
    relative_entropy: float
    effective_sources: float
    small_weights: float
    embedding_weight: float
    predecessor_weight: float
    distance: float
    rms: float
    stream_rms: float | None = None


@dataclass
class DepthStatistics:
    """All reads of a model, over `num_tokens` tokens of `text`."""

    model: str
    base_model_type: str
    block_size: int
    num_blocks: int
    text: str
    num_tokens: int
    sites: list[SiteStatistics]


class _Sums:
    """Running sums of one site, in fp64."""

    def __init__(self, num_sources: int):
        self.weights = torch.zeros(num_sources, dtype=torch.float64)
        self.entropy = self.effective = self.small = self.square = self.stream_square = 0.0
        self.tokens = self.elements = 0

    def add(self, weights: torch.Tensor, hidden: tuple[float, int], stream: tuple[float, int] | None):
        """Weights of the tokens, `[tokens, sources]`; sums of squares and numbers of what was read."""
        weights = weights.double().cpu()
        entropy = torch.special.entr(weights).sum(-1)
        self.weights += weights.sum(0)
        self.entropy += entropy.sum().item()
        self.effective += entropy.exp().sum().item()
        self.small += (weights < SMALL).double().mean(-1).sum().item()
        self.tokens += len(weights)
        self.square += hidden[0]
        self.elements += hidden[1]
        if stream is not None:
            self.stream_square += stream[0]


def norm_modules(trunk: nn.Module) -> list[nn.Module]:
    """The norms behind the reads, in the order of sites; the PreNorm base has them under the same names."""
    return [norm for layer in trunk.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)] + [
        trunk.norm
    ]


@contextlib.contextmanager
def _norm_inputs(trunk: nn.Module) -> Iterator[dict[int, tuple[float, int]]]:
    """Sum of squares and number of elements of what every norm is given, for the tokens that count."""
    found: dict[int, tuple[float, int]] = {}
    handles = []
    for site, norm in enumerate(norm_modules(trunk)):

        def hook(module, args, site=site):
            found[site] = (args[0].double().square().sum().item(), args[0].numel())

        handles.append(norm.register_forward_pre_hook(hook))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def measure(
    model: nn.Module,
    windows: torch.Tensor,
    *,
    name: str = "model",
    text: str = "text",
    base: nn.Module | None = None,
    batch_size: int = 4,
) -> DepthStatistics:
    """Run an AttnRes causal LM over text and take the means of its depth weights.

    Args:
        windows: token ids, `[windows, length]`.
        base: the PreNorm model to compare the size of hidden states with. Without one, and with zero queries, its
            stream is what is read times the number of sources.

    Raises:
        ValueError: if it is no AttnRes model.
    """
    config = model.config
    if config.model_type != "attnres":
        raise ValueError(f"`{name}` is a {config.model_type}, no AttnRes model: `attnres convert` makes one of it.")
    trunk, device = model.model, model.device
    model.eval()
    zero_queries = not trunk.depth_queries.query.any()
    sums: dict[int, _Sums] = {}
    for ids in track(windows.split(batch_size), description=f"Reading {name}"):
        ids = ids.to(device)
        stream = None
        if base is not None:
            with _norm_inputs(base.model) as stream:
                base.model(ids, use_cache=False)
        with _norm_inputs(trunk) as hidden:
            reads = trunk(ids, output_depth_attentions=True, use_cache=False).depth_attentions
        for site, weights in enumerate(reads):
            of_stream = None if stream is None else stream[site]
            if base is None and zero_queries:
                of_stream = (hidden[site][0] * weights.shape[-1] ** 2, hidden[site][1])
            sums.setdefault(site, _Sums(weights.shape[-1])).add(weights.flatten(0, -2), hidden[site], of_stream)
    has_stream = base is not None or zero_queries
    return DepthStatistics(
        model=name,
        base_model_type=config.base_model_type,
        block_size=config.attn_res_block_size,
        num_blocks=-(-2 * config.num_hidden_layers // config.attn_res_block_size),
        text=text,
        num_tokens=windows.numel(),
        sites=[_site_statistics(site, of_site, config, has_stream) for site, of_site in sorted(sums.items())],
    )


def source_names(site: int, block_size: int) -> list[str]:
    """What a site can read, in the order of depth."""
    closed = -(-site // block_size)
    names = ["embedding", *(f"block {i}" for i in range(1, closed + 1))]
    if site % block_size != 0:
        names[-1] = "partial"
    return names


def _site_statistics(site: int, sums: _Sums, config: AttnResConfig, has_stream: bool) -> SiteStatistics:
    weights = (sums.weights / sums.tokens).tolist()
    entropy = sums.entropy / sums.tokens
    largest = torch.tensor(float(len(weights))).log().item()
    last = 2 * config.num_hidden_layers
    return SiteStatistics(
        site=site,
        kind="final" if site == last else ("attention", "mlp")[site % 2],
        layer=min(site // 2, config.num_hidden_layers - 1),
        sources=source_names(site, config.attn_res_block_size),
        weights=weights,
        entropy=entropy,
        relative_entropy=entropy / largest if len(weights) > 1 else 1.0,
        effective_sources=sums.effective / sums.tokens,
        small_weights=sums.small / sums.tokens,
        embedding_weight=weights[0],
        predecessor_weight=weights[-1],
        distance=sum(weight * back for back, weight in enumerate(reversed(weights))),
        rms=(sums.square / sums.elements) ** 0.5,
        stream_rms=(sums.stream_square / sums.elements) ** 0.5 if has_stream else None,
    )


def read_text(
    tokenizer: PreTrainedTokenizerBase, content: str, max_tokens: int, length: int, source: str
) -> torch.Tensor:
    """Token ids, `[windows, length]`.

    Raises:
        ValueError: if there is nothing to read.
    """
    ids = tokenizer(content, add_special_tokens=False).input_ids[:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"{source} has {len(ids)} tokens: there is nothing to read.")
    length = min(length, len(ids))
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def inspect(
    models: list[str],
    output: str | Path,
    *,
    text: str | None = None,
    file: str | Path | None = None,
    base: str | None = None,
    max_tokens: int = 10_000,
    length: int = 512,
    batch_size: int = 4,
    dtype: str = "auto",
    device: str | None = None,
) -> dict[str, Any]:
    """Measure one checkpoint, or two to compare, and write `depth.json` and the pictures into a folder.

    Args:
        models: folders or Hub ids of AttnRes checkpoints.
        text, file: what to read, in place of the built-in text.
        base: PreNorm checkpoint whose residual stream is drawn beside.

    Returns:
        The content of `depth.json`.

    Raises:
        ValueError: for what is not there or no AttnRes checkpoint, before anything is written.
    """
    from .figures import draw

    if not 1 <= len(models) <= 2:
        raise ValueError(f"One checkpoint can be inspected, or two compared; these are {len(models)}.")
    if text is not None and file is not None:
        raise ValueError("Give a text or a file, not both.")
    content, source = read_sample(), "the built-in text"
    if text is not None:
        content, source = text, "the given text"
    if file is not None:
        if not Path(file).is_file():
            raise ValueError(f"There is no file `{file}`.")
        try:
            content, source = Path(file).read_text(encoding="utf-8"), f"`{Path(file).name}`"
        except UnicodeDecodeError as error:
            raise ValueError(f"`{file}` is not UTF-8 text: {error}.") from None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    base_model = None if base is None else _load(base, dtype, device)
    statistics = []
    for path in models:
        model = _load(path, dtype, device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        windows = read_text(tokenizer, content, max_tokens, length, source)
        name = "/".join(Path(path).absolute().parts[-2:]) if Path(path).exists() else path
        statistics.append(measure(model, windows, name=name, text=source, base=base_model, batch_size=batch_size))
    results = {"schema": SCHEMA, "models": [asdict(of_model) for of_model in statistics]}
    output = Path(output)
    write_file(output / "depth.json", json.dumps(results, indent=1) + "\n")
    draw(statistics, output)
    return results


def _load(path: str, dtype: str, device: str) -> nn.Module:
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise ValueError(f"There is no folder `{path}`.")
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
