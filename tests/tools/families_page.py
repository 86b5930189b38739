# SPDX-License-Identifier: Apache-2.0
"""`base/families.json` and `docs/families.md`, from what was measured.

    python tests/tools/families_page.py [--survey A.json] [--commands B.json] [--vllm C.json]
        [--tensor-parallel D.json]

The files are those of `family_survey.py`, `family_commands.py`, `vllm_greedy.py --survey` and
`family_tensor_parallel.py`. What is not given stays as it was recorded, also of types that are not in a file.
"""

import argparse
import json
import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))


import transformers
from decoder_configs import NOT_DECODERS


ROOT = Path(__file__).parents[2]
PAGE, RECORD = ROOT / "docs/families.md", ROOT / "base/families.json"
HEAD = """# Which decoders can be a base

Of the model types for which transformers {version} has a causal language model, {supported} are supported,
{refused} are refused, and {others} are not decoders. `attnres families` shows the same list, and
[encoders](encoders.md). For any other checkpoint, run `attnres families --probe FOLDER_OR_ID`: it says whether the
checkpoint can be a base, and where its code reads and writes the residual stream.

Every type was measured with a tiny model with random weights, in fp64 where the type supports it ({fp32} do not), with
blocks of 1, 2 and 3 sublayers (`python tests/tools/family_survey.py A.json`, then
`python tests/tools/families_page.py --survey A.json`, on x86-64 CPUs). The survey did not record its commits; its
results were committed in f5d6141 to 67bd34d, type by type. The table shows the largest relative difference of logits
over all supported types in fp64:

| | largest difference |
|---|---|
| queries of zero, compared with the base | {zero_queries} |
| random queries, compared with the definition | {random_queries} |
| training, compared with inference | {training_mode} |
| weights over depth, compared with the definition | {depth_attentions} |
| a model that was saved and loaded again | {saved} |

`attnres convert` works for {converted}, and the result computes the same as the base. `attnres revert` restores the
base's weights byte for byte.

The definition (`tests/helpers/literal_definition.py`) follows the operations that the base's own code computes. It
shares no code with the package, but it makes the same assumptions about what writes to the residual stream and what
reads it.

## Supported

| column | what it says |
|---|---|
| additions | how many times each layer adds to the residual stream |
| zero queries, random queries | the difference from the base and from the definition, as above |
| cached | the difference between generation with the KV cache and one pass without it, for the AttnRes model and for \
its base |
| padded | the difference between a prompt with padding before it and the prompt alone, for both |
| packing | whether the model keeps documents in one row apart, so that `attnres finetune` can pack them |
| compile | whether `torch.compile(fullgraph=True)` captures the model as one graph |
| TP, checkpointing, engines | what the base declares: tensor parallelism, gradient checkpointing, and attention that \
serving engines such as vLLM can replace |

Where *cached* or *padded* differ by more than rounding, the base does so as well.

| type | additions | zero queries | random queries | cached: AttnRes | base | padded: AttnRes | base | KV cache | \
packing | compile | TP | checkpointing | engines |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
COMMANDS_HEAD = """

## Through the commands and in vLLM

A tiny checkpoint of each type, with random weights, was run in three ways:

- through the commands (`python tests/tools/family_commands.py B.json`);
- through vLLM, if engines can replace the attention of the base (`python tests/tools/vllm_greedy.py --survey C.json`,
  vLLM 0.32.0 on a CPU, transformers 5.19, eager, fp32, random queries);
- through `attnres pretrain` with tensor parallelism in two processes, if transformers has a plan for the base
  (`python tests/tools/family_tensor_parallel.py D.json`). `tp_size` is refused for types whose gradients are wrong,
  even if only in an older version: those of lfm2, lfm3, phimoe and seed_oss are right in 5.24, but not in 5.23.

| column | what it says |
|---|---|
| evaluation | `attnres eval` gives the converted model and the base the same scores |
| fine-tuning | in two steps of `attnres finetune` with `mode: lora`, losses are finite and the queries change |
| inspection | the weights that `attnres inspect` measures sum to one |
| Kimi's naming | after `attnres export` and `attnres import`, logits are the same (fla only has llama, mistral, \
qwen2 and qwen3) |
| vLLM | the difference of log-probabilities from those of transformers, if every greedy token is also transformers' \
likeliest one (random, large queries and weights amplify rounding more than trained ones) |
| TP gradients | the largest relative difference of a gradient from that of one process (1e-7 if the base computes in \
fp32) |

| type | evaluation | fine-tuning | inspection | Kimi's naming | vLLM | TP gradients |
|---|---|---|---|---|---|---|
"""
COMMANDS = ("evaluation", "fine-tuning", "inspection", "exchange, kimi")
FLAGS = {
    "tp": "tp_plan",
    "checkpointing": "checkpointing",
    "engines": "attention_backend",
}
SECTIONS = ("supported", "refused", "others")
ERRORS = ("zero_queries", "random_queries", "training_mode", "depth_attentions")


def record(results: dict) -> dict:
    """What is kept of the results of the survey."""
    supported, refused, others = {}, {}, dict(NOT_DECODERS)
    for name, found in sorted(results.items()):
        if "error" in found:
            others[name] = found["error"]
        elif "refused" in found:
            refused[name] = reason(found["refused"])
        else:
            converted, is_fp64 = found.get("conversion", {}), found["flags"]["dtype"] == "torch.float64"
            supported[name] = {
                "additions": sorted(set(found["sublayers"])),
                **{key: rounded(found[key]) for key in ERRORS},
                "cached": [rounded(found["generation"].get(key)) for key in ("attnres", "base")],
                "padded": [rounded(found["padding"].get(key)) for key in ("attnres", "base")],
                "converted": converted.get("equal") is converted.get("same_weights") is True,
                "saved": found["save_and_load"].get("difference", 1.0) < (1e-12 if is_fp64 else 1e-5),
                "kv_cache": found["kv_cache"],
                "packing": found["packing"].get("reason", "") is None,
                "compile": isinstance(found.get("compile", {}).get("attnres"), float),
                "fp64": is_fp64,
                **{key: found["flags"][flag] for key, flag in FLAGS.items()},
            }
    return {
        "transformers": transformers.__version__,
        "supported": supported,
        "refused": refused,
        "others": dict(sorted(others.items())),
    }


def record_commands(supported: dict, results: dict):
    """Add what `family_commands.py` found of the types: by command, `None` if it works, or why not."""
    for name, found in results.items():
        supported[name]["commands"] = {
            command: sentence(name, found.get("made", found.get(command))) for command in COMMANDS
        }


def record_vllm(supported: dict, results: dict):
    """Add what vLLM computes of the types: how far log-probabilities are off, or why there are none."""
    for name, found in results.items():
        if found.get("made") == f"KeyError: '{name}'":
            supported[name]["vllm"] = "transformers 5.19, which vLLM has, does not know the type"
        if "made" in found:  # otherwise there is no tiny model with a size of heads that vLLM has
            continue
        ours, base = found[f"attnres-{name}"], found.get(name)
        if isinstance(ours, dict) and ours["equal"] == ours["total"]:
            supported[name]["vllm"] = rounded(ours["difference"])
        elif isinstance(ours, dict):
            supported[name]["vllm"] = f"{ours['total'] - ours['equal']} of {ours['total']} tokens are others" + (
                f"; of the base {base['total'] - base['equal']}" if isinstance(base, dict) else "; the base fails"
            )
        else:
            fails_as_well = "" if isinstance(base, dict) else " (as with the base itself)"
            supported[name]["vllm"] = sentence(name, ours) + fails_as_well


def record_tensor_parallel(supported: dict, results: dict):
    """Add how far gradients over two processes are off, or why they are not right."""
    for name, found in results.items():
        if isinstance(found, float) and found > 1e-5:
            found = "gradients over several processes differ from those of one"
        elif isinstance(found, str):
            found = "its model does not run over several processes: " + sentence(name, found)
        supported[name]["tp_training"] = rounded(found) or found


def sentence(name: str, error: str | None) -> str | None:
    """An error in words that fit other types as well: without its class, the path, the name, and numbers of layers."""
    if error is None:
        return None
    text = re.sub(r"^(\w+Error: )?(`/random` )?", "", error).split(". The available")[0]
    text = re.sub(rf"(base )?`({re.escape(name)}|gpt2)`", "the base", text)
    text = re.sub(r"^(Layer \d+).* does not dispatch", r"A layer does not dispatch", text)
    text = re.sub(r"model\.h\.\d.*", "model.h ...", text)
    if "validation error for ModelConfig" in text:
        return "transformers 5.19 refuses the config of the base that transformers itself wrote"
    return "the engine ends without an error message" if "<unknown>" in text or text == "AssertionError" else text


def rounded(value):
    return float(f"{value:.0e}") if isinstance(value, float) else None


def reason(text: str) -> str:
    """The sentence of an error, without its beginning and where it was raised."""
    return re.sub(r"^\w+: `base_model_type='[^']*'` is not supported: |\.? \([\w.]+:\d+[^()]*\)$", "", text)


def row(name: str, found: dict) -> str:
    cells = [
        name + ("" if found["fp64"] else " (fp32)"),
        ", ".join(map(str, found["additions"])),
        *(number(found[key]) for key in ("zero_queries", "random_queries")),
        *(number(value) for key in ("cached", "padded") for value in found[key]),
        str(found["kv_cache"] or "none"),
        *("yes" if found[key] else "no" for key in ("packing", "compile", *FLAGS)),
    ]
    return "| " + " | ".join(cells) + " |"


def command_rows(supported: dict) -> str:
    """A row for each type; what does not work has a number, and its reason is below the table."""
    reasons: list[str] = []

    def cell(value) -> str:
        if value is None:
            return "yes"
        if isinstance(value, float):
            return number(value)
        if value not in reasons:
            reasons.append(value)
        return f"no ({reasons.index(value) + 1})"

    rows = []
    for name, found in supported.items():
        if "commands" in found:
            cells = [cell(found["commands"][command]) for command in COMMANDS]
            cells.append(cell(found["vllm"]) if "vllm" in found else "not tried" if found["engines"] else "no engine")
            cells.append(cell(found["tp_training"]) if found["tp"] else "no plan")
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n\n" + "\n".join(f"{place}. {why}" for place, why in enumerate(reasons, 1))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def page(recorded: dict) -> str:
    supported, refused, others = (recorded[key] for key in SECTIONS)
    exact = [found for found in supported.values() if found["fp64"]]
    off = [name for name, found in supported.items() if not found["saved"]]
    not_converted = [name for name, found in supported.items() if not found["converted"]]
    text = HEAD.format(
        version=recorded["transformers"],
        supported=len(supported),
        refused=len(refused),
        others=len(others),
        fp32=len(supported) - len(exact),
        converted="each type" + (f" but {', '.join(not_converted)}" if not_converted else ""),
        saved="rounding" + (f", except for {', '.join(off)}, where the base differs as well" if off else ""),
        **{key: number(max(found[key] for found in exact if found[key] is not None)) for key in ERRORS},
    )
    text += "\n".join(row(name, found) for name, found in supported.items())
    text += COMMANDS_HEAD + command_rows(supported)
    for title, reasons in (("Refused", refused), ("Not decoders", others)):
        text += f"\n\n## {title}\n\n| type | why |\n|---|---|\n"
        text += "\n".join(f"| {name} | {why.replace('|', chr(92) + '|')} |" for name, why in reasons.items())
    return text + "\n"


def a_line_for_each_type(recorded: dict) -> str:
    sections = [f'"transformers": "{recorded["transformers"]}"']
    for name in SECTIONS:
        types = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in recorded[name].items()]
        sections.append(f'"{name}": {{\n' + ",\n".join(types) + "\n }")
    return "{\n " + ",\n ".join(sections) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("survey", "commands", "vllm", "tensor-parallel"):
        parser.add_argument(f"--{name}", type=lambda path: json.loads(Path(path).read_text()), default={})
    given = parser.parse_args()
    recorded = json.loads(RECORD.read_text())
    if given.survey:
        surveyed = record(given.survey)
        recorded["transformers"] = surveyed["transformers"]
        for name, found in surveyed["supported"].items():
            before = recorded["supported"].get(name, {})
            found |= {key: before[key] for key in ("commands", "vllm", "tp_training") if key in before}
        for section in SECTIONS:  # in which a type may not be where it was
            kept = {name: found for name, found in recorded[section].items() if name not in given.survey}
            recorded[section] = dict(sorted({**kept, **surveyed[section]}.items()))
    record_commands(recorded["supported"], given.commands)
    record_vllm(recorded["supported"], given.vllm)
    record_tensor_parallel(recorded["supported"], given.tensor_parallel)
    RECORD.write_text(a_line_for_each_type(recorded))
    PAGE.write_text(page(recorded))


if __name__ == "__main__":
    main()
