# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Small models from scratch whose reads are added to the residual stream, by the protocol of two depths.

    python -m studies.kept_stream.study run      # hours on one thread; interrupted, it resumes

What is compared, and how, was written down first: studies/kept_stream/protocol.md.
"""

from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from attnres.training.scaling.sweep import next_rate
from studies.common.arms import Results, Work, prepare
from studies.common.runs import losses_in_words, train_missing
from studies.reads.study import RESULTS as READ_STUDY
from studies.two_depths.study import (
    DEPTHS,
    NOISE,
    RATES,
    SEEDS,
    STEPS,
    TUNING_SEEDS,
    Run,
    train,
    tuning_means,
    with_further_rates,
)
from studies.two_depths.study import RESULTS as TWO_DEPTHS


RESULTS = Path(__file__).parent
# Added by this study, and those of two depths
FIELDS: dict[str, dict[str, Any]] = {
    "kept": {"num_blocks": 6, "attn_res_stream": "kept"},
    "kept_full": {"block_size": 1, "attn_res_stream": "kept"},
    "heads": {"num_blocks": 6, "attn_res_num_heads": 4},
    "kept_heads": {"num_blocks": 6, "attn_res_stream": "kept", "attn_res_num_heads": 4},
    "heads_full": {"block_size": 1, "attn_res_num_heads": 4},
    "kept_heads_full": {"block_size": 1, "attn_res_stream": "kept", "attn_res_num_heads": 4},
    "blocks": {"num_blocks": 6},
    "full": {"block_size": 1},
}
ARMS = (*FIELDS, "prenorm")
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """Arm by arm its sweep, and then its best rate with all seeds; `None` when everything has a result."""
    for depth in DEPTHS:
        for arm in ARMS:
            means = tuning_means(found, depth, arm, STEPS)
            rate = next_rate(means, RATES, noise=NOISE)
            seeds = SEEDS if rate is None else TUNING_SEEDS
            rate = rate or min(means, key=means.__getitem__)
            runs = [Run(depth, arm, seed, STEPS, rate) for seed in seeds]
            missing = [run for run in runs if run not in found]
            if missing:
                return missing[0]
    return None


@app.callback()
def main():
    """Small models from scratch whose reads are added to the residual stream."""


@app.command("run")
def run_all(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")

    def next_missing(found: dict[Run, dict[str, Any]]) -> Run | None:
        return next_run(with_further_rates(TWO_DEPTHS) | found)

    def train_one(run: Run) -> dict[str, Any]:
        return train(run, work, FIELDS)

    train_missing(next_missing, train_one, results / "runs.jsonl", losses_in_words, Run)
    console.print(f"All runs are in {results / 'runs.jsonl'}.")


if __name__ == "__main__":
    app()
