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
"""One fine-tuning run: read and check everything, train, keep what came of it. Run again, it goes on where it was."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from peft import get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    set_seed,
)

from ..inspection.callback import DepthMapCallback
from ..model_cards import write_model_card
from ..outputs import write_file
from . import data
from .adapters import lora_config, queries_config
from .config import FinetuneArguments, check_run, read_config, read_model_config, split_config
from .curves import plot_curves
from .trainer import AttnResTrainer, AttnResTrainingArguments


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
        """Held-out losses, from before the first step to the last evaluation."""
        return [entry["eval_loss"] for entry in self.history if "eval_loss" in entry]


def finetune(config: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> FinetuneResult:
    """Fine-tune a checkpoint, see `FinetuneArguments` and transformers' `TrainingArguments` for the fields.

    The model or adapter goes to `output_dir/final`; checkpoints on the way, log history and loss curves lie beside.
    An interrupted run is resumed by calling this again with the same fields.

    Args:
        config: a YAML file, or its fields.
        overrides: fields in place of those of the file.

    Raises:
        ValueError: for fields, data or a model that do not fit, before the model is loaded.
    """
    config = read_config(config, overrides)
    arguments, training = split_config(config)
    model_config = read_model_config(arguments)
    check_run(arguments, model_config)
    output = Path(arguments.output_dir)
    check_output(output, config)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, revision=arguments.revision)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with training.main_process_first(desc="reading the data"):
        train, held_out = read_data(arguments, tokenizer)

    output.mkdir(parents=True, exist_ok=True)
    if training.process_index == 0:
        write_file(output / "finetune.yaml", yaml.safe_dump(config, sort_keys=True))
    trainer = AttnResTrainer(
        model=load_model(arguments, model_config, training),
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=data.IGNORED_LABEL),
        processing_class=tokenizer,
    )
    if arguments.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(arguments.early_stopping_patience))
    if "tensorboard" in training.report_to and model_config.model_type == "attnres":
        trainer.add_callback(DepthMapCallback(torch.tensor(held_out[0]["input_ids"])[None]))
    trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(output))
    evaluated = any("eval_loss" in e and e["step"] == trainer.state.global_step for e in trainer.state.log_history)
    if not evaluated or training.load_best_model_at_end:  # the best model may be of another step
        trainer.evaluate()

    files = [output / "finetune.yaml", output / "history.json", output / "loss.png", output / "loss.svg"]
    if trainer.is_world_process_zero():
        write_file(output / "history.json", json.dumps(trainer.state.log_history, indent=1))
        histories = {arguments.mode: trainer.state.log_history}
        plot_curves(histories, output / "loss", title=f"Fine-tuning {Path(arguments.model).name}")
    final = save_final(trainer, arguments, output)  # at last: it says that the run is finished
    explanation = trainer.explain_losses() or trainer.explain_queries()
    rate = None if trainer.initial_queries is None else trainer.query_learning_rate
    return FinetuneResult(final, trainer.state.log_history, trainable, explanation, files, rate)


def check_output(output: Path, config: dict[str, Any]):
    """Raise a `ValueError` if something else is there than an unfinished run with the same fields."""
    if output.is_file():
        raise ValueError(f"`output_dir: {output}` is a file.")
    if (output / "final").exists():
        raise ValueError(f"`output_dir: {output}` holds a finished run: name another folder, or delete it.")
    if (output / "finetune.yaml").exists():
        before = yaml.safe_load((output / "finetune.yaml").read_text(encoding="utf-8"))
        differing = sorted(name for name in {*before, *config} if before.get(name) != config.get(name))
        if differing:
            raise ValueError(
                f"`output_dir: {output}` holds an unfinished run with another `{differing[0]}`:"
                f" {before.get(differing[0])}, not {config.get(differing[0])}. Name another folder, or delete it."
            )
    elif output.is_dir() and any(output.iterdir()):
        raise ValueError(f"`output_dir: {output}` is not empty: name another folder.")


def read_data(arguments: FinetuneArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """Rows to train and to evaluate on.

    Raises:
        ValueError: if there are none, or they are not what is asked for.
    """
    train = data.load(arguments.dataset, arguments.dataset_config, arguments.split)
    if arguments.eval_dataset is not None:
        held_out = data.load(arguments.eval_dataset, None, arguments.eval_split or "train")
    elif arguments.eval_split is not None:
        held_out = data.load(arguments.dataset, arguments.dataset_config, arguments.eval_split)
    else:
        every = max(2, round(1 / arguments.eval_fraction))
        if len(train) < every:
            raise ValueError(
                f"`{arguments.dataset}` has {len(train)} documents: too few to hold out `eval_fraction:"
                f" {arguments.eval_fraction}` of them. Raise it, or name an `eval_dataset`."
            )
        held_out = train.select(range(0, len(train), every))
        train = train.select([i for i in range(len(train)) if i % every != 0])
    shorten = data.pack if arguments.packing else data.truncate
    rows = []
    for name, part in (("dataset", train), ("eval_dataset", held_out)):
        part = data.tokenize(part, tokenizer, arguments.text_column)
        part = shorten(part, arguments.max_length)
        if len(part) == 0:
            raise ValueError(f"`{name}` does not fill one row of `max_length: {arguments.max_length}` tokens.")
        rows.append(part)
    return rows[0], rows[1]


def load_model(arguments: FinetuneArguments, config: PreTrainedConfig, training: AttnResTrainingArguments):
    """The model, with a new adapter where the mode asks for one."""
    set_seed(training.seed)
    kwargs: dict[str, Any] = {"dtype": arguments.dtype or ("float32" if arguments.mode == "full" else "auto")}
    if arguments.fsdp_size is not None:
        from transformers.distributed import DistributedConfig

        kwargs["distributed_config"] = DistributedConfig(fsdp_size=arguments.fsdp_size)
    if arguments.load_in_4bit:
        kwargs |= {"quantization_config": four_bits(), "device_map": {"": str(training.device)}}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, revision=arguments.revision, **kwargs)
    if arguments.load_in_4bit:
        # Gradient checkpointing is the Trainer's, if it is asked for
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if arguments.mode == "queries":
        return get_peft_model(model, queries_config())
    if arguments.mode == "lora":
        adapter = lora_config(
            r=arguments.lora_rank,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules=arguments.lora_target_modules,
        )
        if config.model_type != "attnres":
            adapter.modules_to_save = None
        return get_peft_model(model, adapter)
    return model


def four_bits() -> BitsAndBytesConfig:
    """Weights of linear layers as in QLoRA (arXiv 2305.14314)."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def last_whole_checkpoint(output: Path) -> str | None:
    """The last one with the file that the Trainer writes last: a kill may have left part of one."""
    checkpoints = [path.parent for path in output.glob("checkpoint-*/trainer_state.json")]
    newest_first = sorted(checkpoints, key=lambda path: int(path.name.split("-")[1]), reverse=True)
    for path in newest_first:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            continue
        return str(path)
    return None


def save_final(trainer: AttnResTrainer, arguments: FinetuneArguments, output: Path) -> Path:
    """Write the model or adapter beside, then rename."""
    final, unfinished = output / "final", output / ".final.unfinished"
    main = trainer.is_world_process_zero()
    if main:
        shutil.rmtree(unfinished, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(unfinished))
    trainer.accelerator.wait_for_everyone()
    if main:
        (unfinished / "training_args.bin").unlink(missing_ok=True)  # a pickle; finetune.yaml says the same
        if arguments.mode == "full" and trainer.model.config.model_type == "attnres":
            base = arguments.model if not Path(arguments.model).exists() else None
            write_model_card(unfinished, base_metadata={"base_model": base} if base else None)
        unfinished.rename(final)
    trainer.accelerator.wait_for_everyone()
    return final
