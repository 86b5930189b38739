# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Time and memory of `attnres convert` against `cp -r` of the same checkpoint.

    python -m studies.costs.conversion DIR

The checkpoint is synthetic, with the shape of Gemma 2B or 7B in bf16 (5 or 17 GB in shards of 1 GB), made in DIR. All
are run in turn as processes of their own. `convert()` is timed inside of its process, the command from outside, the
start of Python and the import of transformers included. Nothing is verified here: that is a matter of computing.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GemmaConfig


GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}


def make_checkpoint(folder: Path, shape: dict[str, int], shard_bytes: int = 1 << 30):
    """Random bf16 tensors with the names and shapes of Gemma; one shard in memory at a time."""
    config = GemmaConfig(**shape, dtype="bfloat16", architectures=["GemmaForCausalLM"])
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    del shapes["lm_head.weight"]  # tied
    shards, sizes = [[]], [0]
    for name, shape in shapes.items():
        if sizes[-1] and sizes[-1] + 2 * shape.numel() > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += 2 * shape.numel()
    folder.mkdir(parents=True)
    weight_map = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: torch.randn(shapes[name], dtype=torch.bfloat16) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


CALL = """
import sys, time
from attnres.conversion import convert
start = time.perf_counter()
convert(*sys.argv[1:], verify=False)
print(time.perf_counter() - start)
"""


def timed(*command: str) -> tuple[float, float]:
    """Seconds and peak memory in MB of a process; the seconds that it prints, if it does."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))
        except (OSError, ValueError, TypeError):
            pass  # it has just ended
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    assert process.returncode == 0, command
    if "-c" in command:
        seconds = float(process.stdout.read())
    return seconds, peak / 1e3


def main(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where there is room for twice the checkpoint.")],
    large: Annotated[bool, typer.Option("--large", help="Gemma 7B, 17 GB.")] = False,
    runs: int = 5,
):
    source, target = folder / ("gemma-7b" if large else "gemma-2b"), folder / "target"
    if not source.exists():
        make_checkpoint(source, {} if large else GEMMA_2B)
    size = sum(path.stat().st_size for path in source.iterdir())
    attnres = [sys.executable, "-m", "attnres", "convert", str(source), str(target), "--no-verify"]
    commands = {
        "cp -r": ["cp", "-r", str(source), str(target)],
        "convert()": [sys.executable, "-c", CALL, str(source), str(target)],
        "attnres convert": attnres,
        "attnres convert --link": [*attnres, "--link"],
    }
    results = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            shutil.rmtree(target, ignore_errors=True)
            subprocess.run(["sync"], check=True)
            results[name].append(timed(*command))
    shutil.rmtree(target)
    print(f"{size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {runs} runs each, in turn")
    reference = statistics.median(seconds for seconds, _ in results["cp -r"])
    print("| | median | all runs | ratio of medians | peak memory |\n|---|---|---|---|---|")
    for name, measured in results.items():
        seconds = [seconds for seconds, _ in measured]
        runs_shown = ", ".join(f"{second:.1f}" for second in sorted(seconds))
        median, peak = statistics.median(seconds), max(peak for _, peak in measured)
        print(f"| {name} | {median:.1f} s | {runs_shown} | {median / reference:.2f} | {peak:.0f} MB |")


if __name__ == "__main__":
    typer.run(main)
