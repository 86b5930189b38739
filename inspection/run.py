# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""One inspection: everything is checked, models are measured one after the other, then all is drawn and written."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .. import __version__
from ..configuration_attnres import AttnResConfig
from ..conversion.parity import read_sample
from ..depth_attention import num_sources
from ..fingerprint import checkpoint_fingerprint
from ..outputs import write_file
from ..sources import hub_commit, read_config_dict
from .effects import ablate, gradient_rms
from .measure import DepthStatistics, check_is_attnres, measure, read_excerpt
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
    if not 1 <= len(models) <= 2:
        raise ValueError(f"One checkpoint can be inspected, or two compared; these are {len(models)}.")
    given = [kind for kind, value in (("text", text), ("file", file), ("dataset", dataset)) if value is not None]
    if len(given) > 1:
        raise ValueError(f"Give a text, a file or a data set, not {' and '.join(given)}.")
    for name, value in (("dataset_config", dataset_config), ("split", split)):
        if value is not None and dataset is None:
            raise ValueError(f"`{name}={value!r}` is of a data set: name one with `dataset`.")
    if Path(output).is_file():
        raise ValueError(f"`{output}` is a file; name a folder.")
    if file is not None and not Path(file).is_file():
        raise ValueError(f"There is no file `{file}`.")

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise ValueError(f"`device={device!r}` is not to be had: {str(error).splitlines()[0]}") from None
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"`dtype={dtype!r}` is no type of torch; there are float32, bfloat16, float16 and auto.")

    commits = [hub_commit(path) for path in models]
    fingerprints = [checkpoint_fingerprint(path) if commit is None else None for path, commit in zip(models, commits)]
    configs = [_config(path, commit) for path, commit in zip(models, commits)]
    for path, config in zip(models, configs):
        check_is_attnres(config, path)
    if base is not None:
        _check_base(base, configs, models)
    windows = []
    for path, commit, config in zip(models, commits, configs):
        tokenizer = _tokenizer(path, commit)
        if dataset is not None:
            ids, source = tokens_of_dataset(dataset, dataset_config, split or "train", tokenizer), f"`{dataset}`"
        elif file is not None:
            ids, source = tokens_of_text(pieces(Path(file)), tokenizer), f"`{Path(file).name}`"
        elif text is not None:
            ids, source = tokens_of_text([text], tokenizer), "the given text"
        else:
            ids, source = tokens_of_text([read_sample()], tokenizer), "the built-in text"
        longest = min(length, getattr(config, "max_position_embeddings", None) or length)
        windows.append(read_windows(ids, max_tokens, longest, source))

    base_model = None if base is None else _load(base, dtype, device)
    excerpt_tokens = min(EXCERPT_TOKENS, EXCERPT_WEIGHTS // sum(map(_weights_per_token, configs)))
    statistics = []
    for path, commit, fingerprint, of_model in zip(models, commits, fingerprints, windows):
        model = _load(path, dtype, device, commit)
        if fingerprint is not None and checkpoint_fingerprint(path) != fingerprint:
            raise OSError(f"`{path}` changed while it was loaded. Run again when nothing writes to it.")
        name = "/".join(Path(path).absolute().parts[-2:]) if Path(path).exists() else path
        measured = measure(model, of_model, name=name, text=source, base=base_model, batch_size=batch_size)
        measured.excerpt = read_excerpt(model, of_model[0, :excerpt_tokens], _tokenizer(path, commit))
        measured.fingerprint, measured.commit = fingerprint, commit
        if gradients:
            of_sublayers = gradient_rms(model, of_model, name=name, batch_size=batch_size)
            for site in measured.sites[:-1]:
                site.gradient_rms = of_sublayers[site.site]
            if base_model is not None:
                of_sublayers = gradient_rms(base_model, of_model, name=base, batch_size=batch_size)
                for site in measured.sites[:-1]:
                    site.base_gradient_rms = of_sublayers[site.site]
        if ablation:
            few = of_model[: -(-ABLATION_TOKENS // of_model.shape[1])]
            rises = ablate(model, few, name=name, batch_size=batch_size)
            for site in measured.sites:
                site.ablation = rises[site.site]
        statistics.append(measured)
        del model  # before the next one is loaded
    results = {
        "schema": SCHEMA,
        "attnres_version": __version__,
        "models": [asdict(of_model) for of_model in statistics],
    }
    write_all(results, statistics, Path(output))
    return results


def write_all(results: dict[str, Any], statistics: list[DepthStatistics], output: Path):
    """Write the figures, the pictures and the page, which take their places together when all are finished."""
    from .figures import draw
    from .page import write_page

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as unfinished:
        write_file(Path(unfinished) / "depth.json", json.dumps(results) + "\n")
        draw(statistics, Path(unfinished))
        write_page(results, Path(unfinished) / "index.html")
        output.mkdir(exist_ok=True)
        for path in Path(unfinished).iterdir():
            path.replace(output / path.name)


def _config(path: str, commit: str | None) -> PreTrainedConfig:
    read_config_dict(path, commit)  # tells at once what is wrong with it
    return AutoConfig.from_pretrained(path, revision=commit or "main")


def _tokenizer(path: str, commit: str | None) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, revision=commit or "main")
    except (ValueError, OSError) as error:
        raise ValueError(f"`{path}` has no tokenizer that loads here: {str(error).splitlines()[0]}") from error


def _check_base(base: str, configs: list[AttnResConfig], models: list[str]):
    of_base = _config(base, hub_commit(base))
    if of_base.model_type == "attnres":
        raise ValueError(f"`base={base!r}` is an AttnRes model: its PreNorm base is what is drawn beside.")
    for config, path in zip(configs, models):
        for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if getattr(of_base, field) != getattr(config, field):
                raise ValueError(
                    f"`base={base!r}` has {field} {getattr(of_base, field)} and `{path}` has {getattr(config, field)}:"
                    " it is not its base."
                )


def _weights_per_token(config: AttnResConfig) -> int:
    return sum(num_sources(site, config.attn_res_block_size) for site in range(config.num_sites))


def _load(path: str, dtype: str, device: str, commit: str | None = None) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, revision=commit or "main", dtype=dtype).to(device).eval()
