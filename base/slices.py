# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Slices of the layers, as pipeline stages run them, and what crosses between two: all sources, as one tensor."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ..depth.stream import DepthStream
from .forward import FORWARD_CONTEXT, kv_cache_among
from .probe import Probe, decoder_layers, probe_slices


def count_tensors(config: PreTrainedConfig, site: int) -> tuple[int, int]:
    """The number of closed blocks (the embedding included) and of open-block tensors that a stream holds at a site."""
    num_blocks, num_outputs = 1 + site // config.attn_res_block_size, site % config.attn_res_block_size
    if num_outputs == 0:
        return num_blocks, 0
    return num_blocks, 1 + num_outputs if config.attn_res_open_block == "each" else 1


def stack_sources(stream: DepthStream) -> torch.Tensor:
    """All sources as one tensor, `[sources, batch, seq, hidden]`.

    The closed blocks come first, then the partial sum, and then the open block's outputs if each is a source.
    """
    stream.check_memory()
    return torch.stack((*stream.blocks, *stream.open_tensors))


def stream_of_sources(trunk: PreTrainedModel, sources: torch.Tensor, site: int) -> DepthStream:
    """The inverse of `stack_sources`, on the next stage."""
    num_blocks, num_open = count_tensors(trunk.config, site)
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
        sources = communicate(operation, shape=(sum(count_tensors(trunk.config, entry_site)), *shape), **kwargs)
        return stream_of_sources(trunk, sources, entry_site)

    stage.communicate = communicate_stream
    forward = model.forward

    @functools.wraps(forward)
    def checked_forward(*args, **kwargs):  # in every stage, in front of what is sent
        check_cache(model, args, kwargs)
        return forward(*args, **kwargs)

    model.forward = checked_forward


def check_cache(model: nn.Module, args: tuple, kwargs: dict):
    """Raise a `ValueError` for a cache with which a model without its first layers would be wrong in silence.

    Decoders make masks and positions from the number of tokens in the cache of layer 0. Where another stage has that
    layer, it is always 0.
    """
    named = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs}
    cache, mask = kv_cache_among(args, kwargs), named.get("attention_mask")
    if cache is None or (cache.layers and not any(hasattr(layer, "keys") for layer in cache.layers)):
        return  # none, or states alone, which no masks or positions are made from
    inputs = named.get("input_ids")
    num_tokens = (named["inputs_embeds"] if inputs is None else inputs).shape[1]
    is_filled = any(getattr(layer, "keys", None) is not None for layer in cache.layers)
    if cache.is_compileable:
        reason = "a static cache"
    elif mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.all()):
        reason = "a cache with padding, or with a mask of your own"
    elif is_filled and num_tokens > 1:
        reason = f"a filled cache with {num_tokens} tokens at once"
    elif is_filled and named.get("position_ids") is None:
        reason = "a filled cache without `position_ids`"
    else:
        return
    raise ValueError(
        f"Stages of a model cannot be given {reason}: they make masks and positions from the cache of layer 0, which"
        " only the first stage fills. Pass use_cache=False, or prompts of one length with a dynamic cache, read whole"
        " and then token by token."
    )


def rules_of_stage(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """The rules of a plan that are for what this stage of `DistributedConfig(pp_size=...)` keeps.

    transformers 5.23 expands plans for the whole model, then drops the layers of other stages, and does not find them
    when it applies the plan (a `KeyError`, for every model).

    Args:
        model: with all its layers.
        plan: by the name of a module or a parameter.
    """
    from transformers.distributed.pipeline_parallel import PipelineStage  # that transformers 5.19 does not have

    stage = PipelineStage(model._mesh_manager.get_mesh("pp"))
    head_needs_embedding = stage.pp_is_last_stage and getattr(model.config, "tie_word_embeddings", False)

    def is_kept(name: str) -> bool:
        key = f"{name}."  # that of a module is the beginning of its parameters'
        owner = stage.find_rank_for_key(key, model.config.num_hidden_layers, model.base_model_prefix)
        return owner in (None, stage.pp_rank) or (head_needs_embedding and ".embed_tokens." in key)

    return {name: rule for name, rule in plan.items() if is_kept(name)}


class PassThrough(nn.Module):
    """Takes the place of a layer that a slice leaves out.

    Args:
        layer: the one left out; its plain attributes are copied, because the base may read them.
        num_values: how many values the layer returns as a tuple; `None`: the hidden states alone.
    """

    def __init__(self, layer: nn.Module | None = None, num_values: int | None = None):
        super().__init__()
        plain = (bool, int, float, str)
        self.__dict__.update((name, value) for name, value in vars(layer or self).items() if isinstance(value, plain))
        self.num_values = num_values

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states if self.num_values is None else (hidden_states, *[None] * (self.num_values - 1))


class SliceEnd(PassThrough):
    """Follows the last layer of a slice. What the base does after all layers is not done to the stream."""

    def forward(self, stream, *args, **kwargs):
        FORWARD_CONTEXT.slice_output = stream
        # Not numbers, so that a head that is run on them by mistake shows
        return super().forward(torch.full_like(stream.newest, torch.nan))


class AttnResSliceMixin:
    """A decoder that can be divided into slices of its layers."""

    def keep_layers(self, start: int, end: int, probe: Probe | None = None):
        """Keep only the layers `start` to `end - 1`, and the final norm if the last layer is among them.

        The model is then a pipeline stage. All stages but the last one return a `DepthStream` as `last_hidden_state`.

        Args:
            start, end: layers to keep, without `end`.
            probe: the result of `probe_slices` for this base, to avoid another run of its layers without weights.

        Raises:
            ValueError: if the model has no such layers, or if layers of the base need more from the layers before them
                than the residual stream.
        """
        layers = decoder_layers(self)
        if not 0 <= start < end <= len(layers):
            raise ValueError(f"`start={start}` and `end={end}` must enclose at least one of the {len(layers)} layers.")
        probe = probe or probe_slices(self.config.to_base_config())
        for i, of_layer in enumerate(probe.probed):
            if not start <= i < end:
                layers[i] = (SliceEnd if i == end else PassThrough)(layers[i], of_layer.num_values)
        if start > 0:
            self.register_forward_pre_hook(check_cache, with_kwargs=True)
        if end < len(layers):
            present = {name for name, _ in self.named_modules()}  # a model with a head may have no pooler
            for name in present & (probe.behind - probe.in_front):
                self.set_submodule(name, PassThrough())
