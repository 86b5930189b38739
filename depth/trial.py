# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The trial of the backends on a device: whether each computes what the definition says, and how fast it reads."""

import functools
from collections.abc import Callable
from types import ModuleType

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
                check_kernels(module_of("triton"), device, dtype)
            elif name == "fla":
                check_fused_read(device, dtype)
            results[name] = seconds_of(name, device, dtype)
        except ModuleNotFoundError:
            results[name] = NOT_INSTALLED
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


@torch.inference_mode(False)
@torch.enable_grad()
def check_kernels(kernels: ModuleType, device: torch.device, dtype: torch.dtype):
    """Hold the four functions of a module of kernels to their definition on a few numbers.

    Raises:
        ArithmeticError: if one computes something else.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    # 2 tokens, 3 closed sources, 2 local ones, 2 sites, and a hidden size that is no power of 2
    queries, mix, state, norm_weight = random(2, 96) / 10, random(2, 96), random(2, 1), random(96, dtype=dtype)
    closed, local = list(random(3, 2, 96, dtype=dtype)), list(random(2, 2, 96, dtype=dtype))
    grad_mixes, grad_states, grad = random(2, 2, 96), random(2, 2, 1), random(2, 96, dtype=dtype)

    mixes, states, *saved = kernels.read_closed(queries, closed, 1.0)
    grad_queries, grad_closed = kernels.read_closed_backward(
        [*grad_mixes], [*grad_states], queries, closed, states, *saved
    )
    arguments, of_norm = (queries[0], mix, state, local), ((norm_weight, 1.0), 3)
    grads = kernels.merge_backward(grad, *arguments, 1.0, *of_norm)
    actual = {
        "read_closed": [mixes, states],
        "read_closed_backward": [grad_queries, *grad_closed],
        "merge": [kernels.merge(*arguments, dtype, 1.0, *of_norm)],
        "merge_backward": [*grads[:-1], *grads[-1]],
    }

    def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.double().requires_grad_() for tensor in tensors]

    def normed(rows: torch.Tensor, eps: float = 1.0) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()

    queries, *closed = of_closed = leaves(queries, *closed)
    values = torch.stack(closed, dim=1)
    scores = (normed(values) @ queries.mT).mT  # [tokens, sites, sources]
    outputs = [(scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1, keepdim=True).transpose(0, 1)]
    query, mix, state, norm_weight, *local = of_merge = leaves(queries[0].detach(), mix, state, norm_weight, *local)
    values = torch.stack(local, dim=1)
    merge_weights = torch.cat([state, normed(values) @ query], dim=-1).softmax(-1)
    merged_mix = 3 * (merge_weights[:, None] @ torch.cat([mix[:, None], values], dim=1))[:, 0]
    result = normed(merged_mix) * norm_weight
    expected = {
        "read_closed": outputs,
        "read_closed_backward": torch.autograd.grad(outputs, of_closed, [grad_mixes.double(), grad_states.double()]),
        "merge": [result],
        "merge_backward": torch.autograd.grad(result, of_merge, grad.double()),
    }
    # in fp32 sums of 96 products, in a half precision the rounding of the result and of what it is made of
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    for name, results in actual.items():
        for tensor, definition in zip(results, expected[name], strict=True):
            error = (tensor.detach().double() - definition).abs().max() / definition.abs().max()
            if not error <= tolerance:
                raise ArithmeticError(f"`{name}` is off by {error:.1e}")


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
