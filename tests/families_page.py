# SPDX-License-Identifier: Apache-2.0
"""`docs/families.md`, from the results of the survey: `python tests/families_page.py RESULTS.json`."""

import json
import re
import sys
from pathlib import Path

import transformers
from decoder_configs import NOT_DECODERS


PAGE = Path(__file__).parents[1] / "docs/families.md"
HEAD = """# Which decoders can be a base

Every type that transformers {version} has a causal language model of. Made by `python tests/family_survey.py
RESULTS.json` and `python tests/families_page.py RESULTS.json`: a tiny model of each type with random weights, in fp64
where it runs in that ({fp32} do not).

{supported} are supported, {refused} refused, {others} are not decoders. Relative differences of logits, the largest of
all supported types in fp64, of blocks of 1, 2 and 3 sublayers:

| | largest difference |
|---|---|
| queries of zero, against the base | {zero_queries} |
| random queries, against the definition | {random_queries} |
| training against inference | {training_mode} |
| weights over depth, against the definition | {depth_attentions} |
| a model that was saved and loaded | {saved} |

The definition is written on what the base's own code computes, operation by operation (`tests/literal_definition.py`).
It shares no code with the package, but its idea of what writes to the residual stream and what reads it.

## Supported

*Additions* is how often each layer adds to the residual stream. *Cached* is generation with the KV cache against one
pass without it, of the AttnRes model and of its base: where these differ by more than rounding, they do so in the base
as well, by as much or up to 16 times less. *Compile*, *TP* and *checkpointing* are what the base says it can do.

| type | additions | zero queries | random queries | cached: AttnRes | base | KV cache | compile | TP | checkpointing |
|---|---|---|---|---|---|---|---|---|---|
"""


def row(name: str, found: dict) -> str:
    flags = found["flags"]
    counts = sorted(set(found["sublayers"]))
    cells = [
        name + ("" if flags["dtype"] == "torch.float64" else " (fp32)"),
        ", ".join(map(str, counts)),
        *(number(found[key]) for key in ("zero_queries", "random_queries")),
        *(number(found["generation"].get(key)) for key in ("attnres", "base")),
        str(found["kv_cache"] or "none"),
        *("yes" if flags[key] else "no" for key in ("compile_fullgraph", "tp_plan", "checkpointing")),
    ]
    return "| " + " | ".join(cells) + " |"


def number(value) -> str:
    return f"{value:.0e}" if isinstance(value, float) else "-"


def reason(text: str) -> str:
    """The sentence of an error, without where it was raised."""
    return re.sub(r"^ValueError: `base_model_type='[^']*'` is not supported: | \([^()]*\)$", "", text)


def page(results: dict) -> str:
    supported = {name: found for name, found in results.items() if "sublayers" in found}
    refused = {name: found["refused"] for name, found in results.items() if "refused" in found}
    others = {**NOT_DECODERS, **{name: found["error"] for name, found in results.items() if "error" in found}}
    exact = [found for found in supported.values() if found["flags"]["dtype"] == "torch.float64"]
    largest = {
        key: number(max(found[key] for found in exact if isinstance(found[key], float)))
        for key in ("zero_queries", "random_queries", "training_mode", "depth_attentions")
    }
    off = [name for name, found in supported.items() if found["save_and_load"].get("difference") != 0]
    saved = "0" + (f" (not {', '.join(off)}, whose base is not the same either)" if off else "")
    text = HEAD.format(
        version=transformers.__version__,
        supported=len(supported),
        refused=len(refused),
        others=len(others),
        fp32=len(supported) - len(exact),
        saved=saved,
        **largest,
    )
    text += "\n".join(row(name, found) for name, found in sorted(supported.items()))
    text += "\n\n## Refused\n\n| type | why |\n|---|---|\n"
    text += "\n".join(f"| {name} | {reason(why)} |" for name, why in sorted(refused.items()))
    text += "\n\n## Not decoders\n\n| type | why |\n|---|---|\n"
    return text + "\n".join(f"| {name} | {why} |" for name, why in sorted(others.items())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(Path(sys.argv[1]).read_text())))
