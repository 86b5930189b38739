# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Modules of kernels for GPUs, imported when they are first needed: ours for Triton, and flash-linear-attention's.

Neither goes with a checkpoint: its code imports them by name, where they are installed.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch


INSTALL = {"triton": "pip install triton", "fla": "pip install flash-linear-attention"}


def module_of(backend: str) -> ModuleType:
    """The kernels of `triton` or `fla`; raises a `ModuleNotFoundError` if these are not installed."""
    return importlib.import_module("attnres.depth.triton_kernels" if backend == "triton" else "fla.ops.attnres")


def fused_read(query: torch.Tensor, sources: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
    """fla's kernel for a read of all sources at once: arguments and mix as of `depth_attention_reference`."""
    sources = [source.contiguous() for source in sources]
    return module_of("fla").fused_attnres(query, sources, torch.ones_like(query), eps)
