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
