# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Fine-tuning AttnRes models: all of one, adapters, or the depth queries alone. And pretraining them.

- `finetune.py`: a run from file to adapter; `config.py`: its fields; `data.py`: its rows; `show.py`: a batch
- `pretrain.py`: a run from scratch; `stream.py`: its rows; `stages.py`: its loop over the stages of a pipeline
- `trainer.py`: the Trainer; `optimizer.py`: queries in a group of their own, and Muon; `learning_rate.py`: the
  measured rate; `loss_guard.py`: has the loss risen?
- `adapters.py`: for PEFT; `curves.py`: losses as figures; `configs/`: ready files
"""

from .adapters import lora_config, queries_config
from .config import FinetuneArguments
from .finetune import FinetuneResult, finetune, show_batch
from .pretrain import PretrainArguments, pretrain
from .trainer import AttnResTrainer, AttnResTrainingArguments


__all__ = [
    "AttnResTrainer",
    "AttnResTrainingArguments",
    "FinetuneArguments",
    "FinetuneResult",
    "PretrainArguments",
    "finetune",
    "lora_config",
    "pretrain",
    "queries_config",
    "show_batch",
]
