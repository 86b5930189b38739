# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a run is made of: one flat YAML file of our fields and those of `TrainingArguments`."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig, get_scheduler
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from ..base.config import base_config_class
from ..checkpoints.checkpoint import load_config
from ..utils.untrusted import check_folder, read_yaml
from .adapters import lora_config, queries_config
from .arguments import AttnResTrainingArguments, FinetuneArguments


Arguments = TypeVar("Arguments")
MODES = ("queries", "lora", "full")
# In place of transformers' defaults, in every run and in fine-tuning
DEFAULTS: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_on_start": True,
    "disable_tqdm": False,  # theirs depends on the level of messages
}
FINETUNE_DEFAULTS = {
    **DEFAULTS,
    "restore_callback_states_from_checkpoint": True,  # so that early stopping continues to count
}
# What a value of a field is called, by its type
KIND_NAMES: dict[type, str] = {
    **{bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"},
    **{dict: "a list of `field: value`", type(None): "null"},
}
# Ranges that transformers does not check before it trains, or not at all
POSITIVE = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("logging_steps", "eval_steps", "save_steps", "save_total_limit", "eval_accumulation_steps", "adam_epsilon"),
    *("lora_rank", "lora_alpha", "early_stopping_patience", "fsdp_size", "neftune_noise_alpha", "ddp_bucket_cap_mb"),
    *("dataloader_prefetch_factor", "torch_empty_cache_steps", "ddp_timeout", "muon_learning_rate"),
    *("eval_documents", "pp_size", "tp_size", "stages_per_rank"),
}
NOT_NEGATIVE = {
    *("learning_rate", "query_learning_rate", "weight_decay", "query_weight_decay", "warmup_steps", "max_grad_norm"),
    *("eval_delay", "seed", "data_seed", "dataloader_num_workers"),
}
BELOW_ONE = {"adam_beta1", "adam_beta2", "lora_dropout", "label_smoothing_factor"}
WHOLE_FROM_ONE = {"logging_steps", "eval_steps", "save_steps", "warmup_steps"}
CHOICES = {
    "mode": MODES,
    "log_level": ("passive", *logging.log_levels),
    "log_level_replica": ("passive", *logging.log_levels),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
}
# Fields of `TrainingArguments` for scripts that read them, which this is not
WITHOUT_EFFECT = {
    "do_train": "every run trains",
    "do_eval": "every run evaluates",
    "do_predict": "nothing is predicted",
    "resume_from_checkpoint": "run again with the same `output_dir`, a run resumes",
}


def read_config(
    config: str | Path | dict[str, Any],
    overrides: dict[str, Any] | None = None,
    of_run: type = FinetuneArguments,
    required: Sequence[str] = ("model", "dataset", "output_dir"),
) -> dict[str, Any]:
    """The fields of a run, from a YAML file or a dict.

    Args:
        of_run: the dataclass with the fields that are not transformers'.

    Raises:
        ValueError: for a field that does not exist, or a value of another kind.
    """
    if not isinstance(config, dict):
        path = Path(config)
        if not path.is_file():
            raise ValueError(f"There is no file `{path}`.")
        config = read_yaml(path)
        if not isinstance(config, dict):
            raise ValueError(f"`{path}` is not a list of `field: value`.")
    config = {**config, **(overrides or {})}
    kinds = {**typing.get_type_hints(AttnResTrainingArguments), **typing.get_type_hints(of_run)}
    known = {f.name for cls in (AttnResTrainingArguments, of_run) for f in dataclasses.fields(cls) if f.init}
    for name in config:
        if not isinstance(name, str):
            raise ValueError(f"`{name}` is not the name of a field.")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"There is no field `{name}`" + (f"; is it `{close[0]}`?" if close else "."))
        if name in WITHOUT_EFFECT:
            raise ValueError(f"`{name}` has no effect here: {WITHOUT_EFFECT[name]}.")
    for name in required:
        if not config.get(name):
            raise ValueError(f"`{name}` is missing.")
    return {name: _converted(name, value, kinds[name]) for name, value in config.items()}


def _converted(name: str, value: Any, kind: Any) -> Any:
    """YAML takes `1e-3` for text and `no` for false, and transformers takes anything."""
    kinds = {typing.get_origin(part) or part for part in typing.get_args(kind) or (kind,)}
    if value is False and bool not in kinds and str in kinds:
        return "no"
    if float in kinds and str not in kinds and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"`{name}: {value}` is not a number.") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{name}: {value}` is not a finite number.")
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not (type(value) in kinds or typing.Literal in kinds or (float in kinds and is_integer)):
        names = [KIND_NAMES[part] for part in KIND_NAMES if part in kinds]
        raise ValueError(f"`{name}: {_as_yaml(value)}` is not {' or '.join(names)}.")
    choices = next((part for part in kinds if isinstance(part, type) and issubclass(part, Enum)), None)
    choices = CHOICES.get(name) or [choice.value for choice in choices or ()]
    if choices and isinstance(value, str) and value not in choices:
        raise ValueError(f"`{name}: {value}` is not one of {', '.join(choices)}.")
    _check_range(name, value)
    return value


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _check_range(name: str, value: Any):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if name in POSITIVE and value <= 0:
        raise ValueError(f"`{name}: {value}` is not above 0.")
    if name in NOT_NEGATIVE and value < 0:
        raise ValueError(f"`{name}: {value}` is negative.")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise ValueError(f"`{name}: {value}` is not between 0 and 1.")
    if name in WHOLE_FROM_ONE and value > 1 and value != int(value):
        raise ValueError(f"`{name}: {value}` must be a whole number, or below 1 as a fraction of the run.")
    if name == "max_steps" and (value == 0 or value < -1):
        raise ValueError(f"`max_steps: {value}` is not above 0; -1 trains for `num_train_epochs`.")


def split_config(config: dict[str, Any]) -> tuple[FinetuneArguments, AttnResTrainingArguments]:
    """Both halves of a configuration; `output_dir` is in both."""
    ours = of_fields(FinetuneArguments, config)
    defaults = FINETUNE_DEFAULTS
    if ours.early_stopping_patience is not None:
        defaults = {**defaults, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return ours, training_arguments(config, FinetuneArguments, defaults)


def of_fields(of_run: type[Arguments], config: dict[str, Any]) -> Arguments:
    names = {f.name for f in dataclasses.fields(of_run)}  # type: ignore[arg-type]
    return of_run(**{name: value for name, value in config.items() if name in names})


def training_arguments(config: dict[str, Any], of_run: type, defaults: dict[str, Any]) -> AttnResTrainingArguments:
    """transformers' half of a configuration.

    Raises:
        ValueError: for fields that it does not take.
    """
    names = {f.name for f in dataclasses.fields(of_run)} - {"output_dir"}
    theirs = {**defaults, **{name: value for name, value in config.items() if name not in names}}
    try:
        return AttnResTrainingArguments(**theirs)
    except Exception as error:  # of many kinds, and the way out is the same
        message = " ".join(str(error).split())
        raise ValueError(f"transformers' `TrainingArguments` do not take these fields: {message}") from error


def check_run(arguments: FinetuneArguments, training: AttnResTrainingArguments, model_config: PreTrainedConfig):
    """Raise a `ValueError` for what contradicts itself or the model, before data or weights are read."""
    if "text_config" in type(model_config).sub_configs:
        raise ValueError(
            f"`{arguments.model}` is a {model_config.model_type}, a multimodal model, whose data is more than text:"
            " train it with transformers' `Trainer` or TRL, like its base."
        )
    if arguments.mode == "queries" and model_config.model_type != "attnres":
        raise ValueError(
            f"`mode: queries` needs an AttnRes checkpoint and `{arguments.model}` is a {model_config.model_type}:"
            f" convert it with `attnres convert`."
        )
    check_length(arguments.max_length, model_config)
    if not 0 < arguments.eval_fraction <= 0.5:
        raise ValueError(f"`eval_fraction: {arguments.eval_fraction}` is not between 0 and 0.5.")
    if arguments.load_in_4bit and arguments.mode == "full":
        raise ValueError("`load_in_4bit: true` needs `mode: lora` or `mode: queries`: 4-bit weights are not trained.")
    if arguments.fsdp_size is not None and arguments.mode != "full":
        raise ValueError(f"`fsdp_size: {arguments.fsdp_size}` needs `mode: full`; adapters train with plain DDP.")
    if training.muon_learning_rate is not None and arguments.mode != "full":
        raise ValueError(f"`muon_learning_rate: {training.muon_learning_rate}` needs `mode: full`.")
    if arguments.packing and (reason := cannot_pack(model_config)) is not None:
        raise ValueError(f"`packing: true` is not possible here: {reason}. Set `packing: false`.")
    dtype = arguments.dtype or "auto"
    if dtype != "auto" and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ValueError(f"`dtype: {dtype}` is not one of auto, float32, bfloat16, float16.")
    check_schedule(training)
    check_evaluation(arguments, training)
    check_adapter(arguments, model_config)


def check_length(max_length: int, model_config: PreTrainedConfig):
    """Raise a `ValueError` for rows that a model does not take, or that have nothing to learn."""
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and max_length > longest:
        raise ValueError(f"`max_length: {max_length}` is more than the {longest} tokens of the model.")
    if max_length < 2:
        raise ValueError(f"`max_length: {max_length}` leaves nothing to predict.")


def check_evaluation(arguments: FinetuneArguments, training: AttnResTrainingArguments):
    evaluated = arguments.eval_dataset or (arguments.dataset if arguments.eval_split else None)
    if evaluated == arguments.dataset and (arguments.eval_split or "train") == arguments.split:
        raise ValueError(
            f"`eval_dataset` and `eval_split` name the training data, `{arguments.split}` of `{evaluated}`."
            " Leave them out to hold out some documents."
        )
    metric = training.metric_for_best_model
    if metric not in (None, "loss", "eval_loss"):
        raise ValueError(f"`metric_for_best_model: {metric}` is not measured: use eval_loss.")
    if metric is not None and training.greater_is_better:
        raise ValueError("`greater_is_better: true` would keep the model with the largest loss.")


def check_schedule(training: AttnResTrainingArguments):
    """Raise a `ValueError` for a schedule that cannot be made, or one that decays for longer than it has steps."""
    if training.max_steps < 1:  # known when the data is read
        return
    kind, kwargs = training.lr_scheduler_type.value, training.lr_scheduler_kwargs or {}
    warmup = training.get_warmup_steps(training.max_steps)
    try:
        get_scheduler(kind, torch.optim.SGD([torch.zeros(1)], lr=1.0), warmup, training.max_steps, {**kwargs})
    except (TypeError, ValueError) as error:
        reason = str(error).split("() ")[-1].rstrip(".")  # without the name of the function
        raise ValueError(
            f"`lr_scheduler_type: {kind}` cannot be made with `lr_scheduler_kwargs: {_as_yaml(kwargs)}`: {reason}."
        ) from error
    decay, left = kwargs.get("num_decay_steps", 0), max(0, training.max_steps - warmup)
    if decay > left and "num_stable_steps" not in kwargs:
        raise ValueError(
            f"`num_decay_steps: {decay}` of `lr_scheduler_kwargs` is more than the {left} steps that `max_steps:"
            f" {training.max_steps}` leaves after the warm-up: lower it."
        )


def check_rows_to_evaluate_on(count: int, training: AttnResTrainingArguments):
    """Raise a `ValueError` if `dataloader_drop_last` leaves none of them."""
    batch = training.eval_batch_size * training.world_size
    if training.dataloader_drop_last and count < batch:
        raise ValueError(
            f"`dataloader_drop_last: true` leaves nothing of the {count} rows to evaluate on, as a batch has {batch}:"
            " lower `per_device_eval_batch_size`, or leave it out."
        )


def check_adapter(arguments: FinetuneArguments, model_config: PreTrainedConfig):
    """Try the adapter on a model without memory for its weights."""
    adapter = make_adapter(arguments, model_config)
    if adapter is not None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
            try:
                get_peft_model(model, adapter)
            except ValueError as error:
                raise ValueError(f"`lora_target_modules: {arguments.lora_target_modules}`: {error}") from error


def make_adapter(arguments: FinetuneArguments, model_config: PreTrainedConfig) -> LoraConfig | None:
    """The configuration of the adapter that is trained, `None` with `mode: full`."""
    if arguments.mode == "full":
        return None
    if arguments.mode == "queries":
        return queries_config()
    adapter = lora_config(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=arguments.lora_target_modules,
    )
    if model_config.model_type != "attnres":
        adapter.modules_to_save = None
    return adapter


def cannot_pack(model_config: PreTrainedConfig) -> str | None:
    """Why documents in one row cannot be kept apart, as far as the config tells: `sees_other_documents`."""
    base_model_type = getattr(model_config, "base_model_type", model_config.model_type)
    if MODEL_FOR_CAUSAL_LM_MAPPING[base_config_class(base_model_type)]._is_stateful:
        return f"the layers of a {base_model_type} that carry a state would carry it from one document to the next"
    if getattr(model_config, "index_topk", None) is not None:
        return f"the attention of a {base_model_type} chooses its keys among those of all documents in a row"
    return None


def read_model_config(arguments: FinetuneArguments) -> PreTrainedConfig:
    """The model's configuration.

    Raises:
        ValueError: if there is no such checkpoint.
    """
    if arguments.model.startswith((".", "/", "~")) and not Path(arguments.model).expanduser().is_dir():
        raise ValueError(f"There is no folder `{arguments.model}`.")
    if arguments.revision is not None and Path(arguments.model).is_dir():
        raise ValueError(f"`revision: {arguments.revision}` is for a Hub id, and `{arguments.model}` is a folder.")
    if Path(arguments.model).expanduser().is_dir():
        check_folder(arguments.model, follow_links=False)
    return load_config(arguments.model, arguments.revision)
