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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.progress import track
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..configuration_attnres import AttnResConfig
from ..depth_attention import num_sources


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
        entropy, relative_entropy: mean entropy of the weights in nats, and as a part of its largest value (1 with a
            single source).
        effective_sources: mean of exp(entropy): over so many sources the weights are spread.
        small_weights: part of the weights below 0.01.
        embedding_weight, predecessor_weight: mean weight of the first and of the newest source.
        distance: mean number of sources between the newest one and what is read.
        rms: root mean square of what is read, over tokens and hidden dimensions.
        stream_rms: of the residual stream of the PreNorm model at the same place, where there is one.
        gradient_rms: of the gradient that the loss gives to what the sublayer behind this read writes, see
            `gradient_rms`; none for the final read, or if it was not asked for.
        base_gradient_rms: the same in the PreNorm model.
        ablation: by how much the loss rises if a source is masked out here, see `ablate`; none where it is the only
            source, or if it was not asked for.
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
    gradient_rms: float | None = None
    base_gradient_rms: float | None = None
    ablation: list[float | None] | None = None


@dataclass
class Excerpt:
    """The depth weights of single tokens.

    Attributes:
        tokens: their text.
        weights: for every site, for every token, of every source, in thousandths.
    """

    tokens: list[str]
    weights: list[list[list[int]]]


@dataclass
class DepthStatistics:
    """All reads of a model.

    Attributes:
        model: its name.
        base_model_type: of its base.
        block_size, num_blocks: sublayers per block, and how many blocks there are.
        text: what was read, in words.
        num_tokens: how much of it.
        sites: read by read, in the order of depth.
        excerpt: the beginning of the text, token by token; none if only means were taken.
        fingerprint, commit: of the checkpoint, a hash over a folder's files or the commit on the Hub, see
            `attnres.fingerprint`; none of a model in memory.
    """

    model: str
    base_model_type: str
    block_size: int
    num_blocks: int
    text: str
    num_tokens: int
    sites: list[SiteStatistics]
    excerpt: Excerpt | None = None
    fingerprint: str | None = None
    commit: str | None = None


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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and then as before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextlib.contextmanager
def _norm_inputs(trunk: nn.Module) -> Iterator[dict[int, tuple[float, int]]]:
    """Sum of squares and number of elements of what every norm is given."""
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
    progress: bool = True,
) -> DepthStatistics:
    """Run an AttnRes causal LM over text and take the means of its depth weights.

    Args:
        windows: token ids, `[windows, length]`.
        base: the PreNorm model to compare the size of hidden states with. Without one, and with zero queries, its
            stream is what is read times the number of sources.
        progress: show a bar.

    Raises:
        ValueError: if it is no AttnRes model.
    """
    config = model.config
    check_is_attnres(config, name)
    trunk, device = model.model, model.device
    zero_queries = not trunk.depth_queries.query.any()
    sums: dict[int, _Sums] = {}
    for ids in track(windows.split(batch_size), description=f"Reading {name}", disable=not progress):
        ids = ids.to(device)
        stream = None
        if base is not None:
            with evaluating(base), _norm_inputs(base.model) as stream:
                base.model(ids, use_cache=False)
        with evaluating(model), _norm_inputs(trunk) as hidden:
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
        num_blocks=num_sources(config.num_sites - 1, config.attn_res_block_size) - 1,
        text=text,
        num_tokens=windows.numel(),
        sites=[_site_statistics(site, of_site, config, has_stream) for site, of_site in sorted(sums.items())],
    )


def check_is_attnres(config: PreTrainedConfig, name: str):
    if config.model_type != "attnres":
        raise ValueError(f"`{name}` is a {config.model_type}, no AttnRes model: `attnres convert` makes one of it.")


@torch.no_grad()
def read_excerpt(model: nn.Module, ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> Excerpt:
    """The weights of every single token of a text, `[tokens]`."""
    reads = model.model(ids[None].to(model.device), output_depth_attentions=True, use_cache=False).depth_attentions
    return Excerpt(
        tokens=[tokenizer.decode([i]) for i in ids.tolist()],
        weights=[(weights[0].float() * 1000).round().int().tolist() for weights in reads],
    )


def source_names(site: int, block_size: int) -> list[str]:
    """What a site can read, in the order of depth."""
    names = ["embedding", *(f"block {i}" for i in range(1, num_sources(site, block_size)))]
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
