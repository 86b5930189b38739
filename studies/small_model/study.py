# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What Attention Residuals bring to a small model: from scratch, in continued training, with adapters.

    python -m studies.small_model.study run [--jobs 2]    # hours; finished runs are kept, and left out the next time
    python -m studies.small_model.study speed             # seconds per training step, alternating, in one process
    python -m studies.small_model.study report            # tables and figures from what lies in studies/small_model

Models are trained on the sources of Python's standard library, and continued on those of four installed packages
(versions in constraints.txt): another domain, which the base has not seen. Every twentieth file of each is held out.
All arms of a seed see the same windows in the same order and start from the same weights, so their losses are paired.
"""

import json
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from attnres.training import AttnResTrainer, AttnResTrainingArguments
from attnres.utils.files import append_json, write_file
from attnres.utils.timing import activation_bytes, alternate
from studies.common.arms import (
    BATCH,
    LENGTH,
    PACKAGES,
    TRAINING,
    Run,
    all_runs,
    continued,
    from_scratch,
    prepare,
    rows_of,
)
from studies.common.runs import read_runs
from studies.common.steps import training_step
from studies.small_model.tables import last_loss, write_tables


RESULTS = Path(__file__).parent
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


def train(run: Run, work: Path) -> dict:
    """Train one run; its figures. Saves the checkpoint that others continue from."""
    torch.set_num_threads(1)
    start = time.time()
    pretrain = run.stage == "pretrain"
    corpus = "library" if pretrain else "packages"
    model = from_scratch(run.arm, run.seed) if pretrain else continued(run.arm, work / run.needs, work)
    arguments = AttnResTrainingArguments(
        **TRAINING,
        output_dir=str(work / "trainer"),
        max_steps=run.steps,
        learning_rate=run.learning_rate,
        query_learning_rate=run.query_learning_rate,
        query_weight_decay=run.query_weight_decay,
        warmup_steps=run.steps // 20,
        train_sampling_strategy="sequential",
        eval_steps=run.steps // 6,
        eval_on_start=True,
        logging_steps=run.steps // 12,
        disable_tqdm=True,
        seed=run.seed,
    )
    trainer = AttnResTrainer(
        model=model,
        args=arguments,
        train_dataset=rows_of(work, corpus, "train", run.seed)[: run.steps * BATCH],
        eval_dataset=rows_of(work, corpus, "held_out"),
    )
    trainer.train()
    if run.name == f"pretrain-prenorm-seed{run.seed}":
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / run.name)
        model.save_pretrained(work / run.name)
    history = trainer.state.log_history
    result = {
        "run": asdict(run),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "held_out_loss": {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry},
        "train_loss": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "depth_entropy": {entry["step"]: entry["depth_entropy"] for entry in history if "depth_entropy" in entry},
        "query_norm": {entry["step"]: entry["query_norm"] for entry in history if "query_norm" in entry},
        "site_entropy": {
            key.removeprefix("depth/entropy_"): value
            for key, value in next((e for e in reversed(history) if "depth_entropy" in e), {}).items()
            if key.startswith("depth/entropy_")
        },
        "seconds": time.time() - start,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft", *PACKAGES)},
        "python": sys.version.split()[0],
    }
    return result


def save(result: dict, path: Path):
    write_file(path, json.dumps(result, indent=1) + "\n")


@app.callback()
def study():
    """What Attention Residuals bring to a small model."""


@app.command("run")
def run_all(
    work: Annotated[Path, typer.Option(help="Folder for windows and checkpoints.")] = Path("study-work"),
    results: Annotated[Path, typer.Option(help="Folder for the figures of every run.")] = RESULTS,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each on one thread.")] = 2,
    only: Annotated[str, typer.Option(help="Only runs with this in their name.")] = "",
):
    """Train what has no result yet."""
    manifest = prepare(work, results / "manifest.json")
    save(manifest, results / "manifest.json")
    todo = [run for run in all_runs() if only in run.name]
    made = {run.name for run in all_runs() if (work / run.name / "config.json").exists()}
    finished = read_runs(results / "runs.jsonl", Run)
    todo = [
        run
        for run in todo
        if run not in finished or (run.arm == "prenorm" and run.stage == "pretrain" and run.name not in made)
    ]
    with (
        ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool,
        Progress(console=console) as progress,
    ):
        bar = progress.add_task("Training", total=len(todo))
        running = {}
        while todo or running:
            for run in list(todo):
                if len(running) < jobs and run.needs in (None, *made):
                    todo.remove(run)
                    running[pool.submit(train, run, work)] = run
            if not running:
                raise ValueError(f"`{todo[0].name}` needs `{todo[0].needs}`, which is not there: run it first.")
            future = next(as_completed(running))
            run = running.pop(future)
            result = future.result()
            append_json(results / "runs.jsonl", result)
            if (work / run.name / "config.json").exists():
                made.add(run.name)
            progress.advance(bar)
            console.print(
                f"{run.name}: held-out loss {last_loss(result):.4f}, {result['seconds']:.0f} s", highlight=False
            )
    console.print(
        f"Wrote {results}/runs.jsonl; `python -m studies.small_model.study report` makes the tables and figures."
    )


@app.command()
def speed(
    results: Annotated[Path, typer.Option(help="Folder for the figures.")] = RESULTS,
    pairs: Annotated[int, typer.Option(help="Alternating steps of each model.")] = 25,
):
    """Seconds and activation memory of a training step, the three models in turn in one process on one thread."""
    torch.set_num_threads(1)
    models = {arm: from_scratch(arm, 0).train() for arm in ("prenorm", "block", "full")}
    seconds = alternate([training_step(model) for model in models.values()], pairs, "Training steps")
    sizes = {arm: activation_bytes(model, LENGTH, checkpointing=False) for arm, model in models.items()}
    figures = {}
    for i, arm in enumerate(models):
        ratios = seconds[:, i] / seconds[:, 0]
        figures[arm] = {
            "seconds": seconds[:, i].median().item(),
            "tokens_per_second": BATCH * LENGTH / seconds[:, i].median().item(),
            "ratio": ratios.median().item(),
            "ratio_quartiles": ratios.quantile(torch.tensor([0.25, 0.75], dtype=ratios.dtype)).tolist(),
            "activations": sizes[arm] / sizes["prenorm"],
        }
    save({"figures": figures, "machine": platform.processor() or platform.machine()}, results / "speed.json")
    console.print(figures)


@app.command()
def report(results: Annotated[Path, typer.Option(help="Folder with the figures of every run.")] = RESULTS):
    """Write table.md and the figures anew, from the results alone."""
    for path in write_tables(results):
        console.print(f"Wrote {path}", highlight=False)


if __name__ == "__main__":
    app()
