# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Reads of learned queries in two phases: the closed sources of a run of sites once, and then site by site the others.

A run of sites, a *chunk*, begins where the first of them is read. With the sources `v_1 ... v_n` that are closed by
then and the queries `q_c` of the chunk's sites, phase 1 computes for all of them at once

    s_nc = q_c . v_n / rms(v_n)        lse_c = log sum_n e^{s_nc}        m_c = sum_n e^{s_nc - lse_c} v_n

and phase 2, at each site, merges what has been written since (arXiv 2603.15031, section 4):

    (a_0, a_1, ...) = softmax(lse_c, q_c . v_1 / rms(v_1), ...)          h = a_0 m_c + a_1 v_1 + ...

With heads each has its slice of the hidden dimension, and the RMS is that of all. `softmax1` has one score of zero
more in `lse`; a sigmoid has no `lse`, and `a_0` is 1. Where the stream is kept, phase 2 adds the sum of the closed
sources, which is the same at all sites of the chunk, and the weights of the others are greater by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .autograd import (
    Merge,
    MergeOpen,
    ReadClosed,
    Scores,
    by_head,
    by_site,
    closed_scores,
    key_l2_norm,
    merged,
    multiplied,
    read_closed,
    rms_normed,
    score_of,
    scores_of,
    side_by_side,
    wide_dtype,
)
from .kernel_phases import MergeByKernels, ReadClosedByKernels
from .norms import norm_of, norm_tensors, rms_norm_parameters
from .reads import ReadConfig


# Longer chunks of Full AttnRes take no less time, between 8 and 16 sites, and more memory
MOST_SITES = 8


def end_of_chunk(site: int, block_size: int, num_sites: int) -> int:
    """Where the chunk of a site ends: with its block, or with the last of some short ones.

    Per site, phase 1 costs as much as `sources / sites`, and phase 2 as much as there are local sources, half as many
    as sites. The sum is smallest near the square root of twice the sources.
    """
    num_sources = 1 + (num_sites - 1) // block_size
    blocks = max(1, min(MOST_SITES, math.isqrt(2 * num_sources)) // block_size)
    return min((site // block_size + blocks) * block_size, num_sites)


def in_plain_operations() -> bool:
    """Whether autograd is to see every operation: where there is none, or a compiler that fuses them by itself."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


@dataclass
class LocalScores:
    """The scores of a local source for all sites of a chunk."""

    source: torch.Tensor
    by_site: Sequence[torch.Tensor]
    with_grad: bool


class Reader:
    """Phase 2, for sources of one kind.

    Args:
        like: has the shape, dtype and device of every source, `[batch, seq, hidden]`.
        eps: epsilon of the key RMSNorm.
        read_config: how they are read.
        kernels: a module of kernels to run in place of torch's operations.
    """

    def __init__(self, like: torch.Tensor, eps: float, read_config: ReadConfig, kernels: Any = None):
        self.like, self.eps, self.kernels = like, eps, kernels
        self.num_heads, self.weights = read_config.num_heads, read_config.weights
        self.keeps_stream = read_config.keeps_stream
        self.eps_norms: dict[float, torch.Tensor] = {}

    def eps_norm_of(self, eps: float) -> torch.Tensor:
        """What `key_l2_norm` takes for an epsilon."""
        if eps not in self.eps_norms:
            eps_norm = (self.like.shape[-1] * eps) ** 0.5
            self.eps_norms[eps] = self.like.new_full((), eps_norm, dtype=wide_dtype(self.like.dtype))
        return self.eps_norms[eps]

    def merge(
        self,
        scores: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        norm: nn.Module | None,
        factor: float,
        mix: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        closed: tuple[Any, int] | None = None,
        closed_sum: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        key_eps_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mix of all sources, `[batch, seq, hidden]`, times a factor, and the norm behind it.

        Args:
            scores: of the sources that are not closed, each `[tokens, heads]`; with a query of the last one there is
                none.
            sources: these, each `[batch, seq, hidden]`.
            mix, state: of the sources that are closed, if there are some; `closed`: what they are computed from again;
                `closed_sum`: of these sources, if the stream is kept.
        """
        shape, dtype = self.like.shape, self.like.dtype
        how = Merge(len(sources), self.weights, shape, dtype, factor, self.keeps_stream, closed, key_eps_norm)
        parameters = rms_norm_parameters(norm, dtype)
        if in_plain_operations():
            values = [by_head(source, self.num_heads) for source in sources]
            if query is not None:
                scores = [*scores, score_of(query, values[-1], key_eps_norm)[0]]
            total = merged(how, mix, state, scores, values, closed_sum).flatten(1)
            if parameters is not None and not torch.compiler.is_compiling():
                weight, eps = parameters
                how.eps_norm = self.eps_norm_of(eps / factor**2)
                return rms_normed(total, weight, how)[0].view(shape)
            total = multiplied(total, how).view(shape)
            return total if norm is None else norm_of(norm, total)
        if mix is not None and not sources and norm is None and factor == 1 and not self.keeps_stream:
            return mix.reshape(shape).to(dtype)
        if norm is not None and norm._modules:
            # What is in submodules, such as those of `torch.nn.utils.parametrize`, is not among the norm's tensors
            return norm_of(norm, MergeOpen.apply(how, mix, state, query, closed_sum, *scores, *sources))
        of_norm: Sequence[torch.Tensor] = ()
        if parameters is not None:
            weight, eps = parameters
            how.eps_norm, of_norm = self.eps_norm_of(eps / factor**2), (weight,)
        elif norm is not None:
            how.norm, of_norm = norm, tuple(norm_tensors(norm).values())
        return MergeOpen.apply(how, mix, state, query, closed_sum, *scores, *sources, *of_norm)

    def merge_by_kernels(
        self,
        query: torch.Tensor,
        sources: Sequence[torch.Tensor],
        norm: nn.Module | None,
        factor: float,
        mix: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        closed: tuple[Any, int] | None = None,
        closed_sum: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `merge`, of the query of the site, `[hidden]`, or of those of its tokens, `[batch, seq, hidden]`."""
        if self.keeps_stream:  # which the kernels do not know of
            mixed = self._merged_by_kernels(query, sources, None, 1, mix, state, closed, wide_dtype(self.like.dtype))
            closed_sums = [] if closed_sum is None else [closed_sum.view(self.like.shape)]
            read = (sum([*closed_sums, *sources], mixed) * factor).to(self.like.dtype)
            return read if norm is None else norm_of(norm, read)
        return self._merged_by_kernels(query, sources, norm, factor, mix, state, closed, self.like.dtype)

    def _merged_by_kernels(self, query, sources, norm, factor, mix, state, closed, dtype: torch.dtype) -> torch.Tensor:
        parameters = rms_norm_parameters(norm, self.like.dtype)
        options = {
            "eps": self.eps,
            "factor": factor,
            "num_heads": self.num_heads,
            "weights": self.weights,
        }
        if torch.is_grad_enabled():
            weight, norm_eps = parameters or (None, None)
            of_result = dtype, norm_eps
            read = MergeByKernels.apply(self.kernels, options, of_result, closed, query, mix, state, weight, *sources)
        else:
            read = self.kernels.merge(query, mix, state, sources, dtype, norm=parameters, **options)
        return read if norm is None or parameters is not None else norm_of(norm, read)


class Chunk(Reader):
    """The sites that share phase 1 in one forward pass, and what has been computed for them.

    Args:
        sites: the first one, and the one after the last.
        queries: folded queries of these, `[sites, hidden]`.
        blocks: the closed sources, each `[batch, seq, hidden]`.
        eps: epsilon of the key RMSNorm.
        read_config: how they are read.
        before: the chunk before this one in the same stream, whose sources are the first of these.
        kernels: a module of kernels to run in place of torch's operations.
    """

    values: torch.Tensor  # the closed sources side by side
    l2_norms: torch.Tensor  # those of their keys, `[tokens, sources]`
    mixes: Sequence[torch.Tensor]
    states: Sequence[torch.Tensor | None]
    closed_sum: torch.Tensor | None = None  # of the closed sources, `[tokens, heads, width]`, if the stream is kept

    def __init__(
        self,
        sites: tuple[int, int],
        queries: torch.Tensor,
        blocks: Sequence[torch.Tensor],
        eps: float,
        read_config: ReadConfig,
        before: "Chunk | None" = None,
        kernels: Any = None,
    ):
        super().__init__(blocks[0], eps, read_config, kernels)
        self.first, self.end = sites
        self.num_closed, self.with_grad = len(blocks), torch.is_grad_enabled()
        self.node = None
        if before is not None and before.with_grad != self.with_grad:
            before = None
        if self.keeps_stream:
            self._add_closed(blocks, before)
        if kernels is not None:
            self.rows = queries.unbind(0)
            self._read_closed_by_kernels(queries, blocks)
            return
        self.queries = queries.to(wide_dtype(self.like.dtype)) * self.like.shape[-1] ** 0.5
        self.rows = self.queries.unbind(0)
        self.local: list[LocalScores] = []  # of sources that later sites of the chunk read as well
        if before is not None:
            self.eps_norms = before.eps_norms
        self.eps_norm = self.eps_norm_of(eps)
        self._put_side_by_side(blocks, before)
        if in_plain_operations():
            scores = closed_scores(self.queries, self.values, self.l2_norms)
            mixes, states = by_site(*read_closed(self.values, scores, self.weights))
        else:
            found = ReadClosed.apply(self.queries, self.values, self.l2_norms, self.weights, *blocks)
            mixes, states = found[: len(queries)], found[len(queries) :]
            self.node = mixes[0].grad_fn
        self.mixes, self.states = mixes, states or (None,) * len(queries)

    def _read_closed_by_kernels(self, queries: torch.Tensor, blocks: Sequence[torch.Tensor]):
        arguments = self.eps, self.num_heads, self.weights
        if self.with_grad:
            found = ReadClosedByKernels.apply(self.kernels, *arguments, queries, *blocks)
            self.mixes, states = found[: len(queries)], found[len(queries) :]
            self.node = self.mixes[0].grad_fn
        else:
            self.mixes, states, _, _ = self.kernels.read_closed(queries, blocks, *arguments)
        self.states = (None,) * len(queries) if states is None or not len(states) else states

    def _add_closed(self, blocks: Sequence[torch.Tensor], before: "Chunk | None"):
        self.closed_sum = None if before is None else before.closed_sum
        for block in blocks[0 if before is None else before.num_closed :]:
            value = by_head(block, self.num_heads)
            self.closed_sum = value if self.closed_sum is None else self.closed_sum + value

    def _put_side_by_side(self, blocks: Sequence[torch.Tensor], before: "Chunk | None"):
        if before is not None and before.num_closed == len(blocks):
            self.values, self.l2_norms = before.values, before.l2_norms
            return
        known = 0 if before is None else before.num_closed
        self.values = side_by_side(blocks[known:], self.num_heads, None if before is None else before.values)
        if torch.compiler.is_compiling():
            self.l2_norms = l2_norms_of(self.values, self.eps_norm)
            return
        with torch.no_grad():  # `ReadClosed` knows their derivatives
            new = l2_norms_of(self.values[:, :, known:], self.eps_norm)
            self.l2_norms = new if before is None else torch.cat([before.l2_norms, new], dim=1)

    def has(self, site: int, num_closed: int) -> bool:
        """Whether a site, before which so many sources are closed, is one of these."""
        is_one = self.first <= site < self.end and num_closed >= self.num_closed
        return is_one and (self.with_grad or not torch.is_grad_enabled())

    def read(
        self, site: int, local: Sequence[torch.Tensor], num_lasting: int, norm: nn.Module | None, factor: float
    ) -> torch.Tensor:
        """Phase 2: the mix of a site, `[batch, seq, hidden]`, times a factor, and the norm behind it.

        Args:
            local: the sources since the chunk began, each `[batch, seq, hidden]`.
            num_lasting: the number of those that later sites of the chunk may read as well: all, or all but the last.
        """
        place = site - self.first
        closed = None if self.node is None else (self.node, place)
        of_closed = self.mixes[place], self.states[place], closed, self.closed_sum
        if self.kernels is not None:
            return self.merge_by_kernels(self.rows[place], local, norm, factor, *of_closed)
        if local and (num_lasting < len(local) or site + 1 == self.end):
            scores = [self._scores(source)[place] for source in local[:-1]]
            return self.merge(scores, local, norm, factor, *of_closed, self.rows[place], self.eps_norm)
        return self.merge([self._scores(source)[place] for source in local], local, norm, factor, *of_closed)

    def _scores(self, source: torch.Tensor) -> Sequence[torch.Tensor]:
        for known in self.local:
            # By the tensor itself, as streams that share a chunk may have been written to in different ways since
            if known.source is source and known.with_grad >= torch.is_grad_enabled():
                return known.by_site
        if in_plain_operations():
            found = scores_of(self.queries, source, self.eps_norm, self.num_heads)[0].transpose(0, 1).unbind(-1)
        else:
            found = Scores.apply(self.queries, source, self.eps_norm, self.num_heads)
        self.local.append(LocalScores(source, found, torch.is_grad_enabled()))
        return found


def l2_norms_of(values: torch.Tensor, eps_norm: torch.Tensor) -> torch.Tensor:
    """Those of the keys of sources side by side, `[tokens, sources]`."""
    return key_l2_norm(values.permute(1, 2, 0, 3).flatten(2), eps_norm).squeeze(-1)
