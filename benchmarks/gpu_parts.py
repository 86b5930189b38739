# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What `make gpu` measures: functions that are given a device and about how many seconds to take, and return JSON."""

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..depth.backends import describe, set_backend
from ..depth.definition import depth_attention_reference
from ..depth.kernels import fused_read, module_of
from ..depth.stream import DepthStream
from ..depth.trial import check_kernels, trial
from ..utils.timing import alternate, peak_bytes
from .twin import SHAPES, TWIN, Case, Models, make_models, make_twin, record_of, with_layers, work


# The most layers of each shape, and those that there have to be for 8 blocks
LAYERS, FEWEST_LAYERS = {"qwen3-0.6b": 28, "qwen3-8b": 8, "tiny": 4}, 4
VARIANTS = ["8", "full"]
DTYPES = ("float32", "bfloat16", "float16")
FEWEST_PAIRS, MOST_PAIRS = 5, 50
NUM_SOURCES, EPS = 9, 1e-6


class Skipped(Exception):
    """What is wanted for a part is not there."""


@contextlib.contextmanager
def skipped_without(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise Skipped(f"{package} is not installed, or does not have what is needed: {error}") from error


def use(backend: str):
    """Choose a backend for what follows, or raise `Skipped` if it is not installed."""
    if backend != "torch":
        with skipped_without("triton" if backend == "triton" else "flash-linear-attention"):
            module_of(backend)
    set_backend(backend)


def try_kernels(dtype: str, *, device: str, seconds: float) -> str:
    use("triton")
    check_kernels(module_of("triton"), torch.device(device), getattr(torch, dtype))
    return "right"


def try_backends(*, device: str, seconds: float) -> dict[str, Any]:
    """The trial by which `auto` chooses: by dtype and backend its seconds, or why it does not read."""
    set_backend("auto")
    dtypes = DTYPES if device.startswith("cuda") else ()  # on a CPU nothing is tried
    found = {dtype: dict(trial(torch.device(device), getattr(torch, dtype))) for dtype in dtypes}
    return {"trial": found, "described": describe()}


def layers_that_fit(shape: str, num_bytes: float) -> int:
    """The most layers of a shape that can be trained in so much memory; 0 if they are too few."""

    def num_parameters(layers: int) -> int:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(with_layers(SHAPES[shape], layers))
        return sum(parameter.numel() for parameter in model.parameters())

    one, two = num_parameters(1), num_parameters(2)

    def needed(layers: int) -> float:
        """In bf16: weights, gradients and two moments, and beside them logits and activations, or a copy by AdamW."""
        parameters = one + (layers - 1) * (two - one)
        return max(8 * parameters + 2.5 * 2**30, 10 * parameters + 0.5 * 2**30)

    fitting = (layers for layers in range(LAYERS[shape], FEWEST_LAYERS - 1, -1) if needed(layers) <= num_bytes)
    return next(fitting, 0)


_made: dict[tuple, tuple[Models, torch.optim.Optimizer]] = {}


def models_of(shape: str, layers: int, device: str) -> tuple[Models, torch.optim.Optimizer]:
    """The twin and its variants in bf16, and the optimizer of their weights, kept for the parts that follow."""
    key = shape, layers, device
    if key not in _made:
        _made.clear()
        gc.collect()  # both would not fit
        models = make_models(make_twin(with_layers(SHAPES[shape], layers), torch.bfloat16, device), VARIANTS, device)
        _made[key] = models, torch.optim.AdamW(models[TWIN].parameters(), lr=1e-5)
    return _made[key]


def measure(calls: Sequence[Callable[[], Any]], label: str, device: str, end: float) -> torch.Tensor:
    """Seconds, `[pairs, calls]`, of as many pairs as there is time for, within bounds.

    Args:
        end: on the clock of `time.monotonic`.
    """
    one = alternate(list(calls), 1, f"{label}, first", device).sum().item()
    pairs = int((end - time.monotonic()) / one) - 2  # which run before, unmeasured
    return alternate(list(calls), min(MOST_PAIRS, max(FEWEST_PAIRS, pairs)), label, device)


def times(
    shape: str, layers: int, case: str, mode: str, backend: str, *, device: str, seconds: float
) -> dict[str, Any]:
    """The time of a case with one backend, as ratio to the twin, and the peak memory, in bytes."""
    end = time.monotonic() + seconds
    use(backend)
    models, shared = models_of(shape, layers, device)
    torch._dynamo.reset()
    is_compiled = mode == "compiled"
    calls = {name: work(Case.parse(case), model, shared, device, is_compiled) for name, model in models.items()}
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
    found = measure([*calls.values()], case, device, end)
    records = [record_of(case, mode, name, found[:, i], found[:, 0]) for i, name in enumerate(calls)]
    of = {"shape": shape, "layers": layers, "case": case, "mode": mode, "backend": backend}
    return {**of, "pairs": len(found), "time": records, "peaks": peaks}


def ours(queries: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """The read of the last site, behind closed blocks of two sublayers and the first half of one."""
    *closed, partial = sources
    return DepthStream(queries, tuple(closed), partial, len(queries) - 1, block_size=2, eps=EPS).read()


def fla(queries: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    with skipped_without("flash-linear-attention"):
        module_of("fla")
    return fused_read(queries[-1], sources, EPS)


def liger(queries: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    with skipped_without("liger-kernel"):
        from liger_kernel.transformers.functional import liger_attn_res
    if not queries.is_cuda:
        raise Skipped("Liger's kernel needs a GPU")
    return liger_attn_res(torch.stack(sources), queries[-1], torch.ones_like(queries[-1]), EPS)


PEERS = {"fla": fla, "Liger": liger}


def one_read(peer: str, tokens: int, hidden_size: int, *, device: str, seconds: float) -> dict[str, Any]:
    """A read of 9 sources in bf16, forward alone and with its backward: ours with `triton`, and a kernel of others.

    Raises:
        ArithmeticError: if one computes something else than the definition.
    """
    end = time.monotonic() + seconds
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(NUM_SOURCES + 1, 1, tokens, hidden_size, device=device, generator=generator)
    *sources, grad = numbers.to(torch.bfloat16).unbind(0)
    queries = torch.randn(2 * (NUM_SOURCES - 1), hidden_size, device=device, generator=generator) / hidden_size**0.5
    for leaf in (queries, *sources):
        leaf.requires_grad_()
    del numbers
    candidates: dict[str, Callable] = {peer: PEERS[peer], "attnres": ours}
    few = [source[:, :16].double() for source in sources]
    expected = depth_attention_reference(queries[-1].double(), few, EPS)[0]
    for name, read in candidates.items():  # first that of others, which may not be there
        if name == "attnres":
            use("triton")
        error = (read(queries, sources)[:, :16] - expected).abs().max() / expected.abs().max()
        if not error <= 4 * torch.finfo(torch.bfloat16).eps:
            raise ArithmeticError(f"the mix of {name} is off by {error:.1e}")

    @torch.no_grad()
    def forward(read: Callable):
        read(queries, sources)

    def training(read: Callable):
        torch.autograd.grad(read(queries, sources), [queries, *sources], grad)

    records = []
    for mode, call, until in (("forward", forward, end - seconds / 2), ("training", training, end)):
        calls = [functools.partial(call, read) for read in (ours, PEERS[peer])]
        found = measure(calls, f"{peer}, {mode}", device, until)
        names = "attnres", peer
        records += [record_of(f"{tokens}", mode, name, found[:, i], found[:, 0]) for i, name in enumerate(names)]
    return {"tokens": tokens, "hidden_size": hidden_size, "peer": peer, "time": records}
