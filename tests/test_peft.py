# SPDX-License-Identifier: Apache-2.0
"""PEFT on AttnRes models: what it adapts if nothing is said, and batches of several adapters."""

import copy
import pickle

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tiny_models import EVERY_FAMILY, convert, randomize_queries, tiny_base_model
from transformers import AutoModelForCausalLM

from attnres.training import lora_config


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
        if isinstance(expected, str):  # of a mixture of experts PEFT says it in other words, or converts too early
            assert isinstance(actual, str) or family == "mixtral"
        else:
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
@pytest.mark.parametrize("names", [["a", "b", "__base__"], ["a", "a", "a"]], ids="-".join)
def test_batch_of_several_adapters_with_queries_is_refused(names, active, input_ids):
    """Also where PEFT would take the queries of the base in silence: if the active adapter has none."""
    model = two_adapters(lora_config(init_lora_weights=False), plain_lora())
    model.set_adapter(active)
    message = "`adapter_names` cannot be used with adapters that have depth queries of their own .*, here a: "
    with torch.no_grad():
        with pytest.raises(ValueError, match=message):
            model(input_ids, adapter_names=names)
        with pytest.raises(ValueError, match=message):
            model.generate(input_ids=input_ids, adapter_names=names, max_new_tokens=2)


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
