# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The fields of a run: those of fine-tuning, those of pretraining, and `TrainingArguments` with what queries need.

The help of each field is in its metadata, as in transformers. `attnres finetune --fields` shows it, and the reference.
"""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .learning_rate import AUTO, check_query_rate


@dataclass
class AttnResTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what the depth queries need. The default decay comes from docs/results.md."""

    query_learning_rate: float | str | None = field(
        default=AUTO,
        metadata={
            "help": "Peak learning rate of the depth queries and their key norms. `auto` measures it before the first"
            " step, and null takes `learning_rate`."
        },
    )
    query_weight_decay: float = field(
        default=0.0,
        metadata={"help": "Weight decay of the depth queries. It pulls the model back to a PreNorm one."},
    )

    muon_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Peak learning rate of Muon, which then trains the weight matrices of the layers."},
    )

    def __post_init__(self):
        self.query_learning_rate = check_query_rate(self.query_learning_rate)
        super().__post_init__()


@dataclass
class FinetuneArguments:
    """Model, data and mode of a fine-tuning run."""

    model: str = field(
        metadata={
            "help": "Folder or Hub id of the checkpoint to train. A PreNorm checkpoint works too, except with"
            " `mode: queries`."
        }
    )
    dataset: str = field(
        metadata={"help": "Data to train on: a file (JSONL, Parquet, text), a folder of such files, or a Hub id."}
    )
    output_dir: str = field(metadata={"help": "Folder for everything that the run writes. The model goes to `final`."})
    mode: str = field(
        default="lora",
        metadata={
            "help": "What to train: `queries` (the depth queries and their key norms), `lora` (the queries and LoRA)"
            " or `full` (everything)."
        },
    )
    max_length: int = field(default=1024, metadata={"help": "Number of tokens in a row."})
    packing: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to put several documents into a row and keep them apart by their positions. By default"
            " this is done if the model keeps them apart."
        },
    )
    text_column: str | None = field(
        default=None,
        metadata={"help": "Column with the text, if it is not `text`, `messages`, or `prompt` and `completion`."},
    )
    eval_fraction: float = field(
        default=0.05,
        metadata={"help": "Fraction of the documents to hold out, if there is no `eval_dataset` and no `eval_split`."},
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Data to evaluate on: a file, a folder or a Hub id."}
    )
    eval_split: str | None = field(default=None, metadata={"help": "Split of the Hub data set to evaluate on."})
    split: str = field(default="train", metadata={"help": "Split of the Hub data set to train on."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the Hub data set."})
    revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the model's Hub repository."}
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Type of the weights. The default is float32 with `mode: full`, and otherwise that of the"
            " checkpoint."
        },
    )
    load_in_4bit: bool = field(
        default=False,
        metadata={
            "help": "Whether to quantise the linear layers to 4 bits as in QLoRA (needs bitsandbytes). The queries"
            " stay in float32."
        },
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the LoRA matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the LoRA matrices, `lora_alpha` in PEFT."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the LoRA matrices."})
    lora_target_modules: str | list[str] = field(
        default="all-linear", metadata={"help": "Modules that get LoRA matrices, `target_modules` in PEFT."}
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Number of evaluations without a lower loss after which the run stops. It then keeps the best"
            " model."
        },
    )
    fsdp_size: int | None = field(
        default=None,
        metadata={"help": "Number of processes to shard the model over as it is loaded (torchrun, `mode: full`)."},
    )


@dataclass
class PretrainArguments:
    """Model and data of a pretraining run."""

    dataset: str = field(
        metadata={"help": "Data to train on: a file (JSONL, Parquet, text), a folder of such files, or a Hub id."}
    )
    output_dir: str = field(metadata={"help": "Folder for everything that the run writes. The model goes to `final`."})
    model: str | None = field(
        default=None,
        metadata={"help": "Folder or Hub id of a checkpoint to continue with, instead of `model_config`."},
    )
    model_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "Fields of a new model, or a folder or Hub id with a `config.json`. Without a `model_type` it is"
            " an AttnRes model of the `base_model_type`, and with another one a PreNorm model."
        },
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Folder or Hub id of the tokenizer. The default is that of `model`, or of the folder in"
            " `model_config`. `attnres tokenizer` makes a new one."
        },
    )
    max_length: int = field(default=1024, metadata={"help": "Number of tokens in a row."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the text, if it is not `text`."})
    eval_documents: int = field(default=100, metadata={"help": "Number of documents to evaluate on, at most."})
    eval_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Data to evaluate on. Without it and `eval_split`, documents from all over the data are held out."
        },
    )
    eval_split: str | None = field(default=None, metadata={"help": "Split of the Hub data set to evaluate on."})
    split: str = field(default="train", metadata={"help": "Split of the Hub data set to train on."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the Hub data set."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Whether to read a Hub data set during training, in its order, without downloading it all."},
    )
    apart: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to keep the documents of a row apart. By default this is done if the model can, and the"
            " run reports if it cannot."
        },
    )
    pp_size: int = field(default=1, metadata={"help": "Number of processes that the layers are spread over."})
    tp_size: int = field(
        default=1,
        metadata={
            "help": "Number of processes that share each matrix of a stage. All other processes are replicas, with"
            " FSDP2."
        },
    )
    schedule: str = field(
        default="1F1B",
        metadata={
            "help": "Schedule of the pipeline, see `AttnResPipeline`. Its microbatches are the"
            " `gradient_accumulation_steps`."
        },
    )
    stages_per_rank: int | None = field(default=None, metadata={"help": "Number of pipeline stages in each process."})

    @property
    def over_stages(self) -> bool:
        return self.pp_size * self.tp_size > 1
