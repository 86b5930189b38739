# SPDX-License-Identifier: Apache-2.0
"""Which decoders can be a base: what was measured of every type of transformers, and a probe of any other."""

import difflib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..checkpoints.checkpoint import config_errors_explained, load_config
from ..checkpoints.location import read_config_dict
from ..multimodal_attnres import AttnResMultimodalConfig, is_multimodal
from .config import check_base_model_type
from .probe import ProbedLayer, probe_layers


# Written by `tests/tools/families_page.py`
RESULTS = Path(__file__).with_name("families.json")
KINDS = ("supported", "refused", "others")
FEATURES = ("packing", "compile", "tp", "checkpointing", "engines")


def survey(types: Sequence[str] | None = None) -> dict[str, Any]:
    """What was measured of types of models.

    Args:
        types: model types as in transformers; `None`: all that have a causal language model.

    Returns:
        `transformers`: the version that was measured. `supported`: by type, what was measured of it; `refused` and
        `others`: by type, the reason why it cannot be a base, and what it is if it is not a decoder.

    Raises:
        ValueError: for a type that was not measured.
    """
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    known = sorted(name for kind in KINDS for name in found[kind])
    for name in types or []:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"`{name}` is not a type of transformers {found['transformers']}, whose types were measured: see what"
                " `--probe` says of a checkpoint." + (f" Did you mean {' or '.join(close)}?" if close else "")
            )
    wanted = set(types or known)
    chosen = {kind: {name: value for name, value in found[kind].items() if name in wanted} for kind in KINDS}
    return {"transformers": found["transformers"], **chosen}


def survey_table(types: Sequence[str] | None = None) -> tuple[Table, str]:
    """The same as a table, types in the order that is asked for, and a sentence below it on all that were measured.

    Arguments and errors as for `survey`.
    """
    found = survey()
    chosen = survey(types)
    supported, reasons = chosen["supported"], chosen["refused"] | chosen["others"]
    table = Table("type", "additions\nper layer", "zero\nqueries", "random\nqueries", "what else", box=box.SIMPLE)
    for name in types or sorted(supported | reasons):
        if name in reasons:
            cannot = "refused" if name in chosen["refused"] else "not a decoder"
            table.add_row(name, "-", "-", "-", f"{cannot}: {escape(reasons[name])}")
            continue
        measured = supported[name]
        can = [feature for feature in FEATURES if measured[feature]]
        differences = [
            "-" if measured[key] is None else f"{measured[key]:.0e}" for key in ("zero_queries", "random_queries")
        ]
        table.add_row(name, ", ".join(map(str, measured["additions"])), *differences, ", ".join(can))
    counts = (
        f"{len(found['supported'])} supported, {len(found['refused'])} refused, {len(found['others'])} not decoders"
    )
    return table, (
        f"transformers {found['transformers']}: {counts}. Differences are relative, of the logits: with queries of"
        " zero from the base, with random ones from the definition."
    )


def read_decoder_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a decoder, that inside of it if the model is made of several; otherwise as `read_config`."""
    return read_config(model, revision, trust_remote_code).get_text_config(decoder=True)


def read_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model.

    Args:
        model: a folder or a Hub id.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: whether to run code that the model brings. Its classes are registered with the Auto classes
            of this process, so that `AttnResConfig.from_base_config` takes the config.

    Raises:
        ValueError: if its config is one that transformers refuses, or its code is for a model type of transformers.
        OSError: if there is no such config.
    """
    if not trust_remote_code:
        return load_config(model, revision)
    read_config_dict(model, revision)  # tells at once what is wrong with it
    with config_errors_explained(model):
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=True)
    auto_map = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in auto_map:
        if config.model_type in CONFIG_MAPPING_NAMES:
            raise ValueError(
                f"The code of `{model}` calls its model type {config.model_type!r}, as transformers calls one of its"
                " own. Give it another `model_type` in its code and in config.json, or leave out"
                " `trust_remote_code` to look at transformers' model."
            )
        AutoConfig.register(config.model_type, type(config), exist_ok=True)
        for auto_class in (AutoModel, AutoModelForCausalLM):
            if auto_class.__name__ in auto_map:
                reference = auto_map[auto_class.__name__]
                model_class = get_class_from_dynamic_module(reference, model, revision=revision)
                auto_class.register(type(config), model_class, exist_ok=True)
    return config


def probe_report(config: PreTrainedConfig) -> dict[str, Any]:
    """How often the layers of a base read and write, and where in its code.

    Returns:
        `model_type`, `language_model` (the same, or the type of that in a multimodal model), `num_layers`,
        `num_sites`, and `layers`: for each run of layers that do the same `first` and
        `last`, their class (`name`) and the `lines` that read or write, each with its `file`, `number`, `what` it does
        and its `code`.

    Raises:
        ValueError: if it cannot be a base, with the reason, and the line of its code where that can be told.
    """
    decoder_config = config
    if is_multimodal(config.model_type):
        AttnResMultimodalConfig.from_base_config(config)
        decoder_config = config.text_config
    else:
        check_base_model_type(config.model_type, has_lm_head=True)
    layers = probe_layers(decoder_config)
    runs, first = [], 0
    for (name, lines), group in itertools.groupby(layers, key=_what_it_does):
        last = first + len(list(group)) - 1
        found = [{"file": at.file, "number": at.number, "what": at.what, "code": at.code} for at in lines]
        runs.append({"first": first, "last": last, "name": name, "lines": found})
        first = last + 1
    num_sites = sum(layer.num_writes for layer in layers) + 1
    types = {"model_type": config.model_type, "language_model": decoder_config.model_type}
    return {**types, "num_layers": len(layers), "num_sites": num_sites, "layers": runs}


def describe_probe(config: PreTrainedConfig) -> list[str]:
    """`probe_report` in lines; errors as there."""
    report = probe_report(config)
    inside = "" if report["language_model"] == report["model_type"] else f" (in it {report['language_model']})"
    described = [
        f"{report['model_type']}{inside}: {report['num_layers']} layers, {report['num_sites']} sites. It can be a"
        " base: with queries of zero the AttnRes model computes the same."
    ]
    for run in report["layers"]:
        first, last = run["first"], run["last"]
        where = f"layers {first} to {last}" if last > first else f"layer {first}"
        described.append(f"{where}: {run['name']}")
        for file, lines in itertools.groupby(run["lines"], key=lambda line: line["file"]):
            described.append(f"  {file}")
            described += [f"  {line['number']:>6} {line['what']:<6} {line['code']}" for line in lines]
    return described


def _what_it_does(probed: ProbedLayer) -> tuple[str, tuple]:
    return type(probed.layer).__name__, tuple(probed.lines)
