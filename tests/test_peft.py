# SPDX-License-Identifier: Apache-2.0
"""PEFT on AttnRes models: what it adapts if nothing is said, and batches of several adapters."""

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from tiny_models import EVERY_FAMILY, convert, randomize_queries, tiny_base_model
from transformers import AutoModelForCausalLM

from attnres.training import lora_config, queries_config


def adapted_modules(model, config):
    """Names and types of what the config adapts, or how PEFT refuses."""
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        return str(error)
    return {
        name: type(adapted.base_model.model.get_submodule(name)).__name__ for name in adapted.targeted_module_names
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_adapted_modules_are_those_of_the_base(family):
    for config in (LoraConfig, IA3Config):
        base_model = tiny_base_model(family)
        model = convert(base_model, 3)
        expected = adapted_modules(base_model, config(task_type="CAUSAL_LM"))
        actual = adapted_modules(model, config(task_type="CAUSAL_LM"))
        assert actual == expected
        if family in ("llama", "mistral", "qwen3", "gemma"):
            assert any(name.endswith("layers.3.self_attn.v_proj") for name in expected)


def test_adapter_without_targets_trains_and_loads(input_ids, tmp_path):
    randomize_queries(convert(tiny_base_model("qwen3"), 3)).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
    queries = model.model.depth_queries.query.clone()
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted(input_ids, labels=input_ids).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert trained and all("lora_" in name for name in trained)
    assert torch.equal(model.model.depth_queries.query, queries)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted.eval()(input_ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # transformers' own way to load one
        assert torch.equal(loaded(input_ids).logits, expected)


def two_adapters(first, second):
    """One base model with the adapters `a` and `b`, which compute different things."""
    torch.manual_seed(0)
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    adapted = get_peft_model(model, first, adapter_name="a")
    adapted.add_adapter("b", second)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.normal_(std=0.3)
    return adapted.eval()


def plain_lora():
    return LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)


def test_batch_of_several_adapters(input_ids):
    model = two_adapters(plain_lora(), plain_lora())
    names = ["a", "b", "__base__"]
    with torch.no_grad():
        mixed = model(input_ids, adapter_names=names).logits
        tokens = model.generate(input_ids=input_ids, adapter_names=names, max_new_tokens=4, do_sample=False)
        for row, name in enumerate(names[:2]):
            model.set_adapter(name)
            torch.testing.assert_close(model(input_ids[row : row + 1]).logits, mixed[row : row + 1])
            alone = model.generate(input_ids=input_ids[row : row + 1], max_new_tokens=4, do_sample=False)
            assert torch.equal(tokens[row : row + 1], alone)
        with model.disable_adapter():
            torch.testing.assert_close(model(input_ids[2:]).logits, mixed[2:])
    assert (mixed[:1] - model(input_ids[:1]).logits).abs().max() > 1e-2, "the adapters do nothing"


@pytest.mark.parametrize("active", ["a", "b"])
def test_adapters_with_queries_beside_do_not_disturb(active, input_ids):
    """Samples whose adapters have no queries read with those of the model, whichever adapter is active."""
    model = two_adapters(lora_config(init_lora_weights=False), plain_lora())
    with torch.no_grad():
        model.set_adapter("b")
        expected = model(input_ids[:1]).logits
        with model.disable_adapter():
            base = model(input_ids[1:]).logits
        model.set_adapter(active)
        mixed = model(input_ids, adapter_names=["b", "__base__", "__base__"]).logits
    torch.testing.assert_close(mixed[:1], expected)
    torch.testing.assert_close(mixed[1:], base)


@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_copy_of_an_adapted_model(is_disabled, input_ids, tmp_path):
    """It has the adapter's queries and the base's, as the original has, and saves and unloads alike."""
    model = convert(tiny_base_model("llama"), 3).eval()
    with torch.no_grad():
        of_base = model(input_ids).logits
    adapted = get_peft_model(model, lora_config(r=2)).eval()
    adapted.add_adapter("other", lora_config(r=2))
    for name, parameter in adapted.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)

    def of_each(adapted):
        found = []
        with torch.no_grad():
            for name in ("other", "default"):
                adapted.set_adapter(name)
                found.append(adapted(input_ids).logits)
            with adapted.disable_adapter():
                found.append(adapted(input_ids).logits)
        return found

    expected = of_each(adapted)
    assert torch.equal(expected[-1], of_base) and not torch.allclose(expected[0], expected[1])
    if is_disabled:
        adapted.base_model.disable_adapter_layers()
    copied = copy.deepcopy(adapted)
    for parameter, other in zip(adapted.parameters(), copied.parameters(), strict=True):
        assert parameter is not other
    copied.base_model.enable_adapter_layers()
    assert all(map(torch.equal, of_each(copied), expected))
    copied.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(convert(tiny_base_model("llama"), 3), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, expected[1])
        assert torch.equal(copied.unload()(input_ids).logits, adapted.unload()(input_ids).logits)
    with pytest.raises(RuntimeError, match="trained with `attn_res_block_size=3` and this model has 2"):
        PeftModel.from_pretrained(convert(tiny_base_model("llama"), 2), tmp_path)


def test_copies_of_what_peft_has_wrapped(input_ids):
    """Alone, in a list beside what it wraps, and through a file: the same tensors under the same names."""
    adapted = get_peft_model(convert(tiny_base_model("llama"), 3), lora_config(r=2)).eval()
    wrapper = adapted.base_model.model.model.depth_queries
    torch.nn.init.normal_(wrapper.modules_to_save["default"].query)
    expected = wrapper.state_dict()
    alone, (in_list, wrapped) = copy.deepcopy(wrapper), copy.deepcopy([wrapper, wrapper.original_module])
    unpickled = pickle.loads(pickle.dumps(adapted))
    for copied in (alone, in_list, unpickled.base_model.model.model.depth_queries):
        assert type(copied) is type(wrapper)
        assert {name: tensor.tolist() for name, tensor in copied.state_dict().items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
    assert in_list.original_module is wrapped and not hasattr(wrapped, "trained_block_size")
    with torch.no_grad():
        assert torch.equal(unpickled(input_ids).logits, adapted(input_ids).logits)


# Names of the matrices of one expert in checkpoints and in adapters that were made before transformers merged experts
EXPERTS = {"mixtral": ("w1", "w3", "w2"), "minimax_m2": ("w1", "w3", "w2")}
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
MIXTURES = ("mixtral", "glm4_moe", "olmoe", "deepseek_v3", "qwen3_moe", "minimax_m2")
# Two layers of LoRA and four of the model in fp32, at logits of up to 5: some 100 roundings. Without experts: 0.6
CLOSE = {"rtol": 0, "atol": 5e-5}


def adapter_by_experts(base_model, folder: Path, names: tuple[str, str, str]):
    """An adapter with tensors for each expert and of the attention; returns the base with it merged by hand."""
    merged, tensors = copy.deepcopy(base_model), {}

    def add(name: str, weight: torch.Tensor):
        down, up = (torch.randn(2, weight.shape[1]) * 0.3, torch.randn(weight.shape[0], 2) * 0.3)
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = down, up
        weight += 2 * up @ down  # lora_alpha / r

    with torch.no_grad():
        for name, module in merged.named_modules():
            if name.endswith(("q_proj", "o_proj")):
                add(name, module.weight)
            elif name.endswith("experts") and hasattr(module, "gate_up_proj"):
                for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj)):
                    for matrix, weight in zip(names, (*gate_up.chunk(2), down)):
                        add(f"{name}.{expert}.{matrix}", weight)
    targets = ["o_proj", *names] + ["q_proj"] * any(".q_proj." in name for name in tensors)
    LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=targets).save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged


def load_by_transformers(model, folder):
    model.load_adapter(str(folder))
    return model


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_the_base_with_experts(family, input_ids, tmp_path):
    """With tensors for each expert: they act as on the base, whichever way and after whichever other model."""
    base_model = tiny_base_model(family)
    merged = adapter_by_experts(base_model, tmp_path, EXPERTS.get(family, GATE_UP_DOWN))
    for of_another, load in (("llama", PeftModel.from_pretrained), ("mixtral", load_by_transformers)):
        models = [base_model, convert(base_model, 3)]
        convert(tiny_base_model(of_another), 3).save_pretrained(tmp_path / "another")
        AutoModelForCausalLM.from_pretrained(tmp_path / "another")
        base, model = (load(copy.deepcopy(m), tmp_path).eval() for m in models)
        with torch.no_grad():
            expected = merged(input_ids).logits
            torch.testing.assert_close(model(input_ids).logits, expected, **CLOSE)
            torch.testing.assert_close(base(input_ids).logits, expected, **CLOSE)
    with torch.no_grad():
        assert (expected - base_model(input_ids).logits).abs().max() > 0.5, "the adapter does nothing"


def randomize(adapted):
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return adapted.eval()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("targets", ["parameters", "modules"])
def test_adapters_of_experts_go_both_ways(family, targets, input_ids, tmp_path):
    """Those of the base on its conversion and back, named as merged or as single experts, and into the weights."""
    base_model = tiny_base_model(family)
    base_model.save_pretrained(tmp_path / "base")
    convert(base_model, 3).save_pretrained(tmp_path / "attnres")
    if targets == "parameters":
        config = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["o_proj"]}
    elif family == "gpt_oss":
        config = {"target_modules": "all-linear"}
    else:
        config = {"target_modules": ["o_proj", *EXPERTS.get(family, GATE_UP_DOWN)]}
    config |= {"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
    logits = {}
    for name in ("base", "attnres"):
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / name), LoraConfig(**config))
        randomize(adapted).save_pretrained(tmp_path / f"of-{name}")
        with torch.no_grad():
            logits[name] = adapted(input_ids).logits
    of_base, of_attnres = (load_file(tmp_path / f"of-{name}/adapter_model.safetensors") for name in logits)
    assert of_base.keys() == of_attnres.keys() and all(
        torch.equal(of_base[name], of_attnres[name]) for name in of_base
    )
    torch.testing.assert_close(logits["attnres"], logits["base"], **CLOSE)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Tensors of the adapter|Found missing adapter keys")
        again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "of-attnres").eval()
        assert torch.equal(again(input_ids).logits, logits["attnres"])
        torch.testing.assert_close(again.merge_and_unload()(input_ids).logits, logits["base"], **CLOSE)
        for name, other in (("base", "attnres"), ("attnres", "base")):
            for load in (PeftModel.from_pretrained, load_by_transformers):
                model = load(AutoModelForCausalLM.from_pretrained(tmp_path / name), tmp_path / f"of-{other}").eval()
                torch.testing.assert_close(model(input_ids).logits, logits["base"], **CLOSE)


def test_tensors_of_an_adapter_that_are_left_out_are_named(tmp_path):
    """As many as PEFT leaves out of the base: it converts targets of experts, and then adapts no dense layers."""
    base_model = tiny_base_model("deepseek_v3")
    adapter_by_experts(base_model, tmp_path / "adapter", GATE_UP_DOWN)
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    dense = "base_model.model.model.layers.0.mlp.up_proj"
    tensors |= {f"{dense}.lora_A.weight": torch.ones(2, 32), f"{dense}.lora_B.weight": torch.ones(48, 2)}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.warns(UserWarning, match=rf"it has no such modules\): {dense}.lora_A.weight, {dense}.lora_B.weight$"):
        PeftModel.from_pretrained(convert(base_model, 3), tmp_path / "adapter")
    # Of a few types, PEFT converts none at all
    base_model = tiny_base_model("qwen2_moe")
    adapter_by_experts(base_model, tmp_path / "experts", GATE_UP_DOWN)
    with pytest.warns(UserWarning, match=r"it has no such modules\): .*layers.0.mlp.experts.lora_A.weight"):
        PeftModel.from_pretrained(convert(base_model, 3), tmp_path / "experts")
    # Adapters with queries, on a model that has none
    base_model = tiny_base_model("llama")
    get_peft_model(convert(base_model, 3), lora_config(r=2)).save_pretrained(tmp_path / "queries")
    with pytest.warns(
        UserWarning, match=r"it does not read over depth\): .*depth_queries.key_norm, .*depth_queries.query"
    ):
        PeftModel.from_pretrained(base_model, tmp_path / "queries")


@pytest.mark.parametrize("kind", ["prompt", "vera", "queries"])
def test_no_warning_where_all_is_loaded(kind, tmp_path):
    """Some kinds of adapters load tensors in ways of their own."""
    config = {
        "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "vera": lambda: VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
        "queries": queries_config,
    }[kind]()
    get_peft_model(convert(tiny_base_model("llama"), 3), config).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Tensors of the adapter")
        PeftModel.from_pretrained(convert(tiny_base_model("llama"), 3), tmp_path)
