# SPDX-License-Identifier: Apache-2.0
"""What a run has to run on: devices, dtypes, and which of several processes this one is."""

import os
import platform
from pathlib import Path

import torch


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str, problem: str = "cannot be used here"):
    """Raise a `ValueError` if torch cannot put a tensor there.

    Args:
        problem: what the error says of the device, before the reason that torch gives.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise ValueError(f"`device={device!r}` {problem}: {str(error).splitlines()[0]}") from None


def processor() -> str:
    """The name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def hardware(device: str) -> str:
    """The name of a device: of its GPU, or of the CPU and how many threads torch has there."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor() or device} ({threads} thread{'s' * (threads > 1)})" if device == "cpu" else device


def is_dtype(name: str) -> bool:
    """Whether torch has a dtype of this name, such as `bfloat16`."""
    return isinstance(getattr(torch, name, None), torch.dtype)


def is_first_process() -> bool:
    """Whether this one writes and tells, of those that `accelerate launch` or torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"
