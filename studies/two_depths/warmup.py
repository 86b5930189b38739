# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The deep models with a longer warmup: is the gain at equal tokens one of a short warmup? Is it left at equal time?

    python -m studies.two_depths.warmup run       # 1.2 hours on one thread; interrupted, it resumes
    python -m studies.two_depths.warmup further   # 1.7 hours: PreNorm's best rates, equal time, new seeds
    python -m studies.two_depths.warmup report    # warmup.md, from the results alone

What is compared, and how, was written down first: studies/two_depths/warmup.protocol.md.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from attnres.utils.files import write_file
from studies.common.arms import Work, prepare
from studies.common.paired import bold_if_certain, corrected_p, in_words, interpolated
from studies.common.runs import losses_in_words, read_runs, train_missing
from studies.reads.study import RESULTS as READ_STUDY
from studies.two_depths import study as two_depths
from studies.two_depths.equal_time import losses_of_prenorm
from studies.two_depths.study import (
    ARMS,
    RESULTS,
    SEEDS,
    STEPS,
    TUNING_SEEDS,
    Run,
    train,
    with_further_rates,
)


RUNS, TABLE = RESULTS / "warmup_runs.jsonl", RESULTS / "warmup.md"
# Added when PreNorm turned out to be best at 0.128 with a short warmup
FURTHER, KEPT_STREAM = RESULTS / "warmup_further.jsonl", RESULTS.parent / "kept_stream/runs.jsonl"
# Steps, and in two depths
WARMUP, SHORT = 60, STEPS // 20
RATES = {"prenorm": (3.2e-2, 6.4e-2), "blocks": (6.4e-2, 0.128)}
# PreNorm's on one kind of CPU, and their seeds: two that three seeds do not tell apart have five
FURTHER_SEEDS = {0.128: SEEDS, 0.256: TUNING_SEEDS, 6.4e-2: SEEDS}
# PreNorm in the time of 600 compiled steps of 6 blocks: by steps of warmup, 5 % and 10 %, the rates
IN_TIME, RATES_IN_TIME = 695, {35: (0.128,), 70: (6.4e-2, 0.128)}
# They neither chose a rate nor raised the question. PreNorm has this rate and warmup
NEW_SEEDS, RATE_AND_WARMUP = range(5, 10), (0.128, 35)
PARTS = "prenorm", "blocks", "in-time-35", "in-time-70", "new-prenorm", "new-blocks"
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class WarmRun(Run):
    """A run with so many steps of warmup."""

    warmup_steps: int = WARMUP

    @property
    def name(self) -> str:
        return f"{super().name}-warmup{self.warmup_steps}"


def run_of(arm: str, seed: int, rate: float, steps: int = STEPS, warmup: int = WARMUP) -> WarmRun:
    return WarmRun("deep", arm, seed, steps, rate, warmup)


def tuning_means(
    found: dict[WarmRun, dict[str, Any]], arm: str, steps: int = STEPS, warmup: int = WARMUP
) -> dict[float, float]:
    """By the rates that have all seeds that choose."""
    rates = sorted({run.learning_rate for run in found if run.arm == arm})
    runs = {rate: [run_of(arm, seed, rate, steps, warmup) for seed in TUNING_SEEDS] for rate in rates}
    return {
        rate: statistics.mean(found[run]["tuning_loss"] for run in of_rate)
        for rate, of_rate in runs.items()
        if all(run in found for run in of_rate)
    }


def chosen_rate(found: dict[WarmRun, dict[str, Any]], arm: str, steps: int = STEPS, warmup: int = WARMUP) -> float:
    means = tuning_means(found, arm, steps, warmup)
    return min(means, key=means.__getitem__)


def next_run(found: dict[WarmRun, dict[str, Any]]) -> WarmRun | None:
    """Seed by seed all rates, and then the best ones with the other seeds; `None` when everything has a result."""
    runs = [run_of(arm, seed, rate) for seed in TUNING_SEEDS for arm, rates in RATES.items() for rate in rates]
    if all(run in found for run in runs):
        runs = [run_of(arm, seed, chosen_rate(found, arm)) for seed in SEEDS for arm in RATES]
    return next((run for run in runs if run not in found), None)


def next_further(
    first: dict[WarmRun, dict[str, Any]], found: dict[WarmRun, dict[str, Any]], part: str
) -> WarmRun | None:
    """`None` when everything has a result.

    Args:
        part: `prenorm` at its best rates; `blocks`, which are trained again at theirs; PreNorm at equal time with so
            many steps of warmup; or one of the two that are compared with new seeds.
    """
    if part == "blocks":
        runs = [run_of(part, seed, chosen_rate(first, part)) for seed in SEEDS]
    elif part == "prenorm":
        runs = [run_of(part, seed, rate) for rate, seeds in FURTHER_SEEDS.items() for seed in seeds]
    elif part == "new-blocks":
        runs = [run_of("blocks", seed, chosen_rate(first, "blocks")) for seed in NEW_SEEDS]
    elif part == "new-prenorm":
        runs = [in_time(seed, *RATE_AND_WARMUP) for seed in NEW_SEEDS]
    else:
        warmup = int(part.removeprefix("in-time-"))
        runs = [in_time(seed, rate, warmup) for rate in RATES_IN_TIME[warmup] for seed in TUNING_SEEDS]
        if all(run in found for run in runs):
            rate = chosen_rate(found, "prenorm", IN_TIME, warmup)
            runs = [in_time(seed, rate, warmup) for seed in SEEDS]
    return next((run for run in runs if run not in found), None)


def in_time(seed: int, rate: float, warmup: int) -> WarmRun:
    return run_of("prenorm", seed, rate, IN_TIME, warmup)


def mean_and_sd(losses: list[float]) -> str:
    return f"{statistics.mean(losses):.3f} ({statistics.stdev(losses):.3f})"


@app.callback()
def main():
    """The deep models with a longer warmup."""


@app.command("run")
def run_all(work: Work = Path("study-work")):
    """Train what has no result yet, on one thread."""
    train_to(RUNS, work, next_run)


@app.command()
def further(
    work: Work = Path("study-work"),
    part: Annotated[Literal[PARTS] | None, typer.Option(help="Only this one, for two processes.")] = None,
):
    """Train PreNorm at higher rates and at equal time, and 6 blocks at their best rate once more, on the same CPU."""
    first = read_runs(RUNS, WarmRun)
    for one in PARTS if part is None else (part,):
        train_to(FURTHER, work, lambda found, one=one: next_further(first, found, one))


def train_to(path: Path, work: Path, next_one: Callable[[dict[WarmRun, dict[str, Any]]], WarmRun | None]):
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")

    def train_one(run: WarmRun) -> dict[str, Any]:
        return train(run, work, warmup_steps=run.warmup_steps)

    train_missing(next_one, train_one, path, losses_in_words, WarmRun)
    console.print(f"All runs are in {path}; `python -m studies.two_depths.warmup report` makes the table.")


@app.command()
def report():
    """Rewrite warmup.md from the results alone."""
    first, further, before = read_runs(RUNS, WarmRun), read_runs(FURTHER, WarmRun), with_further_rates(RESULTS)
    if next_run(first) or any(next_further(first, further, part) for part in PARTS):
        raise typer.BadParameter("Runs are missing: continue with `run`, then `further`.")
    before |= read_runs(KEPT_STREAM, Run)
    lines = ["# 24 layers of 48 with a longer warmup", "", "By the [protocol](warmup.protocol.md).", ""]
    lines += beside_short_warmup(first, before)
    lines += beside_prenorm(first, chosen_rate(first, "prenorm"))
    lines += ["", "## PreNorm at its best rate", "", "Added later, all on one kind of CPU.", ""]
    of_new_rates = {
        run: result
        for run, result in further.items()
        if run.arm == "prenorm" and run.learning_rate not in RATES["prenorm"]
    }
    lines += beside_short_warmup(of_new_rates, before)
    means = tuning_means(further, "prenorm")
    for rate in sorted((rate for rate in means if FURTHER_SEEDS[rate] == SEEDS), key=means.__getitem__):
        lines += beside_prenorm(further, rate)
    lines += ["", "## Beside PreNorm with another warmup, and with more steps", ""]
    lines += [f"6 blocks with {WARMUP} steps of warmup and {STEPS} steps in all. p is not corrected.", ""]
    lines += ["| PreNorm | warmup | rate | tuning loss | loss, five seeds | 6 blocks minus it | mean [95 %] | p |"]
    lines += ["|---|---|---|---|---|---|---|---|", *beside_others(further, before)]
    lines += ["", beside_eager(further, before | read_runs(RESULTS / "equal_time_runs.jsonl", Run))]
    lines += ["", "## New seeds", "", *with_new_seeds(further)]
    write_file(TABLE, "\n".join(lines) + "\n")
    console.print(f"Wrote {TABLE}", highlight=False)


def judging_losses(found: dict[Any, dict[str, Any]], runs: Iterable[Run]) -> list[float]:
    return [found[run]["judging_loss"] for run in runs]


def beside_short_warmup(found: dict[WarmRun, dict[str, Any]], before: dict[Run, dict[str, Any]]) -> list[str]:
    """A row for each rate of an arm, with the seeds that choose."""
    lines = [f"| | rate | {SHORT} steps of warmup | {WARMUP} steps | {WARMUP} minus {SHORT}, three seeds |"]
    lines += ["|---|---|---|---|---|"]
    for arm in RATES:
        for rate in tuning_means(found, arm):
            short = judging_losses(before, (Run("deep", arm, seed, STEPS, rate) for seed in TUNING_SEEDS))
            long = judging_losses(found, (run_of(arm, seed, rate) for seed in TUNING_SEEDS))
            difference = in_words([a - b for a, b in zip(long, short)], 3)
            lines.append(f"| {ARMS[arm]} | {rate:g} | {mean_and_sd(short)} | {mean_and_sd(long)} | {difference} |")
    return lines


def beside_prenorm(found: dict[WarmRun, dict[str, Any]], rate: float) -> list[str]:
    """6 blocks at their best rate minus PreNorm at a rate, with all seeds."""
    lines = ["", f"| {WARMUP} steps of warmup | rate | loss, five seeds |", "|---|---|---|"]
    losses = {}
    for arm, of_arm in (("prenorm", rate), ("blocks", chosen_rate(found, "blocks"))):
        losses[arm] = judging_losses(found, (run_of(arm, seed, of_arm) for seed in SEEDS))
        lines.append(f"| {ARMS[arm]} | {of_arm:g} | {mean_and_sd(losses[arm])} |")
    by_seed, mean, p = compared(losses["blocks"], losses["prenorm"])
    return [*lines, "", f"6 blocks minus PreNorm: {by_seed}, mean {mean}, p = {p}."]


def compared(losses: list[float], baseline: list[float]) -> tuple[str, str, str]:
    """By seed, the mean with its interval, and p."""
    differences = [a - b for a, b in zip(losses, baseline)]
    p = corrected_p({"": differences})[""]
    by_seed = ", ".join(f"{d:+.3f}" for d in differences)
    return by_seed, bold_if_certain(in_words(differences, 3), p), f"{p:.3f}"


def beside_others(found: dict[WarmRun, dict[str, Any]], before: dict[Run, dict[str, Any]]) -> list[str]:
    """6 blocks minus PreNorm with a short warmup, and minus PreNorm in the time of compiled steps with each warmup."""
    rate = two_depths.chosen_rate(before, "deep", "prenorm")
    others = [(SHORT, before, [Run("deep", "prenorm", seed, STEPS, rate) for seed in SEEDS])]
    for warmup in RATES_IN_TIME:
        rate = chosen_rate(found, "prenorm", IN_TIME, warmup)
        others.append((warmup, found, [in_time(seed, rate, warmup) for seed in SEEDS]))
    of_blocks = judging_losses(found, (run_of("blocks", seed, chosen_rate(found, "blocks")) for seed in SEEDS))
    lines = []
    for warmup, results, runs in others:
        losses = judging_losses(results, runs)
        tuning = statistics.mean(results[run]["tuning_loss"] for run in runs[: len(TUNING_SEEDS)])
        cells = [f"{runs[0].steps} steps", f"{warmup}", f"{runs[0].learning_rate:g}", f"{tuning:.3f}"]
        cells += [mean_and_sd(losses), *compared(of_blocks, losses)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def beside_eager(found: dict[WarmRun, dict[str, Any]], of_prenorm: dict[Run, dict[str, Any]]) -> str:
    """6 blocks minus PreNorm in the time of eager steps, as in `equal_time`."""
    speeds = json.loads((RESULTS / "equal_time_speed.json").read_text())["eager"]["deep"]
    ratio = speeds["blocks"]["ratio_quartiles"][1]
    baseline = interpolated(losses_of_prenorm(of_prenorm, "deep"), STEPS * ratio)
    of_blocks = judging_losses(found, (run_of("blocks", seed, chosen_rate(found, "blocks")) for seed in SEEDS))
    _by_seed, mean, p = compared(of_blocks, baseline)
    return f"Minus PreNorm in the time of eager steps ([equal time](equal_time.md)): {mean}, p = {p}."


def with_new_seeds(found: dict[WarmRun, dict[str, Any]]) -> list[str]:
    """6 blocks minus PreNorm in the time of compiled steps."""
    blocks = judging_losses(found, (run_of("blocks", seed, chosen_rate(found, "blocks")) for seed in NEW_SEEDS))
    prenorm = judging_losses(found, (in_time(seed, *RATE_AND_WARMUP) for seed in NEW_SEEDS))
    by_seed, mean, p = compared(blocks, prenorm)
    arms = f"6 blocks ({mean_and_sd(blocks)}) minus PreNorm for {IN_TIME} steps ({mean_and_sd(prenorm)})"
    return [f"{arms}: {by_seed}, mean {mean}, p = {p}."]


if __name__ == "__main__":
    app()
