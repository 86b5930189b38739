# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Small models from scratch, deep and wide, with and without AttnRes, with rates chosen alike.

    python -m studies.two_depths.study run      # hours on one thread; interrupted, it goes on
    python -m studies.two_depths.study speed    # seconds per training step, alternating, in one process
    python -m studies.two_depths.study report   # table.md and the figure from what lies in studies/two_depths

What is compared, and how, was written down first: studies/two_depths/protocol.md.
"""

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, set_seed

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.training.scaling.sweep import next_rate
from attnres.utils.figures import COLOURS, finish_axis, write_figure
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.arms import BATCH, SHAPE, TRAINING, Results, Work, prepare, rows_of
from studies.common.paired import bold_if_certain, corrected_p, detectable, in_words, interpolated, side
from studies.common.runs import losses_in_words, read_runs, train_missing, trained
from studies.common.steps import time_steps, training_step
from studies.reads.study import RESULTS as READ_STUDY


RESULTS = Path(__file__).parent
STEPS, SEEDS, TUNING_SEEDS = 600, range(5), range(3)
# Means of three seeds that are closer than this do not tell rates apart. Later studies continue their sweeps by it
NOISE = 0.05
RATES = (4e-3, 8e-3, 1.6e-2)
DEPTHS = {
    "deep": {"num_hidden_layers": 24, "hidden_size": 48, "intermediate_size": 144, "num_attention_heads": 4},
    "wide": {"num_hidden_layers": 6, "hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 6},
}
# Added after the first results: deep from a start with smaller outputs of its layers, and PreNorm for as many steps as
# it does in the time of 600 steps of 6 blocks (speed.json)
SCALED, IN_TIME = "scaled", 825
ARMS = {"prenorm": "PreNorm", "blocks": "6 blocks", "full": "Full"}
FIELDS = {"blocks": {"num_blocks": 6}, "full": {"block_size": 1}}
# What has a rate of its own: depth, arm, steps, and the rates that are tried first
PLANNED = [(depth, arm, STEPS, RATES) for depth in DEPTHS for arm in ARMS]
ADDED = [("deep", "prenorm", IN_TIME, tuple(2 * rate for rate in RATES)), (SCALED, "prenorm", STEPS, RATES)]
# Kept in another folder, where the planned sweep does not see it
FURTHER = [("deep", "prenorm", STEPS, (*RATES, 3.2e-2, 6.4e-2))]
STYLES = {"prenorm": ("s:", COLOURS[6]), "blocks": ("o-", COLOURS[0]), "full": ("^--", COLOURS[1])}
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Run:
    """One training run. Its name is that of its result file."""

    depth: str
    arm: str
    seed: int
    steps: int
    learning_rate: float

    @property
    def name(self) -> str:
        length = {STEPS: "", 2 * STEPS: "-double"}.get(self.steps, f"-{self.steps}steps")
        return f"{self.depth}-{self.arm}{length}-lr{self.learning_rate:g}-seed{self.seed}"


def losses_by_rate(
    found: dict[Run, dict[str, Any]], depth: str, arm: str, part: str, steps: int = STEPS
) -> dict[float, list[float]]:
    """Of the seeds that choose, by the rates that have all of them, in their order. `part`: `tuning_loss` or
    `judging_loss`."""
    rates = sorted({run.learning_rate for run in found})
    by_rate = {
        rate: [found[run][part] for seed in TUNING_SEEDS if (run := Run(depth, arm, seed, steps, rate)) in found]
        for rate in rates
    }
    return {rate: losses for rate, losses in by_rate.items() if len(losses) == len(TUNING_SEEDS)}


def tuning_means(found: dict[Run, dict[str, Any]], depth: str, arm: str, steps: int) -> dict[float, float]:
    return {r: statistics.mean(of) for r, of in losses_by_rate(found, depth, arm, "tuning_loss", steps).items()}


def chosen_rate(found: dict[Run, dict[str, Any]], depth: str, arm: str, steps: int = STEPS) -> float:
    means = tuning_means(found, depth, arm, steps)
    return min(means, key=means.__getitem__)


def next_run(found: dict[Run, dict[str, Any]], depth: str | None = None, sweeps=(*PLANNED, *ADDED)) -> Run | None:
    """Sweep by sweep, rate by rate, and then the best rate with all seeds; `None` when everything has a result.

    Args:
        depth: only this one.
    """
    for of_depth, arm, steps, rates in sweeps:
        if depth not in (None, of_depth):
            continue
        rate = next_rate(tuning_means(found, of_depth, arm, steps), rates)
        seeds = SEEDS if rate is None else TUNING_SEEDS
        rate = rate or chosen_rate(found, of_depth, arm, steps)
        runs = [Run(of_depth, arm, seed, steps, rate) for seed in seeds]
        if arm == "prenorm" and seeds == SEEDS and (of_depth, arm, steps, rates) in PLANNED:
            runs += [Run(of_depth, arm, seed, 2 * STEPS, rate) for seed in SEEDS]
        missing = [run for run in runs if run not in found]
        if missing:
            return missing[0]
    return None


def label_of(depth: str) -> str:
    return "{num_hidden_layers} layers of {hidden_size}".format(**DEPTHS[depth])


def make_model(depth: str, arm: str, seed: int, fields: dict[str, dict[str, Any]] = FIELDS):
    """The arms of a seed start from the same weights.

    A scaled start is GPT-2's: what writes to the residual stream is divided by the square root of how many do.
    """
    shape = DEPTHS["deep" if depth == SCALED else depth]
    config = Qwen3Config.from_dict(SHAPE.to_dict() | {"layer_types": None, "num_key_value_heads": 2} | shape)
    set_seed(seed)
    prenorm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if depth == SCALED:
        for name, parameter in prenorm.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data /= math.sqrt(2 * config.num_hidden_layers)
    if arm == "prenorm":
        return prenorm
    model = AttnResForCausalLM(AttnResConfig.from_base_config(config, attn_res_scale_norm_eps=False, **fields[arm]))
    model.load_state_dict(prenorm.state_dict(), strict=False)
    return model


def train(run: Run, work: Path, fields_of_arms: dict[str, dict[str, Any]] = FIELDS, **changed: Any) -> dict[str, Any]:
    """Train one run; its figures.

    Args:
        changed: fields of `AttnResTrainingArguments` that are not those of the protocol.
    """
    start = time.time()
    model = make_model(run.depth, run.arm, run.seed, fields_of_arms)
    rows = rows_of(work, "library", "train", run.seed)[: run.steps * BATCH]
    fields = TRAINING | {"eval_strategy": "no", "query_learning_rate": run.learning_rate, "query_weight_decay": 0.0}
    trainer = trained(model, rows, run, work, **fields | changed)
    tuning, judging = (
        trainer.evaluate(rows_of(work, "library", part))["eval_loss"] for part in ("tuning", "held_out")
    )
    return {
        "run": asdict(run),
        "tuning_loss": tuning,
        "judging_loss": judging,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "seconds": time.time() - start,
        "machine": machine("cpu"),
    }


def with_further_rates(results: Path) -> dict[Run, dict[str, Any]]:
    return read_runs(results / "runs.jsonl", Run) | read_runs(results / "further_rates.jsonl", Run)


@app.command("run")
def run_all(
    work: Work = Path("study-work"),
    results: Results = RESULTS,
    depth: Annotated[
        Literal["deep", "wide", "scaled"] | None, typer.Option(help="Only this one, for two processes.")
    ] = None,
):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")
    runs = results / "runs.jsonl"

    def train_one(run: Run) -> dict[str, Any]:
        return train(run, work)

    train_missing(lambda found: next_run(found, depth), train_one, runs, losses_in_words, Run)
    if depth in (None, "deep"):

        def next_further(found: dict[Run, dict[str, Any]]) -> Run | None:
            return next_run(read_runs(runs, Run) | found, "deep", FURTHER)

        train_missing(next_further, train_one, results / "further_rates.jsonl", losses_in_words, Run)
    console.print(f"All runs are in {runs}; `python -m studies.two_depths.study report` makes the table.")


@app.command()
def speed(
    results: Results = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 25,
):
    """Seconds of a training step, all arms of a depth in turn in one process on one thread."""
    torch.set_num_threads(1)
    figures: dict[str, dict[str, Any]] = {}
    for depth in DEPTHS:
        steps = {arm: training_step(make_model(depth, arm, 0).train()) for arm in ARMS}
        figures[depth] = time_steps(steps, pairs, f"Steps, {depth}")
    write_file(results / "speed.json", json.dumps(figures, indent=1) + "\n")
    console.print(figures)


def finals_of(found: dict[Run, dict[str, Any]], depth: str) -> dict[str, list[float]]:
    """By arm the judging losses of the seeds, at its chosen rate; `double` is PreNorm with twice the steps."""
    rates = {arm: chosen_rate(found, depth, arm) for arm in ARMS}
    finals = {arm: of_seeds(found, depth, arm, STEPS, rate) for arm, rate in rates.items()}
    return finals | {"double": of_seeds(found, depth, "prenorm", 2 * STEPS, rates["prenorm"])}


def of_seeds(found: dict[Run, dict[str, Any]], depth: str, arm: str, steps: int, rate: float) -> list[float]:
    return [found[Run(depth, arm, seed, steps, rate)]["judging_loss"] for seed in SEEDS]


def comparisons(found: dict[Run, dict[str, Any]], speeds: dict[str, Any]) -> dict[tuple[str, str, str], list[float]]:
    """By kind of comparison, depth and arm, of each seed."""
    rows: dict[tuple[str, str, str], list[float]] = {}
    for depth in DEPTHS:
        finals = finals_of(found, depth)
        for arm in FIELDS:
            ratio = speeds[depth][arm]["ratio_quartiles"][1]
            longer = interpolated({1: finals["prenorm"], 2: finals["double"]}, ratio)
            baselines = {"equal tokens": finals["prenorm"], "equal time": longer}
            for kind, baseline in baselines.items():
                rows[kind, depth, arm] = [loss - other for loss, other in zip(finals[arm], baseline)]
    deep, wide = DEPTHS
    for arm in FIELDS:
        pairs = zip(rows["equal tokens", deep, arm], rows["equal tokens", wide, arm])
        rows["deep less wide", "both", arm] = [a - b for a, b in pairs]
    return rows


def added(found: dict[Run, dict[str, Any]], further: dict[Run, dict[str, Any]]) -> list[str]:
    """The part of the table about baselines that were added: their losses by rate, and what is compared with them."""
    finals = finals_of(found, "deep")
    baselines = {
        "PreNorm, scaled start": (SCALED, STEPS),
        "PreNorm, more rates": ("deep", STEPS),
        f"PreNorm, {IN_TIME} steps": ("deep", IN_TIME),
    }
    lines = ["| 24 layers of 48 | by learning rate, three seeds | at the one in bold, five seeds |", "|---|---|---|"]
    differences = {}
    for label, (depth, steps) in baselines.items():
        chosen = chosen_rate(further, depth, "prenorm", steps)
        losses = of_seeds(further, depth, "prenorm", steps, chosen)
        of_rates = rates_in_words(losses_by_rate(further, depth, "prenorm", "judging_loss", steps), chosen)
        lines.append(f"| {label} | {of_rates} | {statistics.mean(losses):.3f} ({statistics.stdev(losses):.3f}) |")
        if depth == SCALED:
            differences[f"{label}, less PreNorm"] = [a - b for a, b in zip(losses, finals["prenorm"])]
        differences[f"6 blocks, less {label}"] = [a - b for a, b in zip(finals["blocks"], losses)]
    lines += ["", "| | by seed | mean [95 %], not corrected |", "|---|---|---|"]
    for label, values in differences.items():
        lines.append(f"| {label} | {', '.join(f'{d:+.3f}' for d in values)} | {in_words(values, 3)} |")
    return lines


def plot_rates(found: dict[Run, dict[str, Any]], stem: Path) -> list[Path]:
    """Held-out losses over the learning rate, with the 95 % interval over the seeds that choose."""
    figure, axes = plt.subplots(1, len(DEPTHS), figsize=(11, 4.2), sharey=True)
    for axis, depth in zip(axes, DEPTHS):
        for shift, (arm, label) in zip((0.97, 1, 1.03), ARMS.items()):
            by_rate = losses_by_rate(found, depth, arm, "judging_loss")
            means = [statistics.mean(losses) for losses in by_rate.values()]
            sides = [side(losses) for losses in by_rate.values()]
            style, colour = STYLES[arm]
            rates = [shift * rate for rate in by_rate]  # beside each other, so that intervals can be seen
            axis.errorbar(rates, means, sides, fmt=style, color=colour, label=label, capsize=3, markersize=5)
        axis.set(title=label_of(depth), xlabel="learning rate", ylabel="held-out loss", xscale="log")
        tried = sorted({run.learning_rate for run in found if run.depth == depth})
        axis.set_xticks(tried, [f"{rate:g}" for rate in tried])
        axis.minorticks_off()
        finish_axis(axis)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


def rates_in_words(by_rate: dict[float, list[float]], chosen: float) -> str:
    cells = {rate: f"{rate:g}: {statistics.mean(of):.3f} ({statistics.stdev(of):.3f})" for rate, of in by_rate.items()}
    return ", ".join(f"**{cell}**" if rate == chosen else cell for rate, cell in cells.items())


@app.command()
def report(results: Results = RESULTS):
    """Write table.md and the figure anew, from the results alone."""
    found = read_runs(results / "runs.jsonl", Run)
    further = with_further_rates(results)
    if next_run(found) or next_run(further, "deep", FURTHER) or not (results / "speed.json").exists():
        raise typer.BadParameter(
            f"There are {len(found)} runs, and more are needed: go on with `run`, and then `speed`."
        )
    speeds = json.loads((results / "speed.json").read_text())
    lines = ["# From scratch, at two depths", "", "By the [protocol](protocol.md). Mean losses, and the SD.", ""]
    lines += ["| | | parameters | time of a step | by learning rate, three seeds | at the one in bold, five seeds |"]
    lines += ["|---|---|---|---|---|---|"]
    for depth in DEPTHS:
        finals = {
            arm: f"{statistics.mean(of):.3f} ({statistics.stdev(of):.3f})"
            for arm, of in finals_of(found, depth).items()
        }
        for arm, label in ARMS.items():
            chosen = chosen_rate(found, depth, arm)
            parameters = found[Run(depth, arm, 0, STEPS, chosen)]["parameters"]
            ratio = f"{speeds[depth][arm]['ratio_quartiles'][1]:.2f}"
            of_rates = rates_in_words(losses_by_rate(found, depth, arm, "judging_loss"), chosen)
            lines.append(f"| {label_of(depth)} | {label} | {parameters:,} | {ratio} | {of_rates} | {finals[arm]} |")
        longer = losses_by_rate(found, depth, "prenorm", "judging_loss", 2 * STEPS)
        of_rates = rates_in_words(longer, chosen_rate(found, depth, "prenorm"))
        lines.append(f"| {label_of(depth)} | PreNorm, twice the steps | | | {of_rates} | {finals['double']} |")
    rows = comparisons(found, speeds)
    corrected = corrected_p(rows)
    lines += ["", "## Differences", "", "| | depth | less PreNorm | by seed | mean [95 %] | p (Holm) |"]
    lines += ["|---|---|---|---|---|---|"]
    for (kind, depth, arm), differences in rows.items():
        p = corrected[kind, depth, arm]
        by_seed = ", ".join(f"{d:+.3f}" for d in differences)
        mean = bold_if_certain(in_words(differences, 3), p)
        lines.append(f"| {kind} | {depth} | {ARMS[arm]} | {by_seed} | {mean} | {p:.3f} |")
    spread = {f"{depth} {arm}": of for (kind, depth, arm), of in rows.items() if kind == "equal tokens"}
    lines += ["", f"Before correction, a difference of {detectable(spread):.3f} is found with probability 0.8."]
    lines += ["", "## Other baselines, added afterwards", "", *added(found, further)]
    write_file(results / "table.md", "\n".join(lines) + "\n")
    paths = [results / "table.md", *plot_rates(found, results / "rates")]
    console.print(*(f"Wrote {path}" for path in paths), sep="\n", highlight=False)


if __name__ == "__main__":
    app()
