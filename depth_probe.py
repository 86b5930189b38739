# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""How often do the layers of a base add to its residual stream, and does the base do anything else to it?

Found by a run of the base without weights, when a config is made of it.
"""

import copy
import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from .depth_stream import DepthStream


class RefusedBase(ValueError):
    """A base does more to its residual stream than to add to it and to read it, or is not one decoder."""

    def __init__(self, base_config: PreTrainedConfig, reason: str):
        super().__init__(f"`base_model_type={base_config.model_type!r}` is not supported: {reason}.")


class CountingStream(DepthStream):
    """A stream that is written to. What is read has the shape of a mix."""

    def read(self, norm: nn.Module | None = None) -> torch.Tensor:
        return self.newest


class FirstOfAll(TorchDispatchMode):
    """There are no numbers, so what they choose, such as the experts of a token, is one, and the first."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.nonzero.default:
            return torch.tensor([[0] * args[0].ndim])  # of which a fake tensor keeps the numbers
        return function(*args, **(kwargs or {}))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model without head: its first list of modules, of as many as the config says."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    num_layers = getattr(model.config, "num_hidden_layers", None)
    return next((found for found in lists if len(found) == num_layers), lists[0])


def probe_sublayers(base_config: PreTrainedConfig) -> list[int]:
    """Count how often each decoder layer of a base adds to its residual stream, without weights or memory for any.

    Raises:
        ValueError: if a layer does not hand on the stream: the base does more to it than to add to it and to read it.
    """
    counts: list[int] = []

    def start(layer, args, kwargs):
        stream = CountingStream(None, (args[0] if args else kwargs["hidden_states"],), block_size=sys.maxsize)
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    def count(layer, args, output):
        reason = _reason_against_layer(layer, output, base_config)
        if reason is None and layer is not layers[min(len(counts), len(layers) - 1)]:
            reason = f"a {type(layer).__name__} runs more than once, or not in the order of the layers"
        if reason is not None:
            raise RefusedBase(base_config, reason)
        counts.append((output[0] if isinstance(output, tuple) else output).site - sum(counts))

    reason = _reason_against_config(base_config)
    if reason is not None:
        raise RefusedBase(base_config, reason)
    base_config = copy.deepcopy(base_config)
    base_config._attn_implementation, base_config._experts_implementation = "eager", "batched_mm"
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with torch.device("cpu"), fake, no_init_weights(), torch.no_grad():  # also where weights are being loaded
        model = MODEL_MAPPING[type(base_config)](base_config).eval()
        if hasattr(model, "encoder") and hasattr(model, "decoder"):
            raise RefusedBase(base_config, "it has an encoder beside its decoder")
        layers = decoder_layers(model)
        layers[0].register_forward_pre_hook(start, with_kwargs=True)
        for layer in layers:
            layer.register_forward_hook(count)
        try:
            with FirstOfAll():
                model(torch.zeros(1, 3, dtype=torch.long), use_cache=False)
        except RefusedBase:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RefusedBase(base_config, f"a run of its model without weights failed ({text})") from error
    if len(counts) != len(layers):
        raise RefusedBase(base_config, f"{len(counts)} of its {len(layers)} layers have run, one after the other")
    return counts


def _reason_against_config(base_config: PreTrainedConfig) -> str | None:
    if base_config.is_encoder_decoder:
        return "it has an encoder beside its decoder"
    text_config = base_config.get_text_config(decoder=True)
    if text_config is not base_config:
        return (
            f"it is made of several models. The language model in it is of type {text_config.model_type!r}; its config"
            " is `config.get_text_config(decoder=True)`"
        )
    if not hasattr(base_config, "num_hidden_layers"):
        return "its layers are not one stack, of which its config would have the number"
    if type(base_config) not in MODEL_MAPPING:
        return "transformers has no model of it without a head"
    return None


def _reason_against_layer(layer: nn.Module, output, base_config: PreTrainedConfig) -> str | None:
    stream, *others = output if isinstance(output, tuple) else (output,)
    name = type(layer).__name__
    if not isinstance(stream, DepthStream):
        return f"a {name} does more to its residual stream than to add outputs to it and to read it"
    if any(isinstance(other, torch.Tensor) and other.shape == stream.shape for other in others):
        return f"a {name} hands on two residual streams"
    if stream.shape[-1] != base_config.hidden_size:
        return f"its residual stream has {stream.shape[-1]} features, not the {base_config.hidden_size} of a token"
    return None
