# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""`make gpu`: whether the kernels are right on a GPU, and what AttnRes models cost there, in at most 8 minutes.

    python -m attnres.benchmarks.gpu --output gpu-results

It writes `gpu.json` and `gpu.md`. The parts run one after the other in a process beside this one. One that fails
leaves its error, and if it takes that process or its GPU with it, the next ones run in a new process. The same command
again does what failed, was interrupted or found no time, and keeps the rest, with the same code on the same machine.
"""

import contextlib
import gc
import json
import math
import multiprocessing
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..utils.devices import check_device
from ..utils.files import check_writable, only_run_in, write_file
from ..utils.timing import machine
from .gpu_parts import DTYPES, LAYERS, PEERS, Skipped, layers_that_fit, one_read, times, try_backends, try_kernels
from .gpu_table import table


CASES, TINY_CASES = ("decode-1-64", "prefill-512", "prefill-4096", "train-512"), ("decode-1-4", "prefill-8", "train-8")
BACKENDS = ("torch", "triton", "fla")
PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "liger-kernel")
SHARE_OF_MEMORY = 0.92  # of a GPU's; the rest is for contexts of two processes and pieces that nothing fits in
PATIENCE = 90  # seconds that a part may take beyond twice its own: a process starts, kernels are compiled
WAY_OUT = (
    "Install torch for GPUs, and name the Python that has it: `make gpu PYTHON=...`. Without a GPU, `python -m"
    " attnres.benchmarks.gpu --device cpu --shape tiny` tries the program."
)
console = Console()
app = typer.Typer(add_completion=False)
Results = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One thing to find out.

    Args:
        name: its kind, a colon, and what exactly.
        seconds: that it takes in a run of 8 minutes.
        function: one of `gpu_parts`.
    """

    name: str
    seconds: float
    function: Callable[..., Any]
    arguments: tuple = ()


def plan(layers: dict[str, int]) -> list[Part]:
    """All parts in their order, for shapes with so many layers."""
    parts = [Part(f"kernels: {dtype}", 12, try_kernels, (dtype,)) for dtype in DTYPES]
    parts.append(Part("trial: all backends", 30, try_backends))

    def add(seconds: float, shape: str, num_layers: int, *what: str):
        name = f"times: {', '.join([shape, f'{num_layers} layers', *what])}"
        parts.append(Part(name, seconds, times, (shape, num_layers, *what)))

    for shape, num_layers in layers.items():
        for case in TINY_CASES if shape == "tiny" else CASES:
            for backend in BACKENDS:
                add(0.3 if shape == "tiny" else 10, shape, num_layers, case, "eager", backend)
    for tokens, hidden_size in ((8, 32),) if "tiny" in layers else ((4096, 1024), (4096, 4096)):
        for peer in PEERS:
            arguments = peer, tokens, hidden_size
            parts.append(Part(f"reads: {tokens} tokens x {hidden_size}, {peer}", 5, one_read, arguments))
    if "qwen3-0.6b" in layers:  # last, as a compiler takes what time there is
        for backend in ("torch", "triton"):
            for case in ("prefill-512", "train-512"):
                add(45, "qwen3-0.6b", min(8, layers["qwen3-0.6b"]), case, "compiled", backend)
    return parts


def serve(connection, device: str):
    """What the process beside this one does: it answers with the result of every part that it is given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is stopped from outside
    is_gpu = device.startswith("cuda")
    if is_gpu:
        torch.cuda.set_device(device)  # the one that is waited for
    while True:
        function, arguments, seconds = connection.recv()
        try:
            reply = {"result": function(*arguments, device=device, seconds=seconds)}
        except Skipped as reason:
            reply = {"skipped": str(reason)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        is_usable = True
        if is_gpu:
            gc.collect()  # what a part had that ran out of memory
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # of a kernel that went wrong: from here on nothing else is answered to this process
                is_usable = False
        connection.send((reply, is_usable))


class Worker:
    """The process in which parts run, and a new one where a part has left it or its GPU unusable."""

    def __init__(self, device: str):
        self.device = device
        self.process: Any = None

    def run(self, part: Part, seconds: float, limit: float) -> Results:
        """The part's result, why it was skipped, or its error, after `limit` seconds at the latest."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other_end = context.Pipe()
            self.process = context.Process(target=serve, args=(other_end, self.device))
            self.process.start()
            other_end.close()  # so that its end is seen
        is_usable = False
        try:
            self.connection.send((part.function, part.arguments, seconds))
            if self.connection.poll(limit):
                reply, is_usable = self.connection.recv()
            else:
                reply = {"error": f"It was stopped after {limit:.0f} seconds."}
        except (EOFError, OSError):
            self.process.join()
            reply = {"error": f"Its process ended with exit code {self.process.exitcode}."}
        if not is_usable:
            self.stop()
        return reply

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def run_parts(parts: list[Part], results: Results, folder: Path, device: str, minutes: float):
    """Run what has no result yet, and write all results after every part."""
    end = time.monotonic() + 60 * minutes
    left = [part for part in parts if "result" not in results["parts"].get(part.name, {})]
    worker = Worker(device)
    try:
        while left:
            part, start = left.pop(0), time.monotonic()
            share = part.seconds / (part.seconds + sum(other.seconds for other in left))
            seconds = min(2 * part.seconds, share * (end - start))
            reply = {"skipped": "There was no time left; the same command does it."}
            if start < end:
                console.print(f"{part.name} ({len(left)} more)", highlight=False)
                reply = worker.run(part, seconds, min(end - start, 2 * seconds + PATIENCE))
            for problem in [reply[kind] for kind in ("skipped", "error") if kind in reply]:
                console.print(f"  {problem}", style="yellow", highlight=False, markup=False)
            results["parts"][part.name] = {**reply, "seconds": time.monotonic() - start}
            write(results, folder)
    finally:
        worker.stop()


def write(results: Results, folder: Path):
    write_file(folder / "gpu.json", json.dumps(results, indent=1) + "\n")
    write_file(folder / "gpu.md", table(results))


def check(device: str):
    """Raise a `ValueError` with the way out if torch cannot use a device."""
    try:
        check_device(device)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. {WAY_OUT}") from None


def environment(device: str) -> Results:
    """Versions, `None` of what is not installed, and the GPU, its memory in bytes."""
    found: Results = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {"memory": properties.total_memory, "capability": f"{properties.major}.{properties.minor}"}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
            found["driver"] = shown.stdout.split("\n")[0]
    return {**found, "CUDA": torch.version.cuda}


def start(folder: Path, shape: str | None, device: str) -> Results:
    """The results to go on with: those of the folder, if they are of the same settings, code and machine."""
    found = environment(device)
    shapes = [name for name in LAYERS if name != "tiny"] if shape is None else [shape]
    room = SHARE_OF_MEMORY * found.get("memory", math.inf)
    layers = {name: layers_that_fit(name, room) for name in shapes}
    notes = [
        f"{name} {f'with {number} layers' if number else 'is left out'}, as more do not fit into the memory."
        for name, number in layers.items()
        if number < LAYERS[name]
    ]
    layers = {name: number for name, number in layers.items() if number}
    results: Results = {
        "layers": layers,
        "notes": notes,
        "machine": machine(device),
        "environment": found,
        "parts": {},
    }
    if (folder / "gpu.json").exists():
        before = json.loads((folder / "gpu.json").read_text())
        if before["layers"] == layers and before["machine"] | {"date": None} == results["machine"] | {"date": None}:
            results["parts"] = before["parts"]
        else:
            console.print(f"What {folder} holds is of other code, or another machine: all is measured anew.")
    for note in notes:
        console.print(note, style="yellow", highlight=False, markup=False)
    return results


@app.command(help=(__doc__ or "").split("\n")[0])
def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for gpu.json and gpu.md.")] = Path(
        "gpu-results"
    ),
    minutes: Annotated[float, typer.Option(min=0.1, help="For all parts together.")] = 8,
    device: Annotated[str, typer.Option(help="cuda, or cuda:1 ...; cpu to try the program.")] = "cuda",
    shape: Annotated[str | None, typer.Option(help=f"One of {', '.join(LAYERS)}, in place of both of Qwen3.")] = None,
):
    try:
        if shape is not None and shape not in LAYERS:
            raise ValueError(f"`shape={shape!r}` is not one of {', '.join(LAYERS)}.")
        check(device)
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"  # as `describe` has it: a trial is made once for each name
        check_writable(output)
        with only_run_in(output):
            results = start(output, shape, device)
            run_parts(plan(results["layers"]), results, output, device, minutes)
    except (OSError, ValueError) as error:
        Console(stderr=True).print(f"Error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Interrupted; the same command goes on.")
        raise typer.Exit(130) from None
    for suffix in ("json", "md"):
        console.print(f"Wrote {output / f'gpu.{suffix}'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
