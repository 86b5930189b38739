# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The block cache: the two-phase reads of the paper for inference (arXiv 2603.15031, section 4)."""

import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .autograd import key_l2_norm
from .backends import kernels_for, use_kernels
from .norms import norm_of, rms_norm_parameters


def l2_norm_of_one_token(wide_vector: torch.Tensor, eps_norm: float) -> float:
    """`key_l2_norm` of a vector, `[hidden]`, as a number."""
    return math.sqrt(torch.dot(wide_vector, wide_vector).item() + eps_norm * eps_norm) or sys.float_info.min


def read_closed(values: torch.Tensor, scores: torch.Tensor, out: torch.Tensor | None = None):
    """Phase 1: all queries of a block against all closed sources, in one read of them.

    Args:
        values: closed sources, `[tokens, sources, hidden]`.
        scores: their scores, `[tokens, sites, sources]`.
        out: where to write the mixes.

    Returns:
        Their mix per site, `[tokens, sites, hidden]`, and the negative log-sum-exp of the scores, `[tokens, sites]`.
    """
    kernels = kernels_for(values)
    if kernels is not None:
        return kernels.read_closed(values, scores, out)
    if values.shape[1] == 1:  # a softmax over one source is 1
        return values.to(scores.dtype).expand(-1, scores.shape[1], -1), -scores.squeeze(-1)
    log_weights = torch.log_softmax(scores, dim=-1)
    mix = torch.bmm(log_weights.exp(), values.to(scores.dtype), out=out)
    return mix, log_weights.select(-1, 0) - scores.select(-1, 0)


def merge_partial(
    query: torch.Tensor, partial: torch.Tensor, mix: torch.Tensor, negative_lse: torch.Tensor, eps_norm: torch.Tensor
) -> torch.Tensor:
    """Phase 2: merge the partial sum into the mix of the closed sources by the online-softmax rule.

    Args:
        query: folded query of the site times sqrt(hidden), `[hidden]`.
        partial: partial sum of the open block, `[..., hidden]`.
        mix, negative_lse: results of phase 1 at this site, `[..., hidden]` and `[..., 1]`.
        eps_norm: see `key_l2_norm`.

    Returns:
        `[..., hidden]`, of the dtype of `mix`.
    """
    wide_partial = partial if partial.dtype == mix.dtype else partial.to(mix.dtype)
    if torch.compiler.is_compiling():  # which fuses this with all around it, where a matrix product stands alone
        score = (wide_partial * query).sum(-1, keepdim=True)
    else:
        score = wide_partial @ query.unsqueeze(-1)
    alpha = torch.addcdiv(negative_lse, score, key_l2_norm(wide_partial, eps_norm)).sigmoid_()
    return torch.lerp(mix, wide_partial, alpha)


# A generation is known by its KV cache, and its buffers are freed with it
_BLOCK_CACHES: weakref.WeakKeyDictionary[Any, "BlockCache"] = weakref.WeakKeyDictionary()


class BlockCache:
    """The closed blocks of one forward pass, kept for two-phase reads: to depth what a KV cache is to time.

    Append-only along depth: a block is copied in when it closes, together with its scores for all later sites, and is
    never normalised again. Depth attention is per token, so nothing in here outlives a forward pass but the buffers,
    which the next one of the same shape reuses. For inference only: the buffers are written in place.

    A single token on a CPU is read with scores that are numbers, as its time goes into operations and calls and not
    into arithmetic: half as many operations on tensors, and few functions.
    """

    # Made by `start`; a single token has numbers where the others have tensors. `append_views` and `read_views` have
    # an entry per block: where to write it when it closes, and what to read while it is open
    values: torch.Tensor
    queries: torch.Tensor
    eps_norms: dict[float, Any]
    append_views: list[tuple]
    read_views: list[tuple]
    # Of the block that is open: its number, and by site what is read of the blocks before it
    open_block: int | None
    mix: Sequence[torch.Tensor]
    negative_lse: Sequence[Any]

    def __init__(self):
        self.layout: tuple | None = None
        self.num_passes = 0
        self.num_closed = 0
        self.scores_of_one_token: list[list[float]] = []

    @classmethod
    def beside(cls, kv_cache) -> "BlockCache":
        """The block cache of the generation whose KV cache this is, from its first forward pass to its last."""
        cache = _BLOCK_CACHES.get(kv_cache)
        if type(cache) is not cls:  # none yet, or of a model that reads otherwise
            cache = _BLOCK_CACHES[kv_cache] = cls()
        return cache

    def start(self, queries: torch.Tensor, like: torch.Tensor, block_size: int, eps: float, read_config: Any = None):
        """Empty the cache for a forward pass.

        Args:
            queries: folded queries of all sites, `[sites, hidden]`.
            like: of the shape, dtype and device of every source, `[batch, seq, hidden]`.
            block_size: sublayers per block.
            eps: epsilon of the key RMSNorm.
            read_config: the `ReadConfig` of the stream, for a cache that knows several.
        """
        layout = (like.shape, like.dtype, like.device, len(queries), block_size, eps, read_config, use_kernels(like))
        # a buffer made under inference mode cannot be written outside of it
        if layout != self.layout or self.values.is_inference() != torch.is_inference_mode_enabled():
            self.layout, self.shape, self.block_size, self.eps = layout, like.shape, block_size, eps
            self.read_config = read_config
            self._allocate(like, len(queries))
        self.queries.copy_(queries).mul_(self.shape[-1] ** 0.5)
        self.num_passes += 1
        self.num_closed, self.open_block = 0, None
        self.scores_of_one_token.clear()

    def _allocate(self, like: torch.Tensor, num_sites: int):
        """Buffers, and every part of one that is ever asked for, as a step of decoding takes time even for a view."""
        *tokens, hidden_size = self.shape
        num_tokens, num_blocks = math.prod(tokens), 1 + (num_sites - 1) // self.block_size
        wide = torch.promote_types(like.dtype, torch.float32)
        is_one_token = num_tokens == 1 and like.device.type == "cpu"
        self.is_one_token = is_one_token and not use_kernels(like) and not is_tracing(like)
        self.dtype = like.dtype
        # As wide as the sums over them, or every read would convert all of them once more; kernels do so as they load
        self.values = like.new_empty(
            num_tokens, num_blocks, hidden_size, dtype=like.dtype if use_kernels(like) else wide
        )
        self.mixes = like.new_empty(num_tokens, min(self.block_size, num_sites), hidden_size, dtype=wide)
        self.queries = like.new_empty(num_sites, hidden_size, dtype=wide)
        self.scores = like.new_empty(num_tokens, num_blocks, num_sites, dtype=wide)
        self.zero = self.queries.new_zeros(hidden_size)
        self.eps_norms = {}
        self.eps_norm = self._eps_norm(self.eps)
        self.blocks = self._by_site(self.values)
        self.site_queries = self.queries.unbind(0)
        self.site_mixes = self._by_site(self.mixes)
        self.append_views, self.read_views = [], []
        for block, first in enumerate(range(0, num_sites, self.block_size)):
            end = min(first + self.block_size, num_sites)
            values, mixes = self.values[:, : block + 1], self.mixes[:, : end - first]
            if self.is_one_token:
                self.append_views.append((values[0, block], self.queries[first:]))
                self.read_views.append((values[0], range(first - num_sites, end - num_sites), mixes[0]))
            else:
                self.append_views.append((values[:, block], self.queries[first:].mT, self.scores[:, block, first:]))
                self.read_views.append((values, self.scores[:, : block + 1, first:end].mT, mixes))

    def _eps_norm(self, eps: float) -> Any:
        """See `key_l2_norm`."""
        if eps not in self.eps_norms:
            eps_norm = (self.shape[-1] * eps) ** 0.5
            self.eps_norms[eps] = eps_norm if self.is_one_token else self.queries.new_full((), eps_norm)
        return self.eps_norms[eps]

    def _by_site(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[tokens, sites, n]` as one `[batch, seq, n]` per site."""
        return tensor.view(*self.shape[:-1], *tensor.shape[1:]).unbind(-2)

    def __len__(self) -> int:
        return self.num_closed

    def append(self, block: torch.Tensor) -> torch.Tensor:
        """Keep a closed block, `[batch, seq, hidden]`, and its scores for every site that can still read it.

        Returns:
            The block as it is kept, valid until the next `start`; or itself, if the cache keeps it in another dtype.
        """
        if self.is_one_token:
            vector = block.to(self.queries.dtype).view(-1)
            values, queries = self.append_views[self.num_closed]
            values.copy_(vector)
            l2_norm = l2_norm_of_one_token(vector, self.eps_norm)
            self.scores_of_one_token.append([product / l2_norm for product in torch.mv(queries, vector).tolist()])
        else:
            values, queries, scores = self.append_views[self.num_closed]
            with maybe_autocast(device_type=block.device.type, enabled=False):
                values.copy_(block.flatten(0, -2))
                wide_block = values.to(scores.dtype)
                scores.copy_((wide_block @ queries).div_(key_l2_norm(wide_block, self.eps_norm)))
        self.num_closed += 1
        return self.blocks[self.num_closed - 1] if self.values.dtype == self.dtype else block

    def read(
        self, site: int, partial: torch.Tensor | None, norm: nn.Module | None = None, factor: int = 1
    ) -> torch.Tensor:
        """The mix at a site behind the blocks that the cache holds, `[batch, seq, hidden]`.

        Args:
            partial: the partial sum of the open block, `[batch, seq, hidden]`, or `None` if there is no open block.
            norm: if it is to be applied.
            factor: what the mix is multiplied by.
        """
        block, offset = divmod(site, self.block_size)
        if self.is_one_token:
            return self._read_one_token(site, block, offset, partial, norm, factor)
        device_type = self.values.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                mix = self.read(site, partial, None, factor)
            return mix if norm is None else norm_of(norm, mix)
        if self.open_block != block:
            self._read_closed(block)
        mix = self.mix[offset]
        if partial is None:
            # Out of the buffer, which the next block overwrites
            return self._normed(mix, norm, factor, copy=self.buffered)
        query, negative_lse = self.site_queries[site], self.negative_lse[offset]
        kernels = kernels_for(partial)
        if kernels is not None:
            return kernels.merge(query, partial, mix, negative_lse, self.eps_norm, norm, factor)
        mix = merge_partial(query, partial, mix, negative_lse, self.eps_norm)
        return self._normed(mix, norm, factor)

    def _normed(self, mix: torch.Tensor, norm: nn.Module | None, factor: int, copy: bool = False) -> torch.Tensor:
        """The mix in the model's dtype, multiplied, and normed if there is a norm.

        Llama's RMSNorm is eight operations as a module, more than the read in front of it, and five here.
        """
        dtype = self.dtype
        parameters = None if torch.compiler.is_compiling() else rms_norm_parameters(norm, dtype)
        if parameters is None:
            mix = (mix * factor).to(dtype) if factor != 1 else mix.to(dtype, copy=copy)
            return mix if norm is None else norm_of(norm, mix)
        weight, eps = parameters
        rms = key_l2_norm(mix, self._eps_norm(eps / factor**2)) * mix.shape[-1] ** -0.5
        return (mix / rms).to(dtype).mul_(weight)

    def _read_closed(self, block: int):
        values, scores, out = self.read_views[block]
        # A compiled graph owns its memory: there, writing into a buffer would only be one more copy. A mix that is
        # given away at once needs none either
        self.buffered = scores.shape[1] > 1 and not torch.compiler.is_compiling()
        mix, negative_lse = read_closed(values, scores, out=out if self.buffered else None)
        self.mix = self.site_mixes if mix is out else self._by_site(mix)
        self.negative_lse = self._by_site(negative_lse.unsqueeze(-1))
        self.open_block = block

    def _read_one_token(self, site, block, offset, partial, norm, factor) -> torch.Tensor:
        """`read`, with numbers in place of scores."""
        if self.open_block != block:
            self._read_closed_of_one_token(block)
        dtype, mix = self.dtype, self.mix[offset]
        if partial is not None:
            wide_partial = partial if dtype == self.mixes.dtype else partial.to(self.mixes.dtype)
            vector = wide_partial.view(-1)
            l2_norm = l2_norm_of_one_token(vector, self.eps_norm)
            score = torch.dot(vector, self.site_queries[site]).item() / l2_norm + self.negative_lse[offset]
            # by the exponential that cannot overflow
            alpha = 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))
            mix = torch.lerp(mix, wide_partial, alpha)
        # out of the buffer, which the next block overwrites
        return self._normed_of_one_token(mix, norm, factor, copy=partial is None)

    def _normed_of_one_token(self, mix: torch.Tensor, norm: nn.Module | None, factor: int, copy: bool) -> torch.Tensor:
        dtype = self.dtype
        parameters = rms_norm_parameters(norm, dtype)
        if parameters is None:
            mix = (mix * factor).to(dtype) if factor != 1 else mix.to(dtype, copy=copy)
            return mix if norm is None else norm_of(norm, mix)
        weight, eps = parameters
        vector = mix.view(-1)
        rms = math.sqrt(torch.dot(vector, vector).item() / vector.shape[0] + eps / factor**2)
        # One operation for a product of three; the factor has to be finite in fp32
        normed = torch.addcmul(self.zero, mix, weight, value=1 / max(rms, 1e-37))
        return normed if dtype == normed.dtype else normed.to(dtype)

    def _read_closed_of_one_token(self, block: int):
        values, sites, out = self.read_views[block]
        if self.num_closed == 1:  # a softmax over one source is 1
            (scores,) = self.scores_of_one_token
            self.mix = [values.view(self.shape)] * len(sites)
            self.negative_lse = [-scores[site] for site in sites]
        else:
            weights, self.negative_lse = [], []
            for site in sites:
                scores = [of_block[site] for of_block in self.scores_of_one_token]
                largest = max(scores)
                exponentials = [math.exp(score - largest) for score in scores]
                total = sum(exponentials)
                weights.append([exponential / total for exponential in exponentials])
                self.negative_lse.append(-largest - math.log(total))
            torch.mm(torch.tensor(weights, dtype=out.dtype), values, out=out)
            self.mix = self.site_mixes
        self.open_block = block
