# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A real pretrained model trained further for 256,000 tokens, 25 times as long as in `studies/retrofit`.

    python -m studies.long_retrofit.study run      # hours on one thread; interrupted, it resumes
    python -m studies.long_retrofit.study speed    # the time of a training step, on a machine that does nothing else
    python -m studies.long_retrofit.study report   # table.md and the figure from what lies in studies/long_retrofit

What is compared, and how, was written down first: studies/long_retrofit/protocol.md.
"""

import json
import shutil
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint

from attnres.training import AttnResTrainer, AttnResTrainingArguments
from attnres.training.scaling.sweep import next_rate
from attnres.utils.figures import COLOURS, finish_axis, write_figure
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.paired import interpolated
from studies.common.runs import TUNING_SEED, Run, finished_seeds, read_runs, train_missing
from studies.common.steps import ratio_in_words, time_steps, training_step
from studies.kept_stream.retrofit import prepare_kept
from studies.retrofit.study import (
    METRICS,
    QUERY_RATE,
    differences_tables,
    figures_in_words,
    judge,
    sweeps_table,
    tuning_losses,
)


RESULTS = Path(__file__).parent
STEPS, LONGER, TUNING_STEPS, BATCH = 500, 625, 125, 4
SEEDS, GRID = range(3), (3e-5, 9e-5, 2.7e-4)
# Losses of a sweep that are closer than this are alike: five seeds of the short study are 0.013 apart (SD)
NOISE = 0.01
# By arm, the folder of `prepare_kept` that holds its model
ARMS = {"prenorm": "base", "replaced": "attnres", "kept": "kept", "prenorm_longer": "base"}
LABELS = {
    "prenorm": "PreNorm",
    "replaced": "the paper's read",
    "kept": "kept stream",
    "prenorm_longer": f"PreNorm, {LONGER} steps",
}
COMPARED = (("replaced", "prenorm"), ("kept", "prenorm"), ("kept", "replaced"))
CURVES = {"judging": "new text", "old_text": "other text"}
STYLES = dict(zip(ARMS, (("s:", COLOURS[6]), ("o-", COLOURS[0]), ("^-", COLOURS[1]), ("D--", COLOURS[6]))))
Work = Annotated[Path, typer.Option(help="Folder for models, windows and checkpoints.")]
Results = Annotated[Path, typer.Option(help="Folder for the figures of every run.")]
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def swept(arm: str) -> str:
    """The arm whose learning rate is that of this one."""
    return arm.removesuffix("_longer")


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """First all sweeps, and then all arms seed by seed; `None` when everything has a result."""
    rates = {}
    for arm in dict.fromkeys(map(swept, ARMS)):
        losses = tuning_losses(found, arm)
        rate = next_rate(losses, GRID, factor=3.0, noise=NOISE)
        if rate is not None:
            return Run(arm, TUNING_SEED, TUNING_STEPS, rate)
        rates[arm] = min(losses, key=losses.__getitem__)
    for seed in SEEDS:
        for arm in ARMS:
            run = Run(arm, seed, LONGER if arm.endswith("_longer") else STEPS, rates[swept(arm)])
            if run not in found:
                return run
    return None


def train(run: Run, work: Path) -> dict[str, Any]:
    """Train one run, from its last checkpoint if it was interrupted; its figures."""
    start, rows, output = time.time(), torch.load(work / "rows.pt"), work / "training" / run.name
    model = AutoModelForCausalLM.from_pretrained(work / ARMS[run.arm], dtype=torch.float32)
    order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(run.seed))

    def dataset(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{"input_ids": row, "labels": row} for row in ids]

    is_tuning = run.seed == TUNING_SEED
    arguments = AttnResTrainingArguments(
        output_dir=str(output),
        max_steps=run.steps,
        learning_rate=run.learning_rate,
        query_learning_rate=QUERY_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=run.steps // 20,
        weight_decay=0.0,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=8,
        train_sampling_strategy="sequential",
        logging_steps=25,
        eval_strategy="no" if is_tuning else "steps",
        eval_steps=125,
        save_steps=25,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=run.seed,
    )
    trainer = AttnResTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset(rows["train"][order[: run.steps * BATCH]]),
        eval_dataset={part: dataset(rows[part]) for part in CURVES},
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)
    log = trainer.state.log_history
    curves = {
        part: {entry["step"]: entry[f"eval_{part}_loss"] for entry in log if f"eval_{part}_loss" in entry}
        for part in CURVES
    }
    result = {
        "run": asdict(run),
        **judge(model, rows, only_tuning=is_tuning),
        "train_loss": {entry["step"]: entry["loss"] for entry in log if "loss" in entry},
        "curves": curves,
        "seconds": time.time() - start,  # since it was last resumed
        "machine": machine("cpu"),
    }
    shutil.rmtree(output)
    return result


@app.command("run")
def run_all(work: Work = Path("retrofit-work"), results: Results = RESULTS):
    """Train every run that has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare_kept(work)
    train_missing(next_run, lambda run: train(run, work), results / "runs.jsonl", figures_in_words)
    console.print(f"All runs are in {results}; `python -m studies.long_retrofit.study report` makes the table.")


@app.command()
def speed(
    work: Work = Path("retrofit-work"),
    results: Results = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 7,
):
    """Time a training step of all arms in turn, on one thread."""
    torch.set_num_threads(1)
    prepare_kept(work)
    ids = torch.load(work / "rows.pt")["train"][:BATCH]

    def step_of(arm: str):
        model = AutoModelForCausalLM.from_pretrained(work / ARMS[arm], dtype=torch.float32).train()
        return training_step(model, ids, rate=1e-6)

    steps = {arm: step_of(arm) for arm in dict.fromkeys(map(swept, ARMS))}
    figures = {"machine": machine("cpu"), **time_steps(steps, pairs, "Training steps")}
    write_file(results / "speed.json", json.dumps(figures, indent=1) + "\n")
    console.print(figures)


def differences(
    finals: dict[tuple[str, int], dict[str, Any]], seeds: list[int], speeds: dict[str, Any]
) -> dict[tuple[str, str, str, str], list[float]]:
    """By metric, arm, the arm it is compared with and kind of comparison, the difference of each seed."""
    found = {}
    for metric in METRICS:
        of = {arm: [finals[arm, seed][metric] for seed in seeds] for arm in ARMS}
        for arm, other in COMPARED:
            baselines = {"equal tokens": of[other]}
            if other == "prenorm" and speeds:
                steps = STEPS * speeds[arm]["ratio_quartiles"][1]
                baselines["equal time"] = interpolated({STEPS: of[other], LONGER: of["prenorm_longer"]}, steps)
            for kind, baseline in baselines.items():
                found[metric, arm, other, kind] = [a - b for a, b in zip(of[arm], baseline)]
    return found


def means_tables(finals: dict[tuple[str, int], dict[str, Any]], seeds: list[int], speeds: dict[str, Any]) -> list[str]:
    """Lines of Markdown: the metrics of each arm, and its losses along the way, as means over the seeds."""
    lines = [f"| | learning rate | time of a step | {' | '.join(METRICS.values())} |", "|---" * 7 + "|"]
    for arm, label in LABELS.items():
        of_arm = [finals[arm, seed] for seed in seeds]
        means = [f"{statistics.mean(result[metric] for result in of_arm):.4f}" for metric in METRICS]
        rate, ratio = f"{of_arm[0]['run']['learning_rate']:g}", ratio_in_words(speeds.get(swept(arm)))
        lines.append(f"| {label} | {rate} | {ratio} | {' | '.join(means)} |")
    for part, label in CURVES.items():
        steps = sorted({int(step) for arm in LABELS for step in finals[arm, seeds[0]]["curves"][part]})
        lines += [
            "",
            f"| loss on {label}, after steps | {' | '.join(map(str, steps))} |",
            "|---" * (1 + len(steps)) + "|",
        ]
        for arm in LABELS:
            curves = [{int(step): loss for step, loss in finals[arm, s]["curves"][part].items()} for s in seeds]
            cells = [f"{statistics.mean(c[s] for c in curves):.4f}" if s in curves[0] else "" for s in steps]
            lines.append(f"| {LABELS[arm]} | {' | '.join(cells)} |")
    return lines


def plot_curves(finals: dict[tuple[str, int], dict[str, Any]], seeds: list[int], stem: Path) -> list[Path]:
    """Losses along the way, a line for each seed."""
    figure, axes = plt.subplots(1, len(CURVES), figsize=(11, 4.2), layout="constrained")
    for axis, (part, label) in zip(axes, CURVES.items()):
        for arm, (style, colour) in STYLES.items():
            for seed in seeds:
                curve = finals[arm, seed]["curves"][part]
                tokens = [int(step) * BATCH * 128 / 1000 for step in curve]
                named = {"label": LABELS[arm]} if seed == seeds[0] else {}
                axis.plot(tokens, list(curve.values()), style, color=colour, markersize=4, linewidth=1, **named)
        axis.set(title=f"On {label}", xlabel="thousand tokens", ylabel="loss")
        finish_axis(axis)
    axes[0].legend(frameon=False)
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


@app.command()
def report(results: Results = RESULTS):
    """Rewrite table.md and the figure from the results alone."""
    found = read_runs(results / "runs.jsonl")
    finals, seeds = finished_seeds(found, ARMS, SEEDS, needed=2)
    speeds = json.loads((results / "speed.json").read_text()) if (results / "speed.json").exists() else {}
    lines = [
        "# A real model trained for longer",
        "",
        f"By the [protocol](protocol.md), seeds {seeds[0]} to {seeds[-1]}.",
    ]
    lines += ["", *means_tables(finals, seeds, speeds)]
    lines += differences_tables(differences(finals, seeds, speeds), LABELS)
    lines += sweeps_table(found, {arm: LABELS[arm] for arm in dict.fromkeys(map(swept, ARMS))})
    write_file(results / "table.md", "\n".join(lines) + "\n")
    paths = [results / "table.md", *plot_curves(finals, seeds, results / "curves")]
    console.print(*(f"Wrote {path}" for path in paths), sep="\n", highlight=False)


@app.callback()
def main():
    """A real pretrained model trained further for 256,000 tokens."""


if __name__ == "__main__":
    app()
