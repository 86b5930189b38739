# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The steps of a read, with backward passes that save little: scores, and the mix of the sources with its norm.

Each takes `kernels`, a module of kernels to run instead of torch's operations, or `None`.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast

from .norms import norm_of, norm_tensors, norm_with


def inverse_rms(values: torch.Tensor, eps: float) -> torch.Tensor:
    """`1 / rms` over the last dimension, at least fp32: `[..., hidden]` -> `[..., 1]`."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=dtype)
    return norm.square().div_(values.shape[-1]).add_(eps).rsqrt_()


def by_head(tensors: Sequence[torch.Tensor], num_heads: int) -> list[torch.Tensor]:
    """`[..., hidden]` as `[..., heads, hidden / heads]`, each."""
    return [tensor.unflatten(-1, (num_heads, -1)) for tensor in tensors]


def _in_backward(kernels: ModuleType | None, saved: torch.Tensor) -> ModuleType | None:
    """The kernels of the forward pass, except in a backward pass that is compiled or traced by itself."""
    return None if torch.compiler.is_compiling() or type(saved) is not torch.Tensor else kernels


def _through_norm(grad: torch.Tensor, scores: torch.Tensor, inv_rms: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """The number by which a source is part of its own gradient, `[..., 1]`: keys are normalised.

    The score `query . v / rms(v)` has the derivative `query / rms - score * v / (hidden * rms^2)`.

    Args:
        grad, scores: of all queries of a token, `[..., queries]`.
        inv_rms: `[..., 1]`.
    """
    return (grad * scores).sum(-1, keepdim=True) * inv_rms.square() / -hidden_size


class SourceScores(torch.autograd.Function):
    """Scores of one source for several queries. Saves the source, which is alive anyway, and the scores."""

    @staticmethod
    def forward(ctx, queries: torch.Tensor, source: torch.Tensor, eps: float, kernels: ModuleType | None = None):
        ctx.kernels = kernels  # for a single query
        if kernels is not None:
            scores, inv_rms = kernels.score(queries[0], source, eps)
            ctx.save_for_backward(queries, source, inv_rms, scores)
            return scores
        inv_rms = inverse_rms(source, eps)
        with maybe_autocast(device_type=source.device.type, enabled=False):
            scores = (source.to(inv_rms.dtype) @ queries.to(inv_rms.dtype).mT).mul_(inv_rms)
        ctx.save_for_backward(queries, source, inv_rms, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        queries, source, inv_rms, scores = ctx.saved_tensors
        kernels = _in_backward(ctx.kernels, source)
        if kernels is not None:
            grad_query, grad_source = kernels.score_backward(grad, queries[0], source, inv_rms, scores)
            return grad_query[None], grad_source, None, None
        with maybe_autocast(device_type=source.device.type, enabled=False):
            wide_queries, wide_source = queries.to(scores.dtype), source.to(scores.dtype)
            to_query = grad * inv_rms
            to_source = _through_norm(grad, scores, inv_rms, source.shape[-1])
            grad_source = (to_query @ wide_queries).addcmul_(to_source, wide_source)
            grad_queries = to_query.flatten(0, -2).mT @ wide_source.flatten(0, -2)
        return grad_queries.to(queries.dtype), grad_source.to(source.dtype), None, None


class HeadScores(torch.autograd.Function):
    """Scores of one source for several queries of several heads. Saves the source, which is alive anyway."""

    @staticmethod
    def forward(ctx, queries: torch.Tensor, source: torch.Tensor, eps: float, num_heads: int):
        inv_rms = inverse_rms(source, eps).unsqueeze(-1)
        heads, queries_by_head = by_head([source.to(inv_rms.dtype), queries.to(inv_rms.dtype)], num_heads)
        with maybe_autocast(device_type=source.device.type, enabled=False):
            scores = torch.einsum("...hd,shd->...hs", heads, queries_by_head) * inv_rms
        ctx.save_for_backward(queries, source, inv_rms, scores)
        ctx.num_heads = num_heads
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        queries, source, inv_rms, scores = ctx.saved_tensors
        wide_source = source.to(scores.dtype)
        heads, queries_by_head = by_head([wide_source, queries.to(scores.dtype)], ctx.num_heads)
        with maybe_autocast(device_type=source.device.type, enabled=False):
            # As of one head, but the norm is that of all
            to_query = grad * inv_rms
            to_source = (grad * scores).sum((-1, -2)).unsqueeze(-1) * inv_rms[..., 0].square() / -source.shape[-1]
            grad_source = torch.einsum("...hs,shd->...hd", to_query, queries_by_head).flatten(-2)
            grad_source = grad_source.addcmul_(to_source, wide_source)
            grad_queries = torch.einsum("ths,thd->shd", to_query.flatten(0, -3), heads.flatten(0, -3)).flatten(-2)
        return grad_queries.to(queries.dtype), grad_source.to(source.dtype), None, None


class TokenScores(torch.autograd.Function):
    """Scores of one source for a query of each token. Saves what is alive anyway, and a number per token and head."""

    @staticmethod
    def forward(ctx, query: torch.Tensor, source: torch.Tensor, inv_rms: torch.Tensor, num_heads: int):
        (products,) = by_head([query * source.to(query.dtype)], num_heads)
        scores = products.sum(-1) * inv_rms
        ctx.save_for_backward(query, source, inv_rms, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        query, source, inv_rms, scores = ctx.saved_tensors
        wide_source, width = source.to(query.dtype), query.shape[-1] // scores.shape[-1]
        to_query = (grad * inv_rms).repeat_interleave(width, dim=-1)
        to_source = _through_norm(grad, scores, inv_rms, source.shape[-1])
        grad_source = (to_query * query).addcmul_(to_source, wide_source)
        return to_query.mul_(wide_source), grad_source.to(source.dtype), None, None


def weighted_sum(
    weights: torch.Tensor, sources: Sequence[torch.Tensor], kernels: ModuleType | None = None
) -> torch.Tensor:
    """The sum over sources, `[batch, seq, hidden]`, by weights `[batch, seq, (heads,) sources]`."""
    if weights.ndim > sources[0].ndim:
        return weighted_sum(weights, by_head(sources, weights.shape[-2]), kernels).flatten(-2)
    if kernels is not None:
        return kernels.weighted_sum(weights, sources)
    mix = weights[..., :1] * sources[0]
    for i, source in enumerate(sources[1:], start=1):
        mix.addcmul_(weights[..., i : i + 1], source.to(mix.dtype))
    return mix.to(sources[0].dtype)


def weighted_sum_backward(
    grad: torch.Tensor, weights: torch.Tensor, sources: Sequence[torch.Tensor], kernels: ModuleType | None = None
):
    """Gradients of the weights and of the sources."""
    if weights.ndim > sources[0].ndim:
        grad, *sources = by_head([grad, *sources], weights.shape[-2])
        grad_weights, *grad_sources = weighted_sum_backward(grad, weights, sources, kernels)
        return grad_weights, *(grad_source.flatten(-2) for grad_source in grad_sources)
    if kernels is not None:
        return kernels.weighted_sum_backward(grad, weights, sources)
    grad = grad.to(weights.dtype)
    grad_weights = torch.stack([(grad * source).sum(-1) for source in sources], dim=-1)
    return grad_weights, *((weights[..., i : i + 1] * grad).to(s.dtype) for i, s in enumerate(sources))


class WeightedSum(torch.autograd.Function):
    """The mix of a read. Saves weights and sources, no product of them."""

    @staticmethod
    def forward(ctx, kernels: ModuleType | None, weights: torch.Tensor, *sources: torch.Tensor):
        ctx.kernels = kernels
        ctx.save_for_backward(weights, *sources)
        return weighted_sum(weights, sources, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        weights, *sources = ctx.saved_tensors
        return None, *weighted_sum_backward(grad, weights, sources, _in_backward(ctx.kernels, weights))


class NormOfWeightedSum(torch.autograd.Function):
    """The mix of a read and the norm behind it. Saves nothing of either, and computes them again in backward.

    What the norm is made of is saved with the sources, and the norm is not asked again: before backward runs, it may
    have been given other parameters, by `functional_call`, FSDP, a merged adapter or an optimizer.
    """

    @staticmethod
    def forward(ctx, norm: nn.Module, kernels, weights: torch.Tensor, *sources_and_norm_tensors: torch.Tensor):
        sources = sources_and_norm_tensors[: weights.shape[-1]]
        device_type = weights.device.type
        ctx.kernels = kernels
        ctx.norm, ctx.tensor_names = norm_with(norm, {}), list(norm_tensors(norm))
        ctx.is_autocast = torch.is_autocast_enabled(device_type)
        ctx.autocast_dtype = torch.get_autocast_dtype(device_type)
        ctx.save_for_backward(weights, *sources_and_norm_tensors)
        return norm_of(norm, weighted_sum(weights, sources, kernels))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        weights, *tensors = ctx.saved_tensors
        num_sources, kernels = weights.shape[-1], _in_backward(ctx.kernels, weights)
        sources, needed = tensors[:num_sources], ctx.needs_input_grad[3 + num_sources :]
        of_norm = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors[num_sources:], needed)]
        norm = norm_with(ctx.norm, dict(zip(ctx.tensor_names, of_norm)))
        mix = weighted_sum(weights, sources, kernels).requires_grad_()
        autocast = maybe_autocast(weights.device.type, dtype=ctx.autocast_dtype, enabled=ctx.is_autocast)
        with torch.enable_grad(), autocast:
            normed = norm_of(norm, mix)
        inputs = (mix, *(tensor for tensor in of_norm if tensor.requires_grad))
        grad_mix, *grads = torch.autograd.grad(normed, inputs, grad, allow_unused=True)
        grads_of_norm = [grads.pop(0) if need else None for need in needed]
        return None, None, *weighted_sum_backward(grad_mix, weights, sources, kernels), *grads_of_norm


class ReadAndNorm(torch.autograd.Function):
    """A read and the norm behind it as one kernel each way. Saves nothing of them but a few numbers per token."""

    @staticmethod
    def forward(
        ctx, query, scores, norm_weight, norm_eps: float, eps: float, kernels: ModuleType, *sources: torch.Tensor
    ):
        ctx.norm_eps, ctx.kernels = norm_eps, kernels
        ctx.set_materialize_grads(False)
        normed, *saved = kernels.read(query, scores, norm_weight, norm_eps, eps, sources)
        ctx.save_for_backward(query, norm_weight, *saved, *sources)
        return normed, saved[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor | None, grad_weights: torch.Tensor | None):
        query, norm_weight, *saved_and_sources = ctx.saved_tensors
        saved, sources = saved_and_sources[:3], saved_and_sources[3:]
        if grad is None:  # of the weights alone
            grad = torch.zeros_like(sources[-1])
        grads = ctx.kernels.read_backward(grad, grad_weights, query, norm_weight, ctx.norm_eps, *saved, sources)
        grad_query, grad_scores, grad_norm_weight, *grad_sources = grads
        return grad_query, grad_scores, grad_norm_weight, None, None, None, *grad_sources
