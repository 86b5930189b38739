# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`attnres bench` on a tiny shape."""

import json
import os
import subprocess
import sys

import pytest
import torch
from decoder_configs import decoder_config
from rounding import UpToRounding
from tiny_models import convert, randomize_queries, tiny_base_model
from transformers import AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

from attnres import BlockCache
from attnres.benchmarks import twin
from attnres.benchmarks.twin import SHAPES, TWIN, Case, load_twin, make_models, make_twin, report
from attnres.cli import app
from attnres.utils import timing
from studies.costs import peers
from studies.costs.long_context import block_cache_bytes


TELLS_PEAKS = os.access("/proc/self/clear_refs", os.W_OK)


@pytest.fixture(autouse=True)
def allocator_of_the_other_tests(monkeypatch):
    monkeypatch.setattr(timing, "_mallopt", lambda *args: None)


@pytest.mark.slow
def test_bench(tmp_path):
    arguments = ["bench", "--shape", "tiny", "--pairs", "3", "--cases", "decode-2-8,prefill-16,train-16"]
    result = CliRunner().invoke(app, [*arguments, "--variants", "3,full", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench.json").read_text())
    assert [record["model"] for record in results["time"]] == [TWIN, "3 blocks", "Full"] * 3
    for record in results["time"]:
        assert (record["model"] == TWIN) <= (record["median_ratio"] == record["fastest_ratio"] == 1)
        assert record["quartiles"][0] <= record["median_ratio"] <= record["quartiles"][1]
        assert record["tokens_per_second"] > 0
    assert {record["checkpointing"] for record in results["activations"]} == {False, True}
    before = (tmp_path / "bench.md").read_text()
    if TELLS_PEAKS:
        assert {record["case"] for record in results["peaks"]} == {"decode-2-8", "prefill-16", "train-16"}
    assert "| decode-2-8, eager |" in before and "Shape of tiny, 4 layers" in before
    report(tmp_path)
    assert (tmp_path / "bench.md").read_text() == before and (tmp_path / "bench.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_neox", "gemma3_text", "qwen3_next", "gpt2", "opt", "mamba2"])
def test_every_kind_of_base(model_type):
    """Whatever its cache and the names of its parts: a decoding step can be done again, and gives the same."""
    torch.manual_seed(0)
    models = make_models(AutoModelForCausalLM.from_config(decoder_config(model_type)).eval(), ["2"], "cpu")
    shared = torch.optim.AdamW(models[TWIN].parameters(), lr=1e-5)
    for name, model in models.items():
        for case in ("decode-1-8", "prefill-16", "train-16"):
            call = twin.work(Case.parse(case), model, shared, "cpu", compiled=False)
            call()
            call()
        assert timing.activation_bytes(model, 16, checkpointing=False) > 0, name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["AttnRes", "PreNorm"])
def test_bench_of_a_checkpoint(kind, tmp_path):
    """Its own weights, whichever of the two it is."""
    base = tiny_base_model("qwen3")
    model = base if kind == "PreNorm" else randomize_queries(convert(base, 3))
    model.save_pretrained(tmp_path / "model")
    twin = load_twin(str(tmp_path / "model"), torch.float32, "cpu")
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, base(ids).logits)
    arguments = ["bench", "--model", str(tmp_path / "model"), "--pairs", "2", "--cases", "decode-1-4,train-8"]
    result = CliRunner().invoke(app, [*arguments, "--variants", "2", "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "out/bench.json").read_text())
    assert results["settings"]["shape"] == "model"
    assert [record["model"] for record in results["time"]] == [TWIN, "2 blocks"] * 2


@pytest.mark.slow
@pytest.mark.skipif(not TELLS_PEAKS, reason="the peak of a process is told by Linux, and not in every container")
def test_peak_memory():
    """Two tensors at once, and a third that stays from the first call on. The allocator is that of a whole process."""
    code = """
import torch
from attnres.utils import timing
timing.give_freed_memory_back()
kept = []
def call():
    if not kept:
        kept.append(torch.ones(2**24))
    for _ in range(3):
        torch.ones(2**24) + 1
print(timing.peak_bytes(call, "cpu"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert abs(int(result.stdout) / 2**20 - 2 * 64) < 8


def test_models_share_the_weights_of_the_twin():
    models = make_models(make_twin(SHAPES["tiny"], torch.float32, "cpu"), ["full", "2"], "cpu")
    twin = dict(models[TWIN].named_parameters())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        of_twin = UpToRounding(lambda: models[TWIN](ids).logits, model=models[TWIN])
    for model in (models["Full"], models["2 blocks"]):
        own = {name for name, parameter in model.named_parameters() if parameter is not twin.get(name)}
        assert own == {"model.depth_queries.query", "model.depth_queries.key_norm"}
        with torch.no_grad():
            model.model.depth_queries.query.zero_()
            # so it is the same function, which says that nothing was left uninitialised
            of_twin.check(model(ids).logits)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "gpt-9"], "`shape='gpt-9'` is not one of"),
        (["--cases", "decode-1"], "`decode-1` is no case"),
        (["--variants", "many"], "`many` is neither a number of blocks nor full"),
        (["--variants", "8:num_heads"], "`8:num_heads` is neither a number of blocks nor full"),
        (["--variants", "8:heads=2"], "`8:heads=2` has `heads`, which is not one of num_heads, open_block"),
        (["--dtype", "float33"], "`dtype='float33'` is none of torch's"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["bench", *arguments, "-o", str(tmp_path / "out")])
    assert message in str(result.exception) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_blocks", [8, 3, 1])
def test_formula_of_the_block_cache(num_blocks):
    model = convert(tiny_base_model("qwen3"), -(-8 // num_blocks))
    kv_cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(2, 9, dtype=torch.long), past_key_values=kv_cache)
    cache = BlockCache.beside(kv_cache)
    held = sum(tensor.nbytes for tensor in (cache.values, cache.scores, cache.mixes))
    hidden_size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    assert held == block_cache_bytes(18, hidden_size, num_layers, num_blocks, itemsize=4)


def test_all_ways_to_read_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "HIDDEN_SIZE", 16)

    def refusing(*args):
        raise RuntimeError("no such device")

    monkeypatch.setitem(peers.CANDIDATES, "refusing", refusing)
    monkeypatch.setitem(peers.PACKAGES, refusing, "torch")
    peers.run(tmp_path, tokens="1,3", pairs=2)
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {record["tokens"] for record in found["time"]} == {1, 3} and found["pairs"] == 2
    assert "the paper's pseudo-code | x" in (tmp_path / "peers.md").read_text()
    assert found["failed"] == {"refusing": "RuntimeError: no such device"}
    wrong = {**peers.CANDIDATES, "wrong": lambda *args: lambda: [2 * read for read in peers.pseudo_code(*args)()]}
    monkeypatch.setattr(peers, "CANDIDATES", wrong)
    with pytest.raises(ArithmeticError, match="`wrong` computes something else"):
        peers.run(tmp_path, tokens="1", pairs=2)


def test_growth(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "GROWTH", {"sublayers": (4, 8), "blocks": (1, 4), "tokens": (2, 4)})
    peers.growth(tmp_path, repeats=2)
    assert (tmp_path / "growth.png").stat().st_size > 5000
