# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""AttnRes: attention over depth in place of the residual stream (Attention Residuals, arXiv 2603.15031).

A decoder of L/2 layers has L sublayers and L + 1 sites where depth is read: the input of every sublayer, and the end.
The way of a token: embed; for each layer read depth, attention, read depth, MLP; read depth once more; norm; head.
What is read are sums of sublayer outputs, never a running stream: the closed blocks, and the partial sum of the open
block.

The sublayers, norms, rope, masks and KV caches are those of the base architecture named by `config.base_model_type`,
under their own parameter names. AttnRes adds `depth_queries` at the root of the model, and nothing else.
"""

import contextvars
import copy
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import conversion_mapping
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput, GenerationMixin
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_attnres import BASE_FAMILIES, AttnResConfig, base_config_class
from .depth_attention import (
    BlockCache,
    add,
    get_backend,
    has_kernel,
    mix_and_norm,
    num_sources,
    read_and_norm,
    source_scores,
)


logger = logging.get_logger(__name__)


@auto_docstring
@dataclass
class AttnResModelOutputWithPast(MoeModelOutputWithPast):
    r"""
    depth_attentions (`tuple(torch.Tensor)`, *optional*, returned when `output_depth_attentions=True` is passed):
        One tensor `(batch_size, sequence_length, sources)` per site: the weights with which the input of a sublayer,
        or at last of the final norm, mixes the embedding, the closed blocks and the partial sum, in this order.
    """

    depth_attentions: tuple[torch.FloatTensor, ...] | None = None


@auto_docstring
@dataclass
class AttnResCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    r"""
    aux_loss (`torch.FloatTensor`, *optional*):
        Load-balancing loss of a mixture-of-experts base.
    depth_attentions (`tuple(torch.Tensor)`, *optional*, returned when `output_depth_attentions=True` is passed):
        One tensor `(batch_size, sequence_length, sources)` per site, see `AttnResModelOutputWithPast`.
    """

    depth_attentions: tuple[torch.FloatTensor, ...] | None = None


# Documented like the classes of transformers that they extend. trf-ignore: TRF057
@dataclass
class AttnResGenerateDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """As in transformers, and `depth_attentions`, returned when `output_depth_attentions=True` is passed.

    A tuple (one element for each generated token) of tuples (one for each site) of tensors of shape `(batch_size,
    generated_length, sources)`; as of `attentions` the generated length is that of the prompt first, and then 1.
    """

    depth_attentions: tuple[tuple[torch.FloatTensor, ...], ...] | None = None


# trf-ignore: TRF057
@dataclass
class AttnResGenerateBeamDecoderOnlyOutput(GenerateBeamDecoderOnlyOutput):
    """See `AttnResGenerateDecoderOnlyOutput`; the first dimension is `batch_size * num_beams`."""

    depth_attentions: tuple[tuple[torch.FloatTensor, ...], ...] | None = None


# Of the generation that runs in this thread, if they are wanted
_DEPTH_ATTENTIONS_OF_STEPS = contextvars.ContextVar("depth_attentions_of_steps", default=None)


class AttnResDepthQueries(nn.Module):
    """The pseudo-queries and key-norm weights of all sites. Zero queries read the mean of all sources."""

    def __init__(self, config: AttnResConfig):
        super().__init__()
        self.block_size = config.attn_res_block_size
        # Small steps away from zero vanish in half precision, so these are at least fp32 in every model
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.query = nn.Parameter(torch.zeros(config.num_sites, config.hidden_size, dtype=dtype))
        self.key_norm = nn.Parameter(torch.ones(config.num_sites, config.hidden_size, dtype=dtype))

    def forward(self) -> torch.Tensor:
        """The folded queries `query * key_norm`, `[sites, hidden]`: scores depend on nothing else."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        return self.query.to(dtype) * self.key_norm.to(dtype)

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
            copied.trained_block_size = nn.Buffer(torch.tensor(self.block_size))
        return copied

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        try:
            self.check_trained_block_size(state_dict.get(f"{prefix}trained_block_size"))
        except ValueError as error:
            errors.append(str(error))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def check_trained_block_size(self, block_size: torch.Tensor | None):
        """Raise a `ValueError` if an adapter was trained for other blocks than this model's."""
        if block_size is not None and int(block_size) != self.block_size:
            raise ValueError(
                f"The adapter's depth queries were trained with `attn_res_block_size={int(block_size)}` and this model"
                f" has {self.block_size}: the same queries would read from other sources. Load it on a conversion of"
                " the base with the adapter's block size."
            )


class AttnResDepthRead(nn.Module):
    """One read over depth, where no block cache does it.

    A module, without parameters, so that `output_depth_attentions` can hook its output.
    """

    def __init__(self, config: AttnResConfig, site: int):
        super().__init__()
        self.site = site
        self.is_first_of_block = site % config.attn_res_block_size == 0
        self.eps = config.attn_res_norm_eps

    def forward(
        self,
        queries: torch.Tensor,
        partial: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        scores: Sequence[torch.Tensor],
        norm: nn.Module | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Args:
            queries: the folded queries of all sites, `[sites, hidden]`.
            partial: the pending partial sum, `[batch, seq, hidden]`.
            blocks: the sum of every closed block, `[batch, seq, hidden]`.
            scores: of every closed block for this site, `[batch, seq]`.
            norm: of the sublayer that reads.

        Returns:
            The normed mix of closed blocks and partial sum, its weights, `[batch, seq, sources]`, and the scores of
            the partial sum: for this site and all later ones where it closes, else for this one or `None`.
        """
        readers = queries[self.site :] if self.is_first_of_block else queries[self.site : self.site + 1]
        readers = readers.to(partial.device)
        if not self.is_first_of_block and has_kernel(norm, partial):
            return *read_and_norm(readers[0], [*blocks, partial], scores, self.eps, norm), None
        partial_scores = source_scores(readers, partial, self.eps)
        weights = torch.softmax(torch.stack([*scores, partial_scores[..., 0]], dim=-1), dim=-1)
        return mix_and_norm(weights, [*blocks, partial], norm), weights, partial_scores


class AttnResLayerNorm(nn.Module):
    """A LayerNorm without weight or bias, for bases whose own one has its epsilon written into the code."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.normalized_shape = (hidden_size,)
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normalized = nn.functional.layer_norm(hidden_states.float(), self.normalized_shape, eps=self.eps)
        return normalized.to(hidden_states.dtype)


def norm_of_read(norm: nn.Module, config: AttnResConfig, site: int) -> nn.Module:
    """The base's norm behind the read at `site`, its epsilon scaled if the config asks for it.

    With zero queries a read is the residual stream over n sources; eps / n^2 makes the norm of it that of the stream.
    """
    # CODEPATH: checkpoints converted from a PreNorm one scale; those trained from scratch keep the base's epsilon
    if not config.attn_res_scale_norm_eps:
        return norm
    scale = num_sources(site, config.attn_res_block_size) ** -2
    fixed_eps = BASE_FAMILIES[config.base_model_type].fixed_norm_eps
    if fixed_eps is not None:
        return AttnResLayerNorm(config.hidden_size, eps=fixed_eps * scale)
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, name, getattr(norm, name) * scale)
    return norm


class AttnResDecoderLayer(GradientCheckpointingLayer):
    """The sublayers of one layer of the base, each reading its input over depth."""

    def __init__(self, config: AttnResConfig, layer_idx: int, base_layer: nn.Module):
        super().__init__()
        self.layer_idx = layer_idx
        layer_types = getattr(config, "layer_types", None)
        self.is_recurrent = layer_types is not None and layer_types[layer_idx] == "linear_attention"
        family = BASE_FAMILIES[config.base_model_type]
        self.attention_dropout_name, self.mlp_dropout_name = family.attention_dropout, family.mlp_dropout
        self.residual_multiplier = getattr(config, family.residual_multiplier) if family.residual_multiplier else None

        for name, module in base_layer.named_children():
            self.add_module(name, module)
        self.attention_name = "linear_attn" if hasattr(self, "linear_attn") else "self_attn"
        self.input_layernorm = norm_of_read(self.input_layernorm, config, 2 * layer_idx)
        self.post_attention_layernorm = norm_of_read(self.post_attention_layernorm, config, 2 * layer_idx + 1)
        self.attention_read = AttnResDepthRead(config, 2 * layer_idx)
        self.mlp_read = AttnResDepthRead(config, 2 * layer_idx + 1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        queries: torch.Tensor,
        *closed: torch.Tensor,
        block_cache: BlockCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ...]:
        """
        Args:
            hidden_states: the pending partial sum (for the first layer: the embeddings), `[batch, seq, hidden]`.
            queries: the folded queries of all sites, `[sites, hidden]`.
            closed: for every closed block its sum, `[batch, seq, hidden]`, and behind it its scores for the two sites
                of this layer, `[batch, seq]` each; nothing if a `block_cache` holds them.

        Returns:
            The new pending partial sum; then for every block that this layer has closed its sum, and its scores for
            the site that closed it and all later ones, `[batch, seq, sites]`.
        """
        dtype = hidden_states.dtype
        blocks, scores, mlp_scores = closed[::3], closed[1::3], closed[2::3]
        hidden_states, partial, newly_closed = self.read(
            self.attention_read, self.input_layernorm, hidden_states, None, queries, blocks, scores, block_cache
        )
        for block, scores in newly_closed:
            blocks, mlp_scores = (*blocks, block), (*mlp_scores, scores[..., 1])
        output = self.attend(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        output = self.finish(output, self.attention_dropout_name, dtype)

        hidden_states, partial, closed_at_mlp = self.read(
            self.mlp_read, self.post_attention_layernorm, partial, output, queries, blocks, mlp_scores, block_cache
        )
        output = self.mlp(hidden_states)
        output = self.finish(output[0] if isinstance(output, tuple) else output, self.mlp_dropout_name, dtype)

        return add(partial, output), *(tensor for pair in (*newly_closed, *closed_at_mlp) for tensor in pair)

    def read(
        self,
        depth_read: AttnResDepthRead,
        norm: nn.Module,
        partial: torch.Tensor | None,
        output: torch.Tensor | None,
        queries: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        scores: Sequence[torch.Tensor],
        block_cache: BlockCache | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Add the output of the sublayer in front to the partial sum, if there is one, and read over depth.

        The first site of a block closes the partial sum, so that there is none behind it.

        Returns:
            The normed mix, the partial sum or `None`, and what was closed: one block and its scores, or nothing.
        """
        if block_cache is not None:
            return *block_cache.read(depth_read.site, partial, output, norm), []
        if output is not None:
            partial = add(partial, output)
        hidden_states, _, partial_scores = depth_read(queries, partial, blocks, scores, norm=norm)
        if depth_read.is_first_of_block:
            return hidden_states, None, [(partial, partial_scores)]
        return hidden_states, partial, []

    def attend(self, hidden_states: torch.Tensor, past_key_values: Cache | None, **kwargs) -> torch.Tensor:
        """The token mixer of the base's layer."""
        attention = getattr(self, self.attention_name)
        if self.is_recurrent:
            mask = kwargs.pop("attention_mask")
            for name in ("position_ids", "position_embeddings", "use_cache"):
                kwargs.pop(name)
            return attention(hidden_states=hidden_states, cache_params=past_key_values, attention_mask=mask, **kwargs)
        if kwargs["position_embeddings"] is None:
            kwargs.pop("position_embeddings")
        return attention(hidden_states=hidden_states, past_key_values=past_key_values, **kwargs)[0]

    def finish(self, output: torch.Tensor, dropout_name: str | None, dtype: torch.dtype) -> torch.Tensor:
        """What the base does with the output of a sublayer before it is added."""
        if dropout_name is not None:
            output = getattr(self, dropout_name)(output)
        if self.residual_multiplier is not None:
            output = output * self.residual_multiplier
        # Sums keep the dtype of the embeddings, as a residual stream does under autocast
        return output if output.dtype == dtype else output.to(dtype)


class _ActiveConversionMapping(list):
    """The checkpoint conversion of the base whose model this thread has last built or is about to save.

    transformers looks conversions up by model type, in one registry for the process, and copies what it finds. All
    AttnRes models share a model type but not a base; the copy is where they part, per thread.
    """

    def __init__(self):
        super().__init__()
        self.active = threading.local()

    def __deepcopy__(self, memo):
        # as for a native model, that of the class comes before that of the model type
        for name in getattr(self.active, "base_names", ()):
            mapping = conversion_mapping.get_checkpoint_conversion_mapping(name)
            if mapping is not None:
                return mapping
        return None


_CONVERSION_MAPPING = _ActiveConversionMapping()
conversion_mapping.register_checkpoint_conversion_mapping("attnres", _CONVERSION_MAPPING, overwrite=True)


@functools.lru_cache
def base_model_classes(base_model_type: str) -> tuple[type[PreTrainedModel], type[PreTrainedModel]]:
    """The base model class and the causal LM class of a supported architecture."""
    config_class = base_config_class(base_model_type)
    return MODEL_MAPPING[config_class], MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


# What a checkpoint that carries its code (`register_for_auto_class`) tells the Auto classes
REMOTE_CODE_AUTO_MAP = {
    "AutoConfig": "configuration_attnres.AttnResConfig",
    "AutoModel": "modeling_attnres.AttnResModel",
    "AutoModelForCausalLM": "modeling_attnres.AttnResForCausalLM",
    "AutoModelForQuestionAnswering": "modeling_attnres.AttnResForQuestionAnswering",
    "AutoModelForSequenceClassification": "modeling_attnres.AttnResForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_attnres.AttnResForTokenClassification",
}

# Of the base, set on every instance: what its modules can do and need. The first is a class method that looks for a
# decorator in the source around it; the experts that would carry it are in the base's
_BASE_FLAGS = (
    "_can_set_experts_implementation",
    "_supports_sdpa",
    "_supports_flash_attn",
    "_supports_flex_attn",
    "_supports_attention_backend",
    "_supports_context_parallel",
    "_can_compile_fullgraph",
    "_is_stateful",
    "_compatible_flash_implementations",
    "_keep_in_fp32_modules",
    "_keys_to_ignore_on_load_unexpected",
)


# Abstract, so without a `post_init` of its own. trf-ignore: TRF013
@auto_docstring
class AttnResPreTrainedModel(PreTrainedModel):
    config: AttnResConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AttnResDecoderLayer", "AttnResDepthQueries"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["depth_queries"]
    # What most bases can do, for those who ask the class; an instance knows its own base
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Recorders are looked up by class name, so these are of every base met in this process; a hook goes only where a
    # module of its class is
    _can_record_outputs = {
        "hidden_states": AttnResDecoderLayer,
        "depth_attentions": OutputRecorder(AttnResDepthRead, index=1),
        "attentions": [],
        "router_logits": [],
    }

    def __init__(self, config: AttnResConfig):
        base_class, _ = base_model_classes(config.base_model_type)
        for name in _BASE_FLAGS:
            setattr(self, name, getattr(base_class, name, None))
        self._keep_in_fp32_modules_strict = [
            *AttnResPreTrainedModel._keep_in_fp32_modules_strict,
            *(base_class._keep_in_fp32_modules_strict or []),
        ]
        for name in ("attentions", "router_logits"):
            recorders = AttnResPreTrainedModel._can_record_outputs[name]
            recorder = (base_class._can_record_outputs or {}).get(name)
            if recorder is not None and recorder not in recorders:
                recorders.append(recorder)
        self.use_base_conversion_mapping(config)
        super().__init__(config)

    @classmethod
    def use_base_conversion_mapping(cls, config: AttnResConfig):
        """Checkpoints keep the base's own format plus two tensors: name the base before one is read or written."""
        _, causal_lm_class = base_model_classes(config.base_model_type)
        _CONVERSION_MAPPING.active.base_names = (causal_lm_class.__name__, config.base_model_type)

    def save_pretrained(self, *args, **kwargs):
        """As in transformers. A model from a folder that carries its code is saved with the code."""
        self.use_base_conversion_mapping(self.config)
        # A merged adapter leaves what its own file says of its blocks; the config of a model says that
        self._keys_to_ignore_on_save |= {
            name for name, _ in self.named_buffers() if name.endswith("depth_queries.trained_block_size")
        }
        model_class = type(self)
        if not model_class.is_remote_code() and not getattr(self.config, "auto_map", None):
            return super().save_pretrained(*args, **kwargs)
        auto_classes = {reference.split(".")[-1]: name for name, reference in REMOTE_CODE_AUTO_MAP.items()}
        auto_class = model_class._auto_class
        # transformers would list the class that is saved and no other
        self.config.auto_map = dict(REMOTE_CODE_AUTO_MAP)
        model_class._auto_class = auto_classes.get(model_class.__name__, auto_class)
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            model_class._auto_class = auto_class

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
        self.use_base_conversion_mapping(self.config)
        before = set(getattr(self, "peft_config", {}))
        loading_info = super().load_adapter(*args, **kwargs)
        try:  # here, as transformers sets tensors by itself
            for module in self.modules():
                if isinstance(module, AttnResDepthQueries):
                    module.check_trained_block_size(getattr(module, "trained_block_size", None))
        except ValueError:
            self.delete_adapter(list(set(self.peft_config) - before))
            raise
        return loading_info

    # The base's method calls that of `PreTrainedModel`. trf-ignore: TRF018
    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, AttnResDepthQueries):
            init.zeros_(module.query)
            init.ones_(module.key_norm)
            return
        # The base's own initialisation is a method that needs no more than a config
        base_class, _ = base_model_classes(self.config.base_model_type)
        base_model = base_class.__new__(base_class)
        base_model.__dict__["config"] = self.config
        base_model._init_weights(module)


@auto_docstring
class AttnResModel(AttnResPreTrainedModel):
    def __init__(self, config: AttnResConfig):
        super().__init__(config)
        base_class, _ = base_model_classes(config.base_model_type)
        family = BASE_FAMILIES[config.base_model_type]
        # The base consumes this attribute of the config, which is ours to consume
        gradient_checkpointing = getattr(config, "gradient_checkpointing", None)
        base_model = base_class(config)
        if gradient_checkpointing is not None:
            config.gradient_checkpointing = gradient_checkpointing

        self.embed_tokens = base_model.embed_tokens
        self.layers = nn.ModuleList(
            [AttnResDecoderLayer(config, i, base_layer) for i, base_layer in enumerate(base_model.layers)]
        )
        self.norm = norm_of_read(base_model.norm, config, config.num_sites - 1)
        self.rotary_emb = getattr(base_model, "rotary_emb", None)
        self.depth_queries = AttnResDepthQueries(config)
        self.final_depth_read = AttnResDepthRead(config, config.num_sites - 1)
        self.embedding_multiplier = (
            getattr(config, family.embedding_multiplier) if family.embedding_multiplier else None
        )
        self.embedding_dropout = getattr(config, family.embedding_dropout) if family.embedding_dropout else None
        self.gradient_checkpointing = False

        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AttnResModelOutputWithPast:
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        hidden_states = inputs_embeds
        if self.embedding_multiplier is not None:
            hidden_states = hidden_states * self.embedding_multiplier
        if self.embedding_dropout is not None:
            hidden_states = nn.functional.dropout(hidden_states, p=self.embedding_dropout, training=self.training)

        queries = self.fold_queries()
        partial, blocks = self.run_layers(
            0,
            self.config.num_hidden_layers,
            hidden_states,
            (),
            queries=queries,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = self.norm(self.final_read(partial, blocks, queries=queries))
        return AttnResModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def fold_queries(self) -> torch.Tensor:
        """The folded queries of all sites, `[sites, hidden]`."""
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

    def run_layers(
        self,
        start: int,
        end: int,
        partial: torch.Tensor,
        blocks: tuple[torch.Tensor, ...] | BlockCache,
        queries: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | BlockCache]:
        """Run the layers `start` to `end - 1`: all that a pipeline stage does between its first and last layer.

        Args:
            partial: the pending partial sum in front of layer `start` (0: the embeddings), `[batch, seq, hidden]`.
            blocks: the blocks closed in front of layer `start`, in the order of depth, each of the same shape.
            queries, position_embeddings: results of `fold_queries()` and `rotary_emb`, if they are at hand.
            attention_mask: as for `forward`, or what has been made of it: 4-D, or by layer type.

        Returns:
            The same two for layer `end`. Without gradients the blocks are a `BlockCache`, a sequence of such tensors.
        """
        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(partial.shape[1], device=partial.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)
        if not isinstance(attention_mask, dict):
            attention_mask = create_masks_for_generate(
                config=self.config,
                inputs_embeds=partial,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        if position_embeddings is None and self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(partial, position_ids)
        queries = self.fold_queries() if queries is None else queries
        block_cache = self.open_block_cache(start, queries, partial, blocks, past_key_values, **kwargs)
        # Without a block cache: every closed block, and its scores for the sites from some one to the last, a tensor
        # for each (slices, taken where they are read, would have gradients as large as what they are cut from)
        closed = []
        if block_cache is None:
            eps, device = self.config.attn_res_norm_eps, partial.device
            for block in blocks:
                closed.append((block, source_scores(queries[2 * start :].to(device), block, eps).unbind(-1)))

        masks = [attention_mask] * (end - start)
        if isinstance(attention_mask, dict):
            masks = [attention_mask[layer_type] for layer_type in self.config.layer_types[start:end]]

        for layer, mask in zip(self.layers[start:end], masks):
            site, device = 2 * layer.layer_idx - self.config.num_sites, partial.device  # counted from the last
            partial, *newly_closed = layer(
                partial,
                queries,
                *(tensor for block, scores in closed for tensor in (block, scores[site], scores[site + 1])),
                block_cache=block_cache,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            if partial.device != device:
                # With layers on several devices the blocks go along, so that not every layer fetches them again
                device = partial.device
                closed = [(block.to(device), [score.to(device) for score in scores]) for block, scores in closed]
            closed += [(block, scores.unbind(-1)) for block, scores in zip(newly_closed[::2], newly_closed[1::2])]
        return partial, tuple(block for block, _ in closed) if block_cache is None else block_cache

    def open_block_cache(
        self,
        start: int,
        queries: torch.Tensor,
        partial: torch.Tensor,
        blocks: tuple[torch.Tensor, ...] | BlockCache,
        past_key_values: Cache | None,
        output_depth_attentions: bool | None = None,
        **kwargs,
    ) -> BlockCache | None:
        """The block cache for two-phase reads from layer `start` on; none for gradients, weights, or the reference."""
        if output_depth_attentions is None:
            output_depth_attentions = getattr(self.config, "output_depth_attentions", False)
        if torch.is_grad_enabled() or output_depth_attentions or get_backend() == "reference":
            return None
        if isinstance(blocks, BlockCache):
            blocks.rewind(2 * start)
            return blocks
        # The steps of a generation share their buffers; a compiled graph plans its own memory
        reuse = past_key_values is not None and not torch.compiler.is_compiling()
        block_cache = BlockCache.beside(past_key_values) if reuse else BlockCache()
        block_cache.start(queries, partial, self.config.attn_res_block_size, self.config.attn_res_norm_eps)
        for block in blocks:
            block_cache.append(block)
        return block_cache

    def final_read(
        self,
        partial: torch.Tensor,
        blocks: tuple[torch.Tensor, ...] | BlockCache,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The read behind the last layer, `[batch, seq, hidden]`; arguments as returned by `run_layers`."""
        queries = self.fold_queries() if queries is None else queries
        if isinstance(blocks, BlockCache) and not torch.is_grad_enabled():
            return blocks.read(self.final_depth_read.site, partial)[0]
        query, eps = queries[-1:].to(partial.device), self.config.attn_res_norm_eps
        scores = [source_scores(query, block, eps)[..., 0] for block in blocks]
        return self.final_depth_read(queries, partial, list(blocks), scores)[0]


@auto_docstring
class AttnResForCausalLM(AttnResPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    # Takes the place of logits and loss in training: Liger's fused linear cross-entropy, see `liger.py`
    fused_loss_function: Callable | None = None

    def __init__(self, config: AttnResConfig):
        super().__init__(config)
        _, causal_lm_class = base_model_classes(config.base_model_type)
        self._tied_weights_keys = causal_lm_class._tied_weights_keys
        self.model = AttnResModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> AttnResCausalLMOutputWithPast:
        r"""
        Example:

        ```python
        >>> import attnres
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer

        >>> model = AutoModelForCausalLM.from_pretrained("path/to/attnres-model")
        >>> tokenizer = AutoTokenizer.from_pretrained("path/to/attnres-model")

        >>> inputs = tokenizer("def fibonacci(", return_tensors="pt")
        >>> generate_ids = model.generate(**inputs, max_new_tokens=30)
        >>> tokenizer.batch_decode(generate_ids)[0]
        ```"""
        skip_logits = kwargs.pop("skip_logits", self.training)  # a Trainer with Liger asks for it in evaluation
        if output_router_logits is None:
            output_router_logits = getattr(self.config, "output_router_logits", False)
        outputs: AttnResModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits, loss = None, None
        if self.fused_loss_function is not None and skip_logits and labels is not None:
            loss = self.fused_loss_function(self, hidden_states, labels, **kwargs)
        else:
            logits = self.lm_head(hidden_states)
            logits_scaling = BASE_FAMILIES[self.config.base_model_type].logits_scaling
            if logits_scaling is not None:
                logits = logits / getattr(self.config, logits_scaling)
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        aux_loss = self.load_balancing_loss(outputs.router_logits, attention_mask) if output_router_logits else None
        if loss is not None and aux_loss is not None:
            loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)

        return AttnResCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            depth_attentions=outputs.depth_attentions,
        )

    def load_balancing_loss(
        self, router_logits: tuple[torch.Tensor, ...] | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The auxiliary loss of the base's own causal LM; `None` if it has none or nothing was routed."""
        _, causal_lm_class = base_model_classes(self.config.base_model_type)
        loss_func = getattr(sys.modules[causal_lm_class.__module__], "load_balancing_loss_func", None)
        if loss_func is None or not router_logits:
            return None
        num_experts = getattr(self.config, "num_experts", None) or self.config.num_local_experts
        return loss_func(router_logits, num_experts, self.config.num_experts_per_tok, attention_mask)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        wanted = kwargs.pop("output_depth_attentions", getattr(self.config, "output_depth_attentions", False))
        if wanted:
            self.check_depth_attentions_of_generation(*args, **kwargs)
        # Set without a wish as well: this may be the assistant of a model of which they are wanted
        token = _DEPTH_ATTENTIONS_OF_STEPS.set([] if wanted else None)
        try:
            outputs = super().generate(*args, **kwargs)
            steps = _DEPTH_ATTENTIONS_OF_STEPS.get()
        finally:
            _DEPTH_ATTENTIONS_OF_STEPS.reset(token)
        if not wanted or isinstance(outputs, torch.Tensor):
            return outputs
        beams = isinstance(outputs, GenerateBeamDecoderOnlyOutput)
        output_class = AttnResGenerateBeamDecoderOnlyOutput if beams else AttnResGenerateDecoderOnlyOutput
        return output_class(**outputs, depth_attentions=tuple(steps))

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

    def check_depth_attentions_of_generation(self, inputs=None, generation_config=None, *args, **kwargs):
        """Raise a `ValueError` if they would not be of every token once; warn if they would not be returned."""
        generation_config = generation_config or self.generation_config

        def option(name: str):
            value = kwargs.get(name)
            return getattr(generation_config, name, None) if value is None else value

        for name in ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "prefill_chunk_size"):
            if option(name) is not None:
                raise ValueError(
                    f"`output_depth_attentions=True` cannot be combined with `{name}`, which runs the model on several"
                    " tokens at a time: generate without one of them, or run the model on what was generated."
                )
        if not option("return_dict_in_generate"):
            logger.warning(
                "`output_depth_attentions=True` does nothing in `generate` without `return_dict_in_generate=True`."
            )

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        steps = _DEPTH_ATTENTIONS_OF_STEPS.get()
        if steps is not None:
            steps.append(outputs.depth_attentions)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, inputs_embeds=None, **kwargs):
        switch_length = getattr(self.config, "original_max_position_embeddings", None)
        # CODEPATH: Phi3 with longrope switches to other frequencies behind this length, so what was cached is void
        if self.config.base_model_type == "phi3" and past_key_values and input_ids.shape[1] > switch_length:
            if past_key_values.get_seq_length() <= switch_length:
                past_key_values = None
                kwargs["next_sequence_length"] = None
        model_inputs = super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )
        if _DEPTH_ATTENTIONS_OF_STEPS.get() is not None:
            model_inputs["output_depth_attentions"] = True
        return model_inputs


def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions whose logits are wanted, as in transformers since 5.20.

    Args:
        logits_to_keep: an int, the last so many (0: all); 1-D, these positions of every sample; 2-D integer, positions
            per sample; 2-D boolean, a mask whose selection comes out flat.
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, slice(-logits_to_keep, None), :]
    if logits_to_keep.ndim < 2:
        return hidden_states[:, logits_to_keep, :]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)


class AttnResForSequenceClassification(GenericForSequenceClassification, AttnResPreTrainedModel):
    # The generic heads make their model through `AutoModel`, which knows nothing of code from a Hub repository
    def __init__(self, config: AttnResConfig):
        AttnResPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = AttnResModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)

        self.post_init()


class AttnResForTokenClassification(GenericForTokenClassification, AttnResPreTrainedModel):
    def __init__(self, config: AttnResConfig):
        AttnResPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = AttnResModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        if dropout is None:
            dropout = getattr(config, "hidden_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)

        self.post_init()


class AttnResForQuestionAnswering(GenericForQuestionAnswering, AttnResPreTrainedModel):
    def __init__(self, config: AttnResConfig):
        AttnResPreTrainedModel.__init__(self, config)
        self.model = AttnResModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

        self.post_init()


__all__ = [
    "AttnResForCausalLM",
    "AttnResForQuestionAnswering",
    "AttnResForSequenceClassification",
    "AttnResForTokenClassification",
    "AttnResModel",
    "AttnResPreTrainedModel",
]
