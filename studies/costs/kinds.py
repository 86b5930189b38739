# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What the reads cost in decoders of other kinds than Llama's, with random weights in the shape of small models.

    python -m studies.costs.kinds run       # minutes for each kind; interrupted, it goes on
    python -m studies.costs.kinds report    # the table in docs/costs.md

What is measured lies in `studies/costs/kinds`, kind by kind.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.benchmarks.twin import bench, name_of_variant, ratio_cell
from studies.common.pages import put_into_page


RESULTS = Path(__file__).parent / "kinds"
PAGE = Path(__file__).parents[2] / "docs/costs.md"
CASES = {"decode-1-64": "decode a token", "prefill-512": "prefill 512 tokens", "train-256": "a step, 256 tokens"}
VARIANTS = ("8", "full")
WIDTH = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
# By the type of the base: what is different in it, and its shape
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("LayerNorm, learned positions", {}),
    "gpt_neox": ("attention and MLP added at once", {**WIDTH, "intermediate_size": 3072}),
    "gemma3_text": (
        "norms after sublayers as well",
        {
            **{"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1},
            **{"intermediate_size": 2048, "head_dim": 256, "vocab_size": 32768},
        },
    ),
    "qwen3_moe": (
        "16 experts, 4 at a time",
        {
            **{**WIDTH, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 32768},
            **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
        },
    ),
}
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def run(pairs: Annotated[int, typer.Option(min=1, help="Alternating runs of each timing.")] = 7):
    """Measure, on a machine that does nothing else."""
    for model_type, (_, fields) in KINDS.items():
        if (RESULTS / model_type / "bench.json").exists():
            continue
        console.rule(model_type)
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).save_pretrained(folder)
            bench(RESULTS / model_type, model=folder, variants=VARIANTS, cases=tuple(CASES), pairs=pairs)
    report()


@app.command()
def report():
    """Put the table into the page."""
    put_into_page(PAGE, "kinds", table())


def table() -> str:
    lines = [
        f"| base | what is different in it | | {' | '.join(CASES.values())} |",
        "|---|---|---|" + "---|" * len(CASES),
    ]
    for model_type, (what, _) in KINDS.items():
        results = json.loads((RESULTS / model_type / "bench.json").read_text())
        for name in map(name_of_variant, VARIANTS):
            cells = [model_type, what] if name == name_of_variant(VARIANTS[0]) else ["", ""]
            for case in CASES:
                (row,) = (row for row in results["time"] if (row["case"], row["model"]) == (case, name))
                cells.append(ratio_cell(row))
            lines.append(f"| {cells[0]} | {cells[1]} | {name} | {' | '.join(cells[2:])} |")
    of_machine = results["machine"]
    lines += [
        "",
        f"{of_machine['processor']}, {of_machine['threads']} threads, commit {of_machine['commit']},"
        f" {results['settings']['pairs']} pairs.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
