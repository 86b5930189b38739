# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Which code computes reads over depth: plain torch anywhere, kernels on GPUs where they are right and faster.

A backend is a set of functions on tensors. Streams and the block cache ask here which of them to call:

- `torch`: operations of torch, which are always there;
- `triton`: the kernels of `triton_kernels`;
- `fla`: one kernel of flash-linear-attention for the paper's read in training, and those of `triton` for all else;
- the kernels of a repository, which have the functions of `triton_kernels`.

By default (`auto`) those that are installed are tried where the first read happens, on a few numbers and then for
their time, and the fastest one that computes what the definition says is taken. `set_backend`, or the environment
variable `ATTNRES_BACKEND`, chooses one; `attnres env` shows what is chosen and why. Two runs may choose differently
where two backends are about as fast: a run that has to be repeated bit for bit needs one that was chosen.
"""

import functools
import os
from pathlib import Path
from types import ModuleType

import torch
from transformers.utils import logging

from .kernels import INSTALL, load_kernels, module_of, names_repository
from .trial import NOT_INSTALLED, WITHOUT_TRITON, check_kernels, trial


logger = logging.get_logger(__name__)

BACKENDS = ("auto", "reference", "torch", "triton", "fla")
_backend = "auto"
_loaded: ModuleType | None = None  # the kernels of a repository, if these were chosen


def set_backend(name: str, trust_remote_code: bool = False):
    """Choose how reads over depth are computed, in all models of this process.

    Args:
        name: one of these:
            - `auto`, the default: on a GPU, the fastest backend whose results are right in a trial at the first read.
            - `torch`: operations of torch.
            - `triton` and `fla`: kernels for GPUs. They are used for tensors on a GPU in fp32 or half precision, if
              the model is not compiled (a compiler fuses the operations itself), and `torch` otherwise.
            - `reference`: the definition in plain operations, without a block cache, for comparison.
            - a kernel repository: `owner/name` or `owner/name@revision` on the Hub, or a folder (`./owner/name` if it
              looks like an id). The package `kernels` loads it and runs its code. The kernels are used in place of
              `triton`'s, and are compared with the definition at the first read on a device.
        trust_remote_code: Run the code of a repository on the Hub whose publisher `kernels` does not trust.

    Raises:
        ValueError: if the backend does not exist or is not available here.
    """
    global _backend, _loaded
    if name not in BACKENDS and not names_repository(name):
        repository = "the `owner/name` of a kernel repository, and a folder that has one"
        raise ValueError(f"`{name}` is not a backend; there are {', '.join(BACKENDS)}, {repository}.")
    if name not in ("auto", "reference", "torch") and not torch.cuda.is_available():
        if name == "fla" or not _is_interpreted():
            way_out = "" if name == "fla" else ", or TRITON_INTERPRET=1 to try it slowly on a CPU"
            raise ValueError(f"The backend `{name}` needs a GPU{way_out}.")
    if name in INSTALL:
        try:
            module_of(name)
        except ModuleNotFoundError as error:
            package = "Triton" if name == "triton" else "flash-linear-attention"
            raise ValueError(f"The backend `{name}` needs {package}: {INSTALL[name]}") from error
    loaded = None if name in BACKENDS else load_kernels(name, trust_remote_code)
    _backend, _loaded = name, loaded


def get_backend() -> str:
    """The name of the backend that was chosen by `set_backend` or `ATTNRES_BACKEND`."""
    return _backend


def uses_definition() -> bool:
    """Whether reads are to be computed by definition: where that is chosen, and within transforms of `torch.func`."""
    return _backend == "reference" or torch._C._are_functorch_transforms_active()


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """The module of kernels for operations on this tensor, `None` if they are torch's."""
    if not use_kernels(tensor):
        return None
    if _loaded is None:
        return module_of("triton")
    check_loaded(_loaded, tensor.device, tensor.dtype)
    return _loaded


@functools.cache
def check_loaded(kernels: ModuleType, device: torch.device, dtype: torch.dtype):
    """Raise an `ArithmeticError` if the kernels of a repository do not compute what the definition says."""
    try:
        check_kernels(kernels, device, dtype)
    except ArithmeticError as error:
        way_out = "`attnres.set_backend('triton')` uses those of attnres"
        raise ArithmeticError(f"The kernels of `{_backend}`, for {dtype} on {device}: {error}; {way_out}.") from error


def use_kernels(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor are those of `triton_kernels`, or of a repository."""
    return backend_of(tensor) not in ("reference", "torch")


def backend_of(tensor: torch.Tensor) -> str:
    """What computes reads over sources like this one: `reference`, `torch`, `triton`, `fla` or a repository."""
    if uses_definition():
        return "reference"
    if not tensor.is_cuda and not ((_backend == "triton" or _loaded is not None) and _is_interpreted()):
        return "torch"
    if _backend == "torch" or tensor.dtype == torch.float64 or torch.compiler.is_compiling():
        return "torch"
    if type(tensor) is not torch.Tensor:  # which may have no memory of its own: fake tensors, distributed ones
        return "torch"
    if _backend != "auto":
        return _backend
    return choose(tensor.device, tensor.dtype)


@functools.cache
def choose(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest backend that is right on this device, with a warning about each that is not.

    Triton depends on the GPU, its driver and a compiler on the machine. Nothing is said of what is not installed.
    """
    results = trial(device, dtype)
    for name, result in results.items():
        if isinstance(result, str) and result not in (NOT_INSTALLED, WITHOUT_TRITON):
            logger.warning(
                f"Reads over depth do without `{name}` for {dtype} on {device}, where a trial of it failed"
                f" (`attnres.set_backend('torch')` does without a trial): {result}"
            )
    seconds = {name: result for name, result in results.items() if isinstance(result, float)}
    return min(seconds, key=seconds.__getitem__, default="torch")


def describe() -> list[str]:
    """In a line for each device and dtype: which backend computes reads there, and why."""
    on_cpu = backend_of(torch.empty(0))
    lines = [f"cpu: {on_cpu}, {'as was chosen' if on_cpu == _backend else 'as kernels are for GPUs'}"]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            where = f"{device} ({torch.cuda.get_device_name(device)}), {dtype}"
            if _backend != "auto":
                lines.append(f"{where}: {_backend}, as was chosen")
                continue
            results = [
                f"{name} {f'{1000 * result:.2f} ms' if isinstance(result, float) else result}"
                for name, result in trial(device, dtype).items()
            ]
            lines.append(f"{where}: {choose(device, dtype)}, by a trial of a read ({', '.join(results)})")
    if _loaded is not None:
        lines.append(f"kernels of {_backend}: {Path(str(_loaded.__file__)).parent}")
    return lines


if os.environ.get("ATTNRES_BACKEND"):
    set_backend(os.environ["ATTNRES_BACKEND"])
    logger.warning(f"ATTNRES_BACKEND={_backend} chooses how reads over depth are computed, in place of a trial.")
