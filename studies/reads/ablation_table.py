# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The paper's table of ablations beside ours, from the runs of the study of reads.

`python -m studies.reads.ablation_table` writes ablations.md and its figure in `studies/reads`.
"""

import statistics
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from rich.console import Console

from attnres.utils.figures import COLOURS, write_figure
from attnres.utils.files import write_file
from studies.common.paired import bold_if_certain, corrected_p, in_words, side
from studies.common.runs import TUNING_SEED, read_runs
from studies.reads.study import (
    ARMS,
    LATER_ARMS,
    OTHER_RATES,
    RESULTS,
    SEEDS_OF_OTHER_RATES,
    read_other_rates,
)


SEEDS = SEEDS_OF_OTHER_RATES
LABELS = ARMS | LATER_ARMS
# Validation loss less PreNorm's 1.766, of 436M parameters (arXiv 2603.15031). What is varied is Full, but for heads
PAPER = {
    "blocks": -0.020,
    "full": -0.029,
    "heads": -0.014,
    "input": -0.035,
    "sigmoid": -0.025,
    "static": -0.017,
    "raw_keys": -0.023,
    "blocks_of_2": -0.020,
    "blocks_of_4": -0.020,
    "blocks_of_8": -0.018,
    "blocks_of_16": -0.013,
    "window": -0.002,
}
console = Console()


def chosen(results: Path) -> dict[str, tuple[float, list[float]]]:
    """By arm, the rate with the lowest mean loss on the tuning windows, and the judging losses of the seeds at it."""
    found = read_other_rates(results)
    missing = [key for key in OTHER_RATES if not found.get(key, {}).keys() >= set(SEEDS)]
    if missing:
        names = ", ".join(f"{arm} at {rate:g}" for arm, rate in missing)
        raise typer.BadParameter(f"Runs are missing, of {names}: `python -m studies.reads.study rates`.")
    for run, result in read_runs(results / "runs.jsonl").items():
        if run.seed != TUNING_SEED:
            found.setdefault((run.arm, run.learning_rate), {})[run.seed] = result
    complete = {key: [of[s] for s in SEEDS] for key, of in found.items() if of.keys() >= set(SEEDS)}
    arms = {}
    for arm in LABELS:
        if arm == "prenorm_double":
            continue
        by_rate = {rate: of for (of_arm, rate), of in complete.items() if of_arm == arm}
        if by_rate:
            rate = min(by_rate, key=lambda rate: statistics.mean(r["tuning_loss"] for r in by_rate[rate]))
            arms[arm] = (rate, [r["judging_loss"] for r in by_rate[rate]])
    return arms


def differences(losses: dict[str, list[float]], baseline: str) -> dict[str, list[float]]:
    others = [arm for arm in losses if arm not in ("prenorm", baseline)]
    return {arm: [a - b for a, b in zip(losses[arm], losses[baseline])] for arm in others}


def cells_of(rows: dict[str, list[float]]) -> dict[str, str]:
    """Mean, interval and corrected p of each row."""
    corrected = corrected_p(rows)
    return {
        arm: f"{bold_if_certain(in_words(of, 3), corrected[arm])} ({corrected[arm]:.2f})" for arm, of in rows.items()
    }


def plot(rows: dict[str, list[float]], stem: Path) -> list[Path]:
    """Our differences with their intervals, and the paper's."""
    order = sorted(rows, key=lambda arm: statistics.mean(rows[arm]), reverse=True)
    figure, axis = plt.subplots(figsize=(8, 0.36 * len(order) + 1.2))
    means = [statistics.mean(rows[arm]) for arm in order]
    sides = [side(rows[arm]) for arm in order]
    axis.errorbar(means, range(len(order)), xerr=sides, fmt="o", color=COLOURS[0], capsize=3, label="ours, 95 %")
    published = [(PAPER[arm], i) for i, arm in enumerate(order) if arm in PAPER]
    axis.scatter(*zip(*published), marker="x", color=COLOURS[6], label="the paper's, 436M parameters", zorder=3)
    axis.axvline(0, color=COLOURS[6], linewidth=0.7)
    axis.set_yticks(range(len(order)), [LABELS[arm] for arm in order])
    axis.set(xlabel="loss less PreNorm's")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="x")
    axis.legend(frameon=False, loc="upper right")
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


def main(results: Annotated[Path, typer.Option(help="Folder of the study of reads.")] = RESULTS):
    """Write the table and its figure."""
    arms = chosen(results)
    losses = {arm: of for arm, (_, of) in arms.items()}
    less_prenorm, less_blocks = (differences(losses, baseline) for baseline in ("prenorm", "blocks"))
    cells = [cells_of(rows) for rows in (less_prenorm, less_blocks)]
    lines = [
        "# The paper's ablations at a small scale",
        "",
        f"By the [protocol](protocol.md) and its deviations, seeds {SEEDS[0]} to {SEEDS[-1]}. In square brackets 95 %"
        " intervals, in round ones p, corrected by Holm over the column. The paper's figures are of its 436M models;"
        " what it varies is Full, but for heads, while ours are 8 blocks of 3 sublayers where nothing else is said."
        f" PreNorm has a loss of {statistics.mean(losses['prenorm']):.3f}, at {arms['prenorm'][0]:g}.",
        "",
        "| | rate | the paper's, less PreNorm | ours, less PreNorm | by seed | ours, less 8 blocks |",
        "|---|---|---|---|---|---|",
    ]
    for arm, of in less_prenorm.items():
        published = f"{PAPER[arm]:+.3f}" if arm in PAPER else ""
        by_seed = ", ".join(f"{d:+.3f}" for d in of)
        row = [LABELS[arm], f"{arms[arm][0]:g}", published, cells[0][arm], by_seed, cells[1].get(arm, "")]
        lines.append(f"| {' | '.join(row)} |")
    write_file(results / "ablations.md", "\n".join(lines) + "\n")
    paths = [results / "ablations.md", *plot(less_prenorm, results / "ablations")]
    console.print(*(f"Wrote {path}" for path in paths), sep="\n", highlight=False)


if __name__ == "__main__":
    typer.run(main)
