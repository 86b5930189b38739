# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Depth attention: softmax attention over the earlier outputs of a network, per token (arXiv 2603.15031, section 3).

The sources of a read are the embedding, the sums of the closed blocks and the partial sum of the open block. With the
learned query `w` and key norm `gamma` of a site, a read returns

    h = sum_i alpha_i * v_i,    alpha = softmax_i(w . RMSNorm(v_i; gamma)) = softmax_i((w * gamma) . v_i / rms(v_i)).

Only the product `w * gamma` matters, so every function here takes that folded `query`. Scores, softmax and sums are at
least fp32. The same read is written three times:

- `depth_attention_reference`: the equation, literally. What the other two are compared with.
- `depth_attention`: one read with a backward pass of its own, which keeps nothing but the sources and a few numbers.
- `BlockCache`: the two-phase computation of the paper for inference. Closed blocks are normalised once, read once per
  block by all its queries together (phase 1), and merged with the partial sum at every site (phase 2).
"""

import weakref

import torch
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast


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


def inverse_rms(values: torch.Tensor, eps: float) -> torch.Tensor:
    """`1 / rms` over the last dimension, at least fp32: `[..., hidden]` -> `[..., 1]`."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=dtype)
    return norm.square().div_(values.shape[-1]).add_(eps).rsqrt_()


class DepthAttentionFunction(torch.autograd.Function):
    """One read. Saves the sources, which are alive anyway, and three numbers per token and source."""

    @staticmethod
    def forward(ctx, query: torch.Tensor, eps: float, *sources: torch.Tensor):
        with maybe_autocast(device_type=query.device.type, enabled=False):
            inv_rms = torch.cat([inverse_rms(source, eps) for source in sources], dim=-1)
            wide_query = query.to(inv_rms.dtype)
            scores = inv_rms * torch.stack([source.to(inv_rms.dtype) @ wide_query for source in sources], dim=-1)
            weights = torch.softmax(scores, dim=-1)
            mix = weights[..., :1] * sources[0]
            for i, source in enumerate(sources[1:], start=1):
                mix.addcmul_(weights[..., i : i + 1], source.to(mix.dtype))
        ctx.save_for_backward(query, inv_rms, scores, weights, *sources)
        return mix.to(sources[0].dtype), weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_mix: torch.Tensor, grad_weights: torch.Tensor):
        query, inv_rms, scores, weights, *sources = ctx.saved_tensors
        with maybe_autocast(device_type=query.device.type, enabled=False):
            grad_mix, wide_query = grad_mix.to(weights.dtype), query.to(weights.dtype)
            grad_alpha = grad_weights + torch.stack([(grad_mix * source).sum(-1) for source in sources], dim=-1)
            grad_scores = weights * (grad_alpha - (weights * grad_alpha).sum(-1, keepdim=True))
            # score = query . v / rms(v), whose derivative is query / rms - score * v / (hidden * rms^2)
            to_query = grad_scores * inv_rms
            to_value = -to_query * scores * inv_rms / query.shape[-1]

            grad_query, grad_sources = torch.zeros_like(wide_query), []
            for i, source in enumerate(sources):
                wide_source = source.to(weights.dtype)
                grad_query += to_query[..., i].flatten() @ wide_source.flatten(0, -2)
                grad = weights[..., i : i + 1] * grad_mix
                grad.addcmul_(to_query[..., i : i + 1], wide_query).addcmul_(to_value[..., i : i + 1], wide_source)
                grad_sources.append(grad.to(source.dtype))
        return grad_query.to(query.dtype), None, *grad_sources


def depth_attention(query: torch.Tensor, sources: list[torch.Tensor], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The read of `depth_attention_reference`, same arguments and results, with a backward pass that saves little."""
    return DepthAttentionFunction.apply(query, eps, *sources)


def read_closed(values: torch.Tensor, scores: torch.Tensor, out: torch.Tensor | None = None):
    """Phase 1: all queries of a block against all closed sources, in one read of them.

    Args:
        values: closed sources, `[tokens, sources, hidden]`.
        scores: their scores, `[tokens, sites, sources]`.
        out: where to write the mixes.

    Returns:
        Their mix per site, `[tokens, sites, hidden]`, and the log-sum-exp of the scores, `[tokens, sites]`.
    """
    if values.shape[1] == 1:  # a softmax over one source is 1
        return values.to(scores.dtype).expand(-1, scores.shape[1], -1), scores.squeeze(-1)
    return torch.bmm(torch.softmax(scores, dim=-1), values.to(scores.dtype), out=out), torch.logsumexp(scores, dim=-1)


def merge_partial(
    query: torch.Tensor, partial: torch.Tensor, mix: torch.Tensor, lse: torch.Tensor, eps: float
) -> torch.Tensor:
    """Phase 2: merge the partial sum into the mix of the closed sources by the online-softmax rule.

    Args:
        query: folded query of the site as a column, `[hidden, 1]`.
        partial: partial sum of the open block, `[..., hidden]`.
        mix, lse: results of phase 1 at this site, `[..., hidden]` and `[..., 1]`.
        eps: epsilon of the key RMSNorm.
    """
    wide_partial = partial.to(mix.dtype)
    alpha = torch.addcmul(lse.neg(), wide_partial @ query, inverse_rms(partial, eps)).sigmoid_()
    return torch.lerp(mix, wide_partial, alpha).to(partial.dtype)


# A generation is known by its KV cache, and its buffers are freed with it
_BLOCK_CACHES = weakref.WeakKeyDictionary()


class BlockCache:
    """The sources of one forward pass, kept for two-phase reads: to depth what a KV cache is to time.

    Append-only along depth: a block is copied in when it closes, together with its scores for all later sites, and is
    never normalised again. Depth attention is per token, so nothing in here outlives a forward pass but the buffers,
    which the next one of the same shape reuses. For inference only: the buffers are written in place.

    As a sequence it gives the closed blocks, each `[batch, seq, hidden]`.
    """

    def __init__(self):
        self.values = None
        self.num_closed = 0

    @classmethod
    def beside(cls, kv_cache) -> "BlockCache":
        """The block cache of the generation whose KV cache this is, from its first forward pass to its last."""
        return _BLOCK_CACHES.setdefault(kv_cache, cls())

    def start(self, queries: torch.Tensor, partial: torch.Tensor, block_size: int, eps: float):
        """Empty the cache for a forward pass.

        Args:
            queries: folded queries of all sites, `[sites, hidden]`.
            partial: the pending partial sum, `[batch, seq, hidden]`; only its shape, dtype and device matter.
            block_size: sublayers per block.
            eps: epsilon of the key RMSNorm.
        """
        wide = torch.promote_types(partial.dtype, torch.float32)
        self.block_size, self.eps, self.shape = block_size, eps, partial.shape
        self._set_queries(queries.to(wide))
        self.rewind(0)
        num_sites, hidden_size = queries.shape
        shape = (partial.shape[:-1].numel(), 1 + (num_sites - 1) // block_size, hidden_size)
        if (
            self.values is not None
            and self.values.shape == shape
            and self.values.dtype == partial.dtype
            and self.values.device == partial.device
            and self.scores.shape[-1] == num_sites
            # a buffer made under inference mode cannot be written outside of it
            and self.values.is_inference() == torch.is_inference_mode_enabled()
        ):
            return
        self.values = partial.new_empty(shape)
        self.scores = partial.new_empty((*shape[:2], num_sites), dtype=wide)
        self.mixes = partial.new_empty((shape[0], min(block_size, num_sites), hidden_size), dtype=wide)

    def _set_queries(self, queries: torch.Tensor):
        self.queries, self.columns = queries, queries.unsqueeze(-1).unbind(0)

    def rewind(self, site: int):
        """Forget what was closed at `site` or later."""
        self.num_closed = num_sources(site, self.block_size) - 1
        self.open_block = None

    def __len__(self) -> int:
        return self.num_closed

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.num_closed:
            raise IndexError(f"block {index} of a cache that holds {self.num_closed}")
        return self.values[:, index].view(self.shape)

    def append(self, block: torch.Tensor):
        """Close a block, `[batch, seq, hidden]`: keep it, and its scores for every site that can still read it."""
        self._follow(block.device)
        block, first_site = block.flatten(0, -2), self.num_closed * self.block_size
        self.values[:, self.num_closed] = block
        with maybe_autocast(device_type=block.device.type, enabled=False):
            scores = block.to(self.scores.dtype) @ self.queries[first_site:].mT
            self.scores[:, self.num_closed, first_site:] = scores * inverse_rms(block, self.eps)
        self.num_closed += 1

    def read(self, site: int, partial: torch.Tensor) -> torch.Tensor:
        """Input of `site`, `[batch, seq, hidden]`. At the first site of a block, `partial` is the one that closes."""
        self._follow(partial.device)
        block, offset = divmod(site, self.block_size)
        if offset == 0:
            self.append(partial)
        with maybe_autocast(device_type=partial.device.type, enabled=False):
            if self.open_block != block:
                self._read_closed(block)
            if offset == 0:
                return self.mix[0].to(partial.dtype, copy=True)
            query, mix, lse = self.columns[site], self.mix[offset], self.lse[offset]
            return merge_partial(query, partial, mix, lse, self.eps)

    def _read_closed(self, block: int):
        first_site = block * self.block_size
        num_sites = min(self.block_size, len(self.queries) - first_site)
        scores = self.scores[:, : self.num_closed, first_site : first_site + num_sites].mT
        # A compiled graph owns its memory: there, writing into a buffer would only be one more copy
        out = None if torch.compiler.is_compiling() else self.mixes[:, :num_sites]
        mix, lse = read_closed(self.values[:, : self.num_closed], scores, out=out)
        *tokens, hidden_size = self.shape
        self.mix = mix.view(*tokens, num_sites, hidden_size).unbind(-2)
        self.lse = lse.view(*tokens, num_sites, 1).unbind(-2)
        self.open_block = block

    def _follow(self, device: torch.device):
        """Move along when the layers go on on another device: every closed block is copied there once."""
        if device == self.values.device:
            return
        self._set_queries(self.queries.to(device))
        for name in ("values", "scores", "mixes"):
            setattr(self, name, getattr(self, name).to(device))
        self.open_block = None
