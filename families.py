# SPDX-License-Identifier: Apache-2.0
"""Which decoders can be a base: what was measured of every type of transformers, and a probe of any other."""

import difflib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .depth_probe import ProbedLayer, probe_layers


# Written by `tests/families_page.py`
RESULTS = Path(__file__).with_name("families.json")
FEATURES = ("packing", "compile", "tp", "checkpointing", "engines")


def survey_table(types: Sequence[str] | None = None) -> tuple[Table, str]:
    """What was measured of types of models, as a table, and a sentence below it.

    Args:
        types: model types as in transformers; `None`: all that have a causal language model.

    Raises:
        ValueError: for a type that was not measured.
    """
    survey = json.loads(RESULTS.read_text(encoding="utf-8"))
    supported, reasons = survey["supported"], survey["refused"] | survey["others"]
    known = sorted(supported | reasons)
    for name in types or []:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"`{name}` is not a type of transformers {survey['transformers']}, whose types were measured: see what"
                " `--probe` says of a checkpoint." + (f" Did you mean {' or '.join(close)}?" if close else "")
            )
    table = Table("type", "additions\nper layer", "zero\nqueries", "random\nqueries", "what else", box=box.SIMPLE)
    for name in types or known:
        if name in reasons:
            cannot = "refused" if name in survey["refused"] else "not a decoder"
            table.add_row(name, "-", "-", "-", f"{cannot}: {escape(reasons[name])}")
            continue
        found = supported[name]
        can = [feature for feature in FEATURES if found[feature]]
        differences = [
            "-" if found[key] is None else f"{found[key]:.0e}" for key in ("zero_queries", "random_queries")
        ]
        table.add_row(name, ", ".join(map(str, found["additions"])), *differences, ", ".join(can))
    counts = f"{len(supported)} supported, {len(survey['refused'])} refused, {len(survey['others'])} not decoders"
    return table, (
        f"transformers {survey['transformers']}: {counts}. Differences are relative, of the logits: with queries of"
        " zero from the base, with random ones from the definition."
    )


def read_decoder_config(model: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a decoder, that inside of it if the model is made of several.

    Args:
        model: a folder or a Hub id.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: whether to run code that the model brings. Its classes are registered with the Auto classes
            of this process, so that `AttnResConfig.from_base_config` takes the config.

    Raises:
        ValueError: if its code is for a model type of transformers.
    """
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and "AutoModelForCausalLM" in auto_map:
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
    return config.get_text_config(decoder=True)


def describe_probe(config: PreTrainedConfig) -> list[str]:
    """In lines: how often the layers of a base read and write, and where in its code.

    Raises:
        ValueError: if it cannot be a base, with the reason, and the line of its code where that can be told.
    """
    layers = probe_layers(config)
    num_sites = sum(layer.num_writes for layer in layers) + 1
    described = [
        f"{config.model_type}: {len(layers)} layers, {num_sites} sites. It can be a base: with queries of zero the"
        " AttnRes model computes the same."
    ]
    first = 0
    for (name, lines), group in itertools.groupby(layers, key=_what_it_does):
        last = first + len(list(group)) - 1
        described.append(f"layers {first} to {last}: {name}" if last > first else f"layer {first}: {name}")
        first = last + 1
        file = None
        for line in lines:
            if line.file != file:
                file = line.file
                described.append(f"  {file}")
            described.append(f"  {line.number:>6} {line.what:<6} {line.code}")
    return described


def _what_it_does(probed: ProbedLayer) -> tuple[str, tuple]:
    return type(probed.layer).__name__, tuple(probed.lines)
