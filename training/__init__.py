# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Fine-tuning AttnRes models: all of one, adapters, or the depth queries alone. And pretraining them.

- `finetune.py`: a run from file to adapter; `preview.py`: a batch of it; `adapters.py`: for PEFT
- `pretrain.py`: a run from scratch; `stages.py`: its loop over the stages of a pipeline
- `runs.py`: what both share; `checkpoints.py`: those of a run; `curves.py`: its losses as figures
- `arguments.py`: the fields of a run; `config.py`: a YAML file of them, checked; `configs/`: ready files;
  `fields.py`: the fields as a table and as a file to edit
- `trainer.py`: the Trainer; `optimizer.py`: queries in a group of their own, and Muon; `learning_rate.py`: the
  measured rate; `loss_guard.py`: has the loss risen?; `depth_metrics.py`: what the queries do meanwhile;
  `progress.py`: the lines and bars of a run
- `scaling/`: a ladder of runs over several sizes
"""

from .adapters import lora_config, queries_config
from .arguments import AttnResTrainingArguments, FinetuneArguments, PretrainArguments
from .finetune import finetune, show_batch
from .pretrain import pretrain
from .runs import FinetuneResult
from .trainer import AttnResTrainer


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
