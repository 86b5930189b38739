# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""GGUF files are converted by their values, wherever they lie; damaged ones are refused."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from attnres import AttnResForCausalLM
from attnres.conversion import convert, revert


def tensors(folder) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "F16", "BF16", "F32"])
def test_weights_are_those_of_the_file(kind, tmp_path):
    expected = write_gguf(tmp_path / "tiny.gguf", kind)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "attnres", num_blocks=2)
    assert report.verification.equal and report.source == "tiny.gguf"
    assert any("were quantised" in note for note in report.notes) == kind.startswith("Q")
    assert any(f"{30 if kind == 'F32' else 23} of {kind}" in note for note in report.notes)
    found = tensors(tmp_path / "attnres")
    assert found.keys() - expected.keys() == {"model.depth_queries.query", "model.depth_queries.key_norm"}
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "attnres/config.json").read_text())
    assert "quantization_config" not in config and str(tmp_path) not in json.dumps(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attnres", "tiny.gguf"]


@pytest.mark.slow
def test_it_is_used_like_any_other(tmp_path, run_attnres):
    """On the command line, from a folder; then a pipeline, the chat template, and back."""
    (tmp_path / "folder").mkdir()
    expected = write_gguf(tmp_path / "folder/tiny.gguf")
    out = tmp_path / "out"
    assert run_attnres("convert", tmp_path / "folder", out, "--gguf-file", "tiny.gguf", "--block-size", 2) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(model, AttnResForCausalLM) and model.config.attn_res_block_size == 2
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=True).input_ids
    assert ids == tokenizer("Hi<|end|>").input_ids and tokenizer.decode(ids) == "Hi<|end|>"
    text = pipeline("text-generation", model=str(out))("Hello", max_new_tokens=4, do_sample=False)[0]
    assert text["generated_text"].startswith("Hello")
    revert(out, tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == expected.keys() and all(torch.equal(back[name], expected[name]) for name in expected)


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def overwrite(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "magic": lambda path: path.write_bytes(b"GGML" + path.read_bytes()[4:]),
    "a pickle": lambda path: path.write_bytes(b"\x80\x04\x95" + bytes(60)),
    "header cut": lambda path: cut(path, 0.02),
    "weights cut": lambda path: cut(path, 0.9),
    "version": lambda path: path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + path.read_bytes()[8:]),
    "count of tensors": lambda path: path.write_bytes(
        path.read_bytes()[:8] + (2**62).to_bytes(8, "little") + path.read_bytes()[16:]
    ),
    "unknown architecture": lambda path: overwrite(path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamx"),
    "not additive": lambda path: overwrite(path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom"),
    "name of a tensor": lambda path: overwrite(path, b"blk.1.attn_q.weight", b"blk.1.attn_z.weight"),
    "layers": lambda path: overwrite(path, b"blk.2.ffn_up.weight", b"blk.7.ffn_up.weight"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(damage, tmp_path, run_attnres, capsys):
    """One line that names the file, and nothing is left."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    DAMAGE[damage](path)
    assert run_attnres("convert", path, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "tiny.gguf" in error and "Traceback" not in error and "report this" not in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


ROW = np.ones(32, dtype=np.float32)
WRONG = {
    "fewer layers": {"num_hidden_layers": 2},
    "more layers": {"num_hidden_layers": 4},
    "another width": {"hidden_size": 48},
    "another width of the MLP": {"intermediate_size": 96},
    "no layers": {"num_hidden_layers": 0},
    "more heads than width": {"num_attention_heads": 64},
    "key-value heads that do not divide": {"num_key_value_heads": 3},
    "epsilon": {"rms_norm_eps": -1.0},
    "a bias that Llama does not have": {"extra": {"blk.0.attn_q.bias": ROW}},
    "a tensor of an unknown name": {"extra": {"blk.0.secret.weight": ROW}},
    "a layer more": {"extra": {"blk.3.attn_norm.weight": ROW}},
    "not finite": {"extra": {"output_norm_2.weight": ROW * np.nan}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_header_that_does_not_fit_the_weights(wrong, tmp_path, run_attnres, capsys):
    """Weights are never left out, cut or made up."""
    write_gguf(tmp_path / "tiny.gguf", **WRONG[wrong])
    assert run_attnres("convert", tmp_path / "tiny.gguf", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "tiny.gguf" in error and "Traceback" not in error and "report this" not in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


def test_weights_that_are_not_finite(tmp_path, run_attnres, capsys):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "F32")
    content = path.read_bytes()
    path.write_bytes(content[:-4] + np.float32(np.nan).tobytes())
    assert run_attnres("convert", path, tmp_path / "out") == 1
    assert "has values that are not finite, 1 of" in " ".join(capsys.readouterr().err.split())
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_read(tmp_path):
    """The weights are converted, and the report says what is missing."""
    write_gguf(tmp_path / "tiny.gguf", merges=False)
    report = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert any("no tokenizer" in note for note in report.notes)
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert "no tokenizer" in (tmp_path / "out/conversion_report.md").read_text()


def test_one_part_of_several(tmp_path, run_attnres, capsys):
    write_gguf(tmp_path / "tiny-00001-of-00002.gguf")
    assert run_attnres("convert", tmp_path / "tiny-00001-of-00002.gguf", tmp_path / "out") == 1
    assert "is one part of several; join them first: `llama-gguf-split --merge" in " ".join(
        capsys.readouterr().err.split()
    )


def test_what_a_killed_run_has_left(tmp_path):
    """It is in the way of nothing, and gone afterwards."""
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / ".out.dequantised").mkdir()
    (tmp_path / ".out.dequantised/model.safetensors").write_bytes(b"half")
    (tmp_path / ".out.dequantised.lock").touch()
    convert(tmp_path / "tiny.gguf", tmp_path / "out", verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.gguf", "out"], "There is no file `nowhere.gguf`"),
        (["folder", "out", "--gguf-file", "other.gguf"], "holds no `other.gguf`; its GGUF files are tiny.gguf"),
        (["folder", "out", "--gguf-file", "../folder/tiny.gguf"], "must be the name of a GGUF file in `folder`"),
        (["folder", "out", "--gguf-file", "config.json"], "must be the name of a GGUF file in `folder`"),
        (["folder/tiny.gguf", "out", "--gguf-file", "tiny.gguf"], "is a file itself; leave"),
        (["folder/tiny.gguf", "out", "--revision", "main"], "`revision='main'` is for Hub ids"),
        (["folder/tiny.gguf", "folder/tiny.gguf"], "is a file; name a folder"),
        (["folder", "out"], "`attnres convert --gguf-file tiny.gguf` converts its GGUF file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments, message, tmp_path, run_attnres, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder/tiny.gguf")
    monkeypatch.chdir(tmp_path)
    assert run_attnres("convert", *arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_without_the_package(tmp_path, run_attnres, capsys, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("attnres.conversion.gguf.is_gguf_available", lambda: False)
    assert run_attnres("convert", tmp_path / "tiny.gguf", tmp_path / "out") == 1
    assert "install `gguf`: `pip install gguf`" in " ".join(capsys.readouterr().err.split())
