# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The fields of a config that begin with `attn_res_`: what may be in them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from .base.config import check_base_model_type


# What reads over depth may be like; the first is the paper's own. New ones go to the end, and none is taken out: files
# of adapters hold the places
READS = {
    "attn_res_query": ("learned", "input", "hybrid"),
    "attn_res_weights": ("softmax", "sigmoid", "softmax1"),
    "attn_res_open_block": ("sum", "each"),
}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_one_of(choices: tuple[str, ...], value: Any) -> bool:
    return isinstance(value, str) and value in choices


# Of each field a check of its value, and the allowed values in words
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attn_res_block_size": (is_count, "a number of sublayers >= 1 (1 is Full AttnRes), an int"),
    "attn_res_norm_eps": (lambda x: isinstance(x, float) and 0 <= x < math.inf, "a float >= 0, and finite"),
    "attn_res_scale_norm_eps": (lambda x: isinstance(x, bool), "True or False"),
    "attn_res_sublayers": (
        lambda x: x is None or isinstance(x, list) and all(map(is_count, x)),
        "None, or a list of ints >= 1, one of each layer",
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
