# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0. trf-ignore: TRF028
"""AttnRes: attention over depth in place of the residual stream (Attention Residuals, arXiv 2603.15031).

An AttnRes model is a model of its base (`config.base_model_type`), with the base's own modules, code and parameter
names, and one small module more: the `depth_queries`. `AttnResForCausalLM(config)` makes an object of a class that is
both, an `AttnResForCausalLM` and the base's `ForCausalLM`. Three places differ from the base:

- in front of the first layer the embedding becomes a `DepthStream` (see `depth_stream.py`), which the layers add to
  and read from as they do with a tensor (`enter_layer`);
- a norm that is given the stream reads it and norms what it has read (`DepthReader`);
- behind every layer stands a check that the stream has been handed on (`leave_layer`).
"""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import conversion_mapping
from transformers import initialization as init
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .configuration_attnres import AttnResConfig, base_config_class
from .depth_backends import get_backend
from .depth_pipeline import carry_streams
from .depth_probe import decoder_layers, probe_slices
from .depth_reads import Read
from .depth_stream import DepthRecorder, DepthStream, checkpoint_stream
from .generation_attnres import AttnResGenerationMixin, depth_output_class


# What a checkpoint that carries its code (`register_for_auto_class`) tells the Auto classes
REMOTE_CODE_AUTO_MAP = {
    "AutoConfig": "configuration_attnres.AttnResConfig",
    "AutoModel": "modeling_attnres.AttnResModel",
    "AutoModelForCausalLM": "modeling_attnres.AttnResForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_attnres.AttnResForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_attnres.AttnResForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_attnres.AttnResForTokenClassification",
}


class AttnResDepthQueries(nn.Module):
    """The pseudo-queries and key-norm weights of all sites. Zero queries read the mean of all sources.

    Queries that see the input have a projection of it in place of the vector, or beside it: `projection`, or
    `projection_down` and `projection_up` if it has a rank.
    """

    def __init__(self, config: AttnResConfig):
        super().__init__()
        self.block_size, self.read = config.attn_res_block_size, Read.of(config)
        self.std = getattr(config, "initializer_range", 0.02)  # of bases that have none, transformers' own
        num_sites, hidden_size, rank = config.num_sites, config.hidden_size, self.read.query_rank
        # Small steps away from zero vanish in half precision, so these are at least fp32 in every model
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(num_sites, *shape, dtype=dtype))

        if self.read.query != "input":
            self.query = parameter(hidden_size)
        self.key_norm = nn.Parameter(torch.ones(num_sites, hidden_size, dtype=dtype))
        if self.read.query != "learned":
            if rank is None:
                self.projection = parameter(hidden_size, hidden_size)
            else:
                self.projection_down, self.projection_up = parameter(rank, hidden_size), parameter(hidden_size, rank)
        self.reset()

    @torch.no_grad()
    def reset(self):
        """Queries of zero. Of two projections the second is not: nothing would be learned from two zeros."""
        for name, tensor in self.named_parameters(recurse=False):
            if name == "key_norm":
                init.ones_(tensor)
            elif name == "projection_up":
                init.normal_(tensor, std=self.std)
            else:
                init.zeros_(tensor)

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The folded queries `query * key_norm`, `[sites, hidden]`, and what makes queries of the input.

        Scores of learned queries depend on the product alone. Behind it come, if there are any, the key norms and the
        projections, as `InputStream` takes them.
        """
        dtype = torch.promote_types(self.key_norm.dtype, torch.float32)
        key_norm = self.key_norm.to(dtype)
        folded = torch.zeros_like(key_norm) if self.read.query == "input" else self.query.to(dtype) * key_norm
        if self.read.query == "learned":
            return (folded,)
        names = ("projection",) if self.read.query_rank is None else ("projection_down", "projection_up")
        return folded, key_norm, *(getattr(self, name).to(dtype) for name in names)

    def zeros_at_first(self) -> list[torch.Tensor]:
        """The parameters, `[sites, ...]`, which all being zero make every read the mean of its sources."""
        return [getattr(self, name) for name in ("query", "projection", "projection_down") if hasattr(self, name)]

    def are_zero(self) -> bool:
        return not any(tensor.any() for tensor in self.zeros_at_first())

    def _apply(self, fn: Callable, recurse: bool = True):
        # `model.half()` and `model.to(torch.bfloat16)` come through here
        def keep_wide(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            return tensor.to(applied.device) if applied.dtype in (torch.float16, torch.bfloat16) else applied

        return super()._apply(keep_wide, recurse)

    def __deepcopy__(self, memo: dict):
        is_adapter = not memo
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        # CODEPATH: PEFT trains and saves a copy of this module alone (within a copy of a model the memo has the
        # model). Shapes of queries do not tell how sublayers were divided into blocks, so what an adapter saves does
        if is_adapter:
            copied.trained_block_size = nn.Buffer(self.trained_for)
        return copied

    @property
    def trained_for(self) -> torch.Tensor:
        """The block size; if reads are not the paper's own, the numbers of their fields behind it."""
        if self.read == Read():
            return torch.tensor(self.block_size)
        return torch.tensor([self.block_size, *self.read.numbers()])

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
        read = Read.of_numbers(of_read) if of_read else Read()
        if read != self.read:
            raise ValueError(
                f"The adapter's depth queries were trained for {read or 'a read that is not known here'}, and this"
                f" model has {self.read}: the same queries would read something else. Load it on a conversion of the"
                " base with the adapter's fields."
            )


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
        _HANDED.stream_behind = stream
        return super().forward(torch.full_like(stream.newest, torch.nan))  # as of a head nothing would be right


class DepthReader:
    """Makes a norm of the base read: given a stream, it norms what it has read. A mixin, see `of_both`."""

    def forward(self, hidden_states, *args, **kwargs):
        if isinstance(hidden_states, DepthStream):
            return hidden_states.read(self)
        return super().forward(hidden_states, *args, **kwargs)


@functools.cache
def of_both(ours: Any, base: type, base_model_type: str | None = None) -> Any:
    """The class of the objects that are of a class of ours and of one of the base, under the name of the former.

    A reader has the module of the base's norm, by which `rms_norm_parameters` knows what it computes. Its name ends in
    another way: SGLang puts a norm of its own in the place of every "...RMSNorm", and that one cannot take a stream.
    """
    is_reader = ours is DepthReader
    name = f"{base.__name__}OverDepth" if is_reader else ours.__name__
    members: dict[str, Any] = {
        "__module__": (base if is_reader else ours).__module__,
        "__qualname__": f"{name}[{base.__name__ if is_reader else base_model_type}]",
    }
    if not is_reader:
        members |= {**ours.members_of_base(base), "base_model_type": base_model_type}
    members["__reduce_ex__"] = lambda self, protocol: (_new_of_both, (ours, base, base_model_type), self.__dict__)
    return type(name, (ours, base), members)


def _new_of_both(ours: Any, base: Any, base_model_type: str | None):
    cls = of_both(ours, base, base_model_type)
    return cls.__new__(cls)


def class_by_name(module: dict, name: str) -> type:
    """A class of both by its name, `AttnResForCausalLM[llama]`: so pickle finds it in another process."""
    ours, _, base_model_type = name.removesuffix("]").partition("[")
    if ours not in module["__all__"] or not base_model_type:
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    return of_both(module[ours], module[ours].class_of_base(base_model_type), base_model_type)


__getattr__ = functools.partial(class_by_name, globals())


class _BaseConversions(list):
    """The checkpoint conversion of the base, where transformers looks up that of "attnres".

    All AttnRes models share a model type but not a base. transformers asks a model whether it is custom code, and then
    copies what is registered for its model type, in the same thread: the question says which base is meant.
    """

    asked = threading.local()

    def __deepcopy__(self, memo):
        for name in getattr(self.asked, "base_names", ()):  # as of a native model, that of the class comes first
            mapping = conversion_mapping.get_checkpoint_conversion_mapping(name)
            if mapping is not None:
                return mapping
        return None


for _model_type in ("attnres", "attnres_multimodal"):
    conversion_mapping.register_checkpoint_conversion_mapping(_model_type, _BaseConversions(), overwrite=True)


# Documented by its base, as those below. trf-ignore: TRF057
class AttnResPreTrainedModel(PreTrainedModel):
    config: AttnResConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # What most bases can do, for those who ask the class; an object is of a class that has it from its base
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __new__(cls, config: AttnResConfig | None = None, *args, **kwargs):
        if config is None or hasattr(cls, "base_class"):
            return super().__new__(cls)
        if not isinstance(getattr(config, "base_model_type", None), str):
            raise TypeError(f"`{cls.__name__}` needs an `AttnResConfig`, not {config!r}.")
        return _new_of_both(cls, cls.class_of_base(config.base_model_type), config.base_model_type)

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        """The class of the base with its flags, plans, recorders and initialisation."""
        classes = MODEL_MAPPING[base_config_class(base_model_type)].__mro__
        return [base for base in classes if issubclass(base, PreTrainedModel) and base is not PreTrainedModel][-1]

    @classmethod
    def members_of_base(cls, base: type[PreTrainedModel]) -> dict:
        """What a class of both has of its base, although it comes second in its line of ancestors."""
        names = [name for name in vars(AttnResPreTrainedModel) if name in vars(PreTrainedModel) and name[:2] != "__"]
        members = {
            name: getattr(base, name) for name in names if not callable(getattr(cls, name)) and name != "base_model"
        }
        members |= {
            "base_class": base,
            "config_class": cls.config_class,
            "_no_split_modules": [*(base._no_split_modules or []), "AttnResDepthQueries"],
            "_keep_in_fp32_modules_strict": [*(base._keep_in_fp32_modules_strict or []), "depth_queries"],
            # Found in the source of the module around a class, which has to be the base's
            "_can_set_experts_implementation": base._can_set_experts_implementation,
            "_can_set_attn_implementation": base._can_set_attn_implementation,
        }
        if "forward" in dir(base) and base.forward is not nn.Module.forward:
            members["forward"] = _with_depth_attentions(base.forward)
        return members

    def post_init(self):
        trunk = self.trunk
        if not isinstance(trunk, AttnResModel):
            trunk.__class__ = of_both(AttnResModel, type(trunk), trunk.config.base_model_type)
            dict.setdefault(_CAN_RECORD_REGISTRY, str(type(trunk)), type(trunk)._can_record_outputs)
        if not hasattr(trunk, "depth_queries"):
            trunk.depth_queries = AttnResDepthQueries(trunk.config)
            trunk.read_over_depth()
        super().post_init()

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if hasattr(model, "_pp_stage"):
            probe_slices(model.config.to_base_config())
            kept = [layer.depth_sites for layer in decoder_layers(model.base_model) if hasattr(layer, "depth_sites")]
            carry_streams(model, entry_site=kept[0][0])
        return model

    @property
    def trunk(self) -> PreTrainedModel:
        """The decoder that reads over depth."""
        return self.base_model

    @property
    def base_model(self) -> PreTrainedModel:
        """The decoder, also where the base names a prefix for it that a model with a head does not have."""
        found = getattr(self, self.base_model_prefix, self)
        if found is not self or isinstance(self, AttnResModel):
            return found
        return next((child for child in self.children() if isinstance(child, PreTrainedModel)), self)

    @classmethod
    def is_custom_code(cls) -> bool:
        if hasattr(cls, "base_class"):
            _BaseConversions.asked.base_names = (cls.base_class.__name__, cls.base_model_type)
        return super().is_custom_code()

    # The base's own. trf-ignore: TRF018
    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, AttnResDepthQueries):
            module.reset()
        else:
            super()._init_weights(module)

    def _initialize_weights(self, module, is_custom_code: bool = False):
        # As those of a native model: of custom code, modules without parameters are left out, and there bases fill
        # the buffers of others
        super()._initialize_weights(module)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=None, **kwargs):
        if gradient_checkpointing_func is not None:
            kwargs["gradient_checkpointing_func"] = functools.partial(checkpoint_stream, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        """As in transformers. A model from a folder that carries its code is saved with the code."""
        # A merged adapter leaves what its own file says of its blocks; the config of a model says that
        self._keys_to_ignore_on_save |= {
            name for name, _ in self.named_buffers() if name.endswith("depth_queries.trained_block_size")
        }
        if not self.is_remote_code() and not getattr(self.config, "auto_map", None):
            return super().save_pretrained(*args, **kwargs)
        auto_classes = {reference.split(".")[-1]: name for name, reference in REMOTE_CODE_AUTO_MAP.items()}
        # transformers would list the class that is saved and no other
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        model_class = type(self)
        own = vars(model_class).get("_auto_class")
        model_class._auto_class = auto_classes.get(model_class.__name__, self._auto_class)
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            if own is None:  # so that it has again what the public class has
                del model_class._auto_class
            else:
                model_class._auto_class = own

    def push_to_hub(self, repo_id: str, **kwargs) -> str:
        """As in transformers. The code goes along, so that the model loads where `attnres` is not installed."""
        model_class = type(self)
        if model_class.is_remote_code():
            return super().push_to_hub(repo_id, **kwargs)
        try:  # not in code from a Hub repository, which has transformers' card
            from attnres.model_cards import push_card_if_missing

            push_card_if_missing(self, repo_id, private=kwargs.get("private"), token=kwargs.get("token"))
        except ImportError:
            pass
        auto_map = self.config.auto_map
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        try:
            return super().push_to_hub(repo_id, **kwargs)
        finally:
            self.config.auto_map = auto_map or {}

    def load_adapter(self, *args, **kwargs):
        before = set(getattr(self, "peft_config", {}))
        loading_info = super().load_adapter(*args, **kwargs)
        try:  # here, as transformers sets tensors by itself
            for module in self.modules():
                if isinstance(module, AttnResDepthQueries):
                    module.check_trained_for(getattr(module, "trained_block_size", None))
        except ValueError:
            self.delete_adapter(list(set(self.peft_config) - before))
            raise
        return loading_info


# What the forward pass that runs in this thread hands to the first layer of its model, around the code of the base,
# which may have no way for it: `value`, `(model, recorder, stream)`. And the way back, of a slice: `stream_behind` its
# last layer. Not a context variable, as compilers do not know these
_HANDED = threading.local()


def _with_depth_attentions(base_forward: Callable) -> Callable:
    """The forward of a base, which also takes `output_depth_attentions` and a `depth_recorder`.

    The recorder goes to the first layer; see `AttnResModel.enter_layer`.
    """

    @functools.wraps(base_forward)  # Trainer and `generate` look at the names of the arguments
    def forward(self, *args, output_depth_attentions: bool | None = None, depth_recorder=None, **kwargs):
        outer = getattr(_HANDED, "value", None)
        if outer is not None and outer[0] is self.trunk:  # called by the model with a head: it has seen to all
            return base_forward(self, *args, **kwargs)
        if output_depth_attentions is None:
            output_depth_attentions = getattr(self.config, "output_depth_attentions", False)
        if output_depth_attentions and depth_recorder is None:
            depth_recorder = DepthRecorder(outputs=None)
        stream = kwargs["inputs_embeds"] if isinstance(kwargs.get("inputs_embeds"), DepthStream) else None
        if stream is not None:
            # Of what the base makes of it nothing is read; see `probe_slices`
            kwargs["inputs_embeds"] = torch.zeros_like(stream.newest)
        if output_depth_attentions:
            return_dict = kwargs.pop("return_dict", None)
            return_dict = self.config.return_dict if return_dict is None else return_dict
            kwargs["return_dict"] = True
        _HANDED.value, _HANDED.stream_behind = (self.trunk, depth_recorder, stream), None
        try:
            outputs = _with_tensors(base_forward(self, *args, **kwargs))
        finally:
            _HANDED.value, _HANDED.stream_behind = outer, None
        if not output_depth_attentions:
            return outputs
        weights = tuple(weights for _, weights in sorted(depth_recorder.weights.items()))
        output_class = depth_output_class(type(outputs))  # type: ignore[arg-type]
        outputs = output_class(**outputs, depth_attentions=weights)
        return outputs if return_dict else outputs.to_tuple()

    return forward


def _with_tensors(outputs: Any) -> Any:
    """The outputs of a model, in which hidden states of the layers are streams: of each what the next layer reads.

    The last hidden state of a slice is the stream behind it.
    """
    behind = _HANDED.stream_behind
    if isinstance(outputs, ModelOutput):
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(_read(state) for state in outputs["hidden_states"])
        if behind is not None:
            outputs["last_hidden_state"] = behind
    elif isinstance(outputs, tuple):
        outputs = tuple(tuple(map(_read, part)) if isinstance(part, tuple) else part for part in outputs)
        return outputs if behind is None else (behind, *outputs[1:])
    return outputs


def _read(value):
    return value.read() if isinstance(value, DepthStream) else value


# trf-ignore: TRF057
class AttnResModel(AttnResPreTrainedModel):
    """The decoder of the base, with depth queries."""

    # trf-ignore: TRF057
    def forward(self, input_ids: torch.LongTensor | None = None, **kwargs) -> ModelOutput:
        """The base's forward, with its arguments and outputs, and with two arguments more.

        Args:
            output_depth_attentions (`bool`, *optional*):
                Whether to return `depth_attentions`, one tensor `(batch_size, sequence_length, sources)` per site: the
                weights with which a read mixes the embedding, the closed blocks and the partial sum, in this order.
            depth_recorder (`DepthRecorder`, *optional*):
                Sees every read and write of this call, and may leave out sources.
        """
        raise NotImplementedError("`_with_depth_attentions` puts the base's forward in its place.")

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        return MODEL_MAPPING[base_config_class(base_model_type)]

    def read_over_depth(self):
        """Prepare the modules of the base: from now on the layers have to be given a stream, and hand one on."""
        exit_site, layers = 0, decoder_layers(self)
        for layer, num_sublayers in zip(layers, self.config.sublayers_per_layer()):
            layer.depth_sites = exit_site, (exit_site := exit_site + num_sublayers)
            if hasattr(layer, "_gradient_checkpointing_func"):  # the base has read this in the config
                layer._gradient_checkpointing_func = functools.partial(
                    checkpoint_stream, layer._gradient_checkpointing_func
                )
            # Methods, which a copy of the model binds to the copy
            layer.register_forward_pre_hook(self.enter_layer, with_kwargs=True)
            layer.register_forward_hook(self.leave_layer)
        for module in [*(child for layer in layers for child in layer.children()), *self.children()]:
            if "Norm" in type(module).__name__ and not list(module.children()):
                module.__class__ = of_both(DepthReader, type(module))

    def enter_layer(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give the first layer a stream that starts with the embedding; the others have been given one."""
        stream, entry_site = args[0] if args else kwargs["hidden_states"], layer.depth_sites[0]
        if isinstance(stream, torch.Tensor):
            of_model, recorder, handed_on = getattr(_HANDED, "value", None) or (None, None, None)
            if of_model is not self:
                recorder = handed_on = None
            if handed_on is not None:
                stream = handed_on
            elif entry_site == 0:
                stream = self.start_stream((stream,), recorder=recorder, kv_cache=kwargs.get("past_key_values"))
        if not isinstance(stream, DepthStream) or stream.site != entry_site:
            raise ValueError(
                f"A {type(layer).__name__} of base `{self.config.base_model_type}` has to be given the residual stream"
                f" at site {entry_site}, and was given {_describe(stream)}: layers cannot be left out, repeated, or"
                " run by themselves on a tensor."
            )
        if entry_site and stream.cache is None and not (stream.scores and stream.scored_until is None):
            # Fields have come along, and nothing else: only for this layer, as for the next the same will hold
            stream.scores, stream.scored_until = (), layer.depth_sites[1]
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    def leave_layer(self, layer: nn.Module, args: tuple, output):
        """Raise a `ValueError` if the layer has lost the stream, or has not written to it as often as it should."""
        stream, exit_site = output[0] if isinstance(output, tuple) else output, layer.depth_sites[1]
        if not isinstance(stream, DepthStream) or stream.site != exit_site:
            raise ValueError(
                f"A {type(layer).__name__} of base `{self.config.base_model_type}` should have handed on the residual"
                f" stream at site {exit_site}, and handed on {_describe(stream)}: it does more to the stream than"
                " to add outputs and to read."
            )

    def start_stream(
        self,
        blocks: Sequence[torch.Tensor],
        partial: torch.Tensor | None = None,
        site: int = 0,
        recorder: DepthRecorder | None = None,
        kv_cache=None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> DepthStream:
        """A stream that goes on from some site. A pipeline stage is called with it as `inputs_embeds`.

        Args:
            blocks: the embedding and the closed blocks, each `[batch, seq, hidden]`.
            partial: the sum of the outputs in the open block, `[batch, seq, hidden]`, if there is one.
            site: the number of outputs that blocks and partial sum are made of.
            recorder: of this forward pass.
            kv_cache: whose generation shares its buffers from step to step.
            outputs: those in the open block, each `[batch, seq, hidden]`, if `attn_res_open_block` is "each".

        Raises:
            ValueError: if the config was changed since the model was made, or outputs are missing.
        """
        config, read = self.config, self.read_of_config()
        num_outputs = site % config.attn_res_block_size if read.open_block == "each" else 0
        if len(outputs) != num_outputs:
            raise ValueError(
                f"A stream at site {site} with `attn_res_open_block={read.open_block!r}` has {num_outputs} `outputs`,"
                f" and {len(outputs)} were given."
            )
        stream = read.start(
            [tensor.to(blocks[0].device) for tensor in self.fold_queries()],
            tuple(blocks),
            partial,
            site,
            block_size=config.attn_res_block_size,
            eps=config.attn_res_norm_eps,
            sums=config.attn_res_scale_norm_eps,
            recorder=recorder,
            outputs=outputs,
        )
        if recorder is not None:
            recorder.tokens = blocks[0].shape[:-1]
        if torch.is_grad_enabled() or recorder is not None or get_backend() == "reference":
            return stream
        # A compiled graph plans its own memory
        reuse = kv_cache is not None and not torch.compiler.is_compiling()
        cache_class = read.block_cache()
        return stream.keep_in(cache_class.beside(kv_cache) if reuse else cache_class())

    def read_of_config(self) -> Read:
        """How sources are read. Raises a `ValueError` if the config was changed since the queries were made."""
        config, queries = self.config, self.depth_queries
        if queries.block_size != config.attn_res_block_size:
            raise ValueError(
                f"`attn_res_block_size={config.attn_res_block_size}` was set in the config of a model that was made"
                f" with {queries.block_size}. Make a new model of the config, with the weights of this one."
            )
        read = Read.of(config)
        if read != queries.read:
            raise ValueError(
                f"The config of a model that was made for {queries.read} was changed to {read}. Make a new model of"
                " the config."
            )
        return read

    def keep_layers(self, start: int, end: int):
        """Leave the layers `start` to `end - 1`, and the final norm behind the last one: a pipeline stage.

        What such a model returns as `last_hidden_state` in front of the last stage is a `DepthStream`.

        Raises:
            ValueError: if layers of the base need more from those in front of them than the residual stream.
        """
        layers, probe = decoder_layers(self), probe_slices(self.config.to_base_config())
        for i, of_layer in enumerate(probe.probed):
            if not start <= i < end:
                layers[i] = (SliceEnd if i == end else PassThrough)(layers[i], of_layer.num_values)
        if end < len(layers):
            present = {name for name, _ in self.named_modules()}  # a model with a head may have no pooler
            for name in present & (probe.behind - probe.in_front):
                self.set_submodule(name, PassThrough())

    def fold_queries(self) -> tuple[torch.Tensor, ...]:
        """What the forward of the depth queries gives, `[sites, hidden]` first."""
        # CODEPATH: for a batch of several adapters PEFT tells their names to what it wraps, by a hook. Its wrapper of
        # whole modules mixes nothing but linear ones, or takes the queries of the base without a word
        for hook in self.depth_queries._forward_pre_hooks.values():
            names = set(getattr(hook, "keywords", {}).get("adapter_names", ()))
            if not names:
                continue
            with_queries = sorted(names & set(self.depth_queries.modules_to_save))
            if with_queries:
                raise ValueError(
                    "`adapter_names` cannot be used with adapters that have depth queries of their own"
                    f" (`modules_to_save`), here {', '.join(with_queries)}: the samples of a batch share one set of"
                    " queries. Load the model again, as PEFT keeps the names of a call that failed, and run a batch"
                    " for each of these adapters, after `set_adapter`."
                )
            return self.depth_queries.original_module()
        return self.depth_queries()


def _describe(stream) -> str:
    return f"it at site {stream.site}" if isinstance(stream, DepthStream) else f"a {type(stream).__name__}"


# trf-ignore: TRF057
class AttnResForCausalLM(AttnResPreTrainedModel, AttnResGenerationMixin):
    """The base's causal language model, with reads over depth.

    `generate(output_depth_attentions=True, return_dict_in_generate=True)` returns `depth_attentions` as it returns
    `attentions`: one element for each generated token, of one tensor `(batch_size, generated_length, sources)` for
    each site.
    """

    forward = AttnResModel.forward

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        return MODEL_FOR_CAUSAL_LM_MAPPING[base_config_class(base_model_type)]


# The generic heads make their model through `AutoModel`, which knows nothing of code from a Hub repository
class AttnResForSequenceClassification(GenericForSequenceClassification, AttnResPreTrainedModel):
    def __init__(self, config: AttnResConfig):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, AttnResModel(config))
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)

        self.post_init()


class AttnResForTokenClassification(GenericForTokenClassification, AttnResPreTrainedModel):
    def __init__(self, config: AttnResConfig):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, AttnResModel(config))
        dropout = getattr(config, "classifier_dropout", None)
        if dropout is None:
            dropout = getattr(config, "hidden_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)

        self.post_init()


class AttnResForQuestionAnswering(GenericForQuestionAnswering, AttnResPreTrainedModel):
    def __init__(self, config: AttnResConfig):
        PreTrainedModel.__init__(self, config)
        setattr(self, self.base_model_prefix, AttnResModel(config))
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

        self.post_init()

    # The generic ones know only one name of the embedding
    def get_input_embeddings(self):
        return self.base_model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.base_model.set_input_embeddings(value)


__all__ = [
    "AttnResForCausalLM",
    "AttnResForQuestionAnswering",
    "AttnResForSequenceClassification",
    "AttnResForTokenClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
]
