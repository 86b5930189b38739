# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What all studies do with runs: train those that are missing, and keep a line of figures for each in a JSONL file."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from attnres.training import AttnResTrainer, AttnResTrainingArguments
from attnres.utils.files import append_json, read_json_lines


SEEDS, TUNING_SEED = range(5), 100
console = Console()


@dataclass(frozen=True)
class Run:
    """One training run of an arm."""

    arm: str
    seed: int
    steps: int
    learning_rate: float

    @property
    def name(self) -> str:
        of = f"lr{self.learning_rate:g}" if self.seed == TUNING_SEED else f"seed{self.seed}"
        return f"{self.arm}-{of}"


def read_runs(path: Path, run_class: type = Run) -> dict[Any, dict[str, Any]]:
    """By run, its result, in the order in which they were trained."""
    return {run_class(**result["run"]): result for result in read_json_lines(path)}


def finished_seeds(
    found: dict[Run, dict[str, Any]], arms: Iterable[str], seeds: Iterable[int], needed: int = 3
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[int]]:
    """By arm and seed the results that are compared, without those of the sweeps, and the seeds that have all arms.

    Raises:
        typer.BadParameter: if fewer seeds than needed have them.
    """
    finals = {(run.arm, run.seed): result for run, result in found.items() if run.seed != TUNING_SEED}
    finished = [seed for seed in seeds if all((arm, seed) in finals for arm in arms)]
    if len(finished) < needed:
        in_words = {2: "two", 3: "three"}[needed]
        raise typer.BadParameter(
            f"{len(finished)} seeds have all arms, and {in_words} are needed: continue with `run`."
        )
    return finals, finished


def losses_in_words(result: dict[str, Any]) -> str:
    return f"tuning {result['tuning_loss']:.4f}, judging {result['judging_loss']:.4f}, {result['seconds']:.0f} s"


def train_missing(
    next_run: Callable[[dict[Any, dict[str, Any]]], Any],
    train: Callable[[Any], dict[str, Any]],
    path: Path,
    figures: Callable[[dict[str, Any]], str],
    run_class: type = Run,
):
    """Train run after run, and keep the result of each, until `next_run` finds that none is missing.

    Args:
        next_run: the run to train next, given the results of those that are finished.
        train: trains a run; its result, with the run itself under `run`.
        path: of the JSONL file.
        figures: what is printed of a result.
    """
    while run := next_run(read_runs(path, run_class)):
        result = train(run)
        append_json(path, result)
        console.print(f"{run.name}: {figures(result)}", highlight=False)


def trained(model, rows: list[dict], run: Any, work: Path, callbacks=(), **fields) -> AttnResTrainer:
    """Train a model of a run on the rows, in their order; the Trainer, which has the losses.

    Args:
        run: has `steps`, `learning_rate` and `seed`.
        callbacks: more ones of the Trainer.
        fields: of `AttnResTrainingArguments`.
    """
    defaults = {
        "output_dir": str(work / "trainer"),
        "max_steps": run.steps,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": run.steps // 20,
        "train_sampling_strategy": "sequential",
        "logging_steps": run.steps // 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": run.seed,
    }
    arguments = AttnResTrainingArguments(**defaults | fields)
    trainer = AttnResTrainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return trainer
