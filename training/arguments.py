# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The fields of a run: those of fine-tuning, those of pretraining, and `TrainingArguments` with what queries need."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .learning_rate import AUTO, check_query_rate


@dataclass
class AttnResTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what the depth queries need. The default decay comes from docs/results.md."""

    query_learning_rate: float | str | None = field(
        default=AUTO,
        metadata={
            "help": "Peak learning rate of queries and key norms; `auto` measures it before the first step, null takes"
            " `learning_rate`."
        },
    )
    query_weight_decay: float = field(
        default=0.0, metadata={"help": "Weight decay of the queries; it pulls them back to a PreNorm model."}
    )

    muon_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Peak learning rate of the weight matrices of the layers, which Muon then trains, and not `optim`."
        },
    )

    def __post_init__(self):
        self.query_learning_rate = check_query_rate(self.query_learning_rate)
        super().__post_init__()


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
        packing: put documents beside each other in rows of `max_length`, kept apart by their positions. By default
            wherever the model keeps them apart.
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
    packing: bool | None = None
    dtype: str | None = None
    load_in_4bit: bool = False
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: str | list[str] = field(default="all-linear")
    early_stopping_patience: int | None = None
    fsdp_size: int | None = None


@dataclass
class PretrainArguments:
    """Model and data of a pretraining run.

    Attributes:
        dataset: id of a data set on the Hub, a file (JSONL, JSON, Parquet, text) or a folder of such files.
        output_dir: where everything goes; the model to `final` in it.
        model: a checkpoint to go on with, a folder or a Hub id. In its place
        model_config: the fields of a model from scratch, or a folder or Hub id with a `config.json`. Its `model_type`
            is attnres by default, with a `base_model_type`, and any other is a PreNorm twin.
        tokenizer: folder or Hub id; by default that of `model`, or of the folder in `model_config`.
        dataset_config: name of a configuration of a data set on the Hub.
        split, eval_split: of the data set on the Hub.
        eval_dataset: what to evaluate on. Without it and `eval_split`, documents from all over the data are held out.
        eval_documents: how many documents to evaluate on, at most.
        text_column: where the text is, if not in `text`.
        streaming: read a data set of the Hub as it is trained on, in its order, without downloading all of it.
        max_length: tokens of a row.
        apart: keep documents that lie in one row apart. By default wherever the model can, which is said otherwise.
        pp_size: stages of a pipeline, in as many processes.
        tp_size: so many processes share each matrix of a stage. All others are replicas, with FSDP2.
        schedule: of the pipeline, see `AttnResPipeline`. Its microbatches are the `gradient_accumulation_steps`.
        stages_per_rank: how many stages a process has.
    """

    dataset: str
    output_dir: str
    model: str | None = None
    model_config: dict | str | None = None
    tokenizer: str | None = None
    dataset_config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_dataset: str | None = None
    eval_documents: int = 100
    text_column: str | None = None
    streaming: bool = False
    max_length: int = 1024
    apart: bool | None = None
    pp_size: int = 1
    tp_size: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int | None = None

    @property
    def over_stages(self) -> bool:
        return self.pp_size * self.tp_size > 1
