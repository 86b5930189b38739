# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Slices of the layers, as pipeline stages run them, and what crosses between two: all sources, as one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .configuration_attnres import AttnResConfig
from .depth_forward import HANDED
from .depth_probe import Probe, decoder_layers, probe_slices
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


def carry_streams(model: PreTrainedModel):
    """Make a stage of `DistributedConfig(pp_size=...)` send and receive streams, where it would a tensor.

    Args:
        model: what transformers has made a stage of.

    Raises:
        ValueError: if layers of the base need more from those in front of them than the residual stream.
    """
    stage, trunk = model._pp_stage, model.base_model
    probe_slices(model.config.to_base_config())
    entry_site, *_ = (layer.depth_sites[0] for layer in decoder_layers(trunk) if hasattr(layer, "depth_sites"))
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


class PassThrough(nn.Module):
    """Stands where a slice of the layers has none.

    Args:
        layer: that is left out, of which the base may read numbers and names.
        num_values: that the layer returns as a tuple; `None`: hidden states alone.
    """

    def __init__(self, layer: nn.Module | None = None, num_values: int | None = None):
        super().__init__()
        plain = (bool, int, float, str)
        self.__dict__.update((name, value) for name, value in vars(layer or self).items() if isinstance(value, plain))
        self.num_values = num_values

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states if self.num_values is None else (hidden_states, *[None] * (self.num_values - 1))


class SliceEnd(PassThrough):
    """Stands behind the last layer of a slice. What the base does behind all layers is not done to the stream."""

    def forward(self, stream, *args, **kwargs):
        HANDED.stream_behind = stream
        return super().forward(torch.full_like(stream.newest, torch.nan))  # as of a head nothing would be right


class AttnResSliceMixin:
    def keep_layers(self, start: int, end: int, probe: Probe | None = None):
        """Leave the layers `start` to `end - 1`, and the final norm behind the last one: a pipeline stage.

        What such a model returns as `last_hidden_state` in front of the last stage is a `DepthStream`.

        Args:
            start, end: layers to keep, `end` not among them.
            probe: what `probe_slices` gave for this base, if it has been called: a run of its layers without weights.

        Raises:
            ValueError: if layers of the base need more from those in front of them than the residual stream.
        """
        layers, probe = decoder_layers(self), probe or probe_slices(self.config.to_base_config())
        for i, of_layer in enumerate(probe.probed):
            if not start <= i < end:
                layers[i] = (SliceEnd if i == end else PassThrough)(layers[i], of_layer.num_values)
        if end < len(layers):
            present = {name for name, _ in self.named_modules()}  # a model with a head may have no pooler
            for name in present & (probe.behind - probe.in_front):
                self.set_submodule(name, PassThrough())
