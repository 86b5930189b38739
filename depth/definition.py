# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Reads over depth by definition, in plain operations: what everything faster is compared with.

They also run under `attnres.set_backend("reference")`.
"""

from collections.abc import Sequence

import torch


def num_sources(site: int, block_size: int) -> int:
    """Number of sources read at `site`: the embedding, the closed blocks and, inside a block, the partial sum."""
    return 1 + -(-site // block_size)


def depth_attention_reference(
    query: torch.Tensor, sources: list[torch.Tensor], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of a read, in plain operations.

    Args:
        query: folded query `w * gamma` of the site, `[hidden]`.
        sources: the values `v_i`, each `[batch, seq, hidden]`.
        eps: epsilon of the key RMSNorm.

    Returns:
        The mix `h`, `[batch, seq, hidden]`, and the weights `alpha`, `[batch, seq, sources]`.
    """
    values = torch.stack(sources, dim=-2)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    weights = torch.softmax((keys * query).sum(-1), dim=-1)
    return (weights.unsqueeze(-1) * values).sum(-2).to(sources[0].dtype), weights


def read_by_definition(
    query: torch.Tensor,
    sources: Sequence[torch.Tensor],
    eps: float,
    num_heads: int = 1,
    weights: str = "softmax",
    keeps_stream: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of these reads, in plain operations.

    Args:
        query: folded query of the site, `[hidden]`, or that of each token, `[batch, seq, hidden]`.
        sources: the values `v_i`, each `[batch, seq, hidden]`.
        eps: epsilon of the key RMSNorm.
        num_heads: by which the hidden dimension is divided.
        weights: `softmax`, `softmax1` or `sigmoid`.
        keeps_stream: whether the sum of the sources is added to the mix.

    Returns:
        The mix, `[batch, seq, hidden]`, and the weights, `[batch, seq, heads, sources]`.
    """
    scores = [scores_by_definition(query, source, eps, num_heads) for source in sources]
    of_source = weights_by_definition(torch.stack(scores, dim=-1), weights)
    return mix_by_definition(of_source + 1 if keeps_stream else of_source, sources), of_source


def mix_by_definition(weights: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of sources, `[batch, seq, hidden]` each, by weights `[batch, seq, (heads,) sources]`."""
    is_by_head = weights.ndim > sources[0].ndim
    num_heads = weights.shape[-2] if is_by_head else 1
    values = torch.stack([source.unflatten(-1, (num_heads, -1)) for source in sources], dim=-2).to(weights.dtype)
    of_source = weights if is_by_head else weights.unsqueeze(-2)
    return (of_source.unsqueeze(-1) * values).sum(-2).flatten(-2).to(sources[0].dtype)


def weights_by_definition(scores: torch.Tensor, weights: str) -> torch.Tensor:
    """Weights of scores, `[..., sources]` both; `weights` as of `read_by_definition`."""
    # By which numerators and denominators are multiplied, so that no power of e overflows
    largest = scores.detach() if weights == "sigmoid" else scores.detach().amax(-1, keepdim=True)
    if weights != "softmax":
        largest = largest.clamp(min=0)
    powers, nothing = (scores - largest).exp(), (-largest).exp()
    if weights == "sigmoid":
        return powers / (nothing + powers)
    total = powers.sum(-1, keepdim=True)
    return powers / (nothing + total if weights == "softmax1" else total)


def scores_by_definition(query: torch.Tensor, source: torch.Tensor, eps: float, num_heads: int) -> torch.Tensor:
    """Scores of a source, `[batch, seq, heads]`; arguments as of `read_by_definition`."""
    values = source.to(torch.promote_types(source.dtype, torch.float32))
    keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (keys * query).unflatten(-1, (num_heads, -1)).sum(-1)
