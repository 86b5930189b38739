# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""One inspection: everything is checked, models are measured one after the other, then all is drawn and written."""

import json
import re
import tempfile
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
from ..utils.devices import check_device, default_device, is_dtype
from ..utils.files import check_writable, write_file
from ..utils.keywords import with_keywords_of
from ..utils.untrusted import check_folder
from .effects import ablate, gradient_rms
from .measure import DepthStatistics, check_is_attnres, measure, read_excerpt, source_names
from .text import TextToRead, read_windows


SCHEMA = 2
ABLATION_TOKENS = 512
# Of the page, so that it stays below two megabytes
EXCERPT_TOKENS, EXCERPT_WEIGHTS = 256, 450_000


@with_keywords_of(TextToRead)
def inspect(
    models: list[str],
    output: str | Path,
    *,
    names: list[str] | None = None,
    base: str | None = None,
    gradients: bool = False,
    ablation: bool = False,
    batch_size: int = 4,
    dtype: str = "auto",
    device: str | None = None,
    **text_to_read: Any,
) -> dict[str, Any]:
    """Measure one checkpoint, or two to compare, and write `depth.json`, pictures and a page into a folder.

    Args:
        models: folders or Hub ids of AttnRes checkpoints.
        names: what to call the models in pictures, see `model_names` for the default.
        base: PreNorm checkpoint whose residual stream and gradients are drawn for comparison.
        gradients: measure gradients as well, on the same text.
        ablation: measure what each source is worth at each site, on the first 512 tokens.
        batch_size: windows at a time.
        dtype: in which the models compute; `auto` is that of the checkpoint.
        device: by default a GPU if there is one.
        text_to_read: the fields of [`TextToRead`], such as `text` or `dataset` in place of the built-in text.

    Returns:
        The content of `depth.json`: `schema`, the number of this format, `attnres_version`, and `models`, for each a
        `DepthStatistics` with its `SiteStatistics` and its `Excerpt`, field by field.

    Raises:
        ValueError, OSError: if something is missing, contradicts itself or is not an AttnRes checkpoint, before a
            model is loaded.
        TypeError: for an unknown keyword.
    """
    read = TextToRead(**text_to_read)
    check_request(models, output, read)
    names = model_names(models) if names is None else names
    if len(names) != len(models):
        raise ValueError(f"`names={names!r}` should hold a name for each of the {len(models)} models.")
    device = device or default_device()
    check_device(device, "is not available")
    if dtype != "auto" and not is_dtype(dtype):
        raise ValueError(f"`dtype={dtype!r}` is not a dtype of torch. Use float32, bfloat16, float16 or auto.")
    commits = [hub_commit(path) for path in models]  # of all, before any is read
    inspected = [found_model(path, name, commit) for path, name, commit in zip(models, names, commits)]
    if base is not None:
        check_base(base, inspected)
    for model in inspected:
        longest = min(read.length, getattr(model.config, "max_position_embeddings", None) or read.length)
        model.windows = read_windows(read.tokens(model.tokenizer()), read.max_tokens, longest, read.name)

    base_model = None if base is None else _load(base, dtype, device)
    excerpt_tokens = min(
        EXCERPT_TOKENS, EXCERPT_WEIGHTS // sum(_weights_per_token(model.config) for model in inspected)
    )
    statistics = []
    for model in inspected:
        network = load_unchanged(model, dtype, device)
        name, windows = model.name, model.windows
        measured = measure(network, windows, name=name, text=read.name, base=base_model, batch_size=batch_size)
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
    name: str
    commit: str | None
    fingerprint: str | None
    config: AttnResConfig
    windows: torch.Tensor | None = None  # token ids, `[windows, length]`

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.path, self.commit)


def check_request(models: list[str], output: str | Path, read: TextToRead):
    """Raise a `ValueError` for arguments of `inspect` that contradict each other."""
    if not 1 <= len(models) <= 2:
        raise ValueError(f"`attnres inspect` takes one checkpoint, or two to compare, not {len(models)}.")
    given = [kind for kind in ("text", "file", "dataset") if getattr(read, kind) is not None]
    if len(given) > 1:
        raise ValueError(f"Give a text, a file or a data set, not {' and '.join(given)} at once.")
    for name in ("dataset_config", "split"):
        value = getattr(read, name)
        if value is not None and read.dataset is None:
            raise ValueError(f"`{name}={value!r}` needs a data set: name one with `dataset`.")
    if Path(output).is_file():
        raise ValueError(f"`{output}` is a file; name a folder.")
    check_writable(Path(output))
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")
    if read.file is not None and not Path(read.file).is_file():
        raise ValueError(f"There is no file `{read.file}`.")


def load_unchanged(model: InspectedModel, dtype: str, device: str) -> nn.Module:
    """Load the model.

    Raises:
        OSError: if its files have changed since it was found.
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


def model_names(models: list[str]) -> list[str]:
    """What to call models: Hub ids as they are, and folders by their name.

    A folder called `final` or `checkpoint-100`, as training leaves them, is named after the run that it is in. Folders
    of the same name are told apart by the folders that they are in.
    """
    folders = [Path(model).absolute().parts if Path(model).exists() else (model,) for model in models]
    shortest = [1 + bool(re.fullmatch(r"final|checkpoint-\d+", parts[-1])) for parts in folders]
    names: list[str] = []
    for length in range(max(map(len, folders))):
        lengths = [max(length, least) for least in shortest]
        names = ["/".join(parts[-n:]).removesuffix("/final") for parts, n in zip(folders, lengths)]
        if len(set(names)) == len(names):
            break
    return names


def found_model(path: str, name: str, commit: str | None) -> InspectedModel:
    """An AttnRes checkpoint, not loaded; errors as for `read_config_dict` and `check_is_attnres`."""
    if commit is None:
        check_folder(path, follow_links=True)
    fingerprint = checkpoint_fingerprint(path) if commit is None else None
    config = load_config(path, commit)
    check_is_attnres(config, path)
    return InspectedModel(path, name, commit, fingerprint, config)


def check_base(base: str, inspected: list[InspectedModel]):
    """Raise a `ValueError` unless it is a PreNorm model of the same size."""
    of_base = load_config(base, hub_commit(base))
    if of_base.model_type == "attnres":
        raise ValueError(f"`base={base!r}` is an AttnRes model; name the PreNorm model that it was made from.")
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
