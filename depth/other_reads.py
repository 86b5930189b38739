# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Streams and block cache of reads that are not the paper's own, see `reads.py`.

One class of stream has the paper's read, `DepthStream`. Here are one for all others with learned queries, and one for
queries that see the input. `start_stream` chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .autograd import TokenScores, by_head, dot, key_l2_norm
from .block_cache import BlockCache
from .definition import scores_by_definition
from .norms import norm_of
from .reads import WEIGHTS, ReadConfig
from .stream import DepthStream, register_stream
from .two_phases import Reader


@register_stream
@dataclass(eq=False)
class VariantStream(DepthStream):
    """A stream that is read by one or several heads, with one of three kinds of weights, and queries that are learned.

    Args:
        read_config: what is read, and how. Other arguments as of `DepthStream`.
        outputs: those of the open block, each `[batch, seq, hidden]`, if each is a source.
    """

    read_config: ReadConfig = ReadConfig()
    outputs: tuple[torch.Tensor, ...] = ()

    def _append(self, output: torch.Tensor, pending_dtype: torch.dtype | None) -> DepthStream:
        new: Any = super()._append(output, pending_dtype)
        if self.read_config.open_block == "each":
            new.outputs = () if new.partial is None else (*self.outputs, output)
        return new

    @property
    def open_tensors(self) -> tuple[torch.Tensor, ...]:
        # `super().open_tensors` cannot be compiled: torch.compile does not look up properties there
        return (() if self.partial is None else (self.partial,)) + self.outputs

    @property
    def open_sources(self) -> tuple[torch.Tensor, ...]:
        if self.read_config.open_block == "each":
            return self.outputs
        return () if self.partial is None else (self.partial,)

    def _read_cached(self, cache: Any, norm: nn.Module | None) -> torch.Tensor:
        return cache.read(self.site, self.open_sources, norm, self._factor())

    # As tensors

    def on_newest(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DepthStream:
        new: Any = super().on_newest(function)
        if self.outputs:
            new.outputs = (*self.outputs[:-1], function(self.outputs[-1]))
        return new

    def on_sources(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DepthStream:
        new: Any = super().on_sources(function)
        new.outputs = tuple(function(output) for output in self.outputs)
        return new

    def tree_flatten(self) -> tuple[list[torch.Tensor | None], tuple]:
        leaves, context = super().tree_flatten()
        return [*self.outputs, *leaves], (len(self.outputs), self.read_config, *context)

    @classmethod
    def tree_unflatten(cls, leaves: Sequence[torch.Tensor | None], context: tuple) -> DepthStream:
        num_outputs, read_config, *others = context
        new: Any = super().tree_unflatten(leaves[num_outputs:], tuple(others))
        new.outputs, new.read_config = tuple(leaves[:num_outputs]), read_config
        return new


@register_stream
@dataclass(eq=False)
class InputDependentStream(VariantStream):
    """A stream whose queries see its newest source.

    Args:
        projections: by site what the queries are multiplied by, `[sites, hidden]`, and what makes a query of a source:
            `W`, `[sites, hidden, hidden]`, or `A`, `[sites, rank, hidden]`, and `B`, transposed, `[sites, hidden,
            rank]`. Other arguments as of `VariantStream`; its `queries` are what is added to these.
    """

    projections: tuple[torch.Tensor, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.l2_norms: tuple[torch.Tensor, ...] = ()  # of the blocks' keys, kept from read to read

    def _query(self) -> torch.Tensor:
        """The query of every token at this site, `[batch, seq, hidden]`."""
        gamma, *projections = (of_sites[self.site] for of_sites in self.projections)
        query = self.sources[-1].to(gamma.dtype)
        with maybe_autocast(device_type=query.device.type, enabled=False):
            for projection in projections:
                query = F.linear(query, projection)
            return torch.addcmul(self.queries[self.site], query, gamma)

    def _scores(self) -> list[torch.Tensor]:
        query, num_heads = self._query(), self.read_config.num_heads
        scores = [scores_by_definition(query, source, self.eps, num_heads) for source in self.sources]
        return [of_source.squeeze(-1) for of_source in scores] if num_heads == 1 else scores

    def _read_in_two_phases(self, norm: nn.Module | None) -> torch.Tensor:
        """All sources at once: a query that sees the input is not known before the sublayers in front have run."""
        reader = Reader(self.newest, self.read_config.num_heads, self.read_config.weights)
        return reader.merge(self._token_scores(), self.sources, norm, self._factor())

    def _token_scores(self) -> list[torch.Tensor]:
        """Of every source, `[tokens, heads]`."""
        query, num_heads = self._query() * self.shape[-1] ** 0.5, self.read_config.num_heads
        if torch.compiler.is_compiling():  # autograd is to know of the norms
            l2_norms = [self._l2_norm(source) for source in self.sources]
            return [
                dot(by_head(query, num_heads), by_head(source, num_heads)).squeeze(-1) / l2_norm
                for source, l2_norm in zip(self.sources, l2_norms)
            ]
        with torch.no_grad():  # `TokenScores` knows their derivatives
            self.l2_norms = *self.l2_norms, *map(self._l2_norm, self.blocks[len(self.l2_norms) :])
            l2_norms = [*self.l2_norms, *map(self._l2_norm, self.open_sources)]
        return [TokenScores.apply(query, *of_source, num_heads) for of_source in zip(self.sources, l2_norms)]

    def _l2_norm(self, source: torch.Tensor) -> torch.Tensor:
        eps_norm = self.queries.new_full((), (self.shape[-1] * self.eps) ** 0.5)
        return key_l2_norm(by_head(source, 1).squeeze(1), eps_norm)

    def _read_cached(self, cache: Any, norm: nn.Module | None) -> torch.Tensor:
        return cache.read(self.site, self.open_sources, norm, self._factor(), self._query())

    def tree_flatten(self) -> tuple[list[torch.Tensor | None], tuple]:
        leaves, context = super().tree_flatten()
        return [*self.projections, *leaves], (len(self.projections), *context)

    @classmethod
    def tree_unflatten(cls, leaves: Sequence[torch.Tensor | None], context: tuple) -> DepthStream:
        num_projections, *others = context
        new: Any = super().tree_unflatten(leaves[num_projections:], tuple(others))
        new.projections = tuple(leaves[:num_projections])
        return new


class VariantBlockCache(BlockCache):
    """The block cache of a `VariantStream`: every head of a token has a row.

    With learned queries reads are of two phases. Queries that see the input are not known before the sublayers in
    front have run, so these read all closed blocks at every site, with the norms of their keys as they were kept.
    """

    key_l2_norms: list[torch.Tensor]

    def start(
        self,
        queries: torch.Tensor,
        like: torch.Tensor,
        block_size: int,
        eps: float,
        read_config: ReadConfig | None = None,
    ):
        """As of `BlockCache`, for streams that are read in some way."""
        super().start(queries, like, block_size, eps, read_config or ReadConfig())
        if self.is_one_token and self.num_heads > 1:
            self.slices.copy_(self.queries.view(len(queries), self.num_heads, -1).mT)
        self.key_l2_norms = []

    def _allocate(self, like: torch.Tensor, num_sites: int):
        self.kind, self.num_heads = WEIGHTS[self.read_config.weights], self.read_config.num_heads
        num_rows, num_blocks = like[..., 0].numel() * self.num_heads, 1 + (num_sites - 1) // self.block_size
        self.dtype = like.dtype
        self.is_one_token = like[..., 0].numel() == 1 and like.device.type == "cpu" and not is_tracing(like)
        wide = torch.promote_types(like.dtype, torch.float32)
        self.values = like.new_empty(num_rows, num_blocks, self.shape[-1] // self.num_heads, dtype=wide)
        self.scores = like.new_empty(num_rows, num_blocks, num_sites, dtype=wide)
        self.queries = like.new_empty(num_sites, self.shape[-1], dtype=wide)
        self.zero, self.eps_norms = self.queries.new_zeros(self.shape[-1]), {}
        self.eps_norm = self._eps_norm(self.eps)
        if self.is_one_token:  # for which time goes into views as well
            self._allocate_for_one_token(num_sites, num_blocks)

    def _allocate_for_one_token(self, num_sites: int, num_blocks: int):
        # By site `[heads, hidden]`: the query of each head, and zeros where the slices of others are
        head_queries = self.queries.unsqueeze(1)
        if self.num_heads > 1:
            head_queries = self.queries.new_zeros(num_sites, self.num_heads, self.shape[-1])
            by_slice = head_queries.view(num_sites, self.num_heads, self.num_heads, -1)
            self.slices = by_slice.diagonal(dim1=1, dim2=2)
        self.site_queries = head_queries.unbind(0)
        # In the order in which they are written and read
        scores_by_site = self.scores.new_empty(num_sites, self.num_heads, num_blocks)
        self.scores = scores_by_site.permute(1, 2, 0)
        self.append_views = []
        for block, first in enumerate(range(0, num_blocks * self.block_size, self.block_size)):
            queries = head_queries[first:].flatten(0, 1)
            self.append_views.append((self.values[:, block], queries, scores_by_site[first:, :, block]))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, hidden]` as `[rows, hidden / heads]`, as wide as scores are."""
        return tensor.to(self.queries.dtype).reshape(-1, self.values.shape[-1])

    def append(self, block: torch.Tensor) -> torch.Tensor:
        """As of `BlockCache`; gives back the block itself."""
        if self.is_one_token:
            self._append_one_token(block.to(self.queries.dtype).view(-1))
            return block
        wide_block = block.to(self.queries.dtype)
        l2_norm = key_l2_norm(wide_block, self.eps_norm).unsqueeze(-1).expand(*self.shape[:-1], self.num_heads, 1)
        self.values[:, self.num_closed].copy_(self._rows(wide_block))
        if self.read_config.query == "learned":
            with maybe_autocast(device_type=block.device.type, enabled=False):
                heads, queries = (
                    tensor.unflatten(-1, (self.num_heads, -1))
                    for tensor in (wide_block, self.queries[self.open_from :])
                )
                scores = torch.einsum("...hd,shd->...hs", heads, queries) / l2_norm
            self.scores[:, self.num_closed, self.open_from :] = scores.reshape(self.values.shape[0], -1)
        else:
            self.key_l2_norms.append(l2_norm.reshape(-1, 1))
        self.num_closed += 1
        return block

    def _append_one_token(self, vector: torch.Tensor):
        values, queries, scores = self.append_views[self.num_closed]
        values.copy_(vector.view_as(values))
        l2_norm = key_l2_norm(vector, self.eps_norm)
        if self.read_config.query == "learned":
            torch.div(torch.mv(queries, vector).view_as(scores), l2_norm, out=scores)
        else:
            self.key_l2_norms.append(l2_norm.unsqueeze(0))
        self.num_closed += 1

    @property
    def open_from(self) -> int:
        """The first site that has not been read when the next block is kept."""
        return self.num_closed * self.block_size

    def read(  # type: ignore[override]
        self,
        site: int,
        open_sources: Sequence[torch.Tensor],
        norm: nn.Module | None = None,
        factor: int = 1,
        query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mix at a site behind the blocks that the cache holds, `[batch, seq, hidden]`.

        Args:
            open_sources: of the open block, each `[batch, seq, hidden]`.
            norm: if it is to be applied.
            factor: what the mix is multiplied by.
            query: of every token, `[batch, seq, hidden]`, if queries see the input.
        """
        device_type = self.values.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                mix = self.read(site, open_sources, None, factor, query)
            return mix if norm is None else norm_of(norm, mix)
        if query is not None:
            query = query * self.shape[-1] ** 0.5
        if self.is_one_token:
            return self._read_one_token(site, open_sources, norm, factor, query)
        if query is None:
            query = self.queries[site].view(self.num_heads, -1)
            mix, state = self._read_closed_at(site)
        else:
            mix, state = self._read_closed_by(self._rows(query))
            query = query.unflatten(-1, (self.num_heads, -1))
        for i, source in enumerate(open_sources):
            wide_source = source.to(mix.dtype)
            value = wide_source.unflatten(-1, (self.num_heads, -1))
            product = (value * query).sum(-1, keepdim=True)
            l2_norm = key_l2_norm(wide_source, self.eps_norm).unsqueeze(-1)
            mix = self.kind.merge(mix, value, self.kind.weight(product, l2_norm, state))
            if i + 1 < len(open_sources):
                state = self.kind.next_state(product, l2_norm, state)
        return self._normed(mix.reshape(self.shape), norm, factor)

    def _read_one_token(self, site, open_sources, norm, factor, query) -> torch.Tensor:  # type: ignore[override]
        """`read` with few operations: heads are rows, and a product with all of them is one with a matrix."""
        mix, state = self._read_closed_at(site) if query is None else self._read_closed_by(self._rows(query))
        for i, source in enumerate(open_sources):
            vector = source.to(mix.dtype).view(-1)
            if query is None:
                product = torch.mv(self.site_queries[site], vector)
            else:
                product = (vector * query.view(-1)).view(self.num_heads, -1).sum(-1)
            l2_norm = key_l2_norm(vector, self.eps_norm)
            mix = self.kind.merge(mix, vector.view_as(mix), self.kind.weight(product, l2_norm, state).unsqueeze(-1))
            if i + 1 < len(open_sources):
                state = self.kind.next_state(product, l2_norm, state)
        # Without open sources it is a part of another tensor
        mix = mix.view(self.shape) if open_sources else mix.reshape(self.shape)
        return self._normed_of_one_token(mix, norm, factor, copy=False)

    def _eps_norm(self, eps: float) -> torch.Tensor:
        if eps not in self.eps_norms:
            self.eps_norms[eps] = self.queries.new_full((), (self.shape[-1] * eps) ** 0.5)
        return self.eps_norms[eps]

    def _read_closed_at(self, site: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Phase 1 for a learned query: once for all sites of the block."""
        block, offset = divmod(site, self.block_size)
        if self.open_block != block:
            scores = self.scores[:, : self.num_closed, self.block_size * block : self.block_size * (block + 1)].mT
            self.mix, self.states = self._mixes(scores)
            self.open_block = block
        return self.mix[offset], self.states[offset]

    def _read_closed_by(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for queries `[rows, hidden / heads]` of one site."""
        scores = torch.bmm(self.values[:, : self.num_closed], query.unsqueeze(-1)).squeeze(-1)
        mixes, states = self._mixes((scores / torch.cat(self.key_l2_norms, dim=-1)).unsqueeze(1))
        return mixes[0], states[0]

    def _mixes(self, scores: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
        """Of scores `[rows, sites, sources]`, by site the mix and what phase 2 has to know.

        Returns:
            `[batch, seq, heads, hidden / heads]` and `[batch, seq, heads, 1]` each; `[heads, hidden / heads]` and
            `[heads]` of a single token.
        """
        weights, states = self.kind.of_closed(scores)
        mixes = torch.bmm(weights, self.values[:, : self.num_closed])
        nothing = [None] * mixes.shape[1]
        if self.is_one_token:
            return mixes.unbind(1), nothing if states is None else states.squeeze(-1).unbind(1)
        shape = *self.shape[:-1], self.num_heads, mixes.shape[1], -1
        return mixes.view(shape).unbind(-2), nothing if states is None else states.view(shape).unbind(-2)


def start_stream(
    read_config: ReadConfig, queries: Sequence[torch.Tensor], *args, outputs: Sequence[torch.Tensor] = (), **kwargs
) -> DepthStream:
    """A stream that is read as the config says.

    Args:
        queries: as the model's depth queries give them: those that are learned, and of queries that see the input
            their `projections`.
        outputs: of the open block, if each is a source. Other arguments are those of `DepthStream`.
    """
    learned, *projections = queries
    if read_config == ReadConfig():
        return DepthStream(learned, *args, **kwargs)
    kwargs |= {"read_config": read_config, "outputs": tuple(outputs)}
    if read_config.query == "learned":
        return VariantStream(learned, *args, **kwargs)
    return InputDependentStream(learned, *args, **kwargs | {"projections": tuple(projections)})


def block_cache_class(read_config: ReadConfig) -> type[BlockCache]:
    return BlockCache if read_config == ReadConfig() else VariantBlockCache
