# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every supported family, and the literal model they are compared with."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.depth.definition import depth_attention_reference


# In front of a script: the package cannot be imported, as where it is not installed
WITHOUT_PACKAGE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "attnres":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED_MOE = {**MOE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": SLIDING,
    "qwen3": {"head_dim": 8, **SLIDING},
    "smollm3": {},
    "gemma": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "arcee": {},
    "ministral": {"head_dim": 8, "sliding_window": 4},
    "ministral3": {"head_dim": 8},
    "cwm": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "nemotron": {},
    "phi3": {},
    "olmo": {},
    "seed_oss": {"head_dim": 8},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "stablelm": {"use_parallel_residual": False, "hidden_dropout": 0.1},
    "ernie4_5": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "qwen3_moe": {**MOE, "head_dim": 8, "num_experts": 4, "mlp_only_layers": [1]},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "glm4_moe": {**GROUPED_MOE, "head_dim": 8},
    "glm4_moe_lite": {**GROUPED_MOE, **MLA, "q_lora_rank": 16},
    "minimax_m2": {"head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**GROUPED_MOE, **MLA, "q_lora_rank": 16, "topk_method": "greedy"},
    "deepseek_v3": {**GROUPED_MOE, **MLA, "q_lora_rank": 16},
    "qwen3_next": {
        **MOE,
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "kimi_linear": {
        **MOE,
        **MLA,
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
}

# For `parametrize`: of each kind one with every change, the others in `make test-all`
SPREAD = ("llama", "granite", "starcoder2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
EVERY_FAMILY = [family if family in SPREAD else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


def mostly_slow(cases, every: int) -> list:
    """For `parametrize`: the first case and every so many with every change, the others in `make test-all`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (i % every > 0)) for i, case in enumerate(cases)]


def tiny_base_config(family: str, **kwargs):
    return AutoConfig.for_model(family, **{**TINY, **FAMILIES[family], **kwargs})


def tiny_base_model(family: str, seed: int = 0, **kwargs):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_base_config(family, **kwargs)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:  # a norm weight of one or zero would hide its misuse
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def convert(base_model, block_size: int, exact: bool = True, **kwargs) -> AttnResForCausalLM:
    """The AttnRes model with the base's weights and queries of zero."""
    config = AttnResConfig.from_base_config(
        base_model.config, block_size=block_size, attn_res_scale_norm_eps=exact, **kwargs
    )
    model = AttnResForCausalLM(config).to(base_model.dtype).eval()
    missing, unexpected = model.load_state_dict(base_model.state_dict(), strict=False)
    assert set(missing) == {"model.depth_queries.query", "model.depth_queries.key_norm"} and not unexpected
    return model


def randomize_queries(model, scale: float = 0.3):
    with torch.no_grad():
        queries = (getattr(model, "model", model)).depth_queries
        for name, parameter in queries.named_parameters():
            # Projections see normed inputs: what their rows add up to is about as large as a query
            of_one = scale / parameter.shape[-1] ** 0.5 if name.startswith("projection") else scale
            parameter.add_(torch.randn_like(parameter) * of_one)
    return model


class Reference:
    """The definition of Block AttnRes in loops, on a native model of the base with the weights of an `AttnResModel`.

    The native layers of a PreNorm decoder keep their residual stream. Only what their norms are given is changed: the
    mix of what the sublayers in front have added to the stream, which is told by its differences.
    """

    def __init__(self, model):
        self.config = model.config
        self.queries = model.depth_queries.query * model.depth_queries.key_norm
        base_config = model.config.to_base_config()
        base_config._attn_implementation = model.config._attn_implementation
        self.native = AutoModel.from_config(base_config, dtype=model.dtype).train(model.training)
        self.native.load_state_dict({k: v for k, v in model.state_dict().items() if "depth_queries" not in k})
        for layer in self.native.layers:
            layer.input_layernorm.register_forward_pre_hook(self.read_depth)
            layer.post_attention_layernorm.register_forward_pre_hook(self.read_depth)
        self.native.norm.register_forward_pre_hook(self.read_depth)

    def __call__(self, input_ids):
        """The hidden states, and the depth weights of all sites."""
        self.states, self.weights = [], []
        return self.native(input_ids, use_cache=False).last_hidden_state, self.weights

    def read_depth(self, norm, args):
        self.states.append(args[0])
        site, size = len(self.states) - 1, self.config.attn_res_block_size
        outputs = [after - before for before, after in zip(self.states, self.states[1:])]
        sources = [self.states[0], *(sum(outputs[first : first + size]) for first in range(0, site, size))]
        mix, weights = depth_attention_reference(self.queries[site], sources, self.config.attn_res_norm_eps)
        self.weights.append(weights)
        return (mix * (len(sources) if self.config.attn_res_scale_norm_eps else 1),)


def reference_hidden_states(model, input_ids):
    """The hidden states and all depth weights of an `AttnResModel` by definition."""
    return Reference(model)(input_ids)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what is expected, which may be zero if both are."""
    error, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return 0.0 if error == 0 else error / size if size else math.inf
