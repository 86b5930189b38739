# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Fine-tuning AttnRes models: all of one, adapters, or the depth queries alone."""

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
