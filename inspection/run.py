# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""One inspection: everything is checked, models are measured one after the other, then all is drawn and written."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..checkpoints.checkpoint import load_config, load_language_model, load_tokenizer
from ..checkpoints.fingerprint import checkpoint_fingerprint
from ..checkpoints.location import hub_commit
from ..configuration_attnres import AttnResConfig
from ..data.text import read_sample
from ..utils.devices import default_device, is_dtype, reason_against_device
from ..utils.files import check_writable, write_file
from ..utils.untrusted import check_folder
from .effects import ablate, gradient_rms
from .measure import DepthStatistics, check_is_attnres, measure, read_excerpt, source_names
from .text import pieces, read_windows, tokens_of_dataset, tokens_of_text


SCHEMA = 2
ABLATION_TOKENS = 512
# Of the page, so that it stays below two megabytes
EXCERPT_TOKENS, EXCERPT_WEIGHTS = 256, 450_000


def inspect(
    models: list[str],
    output: str | Path,
    *,
    text: str | None = None,
    file: str | Path | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    split: str | None = None,
    base: str | None = None,
    gradients: bool = False,
    ablation: bool = False,
    max_tokens: int = 10_000,
    length: int = 512,
    batch_size: int = 4,
    dtype: str = "auto",
    device: str | None = None,
) -> dict[str, Any]:
    """Measure one checkpoint, or two to compare, and write `depth.json`, pictures and a page into a folder.

    Args:
        models: folders or Hub ids of AttnRes checkpoints.
        text, file, dataset: what to read, in place of the built-in text. A data set is an id of the Hub, a file
            (JSONL, Parquet, text) or a folder of such files.
        dataset_config, split: of a data set on the Hub; by default its split `train`.
        base: PreNorm checkpoint whose residual stream and gradients are drawn beside.
        gradients: measure gradients as well, on the same text.
        ablation: measure what each source is worth at each site, on the first 512 tokens.
        max_tokens: how much to read.
        length: tokens of a window; less where a model takes no more.

    Returns:
        The content of `depth.json`: `schema`, the number of this format, `attnres_version`, and `models`, for each a
        `DepthStatistics` with its `SiteStatistics` and its `Excerpt`, field by field.

    Raises:
        ValueError, OSError: for what is not there, does not go together or is no AttnRes checkpoint, before a model
            is loaded.
    """
    check_request(models, output, {"text": text, "file": file, "dataset": dataset}, dataset_config, split)
    device = device or default_device()
    check_device_and_dtype(device, dtype)
    commits = [hub_commit(path) for path in models]  # of all, before any is read
    inspected = [found_model(path, commit) for path, commit in zip(models, commits)]
    if base is not None:
        check_base(base, inspected)
    for model in inspected:
        ids, source = read_tokens(model.tokenizer(), text, file, dataset, dataset_config, split)
        longest = min(length, getattr(model.config, "max_position_embeddings", None) or length)
        model.windows = read_windows(ids, max_tokens, longest, source)

    base_model = None if base is None else _load(base, dtype, device)
    excerpt_tokens = min(
        EXCERPT_TOKENS, EXCERPT_WEIGHTS // sum(_weights_per_token(model.config) for model in inspected)
    )
    statistics = []
    for model in inspected:
        network = load_unchanged(model, dtype, device)
        name, windows = model.name, model.windows
        measured = measure(network, windows, name=name, text=source, base=base_model, batch_size=batch_size)
        measured.excerpt = read_excerpt(network, windows[0, :excerpt_tokens], model.tokenizer())
        measured.fingerprint, measured.commit = model.fingerprint, model.commit
        if gradients:
            add_gradients(measured, network, windows, name, base_model, base, batch_size)
        if ablation:
            add_ablation(measured, network, windows, name, batch_size)
        statistics.append(measured)
        del network  # before the next one is loaded
    return write_results(statistics, Path(output))


@dataclass
class InspectedModel:
    """A checkpoint that is to be measured: a folder as it was when it was found, or a commit on the Hub."""

    path: str
    commit: str | None
    fingerprint: str | None
    config: AttnResConfig
    windows: torch.Tensor | None = None  # token ids, `[windows, length]`

    @property
    def name(self) -> str:
        return "/".join(Path(self.path).absolute().parts[-2:]) if Path(self.path).exists() else self.path

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.path, self.commit)


def check_request(
    models: list[str],
    output: str | Path,
    texts: dict[str, str | Path | None],
    dataset_config: str | None,
    split: str | None,
):
    """Raise a `ValueError` for arguments of `inspect` that contradict each other; `texts` are its ways to name one."""
    if not 1 <= len(models) <= 2:
        raise ValueError(f"One checkpoint can be inspected, or two compared; these are {len(models)}.")
    given = [kind for kind, value in texts.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"Give a text, a file or a data set, not {' and '.join(given)}.")
    for name, value in (("dataset_config", dataset_config), ("split", split)):
        if value is not None and texts["dataset"] is None:
            raise ValueError(f"`{name}={value!r}` is of a data set: name one with `dataset`.")
    if Path(output).is_file():
        raise ValueError(f"`{output}` is a file; name a folder.")
    check_writable(Path(output))
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")
    if texts["file"] is not None and not Path(texts["file"]).is_file():
        raise ValueError(f"There is no file `{texts['file']}`.")


def check_device_and_dtype(device: str, dtype: str):
    reason = reason_against_device(device)
    if reason is not None:
        raise ValueError(f"`device={device!r}` is not to be had: {reason}")
    if dtype != "auto" and not is_dtype(dtype):
        raise ValueError(f"`dtype={dtype!r}` is no type of torch; there are float32, bfloat16, float16 and auto.")


def read_tokens(
    tokenizer: PreTrainedTokenizerBase,
    text: str | None,
    file: str | Path | None,
    dataset: str | None,
    dataset_config: str | None,
    split: str | None,
) -> tuple[Iterator[list[int]], str]:
    """Token ids of what is to be read, text after text, and what to call it."""
    if dataset is not None:
        return tokens_of_dataset(dataset, dataset_config, split or "train", tokenizer), f"`{dataset}`"
    if file is not None:
        return tokens_of_text(pieces(Path(file)), tokenizer), f"`{Path(file).name}`"
    if text is not None:
        return tokens_of_text([text], tokenizer), "the given text"
    return tokens_of_text([read_sample()], tokenizer), "the built-in text"


def load_unchanged(model: InspectedModel, dtype: str, device: str) -> nn.Module:
    """The model, if its files are those that it was found with.

    Raises:
        OSError: if they are not.
    """
    network = _load(model.path, dtype, device, model.commit)
    if model.fingerprint is not None and checkpoint_fingerprint(model.path) != model.fingerprint:
        raise OSError(f"`{model.path}` changed while it was loaded. Run again when nothing writes to it.")
    return network


def add_gradients(
    measured: DepthStatistics,
    network: nn.Module,
    windows: torch.Tensor,
    name: str,
    base_model: nn.Module | None,
    base: str | None,
    batch_size: int,
):
    """Measure the gradient of every sublayer, and that of the PreNorm model if there is one."""
    of_sublayers = gradient_rms(network, windows, name=name, batch_size=batch_size)
    for site in measured.sites[:-1]:
        site.gradient_rms = of_sublayers[site.site]
    if base_model is not None:
        of_sublayers = gradient_rms(base_model, windows, name=base, batch_size=batch_size)
        for site in measured.sites[:-1]:
            site.base_gradient_rms = of_sublayers[site.site]


def add_ablation(measured: DepthStatistics, network: nn.Module, windows: torch.Tensor, name: str, batch_size: int):
    """Measure what every source is worth at every site, on the first tokens."""
    few = windows[: -(-ABLATION_TOKENS // windows.shape[1])]
    rises = ablate(network, few, name=name, batch_size=batch_size)
    for site in measured.sites:
        site.ablation = rises[site.site]


def write_results(statistics: list[DepthStatistics], output: Path) -> dict[str, Any]:
    """Write the figures, the pictures and the page, which take their places together when all are finished.

    Returns:
        The content of `depth.json`.
    """
    from .figures import draw
    from .page import write_page

    results = {
        "schema": SCHEMA,
        "attnres_version": __version__,
        "models": [asdict(of_model) for of_model in statistics],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as unfinished:
        write_file(Path(unfinished) / "depth.json", json.dumps(results) + "\n")
        draw(statistics, Path(unfinished))
        write_page(results, Path(unfinished) / "index.html")
        output.mkdir(exist_ok=True)
        for path in Path(unfinished).iterdir():
            path.replace(output / path.name)
    return results


def found_model(path: str, commit: str | None) -> InspectedModel:
    """An AttnRes checkpoint, not loaded; errors as for `read_config_dict` and `check_is_attnres`."""
    if commit is None:
        check_folder(path, follow_links=True)
    fingerprint = checkpoint_fingerprint(path) if commit is None else None
    config = load_config(path, commit)
    check_is_attnres(config, path)
    return InspectedModel(path, commit, fingerprint, config)


def check_base(base: str, inspected: list[InspectedModel]):
    """Raise a `ValueError` unless it is a PreNorm model of the same size."""
    of_base = load_config(base, hub_commit(base))
    if of_base.model_type == "attnres":
        raise ValueError(f"`base={base!r}` is an AttnRes model: its PreNorm base is what is drawn beside.")
    for model in inspected:
        for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
            of_model = getattr(model.config, field)
            if getattr(of_base, field) != of_model:
                raise ValueError(
                    f"`base={base!r}` has {field} {getattr(of_base, field)} and `{model.path}` has {of_model}: it is"
                    " not its base."
                )


def _weights_per_token(config: AttnResConfig) -> int:
    return sum(len(source_names(site, config)) for site in range(config.num_sites))


def _load(path: str, dtype: str, device: str, commit: str | None = None) -> nn.Module:
    return load_language_model(path, revision=commit or "main", dtype=dtype).to(device).eval()
