# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What is looked at before a checkpoint is converted: its type, config, head, tensors and queries."""

import re
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..base.config import check_base_model_type, classes_on, has_own_classes, is_encoder_decoder, rename_architectures
from ..base.probe import probe_stacks, probe_sublayers, refuse_by_config
from ..checkpoints.checkpoint import ATTNRES_TYPES, QUERY_NAMES, ZERO_AT_FIRST, Checkpoint
from ..configuration_attnres import AttnResConfig
from ..model_cards.card import PIPELINE_TAGS
from ..modeling_attnres import (
    AttnResForQuestionAnswering,
    AttnResForSequenceClassification,
    AttnResForTokenClassification,
    depth_of_weights,
)
from ..multimodal_attnres import AttnResForConditionalGeneration, is_multimodal
from ..multimodal_attnres import config_class_of as multimodal_config_class
from ..utils.untrusted import in_one_line
from .running import quiet_loading


POSITIVE_FIELDS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size"),
)
HEADS = {
    head.__name__: head
    for head in (AttnResForSequenceClassification, AttnResForTokenClassification, AttnResForQuestionAnswering)
}
MULTIMODAL_NAME = AttnResForConditionalGeneration.__name__
# The first number in the name of a tensor
LAYER_NUMBERS = re.compile(r"^.*?\.(\d+)\.", re.MULTILINE)


def check_base_type(model_type: str):
    """Raise a `ValueError` if no checkpoint of this type can be converted."""
    if model_type in ATTNRES_TYPES:
        return
    if is_multimodal(model_type):
        multimodal_config_class(model_type)
    else:
        check_base_model_type(model_type, has_lm_head=not has_own_classes(model_type))


def refuse_multimodal(checkpoint: Checkpoint):
    """Raise a `ValueError` for a model of images and text, where it is to be self-contained."""
    if checkpoint.is_multimodal:
        raise ValueError(
            f"`{checkpoint.name}` cannot be self-contained: its base's code creates the language model, and it"
            " cannot load code from a folder. Leave `--self-contained` out: it loads where attnres is imported."
        )


def refuse_other_naming(checkpoint: Checkpoint):
    """Raise a `ValueError` for an AttnRes checkpoint of another implementation, which has queries to be kept."""
    for name in checkpoint.weight_map:
        if name.endswith("_res_proj.weight"):
            raise ValueError(
                f"`{checkpoint.name}` has depth queries of another implementation (`{name}`): use `attnres import`."
            )


def refuse_trained_queries(checkpoint: Checkpoint, consequence: str):
    """Raise a `ValueError` that says how large the queries are, unless all are zero."""
    names = checkpoint.query_names(ZERO_AT_FIRST)
    if not names:
        name = checkpoint.query_prefixes[0] + QUERY_NAMES[0]
        raise ValueError(f"`{checkpoint.name}` lacks the tensor `{name}`, so it is not a complete AttnRes checkpoint.")
    for tensor in checkpoint.tensors(names).values():
        norms = tensor.float().flatten(1).norm(dim=-1)
        if norms.count_nonzero():
            raise ValueError(
                f"`{checkpoint.name}` has trained queries, {norms.count_nonzero()} of {len(norms)} are not zero, the"
                f" largest of norm {norms.max():.3g} at site {norms.argmax()}: {consequence}."
            )


def refuse_unscaled_eps(checkpoint: Checkpoint, consequence: str):
    """Raise a `ValueError` if the checkpoint was not converted but trained from scratch."""
    if not checkpoint.text_config.attn_res_scale_norm_eps:
        raise ValueError(
            f"`{checkpoint.name}` has `attn_res_scale_norm_eps=False`, as models trained from scratch do:"
            f" {consequence}."
        )


def _refuse(checkpoint: Checkpoint, field: str, value: Any, allowed: str):
    raise ValueError(f"config.json of `{checkpoint.name}` is not valid: `{field}={value!r}` must be {allowed}.")


def check_config(checkpoint: Checkpoint):
    """Raise a `ValueError` for values that configuration classes let through and no model can have."""
    config = checkpoint.text_config
    _check_numbers(checkpoint, config)
    for field in ("hidden_act", "hidden_activation"):
        value = getattr(config, field, None)
        if value is not None and value not in ACT2FN:
            _refuse(checkpoint, field, value, f"one of {', '.join(ACT2FN)}")
    if checkpoint.depth_config is None:
        check_base_model_type(config.model_type)
        refuse_by_config(config)
    dtype = checkpoint.config.dtype
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        _refuse(checkpoint, "dtype", dtype, "one of float32, bfloat16, float16")
    _check_depth(checkpoint, config)
    architectures = checkpoint.config.architectures
    has_own_classes = checkpoint.is_attnres or checkpoint.is_multimodal or checkpoint.own_class_name is not None
    if not is_known_class(checkpoint) and has_own_classes:
        _refuse(checkpoint, "architectures", architectures, f"one of {', '.join(known_classes(checkpoint))}")


def _check_numbers(checkpoint: Checkpoint, config: PreTrainedConfig):
    for field in POSITIVE_FIELDS:
        value = vars(config).get(config.attribute_map.get(field, field))  # some are of single layers
        if value == getattr(type(config), field, None):  # some have 0 for none
            continue
        for number in value if isinstance(value, list) and value else [value]:  # one for each kind of expert
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                _refuse(checkpoint, field, value, "a number >= 1")
    for field, value in vars(config).items():
        is_eps = field.endswith(("_eps", "epsilon")) and field != "attn_res_scale_norm_eps"
        if is_eps and value is not None and (not isinstance(value, int | float) or not 0 <= value < 1):
            _refuse(checkpoint, field, value, "a number >= 0 and below 1")


def _check_depth(checkpoint: Checkpoint, config: PreTrainedConfig):
    if is_encoder_decoder(checkpoint.base_model_type):
        _check_stacks(checkpoint, config)
        return
    names = [name for name in checkpoint.weight_map if name.startswith(checkpoint.prefix)]
    num_layers = config.num_hidden_layers
    depth = 1 + max((int(number) for number in LAYER_NUMBERS.findall("\n".join(names))), default=-1)
    # Fewer may be meant, as some carry layers that predict further tokens; and LongCat-Flash counts halves of layers
    if num_layers > 2 * depth or num_layers > depth < num_layers_of(config):
        _refuse(checkpoint, "num_hidden_layers", num_layers, f"at most {depth}, the layers that the weights have")
    further = depth_of_weights(names, num_layers)
    if further > num_layers:
        allowed = f"{further}, or the weights without the layers that it leaves out"
        _refuse(checkpoint, "num_hidden_layers", num_layers, allowed)


def _check_stacks(checkpoint: Checkpoint, config: PreTrainedConfig):
    """The same for an encoder-decoder, whose configs have names of their own for the two numbers of layers."""
    counts = config.sublayers_of_stacks() if isinstance(config, AttnResConfig) else probe_stacks(config)
    for prefix, sublayers in zip(checkpoint.query_prefixes, counts):
        names = "\n".join(name for name in checkpoint.weight_map if name.startswith(prefix))
        depth = 1 + max((int(number) for number in LAYER_NUMBERS.findall(names)), default=-1)
        if depth != len(sublayers):
            raise ValueError(
                f"config.json of `{checkpoint.name}` is not valid: it has {len(sublayers)} layers for `{prefix}*`,"
                f" and the weights have {depth}."
            )


def known_classes(checkpoint: Checkpoint) -> list[str]:
    """Names of transformers' classes for a checkpoint of this type, as `architectures` has one."""
    if checkpoint.is_multimodal:
        return [MULTIMODAL_NAME if checkpoint.is_attnres else checkpoint.lm_class.__name__]
    possible = classes_on(checkpoint.base_model_type)
    names = [name for name in PIPELINE_TAGS if name in possible]
    if checkpoint.is_attnres:
        return names
    return rename_architectures(names, checkpoint.config.model_type, to_base=True) or []


def is_known_class(checkpoint: Checkpoint) -> bool:
    architectures = checkpoint.config.architectures
    return not architectures or architectures[0] in known_classes(checkpoint)


def num_layers_of(config: PreTrainedConfig) -> int:
    return len(config.sublayers_per_layer() if isinstance(config, AttnResConfig) else probe_sublayers(config))


def check_head(checkpoint: Checkpoint, config: AttnResConfig):
    """Raise a `ValueError` if a checkpoint has another head than the AttnRes model for the same task."""
    architecture = (config.architectures or [None])[0]
    if architecture not in HEADS or checkpoint.own_class_name is not None:  # loaded with its head, by `check_tensors`
        return
    with torch.device("meta"):
        model = HEADS[architecture](config)
    trunk = {id(tensor) for tensor in model.base_model.state_dict(keep_vars=True).values()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in trunk:
            continue
        found = checkpoint.tensors([name])[name].shape if name in checkpoint.weight_map else None
        if found != tensor.shape:
            is_there = "is not there" if found is None else f"has the shape {list(found)}"
            raise ValueError(
                f"The head of `{checkpoint.name}` is not that of an {architecture}, in which `{name}` has the shape"
                f" {list(tensor.shape)}: here it {is_there}. Convert the model that it was trained from, and train a"
                " head on that."
            )


def _reason_against_class(checkpoint: Checkpoint, unexpected: list[str]) -> str | None:
    """Why a checkpoint whose class transformers does not know is not the causal language model of its type.

    Those published with code of their own have other names than transformers' classes, which load them by their type.
    Those of draft models or other heads have other tensors.
    """
    architectures, lm_class = checkpoint.config.architectures, checkpoint.lm_class.__name__
    if not checkpoint.has_lm_head:
        return (
            f"`architectures={architectures}` is not a class of this type, and its tensors are not those of {lm_class}"
        )
    if unexpected:
        return (
            f"`architectures={architectures}` is not a class of this type, and it has tensors that {lm_class} has not,"
            f" among them `{unexpected[0]}`"
        )
    return None


def check_tensors(checkpoint: Checkpoint):
    """Raise a `ValueError` unless every tensor that the architecture needs is there, in its shape; reads none."""
    message = None
    with quiet_loading() as messages:
        try:
            _, info = checkpoint.auto_class.from_pretrained(
                checkpoint.folder,
                device_map="meta",
                output_loading_info=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (RuntimeError, ValueError) as error:
            # The names are in the report that transformers logs, a table of tensor, status and details
            rows = re.findall(
                r"^(\S.*?) +\| (?:MISSING|MISMATCH|CONVERSION) +\|(.*)", "\n".join(messages), re.MULTILINE
            )
            if rows:
                named = f"`{rows[0][0]}` {rows[0][1].strip()}".strip()
                message = f"tensors are missing or have another shape, among them {named}"
            else:
                message = f"it does not load: {in_one_line(error).rstrip('.')}"
        except Exception as error:
            message = f"no model can be built from its config.json: {in_one_line(error)}"
        else:
            missing = sorted(info["missing_keys"])
            if missing:
                message = f"{len(missing)} tensors are missing, among them `{missing[0]}`"
            elif not is_known_class(checkpoint):
                message = _reason_against_class(checkpoint, sorted(info["unexpected_keys"]))
    if message is not None:
        raise ValueError(
            f"`{checkpoint.name}` is not a complete {checkpoint.config.model_type} checkpoint: {message}."
        )
