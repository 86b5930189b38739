# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The block cache: reads in two phases for inference (arXiv 2603.15031, section 4), with buffers that are reused."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .autograd import (
    Merge,
    by_head,
    dot,
    key_l2_norm,
    merged,
    multiplied,
    read_closed,
    rms_normed,
    score_of,
    weights_of_closed,
)
from .backends import kernels_for, use_kernels
from .norms import norm_of, rms_norm_parameters
from .one_token import OneTokenCache, reads_by_numbers
from .reads import PAPERS_READ, ReadConfig
from .two_phases import Reader, end_of_chunk


# A generation is known by its KV cache, and its buffers are freed with it
_BLOCK_CACHES: weakref.WeakKeyDictionary[Any, "BlockCache"] = weakref.WeakKeyDictionary()


class BlockCache:
    """The closed blocks of one forward pass, kept for reads in two phases, as a KV cache keeps keys and values.

    Blocks are only ever appended: a block is copied when it closes, together with its scores for all later sites, and
    is never normalised again. (Kernels compute scores from the blocks that they load, so for them only the block is
    kept.) The sites of a chunk, which is one block or several short ones, share phase 1. Depth attention is per token,
    so only the buffers outlive a forward pass, and the next one of the same shape reuses them. The cache is for
    inference only, because the buffers are written in place.

    Queries that see the input are only known after the sublayers before them have run. They read all closed blocks at
    every site, with the norms of the keys that were kept.
    """

    # Made by `start`. Every head of a token has a row
    values: torch.Tensor  # `[rows, blocks, width]`
    scores: torch.Tensor  # `[rows, blocks, sites]`
    mixes: torch.Tensor  # `[rows, sites of a chunk, width]`
    l2_norms: torch.Tensor  # `[rows, blocks]`
    closed_sum: torch.Tensor | None  # of the first `num_summed` blocks, `[rows, width]`, if the stream is kept
    queries: torch.Tensor  # `[sites, hidden]`, times `sqrt(hidden)`
    one_token: OneTokenCache | None
    kernels: Any
    site_queries: Sequence[torch.Tensor]
    # By site of the chunk, of phase 1
    mix: Sequence[torch.Tensor]
    state: Sequence[torch.Tensor | None]

    def __init__(self):
        self.layout: tuple | None = None
        self.num_passes = 0
        self.num_closed = self.num_summed = 0
        # The sites of the chunk that is read, and the number of blocks that were closed when it began
        self.chunk, self.num_read = (0, 0), 0

    @classmethod
    def beside(cls, kv_cache) -> "BlockCache":
        """The block cache that belongs to a KV cache: the same one in all forward passes of a generation."""
        if kv_cache not in _BLOCK_CACHES:
            _BLOCK_CACHES[kv_cache] = cls()
        return _BLOCK_CACHES[kv_cache]

    def start(
        self,
        queries: torch.Tensor,
        like: torch.Tensor,
        block_size: int,
        eps: float,
        read_config: ReadConfig = PAPERS_READ,
    ):
        """Empty the cache for a forward pass.

        Args:
            queries: folded queries of all sites, `[sites, hidden]`.
            like: a tensor with the shape, dtype and device of every source, `[batch, seq, hidden]`.
            block_size: sublayers per block.
            eps: epsilon of the key RMSNorm.
            read_config: how sources are read.
        """
        layout = (like.shape, like.dtype, like.device, len(queries), block_size, eps, read_config, use_kernels(like))
        # a buffer made under inference mode cannot be written outside of it
        if layout != self.layout or self.values.is_inference() != torch.is_inference_mode_enabled():
            self.layout, self.shape, self.dtype = layout, like.shape, like.dtype
            self.block_size, self.eps, self.read_config = block_size, eps, read_config
            self._allocate(like, len(queries))
        torch.mul(queries, 1.0 if self.kernels is not None else self.shape[-1] ** 0.5, out=self.queries)
        self.num_passes += 1
        self.num_closed, self.num_summed, self.chunk = 0, 0, (0, 0)
        if self.one_token is not None:
            self.one_token.start()

    def _allocate(self, like: torch.Tensor, num_sites: int):
        hidden_size, num_blocks = self.shape[-1], 1 + (num_sites - 1) // self.block_size
        num_tokens, num_heads = like[..., 0].numel(), self.read_config.num_heads
        wide = torch.promote_types(like.dtype, torch.float32)
        self.queries = like.new_empty(num_sites, hidden_size, dtype=wide)
        self.site_queries, self.one_token, self.kernels = self.queries.unbind(0), None, kernels_for(like)
        without_memory = like.new_empty(()).expand(self.shape)  # not `like`, which is to be freed
        self.reader = Reader(without_memory, self.eps, self.read_config, self.kernels)
        self.eps_norm, self.closed_sum = self.reader.eps_norm_of(self.eps), None
        num_rows = num_tokens * num_heads
        if self.read_config.keeps_stream:
            self.closed_sum = like.new_empty(num_rows, hidden_size // num_heads, dtype=wide)
        if self.kernels is not None:  # which convert as they load, and take a source in one piece
            self.values = like.new_empty(num_blocks, num_tokens, hidden_size)
            self.blocks = [block.view(self.shape) for block in self.values]
            return
        by_numbers = reads_by_numbers(self.read_config, num_blocks)
        if by_numbers and num_tokens == 1 and like.device.type == "cpu" and not is_tracing(like):
            self.values = like.new_empty(num_blocks, hidden_size, dtype=wide)
            of_cache = self.block_size, self.eps, self.read_config, self.closed_sum
            self.one_token = OneTokenCache(self.values, self.queries, like, *of_cache)
            self.blocks = [block.view(self.shape) for block in self.values]
            return
        most_sites = end_of_chunk(0, self.block_size, num_sites)
        # As wide as the sums over them, or every read would convert all of them once more
        self.values = like.new_empty(num_rows, num_blocks, hidden_size // num_heads, dtype=wide)
        self.scores = like.new_empty(num_rows, num_blocks, num_sites, dtype=wide)
        self.l2_norms = like.new_empty(num_tokens, num_blocks, dtype=wide)
        self.mixes = like.new_empty(num_rows, most_sites, hidden_size // num_heads, dtype=wide)
        self.blocks = [self.values[:, i].view(self.shape) for i in range(num_blocks)] if num_heads == 1 else []

    def __len__(self) -> int:
        return self.num_closed

    def append(self, block: torch.Tensor) -> torch.Tensor:
        """Keep a closed block, `[batch, seq, hidden]`, and its scores for every site that can still read it.

        Returns:
            The copy of the block, valid until the next `start`, or the block itself if the copy has another form.
        """
        number, self.num_closed = self.num_closed, self.num_closed + 1
        if self.kernels is not None:
            self.values[number].copy_(block.flatten(0, -2))
        elif self.one_token is not None:
            self.one_token.append(block)
        else:
            self._append(block, number)
        return self.blocks[number] if self.blocks and self.values.dtype == self.dtype else block

    def _append(self, block: torch.Tensor, number: int):
        num_heads, values = self.read_config.num_heads, self.values[:, number]
        values.copy_(block.reshape(values.shape))
        of_tokens = values.view(-1, num_heads, values.shape[-1])
        l2_norm = key_l2_norm(of_tokens.flatten(1), self.eps_norm)
        if self.read_config.query != "learned":
            self.l2_norms[:, number : number + 1] = l2_norm
            return
        first = number * self.block_size
        queries = self.queries[first:].view(-1, num_heads, values.shape[-1])
        with maybe_autocast(device_type=block.device.type, enabled=False):
            products = torch.bmm(of_tokens.transpose(0, 1), queries.permute(1, 2, 0))
        scores = self.scores[:, number, first:].view(-1, num_heads, len(queries))
        torch.div(products.transpose(0, 1), l2_norm.unsqueeze(-1), out=scores)

    def read(
        self,
        site: int,
        open_sources: Sequence[torch.Tensor] = (),
        norm: nn.Module | None = None,
        factor: float = 1,
        query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mix at a site after the blocks in the cache, `[batch, seq, hidden]`.

        Args:
            site: number of outputs that have been written.
            open_sources: sources of the open block, each `[batch, seq, hidden]`: the partial sum, or every output.
            norm: a norm to apply to the mix.
            factor: the mix is multiplied by this.
            query: the query of every token, `[batch, seq, hidden]`, if queries see the input.
        """
        if self.one_token is not None:
            return self.one_token.read(site, open_sources[0] if open_sources else None, norm, factor)
        device_type = self.values.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                mix = self.read(site, open_sources, None, factor, query)
            return mix if norm is None else norm_of(norm, mix)
        if self.kernels is not None:
            return self._read_by_kernels(site, open_sources, norm, factor, query)
        of_read = self.read_config.weights, self.shape, self.dtype, factor, self.read_config.keeps_stream
        how = Merge(len(open_sources), *of_read)
        if query is not None:
            total = self._read_by(query, how, open_sources)
        else:
            total = self._read(site, how, open_sources)
        total = total.reshape(-1, self.shape[-1])
        parameters = rms_norm_parameters(norm, self.dtype)
        if parameters is not None:
            weight, eps = parameters
            how.eps_norm = self.reader.eps_norm_of(eps / factor**2)
            return rms_normed(total, weight, how)[0].view(self.shape)
        result = multiplied(total, how).view(self.shape)
        # Out of the buffer, which the next chunk overwrites
        result = result.clone() if result.data_ptr() == total.data_ptr() and not open_sources else result
        return result if norm is None else norm_of(norm, result)

    def _read_by_kernels(self, site: int, open_sources, norm, factor: float, query) -> torch.Tensor:
        closed = self.blocks[: self.num_closed]
        if query is not None:
            return self.reader.merge_by_kernels(query, [*closed, *open_sources], norm, factor)
        of_closed = *self._of_closed(site), None, self.closed_sum
        local = [*closed[self.num_read :], *open_sources]
        return self.reader.merge_by_kernels(self.site_queries[site], local, norm, factor, *of_closed)

    def _of_closed(self, site: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What phase 1 gives to a site, which begins a chunk if it is in none."""
        first, end = self.chunk
        if not first <= site < end or self.num_closed < self.num_read:
            first, end = self.chunk = site, end_of_chunk(site, self.block_size, len(self.queries))
            self.num_read = self.num_closed
            self._read_closed(first, end)
            self._sum_closed()
        return self.mix[site - first], self.state[site - first]

    def _sum_closed(self):
        if self.closed_sum is None:
            return
        blocks = self.blocks if self.kernels is not None else self.values.unbind(1)
        for number in range(self.num_summed, self.num_closed):
            block = blocks[number].view(self.closed_sum.shape)
            self.closed_sum.add_(block) if number else self.closed_sum.copy_(block)
        self.num_summed = self.num_closed

    def _read(self, site: int, how: Merge, open_sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mix by a learned query."""
        (mix, state), query = self._of_closed(site), self.site_queries[site]
        of_heads = -1, self.read_config.num_heads
        is_softmax = self.read_config.weights == "softmax"
        if self.num_closed == self.num_read and len(open_sources) == of_heads[1] == 1 and is_softmax:
            # As of `merged`, with two operations less and few views: most reads within a block. `merged` itself takes
            # the weight of the partial sum: with softmax1 it may be tiny, and 1 minus that of the mix has few digits
            partial = open_sources[0].to(mix.dtype).reshape(mix.shape)
            l2_norm = key_l2_norm(partial, self.eps_norm)
            weight = torch.addcdiv(state, torch.mv(partial, query).unsqueeze(-1), l2_norm, value=-1)
            total = torch.lerp(partial, mix, weight.sigmoid_())
            return total if self.closed_sum is None else total.add_(partial).add_(self.closed_sum)
        values = [by_head(source, of_heads[1]) for source in open_sources]
        scores = [score_of(query, value, self.eps_norm)[0] for value in values]
        if self.num_closed == self.num_read:
            state = None if state is None else state.view(of_heads)
            return merged(how, mix.unflatten(0, of_heads), state, scores, values, self._closed_sum_by_head())
        # Blocks that have closed since the chunk began are in one piece
        since, count = self.values[:, self.num_read : self.num_closed], self.num_closed - self.num_read
        scores = [self.scores[:, self.num_read : self.num_closed, site], *(score.reshape(-1, 1) for score in scores)]
        if state is None:
            weights = torch.cat(scores, dim=-1).sigmoid()
            weights = weights if self.closed_sum is None else weights.add_(1)
            total = torch.baddbmm(mix.unsqueeze(1), weights[:, None, :count], since).squeeze(1)
        else:
            weights = torch.cat([state, *scores], dim=-1).softmax(-1)
            of_closed, weights = weights[:, :1], weights[:, 1:] if self.closed_sum is None else weights[:, 1:] + 1
            total = torch.bmm(weights[:, None, :count], since).squeeze(1).addcmul_(of_closed, mix)
        for i, value in enumerate(values, start=count):
            total.addcmul_(weights[:, i : i + 1], value.reshape(total.shape))
        return total if self.closed_sum is None else total.add_(self.closed_sum)

    def _closed_sum_by_head(self) -> torch.Tensor | None:
        return None if self.closed_sum is None else self.closed_sum.unflatten(0, (-1, self.read_config.num_heads))

    def _read_closed(self, first: int, end: int):
        """Phase 1, for all sites of a chunk."""
        if self.kernels is not None:
            how = self.eps, self.read_config.num_heads, self.read_config.weights
            blocks, queries = self.blocks[: self.num_closed], self.queries[first:end]
            self.mix, states, _, _ = self.kernels.read_closed(queries, blocks, *how)
            self.state = [None] * (end - first) if states is None else states
            return
        values, scores = self.values[:, : self.num_closed], self.scores[:, : self.num_closed, first:end]
        scores = scores.transpose(0, 1).contiguous().unsqueeze(1)
        weights, state = weights_of_closed(scores, self.read_config.weights)
        self.state = [None] * (end - first) if state is None else state.squeeze(0).unsqueeze(-1).unbind(1)
        if self.num_closed == 1 and self.read_config.weights == "softmax":  # over one source: it is 1
            self.mix = values.squeeze(1).unsqueeze(0).expand(end - first, -1, -1)
        else:
            out = self.mixes[:, : end - first]
            self.mix = torch.bmm(weights.squeeze(1).permute(1, 2, 0), values, out=out).unbind(1)

    def _read_by(self, query: torch.Tensor, how: Merge, open_sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mix by a query of each token, `[batch, seq, hidden]`."""
        values = [by_head(source, self.read_config.num_heads) for source in open_sources]
        num_heads, (num_rows, _, width) = self.read_config.num_heads, self.values.shape
        queries = by_head(query * self.shape[-1] ** 0.5, num_heads)
        closed, l2_norms = self.values[:, : self.num_closed], self.l2_norms[:, : self.num_closed]
        products = torch.bmm(closed, queries.view(num_rows, width, 1)).view(-1, num_heads, self.num_closed)
        scores = (products / l2_norms.unsqueeze(1)).view(num_rows, self.num_closed).T[:, None, :, None]
        mix, state = read_closed(closed.unsqueeze(0), scores, self.read_config.weights)
        state = None if state is None else state.view(-1, num_heads)
        scores = [dot(queries, value).squeeze(-1) / key_l2_norm(value.flatten(1), self.eps_norm) for value in values]
        self._sum_closed()
        return merged(how, mix.view(queries.shape), state, scores, values, self._closed_sum_by_head())
