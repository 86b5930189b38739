# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A pretraining run: a model from scratch, or one to go on with, on a stream of packed rows.

Like a fine-tuning run it is one YAML file, checked before it starts, and goes on where it was when it is called again.
The Trainer trains it, or with `pp_size` the stages of a pipeline (`stages.py`).
"""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    __version__,
    set_seed,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.trainer_utils import align_special_tokens

from ..base.config import check_known
from ..checkpoints.checkpoint import load_config, load_language_model, load_tokenizer
from ..configuration_attnres import AttnResConfig
from ..data.packed_rows import POSITION, PackedStream, collate
from ..data.packing import sees_other_documents
from ..data.rows import load_rows
from ..inspection.callback import DepthMapCallback
from ..model_cards.card import write_model_card
from ..utils.files import atomic_folder, disk_errors_explained, write_file
from ..utils.untrusted import check_folder
from .arguments import AttnResTrainingArguments, PretrainArguments
from .checkpoints import model_fingerprint, rows_fingerprint, source_fingerprint
from .config import (
    DEFAULTS,
    cannot_pack,
    check_length,
    check_rows_to_evaluate_on,
    check_schedule,
    of_fields,
    read_config,
    training_arguments,
)
from .runs import (
    FinetuneResult,
    PretrainRun,
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
from .stages import StageLoop, check_fields_over_stages
from .trainer import AttnResTrainer


RUN_FILE = "pretrain.yaml"
STREAM_FILE = "stream.json"
PRETRAIN_DEFAULTS = {
    **DEFAULTS,
    "query_learning_rate": None,
    # The stream keeps the position in the data, and its rows have a column for it
    "ignore_data_skip": True,
    "remove_unused_columns": False,
}


def pretrain(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> FinetuneResult:
    """Train a model on text, see `PretrainArguments` and transformers' `TrainingArguments` for the fields.

    The model goes to `output_dir/final`; checkpoints on the way, log history and loss curves are next to it. An
    interrupted run is resumed by calling this again with the same fields.

    Args:
        config: a YAML file, or its fields.
        overrides: fields in place of those of the file.

    Raises:
        ValueError: for fields, data or a model that do not fit, before the model is made.
    """
    config = read_config(config, overrides, PretrainArguments, ("dataset", "output_dir", "max_steps"))
    run = prepare(config)
    training, output = run.training, Path(run.arguments.output_dir)
    with run_folder(output, config, RUN_FILE, training), disk_errors_explained(output):
        fingerprints = fingerprints_of(run)
        checkpoint = begin(training, config, RUN_FILE, fingerprints, run.arguments.over_stages)
        train = train_over_stages if run.arguments.over_stages else train_with_trainer
        final, history, trainable, explanation = train(run, make_model(run), checkpoint, fingerprints)
    rate = training.learning_rate if training.query_learning_rate is None else training.query_learning_rate
    if run.model_config.model_type != "attnres" or isinstance(rate, str):  # measured, and in the history
        rate = next((entry["query_learning_rate"] for entry in history if "query_learning_rate" in entry), None)
    return FinetuneResult(final, history, trainable, explanation, files_of_run(output, RUN_FILE), rate)


def fingerprints_of(run: PretrainRun) -> dict[str, str | None]:
    """What decides the weights of a run beside its fields, as `write_manifest` keeps it."""
    arguments = run.arguments
    config = xxhash.xxh3_128_hexdigest(run.model_config.to_json_string().encode())
    return {
        "model": config if arguments.model is None else model_fingerprint(arguments.model),
        "rows": source_fingerprint(arguments.dataset),
        "held_out": rows_fingerprint(run.held_out),
    }


def prepare(config: dict[str, Any]) -> PretrainRun:
    """Read and check everything but the weights.

    Raises:
        ValueError: for fields, data or a model that do not fit.
    """
    arguments = of_fields(PretrainArguments, config)
    training = training_arguments(config, PretrainArguments, PRETRAIN_DEFAULTS)
    check_fields(arguments, training, config)
    model_config = read_model_config(arguments)
    check_length(arguments.max_length, model_config)
    check_output(Path(arguments.output_dir), config, RUN_FILE)
    if arguments.model is not None and Path(arguments.model).is_dir():
        metadata_of_base(arguments.model)  # a card that cannot be read is told of now
    if arguments.over_stages:
        check_fields_over_stages(arguments, training, model_config, config)
    else:
        checkpoint_to_resume(training, verify=False)  # of as many processes
    if arguments.tokenizer is not None and Path(arguments.tokenizer).expanduser().is_dir():
        check_folder(arguments.tokenizer, follow_links=False)
    tokenizer = load_tokenizer(str(arguments.tokenizer or arguments.model or arguments.model_config))
    if len(tokenizer) > model_config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, more than the model's `vocab_size` of"
            f" {model_config.vocab_size}: raise it, or use another tokenizer."
        )
    reason = cannot_pack(model_config)
    if arguments.apart and reason is not None:
        raise ValueError(f"`apart: true` is not possible here: {reason}. Set `apart: false`.")
    apart = reason is None if arguments.apart is None else arguments.apart
    if not apart and arguments.apart is None and training.process_index == 0:
        print(f"Documents in one row are not kept apart: {reason}.")
    with training.main_process_first(desc="reading the data"):
        train, held_out = read_data(arguments, training, tokenizer, apart)
    check_rows_to_evaluate_on(len(held_out), training)
    return PretrainRun(arguments, training, model_config, tokenizer, train, held_out)


def check_fields(arguments: PretrainArguments, training: AttnResTrainingArguments, config: dict[str, Any]):
    """Raise a `ValueError` for what contradicts itself, before anything is read."""
    if (arguments.model is None) == (arguments.model_config is None):
        raise ValueError("Give either a `model` to continue with, or the `model_config` of a new one.")
    if arguments.tokenizer is None and isinstance(arguments.model_config, dict):
        raise ValueError("`tokenizer` is missing. `attnres tokenizer` trains one on your text.")
    if training.max_steps < 1:
        raise ValueError(f"`max_steps: {training.max_steps}` is not above 0; the data repeats without end.")
    check_schedule(training)
    for name in ("eval_strategy", "save_strategy"):
        if getattr(training, name) == "epoch":
            raise ValueError(f"`{name}: epoch` is not possible: the data repeats without end. Set it to steps.")
    for name in ("ignore_data_skip", "remove_unused_columns"):
        if name in config:
            raise ValueError(f"`{name}` has no effect here: the run keeps its position in the data itself.")
    if training.dataloader_num_workers > 0:
        raise ValueError("`dataloader_num_workers` must be 0: the run keeps its position in the data.")
    if arguments.streaming and arguments.eval_dataset is None and arguments.eval_split is None:
        raise ValueError(
            "`streaming: true` needs an `eval_dataset` or an `eval_split`: all that is streamed is trained on."
        )
    if arguments.eval_dataset == arguments.dataset and (arguments.eval_split or "train") == arguments.split:
        raise ValueError(
            f"`eval_dataset: {arguments.eval_dataset}` is the training data. Leave it out to hold out some documents."
        )


def read_model_config(arguments: PretrainArguments) -> PreTrainedConfig:
    """The configuration of the model, to be read or from scratch.

    Raises:
        ValueError: if there is none, or its fields do not go together.
    """
    source = arguments.model or arguments.model_config
    if isinstance(source, str):
        if source.startswith((".", "/", "~")) and not Path(source).expanduser().is_dir():
            raise ValueError(f"There is no folder `{source}`.")
        if Path(source).expanduser().is_dir():
            check_folder(source, follow_links=False)
        config = load_config(source)
    else:
        config = config_of_fields(dict(source or {}))
    if "text_config" in type(config).sub_configs:
        raise ValueError(f"A {config.model_type} is a multimodal model, and its data is more than text.")
    return config


def config_of_fields(fields: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a model from scratch.

    Raises:
        ValueError: for a field that is unknown or has no effect, and for values that do not go together.
    """
    model_type, num_blocks = fields.pop("model_type", "attnres"), fields.pop("num_blocks", None)
    if (kind := fields.get("base_model_type", model_type)) not in CONFIG_MAPPING:
        raise ValueError(f"`model_config`: {kind!r} is not a type of model that transformers {__version__} has.")
    if num_blocks is not None and (model_type != "attnres" or "attn_res_block_size" in fields):
        other = "attn_res_block_size" if model_type == "attnres" else "model_type"
        value = fields.get(other, model_type)
        raise ValueError(
            f"`model_config`: `num_blocks: {num_blocks}` and `{other}: {value}` contradict: give one of them."
        )
    try:
        if model_type != "attnres":
            check_known(
                fields, CONFIG_MAPPING[model_type], [field.name for field in dataclasses.fields(PreTrainedConfig)]
            )
            return AutoConfig.for_model(model_type, **fields)
        config = AttnResConfig(**fields)
        if num_blocks is None:
            return config
        reads = {name: value for name, value in fields.items() if name.startswith("attn_res_")}
        return AttnResConfig.from_base_config(config.to_base_config(), num_blocks=num_blocks, **reads)
    except StrictDataclassError as error:  # its own message is of several lines
        reason = str(error.__cause__).rstrip(".")
        hint = " YAML takes 1e-6 for text: write 1.0e-6." if "expected float, got str" in reason else ""
        raise ValueError(f"`model_config`: {reason}.{hint}") from error
    except (TypeError, KeyError) as error:
        raise ValueError(f"`model_config`: {type(error).__name__}: {error}") from error


def read_data(
    arguments: PretrainArguments, training: AttnResTrainingArguments, tokenizer: PreTrainedTokenizerBase, apart: bool
) -> tuple[PackedStream, Dataset]:
    """The rows to train on, and those to evaluate on.

    Raises:
        ValueError: if there are none.
    """
    rows = load_rows(arguments.dataset, arguments.dataset_config, arguments.split, streaming=arguments.streaming)
    count = arguments.eval_documents
    if arguments.eval_dataset is not None or arguments.eval_split is not None:
        source = arguments.eval_dataset or arguments.dataset
        config = arguments.dataset_config if arguments.eval_dataset is None else None
        others = load_rows(source, config, arguments.eval_split or "train", streaming=arguments.streaming)
        if isinstance(others, Dataset):
            others = others.select(range(min(count, len(others))))
        else:  # no more is read
            others = Dataset.from_list(list(others.take(count)))
    else:
        if len(rows) < 2 * count:
            raise ValueError(
                f"`{arguments.dataset}` has {len(rows)} documents, too few to hold out `eval_documents: {count}` of"
                " them. Lower it, or name an `eval_dataset`."
            )
        # Spread over all of it, as files may be sorted
        held_out = {round(i * (len(rows) - 1) / max(1, count - 1)) for i in range(count)}
        others = rows.select(sorted(held_out))
        rows = rows.select([i for i in range(len(rows)) if i not in held_out])
    column, length = arguments.text_column, arguments.max_length
    stream = PackedStream(rows, tokenizer, length, text_column=column, seed=training.seed, apart=apart)
    evaluated = []
    for row in PackedStream(others, tokenizer, length, text_column=column, seed=training.seed, apart=apart):
        if row[POSITION][0] > 0:  # the first documents again
            break
        evaluated.append({name: row[name] for name in row if name != POSITION})
    if not evaluated:
        raise ValueError(f"The held-out documents are shorter than a row of `max_length: {length}` tokens.")
    next(iter(stream))  # an error of the data, or a tokenizer that does not fit it, before the model is made
    return stream, Dataset.from_list(evaluated)


def make_model(run: PretrainRun) -> torch.nn.Module:
    """The model to go on with, or one with the initial values of its config; the same in every process."""
    set_seed(run.training.seed)
    if run.arguments.model is not None:
        model = load_language_model(run.arguments.model, follow_links=False, dtype="float32")
    else:
        model = AutoModelForCausalLM.from_config(run.model_config, dtype=torch.float32)
    align_special_tokens(model, run.tokenizer)  # as the Trainer does
    if run.train.apart and (reason := sees_other_documents(model)) is not None:
        raise ValueError(f"Documents in one row cannot be kept apart: {reason}. Set `apart: false`.")
    return model


class PretrainTrainer(AttnResTrainer):
    """An `AttnResTrainer` on a `PackedStream`, whose checkpoints say where the stream was."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._last: torch.Tensor | None = None  # the positions behind the rows of the last step

    def training_step(self, model, inputs, *args, **kwargs):
        self._last = inputs[POSITION]
        self.train_dataset.forget_before(min(map(tuple, self._last.tolist())))
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs = {name: value for name, value in inputs.items() if name != POSITION}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        super().save_model(output_dir, _internal_call)
        if _internal_call and self._last is not None:  # of a checkpoint, in which trainer_state.json is written last
            behind = self.accelerator.gather(self._last.to(self.args.device)).tolist()
            if self.args.should_save:
                state = self.train_dataset.state_at(max(map(tuple, behind)))
                write_file(Path(output_dir or self.args.output_dir) / STREAM_FILE, json.dumps(state))


def train_with_trainer(
    run: PretrainRun, model: torch.nn.Module, checkpoint: str | None, fingerprints: dict[str, str | None]
) -> tuple[Path, list, int, str | None]:
    """Train until `max_steps`: the folder of the model, the history, what was trained and what is wrong, if it is."""
    training, output = run.training, Path(run.arguments.output_dir)
    if checkpoint is not None:
        training.eval_on_start = False
        run.train.go_on_at(json.loads((Path(checkpoint) / STREAM_FILE).read_text(encoding="utf-8")))
    trainer = PretrainTrainer(
        model=model,
        args=training,
        train_dataset=run.train,
        eval_dataset=run.held_out,
        data_collator=collate,
        processing_class=run.tokenizer,
    )
    trainer.run_fingerprints = fingerprints
    if "tensorboard" in training.report_to and run.model_config.model_type == "attnres":
        trainer.add_callback(DepthMapCallback(torch.tensor(run.held_out[0]["input_ids"])[None]))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    train_to_the_end(trainer, checkpoint)
    history = trainer.state.log_history
    if trainer.is_world_process_zero():
        write_history(output, "pretraining", history, f"Pretraining {output.absolute().name}")
    final = save_final(trainer, output, functools.partial(write_card, run, history))
    return final, history, trainable, trainer.explain_losses()


def train_over_stages(
    run: PretrainRun,
    model: torch.nn.Module,
    checkpoint: str | None = None,
    fingerprints: dict[str, str | None] | None = None,
) -> tuple[Path, list, int, str | None]:
    """The same over the stages of a pipeline, or over tensor parallelism, in the processes of torchrun."""
    loop = StageLoop(run, model, checkpoint, fingerprints)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    del model
    loop.train()
    output = Path(run.arguments.output_dir)
    final = output / "final"
    if dist.get_rank() == 0:
        write_history(output, "pretraining", loop.history, f"Pretraining {output.absolute().name}")
    with atomic_folder(final) if dist.get_rank() == 0 else contextlib.nullcontext(final) as folder:
        loop.pipeline.save_pretrained(folder)
        if dist.get_rank() == 0:
            run.tokenizer.save_pretrained(folder)
            write_card(run, loop.history, folder)
    dist.barrier()
    losses = [entry["eval_loss"] for entry in loop.history if "eval_loss" in entry]
    explanation = None
    if len(losses) > 1 and not losses[-1] <= losses[0]:  # also if it is not a number any more
        explanation = f"The held-out loss has risen from {losses[0]:.4f} to {losses[-1]:.4f}. Lower `learning_rate`."
    return final, loop.history, trainable, explanation


def write_card(run: PretrainRun, history: list[dict[str, Any]], folder: Path):
    """The card of the model, named like the repository it goes to, or like `output_dir`."""
    arguments, losses = run.arguments, held_out_losses(history)
    if run.model_config.model_type != "attnres":
        return
    training = {
        "base": None if arguments.model is None else Path(arguments.model).name,
        "has_queries": True,
        "mode": "pretrain",
        "dataset": dataset_name(arguments.dataset),
        "steps": run.training.max_steps,
        "before": losses[0] if losses else None,
        "after": losses[-1] if losses else None,
    }
    title, repo_id = card_names(arguments.output_dir, run.training.hub_model_id)
    write_model_card(
        folder,
        repo_id=repo_id,
        title=title,
        on_hub=bool(run.training.hub_model_id),
        base_metadata={
            **({} if arguments.model is None else metadata_of_base(arguments.model)),
            **dataset_metadata(arguments.dataset),
        },
        training=training,
    )
