# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""One fine-tuning run: read and check everything, train, keep what came of it. Run again, it goes on where it was."""

import copy
import dataclasses
import functools
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model, prepare_model_for_kbit_training
from rich.text import Text
from transformers import (
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..checkpoints.checkpoint import load_language_model, load_tokenizer
from ..data.packing import collate_packed, pack, sees_other_documents, tokenize, truncate
from ..data.rows import IGNORED_LABEL, kind_of_rows, load_rows
from ..inspection.callback import DepthMapCallback
from ..model_cards.card import write_adapter_card, write_model_card
from ..utils.files import disk_errors_explained
from .arguments import AttnResTrainingArguments, FinetuneArguments
from .checkpoints import model_fingerprint, rows_fingerprint
from .config import (
    cannot_pack,
    check_rows_to_evaluate_on,
    check_run,
    make_adapter,
    read_config,
    read_model_config,
    split_config,
)
from .preview import render_batch
from .runs import (
    Documents,
    FinetuneResult,
    FinetuneRun,
    begin,
    card_names,
    check_output,
    checkpoint_to_resume,
    dataset_metadata,
    dataset_name,
    files_of_run,
    held_out_losses,
    metadata_of_base,
    run_folder,
    save_final,
    train_to_the_end,
    write_history,
)
from .trainer import AttnResTrainer


RUN_FILE = "finetune.yaml"


def finetune(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> FinetuneResult:
    """Fine-tune a checkpoint, see `FinetuneArguments` and transformers' `TrainingArguments` for the fields.

    The model or adapter goes to `output_dir/final`; checkpoints, log history and loss curves are next to it.
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
        if run.packed and (reason := sees_other_documents(model)) is not None:
            if run.arguments.packing:
                raise ValueError(f"`packing: true` is not possible here: {reason}. Set `packing: false`.")
            if run.training.process_index == 0:
                print(f"Rows are not packed: {reason}.")
            run = with_rows(run, packed=False)
        fingerprints = {
            "model": model_fingerprint(run.arguments.model, run.arguments.revision),
            "rows": rows_fingerprint(run.train),
            "held_out": rows_fingerprint(run.held_out),
        }
        checkpoint = begin(run.training, config, RUN_FILE, fingerprints)
        return train(run, model, checkpoint, fingerprints)


def train(
    run: FinetuneRun, model: torch.nn.Module, checkpoint: str | None, fingerprints: dict[str, str | None]
) -> FinetuneResult:
    """Train until the end, from a checkpoint if there is one, and keep what came of it."""
    arguments, training, output = run.arguments, run.training, Path(run.arguments.output_dir)
    if checkpoint is not None:
        # Its log has the loss of the start. Evaluated again, it would count as one without progress
        training.eval_on_start = False
    trainer = make_trainer(run, model)
    trainer.run_fingerprints = fingerprints
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    train_to_the_end(trainer, checkpoint)
    history = trainer.state.log_history
    if trainer.is_world_process_zero():
        write_history(output, arguments.mode, history, f"Fine-tuning {Path(arguments.model).name}")
    # At last: it says that the run is finished
    final = save_final(trainer, output, functools.partial(write_card, trainer, run))
    explanation = trainer.explain_losses() or trainer.explain_queries()
    rate = None if trainer.initial_queries is None else trainer.query_learning_rate
    return FinetuneResult(final, history, trainable, explanation, files_of_run(output, RUN_FILE), rate)


def show_batch(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> Text:
    """The first batch of a run and what is learned in it, without training; arguments and errors as for `finetune`.

    The model is not loaded. One that turns out not to keep packed documents apart is trained on rows of one each.
    """
    run = prepare(read_config(config, overrides))
    return render_batch(first_batch(run), run.tokenizer)


def prepare(config: dict[str, Any]) -> FinetuneRun:
    """Read and check everything but the weights.

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
    packed = reason is None if arguments.packing is None else arguments.packing
    if arguments.packing is None and reason is not None and training.process_index == 0:
        print(f"Rows are not packed: {reason}.")
    if packed and find_spec("trl") is None:  # which packs, when all is read
        raise ModuleNotFoundError("trl is not installed", name="trl")
    with training.main_process_first(desc="reading the data"):
        documents = read_documents(arguments, tokenizer, verbose=training.process_index == 0)
    train, held_out = (of_both.rows for of_both in documents)
    run = FinetuneRun(arguments, training, model_config, tokenizer, documents, train, held_out, packed=False)
    return with_rows(run, packed)


def with_rows(run: FinetuneRun, packed: bool) -> FinetuneRun:
    """The run with rows made of its documents, packed or one document in each.

    Raises:
        ValueError: if there is nothing to learn in them, or the Trainer does not take them.
    """
    training = run.training
    with training.main_process_first(desc="making rows of the data"):
        train, held_out = (
            make_rows(documents, run.arguments.max_length, packed, verbose=training.process_index == 0)
            for documents in run.documents
        )
    check_rows_to_evaluate_on(len(held_out), training)
    run = dataclasses.replace(run, train=train, held_out=held_out, packed=packed)
    first_batch(run)
    return run


def make_trainer(
    run: FinetuneRun, model: torch.nn.Module, training: AttnResTrainingArguments | None = None
) -> AttnResTrainer:
    tokenizer = run.tokenizer
    if run.packed:
        collator = functools.partial(collate_packed, pad_token_id=tokenizer.pad_token_id or 0)
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


def first_batch(run: FinetuneRun) -> dict[str, torch.Tensor]:
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


def read_documents(
    arguments: FinetuneArguments, tokenizer: PreTrainedTokenizerBase, verbose: bool
) -> tuple[Documents, Documents]:
    """Documents to train and to evaluate on.

    Raises:
        ValueError: if there are none, or they are not what is asked for.
    """

    def read(field: str, source: str, config: str | None, split: str) -> Documents:
        rows = load_rows(source, config, split)
        documents = tokenize(rows, tokenizer, arguments.text_column)
        if verbose and len(documents) < len(rows):
            left_out = len(rows) - len(documents)
            print(f"Skipped {left_out} of {len(rows)} rows of {source}, which have nothing to learn.")
        return Documents(field, documents, kind_of_rows(rows.column_names, arguments.text_column))

    train = read("dataset", arguments.dataset, arguments.dataset_config, arguments.split)
    if arguments.eval_dataset is not None:
        return train, read("eval_dataset", arguments.eval_dataset, None, arguments.eval_split or "train")
    if arguments.eval_split is not None:
        return train, read("eval_dataset", arguments.dataset, arguments.dataset_config, arguments.eval_split)
    every, count = max(2, round(1 / arguments.eval_fraction)), len(train.rows)
    if count < every:
        raise ValueError(
            f"`{arguments.dataset}` has {count} documents with something to learn: too few to hold out"
            f" `eval_fraction: {arguments.eval_fraction}` of them. Raise it, or name an `eval_dataset`."
        )
    held_out = train.rows.select(range(0, count, every))
    others = train.rows.select([i for i in range(count) if i % every != 0])
    return Documents("dataset", others, train.kind), Documents("eval_dataset", held_out, train.kind)


def make_rows(documents: Documents, length: int, packed: bool, verbose: bool) -> Dataset:
    """Rows of at most `length` tokens. Of text that is packed, nothing is lost; a chat or completion is cut off."""
    rows = documents.rows
    if not packed or documents.kind != "text":
        num_cut = sum(len(ids) > length for ids in rows["input_ids"])
        if verbose and num_cut > 0:
            print(
                f"{num_cut} of {len(rows)} rows of `{documents.field}` are cut off at `max_length: {length}` tokens."
            )
        rows = truncate(rows, length)
    rows = pack(rows, length) if packed and len(rows) > 0 else rows
    if len(rows) == 0:
        raise ValueError(f"`{documents.field}` has nothing to learn within `max_length: {length}` tokens.")
    return rows


def load_model(run: FinetuneRun) -> torch.nn.Module:
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


def write_card(trainer: AttnResTrainer, run: FinetuneRun, folder: Path):
    """The card of a model or an adapter, named like the repository it goes to, or like `output_dir`."""
    arguments, losses = run.arguments, held_out_losses(trainer.state.log_history)
    base_folder = Path(arguments.model)
    training = {
        "base": base_folder.name if base_folder.is_dir() else arguments.model,
        "has_queries": run.model_config.model_type == "attnres",
        "mode": arguments.mode,
        "load_in_4bit": arguments.load_in_4bit,
        "dataset": dataset_name(arguments.dataset),
        "steps": trainer.state.global_step,
        "before": losses[0] if losses else None,
        "after": losses[-1] if losses else None,
    }
    title, repo_id = card_names(arguments.output_dir, run.training.hub_model_id)
    metadata = metadata_of_base(arguments.model, arguments.revision) | dataset_metadata(arguments.dataset)
    if arguments.mode != "full":
        write_adapter_card(folder, title=title, repo_id=repo_id, metadata=metadata, training=training)
    elif run.model_config.model_type == "attnres":
        write_model_card(
            folder,
            repo_id=repo_id,
            title=title,
            on_hub=bool(run.training.hub_model_id),
            base_metadata=metadata,
            training=training,
        )
