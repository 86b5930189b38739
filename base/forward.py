# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The forward pass of a base, with what goes around its code to the first layer, and with streams read in outputs.

Three things are passed around code that is not ours, and each says why where it is: `FORWARD_CONTEXT` here,
`BaseConversions.asked` in `classes.py`, and the weights of a generation's steps in `modeling_attnres.py`.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.utils import ModelOutput

from ..depth.recorder import DepthRecorder
from ..depth.stream import DepthStream, checkpoint_stream


class ForwardContext(threading.local):
    """What the forward pass of this thread passes around the base's code, which may not pass keywords on.

    Not a context variable, because compilers do not support them. Everything has a value from the start: compiled
    code is guarded by whether there is an attribute, and would be compiled again for the second call.

    Attributes:
        value: `(model, recorder, stream)`, for the first layer.
        slice_output: on the way back, what left the last layer of a slice.
        recorders: what an encoder-decoder passes to its stacks, pairs of a stack and a recorder or `None`.
    """

    def __init__(self):
        self.value: tuple | None = None
        self.slice_output: DepthStream | None = None
        self.recorders: list[tuple] | None = None


FORWARD_CONTEXT = ForwardContext()


def kv_cache_among(args: tuple, kwargs: dict) -> Cache | None:
    """The KV cache among the arguments of a model or a layer, `None` if there is none.

    By its class: transformers has called it `past_key_values`, `cache_params`, `layer_past` and, since 5.24, `cache`,
    and some bases pass it to their layers without a name.
    """
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


@functools.cache
def depth_output_class(base: type[ModelOutput], *parts: str) -> type[ModelOutput]:
    """A class of outputs with `depth_attentions`, one tensor `(batch_size, sequence_length, sources)` per site.

    Args:
        parts: those of an encoder-decoder that have depth attentions: `encoder_depth_attentions` and so on.
    """
    names = [f"{part}_depth_attentions" for part in parts] or ["depth_attentions"]
    fields = [(name, tuple[torch.FloatTensor, ...] | None, None) for name in names]
    return make_dataclass(f"AttnRes{base.__name__}", fields, bases=(base,))


def refuse_layerdrop(model: Any):
    """Raise a `ValueError` for a model in training whose layers are left out at random."""
    for owner in (model, model.config):
        rate = getattr(owner, "layerdrop", None)
        if rate:
            raise ValueError(
                f"A {type(model).__qualname__} would leave out layers at random in training (LayerDrop, rate {rate}),"
                " and the reads behind them would be of other sources: set `layerdrop` in the config to 0, or"
                " `encoder_layerdrop` and `decoder_layerdrop`."
            )


def with_depth_attentions(base_forward: Callable) -> Callable:
    """The forward of a base, which also takes `output_depth_attentions` and a `depth_recorder`.

    The recorder goes to the first layer; see `AttnResModel.enter_layer`.
    """

    @functools.wraps(base_forward)  # Trainer and `generate` look at the names of the arguments
    def forward(self, *args, output_depth_attentions: bool | None = None, depth_recorder: Any = None, **kwargs):
        outer = FORWARD_CONTEXT.value
        if outer is not None and outer[0] is self.trunk:  # called by the model with a head, which has done all of this
            return base_forward(self, *args, **kwargs)
        if self.training:
            refuse_layerdrop(self)
        for stack, of_stack in FORWARD_CONTEXT.recorders or ():
            if stack is self:  # called by an encoder-decoder, which returns the weights
                output_depth_attentions, depth_recorder = False, of_stack
        if output_depth_attentions is None:
            output_depth_attentions = getattr(self.config, "output_depth_attentions", False)
        if output_depth_attentions and depth_recorder is None:
            depth_recorder = DepthRecorder(outputs=None)
        stream = kwargs["inputs_embeds"] if isinstance(kwargs.get("inputs_embeds"), DepthStream) else None
        if stream is not None:
            # A placeholder: the base embeds it, but the first layer is given the stream. `probe_slices` has checked
            # that no layer uses the embedding otherwise
            kwargs["inputs_embeds"] = torch.zeros_like(stream.newest)
            stream = stream if depth_recorder is None else stream.with_recorder(depth_recorder)
        if output_depth_attentions:
            return_dict = kwargs.pop("return_dict", None)
            return_dict = self.config.return_dict if return_dict is None else return_dict
            kwargs["return_dict"] = True
        FORWARD_CONTEXT.value, FORWARD_CONTEXT.slice_output = (self.trunk, depth_recorder, stream), None
        try:
            outputs = _with_tensors(base_forward(self, *args, **kwargs))
            if depth_recorder is not None and stream is None and FORWARD_CONTEXT.slice_output is None:
                depth_recorder.check_read()
        finally:
            FORWARD_CONTEXT.value, FORWARD_CONTEXT.slice_output = outer, None
        if not output_depth_attentions:
            return outputs
        weights = tuple(weights for _, weights in sorted(depth_recorder.weights.items()))  # type: ignore[union-attr]
        output_class = depth_output_class(type(outputs))  # type: ignore[arg-type]
        outputs = output_class(**outputs, depth_attentions=weights)
        return outputs if return_dict else outputs.to_tuple()

    return forward


def with_depth_attentions_of_stacks(base_forward: Callable) -> Callable:
    """The same of an encoder-decoder, which takes a recorder for each stack and returns the weights of both."""

    @functools.wraps(base_forward)
    def forward(
        self,
        *args,
        output_depth_attentions: bool | None = None,
        encoder_depth_recorder=None,
        decoder_depth_recorder=None,
        **kwargs,
    ):
        stacks, outer = self.stacks, FORWARD_CONTEXT.recorders
        if outer is not None and outer[0][0] is stacks[0]:  # the model with a head has done all of this
            return base_forward(self, *args, **kwargs)
        if kwargs.pop("depth_recorder", None) is not None:
            raise ValueError(
                "An encoder-decoder takes no `depth_recorder`: pass an `encoder_depth_recorder`, a"
                " `decoder_depth_recorder`, or both."
            )
        if encoder_depth_recorder is not None and kwargs.get("encoder_outputs") is not None:
            raise ValueError("`encoder_depth_recorder` would record nothing: with `encoder_outputs` no encoder runs.")
        if output_depth_attentions is None:
            output_depth_attentions = getattr(self.config, "output_depth_attentions", False)
        recorders = {"encoder": encoder_depth_recorder, "decoder": decoder_depth_recorder}
        if output_depth_attentions:
            recorders = {part: recorder or DepthRecorder(outputs=None) for part, recorder in recorders.items()}
            return_dict = kwargs.pop("return_dict", None)
            return_dict = self.config.return_dict if return_dict is None else return_dict
            kwargs["return_dict"] = True
        FORWARD_CONTEXT.recorders = [*zip(stacks, recorders.values())]
        try:
            outputs = base_forward(self, *args, **kwargs)
        finally:
            FORWARD_CONTEXT.recorders = outer
        if not output_depth_attentions:
            return outputs
        weights = {
            f"{part}_depth_attentions": tuple(of_site for _, of_site in sorted(recorder.weights.items())) or None
            for part, recorder in recorders.items()
        }
        output_class = depth_output_class(type(outputs), *recorders)  # type: ignore[arg-type]
        outputs = output_class(**outputs, **weights)
        return outputs if return_dict else outputs.to_tuple()

    return forward


def checkpoint_of_layers(checkpoint: Callable) -> Callable:
    """What layers are checkpointed with, which get a stream: see `checkpoint_stream`.

    The stream begins in the first layer. Before transformers 5.20 that is within what is computed again, after the
    forward pass, so its recorder is kept for then.
    """

    def checkpoint_in_pass(function: Callable, *args):
        value = FORWARD_CONTEXT.value
        if value is None or value[1] is None:
            return checkpoint(function, *args)

        def run(*args):
            outer = FORWARD_CONTEXT.value
            FORWARD_CONTEXT.value = value
            try:
                return function(*args)
            finally:
                FORWARD_CONTEXT.value = outer

        return checkpoint(run, *args)

    return functools.partial(checkpoint_stream, checkpoint_in_pass)


def _with_tensors(outputs: Any) -> Any:
    """The outputs of a model, in which hidden states of the layers are streams: of each what the next layer reads.

    The last hidden state of a slice is the stream behind it.
    """
    behind = FORWARD_CONTEXT.slice_output
    if isinstance(outputs, ModelOutput):
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(_read(state) for state in outputs["hidden_states"])
        if behind is not None:
            outputs["last_hidden_state"] = behind
        elif _is_final(outputs.get("last_hidden_state")):
            outputs["last_hidden_state"] = _read(outputs["last_hidden_state"])
    elif isinstance(outputs, tuple):
        first = behind if behind is not None else _read(outputs[0]) if _is_final(outputs[0]) else outputs[0]
        others = (tuple(map(_read, part)) if isinstance(part, tuple) else part for part in outputs[1:])
        return first, *others
    return outputs


def _is_final(value) -> bool:
    """Whether it is a stream at the last site, of a base without a final norm, which would have read it."""
    return isinstance(value, DepthStream) and value.site == len(value.queries) - 1


def _read(value):
    return value.read() if isinstance(value, DepthStream) else value
