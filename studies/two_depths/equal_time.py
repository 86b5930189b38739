# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The two depths at equal time, with the steps of reads in two phases.

    python -m studies.two_depths.equal_time speed    # seconds per training step, on a machine that does nothing else
    python -m studies.two_depths.equal_time run      # 2 hours on one thread; interrupted, it resumes
    python -m studies.two_depths.equal_time report   # equal_time.md, from the results alone

What is compared, and how, was written down first: studies/two_depths/equal_time.protocol.md.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.arms import Work, prepare
from studies.common.paired import bold_if_certain, corrected_p, in_words, interpolated
from studies.common.runs import losses_in_words, read_runs, train_missing
from studies.common.steps import ratio_in_words, time_steps, training_step
from studies.reads.study import RESULTS as READ_STUDY
from studies.two_depths.study import (
    ARMS,
    DEPTHS,
    FIELDS,
    IN_TIME,
    NOISE,
    RESULTS,
    SEEDS,
    STEPS,
    TUNING_SEEDS,
    Run,
    chosen_rate,
    finals_of,
    label_of,
    losses_by_rate,
    make_model,
    of_seeds,
    rates_in_words,
    train,
    tuning_means,
    with_further_rates,
)


RUNS, SPEED, TABLE = (RESULTS / f"equal_time{end}" for end in ("_runs.jsonl", "_speed.json", ".md"))
# What PreNorm does in the time of 600 steps of 6 blocks, eager and compiled, and its rates. The sweep of the time that
# they took before reads in two phases is continued
LENGTHS, RATES = (757, 695), (8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """By length the sweep, and then the best rate with all seeds; `None` when everything has a result."""
    for steps in (*LENGTHS, IN_TIME):
        means = tuning_means(found, "deep", "prenorm", steps)
        rate = next_rate(means, RATES, noise=NOISE)
        seeds = SEEDS if rate is None else TUNING_SEEDS
        rate = rate or min(means, key=means.__getitem__)
        for seed in seeds:
            run = Run("deep", "prenorm", seed, steps, rate)
            if run not in found:
                return run
    return None


@app.command("run")
def run_all(work: Work = Path("study-work")):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")
    planned = with_further_rates(RESULTS)
    train_missing(lambda own: next_run(planned | own), lambda run: train(run, work), RUNS, losses_in_words, Run)
    console.print(f"All runs are in {RUNS}; `python -m studies.two_depths.equal_time report` makes the table.")


@app.command()
def speed(
    mode: Annotated[
        Literal["eager", "compiled"], typer.Option(help="Compiling takes minutes for each model.")
    ] = "eager",
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 75,
):
    """Time a training step of all arms of a depth in turn, in one process on one thread."""
    torch.set_num_threads(1)
    figures = json.loads(SPEED.read_text()) if SPEED.exists() else {}
    figures[mode] = {"machine": machine("cpu")}
    for depth in DEPTHS:
        models = {arm: make_model(depth, arm, 0).train() for arm in ARMS}
        if mode == "compiled":
            models = {arm: torch.compile(model, fullgraph=True) for arm, model in models.items()}
        steps = {arm: training_step(model) for arm, model in models.items()}
        figures[mode][depth] = time_steps(steps, pairs, f"{label_of(depth)}, {mode}")
        write_file(SPEED, json.dumps(figures, indent=1) + "\n")
    console.print(figures[mode])


def losses_of_prenorm(found: dict[Run, dict[str, Any]], depth: str) -> dict[int, list[float]]:
    """By number of steps, the judging losses of the seeds at the best rate of that length."""
    if depth == "wide":
        finals = finals_of(found, depth)
        return {STEPS: finals["prenorm"], 2 * STEPS: finals["double"]}
    rates = {steps: chosen_rate(found, depth, "prenorm", steps) for steps in sorted({STEPS, *LENGTHS, IN_TIME})}
    return {steps: of_seeds(found, depth, "prenorm", steps, rate) for steps, rate in rates.items()}


def comparisons(planned: dict, found: dict, speeds: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """By depth and arm, its loss minus PreNorm's at equal time, of each seed.

    Args:
        planned: the runs of the protocol of two depths, which chose the rates of AttnRes.
        found: these and all others.
        speeds: of one mode.
    """
    rows = {}
    for depth in (depth for depth in DEPTHS if depth in speeds):
        by_steps = losses_of_prenorm(found if depth == "deep" else planned, depth)
        finals = finals_of(planned, depth)
        for arm in FIELDS:
            baseline = interpolated(by_steps, STEPS * speeds[depth][arm]["ratio_quartiles"][1])
            rows[depth, arm] = [loss - other for loss, other in zip(finals[arm], baseline)]
    return rows


@app.command()
def report():
    """Rewrite equal_time.md from the results alone."""
    planned = read_runs(RESULTS / "runs.jsonl", Run)
    found = with_further_rates(RESULTS) | read_runs(RUNS, Run)
    if next_run(found) or not SPEED.exists():
        raise typer.BadParameter("Runs or times are missing: continue with `run` and `speed`.")
    speeds = json.loads(SPEED.read_text())
    rows = {mode: comparisons(planned, found, of_mode) for mode, of_mode in speeds.items()}
    corrected = {"eager": corrected_p(rows["eager"])}
    corrected["compiled"] = corrected_p({(mode, *key): d for mode in rows for key, d in rows[mode].items()})
    lines = ["# Two depths at equal time, with reads in two phases", "", "By the [protocol](equal_time.protocol.md)."]
    lines += [
        "",
        "| | | mode | time of a step (quartiles) | minus PreNorm at equal time, by seed | mean [95 %] | p (Holm) |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for mode, of_mode in rows.items():
        for (depth, arm), differences in of_mode.items():
            p = corrected[mode][(depth, arm) if mode == "eager" else (mode, depth, arm)]
            cells = [label_of(depth), ARMS[arm], mode, ratio_in_words(speeds[mode][depth][arm])]
            cells += [", ".join(f"{d:+.3f}" for d in differences)]
            cells += [bold_if_certain(in_words(differences, 3), p), f"{p:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| PreNorm, 24 layers of 48 | by learning rate, three seeds | at the one in bold, five seeds |"]
    lines += ["|---|---|---|"]
    for steps, losses in losses_of_prenorm(found, "deep").items():
        of_rates = losses_by_rate(found, "deep", "prenorm", "judging_loss", steps)
        in_bold = rates_in_words(of_rates, chosen_rate(found, "deep", "prenorm", steps))
        lines.append(f"| {steps} steps | {in_bold} | {statistics.mean(losses):.3f} ({statistics.stdev(losses):.3f}) |")
    write_file(TABLE, "\n".join(lines) + "\n")
    console.print(f"Wrote {TABLE}", highlight=False)


if __name__ == "__main__":
    app()
