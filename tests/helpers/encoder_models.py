# SPDX-License-Identifier: Apache-2.0
"""Every model type that transformers has an encoder of, of text or images: tiny models, and what they compute."""

from dataclasses import fields

import torch
from decoder_configs import COMMON
from literal_definition import LiteralDefinition
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnres
from attnres import AttnResConfig
from attnres.base.config import ENCODER_CLASSES, encoder_class, is_encoder
from attnres.base.probe import example_inputs


OF_ENCODERS = {**COMMON, "image_size": 16, "patch_size": 4, "type_vocab_size": 2, "drop_path_rate": 0.0}
# What a type needs besides
OWN = {
    "clip_text_model": {"eos_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 32, "num_attention_heads": 4},
}
OUTPUTS = ("logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits")


def heads_of(model_type: str) -> list[str]:
    """Names of our classes for a type."""
    return [name for name in ENCODER_CLASSES if encoder_class(model_type, name) is not None]


def encoder_types() -> list[str]:
    return sorted(name for name in CONFIG_MAPPING if is_encoder(name))


def encoder_config(model_type: str, **kwargs):
    """The tiny config of an encoder."""
    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in fields(config_class)} | {*config_class.attribute_map}
    common = {name: value for name, value in OF_ENCODERS.items() if name in names}
    own = OWN.get(model_type, {})
    for name in own:
        for other, actual in config_class.attribute_map.items():
            if name in (other, actual):
                common.pop(other, None), common.pop(actual, None)
    return AutoConfig.for_model(model_type, **{**common, **own, **kwargs})


def native_encoder(model_type: str, name: str, dtype=torch.float64, **kwargs):
    """The base's model for one of our classes, with random weights, also of norms, as ones would hide their misuse."""
    num_labels = 2 if name == "AttnResForQuestionAnswering" else 5
    config = encoder_config(model_type, num_labels=num_labels, **kwargs)
    torch.manual_seed(0)
    model = encoder_class(model_type, name)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    return model


def inputs_of(native) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if native.main_input_name == "input_ids":
        return {"input_ids": torch.randint(3, 90, (2, 11), generator=generator)}
    images = torch.randn(example_inputs(native).shape, generator=generator, dtype=torch.float64)
    return {"pixel_values": images.to(native.dtype)}


def converted_encoder(native, name: str, block_size: int, **fields_of_read):
    config = AttnResConfig.from_base_config(
        native.config, block_size=block_size, attn_res_scale_norm_eps=True, **fields_of_read
    )
    model = getattr(attnres, name)(config).to(native.dtype).eval()
    missing, unexpected = model.load_state_dict(native.state_dict(), strict=False)
    missing = [name for name in missing if "depth_queries" not in name]
    assert not missing and not unexpected, f"missing {missing[:3]}, unexpected {unexpected[:3]}"
    return model


def with_random_queries(model):
    queries, generator = model.trunk.depth_queries, torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in queries.named_parameters():
            std = 0.05 if "projection" in name else 0.3
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * std)
    return model


def outputs_of(model, inputs) -> torch.Tensor:
    """All that a model gives, as one vector."""
    torch.manual_seed(3)  # of a model that masks patches at random
    given = model(**inputs)
    return torch.cat([given[name].flatten() for name in OUTPUTS if given.get(name) is not None])


def literal_outputs(native, model, inputs) -> torch.Tensor:
    """What an AttnRes model should compute, by the definition in loops."""
    config, definition = model.config, LiteralDefinition.of_model(model, native)
    with torch.no_grad(), definition:
        outputs = outputs_of(native, inputs)
    assert definition.num_outputs == config.num_sites - 1, (definition.num_outputs, config.num_sites)
    return outputs
