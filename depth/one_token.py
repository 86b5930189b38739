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
from .reads import ReadConfig


def l2_norm(vector: torch.Tensor, eps_norm: float) -> float:
    """`key_l2_norm` of a vector, `[hidden]`, as a number."""
    return math.sqrt(torch.dot(vector, vector).item() + eps_norm * eps_norm) or sys.float_info.min


def sigmoid(score: float) -> float:
    """By the exponential that cannot overflow."""
    return 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))


def reads_by_numbers(read_config: ReadConfig, num_blocks: int) -> bool:
    """Whether a single token is read so: by learned queries, with one source of the open block, and not by many heads.

    Loops over the scores of all heads and blocks take longer than operations on tensors where there are hundreds of
    them, or more than 16 heads (`python -m studies.costs.one_token`).
    """
    is_of_a_kind = read_config.query == "learned" and read_config.open_block == "sum"
    return is_of_a_kind and (read_config.num_heads == 1 or read_config.num_heads * max(num_blocks, 16) <= 256)


class OneTokenCache:
    """The part of a `BlockCache` that reads one token by learned queries, if the open block is one source.

    Args:
        values: where closed blocks are kept, `[blocks, hidden]`, as wide as sums.
        queries: folded queries of all sites times `sqrt(hidden)`, `[sites, hidden]`.
        like: of the shape and dtype of every source, `[1, 1, hidden]`.
        block_size: sublayers per block.
        eps: epsilon of the key RMSNorm.
        read_config: how sources are read.
        closed_sum: where the sum of the closed blocks is kept, with `hidden` numbers, if the stream is kept.
    """

    def __init__(
        self,
        values: torch.Tensor,
        queries: torch.Tensor,
        like: torch.Tensor,
        block_size: int,
        eps: float,
        read_config: ReadConfig,
        closed_sum: torch.Tensor | None = None,
    ):
        num_sites, hidden_size = queries.shape
        num_heads = read_config.num_heads
        width = hidden_size // num_heads
        self.shape, self.dtype, self.block_size = like.shape, like.dtype, block_size
        self.num_heads, self.weights = num_heads, read_config.weights
        # One head has the shape of the result, as even a view takes time
        self.by_head = self.shape if num_heads == 1 else torch.Size([num_heads, width])
        self.values, self.wide = values, values.dtype
        self.site_queries = (queries if num_heads == 1 else queries.view(-1, num_heads, width, 1)).unbind(0)
        self.zero, self.products = queries.new_zeros(hidden_size), queries.new_empty(num_heads, 1, 1)
        self.eps_norm = (hidden_size * eps) ** 0.5
        self.closed_sum = None if closed_sum is None else closed_sum.view(self.by_head)
        mixes = values.new_empty(num_heads, min(block_size, num_sites), width)
        self.site_mixes = [mix.view(self.by_head) for mix in mixes.unbind(1)]
        # Every part that is ever asked for: where to write a block when it closes, and what to read while it is open.
        # With an output that is given, autocast does not make products of less precision
        self.append_views, self.read_views = [], []
        values_by_head, queries_by_head = (
            tensor.view(-1, num_heads, width).transpose(0, 1) for tensor in (values, queries)
        )
        for block, first in enumerate(range(0, num_sites, block_size)):
            end = min(first + block_size, num_sites)
            products = queries.new_empty(num_heads, num_sites - first, 1)
            self.append_views.append((values[block], queries_by_head[:, first:], products))
            sites = range(first - num_sites, end - num_sites)
            self.read_views.append((values_by_head[:, : block + 1], sites, mixes[:, : end - first]))
        self.start()

    def start(self):
        self.scores: list[list[list[float]]] = []  # by block and head, of the sites that can still read it
        self.open_block: int | None = None
        self.mix, self.negative_lse = (), []

    def append(self, block: torch.Tensor):
        vector = block.to(self.wide).view(-1)
        values, queries, products = self.append_views[len(self.scores)]
        values.copy_(vector)
        if self.closed_sum is not None:
            value = vector.view(self.by_head)
            self.closed_sum.add_(value) if self.scores else self.closed_sum.copy_(value)
        torch.bmm(queries, vector.view(self.num_heads, -1, 1), out=products)
        norm = l2_norm(vector, self.eps_norm)
        self.scores.append([[product / norm for product in of_head] for of_head in products.squeeze(-1).tolist()])

    def read(self, site: int, partial: torch.Tensor | None, norm: nn.Module | None, factor: float) -> torch.Tensor:
        block, offset = divmod(site, self.block_size)
        if self.open_block != block:
            self._read_closed(block)
        mix = self.mix[offset]
        if partial is not None:
            wide_partial = partial if self.dtype == self.wide else partial.to(self.wide)
            value = wide_partial if self.num_heads == 1 else wide_partial.view(self.by_head)
            weight = self._weight_of_open(site, offset, wide_partial.view(-1))
            if self.weights != "sigmoid":
                mix = torch.lerp(mix, value, weight)
            elif self.num_heads == 1:
                mix = torch.add(mix, value, alpha=weight)
            else:
                mix = torch.addcmul(mix, value, weight)
            mix = mix if self.closed_sum is None else mix.add_(value).add_(self.closed_sum)
        elif self.closed_sum is not None:
            mix = mix + self.closed_sum
        mix = mix if self.num_heads == 1 else mix.reshape(self.shape)
        # out of the buffer, which the next block overwrites
        return self.normed(mix, norm, factor, copy=partial is None)

    def _weight_of_open(self, site: int, offset: int, vector: torch.Tensor) -> float | torch.Tensor:
        """Of the partial sum, `[hidden]`: a number, or `[heads, 1]`."""
        query, negative_lse = self.site_queries[site], self.negative_lse[offset]
        norm_of_keys = l2_norm(vector, self.eps_norm)
        if self.num_heads == 1:
            return sigmoid(torch.dot(vector, query).item() / norm_of_keys + negative_lse[0])
        torch.bmm(vector.view(self.num_heads, 1, -1), query, out=self.products)
        scores = zip(self.products.view(-1).tolist(), negative_lse)
        return vector.new_tensor([[sigmoid(product / norm_of_keys + minus)] for product, minus in scores])

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
        self.open_block = block
        if len(self.scores) == 1 and self.weights == "softmax":  # over one source: it is 1
            (scores,) = self.scores
            self.mix = [self.values[0].view(self.by_head)] * len(sites)
            self.negative_lse = [[-of_head[site] for of_head in scores] for site in sites]
            return
        weights, negative_lse = [], []
        for of_head in zip(*self.scores):
            found = [self._weights_of_closed([of_block[site] for of_block in of_head]) for site in sites]
            weights.append([of_site for of_site, _ in found])
            negative_lse.append([minus for _, minus in found])
        torch.bmm(torch.tensor(weights, dtype=out.dtype), values, out=out)
        self.mix, self.negative_lse = self.site_mixes, list(zip(*negative_lse))

    def _weights_of_closed(self, scores: list[float]) -> tuple[list[float], float]:
        """Of the closed blocks alone, and minus the logarithm of what they are divided by: 0 if it is nothing."""
        if self.weights == "sigmoid":
            return [sigmoid(score) for score in scores], 0.0
        with_one = self.weights == "softmax1"
        largest = max(*scores, 0.0) if with_one else max(scores)
        exponentials = [math.exp(score - largest) for score in scores]
        total = sum(exponentials) + (math.exp(-largest) if with_one else 0)
        return [exponential / total for exponential in exponentials], -largest - math.log(total)
