# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Modules of kernels for GPUs, imported when they are first needed: ours for Triton, fla's, and those of repositories.

fla's are in flash-linear-attention, and the package `kernels` loads repositories from the Hub or from a folder. None
goes with a checkpoint: its code imports them by name, where they are installed.
"""

import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch


INSTALL = {"triton": "pip install triton", "fla": "pip install flash-linear-attention"}

# What reads call of a module of kernels. The version goes up when these functions change, or what they take or return:
# it is also the version of the kernel repository, so `kernels` loads its branch v1
KERNELS_VERSION = 1
FUNCTIONS = {
    "read_closed": "queries, sources, eps, num_heads, weights",
    "read_closed_backward": (
        "grad_mixes, grad_states, queries, sources, states, scores, inverse_rms, num_heads, weights"
    ),
    "merge": "query, mix, state, sources, dtype, eps, norm, factor, num_heads, weights",
    "merge_backward": "grad, query, mix, state, sources, eps, norm, factor, num_heads, weights",
}
# As transformers writes kernels of the Hub: `owner/name`, or `owner/name@revision`. A path of that form needs ./
ON_THE_HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")


def module_of(backend: str) -> ModuleType:
    """The kernels of `triton` or `fla`; raises a `ModuleNotFoundError` if these are not installed."""
    return importlib.import_module("attnres.depth.triton_kernels" if backend == "triton" else "fla.ops.attnres")


def fused_read(query: torch.Tensor, sources: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
    """fla's kernel for a read of all sources at once: arguments and mix as of `depth_attention_reference`."""
    sources = [source.contiguous() for source in sources]
    return module_of("fla").fused_attnres(query, sources, torch.ones_like(query), eps)


def names_repository(name: str) -> bool:
    """Whether `load_kernels` can be asked for it: an id on the Hub, or a folder that exists."""
    is_folder = name != "" and Path(name).expanduser().is_dir()  # "" is the current one to `Path`
    return is_folder or ON_THE_HUB.fullmatch(name) is not None


def load_kernels(name: str, trust_remote_code: bool = False) -> ModuleType:
    """The kernels of a repository on the Hub or in a folder. Their code runs, if `kernels` trusts who published it.

    Raises:
        ValueError: if they cannot be loaded, or are not what reads call.
    """
    try:
        package = importlib.import_module("kernels")
    except ModuleNotFoundError as error:
        raise ValueError(f"The backend `{name}` needs the package kernels: pip install kernels") from error
    on_the_hub = ON_THE_HUB.fullmatch(name)
    try:
        if on_the_hub is None:
            module = package.get_local_kernel(Path(name).expanduser().absolute())
        else:
            repo_id, revision = on_the_hub.groups()
            which = {"version": KERNELS_VERSION} if revision is None else {"revision": revision}
            module = package.get_kernel(repo_id, **which, trust_remote_code=trust_remote_code)
    except Exception as error:  # their code runs, which may raise anything
        hint = f" If you mean the folder, name it `./{name}`." if on_the_hub and Path(name).is_dir() else ""
        raise ValueError(f"The kernels of `{name}` cannot be loaded: {type(error).__name__}: {error}{hint}") from error
    check_functions(name, module)
    return module


def check_functions(name: str, kernels: ModuleType):
    """Raise a `ValueError` unless kernels are of our version and have all functions that reads call."""
    way_out = "Name another revision, `owner/name@revision`, or use those of attnres: the backend `triton`."
    version = getattr(kernels, "KERNELS_VERSION", None)
    if version != KERNELS_VERSION:
        found = "have no KERNELS_VERSION" if version is None else f"are of version {version}"
        raise ValueError(f"The kernels of `{name}` {found}, but attnres needs version {KERNELS_VERSION}. {way_out}")
    for function, parameters in FUNCTIONS.items():
        try:
            found = ", ".join(inspect.signature(getattr(kernels, function)).parameters)
        except (AttributeError, TypeError, ValueError):  # it is missing, no function, or not one of Python
            found = None
        if found != parameters:
            raise ValueError(f"The kernels of `{name}` have no function {function}({parameters}). {way_out}")
