# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The parameters that depth attention adds to a model: for each site a query and the weight of its key norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from .reads import ReadConfig


class CopiedAlone:
    """Whether an object is copied by `copy.deepcopy` alone, rather than with what it is part of.

    An argument of what makes the copy: these are copied first, with what has been copied before. (A `__deepcopy__` of
    the module would also be called for PEFT's wrapper of it, which passes on attributes that it does not have.)
    """

    def __init__(self, is_alone: bool):
        self.is_alone = is_alone

    def __deepcopy__(self, memo: dict):
        return CopiedAlone(not memo)


class AttnResDepthQueries(nn.Module):
    """The pseudo-queries and key-norm weights of all sites. Zero queries read the mean of all sources.

    Queries that see the input have a projection of it in place of the vector, or beside it: `projection`, or
    `projection_down` and `projection_up` if it has a rank.
    """

    def __init__(self, config: PreTrainedConfig, num_sites: int):
        super().__init__()
        self.block_size, self.read_config = config.attn_res_block_size, ReadConfig.of(config)
        self.std = getattr(config, "initializer_range", 0.02)  # of bases that have none, transformers' own
        hidden_size, rank = config.hidden_size, self.read_config.query_rank
        # Small steps away from zero vanish in half precision, so these are at least fp32 in every model
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(num_sites, *shape, dtype=dtype))

        if self.read_config.query != "input":
            self.query = parameter(hidden_size)
        self.key_norm = nn.Parameter(torch.ones(num_sites, hidden_size, dtype=dtype))
        if self.read_config.query != "learned":
            if rank is None:
                self.projection = parameter(hidden_size, hidden_size)
            else:
                self.projection_down, self.projection_up = parameter(rank, hidden_size), parameter(hidden_size, rank)
        self.reset()

    @torch.no_grad()
    def reset(self):
        """Set the queries to zero. Of two factors of a projection one is random: two zeros would not learn."""
        for name, tensor in self.named_parameters(recurse=False):
            if name == "key_norm":
                init.ones_(tensor)
            elif name == "projection_up":
                init.normal_(tensor, std=self.std)
            else:
                init.zeros_(tensor)

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The folded queries `query * key_norm`, `[sites, hidden]`, and what makes queries of the input.

        Scores of learned queries depend on the product alone. If queries see the input, the key norms and projections
        follow, as `InputDependentStream` takes them.
        """
        dtype = torch.promote_types(self.key_norm.dtype, torch.float32)
        key_norm = self.key_norm.to(dtype)
        folded = torch.zeros_like(key_norm) if self.read_config.query == "input" else self.query.to(dtype) * key_norm
        if self.read_config.query == "learned":
            return (folded,)
        names = ("projection",) if self.read_config.query_rank is None else ("projection_down", "projection_up")
        return folded, key_norm, *(getattr(self, name).to(dtype) for name in names)

    def check_unchanged(self, config: PreTrainedConfig):
        """Raise a `ValueError` if the config was changed since the queries were made."""
        if self.block_size != config.attn_res_block_size:
            raise ValueError(
                f"`attn_res_block_size={config.attn_res_block_size}` was set in the config of a model that was made"
                f" with {self.block_size}. Make a new model of the config, with the weights of this one."
            )
        read_config = ReadConfig.of(config)
        if read_config != self.read_config:
            raise ValueError(
                f"The config of a model that was made for {self.read_config} was changed to {read_config}. Make a new"
                " model of the config."
            )

    def zero_initialized(self) -> list[torch.Tensor]:
        """The parameters, `[sites, ...]`, that make every read the mean of its sources when all of them are zero."""
        return [getattr(self, name) for name in ("query", "projection", "projection_down") if hasattr(self, name)]

    def are_zero(self) -> bool:
        return not any(tensor.any() for tensor in self.zero_initialized())

    def _apply(self, fn: Callable, recurse: bool = True):
        # `model.half()` and `model.to(torch.bfloat16)` come through here
        def keep_wide(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            return tensor.to(applied.device) if applied.dtype in (torch.float16, torch.bfloat16) else applied

        return super()._apply(keep_wide, recurse)

    def __reduce_ex__(self, protocol: Any):
        return _new_queries, (CopiedAlone(False), type(self)), self.__dict__

    def __setstate__(self, state: dict):
        super().__setstate__(state)
        # CODEPATH: PEFT trains and saves a copy of this module alone. Shapes of queries do not tell how sublayers were
        # divided into blocks, so what an adapter saves does
        if self.__dict__.pop("copied_alone", False):
            self.trained_block_size = nn.Buffer(self.trained_for)

    @property
    def trained_for(self) -> torch.Tensor:
        """The block size; if reads are not the paper's own, the numbers of their fields behind it."""
        if self.read_config == ReadConfig():
            return torch.tensor(self.block_size)
        return torch.tensor([self.block_size, *self.read_config.numbers()])

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        try:
            self.check_trained_for(state_dict.get(f"{prefix}trained_block_size"))
        except ValueError as error:
            errors.append(str(error))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def check_trained_for(self, numbers: torch.Tensor | None):
        """Raise a `ValueError` if an adapter was trained for other blocks than this model's, or to be read otherwise.

        Args:
            numbers: `trained_for` in the adapter's file; a model's file has none.
        """
        if numbers is None:
            return
        block_size, *of_read = numbers.flatten().tolist()
        if block_size != self.block_size:
            raise ValueError(
                f"The adapter's depth queries were trained with `attn_res_block_size={block_size}` and this model"
                f" has {self.block_size}: the same queries would read from other sources. Load it on a conversion of"
                " the base with the adapter's block size."
            )
        read_config = ReadConfig.of_numbers(of_read) if of_read else ReadConfig()
        if read_config != self.read_config:
            raise ValueError(
                f"The adapter's depth queries were trained for {read_config or 'a read that is not known here'}, and"
                f" this model has {self.read_config}: the same queries would read something else. Load it on a"
                " conversion of the base with the adapter's fields."
            )


def _new_queries(copied_alone: CopiedAlone, cls: type[AttnResDepthQueries]) -> AttnResDepthQueries:
    queries = cls.__new__(cls)
    queries.__dict__["copied_alone"] = copied_alone.is_alone
    return queries


def fold_queries(depth_queries: nn.Module) -> tuple[torch.Tensor, ...]:
    """What the forward of a model's depth queries gives, which PEFT may have wrapped.

    In a batch whose samples have different queries, as their adapters do, each tensor is `[sites, batch, ...]`.
    """
    # CODEPATH: in a batch of several adapters PEFT passes their names to the wrapped module by a hook. Its wrapper of
    # whole modules cannot mix these, and would silently use the base's queries if the active adapter has none
    given = (getattr(hook, "keywords", {}).get("adapter_names") for hook in depth_queries._forward_pre_hooks.values())
    names = next((names for names in given if names is not None), None)
    if names is None or depth_queries.disable_adapters:
        return depth_queries()
    copies, of_model = depth_queries.modules_to_save, depth_queries.original_module
    of_samples = [copies[name] if name in copies else of_model for name in names]
    folded = {queries: queries() for queries in dict.fromkeys(of_samples)}
    if len(folded) == 1:  # they share their queries, as in any other batch
        return folded[of_samples[0]]
    return tuple(torch.stack(tensors, dim=1) for tensors in zip(*(folded[queries] for queries in of_samples)))
