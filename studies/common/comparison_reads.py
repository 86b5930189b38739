# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Reads over depth that are there to be compared with, and that no checkpoint has: the rest of the paper's ablations.

    model = with_read(AttnResForCausalLM(config), "window", size=8)

Each is a stream whose sources or scores are other ones, so whatever trains an AttnRes model trains these. `static`,
`raw_keys` and `plain_final` start, as the paper's read does, from the function of the base; the others are for
training from scratch.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from attnres.depth.other_reads import VariantStream
from attnres.depth.two_phases import Reader


class OtherSources(VariantStream):
    """A stream with sources that are made of those of the paper at every read."""

    def _read_in_two_phases(self, norm: nn.Module | None) -> torch.Tensor:
        scores = [score.reshape(-1, 1) for score in self._scores()]
        return Reader(self.newest, self.eps, self.read_config).merge(scores, self.sources, norm, self._factor())


class Static(OtherSources):
    """Weights are the softmax of numbers that are learned: the first ones of a query, and the same for all tokens."""

    def _scores(self) -> list[torch.Tensor]:
        return [self.queries[self.site, i].expand(source.shape[:-1]) for i, source in enumerate(self.sources)]


class RawKeys(OtherSources):
    """Keys without RMSNorm: the sources themselves."""

    def _scores(self) -> list[torch.Tensor]:
        return [source.to(self.queries.dtype) @ self.queries[self.site] for source in self.sources]


class PlainFinal(OtherSources):
    """The last read, in front of the final norm, has no query: it is the mean of all sources."""

    def _scores(self) -> list[torch.Tensor]:
        scores = super()._scores()
        return scores if self.site < len(self.queries) - 1 else [torch.zeros_like(score) for score in scores]


class Window(OtherSources):
    """The embedding and the newest sources, `size` of them."""

    size = 8

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        embedding, *others = super().sources
        return embedding, *others[-self.size :]


class Without(OtherSources):
    """Some sources, `left_out`, are never read."""

    left_out: tuple[int, ...] = ()

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return tuple(source for i, source in enumerate(super().sources) if i not in self.left_out)


class NormedValues(OtherSources):
    """Values are normed as keys are, as in Inkling2."""

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return tuple(rms_norm(source, source.shape[-1:], eps=self.eps) for source in super().sources)

    def _is_one_source(self) -> bool:
        return False


class Cumulative(OtherSources):
    """Sources are the states of the residual stream, each the sum of all up to there."""

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return tuple(accumulate(super().sources))


READS = {
    "static": Static,
    "raw_keys": RawKeys,
    "plain_final": PlainFinal,
    "window": Window,
    "without": Without,
    "normed_values": NormedValues,
    "cumulative": Cumulative,
}


def with_read(model: PreTrainedModel, name: str, **options) -> PreTrainedModel:
    """The AttnRes model with another read.

    Args:
        name: one of `READS`.
        options: attributes of its class, such as `size`.

    Raises:
        ValueError: if there is none of the name, or not for this model.
    """
    if name not in READS:
        raise ValueError(f"`{name}` is not a read to be compared with; there are {', '.join(READS)}.")
    trunk = model.base_model
    config = trunk.config
    most_sources = 1 + -(-(config.num_sites - 1) // config.attn_res_block_size)
    if name == "static" and most_sources > config.hidden_size:
        raise ValueError(f"`static` keeps the weights of {most_sources} sources in queries of {config.hidden_size}.")
    stream_class = type(READS[name].__name__, (READS[name],), options)
    trunk.start_stream = functools.partial(_start_stream, trunk, stream_class)
    return model


def _start_stream(trunk, stream_class, blocks: Sequence[torch.Tensor], recorder=None, kv_cache=None) -> VariantStream:
    """In place of `AttnResModel.start_stream`, without a block cache."""
    return stream_class(
        trunk.fold_queries()[0],
        tuple(blocks),
        block_size=trunk.config.attn_res_block_size,
        eps=trunk.config.attn_res_norm_eps,
        scale_by_sources=trunk.config.attn_res_scale_norm_eps,
        recorder=recorder,
    )
