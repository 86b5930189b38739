# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A real pretrained model trained further with a read that is added to the residual stream.

    python -m studies.kept_stream.retrofit run      # about two hours on one thread; interrupted, it resumes
    python -m studies.kept_stream.retrofit speed    # seconds per training step, alternating, in one process
    python -m studies.kept_stream.retrofit report   # retrofit.md from the runs

What is compared, and how, was written down first: studies/kept_stream/retrofit.protocol.md.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from attnres.conversion import convert
from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import write_file
from studies.common.paired import bold_if_certain, corrected_p, in_words
from studies.common.runs import SEEDS, TUNING_SEED, Run, finished_seeds, read_runs, train_missing
from studies.retrofit.study import ARMS as EARLIER_ARMS
from studies.retrofit.study import (
    METRICS,
    STEPS,
    differences,
    differences_tables,
    figures_in_words,
    grid,
    means_table,
    prepare,
    sweeps_table,
    time_pairs,
    train,
    tuning_losses,
)
from studies.retrofit.study import RESULTS as RETROFIT


RESULTS = Path(__file__).parent
RUNS, SPEED = RESULTS / "retrofit_runs.jsonl", RESULTS / "retrofit_speed.json"
# Losses of a sweep that differ by less do not tell rates apart: five seeds of the earlier study are 0.013 apart (SD)
NOISE = 0.01
ARMS = {
    "full_kept": "all weights, kept stream",
    "lora_kept": "LoRA and queries, kept stream",
    "queries_kept": "queries alone, kept stream",
}
COMPARED = (
    ("full_kept", "full_prenorm"),
    ("lora_kept", "lora_prenorm"),
    ("queries_kept", "base"),
    ("full_kept", "full"),
    ("lora_kept", "lora"),
    ("queries_kept", "queries"),
)
# The paper's read, whose steps take another time since that study
TIMED_AGAIN = (("full", "full_prenorm"), ("lora", "lora_prenorm"))
Work = Annotated[Path, typer.Option(help="Folder for models and windows.")]
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """First all sweeps, and then all arms seed by seed; `None` when everything has a result."""
    rates = {}
    for arm in ARMS:
        losses = tuning_losses(found, arm)
        rate = next_rate(losses, grid(arm), factor=3.0, noise=NOISE)
        if rate is not None:
            return Run(arm, TUNING_SEED, STEPS, rate)
        rates[arm] = min(losses, key=losses.__getitem__)
    runs = (Run(arm, seed, STEPS, rates[arm]) for seed in SEEDS for arm in ARMS)
    return next((run for run in runs if run not in found), None)


def prepare_kept(work: Path):
    """The models and windows of the earlier study, and the converted model with a stream that is kept."""
    prepare(work, RETROFIT)
    if not (work / "kept").exists():
        convert(work / "attnres", work / "kept", stream="kept")


@app.callback()
def main():
    """A real pretrained model trained further with a read that is added to the residual stream."""


@app.command("run")
def run_all(work: Work = Path("retrofit-work")):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare_kept(work)
    train_missing(next_run, lambda run: train(run, work), RUNS, figures_in_words)
    console.print(f"All runs are in {RUNS}; `python -m studies.kept_stream.retrofit report` makes the table.")


@app.command()
def speed(
    work: Work = Path("retrofit-work"),
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 7,
):
    """Time a training step of the arms that are compared at equal time, and of the paper's read, on one thread."""
    torch.set_num_threads(1)
    prepare_kept(work)
    arms = [(f"{kind}_prenorm", f"{kind}{read}") for kind in ("full", "lora") for read in ("", "_kept")]
    figures = time_pairs(arms, work, pairs)
    write_file(SPEED, json.dumps(figures, indent=1) + "\n")
    console.print(figures)


@app.command()
def report():
    """Rewrite retrofit.md from the runs of this study and of the earlier one."""
    found = read_runs(RUNS)
    finals, seeds = finished_seeds(read_runs(RETROFIT / "runs.jsonl") | found, ARMS, SEEDS)
    speeds = json.loads(SPEED.read_text()) if SPEED.exists() else {}
    labels = EARLIER_ARMS | ARMS
    shown = [arm for arm in labels if arm in ARMS or any(arm == other for _, other in COMPARED)]
    lines = [
        "# A real model trained further, with a stream that is kept",
        "",
        f"By the [protocol](retrofit.protocol.md), seeds {seeds[0]} to {seeds[-1]}.",
        "",
        *means_table(finals, seeds, {arm: labels[arm] for arm in shown}),
        *differences_tables(differences(finals, seeds, speeds, COMPARED), labels),
        *sweeps_table(found, ARMS),
        *timed_again_table(differences(finals, seeds, speeds, TIMED_AGAIN), labels),
    ]
    write_file(RESULTS / "retrofit.md", "\n".join(lines) + "\n")
    console.print(f"Wrote {RESULTS / 'retrofit.md'}", highlight=False)


def timed_again_table(rows: dict[tuple[str, str, str, str], list[float]], labels: dict[str, str]) -> list[str]:
    """Lines of Markdown: the differences at equal time by metric and arm, corrected among themselves."""
    rows = {key: values for key, values in rows.items() if key[3] == "equal time"}
    if not rows:
        return []
    corrected = corrected_p(rows)
    lines = ["", "## The paper's read at equal time, with its steps timed again", ""]
    lines += ["| | | less | mean [95 %] | p (Holm) |", "|---|---|---|---|---|"]
    for key, values in rows.items():
        metric, arm, other, _ = key
        mean = bold_if_certain(in_words(values, 4), corrected[key])
        lines.append(f"| {METRICS[metric]} | {labels[arm]} | {labels[other]} | {mean} | {corrected[key]:.3f} |")
    return lines


if __name__ == "__main__":
    app()
