# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""PEFT configurations for AttnRes models.

They are PEFT's own: a LoRA adapter trains the depth queries in full beside its low-rank updates (`modules_to_save`),
and one of the queries alone is a LoRA adapter without such updates, so the two kinds can be switched and merged alike.
"""

from typing import Any

from peft import LoraConfig
from peft.utils.constants import DUMMY_TARGET_MODULES


DEPTH_QUERIES = "depth_queries"


def lora_config(**kwargs: Any) -> LoraConfig:
    """LoRA on all linear layers of the base, and the depth queries in full. Takes what `LoraConfig` takes."""
    kwargs = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **kwargs}
    return LoraConfig(modules_to_save=[*(kwargs.pop("modules_to_save", None) or ()), DEPTH_QUERIES], **kwargs)


def queries_config(**kwargs: Any) -> LoraConfig:
    """The depth queries and their key norms, and nothing else. Takes what `LoraConfig` takes."""
    return lora_config(target_modules=DUMMY_TARGET_MODULES, **kwargs)
