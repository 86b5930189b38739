# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What the reads cost in models that `torch.compile` has compiled as one graph.

    python -m studies.costs.compiled run       # minutes for each base; interrupted, it resumes
    python -m studies.costs.compiled report    # the table in docs/costs.md

What was measured is in `studies/costs/compiled.json`.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import AutoConfig

from attnres.benchmarks.twin import TWIN, Case, make_models, make_twin, name_of_variant, ratio_cell, record_of, work
from attnres.utils.files import write_file
from attnres.utils.timing import alternate, keep_freed_memory, machine
from studies.common.pages import put_into_page


RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs/costs.md"
CASES = {"train-256": "a step, 256 tokens", "prefill-512": "prefill 512 tokens"}
VARIANTS = ("4", "full")
SHAPE = {
    **{"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024},
    **{"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# Fields of the base's config in addition to the shape
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {
        **{"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 256},
    },
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 64},
    "gpt_neox": {},
}
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def measure(base: str, case: str, pairs: int) -> dict[str, Any]:
    """Compile time and number of graphs of each model, and ratios to the twin, eager and compiled."""
    torch.manual_seed(0)
    models = make_models(
        make_twin(AutoConfig.for_model(base, **SHAPE, **BASES[base]), torch.float32, "cpu"), list(VARIANTS), "cpu"
    )
    shared = torch.optim.AdamW(models[TWIN].parameters(), lr=1e-5)
    measured: dict[str, Any] = {"base": base, "case": case, "compile": {}, "time": []}
    torch._dynamo.reset()
    with fresh_cache():
        calls: dict[str, list] = {"compiled": []}
        for name, model in models.items():
            counters.clear()
            call = work(Case.parse(case), model, shared, "cpu", compiled=True)
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            measured["compile"][name] = {"seconds": seconds, "graphs": counters["stats"]["unique_graphs"]}
            calls["compiled"].append(call)
        calls["eager"] = [work(Case.parse(case), model, shared, "cpu", compiled=False) for model in models.values()]
        for mode, of_mode in calls.items():
            seconds = alternate(of_mode, pairs, f"{base}, {case}, {mode}")
            measured["time"] += [
                record_of(case, mode, name, seconds[:, i], seconds[:, 0]) for i, name in enumerate(models)
            ]
    return measured


@app.command()
def run(pairs: Annotated[int, typer.Option(min=1, help="Alternating runs of each timing.")] = 15):
    """Measure, on a machine that does nothing else."""
    keep_freed_memory()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machine": machine("cpu"), "measured": []}
    done = {(measured["base"], measured["case"]) for measured in found["measured"]}
    for base in BASES:
        for case in CASES:
            if (base, case) not in done:
                found["measured"].append({**measure(base, case, pairs), "pairs": pairs})
                write_file(RESULTS, json.dumps(found, indent=1) + "\n")
    report()


@app.command()
def report():
    """Put the table into the page."""
    put_into_page(PAGE, "compiled", table())


def table() -> str:
    found = json.loads(RESULTS.read_text())
    lines = [
        "| base | | | compiled | eager | seconds to compile, twin's | graphs |",
        "|---|---|---|---|---|---|---|",
    ]
    for measured in found["measured"]:
        for name in map(name_of_variant, VARIANTS):
            first = name == name_of_variant(VARIANTS[0])
            cells = [measured["base"], CASES[measured["case"]]] if first else ["", ""]
            for mode in ("compiled", "eager"):
                (row,) = (r for r in measured["time"] if (r["mode"], r["model"]) == (mode, name))
                cells.append(ratio_cell(row))
            own, twin = measured["compile"][name], measured["compile"][TWIN]
            lines.append(
                f"| {cells[0]} | {cells[1]} | {name} | {cells[2]} | {cells[3]}"
                f" | {own['seconds']:.0f}, {twin['seconds']:.0f} | {own['graphs']} |"
            )
    of_machine, pairs = found["machine"], found["measured"][0]["pairs"]
    lines += [
        "",
        f"{of_machine['processor']}, {of_machine['threads']} threads, commit {of_machine['commit']}, {pairs} pairs.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
