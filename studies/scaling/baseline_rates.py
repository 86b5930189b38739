# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Is what our scaling ladder compares one of rates? PreNorm again, at the learning rates of 4 blocks.

python -m studies.scaling.text scaling-work
cd scaling-work && python -m studies.scaling.baseline_rates ../studies/scaling/results --size 62k --size 116k

It goes on where it was, and its runs are kept in `other_rates.jsonl` beside those of the ladder.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from attnres.training.scaling.ladder import LADDER_FILE, Run, carried_rate, read_ladder, results_of, train
from attnres.utils.files import append_json
from studies.common.runs import read_runs


ARM = "blocks"
console = Console()


def main(
    results: Annotated[Path, typer.Argument(help="Folder of the ladder's runs.")],
    sizes: Annotated[list[str], typer.Option("--size", help="Of the ladder.")],
):
    """Train and compare, seed by seed."""
    torch.set_num_threads(1)
    ladder, found = read_ladder(results / LADDER_FILE), results_of(results)
    for size in sizes:
        if size not in ladder.sizes or ARM not in ladder.arms:
            raise typer.BadParameter(
                f"The ladder in {results} has the sizes {', '.join(ladder.sizes)} and the arms"
                f" {', '.join(ladder.arms)}; this needs {size} and {ARM}."
            )
    own = {(run.arm, run.size, run.seed): result["loss"] for run, result in found.items()}
    for size in sizes:
        for seed in range(ladder.seeds):
            run = Run(ladder.baseline, size, seed, carried_rate(ladder, found, ARM, size))
            path = results / "other_rates.jsonl"
            if run not in read_runs(path, Run):
                append_json(path, train(ladder, run, results / "other_rates_work"))
            loss = read_runs(path, Run)[run]["loss"]
            at_own_rate, of_arm = own[ladder.baseline, size, seed], own[ARM, size, seed]
            console.print(
                f"{run.name}: {loss:.3f} at {run.learning_rate:g}, {at_own_rate:.3f} at its own; {ARM} {of_arm:.3f}",
                highlight=False,
            )


if __name__ == "__main__":
    typer.run(main)
