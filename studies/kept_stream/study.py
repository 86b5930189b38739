# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Small models from scratch whose reads are added to the residual stream, by the protocol of two depths.

    python -m studies.kept_stream.study run      # hours on one thread; interrupted, it resumes
    python -m studies.kept_stream.study again    # 6 blocks with 24 layers once more, on the CPU of PreNorm's runs
    python -m studies.kept_stream.study speed    # the time of a training step, on a machine that does nothing else
    python -m studies.kept_stream.study report   # table.md, of the arms that have all their runs

What is compared, and how, was written down first: studies/kept_stream/protocol.md.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.arms import Results, Work, prepare
from studies.common.paired import bold_if_certain, corrected_p, in_words, interpolated
from studies.common.runs import losses_in_words, read_runs, train_missing
from studies.common.steps import ratio_in_words, time_steps, training_step
from studies.reads.study import RESULTS as READ_STUDY
from studies.two_depths.equal_time import RUNS as PRENORM_IN_TIME
from studies.two_depths.equal_time import losses_of_prenorm
from studies.two_depths.study import (
    DEPTHS,
    NOISE,
    RATES,
    SEEDS,
    STEPS,
    TUNING_SEEDS,
    Run,
    chosen_rate,
    label_of,
    losses_by_rate,
    make_model,
    of_seeds,
    rates_in_words,
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
LABELS = {
    "prenorm": "PreNorm",
    "blocks": "6 blocks",
    "kept": "6 blocks, kept",
    "heads": "6 blocks, 4 heads",
    "kept_heads": "6 blocks, 4 heads, kept",
    "full": "Full",
    "kept_full": "Full, kept",
    "heads_full": "Full, 4 heads",
    "kept_heads_full": "Full, 4 heads, kept",
}
# By arm, the same read without a kept stream
PAPERS_READ = {"kept": "blocks", "kept_heads": "heads", "kept_full": "full", "kept_heads_full": "heads_full"}
# At each depth each of these minus PreNorm, at equal tokens and at equal time, and minus the paper's read
NUM_COMPARISONS = 3 * len(PAPERS_READ) * len(DEPTHS)
# Depth, arm, what it is compared with, and kind
Comparison = tuple[str, str, str, str]
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
    console.print(
        f"All runs are in {results / 'runs.jsonl'}; `python -m studies.kept_stream.study report` makes a table."
    )


@app.command()
def again(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train 6 blocks with 24 layers again, at their best rate, to compare them with PreNorm on the same CPU."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")
    rate = chosen_rate(with_further_rates(TWO_DEPTHS), "deep", "blocks")
    runs = [Run("deep", "blocks", seed, STEPS, rate) for seed in SEEDS]
    train_missing(
        lambda found: next((run for run in runs if run not in found), None),
        lambda run: train(run, work, FIELDS),
        results / "again.jsonl",
        losses_in_words,
        Run,
    )
    console.print(f"All runs are in {results / 'again.jsonl'}.")


@app.command()
def speed(
    results: Results = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 25,
):
    """Time a training step of all arms of a depth in turn, on one thread."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"machine": machine("cpu")}
    for depth in DEPTHS:
        steps = {arm: training_step(make_model(depth, arm, 0, FIELDS).train()) for arm in LABELS}
        figures[depth] = time_steps(steps, pairs, label_of(depth))
    write_file(results / "speed.json", json.dumps(figures, indent=1) + "\n")
    console.print(figures)


def final_losses(found: dict[Run, dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """By depth and arm, the judging losses of the seeds at the best rate, of the arms that have them all."""
    finals = {}
    for depth in DEPTHS:
        for arm in LABELS:
            if tuning_means(found, depth, arm, STEPS):
                rate = chosen_rate(found, depth, arm)
                if all(Run(depth, arm, seed, STEPS, rate) in found for seed in SEEDS):
                    finals[depth, arm] = of_seeds(found, depth, arm, STEPS, rate)
    return finals


def comparisons(
    finals: dict[tuple[str, str], list[float]], prenorm: dict[str, dict[int, list[float]]], speeds: dict[str, Any]
) -> dict[Comparison, list[float]]:
    """By depth, arm, what it is compared with and kind of comparison, the differences of the seeds.

    Args:
        prenorm: by depth and number of steps, its losses.
    """
    rows = {}
    for (depth, arm), losses in finals.items():
        if arm not in PAPERS_READ:
            continue
        baselines = {("prenorm", "equal tokens"): finals[depth, "prenorm"]}
        if speeds:
            steps = STEPS * speeds[depth][arm]["ratio_quartiles"][1]
            baselines["prenorm", "equal time"] = interpolated(prenorm[depth], steps)
        if (depth, PAPERS_READ[arm]) in finals:
            baselines[PAPERS_READ[arm], "equal tokens"] = finals[depth, PAPERS_READ[arm]]
        for (other, kind), baseline in baselines.items():
            rows[depth, arm, other, kind] = [a - b for a, b in zip(losses, baseline)]
    return rows


def papers_reads(finals: dict[tuple[str, str], list[float]]) -> dict[Comparison, list[float]]:
    """The paper's reads minus PreNorm at equal tokens, which the protocol did not plan."""
    return {
        (depth, arm, "prenorm", "equal tokens"): [a - b for a, b in zip(losses, finals[depth, "prenorm"])]
        for (depth, arm), losses in finals.items()
        if arm in PAPERS_READ.values()
    }


def table_of(rows: dict[Comparison, list[float]], corrected: dict[Comparison, float]) -> list[str]:
    lines = ["| | | minus | | by seed | mean [95 %] | p (Holm) |", "|---|---|---|---|---|---|---|"]
    for key, differences in rows.items():
        depth, arm, other, kind = key
        cells = [label_of(depth), LABELS[arm], LABELS[other], kind, ", ".join(f"{d:+.3f}" for d in differences)]
        mean = bold_if_certain(in_words(differences, 3), corrected[key])
        lines.append(f"| {' | '.join(cells)} | {mean} | {corrected[key]:.3f} |")
    return lines


@app.command()
def report(results: Results = RESULTS):
    """Rewrite table.md from the results alone. Comparisons without runs count as not significant."""
    planned = read_runs(TWO_DEPTHS / "runs.jsonl", Run)
    found = with_further_rates(TWO_DEPTHS) | read_runs(results / "runs.jsonl", Run)
    prenorm = {"deep": losses_of_prenorm(found | read_runs(PRENORM_IN_TIME, Run), "deep")}
    prenorm["wide"] = losses_of_prenorm(planned, "wide")
    speeds = json.loads((results / "speed.json").read_text()) if (results / "speed.json").exists() else {}
    finals = final_losses(found)
    rows = comparisons(finals, prenorm, speeds)
    # With a difference that is no difference for each that is missing, so that p is corrected for all of the protocol
    missing = {("missing", i): [-1.0, 1.0] for i in range(NUM_COMPARISONS - len(rows))}
    lines = ["# A kept stream, from scratch", "", "By the [protocol](protocol.md)."]
    if next_run(found) or missing:
        lines[-1] += f" Runs are missing: {len(rows)} of {NUM_COMPARISONS} comparisons can be made, and p is corrected"
        lines[-1] += f" for {NUM_COMPARISONS}."
    lines += ["", "| | | time of a step | by learning rate, three seeds | at the one in bold, five seeds |"]
    lines += ["|---|---|---|---|---|"]
    for (depth, arm), losses in finals.items():
        rates = rates_in_words(losses_by_rate(found, depth, arm, "judging_loss"), chosen_rate(found, depth, arm))
        cells = [label_of(depth), LABELS[arm], ratio_in_words(speeds.get(depth, {}).get(arm)), rates]
        lines.append(f"| {' | '.join(cells)} | {statistics.mean(losses):.3f} ({statistics.stdev(losses):.3f}) |")
    lines += ["", *table_of(rows, corrected_p(rows | missing))]
    lines += ["", "## Not in the protocol", "", "The paper's read minus PreNorm, both at the best rates above.", ""]
    papers = papers_reads(finals)
    lines += table_of(papers, corrected_p(papers))
    if (results / "again.jsonl").exists():
        lines += ["", "The first row with 6 blocks trained again, on the CPU of PreNorm's runs.", ""]
        again = [result["judging_loss"] for result in read_runs(results / "again.jsonl", Run).values()]
        key = ("deep", "blocks", "prenorm", "equal tokens")
        row = {key: [a - b for a, b in zip(again, finals["deep", "prenorm"])]}
        lines += table_of(row, corrected_p(papers | row))
    write_file(results / "table.md", "\n".join(lines) + "\n")
    console.print(f"Wrote {results / 'table.md'}", highlight=False)


if __name__ == "__main__":
    app()
