# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What crosses between two pipeline stages: all sources of a residual stream, as one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.modeling_utils import PreTrainedModel

from .configuration_attnres import AttnResConfig
from .depth_stream import DepthStream


if TYPE_CHECKING:
    from .modeling_attnres import AttnResModel


def num_sources(config: AttnResConfig, site: int) -> tuple[int, int]:
    """How many closed blocks a stream has at a site, with the embedding, and how many tensors of the open block."""
    num_blocks, num_outputs = 1 + site // config.attn_res_block_size, site % config.attn_res_block_size
    if num_outputs == 0:
        return num_blocks, 0
    return num_blocks, 1 + num_outputs if config.attn_res_open_block == "each" else 1


def stack_sources(stream: DepthStream) -> torch.Tensor:
    """The closed blocks, then the partial sum, and then the outputs of the open block if these are sources,
    `[sources, batch, seq, hidden]`."""
    open_block = () if stream.partial is None else (stream.partial, *getattr(stream, "outputs", ()))
    return torch.stack((*stream.blocks, *open_block))


def stream_of_sources(trunk: AttnResModel, sources: torch.Tensor, site: int) -> DepthStream:
    """The inverse of `stack_sources`, on the next stage."""
    num_blocks, num_open = num_sources(trunk.config, site)
    partial, *outputs = sources[num_blocks:] if num_open else (None,)
    return trunk.start_stream(tuple(sources[:num_blocks]), partial, site, outputs=outputs)


def carry_streams(model: PreTrainedModel, entry_site: int):
    """Make a stage of `DistributedConfig(pp_size=...)` send and receive streams, where it would a tensor.

    Args:
        model: what transformers has made a stage of.
        entry_site: of its first layer.
    """
    stage, trunk = model._pp_stage, model.base_model
    communicate = stage.communicate

    def communicate_stream(operation: str, *, tensor: DepthStream | None = None, shape=None, **kwargs):
        if tensor is not None:  # to be sent
            sources = stack_sources(tensor)
            if sources.dtype != kwargs["dtype"]:  # which it would be cast to
                raise ValueError(
                    f"The residual stream of base `{trunk.config.base_model_type}` is of {sources.dtype}, and"
                    f" transformers' pipeline stages send {kwargs['dtype']}: load the model in {sources.dtype}."
                )
            return communicate(operation, tensor=sources, **kwargs)
        sources = communicate(operation, shape=(sum(num_sources(trunk.config, entry_site)), *shape), **kwargs)
        return stream_of_sources(trunk, sources, entry_site)

    stage.communicate = communicate_stream
