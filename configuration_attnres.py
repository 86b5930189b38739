# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0. trf-ignore: TRF028
"""AttnRes configuration: that of a base, any decoder of transformers, and the fields of depth attention."""

import copy
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import __version__
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.utils import auto_docstring


# Decoders that a probe would not refuse, and why they are
EXCEPTIONS = dict.fromkeys(
    ("attnres", "attnres_multimodal", "inkling2", "inkling2_text"), "it is an attention-residual architecture already"
)

# What reads over depth may be like; the first is the paper's own. New ones go to the end, and none is taken out: files
# of adapters hold the places
READS = {
    "attn_res_query": ("learned", "input", "hybrid"),
    "attn_res_weights": ("softmax", "sigmoid", "softmax1"),
    "attn_res_open_block": ("sum", "each"),
}

# Class attributes of a base config that transformers looks up on the config: ours belong to an instance
_MIRRORED_ATTRIBUTES = (
    *("attribute_map", "base_model_tp_plan", "base_model_ep_plan", "default_theta", "sub_configs"),
    "ignore_keys_at_rope_validation",
)
# Keywords of `PreTrainedConfig.__init__` that are no dataclass fields
_GENERIC_KEYWORDS = {
    *("name_or_path", "model_type", "torch_dtype", "num_labels", "output_attentions", "attn_implementation"),
    *("experts_implementation", "per_layer_config", "auto_map", "quantization_config", "distributed_config"),
    *("gradient_checkpointing", "tokenizer_class", "tie_last_hidden_states", "is_decoder", "is_causal"),
    *("output_depth_attentions", "ignore_keys_at_rope_validation"),
}
_ROPE_KEYWORDS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}


def check_base_model_type(base_model_type: str):
    """Raise a `ValueError` that says why, if `base_model_type` cannot be a base."""
    if not isinstance(base_model_type, str):
        raise ValueError(
            f"`base_model_type={base_model_type!r}` must be the model type of a decoder, a string such as 'qwen3',"
            f" not {_name_type(base_model_type)}."
        )
    if base_model_type in EXCEPTIONS:
        raise ValueError(f"`base_model_type={base_model_type!r}` is not supported: {EXCEPTIONS[base_model_type]}.")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if base_model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    # Others may have been registered, with code of their own
    if base_model_type not in CONFIG_MAPPING or CONFIG_MAPPING[base_model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        close = difflib.get_close_matches(base_model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
        raise ValueError(
            f"`base_model_type={base_model_type!r}` is not supported: transformers {__version__} has no causal"
            " language model of this type." + (f" Did you mean {' or '.join(close)}?" if close else "")
        )


def _name_type(value: Any) -> str:
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _check_count(name: str, value: int, meaning: str):
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}={value!r}` must be {meaning}, an int, not {_name_type(value)}.")
    if value < 1:
        raise ValueError(f"`{name}={value}` must be {meaning}.")


def _check_block_size(value: int):
    _check_count("attn_res_block_size", value, "a number of sublayers >= 1 (1 is Full AttnRes)")


def _check_norm_eps(value: float):
    if not isinstance(value, float):
        raise ValueError(f"`attn_res_norm_eps={value!r}` must be a float >= 0, not {_name_type(value)}.")
    if not 0 <= value < math.inf:
        raise ValueError(f"`attn_res_norm_eps={value}` must be a float >= 0, and finite.")


def _check_scale_norm_eps(value: bool):
    if not isinstance(value, bool):
        raise ValueError(f"`attn_res_scale_norm_eps={value!r}` must be True or False, not {_name_type(value)}.")


def _check_num_heads(value: int):
    _check_count("attn_res_num_heads", value, "a number of heads >= 1 that divides `hidden_size`")


def _check_query_rank(value: int | None):
    if value is not None:
        _check_count("attn_res_query_rank", value, "None, or a rank >= 1")


def _check_choice(name: str, allowed: tuple[str, ...], value: str):
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"`{name}={value!r}` must be one of {', '.join(allowed)}.")


def _check_read(config: "AttnResConfig"):
    """Raise a `ValueError` for fields of the read over depth that contradict each other."""
    heads, rank = config.attn_res_num_heads, config.attn_res_query_rank
    if heads > 1 and config.hidden_size % heads:
        raise ValueError(f"`attn_res_num_heads={heads}` must divide `hidden_size={config.hidden_size}`.")
    if rank is not None and config.attn_res_query == "learned":
        raise ValueError(
            f"`attn_res_query_rank={rank}` is of a projection, and `attn_res_query='learned'` has none: leave it out,"
            " or take 'input' or 'hybrid'."
        )
    if rank is not None and rank > config.hidden_size:
        raise ValueError(
            f"`attn_res_query_rank={rank}` must be at most `hidden_size={config.hidden_size}`; None is a whole matrix."
        )


_FIELD_CHECKS: dict[str, Callable[[Any], None]] = {
    "attn_res_num_heads": _check_num_heads,
    "attn_res_query_rank": _check_query_rank,
    **{name: functools.partial(_check_choice, name, allowed) for name, allowed in READS.items()},
    "base_model_type": check_base_model_type,
    "attn_res_block_size": _check_block_size,
    "attn_res_norm_eps": _check_norm_eps,
    "attn_res_scale_norm_eps": _check_scale_norm_eps,
}


def _check_fields_first(config_class: Any) -> Any:
    """Let our fields fail with a `ValueError` that says what is allowed; `@strict` tells of types, and by itself."""
    strict_setattr = config_class.__setattr__

    def __setattr__(self, name: str, value: Any):
        if name in _FIELD_CHECKS:
            _FIELD_CHECKS[name](value)
        strict_setattr(self, name, value)

    config_class.__setattr__ = __setattr__
    return config_class


def base_config_class(base_model_type: str) -> type[PreTrainedConfig]:
    """The configuration class of a base architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    check_base_model_type(base_model_type)
    return CONFIG_MAPPING[base_model_type]


@functools.lru_cache
def _base_keywords(base_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Names that a base architecture's own config gives a meaning to, generic ones left out."""
    names = {field.name for field in fields(base_class)} | {*vars(base_class())} | _ROPE_KEYWORDS
    names |= {*base_class.attribute_map, *base_class.attribute_map.values()}
    # Keywords that only its `__post_init__` knows: spellings of the released checkpoints
    names |= {*re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', inspect.getsource(base_class.__post_init__))}
    generic = {field.name for field in fields(PreTrainedConfig)} | _GENERIC_KEYWORDS
    return frozenset(name for name in names - generic if _is_field(name, base_class))


def _is_field(name: str, base_class: type[PreTrainedConfig]) -> bool:
    return not name.startswith("_") or name in {field.name for field in fields(base_class)}


def _is_known(name: str, base_class: type[PreTrainedConfig]) -> bool:
    return (
        name in _base_keywords(base_class)  # type: ignore[arg-type]
        or name in _GENERIC_KEYWORDS
        or name in GenerationConfig._get_default_generation_params()
        or name.startswith("_")
    )


def _check_known(kwargs: dict[str, Any], base_class: type[PreTrainedConfig]):
    own = [field.name for field in fields(AttnResConfig)]
    for name, value in kwargs.items():
        if name in own or _is_known(name, base_class):
            continue
        known = [*_base_keywords(base_class), *own]  # type: ignore[arg-type]
        close = difflib.get_close_matches(name, known, n=3)
        raise ValueError(
            f"Unknown field `{name}={value!r}` for an AttnRes model on base `{base_class.model_type}`."
            f" Allowed are the fields of `{base_class.__name__}` and"
            f" {', '.join(name for name in own if name.startswith(('base_model_type', 'attn_res_')))}."
            + (f" Did you mean {' or '.join(close)}?" if close else "")
        )


@auto_docstring(checkpoint="attnres")
@_check_fields_first
@strict
class AttnResConfig(PreTrainedConfig):
    r"""
    base_model_type (`str`, *optional*, defaults to `"llama"`):
        Model type of the decoder whose layers are used. Every field of that architecture's own
        configuration is a field of this one.
    attn_res_block_size (`int`, *optional*, defaults to 8):
        Number of sublayers (an attention or an MLP each; a decoder layer has two) whose outputs are summed into one
        source. 1 is Full AttnRes. The last block is short when it does not divide the number of sublayers.
    attn_res_norm_eps (`float`, *optional*, defaults to 1e-06):
        Epsilon of the RMSNorm on the keys of depth attention.
    attn_res_scale_norm_eps (`bool`, *optional*, defaults to `False`):
        Whether every read is multiplied by its number of sources, which to the norm behind it is the same as an
        epsilon divided by the square of that number, hence the name (by 2 if weights are a sigmoid, and one source
        more if they are `"softmax1"`). With queries of zero a read is then the residual
        stream, and the model computes exactly what its base computes.
    attn_res_sublayers (`list[int]`, *optional*):
        How often each decoder layer adds to the residual stream, usually 2. Counted by a run of the base without
        weights where it is not given, or not for this number of layers.
    attn_res_num_heads (`int`, *optional*, defaults to 1):
        Number of heads of a read. Each reads its slice of the hidden dimension with weights of its own.
    attn_res_query (`str`, *optional*, defaults to `"learned"`):
        What a query is made of: `"learned"` is a vector of each site, `"input"` a projection of the newest source at
        the site, and `"hybrid"` the sum of both.
    attn_res_query_rank (`int`, *optional*):
        Rank of that projection; `None` is a whole matrix of each site.
    attn_res_weights (`str`, *optional*, defaults to `"softmax"`):
        How scores become weights: `"softmax"`, `"sigmoid"`, or `"softmax1"`, a softmax with one score more, which is
        zero and reads nothing.
    attn_res_open_block (`str`, *optional*, defaults to `"sum"`):
        What can be read of the open block: the `"sum"` of its outputs, or `"each"` of them.

    ```python
    >>> from attnres import AttnResConfig, AttnResForCausalLM
    >>> from transformers import Qwen3Config

    >>> config = AttnResConfig.from_base_config(Qwen3Config(num_hidden_layers=4), block_size=2)
    >>> model = AttnResForCausalLM(config)
    ```"""

    model_type = "attnres"
    keys_to_ignore_at_inference = ["past_key_values"]
    # transformers' pipeline parallelism carries one tensor between stages; AttnRes needs the closed blocks as well
    base_model_pp_plan = None
    base_model_fsdp_plan = {**PreTrainedConfig.base_model_fsdp_plan, "depth_queries": "keep_full_weight"}

    base_model_type: str = "llama"
    attn_res_block_size: int = 8
    attn_res_norm_eps: float = 1e-6
    attn_res_scale_norm_eps: bool = False
    attn_res_sublayers: list[int] | None = None
    attn_res_num_heads: int = 1
    attn_res_query: str = "learned"
    attn_res_query_rank: int | None = None
    attn_res_weights: str = "softmax"
    attn_res_open_block: str = "sum"
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs):
        base_class = base_config_class(self.base_model_type)
        if kwargs.get("model_type", self.model_type) not in (self.model_type, self.base_model_type):
            raise ValueError(
                f"`model_type={kwargs['model_type']!r}` contradicts `base_model_type={self.base_model_type!r}`."
            )
        _check_known(kwargs, base_class)
        kwargs.pop("model_type", None)
        keywords = _base_keywords(base_class) | {"per_layer_config"}
        base_kwargs = {name: kwargs.pop(name) for name in keywords & kwargs.keys()}
        if self.tie_word_embeddings is not None:
            base_kwargs["tie_word_embeddings"] = self.tie_word_embeddings
        base_config = base_class(**base_kwargs)

        # Straight into the instance: an attribute map that is half set would misdirect `setattr`
        for name in _MIRRORED_ATTRIBUTES:
            if hasattr(base_class, name):
                self.__dict__[name] = getattr(base_class, name)
        for name, value in vars(base_config).items():
            if name in keywords or name == "_heterogeneity_spec":
                self.__dict__[name] = value
        _check_read(self)
        # TRL reads this attribute where transformers has no class of the architecture's name
        super().__post_init__(**{"auto_map": {}, **kwargs})

    def __getattr__(self, name: str):
        # Asked for what is not found: properties and methods of the base's class
        base_model_type = self.__dict__.get("base_model_type")
        name = self.__dict__.get("attribute_map", {}).get(name, name)
        for base in () if base_model_type is None else base_config_class(base_model_type).__mro__:
            if name in vars(base) and not name.startswith("__"):
                member = vars(base)[name]
                if isinstance(member, property):  # of which a compiler knows no `__get__`
                    return member.fget(self)  # type: ignore[misc]
                return member.__get__(self, type(self)) if hasattr(member, "__get__") else member
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def validate_architecture(self):
        """Part of `@strict`-powered validation: the base configuration's own checks."""
        self.to_base_config()

    def convert_rope_params_to_dict(self, **kwargs):
        return kwargs  # the base configuration has done it

    # The base configuration does it, or has other rules of its own: see `validate_architecture`
    def validate_rope(self):
        pass

    def validate_layer_type(self):
        pass

    def validate_token_ids(self):
        pass

    @property
    def num_sites(self) -> int:
        """Number of places where depth is read: in front of every sublayer, and behind the last one."""
        return sum(self.sublayers_per_layer()) + 1

    def sublayers_per_layer(self) -> list[int]:
        """How often each decoder layer adds to the residual stream, as probed once.

        Raises:
            ValueError: if the base does more to its residual stream than to add to it and to read it.
        """
        if self.attn_res_sublayers is None or len(self.attn_res_sublayers) != self.num_hidden_layers:
            from .depth_probe import probe_sublayers

            self.attn_res_sublayers = probe_sublayers(self.to_base_config())
        return self.attn_res_sublayers

    @classmethod
    def from_base_config(
        cls, base_config: PreTrainedConfig, block_size: int | None = None, num_blocks: int | None = None, **kwargs
    ) -> "AttnResConfig":
        """Configuration of the AttnRes model on a base, the inverse of `to_base_config`.

        Args:
            base_config (`PreTrainedConfig`):
                Configuration of a supported architecture.
            block_size (`int`, *optional*):
                Sublayers per block, 8 if neither this nor `num_blocks` is given.
            num_blocks (`int`, *optional*):
                Number of blocks wanted: takes the smallest block size that makes no more than that.
            kwargs:
                Other fields of `AttnResConfig`, such as `attn_res_scale_norm_eps`.

        Raises:
            ValueError: for an unsupported base, or if both or impossible numbers are given.
        """
        from .depth_probe import probe_sublayers

        if not isinstance(base_config, PreTrainedConfig):
            raise ValueError(
                "`base_config` must be the configuration of a base, such as `Qwen3Config()` or"
                f" `AutoConfig.from_pretrained(...)`, not {_name_type(base_config)}."
            )
        check_base_model_type(base_config.model_type)
        sublayers = probe_sublayers(base_config)
        if "attn_res_block_size" in kwargs:
            raise ValueError("Pass `block_size`, not `attn_res_block_size`, to `from_base_config`.")
        _check_known(kwargs, type(base_config))
        if block_size is not None and num_blocks is not None:
            raise ValueError(f"`block_size={block_size}` and `num_blocks={num_blocks}` contradict: give one of them.")
        if num_blocks is not None:
            _check_count("num_blocks", num_blocks, ">= 1")
            block_size = -(-sum(sublayers) // num_blocks)
        if block_size is not None:
            kwargs["attn_res_block_size"] = block_size

        values = copy.deepcopy(vars(base_config))
        values = {name: value for name, value in values.items() if _is_field(name, type(base_config))}
        for name in ("auto_map", *_MIRRORED_ATTRIBUTES):  # the first names the base's code
            values.pop(name, None)
        values["architectures"] = _rename_architectures(values["architectures"], base_config.model_type, to_base=False)
        values.update(_per_layer(base_config))
        kwargs = {"attn_res_sublayers": sublayers, **kwargs}
        values.update(kwargs, base_model_type=base_config.model_type, model_type=cls.model_type)
        config = cls.from_dict(values)
        _copy_private(base_config, config)
        return config

    def to_base_config(self) -> PreTrainedConfig:
        """The base architecture's configuration, the inverse of `from_base_config`."""
        base_class = base_config_class(self.base_model_type)
        left_out = {"base_model_type", "auto_map", *_MIRRORED_ATTRIBUTES}
        values = {
            name: value
            for name, value in copy.deepcopy(vars(self)).items()
            if _is_field(name, base_class) and not name.startswith("attn_res_") and name not in left_out
        }
        values["architectures"] = _rename_architectures(values["architectures"], self.base_model_type, to_base=True)
        base_config = base_class(**values, **_per_layer(self))
        _copy_private(self, base_config)
        return base_config

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("model_type") != cls.model_type and "attn_res_block_size" in config_dict:
            raise ValueError(
                f"`{pretrained_model_name_or_path}` is an AttnRes checkpoint in Kimi's naming, whose block size counts"
                " layers. `attnres import` makes it one of this kind."
            )
        return _adopt_base_dict(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, fields that the architecture does not know become attributes: files may carry some."""
        config_dict = _adopt_base_dict(config_dict)
        base_class = base_config_class(config_dict.get("base_model_type", cls.base_model_type))
        own = {field.name for field in fields(cls)}
        others = {k: v for k, v in config_dict.items() if k not in own and not _is_known(k, base_class)}
        result = super().from_dict({k: v for k, v in config_dict.items() if k not in others}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for name, value in others.items():
            if name not in kwargs:
                setattr(config, name, value)
        return result

    def _remove_keys_not_serialized(self, d: dict[str, Any]):
        for name in _MIRRORED_ATTRIBUTES:
            d.pop(name, None)
        for name in ("auto_map", "attn_res_sublayers", "attn_res_query_rank"):
            if not d.get(name):
                d.pop(name, None)
        # As files were before there were these fields
        for name, (default, *_) in {**READS, "attn_res_num_heads": (1,)}.items():
            if d.get(name) == default:
                d.pop(name)
        super()._remove_keys_not_serialized(d)


def _adopt_base_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Read the config dict of a base checkpoint as that of the AttnRes model which computes the same."""
    model_type = config_dict.get("model_type", AttnResConfig.model_type)
    if model_type == AttnResConfig.model_type:
        return config_dict
    check_base_model_type(model_type)
    architectures = _rename_architectures(config_dict.get("architectures"), model_type, to_base=False)
    return {
        "attn_res_scale_norm_eps": True,
        **config_dict,
        "model_type": AttnResConfig.model_type,
        "base_model_type": model_type,
        "architectures": architectures,
    }


def _rename_architectures(architectures: list[str] | None, base_model_type: str, to_base: bool) -> list[str] | None:
    """`Qwen3ForCausalLM` <-> `AttnResForCausalLM`; names that are of neither kind stay."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architectures is None:
        return None
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(base_model_type)
    if causal_lm is None:  # it has been registered
        causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING[base_config_class(base_model_type)].__name__
    base = re.sub("ForCausalLM$|LMHeadModel$", "", causal_lm)
    old, new, old_lm, new_lm = base, "AttnRes", causal_lm, "AttnResForCausalLM"
    if to_base:
        old, new, old_lm, new_lm = new, old, new_lm, old_lm
    return [new_lm if name == old_lm else re.sub(rf"^{old}(?=For|Model$)", new, name) for name in architectures]


def _per_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """What a config has for single layers, as the keyword that it came from."""
    spec = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else {"per_layer_config": copy.deepcopy(spec.per_layer_overrides)}


def _copy_private(source: PreTrainedConfig, target: PreTrainedConfig):
    """Copy where a config came from and which implementations it asks for, which are no keywords of `__init__`."""
    for name in ("_attn_implementation_internal", "_experts_implementation_internal", "_output_attentions"):
        target.__dict__[name] = vars(source)[name]
    target._name_or_path = source._name_or_path


__all__ = ["AttnResConfig"]
