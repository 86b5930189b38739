# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""How often do the layers of a base add to its residual stream, and does the base do anything else to it?

Found by running the base without weights when a config is made from it. The lines that read and write are recorded.
"""

import contextlib
import copy
import functools
import inspect
import json
import linecache
import logging
import re
import sys
import threading
from collections import UserDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.configuration_utils import PreTrainedConfig

from ..depth.recorder import DepthRecorder
from ..depth.stream import DepthStream
from .config import decoder_class, is_encoder, is_encoder_decoder, per_layer


class RefusedBase(ValueError):
    """A base does more to its residual stream than to add to it and to read it, or is not one decoder."""

    def __init__(self, base_config: PreTrainedConfig, reason: str):
        super().__init__(f"`base_model_type={base_config.model_type!r}` is not supported: {reason}.")


@dataclass(frozen=True)
class Line:
    """A line of a layer's code that "reads" the residual stream or "writes" to it."""

    what: str
    file: str
    number: int

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.number).strip()


@dataclass
class ProbedLayer:
    """What a decoder layer does to its residual stream, and in which lines, in the order of execution."""

    layer: nn.Module
    lines: list[Line] = field(default_factory=list)
    num_writes: int = 0
    # The site of the stream in it that has been written to most often; that need not be the one that it hands on
    furthest_site: int = 0
    # How many values it returns as a tuple, of which the stream is the first; `None`: the stream alone
    num_values: int | None = None
    # The argument, beside the stream, that depends on the tokens or on earlier layers
    given_more: str | None = None


@dataclass
class Probe(DepthRecorder):
    """Looks on while the layers of a base run, one after the other: what is done to the stream, and in which lines."""

    outputs: None = None
    layers: list[nn.Module] = field(default_factory=list)  # those of the base
    probed: list[ProbedLayer] = field(default_factory=list)  # those that have run
    config: PreTrainedConfig | None = None
    inputs: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 3, dtype=torch.long))
    # Names of the modules beside the layers that run in front of the first one, and behind the last one
    in_front: set[str] = field(default_factory=set)
    behind: set[str] = field(default_factory=set)
    # Whether layers scale the stream: then each block changes from site to site
    scales_blocks: bool = False

    def __post_init__(self):
        self.made_of_tokens = MadeOf(self.inputs)
        self.model: Any = None
        self.embedding: torch.Tensor | None = None  # the first source

    def watch(self, model: nn.Module):
        self.model = model
        for layer in self.layers:
            layer.register_forward_pre_hook(self.enter, with_kwargs=True)
            layer.register_forward_hook(self.leave)
        layers, outer = decoder_layers(model), [("", model)]
        while outer:  # the modules that the layers are inside of, from the model inwards
            prefix, module = outer.pop()
            for name, child in module.named_children():
                if layers in child.children():
                    outer.append((f"{prefix}{name}.", child))
                elif child is not layers:
                    child.register_forward_pre_hook(functools.partial(self.beside, f"{prefix}{name}"))

    def beside(self, name: str, module: nn.Module, args: tuple):
        if not self.probed:
            self.in_front.add(name)
        if len(self.probed) == len(self.layers):
            self.behind.add(name)

    def record(self, what: str):
        probed, frame = self.probed[-1], sys._getframe(2)
        while frame is not None and frame.f_locals.get("self") is not probed.layer:
            frame = frame.f_back  # out of what the layer calls: a norm, operations on tensors
        if frame is None:  # between the layers, or behind them
            return
        line = Line(what, frame.f_code.co_filename, frame.f_lineno)
        if line not in probed.lines[-1:]:  # each operation of a norm reads
            probed.lines.append(line)

    def enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """In front of a layer: the first one gets a stream, the others have to be given it."""
        name, stream = type(layer).__name__, args[0] if args else kwargs["hidden_states"]
        if len(self.probed) >= len(self.layers) or layer is not self.layers[len(self.probed)]:
            raise RefusedBase(self.config, f"its {name} runs more than once, or not in the order of the layers")
        if not self.probed:
            self.embedding = stream
            stream = CountingStream(None, (stream,), block_size=sys.maxsize, recorder=self)
        elif not isinstance(stream, DepthStream):
            reason = "does more to the residual stream than to hand it on"
            raise RefusedBase(self.config, f"its model {reason}, in front of layer {len(self.probed)}, a {name}")
        self.probed.append(ProbedLayer(layer, given_more=self.made_of_tokens.name_of(layer, args, kwargs)))
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    def leave(self, layer: nn.Module, args: tuple, output):
        """Behind a layer, which has to hand on the stream."""
        probed = self.probed[-1]
        reason = _reason_against_layer(probed, output, self.config)
        if reason is not None:
            raise RefusedBase(self.config, reason)
        probed.num_values = len(output) if isinstance(output, tuple) else None
        stream = output[0] if isinstance(output, tuple) else output
        self.scales_blocks |= stream.blocks[0] is not self.embedding
        probed.num_writes = stream.site - sum(earlier.num_writes for earlier in self.probed)
        if probed.furthest_site > stream.site:  # reads of the other one would use queries of later layers
            name = type(layer).__name__
            raise RefusedBase(
                self.config, f"its {name} has a longer residual stream inside, which it does not pass on"
            )


class CountingStream(DepthStream):
    """A stream that counts its writes. A read returns a tensor of the right shape, not a mix."""

    recorder: Probe

    def write(self, output: torch.Tensor) -> DepthStream:
        self.recorder.record("writes")
        written, probed = super().write(output), self.recorder.probed[-1]
        probed.furthest_site = max(probed.furthest_site, written.site)
        return written

    def read(self, norm: nn.Module | None = None) -> torch.Tensor:
        self.recorder.record("reads")
        return self.newest


class KnownValues(TorchDispatchMode):
    """Within fake tensors: what no weight goes into, such as positions and masks, is real, and can be branched on.

    Of what weights go into only shapes are known, and the first choice is taken, such as the first expert, and once. A
    condition on it does not hold, and a number of it is zero, as for a check for NaN. Large tensors are fake as well.

    Raises:
        RuntimeError: for a loop that such conditions do not end.
    """

    MAX_NUMBERS = 2**20  # of a tensor that is real
    MAX_CONDITIONS = 10_000

    def __init__(self):
        super().__init__()
        self.num_conditions = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        if any(map(_is_without_value, given)):
            return self._without_values(function, args, kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags:  # no random number of the process is used up
            return function(*args, **kwargs)
        if not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*function.tags}:
            fake = function(*args, **kwargs)  # which has the size before there is memory for it
            tensors = [value for value in pytree.tree_leaves(fake) if isinstance(value, torch.Tensor)]
            if any(tensor.numel() > self.MAX_NUMBERS for tensor in tensors):
                return fake
        with _disable_current_modes():
            return function(*args, **kwargs)

    def _without_values(self, function, args: tuple, kwargs: dict):
        if function is torch.ops.aten.nonzero.default:
            return torch.tensor([[0] * args[0].ndim])
        if function is torch.ops.aten._local_scalar_dense.default and _is_condition(args[0]):
            self.num_conditions += 1
            if self.num_conditions > self.MAX_CONDITIONS:
                raise RuntimeError("a loop goes on until a condition on what it has computed holds")
            return 0.0 if args[0].dtype.is_floating_point else False
        return function(*args, **kwargs)


def _is_without_value(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor) or value.is_meta
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_condition(tensor: torch.Tensor) -> bool:
    """Whether one number of such a tensor decides something, where an int is usually a size."""
    return tensor.dtype is torch.bool or tensor.dtype.is_floating_point


class MadeOf(TorchDispatchMode):
    """Knows which tensors are made of a first one. What has only its shape is not.

    Args:
        first: such as the ids of tokens.
    """

    def __init__(self, first: torch.Tensor):
        super().__init__()
        self.made = {id(first): first}  # kept, so that no other has its id

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self._is_any((args, kwargs)) and not re.search(r"_like|^aten\.new_", str(function)):
            self.made.update((id(tensor), tensor) for tensor in pytree.tree_leaves(result))
        return result

    def _is_any(self, values) -> bool:
        return any(id(value) in self.made for value in pytree.tree_leaves(values))

    def name_of(self, layer: nn.Module, args: tuple, kwargs: dict) -> str | None:
        """The first of a layer's arguments behind the stream that has something of it."""
        signature = inspect.signature(type(layer).forward)
        names = [name for name in signature.parameters if name != "self"]
        given = {**dict(zip(names[1:], args[1:])), **{name: kwargs[name] for name in kwargs if name != names[0]}}
        return next((name for name, value in given.items() if self._is_any(_entries(value))), None)


def _entries(value: Any) -> Any:
    """The values inside an object that wraps a dict, as layers hand to each other."""
    if isinstance(value, UserDict):
        return value.data
    return value


@contextlib.contextmanager
def quiet_fake_tensors():
    """Without the stack that torch logs in this thread if shapes do not fit: the error says it as well."""
    thread, logger = threading.get_ident(), logging.getLogger(FakeTensorMode.__module__)

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def move_off_meta(model: nn.Module):
    """Give a model on the device "meta" tensors of the mode and device around it, such as fake ones; ties are lost.

    `Module.to_empty` swaps tensors in some modes and settings, which those of a model on "meta" do not allow.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model without head: its first list of modules, of as many as the config says."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    num_layers = getattr(model.config, "num_hidden_layers", None)
    return next((found for found in lists if len(found) == num_layers), lists[0])


# The names that encoder-decoders give their stacks
STACKS = ("encoder", "decoder")
# By what decides, how often each layer adds to the stream
_COUNTS: dict[tuple, tuple] = {}
# Where a config came from, and how weights are stored
_WITHOUT_EFFECT = ("_name_or_path", "architectures", "dtype", "transformers_version")


def probe_sublayers(base_config: PreTrainedConfig) -> list[int]:
    """Count how often each layer of a base adds to its residual stream, the layers of an encoder first.

    Errors are those of `run_probes`.
    """
    return [count for counts in probe_stacks(base_config) for count in counts]


def probe_stacks(base_config: PreTrainedConfig) -> list[list[int]]:
    """The same for each stack of layers: of an encoder-decoder there are two.

    Once in a process for the same base with the same code. Errors are found anew.
    """
    key = _content_and_code(base_config)
    counts = None if key is None else _COUNTS.get(key)
    if counts is None:
        counts = tuple(tuple(probed.num_writes for probed in probe.probed) for probe in run_probes(base_config))
        if key is not None:
            _COUNTS[key] = counts
    return [[*of_stack] for of_stack in counts]


def _content_and_code(base_config: PreTrainedConfig) -> tuple | None:
    """What a probe depends on: the values of a config, and the classes and functions beside the base's model.

    `None` for a base with code from elsewhere, or values that cannot be compared.
    """
    refuse_by_config(base_config)
    config_class, model_class = type(base_config), decoder_class(type(base_config))
    if not all(cls.__module__.startswith("transformers.models.") for cls in (config_class, model_class)):
        return None
    values = {**base_config.to_dict(), **per_layer(base_config)}
    for name in _WITHOUT_EFFECT:
        values.pop(name, None)
    try:
        content = json.dumps(values, sort_keys=True)
    except TypeError:
        return None
    # Some of it may have been replaced in this process, as by Liger
    code: list[Any] = []
    for of_module in list(vars(sys.modules[model_class.__module__]).values()):
        if inspect.isclass(of_module) and issubclass(of_module, nn.Module):
            code += [of_module, *filter(inspect.isfunction, vars(of_module).values())]
        elif inspect.isfunction(of_module):
            code.append(of_module)
    return config_class, model_class, content, *code


def decoder_on_meta(base_config: PreTrainedConfig) -> nn.Module:
    """The model of a base without a head, and without tensors or initial values.

    Raises:
        ValueError: if none can be made of its config.
    """
    model_class: Any = decoder_class(type(base_config))
    try:
        # Whatever is on around it: weights may be being loaded, or a model run. Here transformers gives no initial
        # values. To give them it replaces `torch.nn.init` in the whole process, and of two threads that do so at once
        # the second "restores" what the first has put there
        with torch.inference_mode(False), torch.no_grad(), torch.device("meta"):
            return model_class(base_config).eval()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RefusedBase(base_config, f"no model can be made of its config ({text})") from error


def run_probes(base_config: PreTrainedConfig) -> list[Probe]:
    """Run a base on streams that take down what is done to them, without weights or memory for any.

    Returns:
        One for each stack of layers, see `stacks_of`.

    Raises:
        ValueError: if a layer does not hand on the stream: the base does more to it than to add to it and to read it.
    """
    refuse_by_config(base_config)
    base_config = copy.deepcopy(base_config)
    base_config._attn_implementation, base_config._experts_implementation = "eager", "batched_mm"
    if is_encoder_decoder(base_config.model_type):  # a head that uses the encoder alone says that it is none
        base_config.is_encoder_decoder = True
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model = decoder_on_meta(base_config)
    try:
        with torch.device("cpu"), fake, torch.inference_mode(False), torch.no_grad(), quiet_fake_tensors():
            move_off_meta(model)
            stacks = stacks_of(model)
            if not base_config.is_encoder_decoder and hasattr(model, "encoder") and hasattr(model, "decoder"):
                raise RefusedBase(base_config, "it has an encoder as well as a decoder")
            with KnownValues():
                others = example_inputs(model)
                first = others.pop(model.main_input_name)
                probes = [
                    Probe(layers=list(decoder_layers(stack)), config=base_config, inputs=first) for stack in stacks
                ]
                for probe, stack in zip(probes, stacks):
                    probe.watch(stack)
                with probes[0].made_of_tokens:
                    model(first, **others)
    except RefusedBase:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RefusedBase(base_config, f"a run of its model without weights failed ({text})") from error
    for probe in probes:
        if len(probe.probed) != len(probe.layers):
            reason = f"{len(probe.probed)} of its {len(probe.layers)} layers have run, one after the other"
            raise RefusedBase(base_config, reason)
    return probes


def stacks_of(model: Any) -> list[Any]:
    """The parts of a model that have a residual stream each: an encoder and a decoder, or the model itself.

    Of an encoder-decoder some heads use the encoder alone.
    """
    config = model.config
    if not is_encoder_decoder(getattr(config, "base_model_type", config.model_type)):
        return [model.base_model]
    # The first module with an encoder, from the outermost on
    owner = next(module for module in model.modules() if isinstance(getattr(module, "encoder", None), nn.Module))
    return [part for name in STACKS if (part := getattr(owner, name, None)) is not None]


def example_inputs(model: Any) -> dict[str, Any]:
    """Arguments of a model without a head: token ids, images of the size that the config names, or sound."""
    config, name = model.config, model.main_input_name
    if is_encoder_decoder(config.model_type):
        first = torch.zeros(2, 3, dtype=torch.long) if name == "input_ids" else _example_of_sound(config, name)
        return {name: first, "decoder_input_ids": torch.zeros(2, 4, dtype=torch.long), "use_cache": False}
    if not is_encoder(config.model_type):
        return {name: torch.zeros(1, 3, dtype=torch.long), "use_cache": False}
    if name == "input_ids":  # two rows, as what is the same for each may be added to the stream
        return {name: torch.zeros(2, 3, dtype=torch.long)}
    if name in ("input_values", "input_features"):
        return {name: _example_of_sound(config, name)}
    if name != "pixel_values" or not hasattr(config, "image_size"):
        raise RefusedBase(config, f"its input, `{name}`, is neither tokens, nor images of one size, nor sound")
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {name: torch.zeros(2, getattr(config, "num_channels", 3), height, width)}


def _example_of_sound(config: PreTrainedConfig, name: str) -> torch.Tensor:
    """Two recordings: waveforms, or spectrograms, of one length where the model has positions for no other."""
    num_bins = getattr(config, "num_mel_bins", None)
    if num_bins is not None and hasattr(config, "max_source_positions"):  # Whisper and its towers
        return torch.zeros(2, num_bins, 2 * config.max_source_positions)
    if num_bins is not None and hasattr(config, "max_length"):
        return torch.zeros(2, config.max_length, num_bins)
    if name == "input_values":
        return torch.zeros(2, 16000)
    if num_bins is None:
        num_bins = getattr(config, "input_feat_per_channel", 80) * getattr(config, "input_channels", 1)
    return torch.zeros(2, 160, num_bins)


def probe_slices(base_config: PreTrainedConfig) -> Probe:
    """Run a base whose layers are to be divided among several models, as in a pipeline, see `run_probes`.

    Raises:
        ValueError: if a layer needs more of the tokens, or of the layers in front of it, than the residual stream.
    """
    probe, *others = run_probes(base_config)
    if others:
        raise ValueError(
            f"The layers of base `{base_config.model_type}` cannot be divided into slices: it has an encoder as well"
            " as a decoder."
        )
    if probe.model.main_input_name != "input_ids":
        raise ValueError(
            f"The layers of base `{base_config.model_type}` cannot be divided into slices: it reads"
            f" `{probe.model.main_input_name}`, not token ids."
        )
    width = probe.model.get_input_embeddings().weight.shape[-1]
    if width != base_config.hidden_size:
        raise ValueError(
            f"The layers of base `{base_config.model_type}` cannot be divided into slices: its embedding has {width}"
            f" features, and its residual stream {base_config.hidden_size}."
        )
    for number, of_layer in enumerate(probe.probed):
        if of_layer.given_more is not None:
            raise ValueError(
                f"The layers of base `{base_config.model_type}` cannot be divided into slices: layer {number}, a"
                f" {type(of_layer.layer).__name__}, is given `{of_layer.given_more}` beside the residual stream, which"
                " is made of the token ids, the embedding or the layers in front of it."
            )
    return probe


def refuse_by_config(base_config: PreTrainedConfig):
    """Raise a `ValueError` if its config alone tells that a base is not one decoder."""
    reason = _reason_against_config(base_config)
    if reason is not None:
        raise RefusedBase(base_config, reason)


def _reason_against_config(base_config: PreTrainedConfig) -> str | None:
    if base_config.is_encoder_decoder and not is_encoder_decoder(base_config.model_type):
        return "it has an encoder as well as a decoder"
    if is_encoder_decoder(base_config.model_type) and getattr(base_config, "is_decoder", False):
        return "it is the decoder of an encoder-decoder, without the encoder"
    if is_encoder_decoder(base_config.model_type) and base_config.sub_configs:
        return "its encoder has a config of its own"
    text_config = base_config.get_text_config(decoder=True)
    is_one = (
        is_encoder_decoder(base_config.model_type) and text_config.model_type == base_config.model_type
    )  # seen as a decoder's
    if text_config is not base_config and not is_one:
        return (
            f"it is made of several models. The language model in it is of type {text_config.model_type!r}; its config"
            " is `config.get_text_config(decoder=True)`"
        )
    if not hasattr(base_config, "num_hidden_layers"):
        return "its layers are not one stack whose length its config names"
    if decoder_class(type(base_config)) is None:
        return "transformers has no model of it without a head"
    return None


def _reason_against_layer(probed: ProbedLayer, output, base_config: PreTrainedConfig) -> str | None:
    stream, *others = output if isinstance(output, tuple) else (output,)
    name = type(probed.layer).__name__
    if not isinstance(stream, DepthStream):
        reason = f"its {name} does more to the residual stream than to add outputs to it and to read it"
        if not probed.lines:
            return reason
        last = probed.lines[-1]  # behind it the layer goes on with what it has made of the stream
        return f"{reason}. The last to use it is line {last.number} of {Path(last.file).name}, `{last.code}`"
    if any(isinstance(other, torch.Tensor) and other.shape == stream.shape for other in others):
        return f"its {name} hands on two residual streams"
    if stream.shape[-1] != base_config.hidden_size:
        return f"its residual stream has {stream.shape[-1]} features, not the {base_config.hidden_size} of a token"
    return None
