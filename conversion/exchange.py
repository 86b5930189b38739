# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Exchange of AttnRes checkpoints with Kimi K3's naming and with flash-linear-attention (fla).

All three compute the same reads, so nothing but names, shapes and the unit of the block size is translated:

| | attnres | Kimi K3 | fla |
|---|---|---|---|
| queries | `depth_queries.query` [sites, d] | `layers.N.self_attention_res_proj`, `layers.N.mlp_res_proj`,
  `output_attn_res_proj` [1, d] | `layers.N.attn_res_proj`, `layers.N.mlp_res_proj`, `res_proj` [1, d] |
| key norms | `depth_queries.key_norm` [sites, d] | the same with `norm` [d] | the same with `norm` [d] |
| block size | sublayers | decoder layers | sublayers, 1 or even |
| epsilon of the key norms | `attn_res_norm_eps` | `rms_norm_eps` | `norm_eps` |

In Kimi's naming all else keeps the names of the base; fla has one architecture, whose parts get the names of Llama (or
Qwen2 with biases, Qwen3 with query and key norms, Mistral with a window).
"""

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..base.config import base_config_class
from ..checkpoints.checkpoint import (
    ATTNRES_TYPES,
    DECODER_TYPE,
    QUERY_NAMES,
    Checkpoint,
    config_errors_explained,
    open_checkpoint,
)
from ..checkpoints.reports import ConversionReport
from ..configuration_attnres import AttnResConfig
from ..depth.reads import ReadConfig
from ..utils.files import check_destination
from .options import Writing
from .writing import Conversion, write_checkpoint


# Of the modules with the query and the key norm: before attention, before the MLP, the final read
SITE_NAMES = {
    "kimi": ("self_attention_res", "mlp_res", "output_attn_res"),
    "fla": ("attn_res", "mlp_res", "res"),
}
FLA_TO_LLAMA = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".attn.": ".self_attn.",
}
# fla's query and key norms have an epsilon of their own, whatever the config says
FLA_QK_NORM_EPS = 1e-5
FLA_BASES = ("llama", "mistral", "qwen2", "qwen3")
# Fields that have the same name and meaning there
SAME_IN_FLA = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id"),
)
# Of fla 0.6.0: a saved config may leave them out
FLA_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 32,
    "num_kv_heads": None,
    "qkv_bias": False,
    "qk_norm": False,
    "window_size": None,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attnres_block_size": None,
}


def import_checkpoint(source: str | Path, destination: str | Path, *, revision: str | None = None) -> ConversionReport:
    """Make an AttnRes checkpoint from one in Kimi's naming on a supported base, or of fla's `TransformerForCausalLM`.

    The names of the tensors show which of the two it is.

    Args:
        source: folder or Hub id.
        destination: folder to write, which must be empty or not exist.
        revision: branch, tag or commit of a Hub id.

    Raises:
        ValueError: if it is neither, or has something that no supported base can express.
        OSError: if files cannot be found, read or written.
    """
    path = check_destination(destination, source)
    checkpoint = open_checkpoint(source, revision)
    model_type = checkpoint.config_dict["model_type"]
    if model_type == "transformer":
        naming, read_config = "fla", config_from_fla
    elif any(name.endswith(".self_attention_res_proj.weight") for name in checkpoint.weight_map):
        naming, read_config = "kimi", config_from_kimi
    else:
        raise ValueError(
            f"`{source}` (a `{model_type}`) is neither fla's `transformer` nor has it tensors named"
            " `self_attention_res_proj` as in Kimi's naming."
        )
    with config_errors_explained(str(source)):
        config = read_config(checkpoint)
    names = query_names(naming, checkpoint, config)
    conversion = Conversion(
        f"Import from {naming}",
        checkpoint,
        config,
        add=queries_from(checkpoint, names, config.hidden_size),
        rename=renaming({name for pair in names for name in pair}, FLA_TO_LLAMA if naming == "fla" else {}),
    )
    return write_checkpoint(conversion, path, Writing(verify=False))


def queries_from(checkpoint: Checkpoint, names: list[tuple[str, str]], hidden_size: int) -> dict[str, torch.Tensor]:
    """Queries and key norms of all sites by the names that they have here, from the names of each site there.

    Raises:
        ValueError: if one is missing, or of another size.
    """
    missing = [name for pair in names for name in pair if name not in checkpoint.weight_map]
    if missing:
        raise ValueError(
            f"`{checkpoint.name}` lacks {len(missing)} tensors of depth attention, among them `{missing[0]}`."
        )
    tensors = checkpoint.tensors([name for pair in names for name in pair])
    for name, tensor in tensors.items():
        if tensor.numel() != hidden_size:
            raise ValueError(
                f"`{name}` of `{checkpoint.name}` has shape {list(tensor.shape)}, not {hidden_size} numbers."
            )
    stacked = (torch.stack([tensors[name].flatten().float() for name in column]) for column in zip(*names))
    return dict(zip((f"model.{name}" for name in QUERY_NAMES), stacked))


def renaming(left_out: Container[str], replacements: dict[str, str]) -> Callable[[str], str | None]:
    """New names of tensors: parts of them replaced, `None` for those to leave out."""

    def rename(name: str) -> str | None:
        if name in left_out:
            return None
        for old, new in replacements.items():
            name = name.replace(old, new)
        return name

    return rename


def export_checkpoint(
    source: str | Path, destination: str | Path, naming: str, *, force: bool = False, revision: str | None = None
) -> ConversionReport:
    """Write an AttnRes checkpoint in Kimi's naming (`naming="kimi"`) or for fla (`naming="fla"`).

    Queries and key norms are written in the checkpoint's dtype if that loses nothing, and otherwise in fp32.

    Args:
        source: folder or Hub id.
        destination: folder to write, which must be empty or not exist.
        naming: `kimi` or `fla`.
        force: write it even if the target cannot express some epsilons, which makes a small difference.
        revision: branch, tag or commit of a Hub id.

    Raises:
        ValueError: if the target cannot express the model, with the reason.
        OSError: if files cannot be found, read or written.
    """
    if naming not in SITE_NAMES:
        raise ValueError(f"`naming={naming!r}` is not known; it is one of {', '.join(SITE_NAMES)}.")
    path = check_destination(destination, source)

    def check_is_decoder(model_type: str):
        if model_type != DECODER_TYPE:
            kind = "a multimodal" if model_type in ATTNRES_TYPES else f"a `{model_type}`"
            raise ValueError(f"`{source}` is {kind} checkpoint, not that of an `AttnResForCausalLM`.")

    checkpoint = open_checkpoint(source, revision, check_type=check_is_decoder)
    left_out = lost_in_export(checkpoint, naming)
    if left_out and not force:
        them = "it" if len(left_out) == 1 else "both"
        sentences = " ".join(f"{note[0].upper()}{note[1:]}." for note in left_out)
        raise ValueError(
            f"`{source}` has what {naming} cannot express. {sentences}"
            f" What that changes is small and seldom matters: `--force` writes the checkpoint without {them}."
        )
    own_names = [checkpoint.prefix + name for name in QUERY_NAMES]
    to_fla = {new: old for old, new in FLA_TO_LLAMA.items()}
    conversion = Conversion(
        f"Export to {naming}",
        checkpoint,
        config_to_fla(checkpoint) if naming == "fla" else config_to_kimi(checkpoint),
        add=queries_to(checkpoint, naming, own_names),
        rename=renaming(own_names, to_fla if naming == "fla" else {}),
        notes=[f"left out: {note}" for note in left_out],
    )
    return write_checkpoint(conversion, path, Writing(verify=False))


def lost_in_export(checkpoint: Checkpoint, naming: str) -> list[str]:
    """What is small and cannot be expressed there.

    Raises:
        ValueError: for what is not small.
    """
    if not checkpoint.has_lm_head:
        raise ValueError(f"`{checkpoint.name}` is not a causal LM, the kind that is exchanged.")
    config = checkpoint.config
    other_read = ReadConfig.of(config).in_words()
    if other_read:
        raise ValueError(
            f"`{checkpoint.name}` has reads over depth that {naming} does not know ({other_read}): there they have one"
            " head, learned queries, a softmax, and the sum of the open block."
        )
    lost = []
    if config.attn_res_scale_norm_eps:
        lost.append("its reads are multiplied by their number of sources")
    if config.attn_res_norm_eps != norm_eps(config):
        lost.append(
            f"the epsilon of its key norms is {config.attn_res_norm_eps}, and that of its others {norm_eps(config)}"
        )
    return lost


def queries_to(checkpoint: Checkpoint, naming: str, own_names: list[str]) -> dict[str, torch.Tensor]:
    """The query and the key norm of each site by their names there."""
    config = checkpoint.config
    query, key_norm = checkpoint.tensors(own_names).values()
    found = {}
    for names, weight, norm in zip(query_names(naming, checkpoint, config), query, key_norm, strict=True):
        of_site = in_dtype_if_exact(weight, config.dtype)[None], in_dtype_if_exact(norm, config.dtype)
        found |= dict(zip(names, of_site))
    return found


def query_names(naming: str, checkpoint: Checkpoint, config: AttnResConfig) -> list[tuple[str, str]]:
    """Names of the query and the key norm of every site, in the order of depth.

    Raises:
        ValueError: if the layers are not `model.layers`, or do not read twice each.
    """
    base = config.base_model_type
    others = sorted({*config.sublayers_per_layer()} - {2})
    if others:
        raise ValueError(
            f"`{checkpoint.name}` cannot be exchanged: {naming} has two queries a layer, and layers of `{base}` read"
            f" {' or '.join(map(str, others))} times."
        )
    if not any(name.startswith("model.layers.") for name in checkpoint.weight_map):
        raise ValueError(
            f"`{checkpoint.name}` cannot be exchanged: {naming} has queries in `model.layers`, and `{base}` names its"
            " layers otherwise."
        )
    attention, mlp, final = SITE_NAMES[naming]
    sites = [f"model.layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in (attention, mlp)]
    return [(f"{site}_proj.weight", f"{site}_norm.weight") for site in [*sites, f"model.{final}"]]


def in_dtype_if_exact(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in the dtype, or as it is if that would change a value."""
    narrowed = tensor.to(dtype or tensor.dtype)
    return narrowed.contiguous() if torch.equal(narrowed.to(tensor.dtype), tensor) else tensor.contiguous()


def norm_eps(config: PreTrainedConfig) -> float:
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"):
        if hasattr(config, name):
            return getattr(config, name)
    raise ValueError(f"`{config.base_model_type}` has no epsilon of its norms to share with key norms.")


def config_from_kimi(checkpoint: Checkpoint) -> AttnResConfig:
    """Kimi's `attn_res_block_size` is a field beside the base's own ones and counts decoder layers."""
    config_dict, _ = PreTrainedConfig.get_config_dict(checkpoint.folder)  # in which infinity is a number again
    num_layers = config_dict.pop("attn_res_block_size", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(
            f"`{checkpoint.name}` has Kimi's tensor names, but `attn_res_block_size={num_layers!r}` is not a number of"
            " layers."
        )
    base_config = base_config_class(config_dict["model_type"]).from_dict(config_dict)
    config = AttnResConfig.from_base_config(base_config, block_size=2 * num_layers)
    config.attn_res_norm_eps = norm_eps(config)
    return config


def config_to_kimi(checkpoint: Checkpoint) -> dict:
    config = checkpoint.config
    if config.attn_res_block_size % 2:
        raise ValueError(
            f"`{checkpoint.name}` has blocks of {config.attn_res_block_size} sublayers; Kimi counts decoder layers, of"
            " two sublayers each, so only even sizes can be written."
        )
    base_config = json.loads(config.to_base_config().to_json_string())
    return {**base_config, "attn_res_block_size": config.attn_res_block_size // 2}


def config_from_fla(checkpoint: Checkpoint) -> AttnResConfig:
    """fla's `TransformerConfig` as that of the base with the same parts."""
    values = {**FLA_DEFAULTS, **checkpoint.config_dict}
    refuse_what_no_base_has(values, checkpoint.name)
    base_model_type = base_with_parts_of(values)
    base_kwargs = {
        **{name: values[name] for name in SAME_IN_FLA},
        "intermediate_size": intermediate_size_of_fla(values),
        "num_attention_heads": values["num_heads"],
        "num_key_value_heads": values["num_kv_heads"] or values["num_heads"],
        "head_dim": values["hidden_size"] // values["num_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": values["norm_eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]},
        "pad_token_id": values.get("pad_token_id"),
        "dtype": values.get("dtype", values.get("torch_dtype")),
        "architectures": ["AttnResForCausalLM"],
    }
    if base_model_type == "qwen2":
        del base_kwargs["head_dim"]  # it follows from the other two
    if base_model_type == "mistral":
        base_kwargs["sliding_window"] = values["window_size"]
    elif base_model_type != "llama" and values["window_size"] is not None:
        base_kwargs |= {"use_sliding_window": True, "sliding_window": values["window_size"], "max_window_layers": 0}
    return AttnResConfig(
        base_model_type=base_model_type,
        attn_res_block_size=values["attnres_block_size"],
        attn_res_norm_eps=values["norm_eps"],
        **base_kwargs,
    )


def intermediate_size_of_fla(values: dict[str, Any]) -> int:
    if values["intermediate_size"] is not None:
        return values["intermediate_size"]
    # fla's rule: 2/3 of the ratio, up to the next multiple of 256
    return 256 * -(-int(values["hidden_size"] * values["hidden_ratio"] * 2 / 3) // 256)


def refuse_what_no_base_has(values: dict[str, Any], name: str):
    """Raise a `ValueError` for values of fla's config that no supported base can express."""

    def refuse(field: str, reason: str):
        raise ValueError(f"`{name}` cannot be imported: `{field}={values[field]!r}`, {reason}.")

    if values["attnres_block_size"] is None:
        refuse("attnres_block_size", "so it has no depth attention")
    if values["hidden_act"] != "swish":
        refuse("hidden_act", "no supported base has that activation")
    if values["rope_theta"] is None:
        refuse("rope_theta", "no supported base goes without rotary embeddings")
    if values["qk_norm"] and values["norm_eps"] != FLA_QK_NORM_EPS:
        refuse("norm_eps", f"while its query and key norms use {FLA_QK_NORM_EPS}; Qwen3 has one epsilon for all")
    if values["qk_norm"] and values["qkv_bias"]:
        refuse("qk_norm", "with biases as well no supported base has")


def base_with_parts_of(values: dict[str, Any]) -> str:
    if values["qk_norm"]:
        return "qwen3"
    if values["qkv_bias"]:
        return "qwen2"
    return "llama" if values["window_size"] is None else "mistral"


def config_to_fla(checkpoint: Checkpoint) -> dict:
    config, base_model_type = checkpoint.config, checkpoint.config.base_model_type
    refuse_what_fla_has_not(config, checkpoint.name)
    return {
        "architectures": ["TransformerForCausalLM"],
        "model_type": "transformer",
        "attnres_block_size": config.attn_res_block_size,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "qkv_bias": base_model_type == "qwen2",
        "qk_norm": base_model_type == "qwen3",
        "window_size": windows_of(config).pop(),
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "swish",
        "norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
    }


def refuse_what_fla_has_not(config: AttnResConfig, name: str):
    """Raise a `ValueError` for values of a config that fla's one architecture cannot express."""

    def refuse(reason: str):
        raise ValueError(f"`{name}` cannot be exported to fla: {reason}.")

    base_model_type = config.base_model_type
    if base_model_type not in FLA_BASES:
        refuse(f"its one architecture has the parts of {', '.join(FLA_BASES)}, not of {base_model_type}")
    size = config.attn_res_block_size
    if size != 1 and size % 2:
        refuse(f"blocks of {size} sublayers; there the size is 1 or even")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        refuse(f"{config.num_attention_heads} heads of {head_dim} do not make a hidden size of {config.hidden_size}")
    if config.rope_parameters["rope_type"] != "default":
        refuse(f"rope scaling `{config.rope_parameters['rope_type']}`")
    if config.hidden_act != "silu":
        refuse(f"`hidden_act={config.hidden_act!r}`")
    for bias in ("attention_bias", "mlp_bias"):
        if getattr(config, bias, False):
            refuse(f"`{bias}=True`")
    if base_model_type == "qwen3" and config.rms_norm_eps != FLA_QK_NORM_EPS:
        refuse(f"its query and key norms use {FLA_QK_NORM_EPS}, these `rms_norm_eps={config.rms_norm_eps}`")
    if len(windows_of(config)) > 1:
        refuse("some layers have a sliding window, others not")


def windows_of(config: AttnResConfig) -> set[int | None]:
    """The sliding windows of its layers, `None` for those without."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return {getattr(config, "sliding_window", None)}
    return {config.sliding_window if kind == "sliding_attention" else None for kind in layer_types}
