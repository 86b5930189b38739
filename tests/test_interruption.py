# SPDX-License-Identifier: Apache-2.0
"""SIGINT to real processes: one line, no traceback, exit code 130, and nothing half-written."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from tiny_models import tiny_base_model

from attnres.conversion import convert
from attnres.data.text import read_sample, train_tokenizer


pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux how far a process is")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base that takes a while to convert, its tokenizer, and a conversion."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    tiny_base_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=8).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    convert(root / "base", root / "attnres", verify=False)
    return root


def start(folder, *arguments, environment=None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "attnres", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(process, happened):
    """Until the moment has come or the process has ended."""
    while process.poll() is None and not happened():
        time.sleep(0.005)


def imports(process, library):
    """Whether the process has come to import what is in a file of that name."""
    return lambda: library in Path(f"/proc/{process.pid}/maps").read_text()


def end(process) -> tuple[int, str]:
    """The exit code and what was printed, after a look that an interrupted process leaves one line."""
    output, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors and "Exception ignored" not in errors, errors
    assert process.returncode in (0, 130), errors
    if process.returncode == 130:
        lines = [line.split("\r")[-1] for line in errors.splitlines()]
        bars = ("it/s", "/s]", "[transformers]")
        said = [line for line in lines if line and not any(part in line for part in bars)]
        assert said.count("Interrupted.") == 1 and said[-1] == "Interrupted.", errors
    return process.returncode, output


def files(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["imports", "work"])
def test_convert(moment, models, tmp_path):
    process = start(tmp_path, "convert", models / "base", tmp_path / "out")
    unfinished = tmp_path / ".out.unfinished"
    wait_until(process, imports(process, "libtorch") if moment == "imports" else unfinished.exists)
    process.send_signal(signal.SIGINT)
    code, _ = end(process)
    assert code == 130 and files(tmp_path) == set()


@pytest.mark.slow
def test_inspect(models, tmp_path):
    process = start(tmp_path, "inspect", models / "attnres", "-o", tmp_path / "out")
    wait_until(process, imports(process, "matplotlib"))  # it is drawing, or about to
    process.send_signal(signal.SIGINT)
    code, _ = end(process)
    assert files(tmp_path) == set() if code == 130 else "out/index.html" in files(tmp_path)


@pytest.mark.slow
def test_push(models, tmp_path):
    with LoopbackHub(tmp_path / "hub") as hub:
        environment = {**hub.env(), "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0"}
        process = start(tmp_path, "push", models / "attnres", "tester/pushed", environment=environment)
        wait_until(process, lambda: any("preupload" in request for request in hub.requests))
        process.send_signal(signal.SIGINT)
        code, _ = end(process)
        pushed = hub.files("tester/pushed").keys()
        # one commit holds all: that is there, or that of the creation alone
        assert "config.json" in pushed if code == 0 else {"config.json", "README.md"} <= pushed or len(pushed) == 1


BENCH = ("bench", "--shape", "tiny", "--pairs", "2", "--variants", "2", "-o", "out")


@pytest.mark.slow
def test_bench_keeps_what_it_measured(tmp_path):
    cases = ("--cases", "prefill-16,train-16,prefill-4096,prefill-8192")
    process = start(tmp_path, *BENCH, *cases)
    partial = tmp_path / "out/bench.partial.json"
    wait_until(process, lambda: partial.exists() and json.loads(partial.read_text())["measured"]["time"])
    process.send_signal(signal.SIGINT)
    code, output = end(process)
    assert (
        code == 130
        and "Run the same command again to continue." in output
        and files(tmp_path) == {"out", "out/bench.partial.json"}
    )
    kept = json.loads(partial.read_text())["measured"]
    assert {record["case"] for record in kept["time"]} >= {"prefill-16"}

    code, _ = end(start(tmp_path, *BENCH, "--cases", "prefill-16,train-16"))
    results = json.loads((tmp_path / "out/bench.json").read_text())
    assert code == 0 and not partial.exists()
    assert [record["case"] for record in results["time"]] == ["prefill-16"] * 2 + ["train-16"] * 2
    assert results["time"][:2] == kept["time"][:2]  # not measured again


TRIAL = """
import sys, time, types
from attnres.__main__ import main
sys.modules["attnres.cli"] = types.SimpleNamespace(main=lambda: exec("print('go', flush=True); time.sleep(60)"))
main()
"""


def test_signal_after_signal(tmp_path):
    """A key held down, in code that is run from text: as dataclasses are made while packages are imported."""
    (tmp_path / "trial.py").write_text(TRIAL)
    process = subprocess.Popen(
        [sys.executable, "-m", "trial"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "go\n"
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    assert end(process)[0] == 130


IN_EXTENSION = """
import enum, os, signal, sys, types
from attnres.__main__ import main
made = enum.EnumType._create_
def create(*args, **kwargs):
    enum.EnumType._create_ = made
    print("interrupted", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    return made(*args, **kwargs)
def run():
    enum.EnumType._create_ = create  # what nanobind makes the enums of a module with
    import triton._C.libtriton
    while True:
        pass
sys.modules["attnres.cli"] = types.SimpleNamespace(main=run)
main()
"""


def test_signal_in_a_module_in_c(tmp_path):
    """Raised there, an exception would end the process with a core dump: it waits until the module is imported."""
    pytest.importorskip("triton")
    process = subprocess.Popen(
        [sys.executable, "-c", IN_EXTENSION], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    code, output = end(process)
    assert (code, output) == (130, "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "inspect", "bench", "revert"])
def test_random_moments(command, models, tmp_path):
    """From the import of torch to the end, and a second signal soon after the first in every other one."""
    arguments = {
        "convert": ("convert", models / "base", "out"),
        "inspect": ("inspect", models / "attnres", models / "attnres", "-o", "out", "--max-tokens", "600"),
        "bench": (*BENCH, "--cases", "prefill-16"),
        "revert": ("revert", models / "attnres", "out"),
    }[command]
    generator = random.Random(command)
    (tmp_path / "whole").mkdir()
    begin = time.perf_counter()
    process = start(tmp_path / "whole", *arguments)
    assert end(process)[0] == 0
    duration = time.perf_counter() - begin
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = start(folder, *arguments)
        wait_until(process, imports(process, "libtorch"))
        time.sleep(generator.uniform(0, 0.9) * duration)
        process.send_signal(signal.SIGINT)
        if number % 2:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        code, _ = end(process)
        if code == 130 and number % 2 == 0:
            # Nothing, or all of it, or what the same command goes on from: `bench` writes its tables after that
            found, whole = files(folder), files(tmp_path / "whole")
            assert found <= {"out"} or found == whole or "out/bench.partial.json" in found
            assert found <= whole | {"out/bench.partial.json"}
