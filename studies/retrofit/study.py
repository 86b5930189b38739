# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A real pretrained model trained further, as it is and converted: what it learns, and what it keeps.

    python -m studies.retrofit.study run      # hours on one thread; interrupted, it goes on
    python -m studies.retrofit.study speed    # seconds per training step, alternating, in one process
    python -m studies.retrofit.study keep full 0 FOLDER   # trains one of the runs again and keeps the model
    python -m studies.retrofit.study report   # table.md and the figure from what lies in studies/retrofit

What is compared, and how, was written down first: studies/retrofit/protocol.md.
"""

import hashlib
import json
import shutil
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from attnres.conversion import convert, revert
from attnres.data.text import package_sources, windows
from attnres.eval.tasks import installed
from attnres.training.adapters import lora_config, queries_config
from attnres.training.scaling.sweep import next_rate
from attnres.utils.figures import COLOURS, finish_axis, write_figure
from attnres.utils.files import write_file
from attnres.utils.timing import alternate, machine
from studies.common.arms import check_text
from studies.common.paired import bold_if_certain, corrected_p, detectable, in_words, interpolated, side
from studies.common.runs import SEEDS, TUNING_SEED, Run, finished_seeds, read_runs, train_missing, trained
from studies.common.steps import figures_of, training_step
from studies.real_model.prompts import CHAT
from studies.real_model.run import PACKAGE, packaged_model


RESULTS = Path(__file__).parent
STEPS, BATCH, LENGTH = 40, 2, 128
TUNING_WINDOWS, JUDGING_WINDOWS, QUESTIONS, ANSWER_TOKENS = 24, 48, 100, 48
NUM_BLOCKS, LORA_RANK, QUERY_RATE = 8, 8, 2e-4
TEXTS = ("train", "tuning", "judging", "old_text")
ARMS = {
    "base": "as it is",
    "full_prenorm": "all weights, PreNorm",
    "full_prenorm_double": "all weights, PreNorm, twice the tokens",
    "full": "all weights, AttnRes",
    "lora_prenorm": "LoRA, PreNorm",
    "lora_prenorm_double": "LoRA, PreNorm, twice the tokens",
    "lora": "LoRA and queries",
    "queries": "queries alone",
    "heads": "queries alone, 4 heads",
}
GRIDS = {
    "full": (1e-5, 3e-5, 9e-5),
    "lora": (1e-4, 3e-4, 9e-4),
    "queries": (1e-4, 3e-4, 9e-4),
    "heads": (1e-4, 3e-4, 9e-4),
}
METRICS = {
    "judging": "loss, new text",
    "old_text": "loss, other text",
    "quartz": "QuaRTz, points",
    "chat": "loss, the base's own answers",
}
# Each arm is compared with the other
COMPARED = (("full", "full_prenorm"), ("lora", "lora_prenorm"), ("queries", "base"), ("heads", "queries"))
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def swept(arm: str) -> str:
    """The arm whose rates are those of this one."""
    return arm.removesuffix("_double")


def grid(arm: str) -> tuple[float, ...]:
    return GRIDS[arm.removesuffix("_prenorm").removesuffix("_kept")]


def tuning_losses(found: dict[Run, dict[str, Any]], arm: str) -> dict[float, float]:
    """By learning rate, in their order."""
    losses = {
        run.learning_rate: result["tuning"]
        for run, result in found.items()
        if (run.arm, run.seed) == (arm, TUNING_SEED)
    }
    return dict(sorted(losses.items()))


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """First all sweeps, and then all arms seed by seed; `None` when everything has a result."""
    rates = {"base": 0.0}
    for arm in map(swept, list(ARMS)[1:]):
        losses = tuning_losses(found, arm)
        rate = next_rate(losses, grid(arm), factor=3.0)
        if rate is not None:
            return Run(arm, TUNING_SEED, STEPS, rate)
        rates[arm] = min(losses, key=losses.__getitem__)
    for seed in SEEDS:
        for arm in ARMS:
            if arm == "base" and seed:  # nothing in it depends on a seed
                continue
            steps = 0 if arm == "base" else 2 * STEPS if arm.endswith("_double") else STEPS
            run = Run(arm, seed, steps, rates[swept(arm)])
            if run not in found:
                return run
    return None


def new_text() -> dict[str, list[str]]:
    """The package's modules; one in ten is held out by its name, and of these every third is for tuning."""
    parts: dict[str, list[str]] = {"train": [], "tuning": [], "judging": []}
    for name, text in package_sources(PACKAGE).items():
        number = zlib.crc32(name.encode())
        parts["train" if number % 10 else "tuning" if number % 3 == 0 else "judging"].append(text)
    return parts


def prepare(work: Path, results: Path):
    """The models, and the token ids of all that is trained on and judged by, under `work`.

    Raises:
        typer.BadParameter: if the texts are not those that the results were made of.
    """
    _make_rows(work)
    rows = torch.load(work / "rows.pt")
    # The base's own answers are those of a kind of CPU, and the questions are made of the same packages as the texts
    made_of = {part: hashlib.sha256(rows[part].numpy().tobytes()).hexdigest() for part in TEXTS}
    check_text(made_of, results / "manifest.json", work)
    write_file(results / "manifest.json", json.dumps(made_of, indent=1) + "\n")


@torch.no_grad()
def _make_rows(work: Path):
    if (work / "ready").exists():
        return
    if work.exists() and any(work.iterdir()):
        raise typer.BadParameter(f"{work} holds something else: give a new folder for models and windows.")
    made = work.with_name(f"{work.name}.unfinished")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    convert(packaged_model(), made / "attnres", num_blocks=NUM_BLOCKS)
    convert(made / "attnres", made / "heads", num_heads=4)
    revert(made / "attnres", made / "base", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    generator = torch.Generator().manual_seed(0)
    counts = {"train": None, "tuning": TUNING_WINDOWS, "judging": JUDGING_WINDOWS, "old_text": JUDGING_WINDOWS}
    texts = new_text() | {"old_text": [row["text"] for row in installed.texts()["test"]]}
    rows: dict[str, Any] = {}
    for part, count in counts.items():
        found = windows(tokenizer, texts[part], LENGTH)
        rows[part] = found[torch.randperm(len(found), generator=generator)[:count]]
    model = AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.float32).eval()
    rows["chat"] = []
    for text in CHAT:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        rows["chat"].append((answer, ids.shape[1]))
    rows["quartz"] = [
        [
            (
                tokenizer(text + end, return_tensors="pt").input_ids,
                tokenizer(text, return_tensors="pt").input_ids.shape[1],
            )
            for end in ends
        ]
        + [right]
        for text, ends, right in questions()
    ]
    torch.save(rows, made / "rows.pt")
    (made / "ready").touch()
    made.rename(work)


def questions() -> list[tuple[str, list[str], int]]:
    """Of QuaRTz, as our task asks them: the text, its two ends, and which is right."""
    rows = list(installed.quartz()["test"])[:QUESTIONS]
    return [
        (f"Question: {row['question']}\nAnswer:", [f" {option}" for option in row["options"]], row["answer"])
        for row in rows
    ]


def loss_of(model, ids: torch.Tensor, start: int = 1) -> float:
    """The sum over the tokens from `start` on."""
    logits = model(ids).logits[:, start - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, start:].flatten(), reduction="sum").item()


@torch.no_grad()
def judge(model, rows: dict[str, Any], only_tuning: bool) -> dict[str, float]:
    """The metrics of a model: mean losses of a token, and the part of right answers in percent."""
    model.eval()

    def mean(part: str) -> float:
        return sum(loss_of(model, ids) for ids in rows[part].split(8)) / (len(rows[part]) * (LENGTH - 1))

    found = {"tuning": mean("tuning")}
    if only_tuning:
        return found
    found |= {part: mean(part) for part in ("judging", "old_text")}
    found["chat"] = sum(loss_of(model, ids, start) for ids, start in rows["chat"]) / sum(
        ids.shape[1] - start for ids, start in rows["chat"]
    )
    right = [min((0, 1), key=lambda i: loss_of(model, *ends[i])) == answer for *ends, answer in rows["quartz"]]
    return found | {"quartz": 100 * statistics.mean(right)}


def only_queries(arm: str) -> bool:
    return arm in ("queries", "heads", "queries_kept")


def make_model(arm: str, seed: int, work: Path):
    """The model that an arm starts from, with its adapters; arms that end in `_kept` have a stream that is kept."""
    plain = arm == "base" or "_prenorm" in arm
    folder = "base" if plain else "heads" if arm == "heads" else "kept" if arm.endswith("_kept") else "attnres"
    model = AutoModelForCausalLM.from_pretrained(work / folder, dtype=torch.float32)
    set_seed(seed)
    if only_queries(arm):
        return get_peft_model(model, queries_config())
    if arm.startswith("lora"):
        shape = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK}
        plain = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
        return get_peft_model(model, LoraConfig(**plain, **shape) if "_prenorm" in arm else lora_config(**shape))
    return model


def train(run: Run, work: Path, save_to: Path | None = None) -> dict[str, Any]:
    """Train one run; its figures. The model is kept in `save_to`."""
    start, rows = time.time(), torch.load(work / "rows.pt")
    model = make_model(run.arm, run.seed, work)
    log = []
    if run.steps:
        order = torch.randperm(len(rows["train"]), generator=torch.Generator().manual_seed(run.seed))
        ids = rows["train"][order[: run.steps * BATCH]]
        trainer = trained(
            model,
            [{"input_ids": row, "labels": row} for row in ids],
            run,
            work,
            per_device_train_batch_size=BATCH,
            query_learning_rate=None if only_queries(run.arm) else QUERY_RATE,  # `None`: the run's own
            weight_decay=0.0,
        )
        log = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    if save_to is not None:
        model.save_pretrained(save_to)
        AutoTokenizer.from_pretrained(work / "base").save_pretrained(save_to)
    return {
        "run": asdict(run),
        **judge(model, rows, only_tuning=run.seed == TUNING_SEED),
        "train_loss": log,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad) if run.steps else 0,
        "seconds": time.time() - start,
        "machine": machine("cpu"),
    }


def figures_in_words(result: dict[str, Any]) -> str:
    found = [f"{name} {result[name]:.4f}" for name in ("tuning", *METRICS) if name in result]
    return ", ".join([*found, f"{result['seconds']:.0f} s"])


@app.command("run")
def run_all(
    work: Annotated[Path, typer.Option(help="Folder for models and windows.")] = Path("retrofit-work"),
    results: Annotated[Path, typer.Option(help="Folder for the figures of every run.")] = RESULTS,
):
    """Train what has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare(work, results)
    train_missing(next_run, lambda run: train(run, work), results / "runs.jsonl", figures_in_words)
    console.print(f"All runs are in {results}/runs.jsonl; `python -m studies.retrofit.study report` makes the table.")


@app.command()
def keep(
    arm: Annotated[str, typer.Argument(help="Of the study.")],
    seed: Annotated[int, typer.Argument(help="Of the study.")],
    folder: Annotated[Path, typer.Argument(help="For the model and its tokenizer.")],
    work: Annotated[Path, typer.Option(help="Folder for models and windows.")] = Path("retrofit-work"),
    results: Annotated[Path, typer.Option(help="Folder with the figures of every run.")] = RESULTS,
):
    """Train one of the runs again and keep the model."""
    torch.set_num_threads(1)
    if seed not in SEEDS:
        raise typer.BadParameter(f"Seed {seed} is not one of {SEEDS[0]} to {SEEDS[-1]}.")
    found = read_runs(results / "runs.jsonl")
    of_study = [(run, result) for run, result in found.items() if (run.arm, run.seed) == (arm, seed)]
    if not of_study:
        raise typer.BadParameter(f"There is no run of `{arm}` with seed {seed} in {results}.")
    prepare(work, results)
    ((run, before),) = of_study
    result = train(run, work, save_to=folder)
    console.print(f"{folder}: loss on new text {result['judging']:.4f}, in the study {before['judging']:.4f}")


@app.command()
def speed(
    work: Annotated[Path, typer.Option(help="Folder for models and windows.")] = Path("retrofit-work"),
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 7,
):
    """Seconds of a training step of the arms that are compared at equal time, in turn, on one thread."""
    torch.set_num_threads(1)
    prepare(work, results)
    figures = time_pairs((("full_prenorm", "full"), ("lora_prenorm", "lora")), work, pairs)
    write_file(results / "speed.json", json.dumps(figures, indent=1) + "\n")
    console.print(figures)


def time_pairs(arms: Sequence[tuple[str, str]], work: Path, pairs: int) -> dict[str, Any]:
    """Time training steps of all arms in turn: by arm, median seconds, and quartiles of the ratio to its PreNorm.

    Args:
        arms: pairs, PreNorm first.
        pairs: steps of each model.
    """
    ids = torch.load(work / "rows.pt")["train"][:BATCH]
    names = [arm for pair in arms for arm in pair]
    steps = [training_step(make_model(arm, 0, work).train(), ids, rate=1e-6) for arm in names]
    seconds = alternate(steps, pairs, "Training steps")
    return {arm: figures_of(seconds[:, i], seconds[:, i - i % 2]) for i, arm in enumerate(names)}


def differences(
    finals: dict[tuple[str, int], dict[str, Any]],
    seeds: list[int],
    speeds: dict[str, Any],
    compared: Sequence[tuple[str, str]] = COMPARED,
) -> dict[tuple[str, str, str, str], list[float]]:
    """By metric, arm, the arm it is compared with and kind of comparison, the difference of each seed."""
    found = {}
    for metric in METRICS:
        for arm, other in compared:
            pairs = [(finals[arm, s][metric], finals[other, 0 if other == "base" else s][metric]) for s in seeds]
            found[metric, arm, other, "equal tokens"] = [a - b for a, b in pairs]
            if f"{other}_double" not in ARMS or arm not in speeds:
                continue
            twice = [finals[f"{other}_double", s][metric] for s in seeds]
            longer = interpolated({1: [once for _, once in pairs], 2: twice}, speeds[arm]["ratio_quartiles"][1])
            found[metric, arm, other, "equal time"] = [a - b for (a, _), b in zip(pairs, longer)]
    return found


def means_table(finals: dict[tuple[str, int], dict[str, Any]], seeds: list[int], arms: dict[str, str]) -> list[str]:
    """Lines of Markdown: a row for each arm, its metrics as means over the seeds."""
    lines = [
        f"| | trained parameters | learning rate | {' | '.join(METRICS.values())} |",
        "|---" * (3 + len(METRICS)) + "|",
    ]
    for arm, label in arms.items():
        of_arm = [finals[arm, s] for s in ([0] if arm == "base" else seeds)]
        figures = [f"{statistics.mean(r[m] for r in of_arm):.4f}" for m in METRICS]
        run = of_arm[0]["run"]
        lines.append(
            f"| {label} | {of_arm[0]['trained_parameters']:,} | {run['learning_rate']:g} | {' | '.join(figures)} |"
        )
    return lines


def differences_tables(rows: dict[tuple[str, str, str, str], list[float]], arms: dict[str, str]) -> list[str]:
    """Lines of Markdown: a table for each metric, a row for each comparison; p is corrected over all of them."""
    constant = {key for key, values in rows.items() if max(values) == min(values)}
    corrected = corrected_p({key: values for key, values in rows.items() if key not in constant})
    lines = []
    for metric, label in METRICS.items():
        lines += [
            "",
            f"## {label}",
            "",
            "| | less | | by seed | mean [95 %] | p (Holm) |",
            "|---|---|---|---|---|---|",
        ]
        of_metric = {key: values for key, values in rows.items() if key[0] == metric}
        for (_, arm, other, kind), values in of_metric.items():
            by_seed = ", ".join(f"{d:+.4f}" for d in values)
            if (metric, arm, other, kind) in constant:
                lines.append(f"| {arms[arm]} | {arms[other]} | {kind} | {by_seed} | the same in every seed | |")
                continue
            p = corrected[metric, arm, other, kind]
            mean = bold_if_certain(in_words(values, 4), p)
            lines.append(f"| {arms[arm]} | {arms[other]} | {kind} | {by_seed} | {mean} | {p:.3f} |")
        spread = {key: values for key, values in of_metric.items() if key[3] == "equal tokens"}
        lines += ["", f"Before correction, a difference of {detectable(spread):.4f} is found with probability 0.8."]
    return lines


def sweeps_table(found: dict[Run, dict[str, Any]], arms: dict[str, str]) -> list[str]:
    """Lines of Markdown: the tuning losses of each arm that has a sweep."""
    lines = ["", "## Tuning loss by learning rate", "", "| | learning rate: loss |", "|---|---|"]
    for arm, label in arms.items():
        if losses := tuning_losses(found, arm):
            lines.append(f"| {label} | {', '.join(f'{rate:g}: {loss:.3f}' for rate, loss in losses.items())} |")
    return lines


# By the weights that are trained; filled with AttnRes, empty in PreNorm
MARKERS = {
    "full": ("o", COLOURS[0]),
    "lora": ("s", COLOURS[1]),
    "queries": ("^", COLOURS[2]),
    "heads": ("v", COLOURS[3]),
}


def plot_retention(finals: dict[tuple[str, int], dict[str, Any]], seeds: list[int], stem: Path) -> list[Path]:
    """What each arm has learned and forgotten: changes from the base with their 95 % intervals over seeds."""
    shown = {"old_text": "other text", "chat": "the base's own answers"}
    figure, axes = plt.subplots(1, len(shown), figsize=(11, 4.8), sharex=True, layout="constrained")
    legend = []
    for axis, (metric, label) in zip(axes, shown.items()):
        axis.axhline(0, color=COLOURS[6], linewidth=0.7)
        axis.axvline(0, color=COLOURS[6], linewidth=0.7)
        for arm in list(ARMS)[1:]:
            marker, colour = MARKERS[arm.removesuffix("_double").removesuffix("_prenorm")]
            changes = [[finals[arm, s][m] - finals["base", 0][m] for s in seeds] for m in ("judging", metric)]
            (x, y), (x_side, y_side) = (map(statistics.mean, changes), map(side, changes))
            fill, size = "white" if "_prenorm" in arm else colour, 10 if arm.endswith("_double") else 6
            axis.errorbar(x, y, xerr=x_side, yerr=y_side, color=colour, elinewidth=1, capsize=2)
            # Above all intervals, which would hide those of other arms
            style = {"marker": marker, "color": colour, "markerfacecolor": fill, "markersize": size, "linestyle": ""}
            line = axis.plot(x, y, zorder=3, label=ARMS[arm], **style)
            legend += line if axis is axes[0] else []
        axis.set(xlabel="← more learned: loss on new text", ylabel="loss: more forgotten →", title=f"On {label}")
        finish_axis(axis)
    figure.legend(handles=legend, frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    title = f"Changes of the base's loss in nats per token, with 95 % intervals over {len(seeds)} seeds"
    figure.suptitle(title, fontsize=10)
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


@app.command()
def report(results: Annotated[Path, typer.Option(help="Folder with the figures of every run.")] = RESULTS):
    """Write table.md and the figure anew, from the results alone."""
    found = read_runs(results / "runs.jsonl")
    finals, seeds = finished_seeds(found, list(ARMS)[1:], SEEDS)
    speeds = json.loads((results / "speed.json").read_text()) if (results / "speed.json").exists() else {}
    lines = [
        "# A real model trained further",
        "",
        f"By the [protocol](protocol.md), seeds {seeds[0]} to {seeds[-1]}.",
        "",
    ]
    lines += means_table(finals, seeds, ARMS)
    lines += differences_tables(differences(finals, seeds, speeds), ARMS)
    lines += sweeps_table(found, ARMS)
    write_file(results / "table.md", "\n".join(lines) + "\n")
    paths = [results / "table.md", *plot_retention(finals, seeds, results / "retention")]
    console.print(*(f"Wrote {path}" for path in paths), sep="\n", highlight=False)


if __name__ == "__main__":
    app()
