# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""One fine-tuning run: read and check everything, train, keep what came of it. Run again, it goes on where it was."""

import contextlib
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from huggingface_hub import hf_hub_download
from peft import get_peft_model, prepare_model_for_kbit_training
from rich.text import Text
from transformers import (
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..checkpoints.checkpoint import load_language_model, load_tokenizer
from ..checkpoints.location import HTTPError, hub_can_be_reached
from ..data import packing as data
from ..data.rows import IGNORED_LABEL, kind_of_rows, load_rows
from ..inspection.callback import DepthMapCallback
from ..model_cards.card import inherited_metadata, read_metadata, write_adapter_card, write_model_card
from ..utils.files import disk_errors_explained, only_run_in, write_file
from ..utils.untrusted import read_yaml
from .checkpoints import check_same_run, last_whole_checkpoint, model_fingerprint, pass_over, rows_fingerprint
from .config import (
    FinetuneArguments,
    cannot_pack,
    check_rows_to_evaluate_on,
    check_run,
    make_adapter,
    read_config,
    read_model_config,
    split_config,
)
from .curves import plot_curves
from .preview import render_batch
from .trainer import AttnResTrainer, AttnResTrainingArguments


RUN_FILE = "finetune.yaml"
LOCK = ".lock"


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
        files: what lies beside: the configuration, the history, the curves.
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


def finetune(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> FinetuneResult:
    """Fine-tune a checkpoint, see `FinetuneArguments` and transformers' `TrainingArguments` for the fields.

    The model or adapter goes to `output_dir/final`; checkpoints on the way, log history and loss curves lie beside.
    An interrupted run is resumed by calling this again with the same fields.

    Args:
        config: a YAML file, or its fields.
        overrides: fields in place of those of the file.

    Raises:
        ValueError: for fields, data or a model that do not fit, before the model is loaded; for `packing: true` with
            a model that does not keep packed documents apart, when it is.
    """
    config = read_config(config, overrides)
    run = prepare(config)
    output = Path(run.arguments.output_dir)
    with run_folder(output, config, RUN_FILE, run.training), disk_errors_explained(output):
        model = load_model(run)
        if run.packed and (reason := data.sees_other_documents(model)) is not None:
            if run.arguments.packing:
                raise ValueError(f"`packing: true` is not possible here: {reason}. Set `packing: false`.")
            if run.training.process_index == 0:
                print(f"Rows are not packed: {reason}.")
            run = prepare(config, may_pack=False)
        fingerprints = {
            "model": model_fingerprint(run.arguments.model, run.arguments.revision),
            "rows": rows_fingerprint(run.train),
            "held_out": rows_fingerprint(run.held_out),
        }
        checkpoint = begin(run.training, config, RUN_FILE, fingerprints)
        return train(run, model, checkpoint, fingerprints)


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


def train(
    run: "Run", model: torch.nn.Module, checkpoint: str | None, fingerprints: dict[str, str | None]
) -> FinetuneResult:
    """Train until the end, from a checkpoint if there is one, and keep what came of it."""
    arguments, training, output = run.arguments, run.training, Path(run.arguments.output_dir)
    if checkpoint is not None:
        # Its log has the loss of the start. Evaluated again, it would count as one without progress
        training.eval_on_start = False
    trainer = make_trainer(run, model)
    trainer.run_fingerprints = fingerprints
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.train(resume_from_checkpoint=checkpoint)
    if not any("eval_loss" in e and e["step"] == trainer.state.global_step for e in trainer.state.log_history):
        trainer.evaluate()
    if training.load_best_model_at_end:  # the last evaluation may have been of another model
        trainer.evaluate(metric_key_prefix="final")

    files = [output / RUN_FILE, output / "history.json", output / "loss.png", output / "loss.svg"]
    if trainer.is_world_process_zero():
        write_file(output / "history.json", json.dumps(trainer.state.log_history, indent=1))
        histories = {arguments.mode: trainer.state.log_history}
        plot_curves(histories, output / "loss", title=f"Fine-tuning {Path(arguments.model).name}")
    final = save_final(
        trainer, output, functools.partial(write_card, trainer, run)
    )  # at last: it says that the run is finished
    explanation = trainer.explain_losses() or trainer.explain_queries()
    rate = None if trainer.initial_queries is None else trainer.query_learning_rate
    return FinetuneResult(final, trainer.state.log_history, trainable, explanation, files, rate)


def show_batch(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> Text:
    """The first batch of a run and what is learned in it, without training; arguments and errors as for `finetune`.

    The model is not loaded. One that turns out not to keep packed documents apart is trained on rows of one each.
    """
    run = prepare(read_config(config, overrides))
    return render_batch(first_batch(run), run.tokenizer)


@dataclass(frozen=True)
class Run:
    """All that a run needs but the weights, read and checked."""

    arguments: FinetuneArguments
    training: AttnResTrainingArguments
    model_config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: Dataset
    packed: bool


def prepare(config: dict[str, Any], may_pack: bool = True) -> Run:
    """Read and check everything but the weights.

    Args:
        may_pack: `False` if the model has turned out not to keep packed documents apart.

    Raises:
        ValueError: for fields, data or a model that do not fit.
    """
    arguments, training = split_config(config)
    model_config = read_model_config(arguments)
    check_run(arguments, training, model_config)
    check_output(Path(arguments.output_dir), config, RUN_FILE)
    checkpoint_to_resume(training, verify=False)  # of as many processes
    if Path(arguments.model).is_dir():
        metadata_of_base(arguments.model)  # a card that cannot be read is told of now
    tokenizer = load_tokenizer(arguments.model, arguments.revision)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    reason = cannot_pack(model_config)
    packed = may_pack and reason is None if arguments.packing is None else arguments.packing
    if arguments.packing is None and reason is not None and training.process_index == 0:
        print(f"Rows are not packed: {reason}.")
    if packed and find_spec("trl") is None:  # which packs, when all is read
        raise ModuleNotFoundError("trl is not installed", name="trl")
    with training.main_process_first(desc="reading the data"):
        train, held_out = read_data(arguments, tokenizer, packed, verbose=training.process_index == 0)
    check_rows_to_evaluate_on(len(held_out), training)
    run = Run(arguments, training, model_config, tokenizer, train, held_out, packed)
    first_batch(run)
    return run


def make_trainer(run: Run, model: torch.nn.Module, training: AttnResTrainingArguments | None = None) -> AttnResTrainer:
    tokenizer = run.tokenizer
    if run.packed:
        collator = functools.partial(data.collate_packed, pad_token_id=tokenizer.pad_token_id or 0)
    else:
        collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED_LABEL)
    trainer = AttnResTrainer(
        model=model,
        args=training or run.training,
        train_dataset=run.train,
        eval_dataset=run.held_out,
        data_collator=collator,
        processing_class=tokenizer,
    )
    if run.arguments.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(run.arguments.early_stopping_patience))
    if "tensorboard" in run.training.report_to and run.model_config.model_type == "attnres":
        positions = run.held_out[0].get("position_ids", [])
        first_document = run.held_out[0]["input_ids"][: positions.index(0, 1) if 0 in positions[1:] else None]
        trainer.add_callback(DepthMapCallback(torch.tensor(first_document)[None]))
    return trainer


class ModelWithoutWeights(torch.nn.Module):
    """Stands in for a model whose weights are not read yet: one parameter, and the arguments of `forward`."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None):
        return self.weight


def first_batch(run: Run) -> dict[str, torch.Tensor]:
    """The first batch, from the same Trainer with all its fields, its optimizer and scheduler, but without the model.

    Raises:
        ValueError: if the Trainer does not take the fields.
    """
    training = copy.copy(run.training)
    training.push_to_hub = False  # it would make the repository
    with tempfile.TemporaryDirectory() as training.output_dir:  # and a Trainer makes the folder
        try:
            trainer = make_trainer(run, ModelWithoutWeights(), training)
            loader = trainer.get_train_dataloader()
            trainer.create_optimizer_and_scheduler(trainer.set_initial_training_values(training, loader)[-1])
            return next(iter(loader))
        except Exception as error:  # of many kinds, and the way out is the same
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"transformers' Trainer does not take these fields: {message}") from error


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


def read_data(
    arguments: FinetuneArguments, tokenizer: PreTrainedTokenizerBase, packed: bool, verbose: bool
) -> tuple[Dataset, Dataset]:
    """Rows to train and to evaluate on.

    Raises:
        ValueError: if there are none, or they are not what is asked for.
    """

    def read(source: str, config: str | None, split: str) -> tuple[Dataset, str]:
        rows = load_rows(source, config, split)
        documents = data.tokenize(rows, tokenizer, arguments.text_column)
        if verbose and len(documents) < len(rows):
            left_out = len(rows) - len(documents)
            print(f"{left_out} of {len(rows)} rows of {source} left out: nothing to learn in them.")
        return documents, kind_of_rows(rows.column_names, arguments.text_column)

    train, kind = read(arguments.dataset, arguments.dataset_config, arguments.split)
    if arguments.eval_dataset is not None:
        held_out, held_out_kind = read(arguments.eval_dataset, None, arguments.eval_split or "train")
    elif arguments.eval_split is not None:
        held_out, held_out_kind = read(arguments.dataset, arguments.dataset_config, arguments.eval_split)
    else:
        every, held_out_kind = max(2, round(1 / arguments.eval_fraction)), kind
        if len(train) < every:
            raise ValueError(
                f"`{arguments.dataset}` has {len(train)} documents with something to learn: too few to hold out"
                f" `eval_fraction: {arguments.eval_fraction}` of them. Raise it, or name an `eval_dataset`."
            )
        held_out = train.select(range(0, len(train), every))
        train = train.select([i for i in range(len(train)) if i % every != 0])
    make = functools.partial(make_rows, length=arguments.max_length, packed=packed, verbose=verbose)
    return make(train, "dataset", kind), make(held_out, "eval_dataset", held_out_kind)


def make_rows(documents: Dataset, name: str, kind: str, length: int, packed: bool, verbose: bool) -> Dataset:
    """Rows of at most `length` tokens. Of text that is packed, nothing is lost; a chat or completion is cut off."""
    if not packed or kind != "text":
        num_cut = sum(len(ids) > length for ids in documents["input_ids"])
        if verbose and num_cut > 0:
            print(f"{num_cut} of {len(documents)} rows of `{name}` are cut off at `max_length: {length}` tokens.")
        documents = data.truncate(documents, length)
    rows = data.pack(documents, length) if packed and len(documents) > 0 else documents
    if len(rows) == 0:
        raise ValueError(f"`{name}` has nothing to learn within `max_length: {length}` tokens.")
    return rows


def load_model(run: Run) -> torch.nn.Module:
    """The model, with a new adapter where the mode asks for one."""
    arguments, training = run.arguments, run.training
    set_seed(training.seed)
    kwargs: dict[str, Any] = {"dtype": arguments.dtype or ("float32" if arguments.mode == "full" else "auto")}
    if arguments.fsdp_size is not None:
        from transformers.distributed import DistributedConfig

        kwargs["distributed_config"] = DistributedConfig(fsdp_size=arguments.fsdp_size)
    if arguments.load_in_4bit:
        kwargs |= {"quantization_config": four_bits(), "device_map": {"": str(training.device)}}
    model = load_language_model(arguments.model, follow_links=False, revision=arguments.revision or "main", **kwargs)
    if arguments.load_in_4bit:
        # Gradient checkpointing is the Trainer's, if it is asked for
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapter = make_adapter(arguments, run.model_config)
    return model if adapter is None else get_peft_model(model, adapter)


def four_bits() -> BitsAndBytesConfig:
    """Weights of linear layers as in QLoRA (arXiv 2305.14314)."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def checkpoint_to_resume(training: AttnResTrainingArguments, verify: bool = True) -> str | None:
    """The checkpoint that a run of the Trainer goes on from, if there is one.

    Raises:
        ValueError: if another number of processes has written those that there are.
    """
    if training.save_only_model:
        return None
    return last_whole_checkpoint(Path(training.output_dir), training.world_size, verify)


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


def write_card(trainer: AttnResTrainer, run: Run, folder: Path):
    """The card of a model or an adapter, named like the repository it goes to, or like `output_dir`."""
    arguments, losses = run.arguments, held_out_losses(trainer.state.log_history)
    base_folder = Path(arguments.model)
    training = {
        "base": base_folder.name if base_folder.is_dir() else arguments.model,
        "has_queries": run.model_config.model_type == "attnres",
        "mode": arguments.mode,
        "load_in_4bit": arguments.load_in_4bit,
        "dataset": Path(arguments.dataset).name if Path(arguments.dataset).exists() else arguments.dataset,
        "steps": trainer.state.global_step,
        "before": losses[0] if losses else None,
        "after": losses[-1] if losses else None,
    }
    output, on_hub = Path(arguments.output_dir), run.training.hub_model_id is not None
    name = output.absolute().name
    # As it was typed, but not where it lies on this machine
    repo_id = run.training.hub_model_id or f"{name if output.is_absolute() else output}/final"
    title = run.training.hub_model_id.split("/")[-1] if on_hub else name
    metadata = metadata_of_base(arguments.model, arguments.revision)
    if arguments.mode != "full":
        write_adapter_card(folder, title=title, repo_id=repo_id, metadata=metadata, training=training)
    elif run.model_config.model_type == "attnres":
        write_model_card(
            folder,
            repo_id=repo_id,
            title=title,
            on_hub=on_hub,
            base_metadata=metadata,
            training=training,
        )
