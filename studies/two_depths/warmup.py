# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The deep models with a longer warmup: is the gain at equal tokens one of a short warmup?

    python -m studies.two_depths.warmup run      # 1.2 hours on one thread; interrupted, it resumes
    python -m studies.two_depths.warmup report   # warmup.md, from the results alone

What is compared, and how, was written down first: studies/two_depths/warmup.protocol.md.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from attnres.utils.files import write_file
from studies.common.arms import Work, prepare
from studies.common.paired import bold_if_certain, corrected_p, in_words
from studies.common.runs import losses_in_words, read_runs, train_missing
from studies.reads.study import RESULTS as READ_STUDY
from studies.two_depths.study import ARMS, RESULTS, SEEDS, STEPS, TUNING_SEEDS, Run, train, with_further_rates


RUNS, TABLE = RESULTS / "warmup_runs.jsonl", RESULTS / "warmup.md"
# Steps, and in two depths
WARMUP, SHORT = 60, STEPS // 20
RATES = {"prenorm": (3.2e-2, 6.4e-2), "blocks": (6.4e-2, 0.128)}
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class WarmRun(Run):
    """A run with so many steps of warmup."""

    warmup_steps: int = WARMUP

    @property
    def name(self) -> str:
        return f"{super().name}-warmup{self.warmup_steps}"


def run_of(arm: str, seed: int, rate: float) -> WarmRun:
    return WarmRun("deep", arm, seed, STEPS, rate)


def chosen_rate(found: dict[WarmRun, dict[str, Any]], arm: str) -> float:
    def mean(rate: float) -> float:
        return statistics.mean(found[run_of(arm, seed, rate)]["tuning_loss"] for seed in TUNING_SEEDS)

    return min(RATES[arm], key=mean)


def next_run(found: dict[WarmRun, dict[str, Any]]) -> WarmRun | None:
    """Seed by seed all rates, and then the best ones with the other seeds; `None` when everything has a result."""
    runs = [run_of(arm, seed, rate) for seed in TUNING_SEEDS for arm, rates in RATES.items() for rate in rates]
    if all(run in found for run in runs):
        runs = [run_of(arm, seed, chosen_rate(found, arm)) for seed in SEEDS for arm in RATES]
    return next((run for run in runs if run not in found), None)


def mean_and_sd(losses: list[float]) -> str:
    return f"{statistics.mean(losses):.3f} ({statistics.stdev(losses):.3f})"


@app.callback()
def main():
    """The deep models with a longer warmup."""


@app.command("run")
def run_all(work: Work = Path("study-work")):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")

    def train_one(run: WarmRun) -> dict[str, Any]:
        return train(run, work, warmup_steps=run.warmup_steps)

    train_missing(next_run, train_one, RUNS, losses_in_words, WarmRun)
    console.print(f"All runs are in {RUNS}; `python -m studies.two_depths.warmup report` makes the table.")


@app.command()
def report():
    """Rewrite warmup.md from the results alone."""
    found, before = read_runs(RUNS, WarmRun), with_further_rates(RESULTS)
    if next_run(found):
        raise typer.BadParameter("Runs are missing: continue with `run`.")

    def losses(arm: str, seeds, rate: float) -> list[float]:
        return [found[run_of(arm, seed, rate)]["judging_loss"] for seed in seeds]

    lines = ["# 24 layers of 48 with a longer warmup", "", "By the [protocol](warmup.protocol.md).", ""]
    lines += [f"| | rate | {SHORT} steps of warmup | {WARMUP} steps | {WARMUP} minus {SHORT}, three seeds |"]
    lines += ["|---|---|---|---|---|"]
    for arm, rates in RATES.items():
        for rate in rates:
            short = [before[Run("deep", arm, seed, STEPS, rate)]["judging_loss"] for seed in TUNING_SEEDS]
            long = losses(arm, TUNING_SEEDS, rate)
            difference = in_words([a - b for a, b in zip(long, short)], 3)
            lines.append(f"| {ARMS[arm]} | {rate:g} | {mean_and_sd(short)} | {mean_and_sd(long)} | {difference} |")
    lines += ["", f"| {WARMUP} steps of warmup | rate | loss, five seeds |", "|---|---|---|"]
    best = {}
    for arm in RATES:
        rate = chosen_rate(found, arm)
        best[arm] = losses(arm, SEEDS, rate)
        lines.append(f"| {ARMS[arm]} | {rate:g} | {mean_and_sd(best[arm])} |")
    differences = [a - b for a, b in zip(best["blocks"], best["prenorm"])]
    p = corrected_p({"blocks": differences})["blocks"]
    by_seed = ", ".join(f"{d:+.3f}" for d in differences)
    mean = bold_if_certain(in_words(differences, 3), p)
    lines += ["", f"6 blocks minus PreNorm: {by_seed}, mean {mean}, p = {p:.3f}."]
    write_file(TABLE, "\n".join(lines) + "\n")
    console.print(f"Wrote {TABLE}", highlight=False)


if __name__ == "__main__":
    app()
