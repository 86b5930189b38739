# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a small Full AttnRes model, trained from scratch on source code, reads from where.

`python -m studies.weights.small_model` trains the shape of the study for 800 steps (minutes on one thread), inspects
it on files that were held out, and leaves the heat map, and what it says to the paper's findings, beside this file.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from attnres.data.text import standard_library
from attnres.inspection import inspect
from attnres.training import AttnResTrainer, AttnResTrainingArguments
from attnres.utils.files import write_file
from studies.common.arms import BATCH, LENGTH, TRAINING, from_scratch, prepare, rows_of


RESULTS = Path(__file__)
TOKENS = 20_000


def train(work: Path, steps: int):
    """Train the model and save it with its tokenizer in `work/full-from-scratch`."""
    prepare(work)
    model = from_scratch("full", seed=0)
    arguments = AttnResTrainingArguments(
        **TRAINING,
        output_dir=str(work / "trainer"),
        max_steps=steps,
        learning_rate=3e-3,
        query_learning_rate=None,  # that of the weights, as in the study's runs from scratch
        warmup_steps=steps // 20,
        eval_steps=steps // 2,
        logging_steps=max(1, steps // 8),
        seed=0,
    )
    AttnResTrainer(
        model=model,
        args=arguments,
        train_dataset=rows_of(work, "library", "train", seed=0)[: steps * BATCH],
        eval_dataset=rows_of(work, "library", "held_out"),
    ).train()
    model.save_pretrained(work / "full-from-scratch")
    AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / "full-from-scratch")


def findings(sites: list[dict]) -> dict[str, dict[str, float]]:
    """Means over the reads of each kind from layer 1 on; weights in multiples of the uniform read's."""
    table = {}
    for kind in ("attention", "mlp"):
        reads = [site for site in sites if site["kind"] == kind and site["layer"] > 0]
        figures = {
            "newest": [site["predecessor_weight"] * len(site["weights"]) for site in reads],
            "newest_is_largest": [site["predecessor_weight"] == max(site["weights"]) for site in reads],
            "embedding": [site["embedding_weight"] * len(site["weights"]) for site in reads],
            "embedding_above_uniform": [site["embedding_weight"] * len(site["weights"]) > 1 for site in reads],
            "relative_entropy": [site["relative_entropy"] for site in reads],
        }
        table[kind] = {name: round(sum(values) / len(values), 3) for name, values in figures.items()}
    return table


def main(
    work: Annotated[Path, typer.Option(help="Folder for text and checkpoint.")] = Path("study-work"),
    steps: Annotated[int, typer.Option(min=2, help="Of 1024 tokens.")] = 800,
):
    """Train, inspect, draw."""
    torch.set_num_threads(1)
    if not (work / "full-from-scratch").exists():
        train(work, steps)
    _, held_out = standard_library()
    results = inspect(
        [str(work / "full-from-scratch")],
        work / "depth",
        names=["Full AttnRes, 12 layers"],
        text="\n".join(held_out),
        max_tokens=TOKENS,
        length=LENGTH,
        batch_size=BATCH,
        device="cpu",
    )
    shutil.copyfile(work / "depth/weights.png", RESULTS.with_suffix(".png"))
    write_file(RESULTS.with_suffix(".json"), json.dumps(findings(results["models"][0]["sites"]), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
