# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A GGUF file of a tiny Llama, written with the library `gguf` as llama.cpp's converter names and orders things."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM


CONFIG = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in llama.cpp's order, which turns neighbours where transformers turns halves."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    kind: str = "Q8_0",
    merges: bool = True,
    extra: dict[str, np.ndarray] | None = None,
    file_type: int | None = None,
    about: dict[str, str | list[str]] | None = None,
    **fields,
) -> dict[str, torch.Tensor]:
    """Write it, matrices of one kind and norms in fp32.

    Args:
        merges: of the tokenizer; without, transformers cannot read it.
        extra: further tensors, by their names in the file.
        file_type: what the header calls the file as a whole, a number of `gguf.LlamaFileType`.
        about: what the header says of the model as a whole, such as its licence, by methods of `GGUFWriter`.
        fields: of the header that are to say something else than the weights do, by names in `CONFIG`.

    Returns:
        The weights that a reader has to find, by transformers' names.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    for name, value in (about or {}).items():
        getattr(writer, f"add_{name}")(value)
    if file_type is not None:
        writer.add_file_type(file_type)
    said = {**CONFIG, **fields}
    writer.add_context_length(said["max_position_embeddings"])
    writer.add_embedding_length(said["hidden_size"])
    writer.add_block_count(said["num_hidden_layers"])
    writer.add_feed_forward_length(said["intermediate_size"])
    writer.add_head_count(said["num_attention_heads"])
    writer.add_head_count_kv(said["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(said["rms_norm_eps"])
    writer.add_rope_dimension_count(said["hidden_size"] // said["num_attention_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(said["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "<|end|>", "Hi"])
    writer.add_token_types([1] * 256 + [3, 1])
    if merges:
        writer.add_token_merges(["H i"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    found = {}
    for name, tensor in model.state_dict().items():
        weight = torch.nn.init.normal_(tensor, std=0.3).numpy() if tensor.ndim > 1 else tensor.numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        stored = weight if heads is None else rotated(weight, CONFIG[heads])
        type_ = GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        data = quantize(stored, type_)
        writer.add_tensor(gguf_name(name), data, raw_dtype=type_)
        # Quantised in rows, so it does not matter in which order they are
        found[name] = torch.from_numpy(dequantize(quantize(weight, type_), type_).astype(np.float32))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found
