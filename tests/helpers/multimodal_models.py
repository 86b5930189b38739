# SPDX-License-Identifier: Apache-2.0
"""Tiny models of images, video or sound and text, and inputs of theirs.

A type is in `CONFIGS` by what its config needs beside `COMMON`, whose fields its parts take where they have them, at
any depth.
"""

import copy
import functools
from dataclasses import fields
from typing import Any

import torch
from decoder_configs import COMMON, DECODERS
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


IMAGE, VIDEO, AUDIO = 90, 91, 94  # tokens that something else takes the place of
START, END = 92, 93
TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index", "img_token_id", "image_patch_id"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), AUDIO),
    **dict.fromkeys(
        ("vision_start_token_id", "image_start_token_id", "boi_token_index", "vision_bos_token_id"), START
    ),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "eoi_token_index"), END),
    **dict.fromkeys(("audio_start_token_id", "audio_bos_token_id"), 95),
    **dict.fromkeys(("audio_end_token_id", "audio_eos_token_id"), 96),
    **dict.fromkeys(("user_token_id", "video_start_token_id", "video_end_token_id"), 89),
}
ENCODER = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "encoder_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 48),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads", "encoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("out_hidden_size", "output_dim", "projection_dim", "projector_hidden_size"), 32),
    **{"patch_size": 4, "image_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 1, "head_dim": 8},
    **{"num_position_embeddings": 16, "initializer_range": 0.1, "num_mel_bins": 16, "max_source_positions": 20},
    **{"window_size": 8, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1], "n_window": 10},
    **dict.fromkeys(
        ("dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0
    ),
    **{"n_window_infer": 20, "downsample_hidden_size": 8},
}


def shrunken(config_class: type, values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that a config of this class has a field for, and what is given."""
    names = {field.name for field in fields(config_class)} | {*config_class.attribute_map}
    found = {name: copy.deepcopy(value) for name, value in values.items() if name in names}
    for name in given:  # under one of two names, and not under the other
        for pair in config_class.attribute_map.items():
            if name in pair:
                for other in pair:
                    found.pop(other, None)
    return {**found, **given}


def part_config(config: Any, is_text: bool, given: dict[str, Any]) -> dict[str, Any]:
    """A part of a config, shrunken, as a dict; `config` is the default one."""
    own = DECODERS.get(config.model_type, {}) if is_text else {}
    values = {**TOKENS, **(COMMON if is_text else ENCODER)}
    parts = {name: part for name, part in vars(config).items() if hasattr(part, "model_type")}
    shrunk = shrunken(type(config), values, {**own, **given, "model_type": config.model_type})
    for name, part in parts.items():
        shrunk[name] = part_config(part, name == "text_config", given.get(name, {}))
    return shrunk


def multimodal_config(model_type: str, **kwargs):
    """The tiny config of a multimodal type."""
    default = CONFIG_MAPPING[model_type]()
    given = copy.deepcopy(CONFIGS.get(model_type, {}))
    for name, value in given.items():  # a part may be of another type than the default
        if isinstance(value, dict) and "model_type" in value:
            setattr(default, name, CONFIG_MAPPING[value["model_type"]]())
    values = part_config(default, False, {**given, **kwargs})
    values.pop("model_type")
    return AutoConfig.for_model(model_type, **values)


MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": MROPE, "vision_config": {"hidden_size": 32}},
    "qwen2_5_vl": {"text_config": MROPE},
    "qwen3_vl": {"text_config": MROPE},
    "qwen3_vl_moe": {"text_config": MROPE},
    "cosmos3_edge": {"text_config": MROPE, "vision_config": {"num_patches": 16}},
    "cosmos3_omni": {"text_config": MROPE},
    "glm4v": {"text_config": MROPE},
    "glm4v_moe": {
        "text_config": {
            "n_routed_experts": 4,
            "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0},
        }
    },
    "glm46v": {"text_config": MROPE},
    "glmga": {"text_config": MROPE},
    "glm_ocr": {"text_config": MROPE},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2]},
            **{"moe_intermediate_size": [16, 16], "moe_k": 2, "moe_num_experts": 4},
        },
        "vision_config": {"temporal_merge_size": 2, "intermediate_size": 48},
    },
    "paddleocr_vl": {"text_config": MROPE},
    "hunyuan_vl": {
        "text_config": {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 1, 1]}},
        "vision_config": {"text_hidden_size": 32},
    },
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "cohere_compass": {},
    "mistral_large4": {"text_config": {"n_routed_experts": 4, "num_key_value_heads": 4}},
    "molmo2": {
        "image_patch_id": IMAGE,
        "vision_config": {"image_size": [16, 16]},
        "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    },
    "muse_glimmer": {"vision_config": {"patch_temporal": 1}, "out_hidden_size": 128},
    "step3p7": {},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64, "num_attention_heads": 4},
        "qformer_config": {"intermediate_size": 48, "num_attention_heads": 1, "hidden_size": 64},
        **{"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0], [1, 2]], "spatial_target_layers": [1, 3]},
        **{"image_grid_pinpoints": [[16, 16]], "projector_dropout": 0.0},
    },
    "qwen2_5_omni_thinker": {"text_config": MROPE, "vision_start_token_id": START},
    "qwen3_omni_moe_thinker": {"text_config": MROPE, "vision_start_token_id": START},
    "voxtral": {"audio_config": {"intermediate_size": 128}},
    "qwen2_audio": {},
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "qwen3_asr": {"audio_config": {"n_window": 50, "n_window_infer": 100}},
    "granite_speech": {
        "encoder_config": {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "context_size": 8},
        **{"has_lora_adapter": False, "window_size": 15},
    },
    "moss_transcribe_diarize": {"audio_chunk_size": 100},
}


def make_base(model_type: str, seed: int = 0):
    """The model with random weights; those of norms too, as ones and zeros would hide their misuse."""
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(multimodal_config(model_type)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def text_around(placeholders: list[int], num_rows: int = 2) -> torch.Tensor:
    """Rows of text around what is in the place of images or sound."""
    text = torch.randint(1, 80, (num_rows, 9), generator=torch.Generator().manual_seed(1))
    return torch.cat([text[:, :4], torch.tensor([placeholders] * num_rows), text[:, 4:]], dim=1)


def patches(config, generator: torch.Generator, flat: bool = True) -> dict[str, torch.Tensor]:
    """An image for each of two rows as patches, in a grid of 4 x 4 that is merged to 2 x 2 tokens."""
    vision = config.vision_config
    shape = 3, getattr(vision, "temporal_patch_size", 1), vision.patch_size, vision.patch_size
    pixels = torch.randn(2 * 16, *shape, generator=generator)
    return {
        "pixel_values": pixels.flatten(1) if flat else pixels[:, :, 0],
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }


def image_grid(config, generator):
    ids = text_around([START, *[IMAGE] * 4, END])
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **patches(config, generator)}


def image_grid_alone(config, generator):
    return {"input_ids": text_around([START, *[IMAGE] * 4, END]), **patches(config, generator)}


def image_grid_of_squares(config, generator):
    return {**image_grid(config, generator), **patches(config, generator, flat=False)}


def image_grid_with_line_ends(config, generator):
    ids = text_around([START, *[IMAGE] * 8, END])
    return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **patches(config, generator)}


def images(config, generator, num_tokens: int = 4):
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    return {"input_ids": text_around([START, *[IMAGE] * num_tokens, END]), "pixel_values": pixels}


def images_of_sizes(config, generator):
    return {**images(config, generator), "image_sizes": torch.tensor([[16, 16]] * 2)}


def images_and_tiles(config, generator):
    found = images_of_sizes(config, generator)
    pixels = torch.randn(2, 2, 3, 16, 16, generator=generator)  # the whole image, and what is its only tile
    return {**found, "input_ids": text_around([IMAGE] * 10), "pixel_values": pixels}


def pooled_images(config, generator):
    ids = text_around([START, *[IMAGE] * 4, END])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(2, 16, 48, generator=generator),
        "image_token_pooling": torch.arange(32).view(8, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * 2),
    }


def tiles(config, generator):
    found = images(config, generator)
    return {
        **found,
        "pixel_values": found["pixel_values"].unsqueeze(1),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
    }


def image_and_sound(config, generator, num_sounds: int = 4):
    ids = text_around([START, *[IMAGE] * 4, END, 95, *[AUDIO] * num_sounds, 96])
    return {
        "input_ids": ids,
        **patches(config, generator),
        "input_features": torch.randn(2, 16, 16, generator=generator),
        "feature_attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


def image_and_short_sound(config, generator):
    return image_and_sound(config, generator, num_sounds=2)


def sound(num_tokens: int, shape: tuple[int, int] = (16, 40), mask: str | None = None, **others):
    """Of each row, features of some shape; its longer side, or its first, is the time."""

    def make(config, generator):
        ids = text_around([95, *[AUDIO] * num_tokens, 96])
        found = {"input_ids": ids, "input_features": torch.randn(2, *shape, generator=generator), **others}
        num_frames = shape[0] if shape[0] < 16 else shape[1]
        return found if mask is None else {**found, mask: torch.ones(2, num_frames, dtype=torch.long)}

    return make


INPUTS: dict[str, Any] = {
    **dict.fromkeys(CONFIGS, image_grid),
    "paddleocr_vl": image_grid_of_squares,
    "hunyuan_vl": image_grid_with_line_ends,
    "step3p7": functools.partial(images, num_tokens=1),
    "mistral_large4": images_of_sizes,
    "muse_glimmer": image_grid_alone,
    "granite_docling": tiles,
    "granite4_vision": images_and_tiles,
    "molmo2": pooled_images,
    "qwen2_5_omni_thinker": image_and_sound,
    "qwen3_omni_moe_thinker": image_and_short_sound,
    "voxtral": sound(5),
    "qwen2_audio": sound(10, mask="feature_attention_mask"),
    "glmasr": sound(2, (16, 16), mask="input_features_mask"),
    "fun_asr_nano": sound(3, (3, 7 * 16), mask="input_features_mask"),
    "qwen3_asr": sound(13, (16, 100), mask="input_features_mask"),
    "granite_speech": sound(3, (15, 16)),
    "moss_transcribe_diarize": sound(5, mask="input_features_mask", padding_mask=torch.ones(2, 100, dtype=torch.long)),
}


def make_inputs(model_type: str, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Two rows of text around an image or sound each."""
    inputs = INPUTS[model_type](multimodal_config(model_type), torch.Generator().manual_seed(1))
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
