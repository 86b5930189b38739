# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0. trf-ignore: TRF028
"""AttnRes: attention over depth in place of the residual stream (Attention Residuals, arXiv 2603.15031).

An AttnRes model is a model of its base (`config.base_model_type`), with the base's own modules, code and parameter
names, and one small module more: the `depth_queries`. `AttnResForCausalLM(config)` makes an object of a class that is
both, an `AttnResForCausalLM` and the base's `ForCausalLM`. Four places differ from the base:

- in front of the first layer the embedding becomes a `DepthStream` (see `depth/stream.py`), which the layers add to
  and read from as they do with a tensor (`enter_layer`);
- a norm that is given the stream reads it and norms what it has read (`ReadingNorm`);
- after every layer it is checked that the stream has been handed on (`leave_layer`);
- `forward` takes `output_depth_attentions`, `depth_recorder` and a stream as `inputs_embeds`
  (`with_depth_attentions`).

A base with an encoder and a decoder has two such streams: all of this happens in each of its stacks (`AttnResStack`).
"""

import contextvars
import functools
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import ModelOutput, logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .base.classes import BaseConversions, ReadingNorm, class_by_name, combined_class, new_combined
from .base.config import (
    base_config_class,
    check_base_model_type,
    decoder_class,
    has_own_classes,
    is_encoder_decoder,
    own_class,
)
from .base.forward import (
    FORWARD_CONTEXT,
    checkpoint_of_layers,
    depth_output_class,
    kv_cache_among,
    with_depth_attentions,
    with_depth_attentions_of_stacks,
)
from .base.library_lookups import typed_as_base
from .base.probe import decoder_layers, stacks_of
from .base.slices import AttnResSliceMixin, carry_streams, rules_of_stage
from .configuration_attnres import AttnResConfig, remote_code_auto_map
from .depth.backends import uses_definition
from .depth.block_cache import BlockCache
from .depth.other_reads import start_stream
from .depth.queries import AttnResDepthQueries, fold_queries
from .depth.recorder import DepthRecorder
from .depth.stream import DepthStream


logger = logging.get_logger(__name__)
__getattr__ = functools.partial(class_by_name, globals())

# The weights of each step of the generation that runs in this thread; `None` if they are not wanted
_DEPTH_ATTENTIONS_OF_STEPS = contextvars.ContextVar("depth_attentions_of_steps", default=None)


# Documented by its base, as those below. trf-ignore: TRF057
class AttnResPreTrainedModel(PreTrainedModel):
    """The class that all AttnRes models share. An object of it is also one of its base's class."""

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
        return new_combined(cls, cls.class_of_base(config.base_model_type), config.base_model_type)

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        """The class of the base with its flags, plans, recorders and initialisation."""
        classes = decoder_class(base_config_class(base_model_type)).__mro__
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
        base_type = getattr(base.config_class, "model_type", "")
        has_stacks = is_encoder_decoder(base_type) and cls is not AttnResStack
        if "forward" in dir(base) and base.forward is not nn.Module.forward:
            wrapped = with_depth_attentions_of_stacks if has_stacks else with_depth_attentions
            members |= {"forward": wrapped(base.forward), "__init__": base.__init__}
        if has_stacks:
            members["base_model"] = PreTrainedModel.base_model
        return members

    def post_init(self):
        trunk, stacks = self.trunk, self.stacks
        for part, ours in [(trunk, AttnResModel), *((stack, AttnResStack) for stack in stacks)]:
            if not isinstance(part, AttnResPreTrainedModel):
                part.__class__ = combined_class(ours, type(part), part.config.base_model_type)
                dict.setdefault(_CAN_RECORD_REGISTRY, str(type(part)), type(part)._can_record_outputs)
        config = trunk.config if stacks[0] is trunk else self.config
        counts = config.sublayers_of_stacks()
        if [len(decoder_layers(stack)) for stack in stacks] != [*map(len, counts)][: len(stacks)]:
            config.attn_res_sublayers = None  # of another number of layers
            counts = config.sublayers_of_stacks()
        for stack, sublayers in zip(stacks, counts):
            if not hasattr(stack, "depth_queries"):
                stack.depth_queries = AttnResDepthQueries(stack.config, sum(sublayers) + 1)
                stack.read_over_depth(sublayers)
        super().post_init()

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if hasattr(model, "_pp_stage"):
            carry_streams(model)
        return model

    def _resolve_parallel_plans(self, distributed_config):
        plans = super()._resolve_parallel_plans(distributed_config)
        if distributed_config.pp_size == 1:
            return plans
        return tuple(rules_of_stage(self, plan) for plan in plans)

    @property
    def trunk(self) -> PreTrainedModel:
        """The decoder that reads over depth."""
        return self.base_model

    @property
    def stacks(self) -> list[PreTrainedModel]:
        """The parts with a residual stream each: the encoder and the decoder of an encoder-decoder, else the trunk."""
        # CODEPATH: T5, Whisper and the like have two, and all other bases one
        return stacks_of(self) if is_encoder_decoder(self.config.base_model_type) else [self.trunk]

    @property
    def base_model(self) -> PreTrainedModel:
        """The decoder, also where the base names a prefix for it that a model with a head does not have."""
        found = getattr(self, self.base_model_prefix, self)
        if found is not self or isinstance(self, AttnResStack):
            return found
        return next((child for child in self.children() if isinstance(child, PreTrainedModel)), self)

    @classmethod
    def is_custom_code(cls) -> bool:
        if hasattr(cls, "base_class"):
            BaseConversions.asked.base_names = (cls.base_class.__name__, cls.base_model_type)
        return super().is_custom_code()

    def get_compiled_call(self, compile_config):
        with typed_as_base(self.config):  # of some types transformers compiles none
            return super().get_compiled_call(compile_config)

    # The base's own. trf-ignore: TRF018
    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, AttnResDepthQueries):
            module.reset()
        else:
            super()._init_weights(module)

    def _initialize_weights(self, module, is_custom_code: bool = False):
        # As for a native model: for custom code transformers skips modules without parameters, and some bases fill
        # other modules' buffers there
        super()._initialize_weights(module)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=None, **kwargs):
        if gradient_checkpointing_func is not None:
            kwargs["gradient_checkpointing_func"] = checkpoint_of_layers(gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        """As in transformers. A model that was loaded from a folder with its code is saved with the code.

        Raises:
            ValueError: for a stage of `DistributedConfig(pp_size=...)`, which has only some of the weights.
        """
        if hasattr(self, "_pp_stage"):
            raise ValueError(
                "A stage of `pp_size` processes has a part of the layers, and the files would hold no others. Load the"
                " model without `pp_size` to save it."
            )
        # A merged adapter leaves a buffer with its block size, which the config of a model states already
        self._keys_to_ignore_on_save |= {
            name for name, _ in self.named_buffers() if name.endswith("depth_queries.trained_block_size")
        }
        if not self.is_remote_code() and not getattr(self.config, "auto_map", None):
            return super().save_pretrained(*args, **kwargs)
        # transformers would list the class that is saved and no other. The code goes with the config
        self.config.auto_map = remote_code_auto_map(self.config.base_model_type)
        model_class = type(self)
        own = vars(model_class).get("_auto_class")
        model_class._auto_class = None
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            if own is None:  # so that it has again what the public class has
                del model_class._auto_class
            else:
                model_class._auto_class = own

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        # In front of the report of transformers, which says of which shapes tensors are, and not why
        reason = reason_against_weights(model, loading_info)
        if reason is not None and not load_config.ignore_mismatched_sizes:
            raise ValueError(f"`{load_config.pretrained_model_name_or_path}` {reason}")
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def push_to_hub(self, repo_id: str, **kwargs) -> str:
        """As in transformers. The code is uploaded as well, so the model loads without `attnres` installed."""
        model_class = type(self)
        if model_class.is_remote_code():
            return super().push_to_hub(repo_id, **kwargs)
        try:
            from attnres.model_cards.card import push_card_if_missing
        except ImportError:  # this code has come with a checkpoint, and the package is not installed
            pass
        else:
            push_card_if_missing(self, repo_id, private=kwargs.get("private"), token=kwargs.get("token"))
        auto_map = self.config.auto_map
        self.config.auto_map = remote_code_auto_map(self.config.base_model_type)
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


# trf-ignore: TRF057
class AttnResStack(AttnResPreTrainedModel):
    """Layers with one residual stream, which is read over depth: a decoder, or one part of an encoder-decoder."""

    def read_over_depth(self, sublayers: Sequence[int]):
        """Prepare the modules of the base: from now on the layers have to be given a stream, and hand one on.

        Args:
            sublayers: how many times each layer adds to the stream.
        """
        exit_site, layers = 0, decoder_layers(self)
        for layer, num_sublayers in zip(layers, sublayers, strict=True):
            layer.depth_sites = exit_site, (exit_site := exit_site + num_sublayers)
            if hasattr(layer, "_gradient_checkpointing_func"):  # the base has read this in the config
                layer._gradient_checkpointing_func = checkpoint_of_layers(layer._gradient_checkpointing_func)
            # Methods, which a copy of the model binds to the copy
            layer.register_forward_pre_hook(self.enter_layer, with_kwargs=True)
            layer.register_forward_hook(self.leave_layer)
        inside: list[Any] = [child for layer in layers for child in layer.children()]
        if not isinstance(self, AttnResModel):  # encoder-decoders may have a module for each sublayer, with its norm
            inside = [module for layer in layers for module in layer.modules()]
        for module in [*inside, *self.children()]:
            if "Norm" in type(module).__name__ and not list(module.children()):
                module.__class__ = combined_class(ReadingNorm, type(module))  # type: ignore[arg-type]

    def enter_layer(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give the first layer a stream that starts with the embedding; the others have been given one."""
        stream, entry_site = args[0] if args else kwargs["hidden_states"], layer.depth_sites[0]
        if isinstance(stream, torch.Tensor):
            of_model, recorder, handed_on = FORWARD_CONTEXT.value or (None, None, None)
            if of_model is not self:
                recorder = handed_on = None
            if handed_on is not None:
                stream = handed_on
            elif entry_site == 0:
                stream = self.start_stream((stream,), recorder=recorder, kv_cache=kv_cache_among(args, kwargs))
        if not isinstance(stream, DepthStream) or stream.site != entry_site:
            raise ValueError(
                f"A {type(layer).__name__} of base `{self.config.base_model_type}` has to be given the residual stream"
                f" at site {entry_site}, and was given {_describe(stream)}: layers cannot be run by themselves on a"
                " tensor, and not be left out or repeated, but by `attnres.conversion.select_layers`."
            )
        is_checkpointed = getattr(layer, "gradient_checkpointing", False) and layer.training
        if stream.is_rebuilt or is_checkpointed:  # what later layers do not get is not computed for them
            stream.phase_1, stream.read_until = None, layer.depth_sites[1]
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    def leave_layer(self, layer: nn.Module, args: tuple, output):
        """Raise a `ValueError` if the layer has lost the stream, or has not written to it as often as it should."""
        stream, exit_site = output[0] if isinstance(output, tuple) else output, layer.depth_sites[1]
        if not isinstance(stream, DepthStream) or stream.site != exit_site:
            raise ValueError(
                f"A {type(layer).__name__} of base `{self.config.base_model_type}` should have handed on the residual"
                f" stream at site {exit_site}, but handed on {_describe(stream)}. Either it does more to the stream"
                " than add to it and read it, or `attn_res_sublayers` in the config is not that of this base: without"
                " the field it is counted again."
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
        """Make a stream that continues at some site. A pipeline stage is called with it as `inputs_embeds`.

        Args:
            blocks: the embedding and the closed blocks, each `[batch, seq, hidden]`.
            partial: the sum of the outputs in the open block, `[batch, seq, hidden]`, if there is one.
            site: the number of outputs that have been written so far.
            recorder: the recorder of this forward pass, if there is one.
            kv_cache: the KV cache of the generation, whose steps share the buffers of reads.
            outputs: the outputs in the open block, each `[batch, seq, hidden]`, if `attn_res_open_block` is "each".

        Raises:
            ValueError: if the config has changed since the model was made, or the parts do not fit the site.
        """
        config = self.config
        self.depth_queries.check_unchanged(config)
        read_config = self.depth_queries.read_config
        read_config.check_parts(site, config.attn_res_block_size, blocks, partial, outputs)
        stream = start_stream(
            read_config,
            [tensor.to(blocks[0].device) for tensor in self.fold_queries()],
            tuple(blocks),
            partial,
            site,
            block_size=config.attn_res_block_size,
            eps=config.attn_res_norm_eps,
            scale_by_sources=config.attn_res_scale_norm_eps,
            recorder=recorder,
            outputs=outputs,
        )
        if recorder is not None:
            recorder.check(len(stream.queries))
            recorder.tokens = blocks[0].shape[:-1]
        stream.is_rebuilt = False
        if torch.is_grad_enabled() or recorder is not None or uses_definition():
            return stream
        # A compiled graph plans its own memory
        reuse = kv_cache is not None and not torch.compiler.is_compiling()
        return stream.keep_in(BlockCache.beside(kv_cache) if reuse else BlockCache())

    def fold_queries(self) -> tuple[torch.Tensor, ...]:
        """The folded queries of all sites, `[sites, hidden]`. If they see the input, key norms and projections too.

        In a batch of several adapters with different queries, all of these are by sample: `[sites, batch, ...]`.
        """
        return fold_queries(self.depth_queries)


# trf-ignore: TRF057
class AttnResModel(AttnResStack, AttnResSliceMixin):
    """The model of the base without a head, with depth queries."""

    # trf-ignore: TRF057
    def forward(self, input_ids: torch.LongTensor | None = None, **kwargs) -> ModelOutput:
        """The forward of the base, with the same arguments and outputs, and two more arguments.

        Args:
            output_depth_attentions (`bool`, *optional*):
                Whether to return `depth_attentions`, one tensor `(batch_size, sequence_length, sources)` per site: the
                weights of the embedding, the closed blocks and the partial sum, in this order.
            depth_recorder (`DepthRecorder`, *optional*):
                Records every read and write of this call, and can change them.

        An encoder-decoder returns `encoder_depth_attentions` and `decoder_depth_attentions`, and takes an
        `encoder_depth_recorder` and a `decoder_depth_recorder`.
        """
        raise NotImplementedError("`with_depth_attentions` puts the base's forward in its place.")

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        return decoder_class(base_config_class(base_model_type))


def _describe(stream) -> str:
    return f"the stream at site {stream.site}" if isinstance(stream, DepthStream) else f"a {type(stream).__name__}"


class AttnResGenerationMixin(GenerationMixin):
    """Generation that can be observed, and `generate_batch` that refuses what would stop all requests."""

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        wanted = kwargs.pop("output_depth_attentions", getattr(self.config, "output_depth_attentions", False))
        if wanted:
            self.check_one_pass_per_token("output_depth_attentions=True", *args, **kwargs)
            if not self.generation_option("return_dict_in_generate", *args, **kwargs):
                logger.warning(
                    "`output_depth_attentions=True` does nothing in `generate` without `return_dict_in_generate=True`."
                )
        if kwargs.get("depth_recorder") is not None:
            self.check_one_pass_per_token("depth_recorder", *args, **kwargs)
        # Set even if they are not wanted: this model may be the assistant of one whose weights are
        token = _DEPTH_ATTENTIONS_OF_STEPS.set([] if wanted else None)
        try:
            outputs = super().generate(*args, **kwargs)
            steps = _DEPTH_ATTENTIONS_OF_STEPS.get()
        finally:
            _DEPTH_ATTENTIONS_OF_STEPS.reset(token)
        if not wanted:
            return outputs
        if isinstance(outputs, (GenerateDecoderOnlyOutput, GenerateBeamDecoderOnlyOutput)):
            return depth_output_class(type(outputs))(**outputs, depth_attentions=tuple(steps))
        if isinstance(outputs, (GenerateEncoderDecoderOutput, GenerateBeamEncoderDecoderOutput)):
            return depth_output_class(type(outputs), "decoder")(**outputs, decoder_depth_attentions=tuple(steps))
        return outputs

    @functools.wraps(GenerationMixin.generate_batch)
    def generate_batch(self, inputs, *args, **kwargs):
        return super().generate_batch(self.check_requests(inputs), *args, **kwargs)

    def check_requests(self, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
        """The prompts as lists; a `ValueError` for one that would take down the thread that generates all of them."""
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            raise ValueError(f"`inputs` must be a list of prompts, each a list of token ids, not {inputs!r}.")
        prompts = []
        for index, prompt in enumerate(inputs):
            prompt = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
            if isinstance(prompt, str) or not isinstance(prompt, Sequence):
                raise ValueError(f"`inputs[{index}]={prompt!r}` must be a list of token ids.")
            if not prompt:
                raise ValueError(f"`inputs[{index}]` is empty: a prompt needs at least one token.")
            for token in prompt:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise ValueError(f"`inputs[{index}]` has {token!r} among its token ids, which must be ints.")
                if not 0 <= token < self.config.vocab_size:
                    last = self.config.vocab_size - 1
                    raise ValueError(f"`inputs[{index}]` has the token id {token}; this model's go from 0 to {last}.")
            prompts.append(list(prompt))
        return prompts

    def generation_option(self, name: str, inputs=None, generation_config=None, *args, **kwargs):
        """What the arguments of `generate` say of one of its options, by themselves or in a `generation_config`."""
        value = kwargs.get(name)
        return getattr(generation_config or self.generation_config, name, None) if value is None else value

    def check_one_pass_per_token(self, wanted: str, *args, **kwargs):
        """Raise a `ValueError` if arguments of `generate` ask for more than a forward pass of this model per token."""
        for name in ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "prefill_chunk_size"):
            if self.generation_option(name, *args, **kwargs) is not None:
                raise ValueError(
                    f"`{wanted}` cannot be combined with `{name}`, which runs the model on several tokens at a time:"
                    " generate without one of them, or run the model on what was generated."
                )

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]):
        super()._validate_model_kwargs({name: model_kwargs[name] for name in model_kwargs if name != "depth_recorder"})

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        steps = _DEPTH_ATTENTIONS_OF_STEPS.get()
        if steps is not None:
            name = "depth_attentions" if "depth_attentions" in outputs else "decoder_depth_attentions"
            steps.append(outputs[name])
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        base: Any = getattr(cls, "base_class", super())
        return base._supports_default_dynamic_cache()  # which looks at the name

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        # transformers tells by the name of a class what its forward calls the cache
        names = inspect.signature(self.forward).parameters
        if "cache_params" in names and "past_key_values" not in names and "past_key_values" in model_kwargs:
            model_kwargs.setdefault("cache_params", model_kwargs.pop("past_key_values"))

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # `generate` looks at the names of the arguments
    def prepare_inputs_for_generation(self, *args, **kwargs):
        model_inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if _DEPTH_ATTENTIONS_OF_STEPS.get() is not None:
            model_inputs["output_depth_attentions"] = True
        return model_inputs


# trf-ignore: TRF057
class AttnResForCausalLM(AttnResPreTrainedModel, AttnResGenerationMixin):
    """The base's causal language model, with reads over depth.

    `generate(output_depth_attentions=True, return_dict_in_generate=True)` returns `depth_attentions` in the same form
    as `attentions`: for each generated token, a tuple of one tensor `(batch_size, generated_length, sources)` for each
    site.
    """

    forward = AttnResModel.forward

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        check_base_model_type(base_model_type, has_lm_head=True)
        if is_encoder_decoder(base_model_type):
            raise ValueError(
                f"`base_model_type={base_model_type!r}` has an encoder as well as a decoder: it is an"
                " `AttnResForSeq2SeqLM` or an `AttnResForSpeechSeq2Seq`."
            )
        return MODEL_FOR_CAUSAL_LM_MAPPING[base_config_class(base_model_type)]


class AttnResHeadMixin:
    """Of a base with an encoder its own model for the task, of a decoder transformers' generic one."""

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        if not has_own_classes(base_model_type):
            return super().class_of_base(base_model_type)  # type: ignore[misc]
        return class_for_task(base_model_type, cls)


# The generic heads make their model through `AutoModel`, which knows nothing of code from a Hub repository
class AttnResForSequenceClassification(AttnResHeadMixin, GenericForSequenceClassification, AttnResPreTrainedModel):
    """The base with reads over depth, and its own head, or on a decoder one that classifies the sequence."""

    forward = with_depth_attentions(GenericForSequenceClassification.forward)

    def __init__(self, config: AttnResConfig):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, AttnResModel(config))
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)

        self.post_init()


class AttnResForTokenClassification(AttnResHeadMixin, GenericForTokenClassification, AttnResPreTrainedModel):
    """The base with reads over depth, and its own head, or on a decoder one that classifies each token."""

    forward = with_depth_attentions(GenericForTokenClassification.forward)

    def __init__(self, config: AttnResConfig):
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, AttnResModel(config))
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels)

        self.post_init()


class AttnResForQuestionAnswering(AttnResHeadMixin, GenericForQuestionAnswering, AttnResPreTrainedModel):
    """The base with reads over depth, and its own head, or on a decoder one that scores starts and ends of answers."""

    forward = with_depth_attentions(GenericForQuestionAnswering.forward)

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


# trf-ignore: TRF057
class AttnResForTask(AttnResPreTrainedModel):
    """The base's own model for a task, with reads over depth in each of its stacks."""

    forward = AttnResModel.forward

    @classmethod
    def class_of_base(cls, base_model_type: str) -> type[PreTrainedModel]:
        return class_for_task(base_model_type, cls)


# trf-ignore: TRF057
class AttnResForMaskedLM(AttnResForTask):
    """The base's masked language model, of an encoder, with reads over depth."""


# trf-ignore: TRF057
class AttnResForImageClassification(AttnResForTask):
    """The base's classifier of images, of a vision transformer, with reads over depth."""


# trf-ignore: TRF057
class AttnResForAudioClassification(AttnResForTask):
    """The base's classifier of sound, with reads over depth."""


# trf-ignore: TRF057
class AttnResForCTC(AttnResForTask):
    """The base's recogniser of speech by CTC, with reads over depth."""


# trf-ignore: TRF057
class AttnResForSeq2SeqLM(AttnResForTask, AttnResGenerationMixin):
    """The base's encoder-decoder of text, with reads over depth in both stacks."""


# trf-ignore: TRF057
class AttnResForSpeechSeq2Seq(AttnResForTask):
    """The base's encoder of sound and decoder of text, with reads over depth in both stacks."""

    # Not among its own classes: some bases have transformers' two classes in one order, and some in the other
    mixins = (AttnResGenerationMixin,)


def class_for_task(base_model_type: str, ours: type) -> type[PreTrainedModel]:
    """The base's class for the task of one of ours.

    Raises:
        ValueError: if there is none.
    """
    name = next(of_ours.__name__ for of_ours in ours.__mro__ if of_ours.__name__ in __all__)
    found = own_class(base_model_type, name)
    if found is None:
        task = name.removeprefix("AttnResFor")
        raise ValueError(f"`base_model_type={base_model_type!r}` is not supported: transformers has no {task} for it.")
    return found


def reason_against_weights(model, loading_info) -> str | None:
    """Why weights with depth queries are not those of a model, because of the number of layers; `None` if they may be.

    Args:
        loading_info: what transformers has found in the files.
    """
    for name, found, expected in loading_info.mismatched_keys:
        if name.endswith("depth_queries.query") and found[:1] != expected[:1]:
            reason = (
                f"has {found[0]} reads over depth, and with `{_depth_in_words(model)}` there are {expected[0]}:"
                " layers cannot be left out or added while a model is loaded, as a number does not say which."
            )
            if is_encoder_decoder(model.config.base_model_type):
                return f"{reason} Load it with the numbers of layers in its config.json."
            return (
                f"{reason} Load it as it is and use `attnres.conversion.select_layers(model, range(...))`, or write a"
                " checkpoint with `attnres prune`."
            )
    if any(name.endswith("depth_queries.query") for name in loading_info.missing_keys):  # a base, which may be cut
        return None
    for layers in map(decoder_layers, model.stacks):
        prefix = next(f"{name}." for name, module in model.named_modules() if module is layers)
        names = [*model.state_dict(), *loading_info.unexpected_keys]
        depth = depth_of_weights([name for name in names if name.startswith(prefix)], len(layers))
        if depth != len(layers):
            return (
                f"has {depth} layers, of which `{_depth_in_words(model)}` in its config.json would leave out the last."
                " Where layers of several models were put together, do that with their bases (`attnres revert`), give"
                f" the result `num_hidden_layers={depth}`, and convert it."
            )
    return None


def _depth_in_words(model) -> str:
    numbers = [len(decoder_layers(stack)) for stack in model.stacks]
    return f"num_hidden_layers={numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} and {numbers[1]} layers"


def depth_of_weights(names: Iterable[str], num_layers: int) -> int:
    """How many layers there are names of tensors for, further ones that are of another kind left out.

    Those that predict further tokens, behind the last one, have tensors that no other layer has.

    Args:
        num_layers: of the model.
    """
    groups: dict[str, dict[int, set[str]]] = {}
    for name in names:
        match = re.match(r"(.*?\.)(\d+)\.(.*)", name)
        if match is not None:
            groups.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    # Of several lists of layers that are long enough, those of an encoder of images lie deeper
    fitting = [prefix for prefix, parts in groups.items() if num_layers - 1 in parts]
    parts = groups[min(fitting, key=lambda prefix: prefix.count("."))] if fitting else {}
    known = set().union(*(found for number, found in parts.items() if number < num_layers))
    return max([num_layers, *(number + 1 for number, found in parts.items() if found <= known)])


__all__ = [
    "AttnResForAudioClassification",
    "AttnResForCTC",
    "AttnResForCausalLM",
    "AttnResForImageClassification",
    "AttnResForMaskedLM",
    "AttnResForQuestionAnswering",
    "AttnResForSeq2SeqLM",
    "AttnResForSequenceClassification",
    "AttnResForSpeechSeq2Seq",
    "AttnResForTokenClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
]
