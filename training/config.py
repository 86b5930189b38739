# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What a fine-tuning run is made of: one flat YAML file of our fields and those of `TrainingArguments`."""

import dataclasses
import difflib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, PreTrainedConfig

from .trainer import AttnResTrainingArguments


MODES = ("queries", "lora", "full")


@dataclass
class FinetuneArguments:
    """Model, data and mode of a fine-tuning run.

    Attributes:
        model: folder or Hub id of an AttnRes checkpoint; a PreNorm one for comparison, but not with `mode: queries`.
        revision: branch, tag or commit of a Hub id.
        dataset: id of a data set on the Hub, a file (JSONL, JSON, Parquet, text) or a folder of such files.
        dataset_config: name of a configuration of a data set on the Hub.
        split, eval_split: of the data set on the Hub. Without an `eval_split` or `eval_dataset`, every so many
            documents are held out: `eval_fraction`.
        eval_dataset: data to evaluate on, where it lies elsewhere.
        text_column: where the text is, if not in `text`, `messages` or `prompt` and `completion`.
        mode: `queries` (depth queries and key norms alone), `lora` (LoRA and the queries in full) or `full`.
        max_length: tokens of a row.
        packing: join documents and cut them into rows of `max_length`, without padding.
        dtype: of the weights; by default float32 with `mode: full` and that of the checkpoint otherwise.
        load_in_4bit: quantise the linear layers as in QLoRA (NF4, needs bitsandbytes); the queries stay in fp32.
        lora_rank, lora_alpha, lora_dropout, lora_target_modules: as in PEFT's `LoraConfig`.
        early_stopping_patience: evaluations without a better loss after which to stop; the best model is kept.
        fsdp_size: number of processes to shard the model over when it is loaded (torchrun; needs `mode: full`).
    """

    model: str
    dataset: str
    output_dir: str
    revision: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_dataset: str | None = None
    eval_fraction: float = 0.05
    text_column: str | None = None
    mode: str = "lora"
    max_length: int = 1024
    packing: bool = True
    dtype: str | None = None
    load_in_4bit: bool = False
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: str | list[str] = field(default="all-linear")
    early_stopping_patience: int | None = None
    fsdp_size: int | None = None


def read_config(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a run, from a YAML file or a dict.

    Raises:
        ValueError: for a field that does not exist, or a value of another kind.
    """
    if not isinstance(config, dict):
        path = Path(config)
        if not path.is_file():
            raise ValueError(f"There is no file `{path}`.")
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"`{path}` is no YAML: {' '.join(str(error).split())}") from None
        if not isinstance(config, dict):
            raise ValueError(f"`{path}` is not a list of `field: value`.")
    config = {**config, **(overrides or {})}
    kinds = {
        **typing.get_type_hints(AttnResTrainingArguments),
        **typing.get_type_hints(FinetuneArguments),
    }
    known = {
        f.name for cls in (AttnResTrainingArguments, FinetuneArguments) for f in dataclasses.fields(cls) if f.init
    }
    for name in config:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"There is no field `{name}`" + (f"; is it `{close[0]}`?" if close else "."))
    for name in ("model", "dataset", "output_dir"):
        if not config.get(name):
            raise ValueError(f"`{name}` is missing.")
    return {name: _converted(name, value, kinds[name]) for name, value in config.items()}


def _converted(name: str, value: Any, kind: Any) -> Any:
    """YAML takes `1e-3` for text and `no` for false, and transformers takes anything."""
    allowed = set(typing.get_args(kind)) or {kind}
    if value is False and bool not in allowed and str in allowed:
        return "no"
    if float in allowed and str not in allowed and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"`{name}: {value}` is not a number.") from None
    if allowed <= {int, type(None)} and (not isinstance(value, (int, type(None))) or isinstance(value, bool)):
        raise ValueError(f"`{name}: {value}` is not a whole number.")
    if allowed == {bool} and not isinstance(value, bool):
        raise ValueError(f"`{name}: {value}` is neither true nor false.")
    return value


def split_config(config: dict[str, Any]) -> tuple[FinetuneArguments, AttnResTrainingArguments]:
    """Both halves of a configuration; `output_dir` is in both."""
    names = {f.name for f in dataclasses.fields(FinetuneArguments)}
    ours = FinetuneArguments(**{name: value for name, value in config.items() if name in names})
    theirs = {name: value for name, value in config.items() if name not in names}
    theirs = {"output_dir": ours.output_dir, "eval_strategy": "steps", "eval_on_start": True, **theirs}
    # Early stopping goes on counting where it was
    theirs = {"restore_callback_states_from_checkpoint": True, **theirs}
    if ours.early_stopping_patience is not None:
        theirs = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", **theirs}
    return ours, AttnResTrainingArguments(**theirs)


def check_run(arguments: FinetuneArguments, model_config: PreTrainedConfig):
    """Raise a `ValueError` for what contradicts itself or the model, before data or weights are read."""
    if arguments.mode not in MODES:
        raise ValueError(f"`mode: {arguments.mode}` is none of {', '.join(MODES)}.")
    if arguments.mode == "queries" and model_config.model_type != "attnres":
        raise ValueError(
            f"`mode: queries` needs an AttnRes checkpoint and `{arguments.model}` is a {model_config.model_type}:"
            f" make one of it with `attnres convert`."
        )
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and arguments.max_length > longest:
        raise ValueError(f"`max_length: {arguments.max_length}` is more than the {longest} tokens of the model.")
    if arguments.max_length < 2:
        raise ValueError(f"`max_length: {arguments.max_length}` leaves nothing to predict.")
    if not 0 < arguments.eval_fraction < 1:
        raise ValueError(f"`eval_fraction: {arguments.eval_fraction}` is not between 0 and 1.")
    if arguments.load_in_4bit and arguments.mode == "full":
        raise ValueError("`load_in_4bit: true` needs `mode: lora` or `mode: queries`: 4-bit weights are not trained.")
    if arguments.fsdp_size is not None and arguments.mode != "full":
        raise ValueError(f"`fsdp_size: {arguments.fsdp_size}` needs `mode: full`; adapters train with plain DDP.")


def read_model_config(arguments: FinetuneArguments) -> PreTrainedConfig:
    """The model's configuration.

    Raises:
        ValueError: if there is no such checkpoint.
    """
    if arguments.model.startswith((".", "/", "~")) and not Path(arguments.model).expanduser().is_dir():
        raise ValueError(f"There is no folder `{arguments.model}`.")
    return AutoConfig.from_pretrained(arguments.model, revision=arguments.revision)
