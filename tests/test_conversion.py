# SPDX-License-Identifier: Apache-2.0
"""Conversion, reversal, verification and change of blocks: files in, files out, as a user runs them."""

import filecmp
import hashlib
import inspect
import json
import multiprocessing
import os
import random
import re
import shutil
import time
from collections import Counter
from dataclasses import fields

import pytest
import tiny_models
import torch
from decoder_configs import DECODERS, decoder_config
from rounding import UpToRounding
from safetensors.torch import load_file, save_file
from tiny_models import EVERY_FAMILY, randomize_queries, tiny_base_config, tiny_base_model
from tiny_models import convert as convert_in_memory
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from typer.testing import CliRunner

from attnres import AttnResConfig, AttnResForCausalLM, AttnResMultimodalConfig
from attnres.checkpoints.checkpoint import ATTNRES_TYPES
from attnres.conversion import convert, open_checkpoint, revert, verify
from attnres.conversion import parity as parity_module
from attnres.conversion.options import ConvertOptions, ReadChoice, Writing
from attnres.data.text import train_tokenizer
from attnres.depth.reads import ReadConfig
from attnres.utils import untrusted


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([parity_module.read_sample()] * 3, vocab_size=400)


@pytest.fixture
def base(tmp_path, tokenizer):
    """A base checkpoint as it comes from the Hub: sharded, in bf16, with all that lies beside weights."""
    folder = tmp_path / "base"
    model = tiny_base_model("qwen3", vocab_size=len(tokenizer)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, fr]\n---\n# Base\n")
    (folder / "LICENSE").write_text("A licence.\n")
    (folder / "assets").mkdir()
    (folder / "assets" / "picture.svg").write_text("<svg/>")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype and torch.equal(actual[name], expected[name]), name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_family(family, tmp_path):
    """Convert with its verification, and revert to the same bytes."""
    tiny_base_model(family).save_pretrained(tmp_path / "base")
    before = contents(tmp_path / "base")
    report = convert(tmp_path / "base", tmp_path / "attnres", block_size=3)
    parity = report.verification.parities[0]
    assert parity.dtype == "float32" and parity.equal and parity.tolerance < 1e-3  # of logits around 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "attnres", output_loading_info=True)
    assert isinstance(model, AttnResForCausalLM) and model.config.base_model_type == family
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    revert(tmp_path / "attnres", tmp_path / "again", verify=False)
    assert filecmp.cmp(tmp_path / "base/model.safetensors", tmp_path / "again/model.safetensors", shallow=False)
    assert AutoConfig.from_pretrained(tmp_path / "again") == AutoConfig.from_pretrained(tmp_path / "base")
    assert contents(tmp_path / "base") == before


def test_everything_comes_along(base, tmp_path):
    before = contents(base)
    report = convert(base, tmp_path / "attnres", num_blocks=3)
    assert report.block_size == 3 and report.left_behind == ["pytorch_model.bin"]
    assert {parity.dtype for parity in report.verification.parities} == {"float32", "bfloat16"}
    after = contents(tmp_path / "attnres")
    for name in ("LICENSE", "assets/picture.svg", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert after[name] == before[name]
    assert after["README.base.md"] == before["README.md"] and "pytorch_model.bin" not in after
    # the shards byte for byte under their new numbers, and one more
    shards = [name for name in before if name.endswith(".safetensors")]
    assert len(shards) > 2
    for i, name in enumerate(shards, start=1):
        assert after[f"model-{i:05d}-of-{len(shards) + 1:05d}.safetensors"] == before[name]
    added = load_file(tmp_path / f"attnres/model-{len(shards) + 1:05d}-of-{len(shards) + 1:05d}.safetensors")
    assert not added["model.depth_queries.query"].any() and (added["model.depth_queries.key_norm"] == 1).all()
    assert added["model.depth_queries.query"].dtype == torch.float32
    index = json.loads((tmp_path / "attnres/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(tmp_path / "attnres").values())
    assert json.loads((tmp_path / "attnres/conversion_report.json").read_text()) == report.to_dict()
    assert report.to_markdown() == (tmp_path / "attnres/conversion_report.md").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "attnres")("def f():").input_ids
    assert str(tmp_path) not in "".join(
        (tmp_path / "attnres" / name).read_text() for name in after if name.endswith((".json", ".md"))
    )

    revert(tmp_path / "attnres", tmp_path / "again")
    again = contents(tmp_path / "again")
    assert again.pop("conversion_report.json") and again.pop("conversion_report.md")
    del before["pytorch_model.bin"]
    assert again == before  # the config and the index as well


@pytest.mark.slow
def test_save_pretrained_can_be_reverted(base, tmp_path):
    """Queries inside of a shard with other tensors."""
    convert(base, tmp_path / "attnres", verify=False)
    AutoModelForCausalLM.from_pretrained(tmp_path / "attnres").save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").exists()
    report = revert(tmp_path / "saved", tmp_path / "again")
    assert len(report.tensors_dropped) == 2 and report.verification.equal
    assert_same_tensors(tensors(tmp_path / "again"), tensors(base))


def test_links(base, tmp_path):
    before = contents(base)
    convert(base, tmp_path / "attnres", link=True, verify=False)
    assert (tmp_path / "attnres/model-00001-of-00004.safetensors").samefile(base / "model-00001-of-00003.safetensors")
    # what is written into the linked checkpoint later does not go through the link
    model = randomize_queries(AutoModelForCausalLM.from_pretrained(tmp_path / "attnres"))
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "attnres", max_shard_size="40KB")
    assert contents(base) == before


@pytest.mark.parametrize(
    "kwargs, size", [({}, 1), ({"num_blocks": 2}, 4), ({"block_size": 5}, 5), ({"full": True}, 1)]
)
def test_python_and_command_line_say_the_same(kwargs, size, base, tmp_path, run_attnres, capsys):
    report = convert(base, tmp_path / "python", verify=False, **kwargs)
    options = [
        item
        for name, value in kwargs.items()
        for item in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]
    run_attnres("convert", base, tmp_path / "cli", "--no-verify", *options)
    assert report.block_size == size
    python, cli = contents(tmp_path / "python"), contents(tmp_path / "cli")
    assert python.keys() == cli.keys()
    named = {"README.md", "conversion_report.json", "conversion_report.md"}  # they name the folder
    assert {name for name in python if python[name] != cli[name]} <= named


def test_wrong_keywords_are_refused_and_right_ones_shown(base, tmp_path):
    for kwargs, message in (({"blocksize": 2}, "unexpected keyword argument 'blocksize'"), ({"head": 2}, "'head'")):
        with pytest.raises(TypeError, match=rf"convert\(\) got an .*{message}"):
            convert(base, tmp_path / "attnres", **kwargs)
    with pytest.raises(TypeError, match=r"convert\(\) missing a required argument: 'destination'"):
        convert(base)
    parameters = inspect.signature(convert).parameters
    assert [*parameters][:5] == ["source", "destination", "block_size", "num_blocks", "full"]
    groups = {field.name: field.default for group in (Writing, ReadChoice) for field in fields(group)}
    assert groups.pop("may_differ") is False  # which `revert` alone has, as `force`
    assert {name: parameters[name].default for name in groups} == groups
    assert groups.keys() == ConvertOptions.__annotations__.keys() and parameters["link"].annotation is bool
    assert {field.name for field in fields(ReadChoice)} == {field.name for field in fields(ReadConfig)}


def test_types_of_configs():
    """Which `checkpoints` knows by name, as it stands below them."""
    assert ATTNRES_TYPES == (AttnResConfig.model_type, AttnResMultimodalConfig.model_type)


def test_a_checkpoint_is_opened_once(base, tmp_path, monkeypatch):
    """The config of the source and that of the result are each read once, also with a card and another change."""
    read, reads = untrusted.read_bytes, []

    def counted(path):
        reads.append(path)
        return read(path)

    monkeypatch.setattr(untrusted, "read_bytes", counted)
    convert(base, tmp_path / "attnres", block_size=3, verify=False)
    convert(tmp_path / "attnres", tmp_path / "full", full=True, verify=False)
    assert Counter(path for path in reads if path.name == "config.json") == {
        base / "config.json": 1,
        tmp_path / ".attnres.unfinished/config.json": 1,
        tmp_path / "attnres/config.json": 1,
        tmp_path / ".full.unfinished/config.json": 1,
    }


@pytest.mark.slow
def test_change_of_blocks(base, tmp_path):
    convert(base, tmp_path / "attnres", block_size=3, verify=False)
    report = convert(tmp_path / "attnres", tmp_path / "full", full=True)
    assert report.operation == "Change of blocks" and report.block_size == 1 and report.verification.equal
    assert_same_tensors(tensors(tmp_path / "full"), tensors(tmp_path / "attnres"))
    assert (tmp_path / "full/README.base.md").exists()
    revert(tmp_path / "full", tmp_path / "again", verify=False)
    assert_same_tensors(tensors(tmp_path / "again"), tensors(base))


def test_blocks_are_those_that_were_asked_for(base, tmp_path):
    """More of them than sublayers are no Full AttnRes in silence, and without a number nothing changes."""
    for number in (9, 1000):
        with pytest.raises(ValueError, match=f"`num_blocks={number}` is more than the 8 sublayers of this base"):
            convert(base, tmp_path / "attnres", num_blocks=number, verify=False)
    report = convert(base, tmp_path / "attnres", num_blocks=3, verify=False)
    assert not any("asked for" in note for note in report.notes)
    with pytest.raises(ValueError, match="is an AttnRes checkpoint already, with blocks of 3 sublayers: give the"):
        convert(tmp_path / "attnres", tmp_path / "again", verify=False)
    assert not (tmp_path / "again").exists()
    report = convert(tmp_path / "attnres", tmp_path / "again", num_blocks=7, verify=False)
    assert report.block_size == 2 and any(
        note.startswith("7 blocks were requested, and the closest that fit are 4 of 2") for note in report.notes
    )
    report = convert(tmp_path / "attnres", tmp_path / "whole", self_contained=True, verify=False)
    assert report.block_size == 3


def test_trained_queries_are_not_lost(base, tmp_path):
    convert(base, tmp_path / "attnres", block_size=3, verify=False)
    model = randomize_queries(AutoModelForCausalLM.from_pretrained(tmp_path / "attnres"))
    model.save_pretrained(tmp_path / "trained")
    shutil.copy(base / "tokenizer.json", tmp_path / "trained")
    largest = model.model.depth_queries.query.norm(dim=-1).max()
    message = rf"trained queries, 9 of 9 are not zero, the largest of norm {largest:.3g} at site \d+: "
    with pytest.raises(ValueError, match=message + "its block size cannot change"):
        convert(tmp_path / "trained", tmp_path / "again")
    with pytest.raises(ValueError, match=message + "without them it computes something else. `--force`"):
        revert(tmp_path / "trained", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    report = revert(tmp_path / "trained", tmp_path / "again", force=True)
    assert_same_tensors(tensors(tmp_path / "again"), tensors(base))
    parity = report.verification.parities[0]
    assert not report.verification.equal and parity.kl_divergence > 1e-3
    assert parity.perplexities[0] != pytest.approx(parity.perplexities[1], rel=1e-3)
    assert "they differ, first at `layers.0.post_attention_layernorm`" in report.to_markdown()


def test_trained_from_scratch_is_not_its_base(tmp_path):
    convert_in_memory(tiny_base_model("llama"), 3, exact=False).save_pretrained(tmp_path / "scratch")
    for operation in (convert, revert):
        with pytest.raises(ValueError, match="has `attn_res_scale_norm_eps=False`"):
            operation(tmp_path / "scratch", tmp_path / "again")


OTHER_HEADS = [
    ("gpt2", AutoModelForTokenClassification),
    ("falcon", AutoModelForTokenClassification),
    ("opt", AutoModelForSequenceClassification),
]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("kind", ["trunk", "classifier"])
def test_other_heads(kind, model_type, tmp_path):
    base_model = AutoModelForCausalLM.from_config(decoder_config(model_type)).eval()
    if kind == "trunk":
        base_model.base_model.save_pretrained(tmp_path / "base")
        auto_class = AutoModel
    else:
        base_model.save_pretrained(tmp_path / "causal")
        auto_class = AutoModelForSequenceClassification
        auto_class.from_pretrained(tmp_path / "causal", num_labels=3).save_pretrained(tmp_path / "base")
    report = convert(tmp_path / "base", tmp_path / "attnres", block_size=3)
    assert report.verification.equal and report.verification.parities[0].perplexities is None
    model, info = auto_class.from_pretrained(tmp_path / "attnres", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    base_model = auto_class.from_pretrained(tmp_path / "base")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        UpToRounding(lambda: base_model(ids)[0], model=base_model).check(model(ids)[0])
    revert(tmp_path / "attnres", tmp_path / "again")
    assert_same_tensors(tensors(tmp_path / "again"), tensors(tmp_path / "base"))


@pytest.mark.parametrize("model_type, auto_class", OTHER_HEADS)
def test_a_head_that_would_be_lost_is_refused(model_type, auto_class, tmp_path):
    """Its tensors have another name or shape: it would load without them, and a trunk is all that is compared."""
    auto_class.from_config(decoder_config(model_type)).save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match="The head of `.*base` is not that of an AttnResFor.*, in which `score.weight`"
    ):
        convert(tmp_path / "base", tmp_path / "attnres")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_tokenizer_without_a_class(base, tmp_path):
    """Found by the model type of the base, which the conversion does not have."""
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tokenizer_class"}))
    report = convert(base, tmp_path / "attnres", verify=False)
    ids = [AutoTokenizer.from_pretrained(folder)("def f(): é").input_ids for folder in (base, tmp_path / "attnres")]
    assert ids[0] == ids[1]
    assert report.notes == [] or "tokenizer saved again" in report.notes[0]


def quantize_mxfp4(loaded):
    """As in the released checkpoints of gpt_oss: 4-bit numbers in pairs, one scale for 32 of them."""
    for name in [name for name in loaded if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = loaded.pop(name).shape
        loaded[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        loaded[f"{name}_scales"] = torch.randint(118, 124, (experts, columns, rows // 32), dtype=torch.uint8)


def quantize_fp8(loaded):
    """One scale for a tile of 128 x 128."""
    for name in [name for name in loaded if name.endswith("proj.weight")]:
        tiles = loaded[name].float().unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
        scales = tiles.abs().amax((1, 3), keepdim=True) / 448
        loaded[name] = (tiles / scales).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
        loaded[f"{name}_scale_inv"] = scales.squeeze((1, 3)).clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, kwargs, quantize, quantization_config",
    [
        (
            "gpt_oss",
            {"intermediate_size": 64},
            quantize_mxfp4,
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        ),
        (
            "llama",
            {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4},
            quantize_fp8,
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        ),
        (
            "qwen3_moe",
            {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_key_value_heads": 4}
            | {"head_dim": 32},
            quantize_fp8,
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        ),
    ],
    ids=["mxfp4", "fp8", "fp8_experts"],
)
def test_quantized(family, kwargs, quantize, quantization_config, tmp_path):
    """The quantised tensors are copied as they are; compared is what transformers makes of them."""
    torch.manual_seed(0)
    tiny_base_model(family, **kwargs).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    loaded = load_file(tmp_path / "base/model.safetensors")
    quantize(loaded)
    save_file(loaded, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    edit_json(tmp_path / "base/config.json", quantization_config=quantization_config)
    report = convert(tmp_path / "base", tmp_path / "attnres", block_size=3)
    assert [parity.dtype for parity in report.verification.parities] == ["bfloat16"] and report.verification.equal
    assert ("median token" in report.verification.parities[0].criterion) == (family != "llama")
    written = tensors(tmp_path / "attnres")
    assert {name: written[name].dtype for name in loaded} == {name: loaded[name].dtype for name in loaded}
    assert written["model.depth_queries.query"].dtype == torch.float32
    revert(tmp_path / "attnres", tmp_path / "again", verify=False)
    assert filecmp.cmp(tmp_path / "base/model.safetensors", tmp_path / "again/model.safetensors", shallow=False)
    name = "model.layers.2.post_attention_layernorm.weight"

    def change(loaded):
        if name in loaded:
            loaded[name] += 0.5

    assert not verify(tmp_path / "base", broken(tmp_path / "attnres", tmp_path, change)).equal


# --- verification


def broken(folder, tmp_path, change):
    """A copy of an AttnRes checkpoint with one tensor changed."""
    shutil.copytree(folder, tmp_path / "broken")
    for path in (tmp_path / "broken").glob("*.safetensors"):
        loaded = load_file(path)
        change(loaded)
        save_file(loaded, path, metadata={"format": "pt"})
    return tmp_path / "broken"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, place",
    [
        ("model.layers.2.self_attn.v_proj.weight", "`layers.2.post_attention_layernorm`"),
        ("model.layers.1.mlp.down_proj.weight", "`layers.2.input_layernorm`"),
        ("model.layers.3.post_attention_layernorm.weight", "`layers.3.post_attention_layernorm`"),
        ("model.norm.weight", "`norm`"),
        ("lm_head.weight", "the head"),
    ],
)
def test_verify_names_the_first_difference(name, place, base, tmp_path):
    convert(base, tmp_path / "attnres", block_size=3, verify=False)

    def change(loaded):
        if name in loaded:
            loaded[name] += 0.01

    other = broken(tmp_path / "attnres", tmp_path, change)
    assert verify(base, tmp_path / "attnres", max_tokens=128).equal
    report = verify(base, other, max_tokens=128)
    assert not report.equal and report.first_difference == place


def test_verify_sees_what_rounding_does_not_do(base, tmp_path):
    """The smallest fault that matters: the epsilons left alone."""
    convert(base, tmp_path / "attnres", block_size=3, verify=False)
    config = json.loads((tmp_path / "attnres/config.json").read_text())
    (tmp_path / "attnres/config.json").write_text(json.dumps({**config, "attn_res_scale_norm_eps": False}))
    report = verify(base, tmp_path / "attnres")
    assert not report.equal and not report.parities[0].equal
    # the embedding alone is read at first, by a scale of 1
    assert report.first_difference == "`layers.0.post_attention_layernorm`"


@pytest.mark.slow
# Found among 36 random ones: near-ties between experts in more windows of the second model than of the first
@pytest.mark.parametrize("family, seed", [("nemotron_h", 3)])
def test_experts_at_near_ties_in_half_precision(family, seed, tmp_path, monkeypatch):
    """fp32 shows the same function, so bf16 is for information; a wrong weight is found in fp32."""
    monkeypatch.setitem(tiny_models.FAMILIES, "nemotron_h", DECODERS["nemotron_h"])
    tiny_base_model(family, seed=seed).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    report = convert(tmp_path / "base", tmp_path / "attnres", block_size=3)
    in_fp32, in_bf16 = report.verification.parities
    assert in_fp32.dtype == "float32" and in_fp32.decides and in_fp32.equal and report.verification.equal
    assert in_bf16.dtype == "bfloat16" and not in_bf16.decides and in_bf16.measured <= in_bf16.tolerance
    assert "For information: in bfloat16 the relative error" in report.to_markdown()
    name = next(name for name in tensors(tmp_path / "attnres") if name.endswith("o_proj.weight"))

    def change(loaded):
        if name in loaded:
            loaded[name][::2] += 0.01

    found = verify(tmp_path / "base", broken(tmp_path / "attnres", tmp_path, change))
    assert not found.equal and not found.parities[0].equal and found.first_difference


def test_a_conversion_that_is_not_equal_leaves_nothing(base, tmp_path, monkeypatch):
    monkeypatch.setattr(parity_module, "FP32_TOLERANCE", 0)
    with pytest.raises(
        ValueError, match="would not compute the same as .*, so it is not written. Failed: .* The first difference"
    ):
        convert(base, tmp_path / "attnres")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.mark.slow
def test_verify_on_the_command_line(base, tmp_path, run_attnres, capsys):
    convert(base, tmp_path / "attnres", verify=False)
    (tmp_path / "text.txt").write_text("import os\n" * 40)
    assert run_attnres("verify", base, tmp_path / "attnres", "--text", tmp_path / "text.txt") == 0
    assert "the same function, up to rounding" in " ".join(capsys.readouterr().out.split())
    other = broken(tmp_path / "attnres", tmp_path, lambda loaded: [t.mul_(1.1) for t in loaded.values()])
    assert run_attnres("verify", base, other) == 1
    assert "they differ, first at layers.0.input_layernorm" in " ".join(capsys.readouterr().out.split())


# --- bad input


def edit_json(path, **changes):
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def truncate(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


def drop_tensor(folder, name):
    shard = open_checkpoint(folder).weight_map[name]
    loaded = load_file(folder / shard)
    del loaded[name]
    save_file(loaded, folder / shard, metadata={"format": "pt"})
    edit_index(folder, lambda weight_map: weight_map.pop(name))


def reshape_tensor(folder, name):
    shard = open_checkpoint(folder).weight_map[name]
    loaded = load_file(folder / shard)
    loaded[name] = loaded[name][:-1].contiguous()
    save_file(loaded, folder / shard, metadata={"format": "pt"})


SHARD = "model-00002-of-00003.safetensors"
BAD_SOURCES = {
    "no config": (lambda d: (d / "config.json").unlink(), "holds no config.json"),
    "adapter": (
        lambda d: (d / "config.json").rename(d / "adapter_config.json"),
        "is a PEFT adapter, not a model. Merge it",
    ),
    "gguf": (
        lambda d: ((d / "config.json").unlink(), (d / "model.gguf").write_bytes(b"GGUF")),
        "`attnres convert --gguf-file model.gguf` converts its GGUF file",
    ),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json` is not JSON"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "config.json` holds no JSON object"),
    "no model type": (lambda d: edit_json(d / "config.json", model_type=None), "names no `model_type`"),
    "unsupported": (
        lambda d: edit_json(d / "config.json", model_type="inkling2"),
        "`base_model_type='inkling2(_text)?'` is not supported: it is an attention-residual architecture already",
    ),
    "unknown": (
        lambda d: edit_json(d / "config.json", model_type="mystery"),
        "`base_model_type='mystery'` is not supported: transformers \\S+ has no causal language model of this type",
    ),
    "wrong field": (
        lambda d: edit_json(d / "config.json", hidden_size="large"),
        "(?s)config.json of .* is not valid: .*hidden_size",
    ),
    "pickle": (
        lambda d: [path.unlink() for path in d.glob("model*")],
        "weights in `pytorch_model.bin`, a pickle, which can run code when it is read. If you trust it, save it as",
    ),
    "no weights": (
        lambda d: [path.unlink() for path in [*d.glob("model*"), d / "pytorch_model.bin"]],
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "no weight map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json` has no `weight_map`",
    ),
    "shard missing": (lambda d: (d / SHARD).unlink(), f"names the file `{SHARD}`, which is not there"),
    "shard outside": (
        lambda d: edit_index(d, lambda w: w.update({"lm_head.weight": "../other.safetensors"})),
        "names the file `../other.safetensors`, which is not there",
    ),
    "shard truncated": (lambda d: truncate(d / SHARD, 9000), f"{SHARD}` is truncated or not a safetensors file"),
    "shard empty": (lambda d: truncate(d / SHARD, 0), f"{SHARD}` is truncated or not a safetensors file"),
    "shard of text": (lambda d: (d / SHARD).write_text("version https://git-lfs"), "truncated or not a safetensors"),
    "index lacks an entry": (
        lambda d: edit_index(d, lambda w: w.pop("model.norm.weight")),
        "holds the tensor `model.norm.weight`, which the index does not list as its own",
    ),
    "index has one too many": (
        lambda d: edit_index(d, lambda w: w.update({"model.extra": SHARD})),
        "lacks the tensor `model.extra`, which the index lists",
    ),
    "tensor missing": (
        lambda d: drop_tensor(d, "model.layers.2.mlp.up_proj.weight"),
        "is not a complete qwen3 checkpoint: 1 tensors are missing, among them `model.layers.2.mlp.up_proj.weight`",
    ),
    "tensor of another shape": (
        lambda d: reshape_tensor(d, "model.layers.2.mlp.up_proj.weight"),
        r"another shape, among them `model.layers.2.mlp.up_proj.weight` .* ckpt: torch.Size\(\[47, 32\]\) vs model",
    ),
    "queries of Kimi": (
        lambda d: (
            save_file({"model.output_attn_res_proj.weight": torch.zeros(1, 32)}, d / "more.safetensors"),
            edit_index(d, lambda w: w.update({"model.output_attn_res_proj.weight": "more.safetensors"})),
        ),
        "has depth queries of another implementation .* use `attnres import`",
    ),
    "too many tokens": (
        lambda d: AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(d, vocab_size=100, dtype="float32")
        ).save_pretrained(d, max_shard_size="40KB"),
        "The tokenizer of .* gives token [0-9]+, but its model has only 100",
    ),
}


def put_nan(folder, value):
    shard = open_checkpoint(folder).weight_map["model.layers.1.mlp.up_proj.weight"]
    loaded = load_file(folder / shard)
    loaded["model.layers.1.mlp.up_proj.weight"][3, :2] = value
    save_file(loaded, folder / shard, metadata={"format": "pt"})


BAD_SOURCES |= {
    "card not UTF-8": (
        lambda d: (d / "README.md").write_bytes(b"---\nlicense: \xff\n---\n"),
        "README.md` cannot be read",
    ),
    "card of broken YAML": (
        lambda d: (d / "README.md").write_text("---\nlicense: [mit\n---\n# A\n"),
        "README.md` cannot be read, mend or remove it",
    ),
    "card of a list": (lambda d: (d / "README.md").write_text("---\n- mit\n---\n# A\n"), "README.md` cannot be read"),
    "NaN": (
        lambda d: put_nan(d, float("nan")),
        "`model.layers.1.mlp.up_proj.weight` in `model-.*` has values that are not finite, 2 of 1536",
    ),
    "infinite": (lambda d: put_nan(d, float("inf")), "up_proj.weight` in .* has values that are not finite, 2 of"),
}


@pytest.mark.parametrize("kind", BAD_SOURCES)
def test_bad_sources(kind, base, tmp_path, monkeypatch, capsys):
    damage, message = BAD_SOURCES[kind]
    damage(base)
    before = contents(base)
    with pytest.raises((ValueError, OSError), match=message):
        convert(base, tmp_path / "attnres")
    assert contents(base) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


WRONG_VALUES = (None, "x", -1, 0, 1.5, float("nan"), 10**9, True, [], {"x": 1})
# What does not matter to a conversion, or is a value to be taken as it is: any of these may succeed
HARMLESS = {
    *("transformers_version", "initializer_range", "attention_dropout", "pretraining_tp", "use_cache", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "tie_word_embeddings", "num_labels"),
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "sliding_window", "unknown"),
}


# Fields that a config may have
FURTHER_FIELDS = ("quantization_config", "auto_map", "unknown", "num_labels")


def wrong_configs(config, values):
    """Every value for every field; of those for which most succeed, and are verified, four."""
    fields = dict.fromkeys(FURTHER_FIELDS) | config
    few = (None, "x", 0, {"x": 1})
    return [
        (field, value)
        for field in fields
        for value in (few if field in HARMLESS else values)
        if fields[field] != value
    ]


def check_wrong_config(config, field, value, base, out, text):
    """One line, nothing left behind; or a conversion that was verified, where the value does no harm."""
    (base / "config.json").write_text(json.dumps({**config, field: value}))
    try:
        report = convert(base, out, verify_text=text)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and "please report" not in str(error), (field, value, error)
    else:
        assert report.verification.equal and (field in HARMLESS or value in (None, [], {"x": 1}, 1.5)), (field, value)
        shutil.rmtree(out)
    assert sorted(path.name for path in base.parent.iterdir()) == ["base", "text.txt"]


def make_small_base(family, tmp_path):
    tiny_base_model(family, num_hidden_layers=1).save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("import os\n")
    convert(tmp_path / "base", tmp_path / "out", verify_text=tmp_path / "text.txt")  # it can be done
    shutil.rmtree(tmp_path / "out")
    return json.loads((tmp_path / "base/config.json").read_text())


SAMPLE_OF_WRONG_VALUES = [
    *(("num_hidden_layers", 0), ("num_hidden_layers", 10**12), ("num_attention_heads", 0), ("rms_norm_eps", -1.0)),
    *(("rms_norm_eps", float("nan")), ("hidden_act", "nothing"), ("quantization_config", 3), ("dtype", "float99")),
    *(("quantization_config", {}), ("architectures", "LlamaForCausalLM"), ("architectures", [3])),
    *(("architectures", {"x": 1}), ("dtype", 3), ("max_position_embeddings", -1), ("num_labels", "x")),
    ("num_labels", 10**12),
    *(("head_dim", 0), ("pad_token_id", 10**6), ("vocab_size", 5), ("rope_parameters", 3), ("intermediate_size", 7)),
]


def test_wrong_values_in_a_config(tmp_path):
    """What was met, one by one: each is told before a file is written."""
    config = make_small_base("llama", tmp_path)
    for field, value in SAMPLE_OF_WRONG_VALUES:
        assert field in (*config, *FURTHER_FIELDS)
        check_wrong_config(config, field, value, tmp_path / "base", tmp_path / "out", tmp_path / "text.txt")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_field_of_a_config_wrong_once(family, tmp_path):
    config = make_small_base(family, tmp_path)
    # Of a mixture of experts those that Llama does not have
    others = set() if family == "llama" else {*FURTHER_FIELDS, *tiny_base_config("llama").to_dict()}
    for field, value in wrong_configs(config, WRONG_VALUES):
        if field in others:
            continue
        check_wrong_config(config, field, value, tmp_path / "base", tmp_path / "out", tmp_path / "text.txt")


@pytest.mark.parametrize("verbosity", ["--quiet", "--verbose", None])
def test_an_expert_is_missing(verbosity, tmp_path, run_attnres, capsys):
    """In a checkpoint whose experts are fused when it is loaded. The name comes from what transformers logs."""
    tiny_base_model("mixtral").save_pretrained(tmp_path / "base", max_shard_size="40KB")
    drop_tensor(tmp_path / "base", "model.layers.2.block_sparse_moe.experts.0.w1.weight")
    assert run_attnres("convert", tmp_path / "base", tmp_path / "attnres", *[verbosity] * bool(verbosity)) == 1
    message = r"Error: .*tensors are missing .*`model.layers.2.mlp.experts.gate_up_proj`"
    assert re.search(message, capsys.readouterr().err)


def test_code_of_strangers_is_not_run(base, tmp_path):
    """Of a tokenizer and of a model, both of which ask for it."""
    witness = tmp_path / "witness"
    for name in ("tokenization_mine", "modeling_mine", "configuration_mine"):
        (base / f"{name}.py").write_text(f"open({str(witness)!r}, 'w')")
    edit_json(base / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_mine.Mine", None]})
    auto_map = {"AutoConfig": "configuration_mine.C", "AutoModelForCausalLM": "modeling_mine.M"}
    edit_json(base / "config.json", auto_map=auto_map)
    edit_json(base / "tokenizer_config.json", tokenizer_class="Mine")
    (base / "tokenizer.json").unlink()
    report = convert(base, tmp_path / "attnres", num_blocks=2)
    assert report.verification.equal and "its bytes as token ids" in report.verification.text
    assert "it has no tokenizer that loads here" in report.notes[0]
    assert "auto_map" not in json.loads((tmp_path / "attnres/config.json").read_text())
    assert (tmp_path / "attnres/tokenization_mine.py").exists() and not witness.exists()
    edit_json(base / "config.json", model_type="mine")
    with pytest.raises(ValueError, match="trust_remote_code"):
        verify(base, tmp_path / "attnres")
    assert not witness.exists()


def fill(path):
    path.mkdir()
    (path / "file").write_text("")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["base", "base"], "`base` is the source itself"),
        (["base", "./base/../base/"], "is the source itself"),
        (["base", "base/inside"], "is inside the source"),
        (["base", "full"], "`full` is not empty"),
        (["base", "full/file"], "`full/file` is a file"),
        (["base", "link"], "`link` is a link, to `nowhere`; name the folder itself"),
        (["base", "out", "--revision", "main"], "`revision='main'` is for Hub ids"),
        (["./nowhere", "out"], "There is no folder `./nowhere`"),
        (["a/b/c", "out"], "There is no folder `a/b/c`"),
        (["nobody/nothing", "out"], "There is no folder `nobody/nothing`, and the Hub cannot be reached"),
        (["no such name", "out"], "`no such name` is neither a folder nor a Hub id"),
        (["full/file", "out"], "`full/file` is a file"),
        (["base", "out", "--verify-text", "nowhere.txt"], "nowhere.txt"),
        (["base", "out", "--verify-text", "full/file"], "has 0 tokens; give one with at least 2"),
        (["base", "out", "--verify-text", "base/model-00001-of-00003.safetensors"], "is not UTF-8 text"),
        (["base", "out", "--device", "nonsense"], "`device='nonsense'` cannot be used here: "),
        pytest.param(
            ["base", "out", "--device", "cuda"],
            "`device='cuda'` cannot be used here: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments, message, base, tmp_path, monkeypatch, capsys, run_attnres):
    """One line on the command line, exit code 1, nothing written."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "full")
    (tmp_path / "link").symlink_to("nowhere")
    before = contents(tmp_path)
    assert run_attnres("convert", *arguments) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "Error: " in error and message in error and "Traceback" not in error
    assert contents(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--full", "--num-blocks", "2"], "contradict"),
        (["--block-size", "0"], "--block-size"),
        (["--num-blocks", "-1"], "--num-blocks"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_usage(arguments, word, base, tmp_path, capsys, run_attnres):
    assert run_attnres("convert", base, tmp_path / "out", *arguments) == 2
    assert word in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="`num_blocks=2`, `full=True` contradict"):
        convert(base, tmp_path / "out", num_blocks=2, full=True)


def test_no_room(base, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(OSError, match=r"needs 0.0 GB, but its disk has 0.0 GB free. On the same disk `--link`"):
        convert(base, tmp_path / "attnres")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(base, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OSError, match="Permission denied"):
        convert(base, tmp_path / "locked/attnres")


def test_reverting_what_is_no_attnres_checkpoint(base, tmp_path):
    with pytest.raises(ValueError, match="is a `qwen3` checkpoint, not an AttnRes one; there is nothing to revert"):
        revert(base, tmp_path / "again")


def test_verifying_what_cannot_be_compared(base, tmp_path):
    tiny_base_model("qwen3").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"cannot be compared: vocabularies of \d+ and 97 tokens"):
        verify(base, tmp_path / "other")
    with pytest.raises(ValueError, match="`max_tokens=1` must be at least 2"):
        verify(base, base, max_tokens=1)


def test_help_of_every_command():
    from attnres.cli import app

    for command in ("convert", "revert", "verify", "import", "export", "card", "push"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0


# --- atomic


def convert_in_a_process(source, destination, verify):
    convert(source, destination, block_size=3, verify=verify)


def test_two_at_once(base, tmp_path):
    from filelock import FileLock

    with FileLock(tmp_path / ".attnres.lock"):
        with pytest.raises(OSError, match="Another process is writing"):
            convert(base, tmp_path / "attnres")
    convert(base, tmp_path / "attnres", verify=False)


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """SIGKILL at 8 random moments: nothing or everything is there, the source is untouched, and a rerun works."""
    source, destination = tmp_path / "base", tmp_path / "attnres"
    model = tiny_base_model("llama", hidden_size=256, intermediate_size=6144)
    model.save_pretrained(source, max_shard_size="20MB")
    before = contents(source)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["attnres.conversion.exchange", "transformers.models.llama.modeling_llama"])

    def start(verify):
        process = context.Process(target=convert_in_a_process, args=(source, destination, verify))
        process.start()
        return process

    start(verify=False).join()  # the server has started
    shutil.rmtree(destination)
    durations = {}
    for verify_too in (False, True):
        begin = time.perf_counter()
        process = start(verify_too)
        process.join()
        durations[verify_too] = time.perf_counter() - begin
        assert process.exitcode == 0
        complete = contents(destination)
        shutil.rmtree(destination)
    generator = random.Random(0)
    outcomes = []
    for i in range(8):
        verify_too = i in (0, 5)
        if i % 4 < 2:  # the others find what the last one has left
            shutil.rmtree(tmp_path / ".attnres.unfinished", ignore_errors=True)
        process = start(verify_too)
        if i == 6:  # however fast the machine is now, once while it writes
            while not (tmp_path / ".attnres.unfinished").exists():
                time.sleep(0.001)
        elif i > 0:  # the first one before it begins
            earliest = 0.9 if i % 2 else 0  # every other one near the end, where the folder gets its name
            time.sleep(generator.uniform(earliest, 1.05) * durations[verify_too])
        process.kill()
        process.join()
        unfinished = (tmp_path / ".attnres.unfinished").exists()
        outcomes.append("complete" if destination.exists() else "unfinished" if unfinished else "nothing")
        if destination.exists():
            found = contents(destination)
            assert found.keys() == complete.keys()
            named = {"README.md", "conversion_report.json", "conversion_report.md"}  # they tell the time it took
            assert {name for name in found if found[name] != complete[name]} <= named
            json.loads((destination / "conversion_report.json").read_text())
            shutil.rmtree(destination)
    assert contents(source) == before
    assert {"unfinished", "nothing"} <= set(outcomes), outcomes
    process = start(verify=False)
    process.join()
    assert process.exitcode == 0 and contents(destination).keys() == complete.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attnres", "base"]
