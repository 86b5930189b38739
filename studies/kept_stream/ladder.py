# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Models of three sizes whose reads are added to the residual stream, by the protocol of the ladder.

    python -m studies.kept_stream.ladder run      # an hour on one thread; interrupted, it resumes
    python -m studies.kept_stream.ladder speed    # the time of a training step, on a machine that does nothing else
    python -m studies.kept_stream.ladder report   # ladder.md from the runs

What is compared, and how, was written down first: studies/kept_stream/ladder.protocol.md.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from attnres.training.scaling.fit import PFLOPS_DAY, advantage, fit_law
from attnres.training.scaling.ladder import (
    LADDER_FILE,
    TUNING_SEED,
    Ladder,
    Run,
    carried_rate,
    measure_times,
    read_ladder,
    results_of,
    train,
    tuning_losses,
)
from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.paired import bold_if_certain, corrected_p, in_words
from studies.common.runs import read_runs, train_missing
from studies.scaling.text import RESULTS as LADDER
from studies.scaling.text import main as make_text
from studies.two_depths.study import NOISE


RESULTS = Path(__file__).parent
RUNS, SPEED, TABLE = (RESULTS / f"ladder{end}" for end in ("_runs.jsonl", "_speed.json", ".md"))
ARM, FIELDS = "kept", {"num_blocks": 4, "attn_res_stream": "kept"}
SIZES = ("62k", "116k", "223k")
LABELS = {"prenorm": "PreNorm", "blocks": "4 blocks", ARM: "4 blocks, kept stream"}
Work = Annotated[Path, typer.Option(help="Folder for text and tokenizer.")]
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def ladder_of(work: Path) -> Ladder:
    """That of the study of sizes, with the text in `work`: PreNorm, 4 blocks and the kept stream."""
    ladder = read_ladder(LADDER / "results" / LADDER_FILE)
    arms = {name: ladder.arms[name] for name in ("prenorm", "blocks")} | {ARM: FIELDS}
    paths = {name: str(work / getattr(ladder, name)) for name in ("dataset", "tuning_dataset", "eval_dataset")}
    return replace(ladder, arms=arms, tokenizer=str(work / ladder.tokenizer), **paths)


def earlier_runs() -> dict[Run, dict[str, Any]]:
    return results_of(LADDER / "results") | read_runs(LADDER / "results/other_rates.jsonl", Run)


def next_run(ladder: Ladder, found: dict[Run, dict[str, Any]]) -> Run | None:
    """First the sweep, and then the sizes seed by seed, with PreNorm at the same rate; `None` if nothing is missing.

    Args:
        found: with the runs of the ladder.
    """
    for size in list(ladder.sizes)[: ladder.tuned_sizes]:
        rate = next_rate(tuning_losses(ladder, found, ARM, size), ladder.rates, noise=NOISE)
        if rate is not None:
            return Run(ARM, size, TUNING_SEED, rate)
    for seed in range(ladder.seeds):
        for size in SIZES:
            for arm in (ARM, ladder.baseline):
                run = Run(arm, size, seed, carried_rate(ladder, found, ARM, size))
                if run not in found:
                    return run
    return None


@app.callback()
def main():
    """Models of three sizes whose reads are added to the residual stream."""


@app.command("run")
def run_all(work: Work = Path("scaling-work")):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    if not (work / "tokenizer").exists():
        make_text(work)
    ladder, earlier = ladder_of(work), earlier_runs()

    def next_missing(found: dict[Run, dict[str, Any]]) -> Run | None:
        return next_run(ladder, earlier | found)

    def train_one(run: Run) -> dict[str, Any]:
        return train(ladder, run, work / "runs") | {"machine": machine("cpu")}

    def loss_in_words(result: dict[str, Any]) -> str:
        return f"loss {result['loss']:.4f}, {result['seconds']:.0f} s"

    train_missing(next_missing, train_one, RUNS, loss_in_words, Run)
    console.print(f"All runs are in {RUNS}; `python -m studies.kept_stream.ladder report` makes the table.")


@app.command()
def speed(
    work: Work = Path("scaling-work"),
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 25,
):
    """Time a training step of all arms of a size in turn, on one thread."""
    torch.set_num_threads(1)
    ladder = ladder_of(work)
    times = measure_times(replace(ladder, sizes={size: ladder.sizes[size] for size in SIZES}), pairs)
    write_file(SPEED, json.dumps({"machine": machine("cpu"), "ratios": times}, indent=1) + "\n")
    console.print(times)


def losses_by_rate(found: dict[Run, dict[str, Any]], arm: str, size: str, seeds: int) -> dict[float, list[float]]:
    """Of the compared seeds, by the rates that have all of them."""
    rates = sorted({run.learning_rate for run in found if (run.arm, run.size) == (arm, size) and not run.is_tuning})
    runs = {rate: [Run(arm, size, seed, rate) for seed in range(seeds)] for rate in rates}
    return {rate: [found[run]["loss"] for run in of] for rate, of in runs.items() if all(run in found for run in of)}


def advantages(ladder: Ladder, losses: dict[str, np.ndarray], time: float) -> str:
    """How many times the compute, and the time, of the kept stream PreNorm needs for its loss at the largest size.

    Args:
        losses: by arm, `[seeds, sizes]`.
        time: of a step at the largest size, in steps of PreNorm.
    """
    compute = np.array([ladder.compute_of(size) for size in SIZES]) / PFLOPS_DAY
    laws = [fit_law(compute, losses[arm].mean(axis=0)) for arm in ("prenorm", ARM)]
    return " and ".join(f"{advantage(*laws, compute[-1], of):.2f}" for of in (1.0, time))


@app.command()
def report():
    """Rewrite ladder.md from the runs of this study and of the ladder."""
    ladder, found = ladder_of(Path()), earlier_runs() | read_runs(RUNS, Run)
    if next_run(ladder, found) or not SPEED.exists():
        raise typer.BadParameter("Runs or times are missing: continue with `run` and `speed`.")
    times = json.loads(SPEED.read_text())["ratios"]
    lines = ["# A kept stream over three sizes", "", "By the [protocol](ladder.protocol.md).", ""]
    lines += [f"| loss, mean of {ladder.seeds} seeds, by learning rate | {' | '.join(SIZES)} |"]
    lines += ["|---" * (1 + len(SIZES)) + "|"]
    best: dict[str, np.ndarray] = {}
    for arm, label in LABELS.items():
        by_size = [losses_by_rate(found, arm, size, ladder.seeds) for size in SIZES]
        chosen = [min(of, key=lambda rate: statistics.mean(of[rate])) for of in by_size]
        best[arm] = np.array([of[rate] for of, rate in zip(by_size, chosen)]).T
        cells = [", ".join(f"{r:g}: {statistics.mean(losses):.4f}" for r, losses in of.items()) for of in by_size]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    steps = {arm: " | ".join(f"{times[size][arm]:.2f}" for size in SIZES) for arm in ("blocks", ARM)}
    lines += [f"| a step of {LABELS[arm]}, relative to PreNorm's | {of} |" for arm, of in steps.items()]
    differences = {arm: best[ARM] - best[arm] for arm in ("prenorm", "blocks")}
    corrected = corrected_p({arm: of.mean(axis=1).tolist() for arm, of in differences.items()})
    lines += ["", "| kept stream minus | by seed: 62k, 116k, 223k | mean of the sizes [95 %] | p (Holm) |"]
    lines += ["|---|---|---|---|"]
    for arm, of in differences.items():
        seeds = "; ".join(", ".join(f"{d:+.3f}" for d in row) for row in of)
        mean = bold_if_certain(in_words(of.mean(axis=1).tolist(), 3), corrected[arm])
        lines.append(f"| {LABELS[arm]} | {seeds} | {mean} | {corrected[arm]:.3f} |")
    lines += ["", "For the loss of the kept stream at 223k, PreNorm needs, by the laws through three sizes,"]
    lines += [f"{advantages(ladder, best, times[SIZES[-1]][ARM])} times its compute and its time."]
    for size in list(ladder.sizes)[: ladder.tuned_sizes]:
        losses = tuning_losses(ladder, found, ARM, size)
        lines += ["", f"Sweep at {size}: {', '.join(f'{rate:g}: {loss:.3f}' for rate, loss in losses.items())}."]
    write_file(TABLE, "\n".join(lines) + "\n")
    console.print(f"Wrote {TABLE}", highlight=False)


if __name__ == "__main__":
    app()
