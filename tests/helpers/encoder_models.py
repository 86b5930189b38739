# SPDX-License-Identifier: Apache-2.0
"""Every model type with an encoder, with a decoder behind it or without: tiny models, and what they compute."""

import contextlib
import filecmp
import inspect
import re
from dataclasses import fields

import torch
from decoder_configs import COMMON
from literal_definition import LiteralDefinition, relative
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnres
from attnres import AttnResConfig
from attnres.base.config import classes_on, has_own_classes, is_encoder_decoder, own_class
from attnres.base.probe import example_inputs, stacks_of
from attnres.checkpoints.checkpoint import auto_class_for
from attnres.conversion import convert, revert, verify


OF_ENCODERS = {**COMMON, "image_size": 16, "patch_size": 4, "type_vocab_size": 2, "drop_path_rate": 0.0}
OF_STACKS = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (
            ("layers", 3),
            ("ffn_dim", 48),
            ("attention_heads", 4),
            ("num_hidden_layers", 3),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 4),
            ("layerdrop", 0.0),
        )
    },
    "max_source_positions": 40,
    "max_target_positions": 64,
    "num_mel_bins": 8,
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
OF_SOUND = {
    "num_mel_bins": 16,
    "max_length": 32,
    "max_source_positions": 40,
    "frequency_stride": 4,
    "time_stride": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 40),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "do_stable_layer_norm": True,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
    "replace_prob": 0.0,
    "num_codevectors_per_group": 8,
}
# What a type needs besides
OWN = {
    "clip_text_model": {"eos_token_id": 2},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "t5": {"decoder_start_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 32, "num_attention_heads": 4},
}
OUTPUTS = ("logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits")


def heads_of(model_type: str) -> list[str]:
    """Names of our classes for a type."""
    return classes_on(model_type)


def encoder_types() -> list[str]:
    return sorted(name for name in CONFIG_MAPPING if has_own_classes(name))


def encoder_config(model_type: str, **kwargs):
    """The tiny config of an encoder."""
    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in fields(config_class)} | {*config_class.attribute_map}
    shape = {**COMMON, **OF_STACKS} if is_encoder_decoder(model_type) else {**OF_STACKS, **OF_ENCODERS, **OF_SOUND}
    common = {name: value for name, value in shape.items() if name in names}
    if is_encoder_decoder(model_type):  # those that only stand for others
        common = {name: value for name, value in common.items() if name not in config_class.attribute_map}
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
    model = own_class(model_type, name)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    return model


def inputs_of(native) -> dict[str, torch.Tensor]:
    generator, name = torch.Generator().manual_seed(1), native.main_input_name
    if name == "input_ids":
        first = torch.randint(3, 90, (2, 11), generator=generator)
    else:
        shape = example_inputs(native)[name].shape
        first = torch.randn(shape, generator=generator, dtype=torch.float64).to(native.dtype)
    if is_encoder_decoder(native.config.model_type) and name == "input_ids":
        first[:, -1] = native.config.eos_token_id  # where heads look
    of_task = re.search("Classification$|Answering$", type(native).__name__)  # these shift what the encoder is given
    if of_task or "decoder_input_ids" not in inspect.signature(native.forward).parameters:
        return {name: first}
    return {name: first, "decoder_input_ids": torch.randint(3, 90, (2, 6), generator=generator)}


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
    generator = torch.Generator().manual_seed(2)
    named = [of_query for stack in model.stacks for of_query in stack.depth_queries.named_parameters()]
    with torch.no_grad():
        for name, parameter in named:
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
    definitions = [
        LiteralDefinition.of_model(stack, of_native) for stack, of_native in zip(model.stacks, stacks_of(native))
    ]
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for definition in definitions:
            stack.enter_context(definition)
        outputs = outputs_of(native, inputs)
    counts = [definition.num_outputs for definition in definitions]
    assert counts == [*map(sum, model.config.sublayers_of_stacks())][: len(counts)], counts
    return outputs


def check_converted_and_back(name: str, head: str, folder, num_blocks: int):
    """Convert the checkpoint of a tiny model and back; what is written is in `base`, `attnres`, `trained`, `reverted`.

    Returns:
        The report of the conversion.
    """
    native = native_encoder(name, head, dtype=torch.float32)
    native.save_pretrained(folder / "base")
    report = convert(folder / "base", folder / "attnres", num_blocks=num_blocks)
    assert report.verification.equal and report.base_model_type == name
    model, info = auto_class_for(head).from_pretrained(folder / "attnres", output_loading_info=True)
    assert type(model).__name__ == head and not info["missing_keys"] and not info["unexpected_keys"]
    inputs = inputs_of(native)
    with torch.no_grad():
        assert relative(outputs_of(model, inputs), outputs_of(native, inputs)) < 1e-5
    with_random_queries(model).save_pretrained(folder / "trained")
    again = auto_class_for(head).from_pretrained(folder / "trained")
    with torch.no_grad():
        assert torch.equal(outputs_of(again, inputs), outputs_of(model, inputs))
    found = verify(folder / "base", folder / "trained")
    assert not found.equal and found.first_difference
    revert(folder / "attnres", folder / "reverted")
    for file in ("model.safetensors", "config.json"):
        assert filecmp.cmp(folder / "base" / file, folder / "reverted" / file, shallow=False)
    return report
