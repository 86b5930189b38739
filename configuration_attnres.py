# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0. trf-ignore: TRF028
"""AttnRes configuration: that of a base, any decoder of transformers, and the fields of depth attention."""

import copy
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import auto_docstring

from .base.config import (
    MIRRORED_ATTRIBUTES,
    adopt_base_dict,
    base_config_class,
    base_keywords,
    check_base_model_type,
    check_known,
    classes_on,
    copy_private,
    is_encoder_decoder,
    is_known,
    is_public_or_field,
    per_layer,
    rename_architectures,
    type_with_article,
)
from .depth.choices import READS


def remote_code_auto_map(base_model_type: str) -> dict[str, str]:
    """What a checkpoint that carries its code tells the Auto classes: which of them can load it, and with what."""
    classes = {
        name.replace("AttnRes", "Auto" if name == "AttnResModel" else "AutoModel"): name
        for name in classes_on(base_model_type)
    }
    return {
        "AutoConfig": "configuration_attnres.AttnResConfig",
        **{auto_class: f"modeling_attnres.{name}" for auto_class, name in classes.items()},
    }


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_one_of(choices: tuple[str, ...], value: Any) -> bool:
    return isinstance(value, str) and value in choices


# Of each field a check of its value, and the allowed values in words
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attn_res_block_size": (is_count, "a number of sublayers >= 1 (1 is Full AttnRes), an int"),
    "attn_res_norm_eps": (lambda x: isinstance(x, float) and 0 <= x < math.inf, "a float >= 0, and finite"),
    "attn_res_scale_norm_eps": (lambda x: isinstance(x, bool), "True or False"),
    "attn_res_sublayers": (
        lambda x: x is None or _is_list_of_counts(x) or isinstance(x, list) and all(map(_is_list_of_counts, x)),
        "None, or a list of ints >= 1, one of each layer (of an encoder-decoder two lists)",
    ),
    "attn_res_num_heads": (is_count, "a number of heads >= 1 that divides `hidden_size`, an int"),
    "attn_res_query_rank": (lambda x: x is None or is_count(x), "None, or a rank >= 1, an int"),
    **{name: (partial(_is_one_of, of), f"one of {', '.join(of)}") for name, of in READS.items()},
}


def _check_field(name: str, value: Any):
    if name == "base_model_type":
        check_base_model_type(value)
    elif name in _FIELDS and not _FIELDS[name][0](value):
        raise ValueError(f"`{name}={value!r}` must be {_FIELDS[name][1]}.")


def check_read(config: PreTrainedConfig):
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


def check_fields_first(config_class: Any) -> Any:
    """Check our fields before `@strict` does: it names only the type, and these errors name the allowed values."""
    strict_setattr = config_class.__setattr__

    def __setattr__(self, name: str, value: Any):
        _check_field(name, value)
        strict_setattr(self, name, value)

    config_class.__setattr__ = __setattr__
    return config_class


@auto_docstring(checkpoint="attnres")
@check_fields_first
@strict
class AttnResConfig(PreTrainedConfig):
    r"""
    base_model_type (`str`, *optional*, defaults to `"llama"`):
        Model type of the decoder or encoder whose layers are used. Every field of that architecture's own
        configuration is a field of this one.
    attn_res_block_size (`int`, *optional*, defaults to 8):
        Number of sublayers (an attention or an MLP each; a decoder layer has two) whose outputs are summed into one
        source. 1 is Full AttnRes. The last block is shorter if this does not divide the number of sublayers. The
        encoder and the decoder of one model both have blocks of this size.
    attn_res_norm_eps (`float`, *optional*, defaults to 1e-06):
        Epsilon of the RMSNorm on the keys of depth attention.
    attn_res_scale_norm_eps (`bool`, *optional*, defaults to `False`):
        Whether every read is multiplied by its number of sources (by 2 if weights are a sigmoid, and by one more than
        the number of sources if they are `"softmax1"`). With queries of zero, a read is then equal to the residual
        stream, and the model computes exactly what its base computes. For the norm that follows, this is the same as
        dividing its epsilon by the square of that number, hence the name. In code, but not in files, the field is also
        called `attn_res_scale_reads`.
    attn_res_sublayers (`list[int]` or `list[list[int]]`, *optional*):
        How many times each layer adds to the residual stream, usually 2. An encoder-decoder has two residual streams:
        a list for the layers of the encoder, and one for those of the decoder. If it is missing or does not match the
        number of layers, it is counted in a run of the base without weights.
    attn_res_num_heads (`int`, *optional*, defaults to 1):
        Number of heads of a read. Each head reads its slice of the hidden dimension with separate weights.
    attn_res_query (`str`, *optional*, defaults to `"learned"`):
        How queries are made: `"learned"` is one vector per site, `"input"` a projection of the newest source at the
        site, and `"hybrid"` the sum of both.
    attn_res_query_rank (`int`, *optional*):
        Rank of that projection. With `None`, it is a full matrix for each site.
    attn_res_weights (`str`, *optional*, defaults to `"softmax"`):
        How scores become weights: `"softmax"`, `"sigmoid"`, or `"softmax1"`, a softmax with an additional score of
        zero whose weight reads nothing.
    attn_res_open_block (`str`, *optional*, defaults to `"sum"`):
        How the open block is read: as the `"sum"` of its outputs, or `"each"` output as a source.
    attn_res_stream (`str`, *optional*, defaults to `"replaced"`):
        What a sublayer gets: with `"replaced"` the mix of the sources instead of the residual stream, as in the paper;
        with `"kept"` the residual stream plus the mix (arXiv 2605.18855).

    ```python
    >>> from attnres import AttnResConfig, AttnResForCausalLM
    >>> from transformers import Qwen3Config

    >>> config = AttnResConfig.from_base_config(Qwen3Config(num_hidden_layers=4), block_size=2)
    >>> model = AttnResForCausalLM(config)
    ```"""

    model_type = "attnres"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # the latter since transformers 5.24
    # Engines that follow such a plan send one tensor, and AttnRes needs the closed blocks too. transformers' `pp_size`
    # does without a plan, see `carry_streams`
    base_model_pp_plan = None
    base_model_fsdp_plan = {**PreTrainedConfig.base_model_fsdp_plan, "depth_queries": "keep_full_weight"}

    base_model_type: str = "llama"
    attn_res_block_size: int = 8
    attn_res_norm_eps: float = 1e-6
    attn_res_scale_norm_eps: bool = False
    attn_res_sublayers: list[int] | list[list[int]] | None = None
    attn_res_num_heads: int = 1
    attn_res_query: str = "learned"
    attn_res_query_rank: int | None = None
    attn_res_weights: str = "softmax"
    attn_res_open_block: str = "sum"
    attn_res_stream: str = "replaced"
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs):
        base_class = base_config_class(self.base_model_type)
        if (scale_reads := kwargs.pop("attn_res_scale_reads", None)) is not None:
            self.attn_res_scale_reads = scale_reads
        if kwargs.get("model_type", self.model_type) not in (self.model_type, self.base_model_type):
            raise ValueError(
                f"`model_type={kwargs['model_type']!r}` contradicts `base_model_type={self.base_model_type!r}`."
            )
        check_known(kwargs, base_class, [field.name for field in fields(type(self))])
        kwargs.pop("model_type", None)
        keywords = base_keywords(base_class) | {"per_layer_config"}
        base_kwargs = {name: kwargs.pop(name) for name in keywords & kwargs.keys()}
        if self.tie_word_embeddings is not None:
            base_kwargs["tie_word_embeddings"] = self.tie_word_embeddings
        base_config = base_class(**base_kwargs)

        # Straight into the instance: an attribute map that is half set would misdirect `setattr`
        for name in MIRRORED_ATTRIBUTES:
            if hasattr(base_class, name):
                self.__dict__[name] = getattr(base_class, name)
        for name, value in vars(base_config).items():
            if name in keywords or name == "_heterogeneity_spec":
                self.__dict__[name] = value
        check_read(self)
        # TRL reads this attribute where transformers has no class of the architecture's name
        super().__post_init__(**{"auto_map": {}, **kwargs})

    def __getattr__(self, name: str):
        # Asked for what is not found: properties and methods of the base's class
        base_model_type = self.__dict__.get("base_model_type")
        name = self.__dict__.get("attribute_map", {}).get(name, name)
        # Without the checks of `base_config_class`, which a compiler cannot follow: the type was checked before
        for base in () if base_model_type is None else CONFIG_MAPPING[base_model_type].__mro__:
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
    def attn_res_scale_reads(self) -> bool:
        """Another name for `attn_res_scale_norm_eps`."""
        return self.attn_res_scale_norm_eps

    @attn_res_scale_reads.setter
    def attn_res_scale_reads(self, value: bool):
        self.attn_res_scale_norm_eps = value

    @property
    def num_sites(self) -> int:
        """Number of places where the model reads over depth: before every sublayer, and after the last one.

        Of an encoder-decoder those of both.
        """
        return sum(sum(sublayers) + 1 for sublayers in self.sublayers_of_stacks())

    def sublayers_per_layer(self) -> list[int]:
        """How many times each layer adds to the residual stream, the layers of an encoder first."""
        return [count for sublayers in self.sublayers_of_stacks() for count in sublayers]

    def sublayers_of_stacks(self) -> list[list[int]]:
        """How many times each layer adds to its residual stream: of an encoder and a decoder, or of the one stack.

        Counted once, in a run without weights.

        Raises:
            ValueError: if the base does more to its residual stream than read it and add to it.
        """
        if not self._has_sublayers():
            from .base.probe import probe_stacks

            counted = probe_stacks(self.to_base_config())
            self.attn_res_sublayers = counted if is_encoder_decoder(self.base_model_type) else counted[0]
        found: Any = self.attn_res_sublayers
        return found if is_encoder_decoder(self.base_model_type) else [found]

    def _has_sublayers(self) -> bool:
        """Whether the field has a number for each layer, as far as the config alone tells."""
        found: Any = self.attn_res_sublayers
        # By the type: a head that uses an encoder alone changes `is_encoder_decoder` in the config
        if is_encoder_decoder(self.base_model_type) and found is not None:
            return len(found) == 2 and all(isinstance(of_stack, list) for of_stack in found)
        return found is not None and len(found) == self.num_hidden_layers

    @classmethod
    def from_base_config(
        cls, base_config: PreTrainedConfig, block_size: int | None = None, num_blocks: int | None = None, **kwargs
    ) -> "AttnResConfig":
        """Make the configuration of an AttnRes model from that of its base. The inverse of `to_base_config`.

        Args:
            base_config (`PreTrainedConfig`):
                Configuration of a supported architecture.
            block_size (`int`, *optional*):
                Sublayers per block, 8 if neither this nor `num_blocks` is given.
            num_blocks (`int`, *optional*):
                Number of blocks, at most the number of sublayers. The block size is the smallest one that gives no
                more blocks than this; of an encoder and a decoder, in the one with more sublayers.
            kwargs:
                Other fields of `AttnResConfig`, such as `attn_res_scale_norm_eps`.

        Raises:
            ValueError: if the base is not supported, both numbers are given, or one is impossible.
        """
        from .base.probe import probe_stacks

        if not isinstance(base_config, PreTrainedConfig):
            raise ValueError(
                "`base_config` must be the configuration of a base, such as `Qwen3Config()` or"
                f" `AutoConfig.from_pretrained(...)`, not {type_with_article(base_config)}."
            )
        check_base_model_type(base_config.model_type)
        if "attn_res_block_size" in kwargs:
            raise ValueError("Pass `block_size`, not `attn_res_block_size`, to `from_base_config`.")
        check_known(kwargs, type(base_config), [*(field.name for field in fields(cls)), "attn_res_scale_reads"])
        if block_size is not None and num_blocks is not None:
            raise ValueError(f"`block_size={block_size}` and `num_blocks={num_blocks}` contradict: give one of them.")
        if num_blocks is not None and not is_count(num_blocks):
            raise ValueError(f"`num_blocks={num_blocks!r}` must be a number of blocks >= 1, an int.")
        stacks = probe_stacks(base_config)
        if num_blocks is not None:
            num_sublayers = max(map(sum, stacks))
            if num_blocks > num_sublayers:
                raise ValueError(
                    f"`num_blocks={num_blocks}` is more than the {num_sublayers} sublayers of this base. With a block"
                    " for each of them it is Full AttnRes: `block_size=1`."
                )
            block_size = -(-num_sublayers // num_blocks)
        if block_size is not None:
            kwargs["attn_res_block_size"] = block_size

        values = copy.deepcopy(vars(base_config))
        values = {name: value for name, value in values.items() if is_public_or_field(name, type(base_config))}
        for name in ("auto_map", *MIRRORED_ATTRIBUTES):  # the first names the base's code
            values.pop(name, None)
        values["architectures"] = rename_architectures(values["architectures"], base_config.model_type, to_base=False)
        values.update(per_layer(base_config))
        values |= {"attn_res_sublayers": stacks if len(stacks) > 1 else stacks[0], **kwargs}
        config = cls.from_dict({**values, "base_model_type": base_config.model_type, "model_type": cls.model_type})
        copy_private(base_config, config)
        return config

    def to_base_config(self) -> PreTrainedConfig:
        """Make the configuration of the base. The inverse of `from_base_config`."""
        base_class = base_config_class(self.base_model_type)
        left_out = {"base_model_type", "auto_map", "output_depth_attentions", *MIRRORED_ATTRIBUTES}
        values = {
            name: value
            for name, value in copy.deepcopy(vars(self)).items()
            if is_public_or_field(name, base_class) and not name.startswith("attn_res_") and name not in left_out
        }
        if values["tie_word_embeddings"] is None and "tie_word_embeddings" not in {f.name for f in fields(base_class)}:
            del values["tie_word_embeddings"]  # which the config around it has
        values["architectures"] = rename_architectures(values["architectures"], self.base_model_type, to_base=True)
        base_config = base_class(**values, **per_layer(self))
        copy_private(self, base_config)
        return base_config

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("model_type") != cls.model_type and "attn_res_block_size" in config_dict:
            raise ValueError(
                f"`{pretrained_model_name_or_path}` is an AttnRes checkpoint in Kimi's naming, whose block size counts"
                " layers. `attnres import` makes it one of this kind."
            )
        return adopt_base_dict(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, unknown fields become attributes, because files may contain some."""
        config_dict = adopt_base_dict(config_dict)
        base_class = base_config_class(config_dict.get("base_model_type", cls.base_model_type))
        own = {field.name for field in fields(cls)}
        others = {k: v for k, v in config_dict.items() if k not in own and not is_known(k, base_class)}
        result = super().from_dict({k: v for k, v in config_dict.items() if k not in others}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for name, value in others.items():
            if name not in kwargs:
                setattr(config, name, value)
        return result

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As in transformers. The code is saved as well if the config names it or its class is registered."""
        config_class = type(self)
        registered = vars(config_class).get("_auto_class")
        if not (getattr(self, "auto_map", None) or registered):
            return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        self.auto_map: dict[str, str] = remote_code_auto_map(self.base_model_type)
        config_class._auto_class = None  # transformers copies from one flat folder, which the package is not
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            config_class._auto_class = registered
        _write_code(save_directory)
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", None) or os.path.basename(os.path.abspath(save_directory))
            self.push_to_hub(repo_id, **kwargs)

    def _get_generation_parameters(self) -> dict[str, Any]:
        # What transformers refuses to save; fields of the base's own may be called like such parameters
        own = base_keywords(CONFIG_MAPPING[self.base_model_type])  # type: ignore[arg-type]
        return {name: value for name, value in super()._get_generation_parameters().items() if name not in own}

    def _remove_keys_not_serialized(self, d: dict[str, Any]):
        for name in MIRRORED_ATTRIBUTES:
            d.pop(name, None)
        for name in ("auto_map", "attn_res_sublayers", "attn_res_query_rank"):
            if not d.get(name):
                d.pop(name, None)
        # Files written before these fields existed do not have them
        for name in (*READS, "attn_res_num_heads"):
            if d.get(name) == getattr(type(self), name):
                d.pop(name)
        super()._remove_keys_not_serialized(d)


def _write_code(folder: str | os.PathLike):
    """Write the code of the model into the folder of a checkpoint; code that has come with one stays as it is."""
    if not __name__.startswith("transformers_modules."):
        try:  # transformers wants to find every package that is imported elsewhere
            from attnres.checkpoints.remote_code import write_code
        except ImportError:
            raise
        write_code(folder)
        return
    for path in (__file__, *get_relative_import_files(__file__)):
        shutil.copy(path, folder)


__all__ = ["AttnResConfig"]
