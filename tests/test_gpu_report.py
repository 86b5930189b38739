# SPDX-License-Identifier: Apache-2.0
"""`make gpu` on a CPU: the tiny shape, and Triton's interpreter."""

import importlib.util
import json
import os
import sys
import time
import types

import pytest
import torch
from typer.testing import CliRunner

import attnres
from attnres.benchmarks import gpu, gpu_parts
from attnres.benchmarks.gpu import Part, Worker, app, plan, run_parts
from attnres.benchmarks.gpu_parts import Skipped, layers_that_fit, one_read, try_backends
from attnres.benchmarks.gpu_table import table
from attnres.benchmarks.twin import TWIN
from attnres.depth.definition import depth_attention_reference


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KERNELS, DECODE, TRAIN = (
    "kernels: float32",
    "times: tiny, 4 layers, decode-1-4, eager, torch",
    "times: tiny, 4 layers, train-8, eager, torch",
)
FLA, LIGER = "times: tiny, 4 layers, train-8, eager, fla", "reads: 8 tokens x 32, Liger"


@pytest.fixture(autouse=True)
def backend_as_before():
    yield
    attnres.set_backend("auto")


@pytest.fixture
def run_gpu(tmp_path):
    """The program on the tiny shape: arguments in, the result and the content of `gpu.json` out."""

    def run(*arguments):
        command = ["--device", "cpu", "--shape", "tiny", "-o", str(tmp_path), *arguments]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return result.output, json.loads((tmp_path / "gpu.json").read_text())

    return run


@needs_triton
@pytest.mark.slow
def test_report(run_gpu, tmp_path, monkeypatch):
    """The kernels need the interpreter here: without it their part fails, with it the same command does it alone."""
    wanted = (KERNELS, DECODE, TRAIN, FLA, LIGER, "trial: all backends")
    monkeypatch.setattr(gpu, "plan", lambda layers: [part for part in plan(layers) if part.name in wanted])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    output, found = run_gpu()
    parts, lines = found["parts"], (tmp_path / "gpu.md").read_text().splitlines()
    assert set(parts) == set(wanted) and found["layers"] == {"tiny": 4}
    assert found["environment"]["torch"] == torch.__version__ and found["machine"]["device"] == "cpu"
    if not torch.cuda.is_available():
        assert "TRITON_INTERPRET=1" in parts[KERNELS]["error"] and "TRITON_INTERPRET=1" in output
        assert "| kernels against their definition | fails |" in lines
        assert "needs a GPU" in parts[LIGER]["skipped"] or "not installed" in parts[LIGER]["skipped"]
    for name in (DECODE, TRAIN):
        result = parts[name]["result"]
        assert result["pairs"] >= gpu_parts.FEWEST_PAIRS
        assert [record["model"] for record in result["time"]] == [TWIN, "8 blocks", "Full"] == list(result["peaks"])
        assert all(record["quartiles"][0] <= record["median_ratio"] for record in result["time"])
    assert "|  | twin | 8 blocks, `torch` | Full, `torch` |" in lines
    assert any(line.startswith("| tiny, 4 layers: decode-1-4, eager | ") for line in lines)
    assert lines[-1].startswith("`make gpu` on cpu") and found["machine"]["commit"] in lines[-1]

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    again = run_gpu()[1]["parts"]
    assert again[KERNELS]["result"] == "right"
    assert "| kernels against their definition | right |" in (tmp_path / "gpu.md").read_text().splitlines()
    assert {name: again[name] for name in (DECODE, TRAIN)} == {name: parts[name] for name in (DECODE, TRAIN)}
    assert list(again) == list(parts)


@pytest.mark.slow
@needs_triton
def test_every_part(run_gpu, monkeypatch):
    """But two whose time the interpreter would make minutes: Triton's kernels are timed in a prefill."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    slow = [f"times: tiny, 4 layers, {case}, eager, triton" for case in ("decode-1-4", "train-8")]
    wanted = [part for part in plan({"tiny": 4}) if part.name not in slow]
    monkeypatch.setattr(gpu, "plan", lambda layers: wanted)
    parts = run_gpu()[1]["parts"]
    assert list(parts) == [part.name for part in wanted] and len(wanted) == len(plan({"tiny": 4})) - len(slow)
    assert not [name for name, part in parts.items() if "error" in part]
    assert all("result" in part for name, part in parts.items() if name.endswith(("torch", "triton", "float16")))


def dies(*, device: str, seconds: float):
    os._exit(3)


def hangs(*, device: str, seconds: float):
    time.sleep(600)


def is_fine(*, device: str, seconds: float) -> int:
    return os.getpid()


@pytest.mark.slow
def test_a_part_that_takes_its_process_with_it(tmp_path, monkeypatch):
    """The next ones run in another, and those that went well in the same."""
    monkeypatch.setattr(gpu, "PATIENCE", 0)
    kinds = (dies, is_fine, is_fine, hangs, is_fine)
    parts = [Part(f"trial: {i}", 5 if what is hangs else 50, what) for i, what in enumerate(kinds)]
    monkeypatch.setattr(gpu, "table", lambda results: "")
    results = {"parts": {}}
    run_parts(parts, results, tmp_path, "cpu", minutes=50)
    died, fine, same, hung, last = results["parts"].values()
    assert died["error"] == "Its process ended with exit code 3."
    assert hung["error"] == "It was stopped after 20 seconds."
    assert fine["result"] == same["result"] != last["result"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == results


def test_no_time(tmp_path, monkeypatch):
    """Nothing is started, and what has a result keeps it."""
    monkeypatch.setattr(Worker, "run", lambda *args: pytest.fail("there was no time for it"))
    monkeypatch.setattr(gpu, "table", lambda results: "")
    results = {"parts": {"trial: 1": {"result": 1}}}
    run_parts([Part("trial: 0", 10, is_fine), Part("trial: 1", 10, is_fine)], results, tmp_path, "cpu", minutes=0)
    assert results["parts"]["trial: 1"] == {"result": 1} and "no time left" in results["parts"]["trial: 0"]["skipped"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param(
            [], "make gpu PYTHON=", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
        ),
        (["--device", "cpu", "--shape", "gpt-9"], "`shape='gpt-9'` is not one of qwen3-0.6b, qwen3-8b, tiny."),
    ],
)
def test_one_clear_error(arguments, message, tmp_path):
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert message in result.stderr and len(result.stderr.splitlines()) == 1 and result.stderr.startswith("Error: `")


def test_other_code_or_machine_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "machine", lambda device: {"commit": "a", "date": "today"})
    kept = {"layers": {"tiny": 4}, "machine": {"commit": "a", "date": "yesterday"}, "parts": {"trial: 0": {}}}
    (tmp_path / "gpu.json").write_text(json.dumps(kept))
    assert gpu.start(tmp_path, "tiny", "cpu")["parts"] == kept["parts"]
    kept["machine"]["commit"] = "b"
    (tmp_path / "gpu.json").write_text(json.dumps(kept))
    assert gpu.start(tmp_path, "tiny", "cpu")["parts"] == {}


def test_layers_by_memory():
    """Of a GPU with 24 GiB, the least that is asked for, and of others."""
    fitting = {
        memory: layers_that_fit("qwen3-8b", gpu.SHARE_OF_MEMORY * memory * 2**30) for memory in (16, 22, 24, 80)
    }
    assert fitting == {16: 0, 22: 4, 24: 5, 80: 8}
    assert [layers_that_fit("qwen3-0.6b", memory * 2**30) for memory in (2, 5, 8)] == [0, 11, 28]
    with_8b = [part.name for part in plan({"qwen3-0.6b": 28, "qwen3-8b": 5}) if "8b" in part.name]
    assert len(with_8b) == 12 and all("5 layers" in name for name in with_8b)


def test_the_whole_plan():
    """Kernels, the trial, every case with every backend, reads, and what a compiler makes of it last."""
    parts = plan({"qwen3-0.6b": 28, "qwen3-8b": 8})
    kinds = [part.name.partition(":")[0] for part in parts]
    assert kinds == ["kernels"] * 3 + ["trial"] + ["times"] * 24 + ["reads"] * 4 + ["times"] * 4
    assert len({part.name for part in parts}) == len(parts)
    assert all("8 layers" in part.name and "compiled" in part.name for part in parts[-4:])
    assert sum(part.seconds for part in parts if "fla" not in part.name) < 8 * 60


def fla_by_definition(error: float = 0.0) -> types.ModuleType:
    module = types.ModuleType("fla.ops.attnres")

    def fused_attnres(query, residuals, rms_weight, rms_eps):
        mix = depth_attention_reference(query * rms_weight, residuals, rms_eps)[0]
        return (mix + error).to(residuals[0].dtype)

    module.fused_attnres = fused_attnres
    return module


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted here")
def test_a_read_against_others(monkeypatch):
    with pytest.raises(Skipped, match="flash-linear-attention is not installed"):
        monkeypatch.setitem(sys.modules, "fla.ops.attnres", None)
        one_read("fla", 3, 32, device="cpu", seconds=0)
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", fla_by_definition())
    found = one_read("fla", 3, 32, device="cpu", seconds=0)
    assert [(r["mode"], r["model"]) for r in found["time"]] == [
        (mode, name) for mode in ("forward", "training") for name in ("attnres", "fla")
    ]
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", fla_by_definition(0.2))
    with pytest.raises(ArithmeticError, match="the mix of fla is off by"):
        one_read("fla", 3, 32, device="cpu", seconds=0)


def test_table():
    """Everything that a GPU's results have: a trial, reads, memory, and a reason that would end a row."""

    def records(*names):
        return [
            {"model": name, "mode": "eager", "fastest_seconds": 0.004, "median_ratio": 1 + i / 10, "quartiles": [1, 2]}
            for i, name in enumerate(names)
        ]

    times = {"shape": "tiny", "layers": 4, "case": "decode-1-64", "mode": "eager", "time": records(TWIN, "Full")}
    reads = {"tokens": 4096, "hidden_size": 1024, "time": records("attnres", "fla"), "peer": "fla"}
    trial = {"trial": {"bfloat16": {"torch": 0.002, "fla": "not installed"}}, "described": ["cuda:0: torch"]}
    found = {
        "trial: all": {"result": trial},
        "times: 1": {"result": {**times, "backend": "torch", "peaks": {TWIN: 2**21, "Full": 3 * 2**20}}},
        "times: 2": {"result": {**times, "backend": "fla", "peaks": {TWIN: None, "Full": None}}},
        "times: 3": {"error": "RuntimeError: a | b\nc"},
        "reads: 1": {"result": reads},
    }
    machine = {"device": "H100", "commit": "a1", "date": "today"}
    environment = {"torch": "2", "memory": 80 * 2**30}
    lines = table({"notes": ["A note."], "machine": machine, "environment": environment, "parts": found}).splitlines()
    assert "| bfloat16 | 2.00 ms | not installed |" in lines and "- cuda:0: torch" in lines
    ratio = "**1.100** (1.000 to 2.000)"
    assert f"| tiny, 4 layers: decode-1-64, eager | 0.5 ms | {ratio} | {ratio} |" in lines
    assert "| tiny, 4 layers: decode-1-64, eager, peak memory | 2 MiB | **1.50** |  |" in lines
    assert f"| read of 9 sources of 4,096 tokens x 1024, eager | 4.000 ms | {ratio} |" in lines
    assert "| times: 3 | RuntimeError: a / b c |" in lines and "A note." in lines
    assert lines[-1].startswith("`make gpu` on H100, 80 GiB") and lines[-1].endswith("commit a1, today.")


def test_trial_of_a_gpu(monkeypatch):
    """Each dtype on the device that `describe` names, so that nothing is tried twice."""
    tried = []
    monkeypatch.setattr(gpu_parts, "trial", lambda device, dtype: tried.append((device, dtype)) or {"torch": 0.1})
    found = try_backends(device="cuda:0", seconds=1)
    assert tried == [(torch.device("cuda", 0), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert found["trial"]["float16"] == {"torch": 0.1} and found["described"][0].startswith("cpu: ")
