# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Fine-tuning AttnRes models: all of one, adapters, or the depth queries alone.

- `finetune.py`: a run from file to adapter; `config.py`: its fields; `data.py`: its rows; `show.py`: a batch
- `trainer.py`: the Trainer; `learning_rate.py`: the measured rate; `loss_guard.py`: has the loss risen?
- `adapters.py`: for PEFT; `curves.py`: losses as figures; `configs/`: ready files
"""

from .adapters import lora_config, queries_config
from .config import FinetuneArguments
from .finetune import FinetuneResult, finetune, show_batch
from .trainer import AttnResTrainer, AttnResTrainingArguments


__all__ = [
    "AttnResTrainer",
    "AttnResTrainingArguments",
    "FinetuneArguments",
    "FinetuneResult",
    "finetune",
    "lora_config",
    "queries_config",
    "show_batch",
]
