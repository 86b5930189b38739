# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What fine-tuning and pretraining share: the folder of a run, the checkpoint it goes on from, and what it leaves."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..checkpoints.location import HTTPError, hub_can_be_reached
from ..data.packed_rows import PackedStream
from ..model_cards.card import inherited_metadata, read_metadata
from ..utils.files import only_run_in, write_file
from ..utils.untrusted import read_yaml
from .arguments import AttnResTrainingArguments, FinetuneArguments, PretrainArguments
from .checkpoints import check_same_run, last_whole_checkpoint, pass_over
from .curves import plot_curves
from .trainer import AttnResTrainer


LOCK = ".lock"


@dataclass(frozen=True)
class Documents:
    """A data set before it is cut or packed into rows.

    Attributes:
        field: the field that names it.
        rows: token ids and labels, one document each.
        kind: `text`, `chat` or `completion`.
    """

    field: str
    rows: Dataset
    kind: str


@dataclass(frozen=True)
class FinetuneRun:
    """All that a fine-tuning run needs but the weights, read and checked.

    Attributes:
        documents: what the rows to train on and to evaluate on, `train` and `held_out`, are made of.
        packed: whether a row has several documents.
    """

    arguments: FinetuneArguments
    training: AttnResTrainingArguments
    model_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    documents: tuple[Documents, Documents]
    train: Dataset
    held_out: Dataset
    packed: bool


@dataclass(frozen=True)
class PretrainRun:
    """All that a pretraining run needs but the weights, read and checked."""

    arguments: PretrainArguments
    training: AttnResTrainingArguments
    model_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    train: PackedStream
    held_out: Dataset


@dataclass(frozen=True)
class FinetuneResult:
    """What a run has come to.

    Attributes:
        folder: the checkpoint, or the adapter.
        history: what the Trainer has logged.
        trainable_parameters: how many numbers were trained.
        explanation: what is wrong with it, if anything is: a held-out loss above that of the start, or depth queries
            that have hardly moved.
        query_learning_rate: peak learning rate of the depth queries, as given or measured; `None` without queries.
        files: the configuration, the history and the curves.
    """

    folder: Path
    history: list[dict[str, Any]]
    trainable_parameters: int
    explanation: str | None
    files: list[Path]
    query_learning_rate: float | None = None

    @property
    def losses(self) -> list[float]:
        """Held-out losses, from before the first step to that of the model which is kept."""
        return held_out_losses(self.history)


def held_out_losses(history: list[dict[str, Any]]) -> list[float]:
    names = ("eval_loss", "final_loss")
    return [entry[name] for entry in history for name in names if name in entry]


def begin(
    training: AttnResTrainingArguments,
    config: dict[str, Any],
    file: str,
    fingerprints: dict[str, str | None],
    over_stages: bool = False,
) -> str | None:
    """Write down the fields of a run, and find the checkpoint that it goes on from.

    Args:
        over_stages: whether that is one of the loop over stages.

    Raises:
        ValueError: if that was trained on something else.
    """
    output = Path(training.output_dir)
    checkpoint = last_whole_checkpoint(output, 0) if over_stages else checkpoint_to_resume(training)
    check_same_run(output, checkpoint, fingerprints)
    if training.process_index == 0:
        write_file(output / file, yaml.safe_dump(config, sort_keys=True))
        if not training.save_only_model:
            pass_over(output, checkpoint)
    return checkpoint


def check_output(output: Path, config: dict[str, Any], file: str):
    """Raise a `ValueError` if something else is there than an unfinished run with the same fields, kept in a file."""
    if output.is_file():
        raise ValueError(f"`output_dir: {output}` is a file.")
    if (output / "final").exists():
        raise ValueError(f"`output_dir: {output}` holds a finished run: name another folder, or delete it.")
    if (output / file).exists():
        before = read_yaml(output / file)
        differing = sorted(name for name in {*before, *config} if before.get(name) != config.get(name))
        if differing:
            raise ValueError(
                f"`output_dir: {output}` holds an unfinished run with another `{differing[0]}`:"
                f" {before.get(differing[0])}, not {config.get(differing[0])}. Name another folder, or delete it."
            )
    elif output.is_dir() and any(path.name not in (LOCK, f".{file}.unfinished") for path in output.iterdir()):
        raise ValueError(f"`output_dir: {output}` is not empty: name another folder.")


@contextlib.contextmanager
def run_folder(output: Path, config: dict[str, Any], file: str, training: AttnResTrainingArguments) -> Iterator[None]:
    """The folder of a run, for its processes alone; gone again if nothing was written there.

    Raises:
        ValueError: if another run has begun or finished there meanwhile.
        OSError: if another run is writing there.
    """
    if training.process_index != 0:
        yield  # the first process has the lock, or ends the run
        return
    was_there = output.exists()
    try:
        with only_run_in(output, LOCK):
            check_output(output, config, file)
            yield
    finally:
        if not was_there and [path.name for path in output.glob("*")] in ([], [LOCK]):
            shutil.rmtree(output, ignore_errors=True)


def checkpoint_to_resume(training: AttnResTrainingArguments, verify: bool = True) -> str | None:
    """The checkpoint that a run of the Trainer goes on from, if there is one.

    Raises:
        ValueError: if another number of processes has written those that there are.
    """
    if training.save_only_model:
        return None
    return last_whole_checkpoint(Path(training.output_dir), training.world_size, verify)


def train_to_the_end(trainer: AttnResTrainer, checkpoint: str | None):
    """Train, from a checkpoint if there is one, and evaluate the model that is kept."""
    trainer.train(resume_from_checkpoint=checkpoint)
    history = trainer.state.log_history
    if not any("eval_loss" in entry and entry["step"] == trainer.state.global_step for entry in history):
        trainer.evaluate()
    if trainer.args.load_best_model_at_end:  # the last evaluation may have been of another model
        trainer.evaluate(metric_key_prefix="final")


def write_history(output: Path, name: str, history: list[dict[str, Any]], title: str):
    """Write the log history of a run into its folder, and draw it."""
    write_file(output / "history.json", json.dumps(history, indent=1))
    plot_curves({name: history}, output / "loss", title=title)


def files_of_run(output: Path, run_file: str) -> list[Path]:
    """What lies beside the model when a run is finished."""
    return [output / name for name in (run_file, "history.json", "loss.png", "loss.svg")]


def save_final(trainer: AttnResTrainer, output: Path, write_card: Callable[[Path], None]) -> Path:
    """Write the model or adapter beside, then rename."""
    final, unfinished = output / "final", output / ".final.unfinished"
    main = trainer.is_world_process_zero()
    if main:
        shutil.rmtree(unfinished, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    try:
        trainer.save_model(str(unfinished))
        trainer.accelerator.wait_for_everyone()
        if main:
            (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; the YAML file says the same
            write_card(unfinished)
            unfinished.rename(final)
    except BaseException:
        if main:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    trainer.accelerator.wait_for_everyone()
    return final


def metadata_of_base(model: str, revision: str | None = None) -> dict[str, Any]:
    """What the card of a trained model takes over from that of its base, a folder or a Hub id.

    Raises:
        ValueError: if the card of a folder cannot be read.
    """
    card = Path(model) / "README.md"
    if card.parent.is_dir():
        return inherited_metadata(card, read_metadata(card).get("base_model"))
    with contextlib.suppress(OSError, ValueError, HTTPError):  # a repository without one, or out of reach by now
        offline = not hub_can_be_reached()
        card = Path(hf_hub_download(model, "README.md", revision=revision, local_files_only=offline))
        return inherited_metadata(card, model)
    return {"base_model": model}


def card_names(output_dir: str, hub_model_id: str | None) -> tuple[str, str]:
    """The title of a trained model's card, and its id in the examples: those of its repository, or of its folder."""
    if hub_model_id:
        return hub_model_id.split("/")[-1], hub_model_id
    output = Path(output_dir)
    name = output.absolute().name
    # As it was typed, but not where it lies on this machine
    return name, f"{name if output.is_absolute() else output}/final"


def dataset_metadata(dataset: str) -> dict[str, Any]:
    """What the metadata of a card say of the data: its id on the Hub, if it has one."""
    if Path(dataset).exists():
        return {}
    try:
        validate_repo_id(dataset)
    except HFValidationError:
        return {}
    return {"datasets": [dataset]}


def dataset_name(dataset: str) -> str:
    """What a card calls the data: an id, or the name of a file or folder."""
    return Path(dataset).name if Path(dataset).exists() else dataset
