# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The trial of the backends on a device: whether each computes what the definition says, and how fast it reads."""

import functools
from collections.abc import Callable

import torch

from .definition import depth_attention_reference
from .kernels import fused_read, module_of
from .reads import PAPERS_READ
from .two_phases import Chunk


NOT_INSTALLED, WITHOUT_TRITON = "not installed", "goes with `triton`"


@functools.cache
def trial(device: torch.device, dtype: torch.dtype) -> dict[str, float | str]:
    """By backend the seconds that a read in training takes on a device, forward and backward, or why it does not."""
    results: dict[str, float | str] = {}
    for name in ("torch", "triton", "fla"):
        try:
            if name == "fla" and not isinstance(results["triton"], float):
                results[name] = WITHOUT_TRITON
                continue
            if name == "triton":
                module_of("triton").try_on(device, dtype)
            elif name == "fla":
                check_fused_read(device, dtype)
            results[name] = seconds_of(name, device, dtype)
        except ModuleNotFoundError:
            results[name] = NOT_INSTALLED
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def check_fused_read(device: torch.device, dtype: torch.dtype):
    """Hold fla's kernel to the definition on a few numbers: its mix and its gradients.

    Raises:
        ArithmeticError: if it computes something else.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # A hidden size that is no power of 2
    numbers = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((96,), *[(2, 5, 96)] * 4)]
    query, grad, *sources = numbers

    def results(dtype: torch.dtype, function: Callable) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (query, *sources)]
        mix = function(leaves[0], leaves[1:])
        return [mix, *torch.autograd.grad(mix, leaves, grad.to(dtype))]

    with torch.enable_grad(), torch.inference_mode(False):
        actual = results(dtype, lambda query, sources: fused_read(query, sources, 1.0))
        expected = results(torch.float64, lambda query, sources: depth_attention_reference(query, sources, 1.0)[0])
    # In fp32 sums of 96 products, in a half precision the rounding of the result and of what it is made of
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    for what, result, definition in zip(("mix", *["gradient"] * 4), actual, expected):
        error = (result.double() - definition).abs().max() / definition.abs().max()
        if not error <= tolerance:
            raise ArithmeticError(f"its {what} is off by {error:.1e}")


@torch.inference_mode(False)
def seconds_of(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """A block of four sites that read four sources of 2,048 tokens with 1,024 numbers each."""
    from torch.utils.benchmark import Timer

    generator = torch.Generator(device).manual_seed(0)  # of its own, or the trial would change the run it is a part of
    numbers = torch.randn(5, 1, 2048, 1024, device=device, generator=generator).to(dtype).requires_grad_()
    queries = torch.zeros(4, 1024, device=device, requires_grad=True)
    kernels = module_of("triton") if name == "triton" else None

    def mixes(sources: list[torch.Tensor]) -> list[torch.Tensor]:
        if name == "fla":
            return [fused_read(query, sources, 1e-6) for query in queries]
        # Without a question to `backends`, which may be waiting for this answer
        *closed, partial = sources
        chunk = Chunk((0, 4), queries, closed, 1e-6, PAPERS_READ, kernels=kernels)
        return [chunk.read(site, [partial], 0, None, 1) for site in range(4)]

    def read():
        *sources, grad = numbers.unbind(0)
        torch.autograd.grad(mixes(sources), [queries, numbers], [grad] * 4)

    with torch.enable_grad():
        return Timer("read()", globals={"read": read}).blocked_autorange(min_run_time=0.05).median
