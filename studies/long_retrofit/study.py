# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A real pretrained model trained further for 256,000 tokens, 25 times as long as in `studies/retrofit`.

    python -m studies.long_retrofit.study run    # hours on one thread; interrupted, it resumes

What is compared, and how, was written down first: studies/long_retrofit/protocol.md.
"""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint

from attnres.training import AttnResTrainer, AttnResTrainingArguments
from attnres.training.scaling.sweep import next_rate
from attnres.utils.timing import machine
from studies.common.runs import TUNING_SEED, Run, train_missing
from studies.kept_stream.retrofit import prepare_kept
from studies.retrofit.study import QUERY_RATE, figures_in_words, judge


RESULTS = Path(__file__).parent
STEPS, LONGER, TUNING_STEPS, BATCH = 500, 625, 125, 4
SEEDS, GRID = range(3), (3e-5, 9e-5, 2.7e-4)
# Losses of a sweep that are closer than this are alike: five seeds of the short study are 0.013 apart (SD)
NOISE = 0.01
# By arm, the folder of `prepare_kept` that holds its model
ARMS = {"prenorm": "base", "prenorm_longer": "base", "replaced": "attnres", "kept": "kept"}
app = typer.Typer(add_completion=False, help=__doc__)


def swept(arm: str) -> str:
    """The arm whose learning rate is that of this one."""
    return arm.removesuffix("_longer")


def next_run(found: dict[Run, dict[str, Any]]) -> Run | None:
    """First all sweeps, and then all arms seed by seed; `None` when everything has a result."""
    rates = {}
    for arm in dict.fromkeys(map(swept, ARMS)):
        of_arm = {run: result for run, result in found.items() if (run.arm, run.seed) == (arm, TUNING_SEED)}
        losses = {
            run.learning_rate: result["tuning"]
            for run, result in sorted(of_arm.items(), key=lambda item: item[0].learning_rate)
        }
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
        eval_dataset={part: dataset(rows[part]) for part in ("judging", "old_text")},
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)
    log = trainer.state.log_history
    curves = {
        part: {entry["step"]: entry[f"eval_{part}_loss"] for entry in log if f"eval_{part}_loss" in entry}
        for part in ("judging", "old_text")
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
def run_all(
    work: Annotated[Path, typer.Option(help="Folder for models, windows and checkpoints.")] = Path("retrofit-work"),
    results: Annotated[Path, typer.Option(help="Folder for the figures of every run.")] = RESULTS,
):
    """Train every run that has no result yet, on one thread."""
    torch.set_num_threads(1)
    prepare_kept(work)
    train_missing(next_run, lambda run: train(run, work), results / "runs.jsonl", figures_in_words)


@app.callback()
def main():
    """A real pretrained model trained further for 256,000 tokens."""


if __name__ == "__main__":
    app()
