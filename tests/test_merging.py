# SPDX-License-Identifier: Apache-2.0
"""Adapters with depth queries: combined by weight, and several in one batch. Checkpoints: combined by weight."""

import copy
import re

import pytest
import torch
from decoder_configs import decoder_config
from family_survey import converted as converted_decoder
from family_survey import native_model
from literal_definition import literal_logits, relative
from peft import AutoPeftModelForCausalLM, IA3Config, LoraConfig, PeftModel, get_peft_model
from test_reads import SOME, converted, name_of, randomize
from tiny_models import convert, mostly_slow, randomize_queries, tiny_base_model
from transformers import AutoModelForCausalLM

from attnres.base import weighted_adapters
from attnres.depth.other_reads import PerSampleStream
from attnres.training import lora_config, queries_config


def wide_base():
    """In fp64, on a base that rounds to nothing less."""
    return tiny_base_model("starcoder2", residual_dropout=0.0, embedding_dropout=0.0).double()


def adapted(model, **configs):
    """The model with an adapter for each config, with weights that do something and queries of their own."""
    first, *others = configs
    model = get_peft_model(model, configs[first], adapter_name=first)
    for name in others:
        model.add_adapter(name, configs[name])
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "ia3_" in name:
                parameter.normal_(std=0.2)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(model.dtype).eval()


def queries_of(model, name: str) -> dict[str, torch.Tensor]:
    wrapper = model.base_model.model.base_model.depth_queries
    module = wrapper.original_module if name == "__base__" else wrapper.modules_to_save[name]
    return dict(module.named_parameters())


def by_hand(model, weights: dict[str, float]):
    """A plain model with the weights of an adapted one and a sum of its adapters' changes, and its base's own."""
    wrapper = model.base_model.model.base_model.depth_queries
    plain = copy.deepcopy(model.base_model.model)
    plain.base_model.depth_queries = wrapper.original_module
    deltas = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            deltas[name] = sum(
                weight * module.scaling[adapter] * module.lora_B[adapter].weight @ module.lora_A[adapter].weight
                for adapter, weight in weights.items()
                if adapter in module.lora_A
            )
    config = plain.config
    model_of_hand, native = type(plain)(config).to(plain.dtype).eval(), wide_base()
    tensors = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in plain.state_dict().items()
        if "lora_" not in name and "trained_block_size" not in name
    }
    for name, delta in deltas.items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + delta
    of_base = queries_of(model, "__base__")
    native.load_state_dict({name: tensor for name, tensor in tensors.items() if "depth_queries" not in name})
    for name, tensor in of_base.items():
        changes = [
            weight * (queries_of(model, adapter)[name] - tensor)
            for adapter, weight in weights.items()
            if adapter in wrapper.modules_to_save
        ]
        tensors[f"model.depth_queries.{name}"] = tensor + sum(changes)
    model_of_hand.load_state_dict(tensors)
    return model_of_hand, native


def lora(**kwargs):
    """Without queries."""
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear", **kwargs})


READS = [{}, *SOME]


# Combined by weight


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("fields", mostly_slow(READS, every=4), ids=name_of)
def test_combined_adapters(fields, block_size, input_ids):
    """In fp64: what a model with the sum of all changes computes by definition, also where weights are negative."""
    model = randomize_queries(converted(wide_base(), block_size, fields, attn_res_norm_eps=0.03))
    model = adapted(model, plain=lora(r=2), first=lora_config(r=2), second=lora_config(r=3))
    weights = {"plain": 0.3, "first": 0.7, "second": -0.4}
    model.add_weighted_adapter([*weights], [*weights.values()], "both", combination_type="cat")
    hand, native = by_hand(model, weights)
    expected, _ = literal_logits(native, hand, input_ids)
    model.set_adapter("both")
    with torch.no_grad():
        assert relative(model(input_ids).logits, expected) < 1e-12
        model.set_adapter("first")
        assert relative(model(input_ids).logits, expected) > 1e-3
    for name, tensor in hand.base_model.depth_queries.named_parameters():
        torch.testing.assert_close(queries_of(model, "both")[name], tensor, rtol=0, atol=1e-14)


def two_adapters(**kwargs):
    model = randomize_queries(convert(tiny_base_model("qwen3"), 3))
    return adapted(model, a=lora_config(r=2), b=lora_config(r=2), plain=lora(r=2), **kwargs)


@pytest.mark.parametrize("kind", ["linear", "cat", "svd"])
def test_weights_of_one_and_zero(kind, input_ids):
    """Give the queries of the first adapter, bit by bit, and what it computes."""
    model = two_adapters()
    model.add_weighted_adapter(["a", "b"], [1.0, 0.0], "again", combination_type=kind)
    assert all(map(torch.equal, queries_of(model, "again").values(), queries_of(model, "a").values()))
    with torch.no_grad():
        expected = model(input_ids).logits
        model.set_adapter("again")
        torch.testing.assert_close(model(input_ids).logits, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "names", [["a"], ["a", "plain"], ["plain", "a"], ["only"], ["only", "queries"], ["only", "a"]]
)
def test_adapters_with_and_without_queries(names, input_ids):
    """One that has none changes none. PEFT by itself takes the model's queries, or refuses."""
    model = two_adapters(only=queries_config(r=4), queries=queries_config())
    weights = [0.5, 2.0][: len(names)]
    model.add_weighted_adapter(names, weights, "new", combination_type="cat")
    of_model = queries_of(model, "__base__")
    for name, tensor in queries_of(model, "new").items():
        changes = [
            weight * (queries_of(model, adapter)[name] - of_model[name])
            for adapter, weight in zip(names, weights)
            if adapter != "plain"
        ]
        torch.testing.assert_close(tensor, of_model[name] + sum(changes))
    model.set_adapter("new")
    with torch.no_grad():
        assert model(input_ids).logits.isfinite().all()
    assert model.peft_config["new"].modules_to_save == ["depth_queries"]
    assert model.peft_config["plain"].modules_to_save is None


def test_adapters_without_queries_are_left_to_peft(input_ids):
    model = two_adapters(other=lora(r=2))
    model.add_weighted_adapter(["plain", "other"], [0.5, 0.5], "new", combination_type="cat")
    assert "new" not in model.base_model.model.model.depth_queries.modules_to_save
    with torch.no_grad():
        model.set_adapter("new")
        assert model(input_ids).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["ties", "ties_svd", "magnitude_prune", "dare_linear", "dare_ties_svd"])
def test_changes_that_are_pruned(kind):
    """By PEFT's functions: of the changes that are large enough in both, or of one, the weighted ones are left."""
    model = two_adapters()
    options = {"combination_type": kind, "density": 0.5}
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "new", **options)
    of_model, new = queries_of(model, "__base__")["query"], queries_of(model, "new")["query"]
    found = new - of_model
    if kind == "magnitude_prune":
        expected = torch.zeros_like(found)
        for name in ("a", "b"):
            change = queries_of(model, name)["query"] - of_model
            expected += torch.where(change.abs() >= change.abs().flatten().median(), change, 0)
        assert ((found - expected).abs() > 1e-6).sum() <= 2  # which of two in the middle is left
    assert 0.1 < (found == 0).float().mean() < 0.6


def test_ia3(input_ids):
    a, b = (IA3Config(task_type="CAUSAL_LM", modules_to_save=["depth_queries"]) for _ in range(2))
    model = adapted(randomize_queries(convert(tiny_base_model("llama"), 3)), a=a, b=b)
    model.add_weighted_adapter(["a", "b"], [1.0, 0.0], "new")
    with torch.no_grad():
        expected = model(input_ids).logits
        model.set_adapter("new")
        torch.testing.assert_close(model(input_ids).logits, expected)


def test_files_of_combined_adapters(input_ids, tmp_path):
    """Saved, loaded, merged into the weights, and refused by a model with other blocks."""
    base_model = wide_base()
    randomize_queries(convert(base_model, 3)).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = adapted(model, plain=lora(r=2), a=lora_config(r=2), b=lora_config(r=2))
    model.add_weighted_adapter(["plain", "a", "b"], [0.5, 0.8, 0.2], "new", combination_type="cat")
    model.set_adapter("new")
    model.save_pretrained(tmp_path / "adapters", selected_adapters=["new"])
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters/new").eval()
    with torch.no_grad():
        expected = model(input_ids).logits
        assert torch.equal(again(input_ids).logits, expected)
        for name in ("a", "b"):  # the new one does not need them
            model.delete_adapter(name)
        assert torch.equal(model(input_ids).logits, expected)
        with model.disable_adapter():
            plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(input_ids).logits
            assert relative(model(input_ids).logits, plain) < 1e-13
        again.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert relative(merged(input_ids).logits, expected) < 1e-13
    with pytest.raises(RuntimeError, match="trained with `attn_res_block_size=3` and this model has 2"):
        PeftModel.from_pretrained(convert(base_model, 2), tmp_path / "adapters/new")


def test_training_goes_on(input_ids):
    """Of the combined adapter alone; its queries are no longer those that it was made of."""
    model = two_adapters()
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "new", combination_type="svd")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any(".new." in name for name in trained) and any(".a." in name for name in trained)
    model.set_adapter("new")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".new." in name for name in trained) and any("depth_queries" in name for name in trained)
    before = {name: queries_of(model, name)["query"].clone() for name in ("a", "new")}
    model.train()(input_ids, labels=input_ids).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    assert torch.equal(before["a"], queries_of(model, "a")["query"])
    assert not torch.equal(before["new"], queries_of(model, "new")["query"])


@pytest.mark.parametrize("is_disabled", [False, True])
def test_half_precision_and_disabled_adapters(is_disabled, input_ids):
    model = two_adapters().to(torch.bfloat16)
    if is_disabled:
        model.base_model.disable_adapter_layers()
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "new", combination_type="cat")
    if is_disabled:
        model.base_model.enable_adapter_layers()
    model.set_adapter("new")
    for name, tensor in queries_of(model, "new").items():
        of_both = [queries_of(model, adapter)[name] for adapter in ("a", "b")]
        torch.testing.assert_close(tensor, sum(of_both) / 2)
        assert tensor.dtype == torch.float32
    with torch.no_grad():
        assert model(input_ids).logits.isfinite().all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((["a", "b"], [1.0], "new"), "`weights` has 1 numbers for 2 `adapters`"),
        ((["a", "c"], [1.0, 1.0], "new"), "Adapter c does not exist"),
        ((["a", "b"], [1.0, 1.0], "new", "slerp"), "Invalid combination_type: slerp"),
        ((["queries", "queries"], [1.0, 1.0], "new", "slerp"), "Invalid combination_type: slerp"),
        ((["a", "b"], [1.0, 1.0], "new", "ties"), "`combination_type='ties'` needs a `density`"),
        ((["a", "large"], [1.0, 1.0], "new", "linear"), "All adapters must have the same r value"),
        ((["head", "head2"], [1.0, 1.0], "new", "cat"), "target the same module with modules_to_save"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message, input_ids):
    """Leave the model as it was."""
    both = {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}
    model = two_adapters(
        large=lora_config(r=4), queries=queries_config(), head=lora_config(**both), head2=lora_config(**both)
    )
    names, wrapper = {*model.state_dict()}, model.base_model.model.model.depth_queries
    with torch.no_grad():
        expected = model(input_ids).logits
        with pytest.raises(ValueError, match=re.escape(message)):
            model.add_weighted_adapter(*arguments)
        assert torch.equal(model(input_ids).logits, expected)
    assert {*model.state_dict()} == names and "new" not in model.peft_config
    assert model.base_model.model.model.depth_queries is wrapper


BELOW_ZERO = {"combination_type": "ties", "density": -1.0}


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    "adapters, weights, options, error",
    [
        (["a", "b"], [1.0, 1.0], BELOW_ZERO, ValueError),
        (["queries", "queries2"], [1.0, 1.0], BELOW_ZERO, ValueError),
        (["a", "queries"], [1.0, 1.0], BELOW_ZERO, ValueError),
        (["a", "b"], [1.0, 1.0], {"combination_type": "svd", "svd_driver": "none"}, RuntimeError),
        (["a", "b"], ["1", 1.0], {"combination_type": "linear"}, TypeError),
        (["a", "b"], [1.0, 1.0], {"combination_type": "linear"}, KeyboardInterrupt),
    ],
    ids=["density", "of queries", "of one kind each", "driver", "weights", "interrupt"],
)
def test_half_an_adapter_is_taken_away(adapters, weights, options, error, is_training, input_ids, monkeypatch):
    """These faults are found when PEFT has begun. The next try is not taken for a name that is there already."""

    def interrupted(*args):
        raise KeyboardInterrupt

    model = two_adapters(queries=queries_config(), queries2=queries_config()).train(is_training)
    model.set_adapter("b")
    state = {*model.state_dict()}, {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.no_grad(), monkeypatch.context() as patch:
        expected = model(input_ids).logits
        if error is KeyboardInterrupt:
            patch.setattr(weighted_adapters, "combine_queries", interrupted)
        with pytest.raises(error):
            model.add_weighted_adapter(adapters, weights, "new", **options)
        assert torch.equal(model(input_ids).logits, expected)
    assert state == ({*model.state_dict()}, {name: p.requires_grad for name, p in model.named_parameters()})
    assert "new" not in model.peft_config and model.active_adapter == "b" and model.training == is_training
    model.add_weighted_adapter(adapters, [1.0, 1.0], "new", combination_type="ties", density=0.5)
    assert {*model.state_dict()} > state[0] and "new" in model.peft_config


def test_a_name_that_is_taken():
    """Nothing happens, as in PEFT."""
    model = two_adapters()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "b", combination_type="cat")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# Several in one batch


NAMES = ["b", "a", "__base__", "plain", "a"]


@pytest.fixture
def batch():
    """Five samples, of which two are padded on the left."""
    ids = torch.randint(3, 97, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def one_by_one(model, names, call):
    """What `call` gives of each sample, with its adapter set."""
    rows = []
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter():
                rows.append(call(row))
        else:
            model.set_adapter(name)
            rows.append(call(row))
    model.set_adapter("a")
    return rows


def row_of(batch, row: int):
    return {name: tensor[row : row + 1] for name, tensor in batch.items()}


def mixed_model(fields, block_size: int):
    model = randomize_queries(converted(wide_base(), block_size, fields, attn_res_norm_eps=0.03))
    return adapted(model, a=lora_config(r=2), b=lora_config(r=3), plain=lora(r=2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("fields", mostly_slow(READS, every=4), ids=name_of)
def test_several_adapters_in_a_batch(fields, block_size, batch):
    """Each sample is read with its adapter's queries: cached, with gradients, with weights, and in generation."""
    model = mixed_model(fields, block_size)
    with torch.no_grad():
        alone = one_by_one(model, NAMES, lambda row: model(**row_of(batch, row), output_depth_attentions=True))
        expected = torch.cat([outputs.logits for outputs in alone])
        assert relative(model(**batch, adapter_names=NAMES).logits, expected) < 1e-12
        outputs = model(**batch, adapter_names=NAMES, output_depth_attentions=True)
        tokens = model.generate(**batch, adapter_names=NAMES, max_new_tokens=4, do_sample=False)
        of_each = one_by_one(
            model, NAMES, lambda row: model.generate(**row_of(batch, row), max_new_tokens=4, do_sample=False)
        )
        assert relative(model(**batch).logits, expected) > 1e-3, "the adapters do nothing"
    assert torch.equal(tokens, torch.cat(of_each))
    model.set_adapter("plain")  # for which PEFT would pass by all queries but the model's
    assert relative(model(**batch, adapter_names=NAMES).logits, expected) < 1e-12
    assert relative(outputs.logits, expected) < 1e-12
    for weights, *of_rows in zip(outputs.depth_attentions, *(outputs.depth_attentions for outputs in alone)):
        torch.testing.assert_close(weights, torch.cat(of_rows), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("fields", mostly_slow(READS, every=5), ids=name_of)
def test_gradients_of_several_adapters_in_a_batch(fields, batch):
    model = mixed_model(fields, 3)
    parameters = [*queries_of(model, "a").values(), *queries_of(model, "b").values()]

    def gradients(logits):
        if not logits.requires_grad:
            return [None] * len(parameters)
        loss = logits.square().mean((1, 2)).sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    def of_row(row):
        for parameter in parameters:
            parameter.requires_grad_()
        return gradients(model(**row_of(batch, row)).logits)

    of_rows = one_by_one(model, NAMES, of_row)
    for parameter in parameters:
        parameter.requires_grad_()
    mixed = gradients(model(**batch, adapter_names=NAMES).logits)
    for found, *expected in zip(mixed, *of_rows):
        assert relative(found, sum(grad for grad in expected if grad is not None)) < 1e-12
        assert found.any()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str
)
def test_generation_with_several_adapters(options, batch):
    model, options = mixed_model({}, 3), {**options, "max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        tokens = model.generate(**batch, adapter_names=NAMES, **options)
        of_each = one_by_one(model, NAMES, lambda row: model.generate(**row_of(batch, row), **options))
    assert torch.equal(tokens, torch.cat(of_each))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", ["opt", "gpt_neox", "gemma3_text", "bloom", "qwen3_moe"])
def test_bases_with_several_adapters(model_type, batch):
    """Also those that flatten their tokens, of which PEFT itself mixes adapters in the attention alone."""
    model = randomize(converted_decoder(native_model(decoder_config(model_type)), 3))
    targets = {"target_modules": ["q_proj"]} if model_type in ("opt", "qwen3_moe") else {}
    model = adapted(model, a=lora_config(r=2, **targets), b=lora_config(r=3, **targets), plain=lora(r=2, **targets))
    with torch.no_grad():
        alone = one_by_one(model, NAMES, lambda row: model(**row_of(batch, row)).logits)
        mixed = model(**batch, adapter_names=NAMES).logits
    torch.testing.assert_close(mixed, torch.cat(alone), rtol=0, atol=5e-5)


def test_samples_that_share_their_queries(batch, monkeypatch):
    """They are read as any other batch is, and so are those of disabled adapters."""
    model = mixed_model({}, 3)
    monkeypatch.setattr(PerSampleStream, "_query", lambda self: pytest.fail("queries by sample"))
    with torch.no_grad():
        for names in (["a"] * 5, ["plain", "__base__", "plain", "__base__", "plain"]):
            expected = torch.cat(one_by_one(model, names, lambda row: model(**row_of(batch, row)).logits))
            assert relative(model(**batch, adapter_names=names).logits, expected) < 1e-12
        model.base_model.disable_adapter_layers()
        expected = model(**batch).logits
        assert relative(model(**batch, adapter_names=NAMES).logits, expected) < 1e-12


def test_combined_adapters_in_a_batch(batch):
    model = mixed_model({}, 3)
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "both", combination_type="cat")
    names = ["both", "a", "b", "__base__", "both"]
    with torch.no_grad():
        expected = torch.cat(one_by_one(model, names, lambda row: model(**row_of(batch, row)).logits))
        assert relative(model(**batch, adapter_names=names).logits, expected) < 1e-12


def test_names_that_do_not_fit(batch):
    configs = {"a": lora_config(r=2), "b": lora_config(r=2), "only": queries_config()}
    model = adapted(convert(tiny_base_model("llama"), 3), **configs)
    with pytest.raises(ValueError, match="`adapter_names` has 2 names for a batch of 5 samples: each needs one"):
        model(**batch, adapter_names=["a", "b"])
    for name in ("only", "c"):  # PEFT knows only those that adapt a layer
        with pytest.raises(ValueError, match="non-existing adapter"):
            model(**batch, adapter_names=["a", "a", "a", "a", name])


# Checkpoints


def slerp(t: float, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """On the arc between two tensors; as in mergekit, on a line if they are parallel. Zeros are at a right angle."""
    cosine = (first.flatten() @ second.flatten()) / (first.norm() * second.norm()).clamp(min=1e-8)
    if cosine.abs() > 0.9995:
        return torch.lerp(first, second, t)
    angle = torch.arccos(cosine)
    return (((1 - t) * angle).sin() * first + (t * angle).sin() * second) / angle.sin()


@pytest.mark.parametrize("merge", [lambda one, other: 0.3 * one + 0.7 * other, lambda *both: slerp(0.7, *both)])
def test_merged_conversions_are_the_conversion_of_merged_bases(merge):
    """Tensor by tensor: queries of zero stay zero, and key norms of one stay one."""

    def merged(*models):
        one, other = (model.state_dict() for model in models)
        return {name: merge(one[name], other[name]) for name in one}

    first, second = (tiny_base_model("qwen3", seed=seed) for seed in (0, 1))
    of_conversions = merged(convert(first, 3), convert(second, 3))
    first.load_state_dict(merged(first, second))
    for name, tensor in convert(first, 3).state_dict().items():
        if "depth_queries" in name:
            torch.testing.assert_close(of_conversions[name], tensor, rtol=0, atol=2e-7)
        else:
            assert torch.equal(of_conversions[name], tensor)
    assert not of_conversions["model.depth_queries.query"].any()


def test_the_mean_of_trained_queries_is_not_the_mean_of_their_products():
    """Scores depend on the products of queries and key norms alone, and means do not."""
    first, second = (randomize_queries(convert(tiny_base_model("llama", seed=seed), 3)) for seed in (0, 1))
    one, other = (model.model.depth_queries for model in (first, second))
    with torch.no_grad():
        products = (one()[0] + other()[0]) / 2
        one.query.add_(other.query).div_(2)
        one.key_norm.add_(other.key_norm).div_(2)
        assert (one()[0] - products).abs().max() > 0.01
