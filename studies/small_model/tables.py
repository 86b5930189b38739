# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The study's tables and figures, from the results of its runs alone; `study.py` is its program."""

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from attnres.utils.figures import finish_axis, write_figure
from attnres.utils.files import write_file
from studies.common.arms import (
    BATCH,
    HELD_OUT_WINDOWS,
    LENGTH,
    PACKAGES,
    QUERIES_ALONE_LEARNING_RATE,
    QUERY_LEARNING_RATE,
    RECENCY_BIAS,
    SWEEP,
    Run,
    all_runs,
)
from studies.common.paired import in_words
from studies.common.runs import read_runs


LABELS = {
    "prenorm": "PreNorm",
    "block": "8 blocks",
    "full": "Full",
    "queries": "8 blocks, queries alone",
    "random_queries": "8 blocks, queries from N(0, 0.02)",
    "recency_bias": f"8 blocks, recency bias of {RECENCY_BIAS:g}",
    "lora_prenorm": "LoRA on PreNorm",
    "lora_block": "LoRA and queries, 8 blocks",
}
COLOURS = dict(zip(LABELS, ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9")))
# Lines that lie on each other are told apart by their marks
MARKERS = dict(zip(LABELS, ("-", "o-", "s--", "^-", "D:", "v-", "-", "o-")))


def runs_by_arm(results: Path) -> dict[tuple[str, str], dict[int, dict]]:
    """By stage and arm, and then by seed."""
    found: dict[tuple[str, str], dict[int, dict]] = {}
    finished = read_runs(results / "runs.jsonl", Run)
    for run in all_runs():
        if run in finished:
            found.setdefault((run.stage, run.arm), {})[run.seed] = finished[run]
    return found


def last_loss(result: dict) -> float:
    return list(result["held_out_loss"].values())[-1]


def table_of(found, stage: str, arms: list[str]) -> str:
    """Final held-out losses of the arms, and their differences from the first one, seed by seed."""
    header = (
        f"| | parameters | held-out loss (SD) | against {LABELS[arms[0]]}, by seed | mean [95 %] | depth entropy |"
    )
    lines = [header, "|---|---|---|---|---|---|"]
    baseline = found.get((stage, arms[0]), {})
    for arm in arms:
        runs = found.get((stage, arm), {})
        if not runs:
            continue
        losses = [last_loss(run) for run in runs.values()]
        spread = f" ({statistics.stdev(losses):.3f})" if len(losses) > 1 else ""
        differences = [last_loss(run) - last_loss(baseline[seed]) for seed, run in runs.items() if seed in baseline]
        cells = ["", ""]
        if arm != arms[0] and len(differences) > 1:
            cells = [", ".join(f"{d:+.4f}" for d in differences), in_words(differences, 4)]
        entropies = [list(run["depth_entropy"].values())[-1] for run in runs.values() if run["depth_entropy"]]
        entropy = f"{statistics.mean(entropies):.3f}" if entropies else ""
        trained = next(iter(runs.values()))["trainable_parameters"]
        loss = f"{statistics.mean(losses):.4f}{spread}"
        lines.append(f"| {LABELS[arm]} | {trained:,} | {loss} | {cells[0]} | {cells[1]} | {entropy} |")
    return "\n".join(lines)


def sweep_table(found) -> str:
    lines = ["| query learning rate | decay 0 | decay 0.1 | queries alone |", "|---|---|---|---|"]
    for lr in SWEEP:
        names = (f"sweep_lr{lr:g}_decay0", f"sweep_lr{lr:g}_decay0.1", f"sweep_queries_lr{lr:g}")
        runs = [found.get(("continue", name), {}).get(0) for name in names]
        lines.append(
            f"| {lr:g} | " + " | ".join("" if run is None else f"{last_loss(run):.4f}" for run in runs) + " |"
        )
    return "\n".join(lines)


def plot_differences(found, stem: Path) -> list[Path]:
    """Held-out loss minus that of PreNorm with the same seed, over the steps: the mean over seeds, in their range."""
    panels = (
        ("pretrain", ["prenorm", "block", "full"], "From scratch"),
        ("continue", ["prenorm", "block", "full", "random_queries"], "Continued, all weights"),
        ("continue", ["prenorm", "queries", "recency_bias"], "Continued, queries alone or with a bias"),
        ("continue", ["lora_prenorm", "lora_block"], "Continued, adapters"),
    )
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    for axis, (stage, arms, title) in zip(axes.flat, panels):
        axis.axhline(0, color=COLOURS["prenorm"], linewidth=1)
        baseline = found.get((stage, arms[0]), {})
        for arm in arms[1:]:
            curves = [
                [loss - baseline[seed]["held_out_loss"][step] for step, loss in run["held_out_loss"].items()]
                for seed, run in found.get((stage, arm), {}).items()
                if seed in baseline
            ]
            if curves:
                steps = list(map(int, next(iter(baseline.values()))["held_out_loss"]))
                by_step = list(zip(*curves))
                low, high = map(min, by_step), map(max, by_step)
                axis.fill_between(steps, list(low), list(high), color=COLOURS[arm], alpha=0.18, linewidth=0)
                mean = list(map(statistics.mean, by_step))
                axis.plot(
                    steps, mean, MARKERS[arm], color=COLOURS[arm], linewidth=1.8, markersize=4, label=LABELS[arm]
                )
        axis.set(title=f"{title}, {len(baseline)} seeds", xlabel="step", ylabel=f"loss minus {LABELS[arms[0]]}'s")
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        finish_axis(axis)
    figure.suptitle(
        "Held-out loss: below zero is better than PreNorm. Lines are means, and bands reach over all seeds.",
        fontsize=10,
    )
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


def write_tables(results: Path) -> list[Path]:
    """Write `table.md` and the figures into the folder of the results; their paths."""
    found = runs_by_arm(results)
    manifest = json.loads((results / "manifest.json").read_text())
    any_run = next(iter(next(iter(found.values())).values()))
    steps = {run.stage: run.steps for run in all_runs()}
    per_step = BATCH * LENGTH
    sections = [
        "# What Attention Residuals bring to a small model",
        f"A Qwen3 of 12 layers, hidden size 64, 0.7M parameters. From scratch: {steps['pretrain']} steps of {per_step}"
        f" tokens of the standard library ({manifest['library']['files']} files). Continued: {steps['continue']} steps"
        f" on packages ({', '.join(PACKAGES)}; {manifest['packages']['files']} files) from the PreNorm checkpoint."
        f" Held-out loss over {HELD_OUT_WINDOWS * LENGTH} tokens of files left out. Python {any_run['python']}, torch"
        f" {any_run['versions']['torch']}, transformers {any_run['versions']['transformers']}, CPU, fp32.",
        "Depth entropy is that of the depth weights over its largest value: 1 reads all depths alike, as PreNorm.",
        "## From scratch",
        table_of(found, "pretrain", ["prenorm", "block", "full"]),
        "## Continued from the same PreNorm checkpoint",
        table_of(found, "continue", ["prenorm", "block", "full", "queries", "random_queries", "recency_bias"]),
        f"Peak learning rates: 1e-3 for weights, {QUERY_LEARNING_RATE:g} for queries beside them and"
        f" {QUERIES_ALONE_LEARNING_RATE:g} for queries alone; queries are not decayed.",
        "## Adapters, at equal steps and equal numbers of trained parameters",
        table_of(found, "continue", ["lora_prenorm", "lora_block"]),
        "## Learning rate and decay of the queries (seed 0; held-out loss at the end)",
        sweep_table(found),
    ]
    if (results / "speed.json").exists():
        lines = ["| | tokens/s | time of a step against PreNorm (quartiles) | activations |", "|---|---|---|---|"]
        for arm, figure in json.loads((results / "speed.json").read_text())["figures"].items():
            low, high = figure["ratio_quartiles"]
            ratio = f"{figure['ratio']:.2f} ({low:.2f} to {high:.2f})"
            lines.append(
                f"| {LABELS[arm]} | {figure['tokens_per_second']:.0f} | {ratio} | {figure['activations']:.2f} |"
            )
        sections += ["## What it costs here (one thread, 25 alternating steps)", "\n".join(lines)]
    sections.append("![differences](differences.png)")
    write_file(results / "table.md", "\n\n".join(sections) + "\n")
    return [results / "table.md", *plot_differences(found, results / "differences")]
