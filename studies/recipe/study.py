# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Which rate, block size and start suit a converted model that is trained on.

    python -m studies.recipe.study run      # an hour or two on one thread; interrupted, it goes on
    python -m studies.recipe.study report   # table.md and the figure from what lies in studies/recipe

What is compared, and how, was written down first: studies/recipe/protocol.md.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, set_seed

from attnres import AttnResForCausalLM
from attnres.conversion import convert
from attnres.training.adapters import lora_config, queries_config
from attnres.training.scaling.sweep import next_rate
from attnres.utils.figures import COLOURS, finish_axis, write_figure
from attnres.utils.files import write_file
from attnres.utils.timing import machine
from studies.common.arms import BATCH, LORA_RANK, SHAPE, TRAINING, Results, Work, prepare, rows_of
from studies.common.paired import bold_if_certain, corrected_p, detectable, in_words, side
from studies.common.runs import Run as TrainingRun
from studies.common.runs import read_runs, train_missing, trained
from studies.reads.study import RESULTS as READ_STUDY


RESULTS = Path(__file__).parent
BASE_STEPS, STEPS, SEEDS = 600, 60, range(3)
BASES = {  # by width: layers, and sublayers of a block where no other size is tried
    48: (16, 4),
    96: (8, 2),
    192: (4, 2),
}
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BLOCK_SIZES = (1, 2, 4, 8)
STARTS = (0.0, 0.02, 0.2)
LORA_RATE, LORA_SHAPE = 1e-3, {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK}
AUTO = "auto"
STYLES = dict(zip(BASES, (("o-", COLOURS[0]), ("s--", COLOURS[1]), ("^:", COLOURS[2]))))
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Run:
    """One training run on a converted base. Its name is that of its result file."""

    width: int
    mode: str  # queries, lora, or lora_prenorm
    seed: int
    block_size: int  # in sublayers; 0: PreNorm
    query_rate: float | str = AUTO
    start: float = 0.0  # the standard deviation of the queries

    @property
    def name(self) -> str:
        rate = self.query_rate if self.query_rate == AUTO else f"{self.query_rate:g}"
        return f"{self.width}-{self.mode}-size{self.block_size}-rate{rate}-start{self.start:g}-seed{self.seed}"


def of_seeds(found: dict[Run, dict[str, Any]], part: str, width: int, mode: str, *fields, **more) -> list[float]:
    """The losses of the seeds that there are, less the base's."""
    runs = [Run(width, mode, seed, *fields, **more) for seed in SEEDS]
    return [found[run][part] - found[run][f"base_{part}"] for run in runs if run in found]


def losses_by_rate(found: dict[Run, dict[str, Any]], width: int, part: str) -> dict[float, list[float]]:
    """Of the queries alone, of all seeds, by the rates that have all of them, in their order."""
    rates = sorted({run.query_rate for run in found if run.query_rate != AUTO})  # type: ignore[type-var]
    by_rate = {rate: of_seeds(found, part, width, "queries", BASES[width][1], rate) for rate in rates}
    return {rate: of for rate, of in by_rate.items() if len(of) == len(SEEDS)}  # type: ignore[misc]


def block_sizes(width: int) -> tuple[int, ...]:
    """Those that are tried: all sublayers in one block is the last one."""
    num_sublayers = 2 * BASES[width][0]
    return (*(size for size in BLOCK_SIZES if size < num_sublayers), num_sublayers)


def fixed_runs(width: int) -> list[Run]:
    """All but those at constant rates."""
    size = BASES[width][1]
    runs = [
        Run(width, mode, seed, of, AUTO)
        for seed in SEEDS
        for of in dict.fromkeys((size, *block_sizes(width)))
        for mode in ("queries", "lora")
    ]
    runs += [Run(width, "lora_prenorm", seed, 0) for seed in SEEDS]
    return runs + [Run(width, "lora", seed, size, AUTO, start) for seed in SEEDS for start in STARTS[1:]]


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """`None` when everything has a result."""
    for width in BASES:
        means = {rate: statistics.mean(of) for rate, of in losses_by_rate(found, width, "tuning_loss").items()}
        rate = next_rate(means, RATES, factor=3.0)
        if rate is not None:
            runs = [Run(width, "queries", seed, BASES[width][1], rate) for seed in SEEDS]
        else:
            runs = fixed_runs(width)
        missing = [run for run in runs if run not in found]
        if missing:
            return missing[0]
    return None


def make_base(width: int, work: Path) -> Path:
    """A PreNorm checkpoint, trained on the standard library."""
    folder = work / f"recipe-{width}"
    if not folder.exists():
        shape = {"num_hidden_layers": BASES[width][0], "layer_types": None, "hidden_size": width}
        shape |= {"intermediate_size": 3 * width, "num_attention_heads": 4 * -(-width // 64)}
        set_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config.from_dict(SHAPE.to_dict() | shape), dtype=torch.float32)
        rate = 4e-3 * (64 / width) ** 0.5
        run = TrainingRun(f"base{width}", 0, BASE_STEPS, rate)
        trained(model, rows_of(work, "library", "train", 0)[: BASE_STEPS * BATCH], run, work, **plain_fields())
        unfinished = folder.with_suffix(".unfinished")
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def plain_fields() -> dict[str, Any]:
    return TRAINING | {"eval_strategy": "no", "query_learning_rate": None}


def make_model(run: Run, work: Path):
    base = make_base(run.width, work)
    if run.mode == "lora_prenorm":
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        set_seed(run.seed)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA_SHAPE))
    folder = work / f"recipe-{run.width}-size{run.block_size}"
    if not folder.exists():
        convert(base, folder, block_size=run.block_size, verify=False)
    model = AttnResForCausalLM.from_pretrained(folder, dtype=torch.float32)
    set_seed(run.seed)
    if run.start:
        # Of a generator of their own, so that LoRA's matrices are the same with all starts
        generator = torch.Generator().manual_seed(run.seed)
        torch.nn.init.normal_(model.model.depth_queries.query, std=run.start, generator=generator)
    return get_peft_model(model, queries_config() if run.mode == "queries" else lora_config(**LORA_SHAPE))


def train(run: Run, work: Path) -> dict[str, Any]:
    """Train one run; its figures."""
    start = time.time()
    model = make_model(run, work)
    fields = plain_fields() | {"weight_decay": 0.0}
    if run.query_rate == AUTO and run.mode != "lora_prenorm":
        fields["query_learning_rate"] = AUTO
    rate = LORA_RATE if run.query_rate == AUTO else run.query_rate
    rows = rows_of(work, "packages", "train", run.seed)[: STEPS * BATCH]
    trainer = trained(model, rows, TrainingRun(run.mode, run.seed, STEPS, rate), work, **fields)
    figures = {
        f"{part}_loss": trainer.evaluate(rows_of(work, "packages", name))["eval_loss"]
        for part, name in (("tuning", "tuning"), ("judging", "held_out"))
    }
    measured = [entry["query_learning_rate"] for entry in trainer.state.log_history if "query_learning_rate" in entry]
    return {
        "run": asdict(run),
        **figures,
        **base_losses(run.width, work),
        "measured_rate": measured[0] if fields["query_learning_rate"] == AUTO else None,
        "seconds": time.time() - start,
        "machine": machine("cpu"),
    }


def base_losses(width: int, work: Path) -> dict[str, float]:
    """Before the training, kept beside the base."""
    path = work / f"recipe-{width}.json"
    if not path.exists():
        model = AutoModelForCausalLM.from_pretrained(make_base(width, work), dtype=torch.float32).eval()
        figures = {}
        for part, name in (("tuning", "tuning"), ("judging", "held_out")):
            ids = torch.stack([row["input_ids"] for row in rows_of(work, "packages", name)])
            with torch.no_grad():
                losses = [model(batch, labels=batch).loss.item() for batch in ids.split(2 * BATCH)]
            figures[f"base_{part}_loss"] = statistics.mean(losses)
        write_file(path, json.dumps(figures))
    return json.loads(path.read_text())


@app.command("run")
def run_all(work: Work = Path("study-work"), results: Results = RESULTS):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare(work, READ_STUDY / "manifest.json")

    def figures(result: dict[str, Any]) -> str:
        return f"{result['judging_loss'] - result['base_judging_loss']:+.4f}, {result['seconds']:.0f} s"

    train_missing(next_run, lambda run: train(run, work), results / "runs.jsonl", figures, Run)
    console.print(f"All runs are in {results}/runs.jsonl; `python -m studies.recipe.study report` makes the table.")


def label_of(width: int) -> str:
    return f"{BASES[width][0]} layers of {width}"


def rates_table(found: dict[Run, dict[str, Any]]) -> list[str]:
    lines = ["| base | by constant rate, mean | `auto` measured | `auto` | less the best constant rate |"]
    lines += ["|---|---|---|---|---|"]
    for width, (_, size) in BASES.items():
        tuning = {rate: statistics.mean(of) for rate, of in losses_by_rate(found, width, "tuning_loss").items()}
        best = min(tuning, key=tuning.__getitem__)
        judging = losses_by_rate(found, width, "judging_loss")
        cells = [f"{rate:g}: {statistics.mean(of):+.4f}" for rate, of in judging.items()]
        cells = [f"**{cell}**" if rate == best else cell for rate, cell in zip(judging, cells)]
        measured = ", ".join(f"{found[Run(width, 'queries', s, size)]['measured_rate']:g}" for s in SEEDS)
        auto = of_seeds(found, "judging_loss", width, "queries", size)
        regret = [a - b for a, b in zip(auto, judging[best])]
        row = [label_of(width), ", ".join(cells), measured, f"{statistics.mean(auto):+.4f}", in_words(regret, 4)]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def differences(found: dict[Run, dict[str, Any]], width: int) -> dict[str, tuple[list[float], list[float]]]:
    """By what is tried, the changes of the loss, and their differences from what they are compared with."""
    part, size = "judging_loss", BASES[width][1]
    rows = {}
    for mode, label in (("queries", "queries alone"), ("lora", "LoRA and queries")):
        middle = of_seeds(found, part, width, mode, 8)
        for of in block_sizes(width):
            changes = of_seeds(found, part, width, mode, of)
            name = "one block" if of == 2 * BASES[width][0] else f"blocks of {of}"
            if of != 8:
                rows[f"{label}, {name}, less blocks of 8"] = changes, [a - b for a, b in zip(changes, middle)]
    zero = of_seeds(found, part, width, "lora", size)
    for start in STARTS[1:]:
        changes = of_seeds(found, part, width, "lora", size, AUTO, start)
        rows[f"queries from N(0, {start:g}), less from zero"] = changes, [a - b for a, b in zip(changes, zero)]
    prenorm = of_seeds(found, part, width, "lora_prenorm", 0)
    rows["LoRA and queries, less LoRA on PreNorm"] = zero, [a - b for a, b in zip(zero, prenorm)]
    return rows


def plot_rates(found: dict[Run, dict[str, Any]], stem: Path) -> list[Path]:
    """The change of the loss over the rate of the queries, with the 95 % interval over seeds, and what `auto` took."""
    figure, axis = plt.subplots(figsize=(7, 4.4))
    for width, (style, colour) in STYLES.items():
        by_rate = losses_by_rate(found, width, "judging_loss")
        means = [statistics.mean(of) for of in by_rate.values()]
        sides = [side(of) for of in by_rate.values()]
        axis.errorbar(list(by_rate), means, sides, fmt=style, color=colour, capsize=3, label=label_of(width))
        size = BASES[width][1]
        measured = [found[Run(width, "queries", s, size)]["measured_rate"] for s in SEEDS]
        reached = of_seeds(found, "judging_loss", width, "queries", size)
        label = "auto" if width == list(BASES)[-1] else None
        axis.scatter(measured, reached, marker="*", s=90, color=colour, edgecolors="black", zorder=3, label=label)
    axis.axhline(0, color=COLOURS[6], linewidth=0.7)
    axis.set(xlabel="peak rate of the queries", ylabel="held-out loss less the base's", xscale="log")
    axis.set_ylim(-0.06, 0.06)  # what ruins a model lies above
    finish_axis(axis)
    axis.legend(frameon=False)
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


@app.command()
def report(results: Results = RESULTS):
    """Write table.md and the figure anew, from the results alone."""
    found = read_runs(results / "runs.jsonl", Run)
    if next_run(found) is not None:
        raise typer.BadParameter(f"There are {len(found)} runs, and more are needed: go on with `run`.")
    lines = ["# Rate, block size and start of a retrofit", ""]
    lines += ["By the [protocol](protocol.md), three seeds: changes of the held-out loss from the base's.", ""]
    lines += ["## Rates of the queries alone", "", *rates_table(found)]
    for width in BASES:
        rows = differences(found, width)
        paired = {label: of for label, (_, of) in rows.items()}
        corrected = corrected_p(paired)
        lines += ["", f"## Block sizes and starts: {label_of(width)}", ""]
        lines += ["| | change | difference by seed | mean [95 %] | p (Holm) |", "|---|---|---|---|---|"]
        for label, (changes, of) in rows.items():
            p = corrected[label]
            by_seed = ", ".join(f"{d:+.4f}" for d in of)
            words = bold_if_certain(in_words(of, 4), p)
            lines.append(f"| {label} | {statistics.mean(changes):+.4f} | {by_seed} | {words} | {p:.3f} |")
        lines += ["", f"Before correction, a difference of {detectable(paired):.4f} is found with probability 0.8."]
    write_file(results / "table.md", "\n".join(lines) + "\n")
    paths = [results / "table.md", *plot_rates(found, results / "rates")]
    console.print(*(f"Wrote {path}" for path in paths), sep="\n", highlight=False)


if __name__ == "__main__":
    app()
