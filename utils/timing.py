# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Time and memory of calls in this process, and the machine that they depend on."""

import contextlib
import ctypes
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from .devices import processor


def alternate(candidates: list[Callable[[], None]], pairs: int, label: str, device: str = "cpu") -> torch.Tensor:
    """Seconds per call, `[pairs, candidates]`; the order is turned round from pair to pair."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    seconds = torch.empty(pairs, len(candidates), dtype=torch.float64)
    for candidate in [*candidates, *candidates]:  # twice, until no more memory is asked for
        candidate()
    for pair in track(range(pairs), description=label):
        for index in range(len(candidates))[:: 1 if pair % 2 == 0 else -1]:
            synchronize()
            start = time.perf_counter()
            candidates[index]()
            synchronize()
            seconds[pair, index] = time.perf_counter() - start
    return seconds


def resident_bytes(name: str) -> int:
    """Of this process, from Linux: `VmRSS` is what there is now, `VmHWM` the most there has been."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_bytes(call: Callable[[], None], device: str) -> int | None:
    """The most memory that a call takes beyond what is held before it; on a CPU on Linux alone."""
    call()  # what it makes once stays, such as an optimizer's state
    if device.startswith("cuda"):
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - held
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets VmHWM
    except OSError:
        return None
    held = resident_bytes("VmRSS")
    call()
    return resident_bytes("VmHWM") - held


def activation_bytes(model: torch.nn.Module, length: int, checkpointing: bool, batch: int = 1) -> int:
    """Bytes of the distinct storages saved for backward by the decoder, the LM head and its loss left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(batch, length, dtype=torch.long, device=model.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states = model.base_model(ids, use_cache=False).last_hidden_state
    size = sum(storages.values())
    del hidden_states
    if checkpointing:
        model.gradient_checkpointing_disable()
    model.eval()
    return size


def keep_freed_memory():
    """Make glibc keep what is freed, as a GPU's allocator does.

    Given back to the system, every page of a large tensor has to be cleared again by the kernel when the next one is
    made, which takes up to 40 % of a training step and is the noisiest part of it.
    """
    _mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
    _mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back


def give_freed_memory_back():
    """Make glibc give every tensor back to the system as soon as it is freed, so that its peak can be seen there."""
    _mallopt(-3, 65536)  # M_MMAP_THRESHOLD: a mapping for each


def _mallopt(parameter: int, value: int):
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(parameter, value)


def machine(device: str) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    package = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "-C", str(package), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "versions": {name: metadata.version(name) for name in ("attnres", "torch", "transformers")},
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
