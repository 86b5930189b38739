# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What the probe finds in a base: how often its layers read and write, and in which lines of its code."""

import itertools
from typing import Any

from transformers import PreTrainedConfig

from ..base.config import check_base_model_type, has_own_classes
from ..base.probe import STACKS, ProbedLayer, run_probes
from ..multimodal_attnres import AttnResMultimodalConfig, is_multimodal


def probe_report(config: PreTrainedConfig) -> dict[str, Any]:
    """How often the layers of a base read and write, and where in its code.

    Returns:
        `model_type`, `language_model` (the same, or the type of that in a multimodal model), `num_layers`,
        `num_sites`, and `layers`: for each run of layers that do the same `first` and
        `last`, their class (`name`) and the `lines` that read or write, each with its `file`, `number`, `what` it does
        and its `code`; of an encoder-decoder also the `part`, in which they are counted.

    Raises:
        ValueError: if it cannot be a base, with the reason, and the line of its code where that can be told.
    """
    decoder_config = config
    if is_multimodal(config.model_type):
        AttnResMultimodalConfig.from_base_config(config)
        decoder_config = config.text_config
    else:
        check_base_model_type(config.model_type, has_lm_head=not has_own_classes(config.model_type))
    stacks = [probe.probed for probe in run_probes(decoder_config)]
    runs = []
    for part, layers in zip(STACKS, stacks):
        first = 0
        for (name, lines), group in itertools.groupby(layers, key=_what_it_does):
            last = first + len(list(group)) - 1
            found = [{"file": at.file, "number": at.number, "what": at.what, "code": at.code} for at in lines]
            of_part = {"part": part} if len(stacks) > 1 else {}
            runs.append({"first": first, "last": last, "name": name, "lines": found, **of_part})
            first = last + 1
    num_sites = sum(sum(layer.num_writes for layer in layers) + 1 for layers in stacks)
    types = {"model_type": config.model_type, "language_model": decoder_config.model_type}
    return {**types, "num_layers": sum(map(len, stacks)), "num_sites": num_sites, "layers": runs}


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
        described.append(f"{run['part'] + ' ' if 'part' in run else ''}{where}: {run['name']}")
        for file, lines in itertools.groupby(run["lines"], key=lambda line: line["file"]):
            described.append(f"  {file}")
            described += [f"  {line['number']:>6} {line['what']:<6} {line['code']}" for line in lines]
    return described


def _what_it_does(probed: ProbedLayer) -> tuple[str, tuple]:
    return type(probed.layer).__name__, tuple(probed.lines)
