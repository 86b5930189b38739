# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Which reads over depth make a small model better, every arm with a learning rate of its own.

    python -m studies.reads.study run      # hours on one thread; interrupted, it goes on
    python -m studies.reads.study rates    # at other rates than those of the sweeps, and the arms that came later
    python -m studies.reads.study speed    # seconds per training step, alternating, in one process
    python -m studies.reads.study report   # table.md from what lies in studies/reads

What is compared, and how, was written down first: studies/reads/protocol.md.
"""

import itertools
import json
import platform
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, set_seed

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.training.scaling.sweep import next_rate
from attnres.utils.files import append_json, write_file
from attnres.utils.timing import machine
from studies.common.arms import BATCH, NUM_BLOCKS, SHAPE, TRAINING, Results, Work, prepare, rows_of
from studies.common.comparison_reads import with_read
from studies.common.paired import bold_if_certain, corrected_p, detectable, in_words, interpolated
from studies.common.runs import SEEDS, TUNING_SEED, Run, losses_in_words, read_runs, train_missing, trained
from studies.common.steps import time_steps, training_step


RESULTS = Path(__file__).parent
STEPS, TUNING_STEPS = 1000, 300
GRID = (2e-3, 4e-3, 8e-3)
ARMS = {
    "prenorm": "PreNorm",
    "prenorm_double": "PreNorm, twice the tokens",
    "blocks": "8 blocks",
    "full": "Full",
    "heads": "8 blocks, 4 heads",
    "input": "8 blocks, query of the input (rank 16)",
    "sigmoid": "8 blocks, sigmoid",
    "softmax1": "8 blocks, softmax1",
    "each": "8 blocks, each output of the open one",
    "static": "8 blocks, static weights",
    "raw_keys": "8 blocks, keys without RMSNorm",
    "normal_start": "8 blocks, queries from N(0, 0.02)",
}
# Added when the others had their results, and not swept
LATER_ARMS = {
    "blocks_of_2": "blocks of 2 sublayers",
    "blocks_of_4": "blocks of 4 sublayers",
    "blocks_of_8": "blocks of 8 sublayers",
    "blocks_of_16": "blocks of 16 sublayers",
    "window": "Full, the embedding and the 8 newest sources",
    "plain_final": "8 blocks, last read without a query",
}
FIELDS = {
    "full": {"block_size": 1},
    "window": {"block_size": 1},
    **{f"blocks_of_{size}": {"block_size": size} for size in (2, 4, 8, 16)},
    "heads": {"attn_res_num_heads": 4},
    "input": {"attn_res_query": "input", "attn_res_query_rank": 16},
    "sigmoid": {"attn_res_weights": "sigmoid"},
    "softmax1": {"attn_res_weights": "softmax1"},
    "each": {"attn_res_open_block": "each"},
}
# The sweeps do not tell rates apart: what is run in full at others as well, see the deviations
COMMON_RATE, SEEDS_OF_OTHER_RATES = 1.6e-2, range(3)
OTHER_RATES = [
    *[("prenorm", rate) for rate in (4e-3, 8e-3, COMMON_RATE)],
    *[(arm, COMMON_RATE) for arm in ("static", "raw_keys", "heads", "input", *LATER_ARMS)],
]
# Where the sweeps would have gone on by the rule of later studies
FURTHER_RATES = [(arm, 3.2e-2) for arm in ("blocks", "full")]
ABLATIONS = ("static", "raw_keys", "window", "plain_final")
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def tuning_losses(found: dict[Run, dict], arm: str) -> dict[float, float]:
    """By learning rate, in their order."""
    losses = {
        run.learning_rate: r["tuning_loss"] for run, r in found.items() if run == tuning_run(arm, run.learning_rate)
    }
    return dict(sorted(losses.items()))


def tuning_run(arm: str, learning_rate: float) -> Run:
    return Run(arm, TUNING_SEED, TUNING_STEPS, learning_rate)


def steps_of(arm: str) -> int:
    return 2 * STEPS if arm == "prenorm_double" else STEPS


def swept(arm: str) -> str:
    """The arm whose rates are those of this one."""
    return "prenorm" if arm == "prenorm_double" else arm


def next_run(found: dict[Run, dict]) -> Run | None:
    """First all sweeps, and then all arms seed by seed; `None` when everything has a result."""
    rates = {}
    for arm in ARMS:
        losses = tuning_losses(found, swept(arm))
        rate = next_rate(losses, GRID)
        if rate is not None:
            return tuning_run(swept(arm), rate)
        rates[arm] = min(losses, key=losses.__getitem__)
    for seed in SEEDS:
        for arm, rate in rates.items():
            run = Run(arm, seed, steps_of(arm), rate)
            if run not in found:
                return run
    return None


def make_model(arm: str, seed: int):
    """The arms of a seed start from the same weights."""
    set_seed(seed)
    prenorm = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32)
    if arm.startswith("prenorm"):
        return prenorm
    fields = {"num_blocks": NUM_BLOCKS} | FIELDS.get(arm, {})
    if "block_size" in fields:
        del fields["num_blocks"]
    model = AttnResForCausalLM(AttnResConfig.from_base_config(SHAPE, attn_res_scale_norm_eps=False, **fields))
    model.load_state_dict(prenorm.state_dict(), strict=False)
    if arm == "normal_start":
        torch.nn.init.normal_(model.model.depth_queries.query, std=0.02)
    return with_read(model, arm) if arm in ABLATIONS else model


def train(run: Run, work: Path, callbacks=(), save_to: Path | None = None) -> dict:
    """Train one run; its figures. The model is kept in `save_to`."""
    start = time.time()
    model = make_model(run.arm, run.seed)
    rows = rows_of(work, "library", "train", run.seed)[: run.steps * BATCH]
    fields = TRAINING | {"eval_strategy": "no", "query_learning_rate": run.learning_rate, "query_weight_decay": 0.0}
    trainer = trained(model, rows, run, work, callbacks, **fields)
    if save_to is not None:
        model.save_pretrained(save_to)
    losses = {
        split: trainer.evaluate(rows_of(work, "library", split))["eval_loss"] for split in ("tuning", "held_out")
    }
    return {
        "run": asdict(run),
        "tuning_loss": losses["tuning"],
        "judging_loss": losses["held_out"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "seconds": time.time() - start,
        "machine": machine("cpu"),
    }


@app.command("run")
def run_all(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    manifest = prepare(work, results / "manifest.json")
    write_file(results / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    train_missing(next_run, lambda run: train(run, work), results / "runs.jsonl", losses_in_words)
    console.print(f"All runs are in {results}/runs.jsonl; `python -m studies.reads.study report` makes the table.")


@app.command()
def rates(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train in full at rates that the sweeps did not choose: is the comparison one of rates?"""
    torch.set_num_threads(1)
    prepare(work, results / "manifest.json")
    for path, arms in ((results / "other_rates.jsonl", OTHER_RATES), (results / "further_rates.jsonl", FURTHER_RATES)):
        for seed, (arm, rate) in itertools.product(SEEDS_OF_OTHER_RATES, arms):
            run = Run(arm, seed, STEPS, rate)
            if run not in read_runs(path):
                result = train(run, work)
                append_json(path, result)
                console.print(f"{run.name} at {rate:g}: {losses_in_words(result)}", highlight=False)


def read_other_rates(results: Path, name: str = "other_rates") -> dict[tuple[str, float], dict[int, dict]]:
    """Results of an arm at another rate, by seed."""
    found: dict[tuple[str, float], dict[int, dict]] = {}
    for run, result in read_runs(results / f"{name}.jsonl").items():
        found.setdefault((run.arm, run.learning_rate), {})[run.seed] = result
    return found


@app.command()
def speed(
    results: Results = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 25,
):
    """Seconds of a training step, all arms in turn in one process on one thread."""
    torch.set_num_threads(1)
    arms = [arm for arm in ARMS if arm != "prenorm_double"]
    steps = {arm: training_step(make_model(arm, 0).train()) for arm in arms}
    figures = time_steps(steps, pairs, "Training steps") | {"machine": platform.processor() or platform.machine()}
    write_file(results / "speed.json", json.dumps(figures, indent=1) + "\n")
    console.print(figures)


def table_of(rows: dict[str, list[float]]) -> list[str]:
    """Differences of paired losses, by arm; p corrected over all of them."""
    corrected = corrected_p(rows)
    lines = ["| | by seed | mean [95 %] | p (Holm) |", "|---|---|---|---|"]
    for arm, differences in rows.items():
        by_seed = ", ".join(f"{d:+.3f}" for d in differences)
        mean = bold_if_certain(in_words(differences, 4), corrected[arm])
        lines.append(f"| {ARMS[arm]} | {by_seed} | {mean} | {corrected[arm]:.3f} |")
    return lines


def further_rates_table(results: Path, losses: dict[str, list[float]], seeds: list[int]) -> list[str]:
    """Lines of Markdown, none before the runs: losses at further rates, and minus those at the rates of the sweeps."""
    lines = []
    for (arm, rate), of_seed in read_other_rates(results, "further_rates").items():
        if of_seed.keys() >= set(seeds):
            further = [of_seed[seed]["judging_loss"] for seed in seeds]
            differences = [loss - other for loss, other in zip(further, losses[arm])]
            cells = [ARMS[arm], f"{rate:g}", f"{statistics.mean(further):.4f} ({statistics.stdev(further):.3f})"]
            cells += [", ".join(f"{d:+.3f}" for d in differences), in_words(differences, 4)]
            lines.append(f"| {' | '.join(cells)} |")
    heading = ["", "## At a rate where the sweeps would have continued, equal tokens", ""]
    heading += ["| | learning rate | held-out loss (SD) | minus that of its sweep's rate, by seed | mean [95 %] |"]
    return [*heading, "|---|---|---|---|---|", *lines] if lines else []


@app.command()
def report(results: Results = RESULTS):
    """Write table.md anew, from the results alone."""
    found = read_runs(results / "runs.jsonl")
    finals = {}
    for arm in ARMS:
        tried = tuning_losses(found, swept(arm))
        if tried:
            rate = min(tried, key=tried.__getitem__)
            runs = [Run(arm, seed, steps_of(arm), rate) for seed in SEEDS]
            finals |= {(arm, run.seed): found[run]["judging_loss"] for run in runs if run in found}
    seeds = [seed for seed in SEEDS if all((arm, seed) in finals for arm in ARMS)]
    if len(seeds) < 3:
        raise typer.BadParameter(f"{len(seeds)} seeds have all arms, and three are needed: go on with `run`.")
    losses = {arm: [finals[arm, seed] for seed in seeds] for arm in ARMS}
    parameters = {run.arm: result["parameters"] for run, result in found.items()}

    def less(arm: str, baseline: list[float]) -> list[float]:
        return [loss - other for loss, other in zip(losses[arm], baseline)]

    others = [arm for arm in ARMS if not arm.startswith("prenorm")]
    tables = {"Equal tokens, against PreNorm": {arm: less(arm, losses["prenorm"]) for arm in others}}
    tables["Equal tokens, against 8 blocks"] = {arm: less(arm, losses["blocks"]) for arm in others if arm != "blocks"}
    if (results / "speed.json").exists():
        speeds = json.loads((results / "speed.json").read_text())
        tables["Equal time, against PreNorm"] = {}
        for arm in others:
            ratio = speeds[arm]["ratio_quartiles"][1]
            baseline = interpolated({1: losses["prenorm"], 2: losses["prenorm_double"]}, ratio)
            tables["Equal time, against PreNorm"][arm] = less(arm, baseline)
    lines = [
        "# Reads over depth, from scratch",
        "",
        f"By the [protocol](protocol.md), seeds {seeds[0]} to {seeds[-1]}.",
    ]
    lines += ["", "| | parameters | learning rate | held-out loss (SD) | time of a step |", "|---|---|---|---|---|"]
    for arm, label in ARMS.items():
        rate = next(run.learning_rate for run in found if run.arm == arm and run.seed == seeds[0])
        time_of_step = (
            f"{speeds[arm]['ratio_quartiles'][1]:.2f}"
            if "Equal time, against PreNorm" in tables and arm in speeds
            else ""
        )
        mean, deviation = statistics.mean(losses[arm]), statistics.stdev(losses[arm])
        lines.append(f"| {label} | {parameters[arm]:,} | {rate:g} | {mean:.4f} ({deviation:.3f}) | {time_of_step} |")
    others_of_prenorm = {
        rate: [finals["blocks", seed] - of_seed[seed]["judging_loss"] for seed in seeds]
        for (arm, rate), of_seed in read_other_rates(results).items()
        if arm == "prenorm" and of_seed.keys() >= set(seeds)
    }
    if others_of_prenorm:
        lines += ["", "## 8 blocks against PreNorm at other rates than that of its sweep, equal tokens", ""]
        lines += ["| learning rate of PreNorm | by seed | mean [95 %] |", "|---|---|---|"]
        for rate, of_seeds in others_of_prenorm.items():
            by_seed = ", ".join(f"{d:+.3f}" for d in of_seeds)
            lines.append(f"| {rate:g} | {by_seed} | {in_words(of_seeds, 4)} |")
    lines += further_rates_table(results, losses, seeds)
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", *table_of(rows), ""]
        lines.append(f"Before correction, a difference of {detectable(rows):.3f} is found with probability 0.8.")
    lines += ["", "## Tuning loss by learning rate", "", "| | learning rate: loss |", "|---|---|"]
    for arm, label in ARMS.items():
        tried = tuning_losses(found, arm)
        lines += [f"| {label} | {', '.join(f'{rate:g}: {loss:.3f}' for rate, loss in tried.items())} |"] * bool(tried)
    write_file(results / "table.md", "\n".join(lines) + "\n")
    console.print(f"Wrote {results / 'table.md'}", highlight=False)


if __name__ == "__main__":
    app()
