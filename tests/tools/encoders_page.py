# SPDX-License-Identifier: Apache-2.0
"""Which encoders can be a base: `python tests/tools/encoders_page.py` measures and writes what was found.

It writes `base/encoders.json`, which `attnres families` shows, and the tables in `docs/encoders.md`. Each type is
measured on tiny models with random weights in fp64, in a few minutes for all.
"""

import json
import os
import re
import sys
import traceback
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from encoder_models import (
    converted_encoder,
    encoder_config,
    encoder_types,
    heads_of,
    inputs_of,
    literal_outputs,
    native_encoder,
    outputs_of,
    with_random_queries,
)
from literal_definition import relative
from rich.progress import track
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnres import AttnResConfig
from attnres.base.config import own_class


ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "base/encoders.json", ROOT / "docs/encoders.md"
MARK = "<!-- types -->\n"
BLOCK_SIZES = (1, 2, 3)
READS = {"input_ids": "text", "pixel_values": "images", "input_features": "sound", "input_values": "sound"}


def measured(model_type: str) -> dict:
    """The largest differences over all heads of a type, in fp64 where its base computes in it."""
    zero, random, moved, heads = [], [], [], heads_of(model_type)
    for name in heads:
        native = native_encoder(model_type, name)
        inputs = inputs_of(native)
        with torch.no_grad():
            of_base = outputs_of(native, inputs)
        assert of_base.isfinite().all(), f"{name} of the base gives outputs that are not finite"
        for block_size in BLOCK_SIZES:
            model = converted_encoder(native, name, block_size)
            zero.append(relative(outputs_of(model, inputs), of_base))
            with torch.no_grad():
                zero.append(relative(outputs_of(model, inputs), of_base))
                with_random_queries(model)
                random.append(relative(outputs_of(model, inputs), literal_outputs(native, model, inputs)))
                moved.append(relative(outputs_of(model, inputs), of_base))
    assert min(moved) > 1e-3, "the queries do nothing"
    additions = sorted(set(model.config.sublayers_per_layer()))
    return {
        "additions": additions,
        "reads": READS[native.main_input_name],
        "heads": [name.removeprefix("AttnRes") for name in heads],
        "zero_queries": max(zero),
        "random_queries": max(random),
    }


def reason_against(name: str) -> str | None:
    """Why a type is refused, with its default config if a tiny one does not suit it; `None` if it is not."""
    reason = None
    for make_config in (encoder_config, lambda name: CONFIG_MAPPING[name]()):
        try:
            AttnResConfig.from_base_config(make_config(name))
            return None
        except Exception as error:
            reason = re.sub(r"^`base_model_type='[^']*'` is not supported: |\.$", "", " ".join(str(error).split()))
            if "more to the residual stream" in reason or "one stack" in reason:
                return reason
    return reason


def is_encoder_for_users(name: str) -> bool:
    """Whether somebody may look for a type on the page, which detectors and codecs, for instance, are not on."""
    try:
        reads = own_class(name, "AttnResModel").main_input_name
    except (ImportError, AttributeError):  # of code that is not installed, or without a model that has no head
        reads = None
    return len(heads_of(name)) > 1 or "vision" in name or reads in ("input_values", "input_features")


def survey() -> dict:
    supported, refused = {}, {}
    for name in track(encoder_types(), "Encoders"):
        reason = reason_against(name)
        if reason is not None:
            if is_encoder_for_users(name):
                refused[name] = reason
            continue
        try:
            supported[name] = measured(name)
        except Exception as error:  # not a finding, but a gap of this tool
            print(name, "".join(traceback.format_exception(error)[-3:]), file=sys.stderr)
    return {"transformers": transformers.__version__, "supported": supported, "refused": refused}


def tables(found: dict) -> str:
    lines = ["| type | reads | classes | additions per layer | zero queries | random queries |"]
    lines.append("|---|---|---|---|---|---|")
    for name, of_type in found["supported"].items():
        errors = [f"{of_type[key]:.0e}" for key in ("zero_queries", "random_queries")]
        additions = ", ".join(map(str, of_type["additions"]))
        cells = name, of_type["reads"], ", ".join(of_type["heads"]), additions, *errors
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Not supported, in transformers {found['transformers']}:", "", "| type | why |", "|---|---|"]
    lines += [f"| {name} | {why.replace('|', chr(92) + '|')} |" for name, why in found["refused"].items()]
    return "\n".join(lines)


def main():
    torch.set_num_threads(1)
    found = survey()
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    before, _, after = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{before}{MARK}{tables(found)}\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
