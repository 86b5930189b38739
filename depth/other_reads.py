# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Streams whose reads are not the paper's own, see `reads.py`.

One class of stream has the paper's read, `DepthStream`. Here are one for all others with learned queries, one for
queries that see the input, and one for batches whose samples have queries of their own. `start_stream` chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .autograd import TokenScores, by_head, dot, key_l2_norm
from .backends import kernels_for
from .definition import scores_by_definition
from .reads import PAPERS_READ, ReadConfig
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

    read_config: ReadConfig = PAPERS_READ
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
        kernels = kernels_for(self.newest)
        reader = Reader(self.newest, self.eps, self.read_config, kernels)
        if kernels is not None:
            return reader.merge_by_kernels(self._query(), self.sources, norm, self._factor())
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


@register_stream
@dataclass(eq=False)
class PerSampleStream(InputDependentStream):
    """A stream whose samples have queries of their own, as in a batch of several adapters.

    It is read as if queries saw the input, with a query for every token.

    Args:
        projections: the learned queries, `[sites, batch, hidden]`, and if queries see the input the `projections` of
            an `InputDependentStream`, `[sites, batch, ...]`. Other arguments as there; of its `queries`, only the
            number of sites is used.
    """

    def _query(self) -> torch.Tensor:
        learned, *others = (of_sites[self.site] for of_sites in self.projections)
        newest = self.sources[-1]
        by_sample = newest.reshape(len(learned), -1, newest.shape[-1])  # a layer may have flattened the tokens
        if not others:
            return learned.unsqueeze(1).expand(by_sample.shape).reshape(newest.shape)
        gamma, *projections = others
        query = by_sample.to(gamma.dtype)
        with maybe_autocast(device_type=query.device.type, enabled=False):
            for projection in projections:
                query = query @ projection.mT
            return torch.addcmul(learned.unsqueeze(1), query, gamma.unsqueeze(1)).view(newest.shape)


def start_stream(
    read_config: ReadConfig, queries: Sequence[torch.Tensor], *args, outputs: Sequence[torch.Tensor] = (), **kwargs
) -> DepthStream:
    """A stream that is read as the config says.

    Args:
        queries: as `fold_queries` gives them: those that are learned, and of queries that see the input their
            `projections`.
        outputs: of the open block, if each is a source. Other arguments are those of `DepthStream`.

    Raises:
        ValueError: if samples have queries of their own, and these are not as many as the samples.
    """
    learned, *projections = queries
    if learned.ndim == 3:
        return _start_per_sample(read_config, queries, *args, outputs=tuple(outputs), **kwargs)
    if read_config == PAPERS_READ:
        return DepthStream(learned, *args, **kwargs)
    kwargs |= {"read_config": read_config, "outputs": tuple(outputs)}
    if read_config.query == "learned":
        return VariantStream(learned, *args, **kwargs)
    return InputDependentStream(learned, *args, **kwargs | {"projections": tuple(projections)})


def _start_per_sample(
    read_config: ReadConfig, queries: Sequence[torch.Tensor], blocks: tuple[torch.Tensor, ...], *args, **kwargs
) -> PerSampleStream:
    num_named, num_samples = queries[0].shape[1], len(blocks[0])
    if num_named != num_samples:
        raise ValueError(
            f"`adapter_names` has {num_named} names for a batch of {num_samples} samples: each needs one. Load the"
            " model again, as PEFT keeps the names of a call that failed."
        )
    # A block cache then keeps no scores, which it computes with queries that all tokens share
    kwargs |= {"read_config": replace(read_config, query="hybrid"), "projections": tuple(queries)}
    return PerSampleStream(queries[0][:, 0], blocks, *args, **kwargs)
