# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The parts of a read in two phases, with backward passes that save little.

`ReadClosed` is phase 1, and `MergeOpen` phase 2 with the norm behind it, of scores that `Scores` computes, or
`TokenScores` for queries that see the input. What they save is the sources, which are alive anyway, and a few numbers
per token; everything else is computed again.

Inside, a source is `[tokens, heads, width]`, where `heads * width` is the hidden size and the paper's read has one
head. Keys are `sqrt(hidden) * v / |v|`, with the epsilon in the L2 norm; the root is in the queries that are given.
Weights of several sources have these in the first dimension: a softmax over a few numbers that are next to each other
is ten times as slow.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast

from .norms import norm_of, norm_tensors, norm_with


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of scores and sums: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def by_head(source: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[..., hidden]` as `[tokens, heads, width]`, at least fp32."""
    hidden_size = source.shape[-1]
    num_tokens = source.numel() // hidden_size
    return source.to(wide_dtype(source.dtype)).reshape(num_tokens, num_heads, hidden_size // num_heads)


def key_l2_norm(values: torch.Tensor, eps_norm: torch.Tensor) -> torch.Tensor:
    """The L2 norm by which keys are divided: `sqrt(hidden) * rms` over the last dimension, with the epsilon in it.

    Args:
        values: `[..., hidden]`.
        eps_norm: the norm of values whose squares are `eps`: `sqrt(hidden * eps)`.

    Returns:
        `[..., 1]`.
    """
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    if torch.compiler.is_compiling():  # or exporting: ONNX has no `hypot`
        return (norm.square() + eps_norm.square()).sqrt()
    return torch.hypot(norm, eps_norm)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, which is kept. (A batch of products of vectors would be slower by far.)"""
    return (a * b).sum(-1, keepdim=True)


def exactly(like: torch.Tensor):
    """No autocast: products of matrices as wide as they are given."""
    device_type = like.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


# Scores


def scores_of(
    queries: torch.Tensor, source: torch.Tensor, eps_norm: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a source for some sites, `[heads, tokens, sites]`, and the L2 norm of its keys, `[tokens, 1]`."""
    values = by_head(source, num_heads)
    l2_norm = key_l2_norm(values.flatten(1), eps_norm)
    with exactly(values):
        products = torch.bmm(values.transpose(0, 1), queries_by_head(queries, num_heads).mT)
    return products / l2_norm, l2_norm


def queries_by_head(queries: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[sites, hidden]` as `[heads, sites, width]`."""
    return queries.view(queries.shape[0], num_heads, -1).transpose(0, 1)


class Scores(torch.autograd.Function):
    """Scores of one source for the queries of some sites, `[tokens, heads]` for each.

    A tensor for each site: slices, taken where they are read, would have gradients as large as the whole.
    """

    @staticmethod
    def forward(ctx, queries: torch.Tensor, source: torch.Tensor, eps_norm: torch.Tensor, num_heads: int):
        scores, l2_norm = scores_of(queries, source, eps_norm, num_heads)
        ctx.save_for_backward(queries, source, l2_norm, scores)
        ctx.set_materialize_grads(False)
        return scores.transpose(0, 1).unbind(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        queries, source, l2_norm, scores = ctx.saved_tensors
        num_heads = len(scores)
        grad = stacked_grads(grads, scores.transpose(0, 1)).transpose(0, 1)
        to_query, values = grad / l2_norm, by_head(source, num_heads).transpose(0, 1)
        grad_queries = grad_source = None
        with exactly(values):
            if ctx.needs_input_grad[0]:
                grad_queries = torch.bmm(to_query.mT, values).transpose(0, 1).reshape(queries.shape)
            if ctx.needs_input_grad[1]:
                grad_source = torch.bmm(to_query, queries_by_head(queries, num_heads))
        if grad_source is not None:
            # query . v / |v| has the derivative query / |v| - score * v / |v|^2
            through_norm = (to_query * scores).sum((0, -1)).unsqueeze(-1) / l2_norm
            grad_source = grad_source.addcmul_(through_norm, values, value=-1)
            grad_source = grad_source.transpose(0, 1).reshape(source.shape).to(source.dtype)
        return grad_queries, grad_source, None, None


def stacked_grads(grads: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Gradients of the columns of `like`, in one tensor; of some there may be none."""
    if len(grads) == 1 and grads[0] is not None:
        return grads[0].unsqueeze(-1)
    return torch.stack([torch.zeros_like(like[..., i]) if grad is None else grad for i, grad in enumerate(grads)], -1)


class TokenScores(torch.autograd.Function):
    """Scores `[tokens, heads]` of one source for a query of each token, `[batch, seq, hidden]`."""

    @staticmethod
    def forward(ctx, query: torch.Tensor, source: torch.Tensor, l2_norm: torch.Tensor, num_heads: int):
        scores = dot(by_head(query, num_heads), by_head(source, num_heads)).squeeze(-1) / l2_norm
        ctx.save_for_backward(query, source, l2_norm, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        query, source, l2_norm, scores = ctx.saved_tensors
        num_heads = scores.shape[-1]
        values = by_head(source, num_heads)
        to_query = (grad / l2_norm).unsqueeze(-1)
        through_norm = ((to_query.squeeze(-1) * scores).sum(-1, keepdim=True) / l2_norm).unsqueeze(-1)
        grad_source = torch.addcmul(to_query * by_head(query, num_heads), through_norm, values, value=-1)
        grad_query = (to_query * values).view(query.shape)
        return grad_query.to(query.dtype), grad_source.view(source.shape).to(source.dtype), None, None


# Phase 1


def read_closed(values: torch.Tensor, scores: torch.Tensor, weights: str):
    """Phase 1 of several sites: what each reads of the closed sources alone, in one read of these.

    Args:
        values: `[heads, tokens, sources, width]`.
        scores: `[sources, heads, tokens, sites]`.
        weights: `softmax`, `softmax1` or `sigmoid`.

    Returns:
        Their mixes, `[heads, tokens, sites, width]`, and what phase 2 has to know, `[heads, tokens, sites]`: the
        logarithm of the sum of the weights' numerators; of a sigmoid nothing.
    """
    of_closed, state = weights_of_closed(scores, weights)
    return mixed_closed(of_closed, values, weights), state


def mixed_closed(of_closed: torch.Tensor, values: torch.Tensor, weights: str) -> torch.Tensor:
    if values.shape[2] == 1 and weights == "softmax":  # over one source: it is 1
        return values.expand(-1, -1, of_closed.shape[-1], -1)
    with exactly(values):
        return torch.matmul(of_closed.permute(1, 2, 3, 0), values)


def weights_of_closed(scores: torch.Tensor, weights: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    if weights == "sigmoid":
        return scores.sigmoid(), None
    of_closed, state = torch.softmax(scores, dim=0), torch.logsumexp(scores, dim=0)
    if weights == "softmax1":  # a score of zero more
        of_closed = of_closed * state.sigmoid()
        state = torch.logaddexp(state, torch.zeros_like(state))
    return of_closed, state


def closed_scores(queries: torch.Tensor, values: torch.Tensor, l2_norms: torch.Tensor) -> torch.Tensor:
    """Scores `[sources, heads, tokens, sites]`, of arguments as of `ReadClosed`."""
    num_heads, num_tokens, num_sources, width = values.shape
    with exactly(values):
        products = torch.matmul(values.reshape(num_heads, -1, width), queries_by_head(queries, num_heads).mT)
    products = products.view(num_heads, num_tokens, num_sources, len(queries)).permute(2, 0, 1, 3).contiguous()
    return products / by_source(l2_norms)


def by_source(numbers: torch.Tensor) -> torch.Tensor:
    """`[tokens, sources]` as `[sources, 1, tokens, 1]`."""
    return numbers.T[:, None, :, None]


def by_site(mixes: torch.Tensor, state: torch.Tensor | None):
    """What `read_closed` gives, for each site: `[tokens, heads, width]`, and `[tokens, heads]` if there is a state."""
    return mixes.transpose(0, 1).unbind(2), () if state is None else state.transpose(0, 1).unbind(-1)


def unpacked(ctx) -> list[torch.Tensor]:
    """The saved tensors of a phase 1, which activation checkpointing gives only once, as they were saved."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        # It knows of the tensors that a node saves itself, and phase 2 asks another one
        raise RuntimeError(
            "Compiled autograd cannot run the backward pass of an AttnRes model whose forward pass was not compiled."
            " Compile the forward pass as well, or choose `attnres.set_backend('reference')`."
        )
    if ctx.unpacked is None:
        ctx.unpacked = [(tensor, tensor is not None and tensor._version) for tensor in ctx.saved_tensors]
    for tensor, version in ctx.unpacked:
        if tensor is not None and tensor._version != version:
            raise RuntimeError(
                "A source of a read over depth has been modified by an inplace operation since a backward pass through"
                " a part of this graph, and the rest of it needs what was read."
            )
    return [tensor for tensor, _ in ctx.unpacked]


class ReadClosed(torch.autograd.Function):
    """Phase 1. Gives the mix of each site, `[tokens, heads, width]`, and then the state of each, `[tokens, heads]`.

    Mixes are not kept for the backward pass. The first site whose gradient comes asks for them, and all are computed
    again at once (`mixes_again`).

    Args:
        values: the sources side by side, `[heads, tokens, sources, width]`.
        l2_norms: those of their keys, `[tokens, sources]`.
        sources: themselves, from which values are made again.
    """

    @staticmethod
    def forward(ctx, queries, values, l2_norms, weights: str, *sources):
        scores = closed_scores(queries, values, l2_norms)
        mixes, states = by_site(*read_closed(values, scores, weights))
        ctx.weights, ctx.num_sites = weights, len(queries)
        ctx.save_for_backward(queries, scores, l2_norms, *sources)
        ctx.set_materialize_grads(False)
        ctx.unpacked = ctx.tensors_again = ctx.mixes_of_sites = None
        return *mixes, *states

    @staticmethod
    def saved(ctx) -> tuple:
        """The saved tensors, with the sources side by side, their weights and the state."""
        if ctx.tensors_again is None:
            queries, scores, l2_norms, *sources = unpacked(ctx)
            of_closed, state = weights_of_closed(scores, ctx.weights)
            ctx.tensors_again = queries, scores, l2_norms, side_by_side(sources, scores.shape[1]), of_closed, state
        unpacked(ctx)
        return ctx.tensors_again

    @staticmethod
    def mix_again(ctx, place: int) -> torch.Tensor:
        _, _, _, values, of_closed, _ = ReadClosed.saved(ctx)
        if ctx.mixes_of_sites is None:
            ctx.mixes_of_sites = mixed_closed(of_closed, values, ctx.weights).transpose(0, 1)
        return ctx.mixes_of_sites[:, :, place]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        queries, scores, l2_norms, values, of_closed, state = ReadClosed.saved(ctx)
        ctx.unpacked = ctx.tensors_again = ctx.mixes_of_sites = None  # every site has been there
        num_heads, num_tokens, num_sources, width = values.shape
        of_mixes = values.new_zeros if any(grad is None for grad in grads[: ctx.num_sites]) else values.new_empty
        of_mixes = of_mixes(num_heads, num_tokens, ctx.num_sites, width)
        for site, grad in enumerate(grads[: ctx.num_sites]):
            if grad is not None:
                of_mixes[:, :, site].copy_(grad.transpose(0, 1))
        grad_queries = grad_values = None
        with exactly(values):
            # Of the weights, as yet
            of_scores = torch.matmul(values, of_mixes.mT).permute(2, 0, 1, 3).contiguous()
            if state is None:
                of_scores = torch.ops.aten.sigmoid_backward(of_scores, of_closed)
            else:
                of_scores.sub_((of_closed * of_scores).sum(0))
                if any(grad is not None for grad in grads[ctx.num_sites :]):
                    of_state = stacked_grads(grads[ctx.num_sites :], state.transpose(0, 1)).transpose(0, 1)
                    of_scores.add_(of_state)
                of_scores.mul_(of_closed)
            to_query = of_scores / by_source(l2_norms)
            flat = to_query.permute(1, 2, 0, 3).reshape(num_heads, num_tokens * num_sources, ctx.num_sites)
            if ctx.needs_input_grad[0]:
                grad_queries = torch.bmm(flat.mT, values.reshape(num_heads, -1, width))
                grad_queries = grad_queries.transpose(0, 1).reshape(queries.shape)
            if ctx.needs_input_grad[1]:
                grad_values = torch.matmul(of_closed.permute(1, 2, 0, 3), of_mixes)
                grad_values.view(num_heads, -1, width).baddbmm_(flat, queries_by_head(queries, num_heads))
                through_norm = to_query.mul_(scores).sum((1, 3)).T / l2_norms
                grad_values.addcmul_(through_norm.unsqueeze(-1), values, value=-1)
        return grad_queries, grad_values, None, None, *(None for _ in range(num_sources))


def side_by_side(sources: Sequence[torch.Tensor], num_heads: int, before: torch.Tensor | None = None) -> torch.Tensor:
    """Sources, `[batch, seq, hidden]`, behind others as `[heads, tokens, sources, width]`."""
    values = [by_head(source, num_heads).transpose(0, 1).unsqueeze(2) for source in sources]
    values = values if before is None else [before, *values]
    return values[0] if len(values) == 1 else torch.cat(values, dim=2)


# Phase 2


@dataclass
class Merge:
    """What phase 2 of a site has to know beyond tensors."""

    num_local: int
    weights: str
    shape: torch.Size  # of what is read
    dtype: torch.dtype
    factor: float = 1
    keeps_stream: bool = False  # whether the sum of all sources is added to the mix
    # What a mix is computed again from: the node of phase 1, and the place of the site there
    closed: tuple[Any, int] | None = None
    # Of the key RMSNorm, if the last local source is to be scored here: one that no later site reads
    key_eps_norm: torch.Tensor | None = None
    norm: nn.Module | None = None
    # If the norm is Llama's
    eps_norm: torch.Tensor | None = None


def merged(how: Merge, mix, state, scores: Sequence[torch.Tensor], values: Sequence[torch.Tensor], closed_sum=None):
    """The mix of all sources, `[tokens, heads, width]`.

    Args:
        mix, state: of the closed sources, as phase 1 gives them; a mix of `None`: there are only local ones.
        scores: of the local sources, each `[tokens, heads]`.
        values: these, `[tokens, heads, width]`.
        closed_sum: that of the closed sources, if the stream is kept.
    """
    return mixed(how, mix, weights_of_all(how, mix is not None, state, scores), values, closed_sum)


def weights_of_all(how: Merge, has_mix: bool, state, scores: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The weights `[sources, tokens, heads]` of the local sources, with that of the closed ones in front.

    There is none of these where it is one, as for a sigmoid, or one less that of a single local source.
    """
    if not scores:
        return None
    if how.weights == "sigmoid":
        return torch.stack(list(scores)).sigmoid()
    if has_mix and len(scores) == 1:
        return (scores[0] - state).sigmoid().unsqueeze(0)
    null = [torch.zeros_like(scores[0])] if how.weights == "softmax1" and not has_mix else []
    weights = torch.softmax(torch.stack([*([state] if has_mix else null), *scores]), dim=0)
    return weights[len(null) :]


def mixed(how: Merge, mix, weights, values: Sequence[torch.Tensor], closed_sum=None) -> torch.Tensor:
    """As of `merged`, by the weights."""
    if not values:
        return mix if closed_sum is None else mix + closed_sum
    if mix is not None and len(values) == 1 and how.weights != "sigmoid":
        total = torch.lerp(mix, values[0], weights[0].unsqueeze(-1))
        return total.add_(values[0]).add_(closed_sum) if how.keeps_stream else total
    of_closed, of_source = weights_by_source(how, mix is not None, weights)
    if mix is None:
        first, *values = values
        total = of_source.pop(0) * first
    elif of_closed is None:
        first, *values = values
        total = torch.addcmul(mix, of_source.pop(0), first)
    else:
        total = of_closed * mix
    for weight, value in zip(of_source, values, strict=True):
        total.addcmul_(weight, value)
    return total if closed_sum is None else total.add_(closed_sum)


def weights_by_source(how: Merge, has_mix: bool, weights: torch.Tensor):
    """By what the mix of the closed sources is multiplied, and each local source: `[tokens, heads, 1]`."""
    has_closed = has_mix and how.weights != "sigmoid"
    of_closed = weights[0].unsqueeze(-1) if has_closed else None
    of_local = weights[1:] if has_closed else weights
    of_local = of_local + 1 if how.keeps_stream else of_local
    return of_closed, list(of_local.unsqueeze(-1).unbind(0))


def merge_backward(how: Merge, grad, mix, weights, values, needs_mix: bool, needs_values: Sequence[bool]):
    """Gradients of mix, state, scores and values of `merged`, from that of what it gives, `[tokens, heads, width]`."""
    if not values:
        return grad, None, [], []
    if how.weights != "sigmoid" and mix is not None and len(values) == 1:
        weight = weights[0].unsqueeze(-1)
        grad_score = torch.ops.aten.sigmoid_backward(dot(values[0] - mix, grad), weight)
        grad_value = weight * grad
        grad_mix = grad - grad_value if needs_mix else None
        grad_value = grad_value.add_(grad) if how.keeps_stream else grad_value
        grad_score = grad_score.squeeze(-1)
        return grad_mix, -grad_score, [grad_score], [grad_value]
    has_closed = mix is not None and how.weights != "sigmoid"
    of_weights = torch.stack([dot(value, grad).squeeze(-1) for value in ([mix, *values] if has_closed else values)])
    if how.weights == "sigmoid":
        of_scores = torch.ops.aten.sigmoid_backward(of_weights, weights)
    else:
        weighted = of_weights * weights
        of_scores = torch.addcmul(weighted, weights, weighted.sum(0), value=-1)
    of_each, (closed, of_source) = list(of_scores.unbind(0)), weights_by_source(how, mix is not None, weights)
    grad_mix, grad_state = (grad if needs_mix else None), None
    if has_closed:
        grad_state = of_each.pop(0)
        grad_mix = closed * grad if needs_mix else None
    return grad_mix, grad_state, of_each, [w * grad if need else None for w, need in zip(of_source, needs_values)]


class MergeOpen(torch.autograd.Function):
    """Phase 2, and the norm behind it: the mix of all sources, or what the norm gives, `[batch, seq, hidden]`.

    What the norm is made of is saved, and the norm is not asked again: before backward runs, it may have been given
    other parameters, by `functional_call`, FSDP, a merged adapter or an optimizer.

    Args:
        query: of the site, `[hidden]`, if the last source is scored here.
        closed_sum: of the closed sources, `[tokens, heads, width]`, if the stream is kept.
        tensors: scores of the other local sources, all local sources, and the tensors of the norm.
    """

    @staticmethod
    def forward(ctx, how: Merge, mix, state, query, closed_sum, *tensors):
        num_local, num_scores = how.num_local, how.num_local - (query is not None)
        scores, sources = list(tensors[:num_scores]), tensors[num_scores : num_scores + num_local]
        of_norm = tensors[num_scores + num_local :]
        num_heads = (scores[0] if mix is None else mix).shape[1]
        values = [by_head(source, num_heads) for source in sources]
        score = l2_norm = rms = None
        if query is not None:
            score, l2_norm = score_of(query, values[-1], how.key_eps_norm)
            scores.append(score)
        weights = weights_of_all(how, mix is not None, state, scores)
        total = mixed(how, mix, weights, values, closed_sum)
        ctx.how, ctx.num_heads, ctx.has_mix = how, num_heads, mix is not None
        if how.eps_norm is not None:
            result, rms = rms_normed(total.flatten(1), of_norm[0], how)
        else:
            result = multiplied(total.flatten(1), how)
            if how.norm is not None:
                device_type = result.device.type
                ctx.is_autocast = torch.is_autocast_enabled(device_type)
                ctx.autocast_dtype = torch.get_autocast_dtype(device_type)
                ctx.norm, ctx.tensor_names = norm_with(how.norm, {}), list(norm_tensors(how.norm))
                result = norm_of(how.norm, result.view(how.shape))
        kept_mix = mix if how.closed is None else None
        ctx.save_for_backward(kept_mix, weights, rms, query, score, l2_norm, closed_sum, *sources, *of_norm)
        return result.view(how.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        how, num_local, needed = ctx.how, ctx.how.num_local, ctx.needs_input_grad
        mix, weights, rms, query, score, l2_norm, closed_sum, *tensors = ctx.saved_tensors
        sources, of_norm = tensors[:num_local], tensors[num_local:]
        if how.closed is not None:
            node, place = how.closed
            mix = ReadClosed.mix_again(node, place)
        values = [by_head(source, ctx.num_heads) for source in sources]
        total = mixed(how, mix, weights, values, closed_sum).reshape(-1, how.shape[-1])
        if rms is not None:
            grad, *grads_of_norm = rms_norm_backward(grad, total, of_norm[0], rms, needed[-1])
        elif how.norm is not None:
            grad, *grads_of_norm = _norm_backward(ctx, grad, multiplied(total, how), of_norm)
        else:
            grads_of_norm = []
        grad = grad.to(total.dtype).reshape(-1, ctx.num_heads, how.shape[-1] // ctx.num_heads)
        grad = grad if how.factor == 1 or rms is not None else grad * how.factor
        needs_values = needed[len(needed) - len(of_norm) - num_local : len(needed) - len(of_norm)]
        grad_mix, grad_state, of_scores, of_values = merge_backward(
            how, grad, mix, weights, values, ctx.has_mix and needed[1], needs_values
        )
        grad_query = None
        if query is not None:
            arguments = query, values[-1], score, l2_norm, of_scores.pop(), of_values[-1]
            grad_query = score_backward(*arguments, needs_query=needed[3])
        grads_of_sources = [
            None if of_value is None else of_value.reshape(source.shape).to(source.dtype)
            for of_value, source in zip(of_values, sources)
        ]
        grad_sum = grad if needed[4] else None
        return None, grad_mix, grad_state, grad_query, grad_sum, *of_scores, *grads_of_sources, *grads_of_norm


def score_of(query: torch.Tensor, values: torch.Tensor, eps_norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The score of one source for one query, `[tokens, heads]`, and the L2 norm of its keys, `[tokens, 1]`."""
    l2_norm = key_l2_norm(values.flatten(1), eps_norm)
    return product_of(query, values) / l2_norm, l2_norm


def product_of(query: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # which cannot fuse a product of matrices with what is around it
        return (values * query.view(values.shape[1:])).sum(-1)
    with exactly(values):
        return torch.bmm(values.transpose(0, 1), query.view(*values.shape[1:], 1)).squeeze(-1).T


def score_backward(query, values, score, l2_norm, grad, grad_values, needs_query: bool) -> torch.Tensor | None:
    """The gradient of the query; that of the source is added to `grad_values`, if there is one. See `Scores`."""
    to_query = grad / l2_norm
    if grad_values is not None:
        grad_values.addcmul_(to_query.unsqueeze(-1), query.view(values.shape[1:]))
        through_norm = (to_query * score).sum(-1, keepdim=True) / l2_norm
        grad_values.addcmul_(through_norm.unsqueeze(-1), values, value=-1)
    if not needs_query:
        return None
    with exactly(values):
        return torch.bmm(to_query.T.unsqueeze(1), values.transpose(0, 1)).view(query.shape)


def multiplied(total: torch.Tensor, how: Merge) -> torch.Tensor:
    return (total if how.factor == 1 else total * how.factor).to(how.dtype)


# Llama's norm behind a read, in five operations where the module has eight


def rms_normed(total: torch.Tensor, weight: torch.Tensor, how: Merge) -> tuple[torch.Tensor, torch.Tensor]:
    """`[tokens, hidden]` normed, and its rms, `[tokens, 1]`."""
    rms = key_l2_norm(total, how.eps_norm) * total.shape[-1] ** -0.5
    return (total / rms).to(how.dtype).mul_(weight), rms


def rms_norm_backward(grad, total, weight, rms, needs_weight: bool):
    """Gradients of `total` and `weight`, from that of what is normed."""
    grad = grad.reshape(total.shape).to(total.dtype)
    normed, wide_weight = total / rms, weight.to(total.dtype)
    product = grad * normed
    mean = torch.mv(product, wide_weight).unsqueeze(-1).div_(total.shape[-1])
    grad_total = torch.addcmul(grad * wide_weight, normed, mean, value=-1).div_(rms)
    return grad_total, product.sum(0).to(weight.dtype) if needs_weight else None


def _norm_backward(ctx, grad, read, of_norm):
    """Gradients of what is read and of the norm's tensors, where the norm is another one."""
    needed = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(of_norm) :]
    of_norm = [tensor.detach().requires_grad_(need) for tensor, need in zip(of_norm, needed)]
    norm = norm_with(ctx.norm, dict(zip(ctx.tensor_names, of_norm)))
    autocast = maybe_autocast(grad.device.type, dtype=ctx.autocast_dtype, enabled=ctx.is_autocast)
    with torch.enable_grad(), autocast:
        read = read.view(ctx.how.shape).detach().requires_grad_()
        normed = norm_of(norm, read)
    inputs = (read, *(tensor for tensor in of_norm if tensor.requires_grad))
    of_read, *grads = torch.autograd.grad(normed, inputs, grad, allow_unused=True)
    return of_read, *(grads.pop(0) if need else None for need in needed)
