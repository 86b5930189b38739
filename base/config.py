# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What is known of the configuration of a base: its class, the fields that it gives a meaning to, its other names."""

import contextlib
import copy
import difflib
import functools
import importlib
import inspect
import re
from dataclasses import fields
from typing import Any

from transformers import __version__
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig


# Decoders that would pass the probe, and why they are refused all the same
EXCEPTIONS = dict.fromkeys(
    ("attnres", "attnres_multimodal", "inkling2", "inkling2_text"), "it is an attention-residual architecture already"
)

# Our classes on encoders, and where transformers has the base's
ENCODER_CLASSES = {
    "AttnResModel": "MODEL_MAPPING",
    "AttnResForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AttnResForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "AttnResForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "AttnResForCTC": "MODEL_FOR_CTC_MAPPING",
    "AttnResForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AttnResForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AttnResForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}

# Those that transformers' generic heads make on decoders
_DECODER_HEADS = ("AttnResForSequenceClassification", "AttnResForTokenClassification", "AttnResForQuestionAnswering")

SEQ2SEQ_CLASSES = {
    "AttnResForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AttnResForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
}
ENCODER_DECODER_CLASSES = {name: ENCODER_CLASSES[name] for name in ("AttnResModel", *_DECODER_HEADS)} | SEQ2SEQ_CLASSES

# In transformers' names of mappings, the tasks of models that generate text or sound
_GENERATING = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM"),
    *("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM"),
)

# Class attributes of a base config that transformers looks up on the config: ours belong to an instance
MIRRORED_ATTRIBUTES = (
    "attribute_map base_model_tp_plan base_model_ep_plan default_theta sub_configs ignore_keys_at_rope_validation"
).split()
# Keywords of `PreTrainedConfig.__init__` that are not dataclass fields
_GENERIC_KEYWORDS = set(
    """
    name_or_path model_type torch_dtype num_labels output_attentions attn_implementation experts_implementation
    per_layer_config auto_map quantization_config distributed_config gradient_checkpointing tokenizer_class
    tie_last_hidden_states is_decoder is_causal output_depth_attentions ignore_keys_at_rope_validation
    """.split()
)
_ROPE_KEYWORDS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}


def check_base_model_type(base_model_type: str, has_lm_head: bool = False):
    """Raise a `ValueError` that says why, if `base_model_type` cannot be a base.

    Args:
        has_lm_head: whether it has to be one with a causal language model, and not only inside a multimodal one.
    """
    if not isinstance(base_model_type, str):
        raise ValueError(
            f"`base_model_type={base_model_type!r}` must be the model type of a base, a string such as 'qwen3',"
            f" not {type_with_article(base_model_type)}."
        )
    if base_model_type in EXCEPTIONS:
        raise ValueError(f"`base_model_type={base_model_type!r}` is not supported: {EXCEPTIONS[base_model_type]}.")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if base_model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    # Others may have been registered, with code of their own
    config_class = CONFIG_MAPPING[base_model_type] if base_model_type in CONFIG_MAPPING else None
    if config_class is not None and config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    inside = config_class is not None and is_inside_multimodal(config_class)  # type: ignore[arg-type]
    if not has_lm_head and (inside or has_own_classes(base_model_type)):
        return
    close = difflib.get_close_matches(base_model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    if inside:
        hint = " Its models are inside multimodal ones, which are converted whole."
    elif has_own_classes(base_model_type):
        kind = "an encoder-decoder" if is_encoder_decoder(base_model_type) else "an encoder"
        hint = f" It is {kind}, and this is for decoders."
    raise ValueError(
        f"`base_model_type={base_model_type!r}` is not supported: transformers {__version__} has no causal"
        f" language model{'' if has_lm_head else ' and no encoder'} of this type.{hint}"
    )


def is_encoder(base_model_type: str) -> bool:
    """Whether models of a type are of text or images and generate nothing, such as `"modernbert"` and `"vit"`."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if base_model_type in EXCEPTIONS or base_model_type not in CONFIG_MAPPING:
        return False
    config_class = CONFIG_MAPPING[base_model_type]
    if "text_config" in config_class.sub_configs or is_inside_multimodal(config_class):  # type: ignore[arg-type]
        return False
    generate = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in _GENERATING]
    return config_class in modeling_auto.MODEL_MAPPING and not any(config_class in mapping for mapping in generate)


def is_encoder_decoder(base_model_type: str) -> bool:
    """Whether models of a type have an encoder, and a decoder that generates text, such as `"t5"` and `"whisper"`."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if base_model_type in EXCEPTIONS or base_model_type not in CONFIG_MAPPING:
        return False
    config_class = CONFIG_MAPPING[base_model_type]
    mappings = [getattr(modeling_auto, name) for name in SEQ2SEQ_CLASSES.values()]
    return config_class.is_encoder_decoder and any(config_class in mapping for mapping in mappings)


def has_own_classes(base_model_type: str) -> bool:
    """Whether the heads of a type are the base's own: of decoders they are a language model's, or generic."""
    return is_encoder(base_model_type) or is_encoder_decoder(base_model_type)


def own_class(base_model_type: str, name: str) -> Any:
    """Of a base with classes of its own, that for one of ours; `None` if it has none."""
    from transformers.models.auto import modeling_auto

    mappings = ENCODER_DECODER_CLASSES if is_encoder_decoder(base_model_type) else ENCODER_CLASSES
    if name not in mappings:
        return None
    mapping, config_class = getattr(modeling_auto, mappings[name]), base_config_class(base_model_type)
    found = mapping[config_class] if config_class in mapping else None
    return found[0] if isinstance(found, tuple) else found


def classes_on(base_model_type: str) -> list[str]:
    """The names of our classes of models that can be made on a base."""
    if has_own_classes(base_model_type):
        names = dict.fromkeys([*ENCODER_CLASSES, *ENCODER_DECODER_CLASSES])
        return [name for name in names if own_class(base_model_type, name) is not None]
    # RoBERTa-PreLayerNorm is a decoder for transformers, and also a masked language model
    others = [name for name in ENCODER_CLASSES if name not in ("AttnResModel", *_DECODER_HEADS)]
    own = [name for name in others if own_class(base_model_type, name) is not None]
    return ["AttnResModel", "AttnResForCausalLM", *own, *_DECODER_HEADS]


@functools.cache
def is_inside_multimodal(config_class: type[PreTrainedConfig]) -> bool:
    """Whether it is the `text_config` of multimodal models whose code is beside it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    folder = config_class.__module__.rpartition(".")[0].rpartition(".")[2]
    outer = [name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if model_type_to_module_name(name) == folder]
    classes = [CONFIG_MAPPING[name] for name in outer]
    return any(
        of_text is config_class or of_text is not None and type(outer_class().text_config) is config_class
        for outer_class in classes
        for of_text in [outer_class.sub_configs.get("text_config")]
    )


def decoder_class(config_class: type[PreTrainedConfig]) -> Any:
    """The class of a base's model without a head, `None` if there is none.

    `AutoModel` does not know all language models of multimodal ones. Those are found in the code beside their config:
    the one class of models that is made of it and does not generate.
    """
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    with contextlib.suppress(ValueError):  # of a name that is not there
        if config_class in MODEL_MAPPING:
            found = MODEL_MAPPING[config_class]
            return found[0] if isinstance(found, tuple) else found
    if not is_inside_multimodal(config_class):  # type: ignore[arg-type]
        return None
    code = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    found = [
        of_code
        for of_code in vars(code).values()
        if isinstance(of_code, type)
        and issubclass(of_code, PreTrainedModel)
        and getattr(of_code, "config_class", None) is config_class
        and not issubclass(of_code, GenerationMixin)
        and "forward" in vars(of_code)
    ]
    return found[0] if len(found) == 1 else None


def type_with_article(value: Any) -> str:
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def base_config_class(base_model_type: str) -> type[PreTrainedConfig]:
    """The configuration class of a base architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    check_base_model_type(base_model_type)
    return CONFIG_MAPPING[base_model_type]


@functools.lru_cache
def base_keywords(base_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Names that a base architecture's own config gives a meaning to, generic ones left out."""
    names = {field.name for field in fields(base_class)} | {*vars(base_class())} | _ROPE_KEYWORDS
    names |= {*base_class.attribute_map, *base_class.attribute_map.values()}
    # Keywords that only its `__post_init__` knows: spellings of the released checkpoints
    names |= {*re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', inspect.getsource(base_class.__post_init__))}
    generic = {field.name for field in fields(PreTrainedConfig)} | _GENERIC_KEYWORDS
    return frozenset(name for name in names - generic if is_public_or_field(name, base_class))


def is_public_or_field(name: str, base_class: type[PreTrainedConfig]) -> bool:
    """Whether a config takes it as a keyword: private attributes are not, unless they are dataclass fields."""
    return not name.startswith("_") or name in {field.name for field in fields(base_class)}


def is_known(name: str, base_class: type[PreTrainedConfig]) -> bool:
    return (
        name in base_keywords(base_class)  # type: ignore[arg-type]
        or name in _GENERIC_KEYWORDS
        or name in GenerationConfig._get_default_generation_params()
        or name.startswith("_")
    )


def check_known(kwargs: dict[str, Any], base_class: type[PreTrainedConfig], own: list[str]):
    """Raise a `ValueError` for a keyword that is neither of the base, nor generic, nor of our `own` fields."""
    for name, value in kwargs.items():
        if name in own or is_known(name, base_class):
            continue
        close = difflib.get_close_matches(name, [*base_keywords(base_class), *own], n=3)  # type: ignore[arg-type]
        ours = [name for name in own if name.startswith(("base_model_type", "attn_res_"))]
        kind = f"{'an AttnRes model on base' if ours else 'a model of type'} `{base_class.model_type}`"
        raise ValueError(
            f"Unknown field `{name}={value!r}` for {kind}. Allowed are the fields of `{base_class.__name__}`"
            + (f" and {', '.join(ours)}." if ours else ".")
            + (f" Did you mean {' or '.join(close)}?" if close else "")
        )


def adopt_base_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Read the config dict of a base checkpoint as that of the AttnRes model which computes the same."""
    model_type = config_dict.get("model_type", "attnres")
    if model_type == "attnres":
        return config_dict
    check_base_model_type(model_type)
    architectures = rename_architectures(config_dict.get("architectures"), model_type, to_base=False)
    return {
        "attn_res_scale_norm_eps": True,
        **config_dict,
        "model_type": "attnres",
        "base_model_type": model_type,
        "architectures": architectures,
    }


def rename_architectures(architectures: list[str] | None, base_model_type: str, to_base: bool) -> list[str] | None:
    """`Qwen3ForCausalLM` <-> `AttnResForCausalLM`; names that are of neither kind stay."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architectures is None:
        return None
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(base_model_type)
    if has_own_classes(base_model_type):
        ours = {own_class(base_model_type, name).__name__: name for name in classes_on(base_model_type)}
        renamed = {of_base: name for name, of_base in ours.items()} if to_base else ours
        return [renamed.get(name, name) for name in architectures]
    if causal_lm is None:
        config_class = base_config_class(base_model_type)
        if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:  # it is inside of multimodal models
            return architectures
        causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__  # it has been registered
    base = re.sub("ForCausalLM$|LMHeadModel$", "", causal_lm)
    old, new, old_lm, new_lm = base, "AttnRes", causal_lm, "AttnResForCausalLM"
    if to_base:
        old, new, old_lm, new_lm = new, old, new_lm, old_lm
    return [new_lm if name == old_lm else re.sub(rf"^{old}(?=For|Model$)", new, name) for name in architectures]


def per_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """What a config has for single layers, as the keyword that it came from."""
    spec = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else {"per_layer_config": copy.deepcopy(spec.per_layer_overrides)}


def copy_private(source: PreTrainedConfig, target: PreTrainedConfig):
    """Copy where a config came from and which implementations it asks for, neither of which `__init__` takes."""
    for name in ("_attn_implementation_internal", "_experts_implementation_internal", "_output_attentions"):
        target.__dict__[name] = vars(source)[name]
    target._name_or_path = source._name_or_path
