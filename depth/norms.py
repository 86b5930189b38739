# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Norms of the base that follow a read: what is known of them, and how they are applied."""

import torch
from torch import nn


def norm_of(norm: nn.Module, mix: torch.Tensor) -> torch.Tensor:
    """A norm applied to a mix, through its class: hooks on the instance have already run."""
    return type(norm).forward(norm, mix)


def norm_tensors(norm: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a norm without submodules by name: parameters, buffers, and what FSDP1 has in their place."""
    own = vars(norm)
    named = {**own["_parameters"], **own["_buffers"], **own}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def norm_with(norm: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A norm as it is now, and with other tensors. The norm itself stays as it is, as other threads may run it."""
    copied = object.__new__(type(norm))
    vars(copied).update(vars(norm), **tensors)  # found before parameters and buffers
    return copied


def rms_norm_parameters(norm: nn.Module | None, dtype: torch.dtype) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of a norm that is Llama's RMSNorm; `None` otherwise.

    `variance_epsilon` is what that one calls its epsilon in transformers; a (1 + weight) one calls it `eps`. Never in
    fp64, which that one rounds to fp32.
    """
    if norm is None or dtype == torch.float64:
        return None
    own, norm_class = vars(norm), type(norm)
    # Norms from elsewhere, such as Liger's replacements, have options that are ignored here
    if not norm_class.__module__.startswith("transformers.models."):
        return None
    if not norm_class.__name__.removesuffix("OverDepth").endswith("RMSNorm"):
        return None
    if "variance_epsilon" not in own:
        return None
    weight = own["_parameters"].get("weight", own.get("weight"))
    if type(weight) not in (nn.Parameter, torch.Tensor) or weight.dtype != dtype:
        return None
    return weight, norm.variance_epsilon
