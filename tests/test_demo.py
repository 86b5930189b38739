# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres demo` as a user runs it: in a process of its own, from the first time to a rerun and bad input."""

import json
import subprocess
import sys

import pytest
from tiny_models import TINY, tiny_base_model
from transformers import AutoConfig, AutoModelForCausalLM

from attnres.data.text import train_tokenizer


def attnres(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "attnres", *map(str, args)], capture_output=True, text=True)


@pytest.mark.slow
def test_demo_and_its_rerun(tmp_path):
    first = attnres("demo", "--output", tmp_path / "out", "--steps", 3)
    assert first.returncode == 0, first.stderr
    again = attnres("demo", "--output", tmp_path / "out", "--num-blocks", 8, "--steps", 3)
    assert again.returncode == 0, again.stderr
    assert "Using the base model in" in again.stdout
    for result in (first, again):
        assert "Greedy continuations unchanged: 3 of 3" in result.stdout
        assert "held-out loss" in result.stdout
        assert "\nPassed: largest difference " in result.stdout
        assert "All 46 tensors of the base are back, bit for bit." in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("attnres", "base", "benchmark", "depth", "eval", "finetuned", "reverted")
    ]
    for name in ("prenorm", "attnres"):
        history = json.loads((tmp_path / "out/finetuned" / name / "history.json").read_text())
        assert history[-1]["step"] >= 1
    assert "Before and after fine-tuning" in again.stdout and (tmp_path / "out/finetuned/loss.png").exists()
    before, after = json.loads((tmp_path / "out/depth/depth.json").read_text())["models"]
    assert before["num_tokens"] == after["num_tokens"] == 4096 and (tmp_path / "out/depth/weights.png").exists()
    assert (tmp_path / "out/depth/index.html").exists()
    line, text = json.loads((tmp_path / "out/eval/results.json").read_text())["rows"]
    assert line["num_documents"] == 200 and abs(line["comparisons"][0]["difference"]) < 0.02
    # Where no logit is off by more than the conversion allows, no log-probability is by more than twice of that
    report = json.loads((tmp_path / "out/attnres/conversion_report.json").read_text())
    allowed = 2 * report["verification"]["parities"][0]["tolerance"]
    assert 0 < text["scores"][0][0] < 1 and abs(text["comparisons"][0]["difference"]) <= allowed < 1e-2
    assert (tmp_path / "out/eval/differences.png").exists()
    card = (tmp_path / "out" / "attnres" / "README.md").read_text()
    assert "Full AttnRes" in card and str(tmp_path) not in card
    assert AutoConfig.from_pretrained(tmp_path / "out" / "base").model_type == "qwen3"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "attnres")
    assert type(model).__name__ == "AttnResForCausalLM" and model.config.attn_res_block_size == 1


@pytest.mark.slow
def test_demo_on_a_checkpoint(tmp_path):
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 10, vocab_size=300)
    tiny_base_model("mixtral", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    result = attnres("demo", "--model", tmp_path / "mine", "--output", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "Greedy continuations unchanged: 3 of 3" in result.stdout


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, run_attnres, capsys):
    config = AutoConfig.for_model("doge", **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "doge")
    (tmp_path / "file").write_text("")
    for args, message in (
        (("--model", tmp_path / "doge"), "`base_model_type='doge'` is not supported: its DogeDecoderLayer does more"),
        (("--model", tmp_path / "missing"), "missing"),
        (("--output", tmp_path / "file"), "is a file; name a folder"),
    ):
        code = run_attnres("demo", *(args if "--output" in args else (*args, "--output", tmp_path / "out")))
        error = capsys.readouterr().err
        assert code == 1 and "Traceback" not in error and "Error:" in error
        assert message in " ".join(error.split())
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [("demo", "--num-blocks", "0"), ("demo", "--steps", "0"), ("nonsense",)])
def test_usage_errors(args):
    assert attnres(*args).returncode == 2
