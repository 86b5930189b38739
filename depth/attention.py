# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Depth attention: softmax attention over the earlier outputs of a network, per token (arXiv 2603.15031, section 3).

The sources of a read are the embedding, the sums of the closed blocks and the partial sum of the open block. With the
learned query `w` and key norm `gamma` of a site, a read returns

    h = sum_i alpha_i * v_i,    alpha = softmax_i(w . RMSNorm(v_i; gamma)) = softmax_i((w * gamma) . v_i / rms(v_i)).

Only the product `w * gamma` matters, so every function here takes that folded `query`. Scores, softmax and sums are at
least fp32. The same read is written three times:

- `depth_attention_reference` in `definition.py`: the equation, literally. What the other two are compared with.
- `source_scores` and `mix_and_norm`, for training: a block that closes is scored for all later sites at once, and the
  backward pass keeps nothing but the sources and a few numbers. `depth_attention` is one read made of the two.
- `BlockCache` in `block_cache.py`: the two-phase computation of the paper for inference. Closed blocks are normalised
  once, read once per block by all its queries together (phase 1), and merged with the partial sum at every site
  (phase 2).

On GPUs kernels replace the last two, see `backends.py`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from .autograd import HeadScores, NormOfWeightedSum, ReadAndNorm, SourceScores, WeightedSum, by_head, weighted_sum
from .backends import kernels_for, use_kernels, uses_definition
from .definition import scores_by_definition
from .kernels import module_of
from .norms import norm_of, norm_tensors, rms_norm_parameters


def num_sources(site: int, block_size: int) -> int:
    """Number of sources read at `site`: the embedding, the closed blocks and, inside a block, the partial sum."""
    return 1 + -(-site // block_size)


def source_scores(queries: torch.Tensor, source: torch.Tensor, eps: float) -> torch.Tensor:
    """Scores of a source for the reads of several sites, at least fp32.

    Args:
        queries: folded queries, `[sites, hidden]`.
        source: `[batch, seq, hidden]`.
        eps: epsilon of the key RMSNorm.

    Returns:
        `[batch, seq, sites]`.
    """
    if uses_definition():
        values = source.to(torch.promote_types(source.dtype, torch.float32))
        keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
        return torch.stack([(keys * query).sum(-1) for query in queries], dim=-1)
    # Several are better read by a matrix product
    return SourceScores.apply(queries, source, eps, kernels_for(source) if len(queries) == 1 else None)


def head_scores(queries: torch.Tensor, source: torch.Tensor, eps: float, num_heads: int) -> torch.Tensor:
    """As `source_scores`, for several heads: `[batch, seq, heads, sites]`."""
    if uses_definition():
        return torch.stack([scores_by_definition(query, source, eps, num_heads) for query in queries], dim=-1)
    return HeadScores.apply(queries, source, eps, num_heads)


def depth_weights(scores: Sequence[torch.Tensor], masked: int | None = None) -> torch.Tensor:
    """The softmax over sources, `[batch, seq, sources]`, of their scores, `[batch, seq]` each; one may be left out."""
    scores = torch.stack(scores, dim=-1)
    if masked is not None:
        scores[..., masked] = -torch.inf
    return torch.softmax(scores, dim=-1)


def mix_and_norm(weights: torch.Tensor, sources: Sequence[torch.Tensor], norm: nn.Module | None) -> torch.Tensor:
    """What a read gives to its sublayer.

    Args:
        weights: `[batch, seq, sources]`, at least fp32, or of several heads `[batch, seq, heads, sources]`, each of
            which has its slice of the hidden dimension.
        sources: the values, each `[batch, seq, hidden]`.
        norm: the norm in front of the sublayer, if it is to be applied.

    Returns:
        `[batch, seq, hidden]`. With a norm the backward pass has no more to keep than weights and sources.
    """
    if uses_definition():
        is_multi_head = weights.ndim > sources[0].ndim
        values = torch.stack(by_head(sources, weights.shape[-2]) if is_multi_head else list(sources), dim=-2)
        mix = (weights.unsqueeze(-1) * values.to(weights.dtype)).sum(-2).to(values.dtype).view_as(sources[0])
        return mix if norm is None else norm_of(norm, mix)
    kernels = kernels_for(sources[0])
    if not torch.is_grad_enabled():
        mix = weighted_sum(weights, sources, kernels)
        return mix if norm is None else norm_of(norm, mix)
    if norm is None:
        return WeightedSum.apply(kernels, weights, *sources)
    # A compiler decides itself what it computes again. What is in submodules, such as those of
    # `torch.nn.utils.parametrize`, is not among the norm's tensors
    if torch.compiler.is_compiling() or norm._modules:
        return norm_of(norm, WeightedSum.apply(kernels, weights, *sources))
    return NormOfWeightedSum.apply(norm, kernels, weights, *sources, *norm_tensors(norm).values())


def has_kernel(norm: nn.Module | None, partial: torch.Tensor) -> bool:
    """Whether `read_and_norm` can do this norm behind a read."""
    return use_kernels(partial) and rms_norm_parameters(norm, partial.dtype) is not None


def read_and_norm(
    query: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scores: Sequence[torch.Tensor],
    eps: float,
    norm: nn.Module,
    factor: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A read within a block and the norm behind it, where there is a kernel for it.

    Args:
        query: folded query of the site, `[hidden]`.
        sources: the closed blocks and the partial sum, each `[batch, seq, hidden]`.
        scores: of the closed blocks, each `[batch, seq]`.
        eps: epsilon of the key RMSNorm.
        norm: in front of the sublayer.
        factor: what the mix is multiplied by, here as an epsilon divided by its square.

    Returns:
        The normed mix, `[batch, seq, hidden]`, and the weights, `[batch, seq, sources]`.
    """
    weight, norm_eps = rms_norm_parameters(norm, sources[-1].dtype)  # type: ignore[misc]
    kernels = module_of("triton")
    return ReadAndNorm.apply(query, torch.stack(scores, dim=-1), weight, norm_eps / factor**2, eps, kernels, *sources)


def depth_attention(query: torch.Tensor, sources: list[torch.Tensor], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The read of `depth_attention_reference`, same arguments and results, with a backward pass that saves little."""
    scores = torch.cat([source_scores(query[None], source, eps) for source in sources], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return mix_and_norm(weights, sources, norm=None), weights
