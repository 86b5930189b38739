# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The two phases of a read by kernels, with backward passes by kernels: see `triton_kernels.py`.

As `ReadClosed` and `MergeOpen` in `autograd.py` they save sources and a few numbers per token; the kernels of phase 2
also score the local sources.
"""

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .autograd import unpacked


class ReadClosedByKernels(torch.autograd.Function):
    """Phase 1: the mix of each site, `[batch, seq, hidden]`, and then the state of each, `[batch, seq, heads]`."""

    @staticmethod
    def forward(ctx, kernels: ModuleType, eps: float, num_heads: int, weights: str, queries, *sources):
        ctx.kernels, ctx.arguments, ctx.num_sites = kernels, (eps, num_heads, weights), len(queries)
        mixes, states, scores, inverse_rms = kernels.read_closed(queries, sources, eps, num_heads, weights)
        ctx.save_for_backward(queries, states, scores, inverse_rms, *sources)
        ctx.set_materialize_grads(False)
        ctx.unpacked = ctx.mixes = None
        return *mixes.unbind(0), *(() if states is None else states.unbind(0))

    @staticmethod
    def mix_again(ctx, place: int) -> torch.Tensor:
        queries, _, _, _, *sources = unpacked(ctx)
        if ctx.mixes is None:
            ctx.mixes = ctx.kernels.read_closed(queries, sources, *ctx.arguments)[0]
        return ctx.mixes[place]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        queries, states, scores, inverse_rms, *sources = unpacked(ctx)
        ctx.unpacked = ctx.mixes = None  # every site has been there
        _, num_heads, weights = ctx.arguments
        of_mixes, of_states = list(grads[: ctx.num_sites]), list(grads[ctx.num_sites :]) or [None] * ctx.num_sites
        grad_queries, grad_sources = ctx.kernels.read_closed_backward(
            of_mixes, of_states, queries, sources, states, scores, inverse_rms, num_heads, weights
        )
        return None, None, None, None, grad_queries.to(queries.dtype), *grad_sources


class MergeByKernels(torch.autograd.Function):
    """Phase 2 and Llama's norm behind it: what is read, or normed, `[batch, seq, hidden]`.

    Args:
        of_result: its dtype, and the epsilon of the norm.
        closed: the node of phase 1 and the place of the site there, from which its mix is computed again.
        query: of the site, `[hidden]`, or of each token, `[batch, seq, hidden]`.
        tensors: the weight of the norm, if there is one, and the local sources.
    """

    @staticmethod
    def forward(ctx, kernels: ModuleType, options: dict[str, Any], of_result, closed, query, mix, state, *tensors):
        norm_weight, *sources = tensors
        dtype, norm_eps = of_result
        ctx.kernels, ctx.options, ctx.norm_eps, ctx.closed = kernels, options, norm_eps, closed
        ctx.save_for_backward(query, mix if closed is None else None, state, *tensors)
        norm = None if norm_weight is None else (norm_weight, norm_eps)
        return kernels.merge(query, mix, state, sources, norm=norm, dtype=dtype, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, mix, state, norm_weight, *sources = ctx.saved_tensors
        if ctx.closed is not None:
            mix = ReadClosedByKernels.mix_again(*ctx.closed)
        norm = None if norm_weight is None else (norm_weight, ctx.norm_eps)
        of_query, of_mix, of_state, of_norm, of_sources = ctx.kernels.merge_backward(
            grad, query, mix, state, sources, norm=norm, **ctx.options
        )
        of_norm = None if of_norm is None else of_norm.to(norm_weight.dtype)
        return None, None, None, None, of_query.to(query.dtype), of_mix, of_state, of_norm, *of_sources
