# SPDX-License-Identifier: Apache-2.0
"""`config.json` as models have it on the Hub, but small: each goes through everything that is done with a checkpoint.

`helpers/published_configs.json` has them with all their fields, those that transformers does not know included; what
was made small are sizes, counts of layers and experts, and ids of tokens. What says how weights were quantised is left
out.
"""

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from decoder_configs import decoder_config
from peft import LoraConfig, get_peft_model
from rounding import UpToRounding
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MllamaConfig

from attnres import AttnResForCausalLM
from attnres.checkpoints.checkpoint import read_decoder_config
from attnres.conversion import convert, open_checkpoint, revert
from attnres.conversion.parity import check_finite_weights
from attnres.conversion.probe_report import describe_probe


CONFIGS = json.loads((Path(__file__).with_name("helpers") / "published_configs.json").read_text())


def write_checkpoint(folder: Path, config: dict):
    """Random weights, and the file of its config as it was published, not as transformers would write it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
    before = (folder / "config.json").read_bytes()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # so that layers do something
                parameter.mul_(3)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(before)


def padded(vocab_size: int = 128) -> dict[str, torch.Tensor]:
    """Two prompts, of 40 and 17 tokens: longer than the windows, and than what rotary embeddings were scaled from."""
    ids, mask = torch.randint(3, vocab_size, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, :23] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", CONFIGS)
def test_published_config(name, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "attnres"
    write_checkpoint(base, CONFIGS[name])
    assert "It can be a base" in describe_probe(read_decoder_config(str(base)))[0]
    (tmp_path / "text.txt").write_text("import os\n" * 16)
    assert convert(base, folder, block_size=3, verify_text=tmp_path / "text.txt").verification.equal

    native = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert isinstance(model, AttnResForCausalLM) and not any(
        info[kind] for kind in ("missing_keys", "mismatched_keys")
    )
    inputs = padded()
    with torch.no_grad():
        UpToRounding(lambda: native(inputs["input_ids"]).logits, model=native).check(model(inputs["input_ids"]).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(**inputs, **options), native.generate(**inputs, **options))

    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)

    revert(folder, tmp_path / "again", verify=False)
    assert (tmp_path / "again/config.json").read_bytes() == (base / "config.json").read_bytes()
    expected, found = (load_file(path / "model.safetensors") for path in (base, tmp_path / "again"))
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)


# A type, and names that published checkpoints of it have
CLASS_NAMES = [
    ("llama", ["LLaMAForCausalLM"]),
    ("llama", None),
    ("mixtral", ["LlamaForCausalLM"]),
    ("falcon", ["RWForCausalLM"]),
    ("gpt_bigcode", ["GPTBigCodeLMHeadModel"]),
    ("gpt_bigcode", ["GPT2LMHeadCustomModel"]),
]
# What the tensors of a draft model are made of, from those of a whole model
DRAFTS = {
    "EAGLE": (
        ["LlamaForCausalLMEagle"],
        lambda tensors: {
            **{name: tensor for name, tensor in without_prefix(tensors).items() if name.startswith(("layers", "emb"))},
            "fc.weight": torch.zeros(32, 64),
        },
        "tensors are missing, among them `norm.weight`",
    ),
    "EAGLE 3": (
        ["LlamaForCausalLMEagle3"],
        lambda tensors: {**tensors, "fc.weight": torch.zeros(32, 96), "d2t": torch.zeros(32, dtype=torch.long)},
        "it has tensors that LlamaForCausalLM has not, among them `d2t`",
    ),
    "DFlash": (
        ["DFlashDraftModel"],
        lambda tensors: {
            **{
                name: tensor for name, tensor in without_prefix(tensors).items() if name.startswith(("layers", "norm"))
            },
            "hidden_norm.weight": torch.zeros(32),
        },
        "tensors are missing, among them `embed_tokens.weight`",
    ),
    "whole trunk": (
        ["SomeDraftModel"],
        lambda tensors: without_prefix({name: tensors[name] for name in tensors if name != "lm_head.weight"}),
        "`architectures=.'SomeDraftModel'.` is not a class of this type, and its tensors are not those of Llama",
    ),
}


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model_type, architectures", CLASS_NAMES, ids=str)
def test_class_names(model_type, architectures, tmp_path):
    """transformers loads them by their type; the way back gives the name and the formatting of the file as well."""
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(decoder_config(model_type)).save_pretrained(base)
    config = {**json.loads((base / "config.json").read_text()), "_block_types": ["x"], "_num_mtp_layers": 0}
    del config["architectures"]
    if architectures is not None:
        config |= {"architectures": architectures, "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (base / "config.json").write_text(json.dumps(config, indent=4))
    verification = convert(base, tmp_path / "attnres", block_size=3).verification
    assert verification.equal and verification.parities[0].perplexities is not None  # with its head
    assert json.loads((tmp_path / "attnres/config.json").read_text())["architectures"] == ["AttnResForCausalLM"]
    convert(tmp_path / "attnres", tmp_path / "full", full=True, verify=False)
    revert(tmp_path / "full", tmp_path / "again", verify=False)
    assert (tmp_path / "again/config.json").read_bytes() == (base / "config.json").read_bytes()
    assert not (tmp_path / "again/config.base.json").exists()


@pytest.mark.parametrize("kind", DRAFTS)
def test_draft_models_are_told_by_their_tensors(kind, tmp_path):
    architectures, change, message = DRAFTS[kind]
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(decoder_config("llama")).save_pretrained(base)
    save_file(change(load_file(base / "model.safetensors")), base / "model.safetensors", metadata={"format": "pt"})
    edit_config(base, architectures=architectures)
    with pytest.raises(ValueError, match=message):
        convert(base, tmp_path / "attnres")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def edit_config(folder: Path, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_config_that_was_changed_is_not_replaced_by_the_old_one(tmp_path):
    """What was done to the AttnRes checkpoint goes into its base; a kept file that is no config is told."""
    AutoModelForCausalLM.from_config(decoder_config("llama")).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", block_size=3, verify=False)
    edit_config(tmp_path / "attnres", rms_norm_eps=1e-3)
    revert(tmp_path / "attnres", tmp_path / "again", verify=False)
    assert AutoConfig.from_pretrained(tmp_path / "again").rms_norm_eps == 1e-3
    for content, message in (("{", "is not JSON"), ('{"model_type": "llama", "vocab_size": "x"}', "is not valid")):
        (tmp_path / "attnres/config.base.json").write_text(content)
        with pytest.raises(ValueError, match=f"config.base.json` {message}"):
            revert(tmp_path / "attnres", tmp_path / "once more")
        assert not (tmp_path / "once more").exists()
    (tmp_path / "attnres/config.base.json").unlink()
    (tmp_path / "attnres/config.base.json").symlink_to(tmp_path / "base/config.json")
    with pytest.raises(ValueError, match="`config.base.json` of .* is a link to .*, outside the folder"):
        revert(tmp_path / "attnres", tmp_path / "once more")


@pytest.fixture
def six_layers(tmp_path) -> Path:
    AutoModelForCausalLM.from_config(decoder_config("llama", num_hidden_layers=6)).save_pretrained(tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "attnres", block_size=3, verify=False)
    return tmp_path


def test_fewer_layers_than_the_weights_have(six_layers):
    """A base can be cut while it is loaded. Queries are of all layers, and start again if that is asked for."""
    for auto_class in (AutoModelForCausalLM, AttnResForCausalLM):
        with pytest.raises(ValueError, match="has 13 reads over depth, and with `num_hidden_layers=2` there are 5: "):
            auto_class.from_pretrained(six_layers / "attnres", num_hidden_layers=2)
    cut = AutoModelForCausalLM.from_pretrained(
        six_layers / "attnres", num_hidden_layers=2, ignore_mismatched_sizes=True
    )
    base = AutoModelForCausalLM.from_pretrained(six_layers / "base", num_hidden_layers=2)
    of_base = AttnResForCausalLM.from_pretrained(six_layers / "base", num_hidden_layers=2)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = UpToRounding(lambda: base(ids).logits, model=base)
        expected.check(cut(ids).logits)
        expected.check(of_base(ids).logits)


def test_more_layers_than_the_config_says(six_layers):
    """As where layers of two models are put one behind the other. Those that predict further tokens may be there."""
    for name in ("base", "attnres"):
        folder = six_layers / name
        tensors = {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}
        for key in [key for key in tensors if key.startswith(("model.layers.4.", "model.layers.5."))]:
            number = int(key.split(".")[2])
            tensors[key.replace(f"layers.{number}.", f"layers.{number + 2}.")] = tensors[key].clone()
        for path in folder.glob("model*"):
            path.unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="`num_hidden_layers=6` must be 8, or the weights without the layers"):
            (convert if name == "base" else revert)(folder, six_layers / "out")
    with pytest.raises(ValueError, match="has 8 layers, of which `num_hidden_layers=6` .* would leave out the last"):
        AutoModelForCausalLM.from_pretrained(six_layers / "attnres")

    further = load_file(six_layers / "base/model.safetensors")
    further |= {f"model.layers.{number}.eh_proj.weight": torch.zeros(32, 64) for number in (6, 7)}
    save_file(further, six_layers / "base/model.safetensors", metadata={"format": "pt"})
    assert convert(six_layers / "base", six_layers / "out", verify=False).num_sublayers == 12
    assert AutoModelForCausalLM.from_pretrained(six_layers / "out").config.num_hidden_layers == 6


def test_an_adapter_beside_whole_weights(six_layers):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(six_layers / "base"), LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(six_layers / "base")
    with pytest.raises(ValueError, match="holds both an adapter and full weights, .* Remove `adapter_config.json` if"):
        convert(six_layers / "base", six_layers / "out")
    assert not (six_layers / "out").exists()


def test_bounds_may_be_infinite(tmp_path):
    """As of what gemma4 clips; but not be no number, and weights may be neither."""
    AutoModelForCausalLM.from_config(decoder_config("llama")).save_pretrained(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    for bound, message in ((math.inf, None), (math.nan, "`model.input_max` in .* has values that are not finite")):
        save_file({**tensors, "model.input_max": torch.tensor(bound)}, file, metadata={"format": "pt"})
        with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
            check_finite_weights(open_checkpoint(tmp_path / "base"))


WRONG_CONFIGS = {
    "heads that do not divide": {"model_type": "gpt_neox", "hidden_size": 8196, "num_attention_heads": 64},
    "mamba2 of fla": {"model_type": "mamba2", "hidden_size": 2048, "num_heads": 64, "head_dim": 96, "expand": 2},
    "a type of another kind": {"model_type": "llama", "rope_scaling": [1, 2]},
    "an old name of rotary embeddings": {
        "model_type": "phi3",
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    },
}


@pytest.mark.parametrize("kind", WRONG_CONFIGS)
def test_configs_that_transformers_refuses(kind, tmp_path, run_attnres, capsys):
    """One line, in whichever command they are read."""
    (tmp_path / "config.json").write_text(json.dumps(WRONG_CONFIGS[kind]))
    (tmp_path / "text.txt").write_text("text\n")
    commands = [["families", "--probe", tmp_path], ["plan", tmp_path]]
    for command in commands:
        assert run_attnres(*command) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("Error: config.json of"), lines


def test_a_language_model_without_a_model_of_it(tmp_path):
    """In one sentence, not in a list of all that transformers has."""
    MllamaConfig(text_config={"cross_attention_layers": [1]}).save_pretrained(tmp_path)
    names = ("embed_tokens", "layers.39.mlp.up_proj")
    tensors = {f"language_model.model.{name}.weight": torch.zeros(8, 8) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        convert(tmp_path, tmp_path.with_name("out"))
    assert "not supported" in str(error.value) and len(str(error.value)) < 500
