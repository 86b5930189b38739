# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The block cache of a single token on a CPU, with scores that are numbers.

Time goes into operations and calls there, and not into arithmetic: numbers need half as many operations on tensors,
and few functions.
"""

import math
import sys

import torch
from torch import nn

from .norms import norm_of, rms_norm_parameters


def l2_norm(vector: torch.Tensor, eps_norm: float) -> float:
    """`key_l2_norm` of a vector, `[hidden]`, as a number."""
    return math.sqrt(torch.dot(vector, vector).item() + eps_norm * eps_norm) or sys.float_info.min


class OneTokenCache:
    """The part of a `BlockCache` that reads one token by one head and softmax.

    Args:
        values: where closed blocks are kept, `[blocks, hidden]`, as wide as sums.
        queries: folded queries of all sites times `sqrt(hidden)`, `[sites, hidden]`.
        like: of the shape and dtype of every source, `[1, 1, hidden]`.
        block_size: sublayers per block.
        eps: epsilon of the key RMSNorm.
        closed_sum: where the sum of the closed blocks is kept, with `hidden` numbers, if the stream is kept.
    """

    def __init__(
        self,
        values: torch.Tensor,
        queries: torch.Tensor,
        like: torch.Tensor,
        block_size: int,
        eps: float,
        closed_sum: torch.Tensor | None = None,
    ):
        num_sites, hidden_size = queries.shape
        self.shape, self.dtype, self.block_size = like.shape, like.dtype, block_size
        self.values, self.wide = values, values.dtype
        self.site_queries, self.zero = queries.unbind(0), queries.new_zeros(hidden_size)
        self.eps_norm = (hidden_size * eps) ** 0.5
        self.closed_sum = None if closed_sum is None else closed_sum.view(self.shape)
        mixes = values.new_empty(min(block_size, num_sites), hidden_size)
        self.site_mixes = mixes.view(-1, *self.shape).unbind(0)
        # Every part that is ever asked for, as even a view takes time: where to write a block when it closes, and what
        # to read while it is open
        self.append_views, self.read_views = [], []
        for block, first in enumerate(range(0, num_sites, block_size)):
            end = min(first + block_size, num_sites)
            self.append_views.append((values[block], queries[first:]))
            sites = range(first - num_sites, end - num_sites)
            self.read_views.append((values[: block + 1], sites, mixes[: end - first]))
        self.start()

    def start(self):
        self.scores: list[list[float]] = []  # by block, of the sites that can still read it
        self.open_block: int | None = None
        self.mix, self.negative_lse = (), []

    def append(self, block: torch.Tensor):
        vector = block.to(self.wide).view(-1)
        values, queries = self.append_views[len(self.scores)]
        values.copy_(vector)
        if self.closed_sum is not None:
            wide_block = vector.view(self.shape)
            self.closed_sum.add_(wide_block) if self.scores else self.closed_sum.copy_(wide_block)
        norm = l2_norm(vector, self.eps_norm)
        self.scores.append([product / norm for product in torch.mv(queries, vector).tolist()])

    def read(self, site: int, partial: torch.Tensor | None, norm: nn.Module | None, factor: float) -> torch.Tensor:
        block, offset = divmod(site, self.block_size)
        if self.open_block != block:
            self._read_closed(block)
        mix = self.mix[offset]
        if partial is not None:
            wide_partial = partial if self.dtype == self.wide else partial.to(self.wide)
            vector = wide_partial.view(-1)
            norm_of_keys = l2_norm(vector, self.eps_norm)
            score = torch.dot(vector, self.site_queries[site]).item() / norm_of_keys + self.negative_lse[offset]
            # by the exponential that cannot overflow
            alpha = 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))
            mix = torch.lerp(mix, wide_partial, alpha)
            mix = mix if self.closed_sum is None else mix.add_(wide_partial).add_(self.closed_sum)
        elif self.closed_sum is not None:
            mix = mix + self.closed_sum
        # out of the buffer, which the next block overwrites
        return self.normed(mix, norm, factor, copy=partial is None)

    def normed(self, mix: torch.Tensor, norm: nn.Module | None, factor: float, copy: bool) -> torch.Tensor:
        parameters = rms_norm_parameters(norm, self.dtype)
        if parameters is None:
            mix = (mix * factor).to(self.dtype) if factor != 1 else mix.to(self.dtype, copy=copy)
            return mix if norm is None else norm_of(norm, mix)
        weight, eps = parameters
        vector = mix.view(-1)
        rms = math.sqrt(torch.dot(vector, vector).item() / vector.shape[0] + eps / factor**2)
        # One operation for a product of three; the factor has to be finite in fp32
        normed = torch.addcmul(self.zero, mix, weight, value=1 / max(rms, 1e-37))
        return normed if self.dtype == normed.dtype else normed.to(self.dtype)

    def _read_closed(self, block: int):
        values, sites, out = self.read_views[block]
        if len(self.scores) == 1:  # a softmax over one source is 1
            (scores,) = self.scores
            self.mix = [values.view(self.shape)] * len(sites)
            self.negative_lse = [-scores[site] for site in sites]
        else:
            weights, self.negative_lse = [], []
            for site in sites:
                scores = [of_block[site] for of_block in self.scores]
                largest = max(scores)
                exponentials = [math.exp(score - largest) for score in scores]
                total = sum(exponentials)
                weights.append([exponential / total for exponential in exponentials])
                self.negative_lse.append(-largest - math.log(total))
            torch.mm(torch.tensor(weights, dtype=out.dtype), values, out=out)
            self.mix = self.site_mixes
        self.open_block = block
