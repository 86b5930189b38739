# SPDX-License-Identifier: Apache-2.0
"""Layers left out and repeated: compared with native layers that are skipped; in memory, as files, as a command."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from decoder_configs import DECODERS, decoder_config
from literal_definition import LiteralDefinition, relative
from peft import LoraConfig, get_peft_model
from test_reads import SOME, converted, name_of, randomize
from tiny_models import tiny_base_config, tiny_base_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnres import AttnResConfig, AttnResForCausalLM, AttnResForSequenceClassification
from attnres.checkpoints.checkpoint import different_tensors, open_checkpoint
from attnres.conversion import convert, layer_costs, prune, revert, select_layers, writing
from attnres.conversion.layers import config_with_layers
from attnres.conversion.pruning import mean_loss
from attnres.data.text import read_sample, train_tokenizer
from attnres.utils.ranges import in_ranges, read_ranges


# Left out in the middle, at both ends, all but one, and repeated
CHOICES = [[0, 2, 3], [1, 2], [3], [0, 1, 1, 2, 3, 3]]
# Of layers of several kinds: windows, experts, sandwich norms, parallel branches, state spaces
KINDS = ["qwen3_moe", "falcon_h1", "qwen3", "gemma3_text", "deepseek_v3", "gpt_neox", "lfm2", "smollm3"]


def base_model(family: str):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(decoder_config(family)).double().eval()
    if base._can_set_experts_implementation():
        base.set_experts_implementation("eager")  # the others have no fp64
    return base


def layers_in(model) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1)


def with_skipped(native, layers, input_ids):
    """A native model whose own layers run as often as they are listed; one that is not returns what it is given."""
    native = copy.deepcopy(native)
    num_values = {}

    def count(layer, args, output):
        num_values[layer] = len(output) if isinstance(output, tuple) else None

    handles = [layer.register_forward_hook(count) for layer in layers_in(native)]
    with torch.no_grad():
        native(input_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    for number, layer in enumerate(layers_in(native)):
        layer.forward = running(layer.forward, layers.count(number), num_values[layer])
    return native


def running(forward, times: int, num_values: int | None):
    """A layer's forward so many times, and as many values as it gives, of which the first is the hidden states."""

    def run(hidden, *args, **kwargs):
        for _ in range(times):
            hidden = forward(hidden, *args, **kwargs)
            hidden = hidden if num_values is None else hidden[0]
        return hidden if num_values is None else (hidden, *[None] * (num_values - 1))

    return run


def logits_by_definition(native, model, layers, input_ids):
    """What an AttnRes model computes with some of its layers, in order: by the native one and rows of its queries."""
    counts = model.config.attn_res_sublayers
    rows = [sum(counts[:number]) + i for number in layers for i in range(counts[number])] + [sum(counts)]
    native = with_skipped(native, layers, input_ids)
    definition = LiteralDefinition.of_model(model, native, rows)
    with torch.no_grad(), definition:
        logits = native(input_ids, use_cache=False).logits
    assert definition.num_outputs == len(rows) - 1
    return logits


@pytest.mark.parametrize("layers", CHOICES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@pytest.mark.one_in(3)
def test_the_same_as_the_definition(block_size, layers, input_ids):
    base = tiny_base_model("qwen3").double()
    model = randomize(converted(base, block_size, {}))
    before = model(input_ids).logits
    expected = logits_by_definition(base, model, layers, input_ids)
    selected = select_layers(model, layers)
    assert relative(selected(input_ids).logits, expected) < 1e-12 < 1e-4 < relative(before, expected)
    assert torch.equal(model(input_ids).logits, before), "the model that they come from stays as it is"
    assert selected.config.num_sites == 2 * len(layers) + 1 == len(selected.model.depth_queries.query)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.one_in(3)
def test_layers_of_several_kinds(family, input_ids):
    """Each stays of its kind, with random queries and, as an ordinary model, without."""
    base = base_model(family)
    model = randomize(converted(base, 3, {}))
    for layers in CHOICES[:1] + CHOICES[3:]:
        expected = logits_by_definition(base, model, layers, input_ids)
        # Norms of some bases compute in fp32
        assert relative(select_layers(model, layers)(input_ids).logits, expected) < 1e-5
        plain = select_layers(base, layers)
        assert type(plain) is type(base)
        expected = with_skipped(base, layers, input_ids)(input_ids, use_cache=False).logits
        assert relative(plain(input_ids).logits, expected) < 1e-5


@pytest.mark.parametrize("fields", SOME, ids=name_of)
@pytest.mark.one_in(5)
def test_other_reads(fields, input_ids):
    """Projections have a row for each site as well."""
    base = tiny_base_model("llama").double()
    model = randomize(converted(base, 3, fields))
    for layers in ([0, 2, 3], [1, 1, 3]):
        expected = logits_by_definition(base, model, layers, input_ids)
        assert relative(select_layers(model, layers)(input_ids).logits, expected) < 1e-12


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("fields", [{}, *SOME[::2]], ids=name_of)
@pytest.mark.one_in(11)
def test_pruned_and_converted_in_either_order(fields, block_size, input_ids):
    """With queries of zero: the same function in fp64, and the same layers in any order."""
    base = tiny_base_model("qwen3").double()
    for layers in [*CHOICES, [2, 0, 3, 0]]:
        pruned = select_layers(base, layers)
        one, other = select_layers(converted(base, block_size, fields), layers), converted(pruned, block_size, fields)
        assert relative(one(input_ids).logits, other(input_ids).logits) == 0
        assert relative(one(input_ids).logits, pruned(input_ids).logits) < 1e-12
        assert one.config.to_dict() == other.config.to_dict()


def test_in_any_order(input_ids):
    base = tiny_base_model("llama").double()
    layers = [2, 0, 3, 0]
    native = copy.deepcopy(base)
    native.model.layers = nn.ModuleList(native.model.layers[number] for number in layers)
    expected = native(input_ids, use_cache=False).logits
    assert relative(select_layers(base, layers)(input_ids).logits, expected) < 1e-12


def test_all_layers_are_the_model(input_ids):
    model = randomize(converted(tiny_base_model("qwen3_moe"), 3, {}))
    selected = select_layers(model, range(4))
    assert torch.equal(selected(input_ids).logits, model(input_ids).logits)
    assert selected.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "falcon_h1"])
@pytest.mark.one_in(3)
def test_generation_with_a_cache(family, input_ids):
    """Layers find their own part of the cache, copies of a layer too."""
    model = randomize(converted(base_model(family).float(), 3, {}))
    for layers in ([0, 2, 3], [1, 2, 2, 3]):
        selected = select_layers(model, layers)
        options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
        cached, uncached = (selected.generate(input_ids, use_cache=cache, **options) for cache in (True, False))
        assert torch.equal(cached, uncached)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_with_checkpointing(use_reentrant, input_ids):
    model = randomize(converted(tiny_base_model("qwen3"), 3, {}))
    selected = select_layers(model, [0, 2, 2, 3]).train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            selected.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        selected.zero_grad()
        selected(input_ids, labels=input_ids).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in selected.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])
    assert all(gradient.any() for name, gradient in gradients[0].items() if "key_norm" not in name)


def test_tensors_are_shared_and_copies_are_not():
    model = converted(tiny_base_model("llama"), 3, {}).requires_grad_(False)
    selected = select_layers(model, [0, 2, 2])
    first, second, third = (layer.mlp.up_proj.weight for layer in selected.model.layers)
    assert first is model.model.layers[0].mlp.up_proj.weight and second is model.model.layers[2].mlp.up_proj.weight
    assert third is not second and torch.equal(third, second) and not third.requires_grad
    assert selected.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert [layer.self_attn.layer_idx for layer in selected.model.layers] == [0, 1, 2]
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in selected.parameters())
    assert not any(buffer.is_meta for buffer in selected.buffers())


def test_tied_embeddings_and_what_is_set(tmp_path, input_ids):
    base = tiny_base_model("qwen3", tie_word_embeddings=True)
    randomize(converted(base, 2, {})).bfloat16().save_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", attn_implementation="eager").train()
    model.generation_config.max_new_tokens = 7
    selected = select_layers(model, [0, 3])
    assert selected.lm_head.weight is selected.model.embed_tokens.weight
    assert selected.training and selected.dtype == torch.bfloat16
    assert selected.model.depth_queries.query.dtype == torch.float32
    assert selected.generation_config.max_new_tokens == 7 and selected.config._attn_implementation == "eager"
    selected.eval().save_pretrained(tmp_path / "selected")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "selected", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, selected(input_ids).logits)


def test_other_heads(input_ids):
    config = AttnResConfig.from_base_config(tiny_base_config("llama", num_labels=3), block_size=3)
    model = randomize(AttnResForSequenceClassification(config).eval())
    selected = select_layers(model, [0, 3])
    assert selected.score.weight is model.score.weight and selected(input_ids).logits.shape == (3, 3)


def test_fields_of_single_layers():
    """Of a config: an entry of a list, numbers of layers, how many are of a kind, and what `per_layer_config` has."""

    def config_of(family, layers, **kwargs):
        return select_layers(AutoModelForCausalLM.from_config(decoder_config(family, **kwargs)), layers).config

    assert config_of("gemma3_text", [1, 1, 2]).layer_types == ["full_attention"] * 2 + ["sliding_attention"]
    assert config_of("smollm3", [0, 3]).no_rope_layers == [1, 0]
    assert config_of("qwen3_moe", [2, 0, 0], mlp_only_layers=[0, 3]).mlp_only_layers == [1, 2]
    assert config_of("deepseek_v3", [1, 2, 3]).first_k_dense_replace == 0
    assert config_of("deepseek_v3", [0, 0, 2]).first_k_dense_replace == 2
    config = AttnResConfig.from_base_config(decoder_config("llama", eos_token_id=[1, 2, 3, 4]), block_size=3)
    selected = select_layers(AttnResForCausalLM(config), [0, 2])
    assert selected.config.eos_token_id == [1, 2, 3, 4] and selected.config.attn_res_sublayers == [2, 2]


@pytest.mark.parametrize(
    "layers, error, message",
    [
        ([], ValueError, "`layers` is empty"),
        ([0, 4], ValueError, "`layers` has 4, and the layers of this model go from 0 to 3"),
        ([-1], ValueError, "`layers` has -1"),
        ([True], TypeError, "`layers` has True"),
        ([0, 1.0], TypeError, "`layers` has 1.0"),
        ("01", TypeError, "`layers='01'` must be numbers"),
        (3, TypeError, "`layers=3` must be numbers"),
    ],
)
def test_layers_that_are_not_there(layers, error, message, tmp_path):
    model = converted(tiny_base_model("llama"), 3, {})
    with pytest.raises(error, match=re.escape(message)):
        select_layers(model, layers)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(error, match=re.escape(message)):
        prune(tmp_path / "model", tmp_path / "out", layers)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family, kwargs, layers, message",
    [
        ("jamba", {}, [0, 2, 3], "layer 2 would be layer 1, and another one: it is a JambaMambaDecoderLayer"),
        ("minicpm3", {}, [0, 1], "`residual_scale` is"),
        ("diffllama", {}, [0, 2], "`self_attn.lambda_init` is"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, [0, 2], "`attn.scaling` is"),
        ("gemma4_text", {}, [0, 1, 2], "gemma4_text"),
        ("gemma4_unified_text", {}, [0, 2, 3], ""),  # in other words on transformers 5.19
        ("longcat_flash", {}, [0, 1], "longcat_flash"),
        ("zaya", {}, [0, 2], "`base_model_type='zaya'` is not supported"),
        ("glm_moe_dsa", {}, [0, 1, 3], "layer 3 attends to tokens that layer 2 chooses, and layer 0 would choose"),
        ("glm_moe_dsa", {}, [1, 2, 3], "layer 1 attends to tokens that layer 0 chooses, and none would choose"),
    ],
)
def test_what_a_config_cannot_express(family, kwargs, layers, message):
    """Rather than another model: where a layer depends on its number, or on how many there are."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(decoder_config(family, **kwargs))
    with pytest.raises(ValueError, match=re.escape(message)):
        select_layers(model, layers)


def test_models_that_are_changed(tmp_path):
    """Adapters, quantised weights, other modules, and models of several models."""
    model = converted(tiny_base_model("llama"), 3, {})
    with pytest.raises(ValueError, match="merge_and_unload"):
        select_layers(get_peft_model(copy.deepcopy(model), LoraConfig(target_modules="all-linear")), [0])
    adapted = copy.deepcopy(model)
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"`model.layers.0.self_attn.q_proj` .* is a Linear.*before adapters"):
        select_layers(adapted, [0])
    replaced = copy.deepcopy(model)
    replaced.model.layers[2].mlp.up_proj = nn.Identity()
    with pytest.raises(ValueError, match="`model.layers.2.mlp.up_proj` of the model is a Identity"):
        select_layers(replaced, [0, 2])
    with pytest.raises(ValueError, match="not in memory"):
        select_layers(copy.deepcopy(model).to("meta"), [0])
    with pytest.raises(TypeError, match="must be a model of transformers, not a Linear"):
        select_layers(nn.Linear(2, 2), [0])
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantised"):
        select_layers(model, [0])
    text_config = decoder_config("gemma3_text").to_dict()
    with torch.device("meta"):
        images = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text_config))
    with pytest.raises(ValueError, match="made of several models"):
        select_layers(images, [0])


def test_loading_with_fewer_layers_names_the_way_out(tmp_path):
    model = converted(tiny_base_model("llama"), 3, {})
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`attnres.conversion.select_layers\(model, range\(...\)\)`"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base in several files, its conversion, and one with random queries, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("prune")
    tokenizer = train_tokenizer([read_sample()], vocab_size=300)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    base.save_pretrained(folder / "base", max_shard_size="60KB")
    (folder / "base/README.md").write_text("---\nlicense: mit\n---\nA base.\n")
    tokenizer.save_pretrained(folder / "base")
    convert(folder / "base", folder / "attnres", block_size=3, verify=False)
    trained = randomize(converted(base, 3, {}))
    trained.save_pretrained(folder / "trained")
    tokenizer.save_pretrained(folder / "trained")
    return folder


def logits_of(folder, input_ids):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids).logits


@pytest.mark.parametrize("layers", [[1, 1, 3], [0, 2, 3]], ids=str)
@pytest.mark.one_in(2)
def test_files(layers, folder, tmp_path, input_ids):
    """What is loaded from them is the model in memory; nothing that is no longer true goes along."""
    report = prune(folder / "trained", tmp_path / "out", layers)
    assert report.verification.equal and report.layers == layers and report.operation == "Pruning"
    assert report.verification.first == f"trained, layers {in_ranges(layers)}" and report.num_sublayers == 6
    assert any("2 of 2 blocks have other sublayers" in note for note in report.notes)
    with torch.no_grad():
        expected = select_layers(AutoModelForCausalLM.from_pretrained(folder / "trained"), layers)(input_ids).logits
    assert torch.equal(logits_of(tmp_path / "out", input_ids), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids
    assert json.loads((tmp_path / "out/conversion_report.json").read_text())["layers"] == layers
    card = (tmp_path / "out/README.md").read_text()
    assert f"Its layers are the layers {in_ranges(layers)} of `trained`" in card


@pytest.mark.slow
def test_files_in_either_order(folder, tmp_path):
    """Pruned and converted, or converted and pruned: the same tensors to the last bit, and back to the same base."""
    layers = [0, 2, 3, 3]
    prune(folder / "base", tmp_path / "pruned", layers)
    convert(tmp_path / "pruned", tmp_path / "one", block_size=3, verify=False)
    prune(folder / "attnres", tmp_path / "other", layers, verify=False)
    revert(tmp_path / "other", tmp_path / "base", verify=False)
    for first, second in (("one", "other"), ("pruned", "base")):
        assert different_tensors(open_checkpoint(tmp_path / first), open_checkpoint(tmp_path / second)) == []
        first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in (first, second))
        assert first == second
    assert (tmp_path / "pruned/README.base.md").read_text() == (folder / "base/README.md").read_text()
    assert "layers 0, 2-3, 3 of `base`" in (tmp_path / "pruned/README.md").read_text()
    assert all("license: mit" in (tmp_path / name / "README.md").read_text() for name in ("pruned", "one", "other"))
    assert not (tmp_path / "other/config.base.json").exists()
    config = json.loads((tmp_path / "pruned/config.json").read_text())
    assert config["model_type"] == "qwen3" and config["num_hidden_layers"] == 4


@pytest.mark.slow
def test_files_that_bring_their_code(folder, tmp_path):
    convert(folder / "base", tmp_path / "whole", block_size=3, self_contained=True, verify=False)
    prune(tmp_path / "whole", tmp_path / "out", [0, 3])
    assert (tmp_path / "out/modeling_attnres.py").exists()
    assert "AutoModelForCausalLM" in json.loads((tmp_path / "out/config.json").read_text())["auto_map"]


def test_results_of_the_source_stay_behind(folder, tmp_path):
    shutil.copytree(folder / "trained", tmp_path / "source")
    (tmp_path / "source/evaluation").mkdir()
    (tmp_path / "source/evaluation/table.md").write_text("| scores |\n")
    prune(tmp_path / "source", tmp_path / "out", [0], verify=False)
    assert not (tmp_path / "out/evaluation").exists()


def test_further_layers_go(folder, tmp_path):
    """Those that predict further tokens, behind the last one, which would be taken for layers of this model."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "trained", tmp_path / "source")
    path = tmp_path / "source/model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    prune(tmp_path / "source", tmp_path / "out", [0, 1, 2, 3, 3], verify=False)
    names = open_checkpoint(tmp_path / "out").weight_map
    assert "model.layers.4.eh_proj.weight" not in names and "model.layers.4.input_layernorm.weight" in names


def test_destination_and_interruption(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is not empty"):
        prune(folder / "trained", folder / "base", [0])
    with pytest.raises(ValueError, match="quantised"):
        shutil.copytree(folder / "trained", tmp_path / "quantised")
        config = json.loads((tmp_path / "quantised/config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / "quantised/config.json").write_text(json.dumps(config))
        prune(tmp_path / "quantised", tmp_path / "out", [0])

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "compare_with", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prune(folder / "trained", tmp_path / "out", [0, 1])
    assert [path.name for path in tmp_path.iterdir()] == ["quantised"]


def test_costs_are_those_of_pruned_models(folder, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder / "trained").train()
    windows = torch.randint(3, 300, (3, 16))
    costs = layer_costs(model, windows, drop=2, batch_size=2)
    assert model.training

    @torch.no_grad()
    def loss(layers):
        selected = select_layers(model.eval(), layers)
        return sum(selected(ids[None], labels=ids[None]).loss.item() for ids in windows) / 3

    assert costs.loss == pytest.approx(loss(range(4)), rel=1e-5)
    alone = [loss([other for other in range(4) if other != number]) for number in range(4)]
    assert costs.costs == pytest.approx([found - costs.loss for found in alone], abs=1e-5)
    first = min(range(4), key=lambda number: alone[number])
    others = [number for number in range(4) if number != first]
    pairs = {number: loss([other for other in others if other != number]) for number in others}
    second = min(pairs, key=pairs.get)
    assert costs.left_out == [first, second] and sorted([*costs.layers, first, second]) == list(range(4))
    assert costs.losses == pytest.approx([alone[first], pairs[second]], rel=1e-5)
    only = layer_costs(model, windows)
    assert (
        only.costs == pytest.approx(costs.costs, abs=1e-5)
        and only.layers == list(range(4))
        and only.losses == only.left_out == []
    )


def test_costs_where_a_layer_cannot_go():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(decoder_config("jamba")).eval()
    costs = layer_costs(model, torch.randint(3, 99, (1, 8)), drop=1)
    assert costs.costs[:3] == [None] * 3 and costs.left_out == [3]
    for drop in (4, -1, True, 1.0):
        with pytest.raises(ValueError, match=f"`drop={drop}` must be a number of layers, from 0 to 3"):
            layer_costs(model, torch.randint(3, 99, (1, 8)), drop=drop)
    with pytest.raises(ValueError, match="`windows` must be"):
        layer_costs(model, torch.randint(3, 99, (8,)))
    model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(ValueError, match="The loss of the model on this text is nan"):
        layer_costs(model, torch.randint(3, 99, (1, 8)))


def test_command(folder, tmp_path, run_attnres, capsys):
    (tmp_path / "text.txt").write_text(read_sample()[:2000])
    options = ("--text", tmp_path / "text.txt", "--max-tokens", 128)
    assert run_attnres("prune", folder / "trained", *options) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^ \d +[+-]\d\.\d{4} +$", shown, re.MULTILINE)) == 4 and "Wrote" not in shown
    assert re.search(r"^Loss on `text.txt` \(128 tokens\): \d\.\d{4} nats per token with all layers$", shown, re.M)

    assert run_attnres("prune", folder / "trained", tmp_path / "out", "--drop", 2, *options) == 0
    shown = capsys.readouterr().out
    (layers,) = re.findall(r"^With the layers (.+): \d\.\d{4}$", shown, re.MULTILINE)
    assert re.search(r"^Passed: largest difference 0, tolerance ", shown, re.MULTILINE)
    assert shown.splitlines()[-1] == f"Wrote {tmp_path / 'out'}" and "\x1b" not in shown
    assert json.loads((tmp_path / "out/conversion_report.json").read_text())["layers"] == read_ranges(layers)

    assert (
        run_attnres("prune", folder / "base", tmp_path / "b", "--keep", "0-1,1,3", "--json", "--no-verify", *options)
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["layers"] == [0, 1, 1, 3] and found["left_out"] == [2] and found["costs"] == []
    assert found["wrote"] == [str(tmp_path / "b")] and found["num_tokens"] == 128
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    ids = AutoTokenizer.from_pretrained(tmp_path / "b")(read_sample(), add_special_tokens=False).input_ids[:128]
    assert found["losses"] == [pytest.approx(mean_loss(model, torch.tensor([ids])), rel=1e-4)]


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["out", "--drop", 2, "--keep", "0-1"], 2, "contradict"),
        (["out"], 2, "OUTPUT needs --drop or --keep"),
        (["out", "--drop", 4], 1, "`drop=4` must be a number of layers, from 0 to 3"),
        (["out", "--drop", 0], 2, "greater than or equal to 1"),
        (["out", "--keep", "0-9"], 1, "`layers` has 4, and the layers of this model go from 0 to 3"),
        (["out", "--keep", "3-1"], 1, "`3-1` must be numbers and ranges"),
        (["out", "--keep", ""], 1, "`` must be numbers and ranges"),
        (["trained", "--drop", 1], 1, "is the source itself"),
        (["base", "--drop", 1], 1, "is not empty"),
        (["out", "--drop", 1, "--text", "empty.txt"], 1, "has 0 tokens: there is nothing to read"),
        (["out", "--drop", 1, "--text", "nope.txt"], 1, "There is no file `nope.txt`"),
        (["out", "--drop", 1, "--dtype", "float31"], 1, "is not a dtype"),
        (["out", "--drop", 1, "--device", "cuda:9"], 1, "is not available"),
    ],
)
def test_command_with_mistakes(arguments, code, message, folder, run_attnres, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    Path("empty.txt").write_text("")
    assert run_attnres("prune", "trained", *arguments) == code
    printed = capsys.readouterr()
    assert message in " ".join(printed.err.split()) and printed.out == "" and not Path("out").exists()


def test_ranges():
    for numbers, text in (([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), ([3], "3"), ([1, 1, 0], "1, 1, 0"), ([], "")):
        assert in_ranges(numbers) == text and (not numbers or read_ranges(text) == numbers)
    assert read_ranges("0-11,4-5") == [*range(12), 4, 5]
    for text in ("a", "1-", "-1", "1,,2", "2-1", "1.5"):
        with pytest.raises(ValueError, match="must be numbers and ranges"):
            read_ranges(text)


def test_heterogeneous_configs():
    """What `per_layer_config` has for a layer goes with it."""
    config = LlamaConfig(num_hidden_layers=4, per_layer_config={1: {"intermediate_size": 64}})
    selected = config_with_layers(config, [3, 1, 1])
    assert [of_layer.intermediate_size for of_layer in selected.per_layer_config] == [11008, 64, 64]


# Whose models do not run here in fp64, take minutes, or pass more from layer to layer than one that is skipped has
NOT_RUN = {"reformer", "xlnet", "blt", "xglm", "glm_moe_dsa", "hy_v4"}


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in DECODERS if family not in NOT_RUN])
def test_every_decoder(family):
    """Either an error, or what the model computes whose layer is skipped."""
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    base = base_model(family)
    input_ids = torch.randint(3, 97, (2, 8))
    num_layers = getattr(base.config, "num_hidden_layers", 0)
    for number in range(num_layers):
        others = [other for other in range(num_layers) if other != number]
        try:
            selected = select_layers(base, others)
        except ValueError:
            continue
        with torch.no_grad():
            expected = with_skipped(base, others, input_ids)(input_ids, use_cache=False).logits
            assert relative(selected(input_ids, use_cache=False).logits, expected) < 1e-5, (family, number)
