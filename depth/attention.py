# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Depth attention: softmax attention over the earlier outputs of a network, per token (arXiv 2603.15031, section 3).

The sources of a read are the embedding, the sums of the closed blocks and the partial sum of the open block. With the
learned query `w` and key norm `gamma` of a site, a read returns

    h = sum_i alpha_i * v_i,    alpha = softmax_i(w . RMSNorm(v_i; gamma)) = softmax_i((w * gamma) . v_i / rms(v_i)).

Only the product `w * gamma` matters, so every function here takes that folded `query`. Scores, softmax and sums are at
least fp32. The same read is written three times:

- `depth_attention_reference`: the equation, literally. What the other two are compared with.
- `source_scores` and `mix_and_norm`, for training: a block that closes is scored for all later sites at once, and the
  backward pass keeps nothing but the sources and a few numbers. `depth_attention` is one read made of the two.
- `BlockCache`: the two-phase computation of the paper for inference. Closed blocks are normalised once, read once per
  block by all its queries together (phase 1), and merged with the partial sum at every site (phase 2).

On GPUs kernels replace the last two, see `depth_backends`.
"""

import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .backends import kernels, use_kernels, uses_definition


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


class SourceScores(torch.autograd.Function):
    """Scores of one source for several queries. Saves the source, which is alive anyway, and the scores."""

    @staticmethod
    def forward(ctx, queries: torch.Tensor, source: torch.Tensor, eps: float):
        if len(queries) == 1 and use_kernels(source):  # several are better read by a matrix product
            scores, inv_rms = kernels().score(queries[0], source, eps)
            ctx.save_for_backward(queries, source, inv_rms, scores)
            return scores
        inv_rms = inverse_rms(source, eps)
        with maybe_autocast(device_type=source.device.type, enabled=False):
            scores = (source.to(inv_rms.dtype) @ queries.to(inv_rms.dtype).mT).mul_(inv_rms)
        ctx.save_for_backward(queries, source, inv_rms, scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        queries, source, inv_rms, scores = ctx.saved_tensors
        if len(queries) == 1 and use_kernels(source):
            grad_query, grad_source = kernels().score_backward(grad, queries[0], source, inv_rms, scores)
            return grad_query[None], grad_source, None
        with maybe_autocast(device_type=source.device.type, enabled=False):
            wide_queries, wide_source = queries.to(scores.dtype), source.to(scores.dtype)
            # score = query . v / rms(v), whose derivative is query / rms - score * v / (hidden * rms^2)
            to_query = grad * inv_rms
            to_source = (grad * scores).sum(-1, keepdim=True) * inv_rms.square() / -source.shape[-1]
            grad_source = (to_query @ wide_queries).addcmul_(to_source, wide_source)
            grad_queries = to_query.flatten(0, -2).mT @ wide_source.flatten(0, -2)
        return grad_queries.to(queries.dtype), grad_source.to(source.dtype), None


def source_scores(queries: torch.Tensor, source: torch.Tensor, eps: float) -> torch.Tensor:
    """Scores of a source for the reads of several sites, at least fp32.

    Args:
        queries: folded queries, `[sites, hidden]`.
        source: `[batch, seq, hidden]`.
        eps: epsilon of the key RMSNorm.

    Returns:
        `[batch, seq, sites]`.
    """
    if uses_definition():
        values = source.to(torch.promote_types(source.dtype, torch.float32))
        keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
        return torch.stack([(keys * query).sum(-1) for query in queries], dim=-1)
    return SourceScores.apply(queries, source, eps)


def by_head(tensors: Sequence[torch.Tensor], num_heads: int) -> list[torch.Tensor]:
    """`[..., hidden]` as `[..., heads, hidden / heads]`, each."""
    return [tensor.unflatten(-1, (num_heads, -1)) for tensor in tensors]


def weighted_sum(weights: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over sources, `[batch, seq, hidden]`, by weights `[batch, seq, (heads,) sources]`."""
    if weights.ndim > sources[0].ndim:
        return weighted_sum(weights, by_head(sources, weights.shape[-2])).flatten(-2)
    if use_kernels(sources[0]):
        return kernels().weighted_sum(weights, sources)
    mix = weights[..., :1] * sources[0]
    for i, source in enumerate(sources[1:], start=1):
        mix.addcmul_(weights[..., i : i + 1], source.to(mix.dtype))
    return mix.to(sources[0].dtype)


def weighted_sum_backward(grad: torch.Tensor, weights: torch.Tensor, sources: Sequence[torch.Tensor]):
    """Gradients of the weights and of the sources."""
    if weights.ndim > sources[0].ndim:
        grad, *sources = by_head([grad, *sources], weights.shape[-2])
        grad_weights, *grad_sources = weighted_sum_backward(grad, weights, sources)
        return grad_weights, *(grad_source.flatten(-2) for grad_source in grad_sources)
    if use_kernels(sources[0]):
        return kernels().weighted_sum_backward(grad, weights, sources)
    grad = grad.to(weights.dtype)
    grad_weights = torch.stack([(grad * source).sum(-1) for source in sources], dim=-1)
    return grad_weights, *((weights[..., i : i + 1] * grad).to(s.dtype) for i, s in enumerate(sources))


class WeightedSum(torch.autograd.Function):
    """The mix of a read. Saves weights and sources, no product of them."""

    @staticmethod
    def forward(ctx, weights: torch.Tensor, *sources: torch.Tensor):
        ctx.save_for_backward(weights, *sources)
        return weighted_sum(weights, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        weights, *sources = ctx.saved_tensors
        return weighted_sum_backward(grad, weights, sources)


class NormOfWeightedSum(torch.autograd.Function):
    """The mix of a read and the norm behind it. Saves nothing of either, and computes them again in backward.

    What the norm is made of is saved with the sources, and the norm is not asked again: before backward runs, it may
    have been given other parameters, by `functional_call`, FSDP, a merged adapter or an optimizer.
    """

    @staticmethod
    def forward(ctx, norm: nn.Module, weights: torch.Tensor, *sources_and_norm_tensors: torch.Tensor):
        sources = sources_and_norm_tensors[: weights.shape[-1]]
        device_type = weights.device.type
        ctx.norm, ctx.tensor_names = norm_with(norm, {}), list(norm_tensors(norm))
        ctx.is_autocast = torch.is_autocast_enabled(device_type)
        ctx.autocast_dtype = torch.get_autocast_dtype(device_type)
        ctx.save_for_backward(weights, *sources_and_norm_tensors)
        return norm_of(norm, weighted_sum(weights, sources))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        weights, *tensors = ctx.saved_tensors
        num_sources = weights.shape[-1]
        sources, needed = tensors[:num_sources], ctx.needs_input_grad[2 + num_sources :]
        of_norm = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors[num_sources:], needed)]
        norm = norm_with(ctx.norm, dict(zip(ctx.tensor_names, of_norm)))
        mix = weighted_sum(weights, sources).requires_grad_()
        autocast = maybe_autocast(weights.device.type, dtype=ctx.autocast_dtype, enabled=ctx.is_autocast)
        with torch.enable_grad(), autocast:
            normed = norm_of(norm, mix)
        inputs = (mix, *(tensor for tensor in of_norm if tensor.requires_grad))
        grad_mix, *grads = torch.autograd.grad(normed, inputs, grad, allow_unused=True)
        grads_of_norm = [grads.pop(0) if need else None for need in needed]
        return None, *weighted_sum_backward(grad_mix, weights, sources), *grads_of_norm


def norm_of(norm: nn.Module, mix: torch.Tensor) -> torch.Tensor:
    """A norm applied to a mix, through its class: hooks on the instance have already run."""
    return type(norm).forward(norm, mix)


def norm_tensors(norm: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a norm without submodules by name: parameters, buffers, and what FSDP1 has in their place."""
    own = vars(norm)
    named = {**own["_parameters"], **own["_buffers"], **own}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def norm_with(norm: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A norm as it is now, and with other tensors. The norm itself stays as it is, as other threads may run it."""
    copied = object.__new__(type(norm))
    vars(copied).update(vars(norm), **tensors)  # found before parameters and buffers
    return copied


def depth_weights(scores: Sequence[torch.Tensor], masked: int | None = None) -> torch.Tensor:
    """The softmax over sources, `[batch, seq, sources]`, of their scores, `[batch, seq]` each; one may be left out."""
    scores = torch.stack(scores, dim=-1)
    if masked is not None:
        scores[..., masked] = -torch.inf
    return torch.softmax(scores, dim=-1)


def mix_and_norm(weights: torch.Tensor, sources: Sequence[torch.Tensor], norm: nn.Module | None) -> torch.Tensor:
    """What a read gives to its sublayer.

    Args:
        weights: `[batch, seq, sources]`, at least fp32, or of several heads `[batch, seq, heads, sources]`, each of
            which has its slice of the hidden dimension.
        sources: the values, each `[batch, seq, hidden]`.
        norm: the norm in front of the sublayer, if it is to be applied.

    Returns:
        `[batch, seq, hidden]`. With a norm the backward pass has no more to keep than weights and sources.
    """
    if uses_definition():
        is_multi_head = weights.ndim > sources[0].ndim
        values = torch.stack(by_head(sources, weights.shape[-2]) if is_multi_head else list(sources), dim=-2)
        mix = (weights.unsqueeze(-1) * values.to(weights.dtype)).sum(-2).to(values.dtype).view_as(sources[0])
        return mix if norm is None else norm_of(norm, mix)
    if not torch.is_grad_enabled():
        mix = weighted_sum(weights, sources)
        return mix if norm is None else norm_of(norm, mix)
    if norm is None:
        return WeightedSum.apply(weights, *sources)
    # A compiler decides itself what it computes again. What is in submodules, such as those of
    # `torch.nn.utils.parametrize`, is not among the norm's tensors
    if torch.compiler.is_compiling() or norm._modules:
        return norm_of(norm, WeightedSum.apply(weights, *sources))
    return NormOfWeightedSum.apply(norm, weights, *sources, *norm_tensors(norm).values())


def rms_norm_parameters(norm: nn.Module | None, dtype: torch.dtype) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of a norm that is Llama's RMSNorm; `None` otherwise.

    `variance_epsilon` is what that one calls its epsilon in transformers; a (1 + weight) one calls it `eps`. Never in
    fp64, which that one rounds to fp32.
    """
    if norm is None or dtype == torch.float64:
        return None
    own, norm_class = vars(norm), type(norm)
    # Norms from elsewhere, such as Liger's replacements, have options that are ignored here
    if not norm_class.__module__.startswith("transformers.models."):
        return None
    if not norm_class.__name__.removesuffix("OverDepth").endswith("RMSNorm"):
        return None
    if "variance_epsilon" not in own:
        return None
    weight = own["_parameters"].get("weight", own.get("weight"))
    if type(weight) not in (nn.Parameter, torch.Tensor) or weight.dtype != dtype:
        return None
    return weight, norm.variance_epsilon


def has_kernel(norm: nn.Module | None, partial: torch.Tensor) -> bool:
    """Whether `read_and_norm` can do this norm behind a read."""
    return use_kernels(partial) and rms_norm_parameters(norm, partial.dtype) is not None


class ReadAndNorm(torch.autograd.Function):
    """A read and the norm behind it as one kernel each way. Saves nothing of them but a few numbers per token."""

    @staticmethod
    def forward(ctx, query, scores, norm_weight, norm_eps: float, eps: float, *sources: torch.Tensor):
        ctx.norm_eps = norm_eps
        ctx.set_materialize_grads(False)
        normed, *saved = kernels().read(query, scores, norm_weight, norm_eps, eps, sources)
        ctx.save_for_backward(query, norm_weight, *saved, *sources)
        return normed, saved[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor | None, grad_weights: torch.Tensor | None):
        query, norm_weight, *saved_and_sources = ctx.saved_tensors
        saved, sources = saved_and_sources[:3], saved_and_sources[3:]
        if grad is None:  # of the weights alone
            grad = torch.zeros_like(sources[-1])
        grads = kernels().read_backward(grad, grad_weights, query, norm_weight, ctx.norm_eps, *saved, sources)
        grad_query, grad_scores, grad_norm_weight, *grad_sources = grads
        return grad_query, grad_scores, grad_norm_weight, None, None, *grad_sources


def read_and_norm(
    query: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scores: Sequence[torch.Tensor],
    eps: float,
    norm: nn.Module,
    factor: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A read within a block and the norm behind it, where there is a kernel for it.

    Args:
        query: folded query of the site, `[hidden]`.
        sources: the closed blocks and the partial sum, each `[batch, seq, hidden]`.
        scores: of the closed blocks, each `[batch, seq]`.
        eps: epsilon of the key RMSNorm.
        norm: in front of the sublayer.
        factor: what the mix is multiplied by, here as an epsilon divided by its square.

    Returns:
        The normed mix, `[batch, seq, hidden]`, and the weights, `[batch, seq, sources]`.
    """
    weight, norm_eps = rms_norm_parameters(norm, sources[-1].dtype)  # type: ignore[misc]
    return ReadAndNorm.apply(query, torch.stack(scores, dim=-1), weight, norm_eps / factor**2, eps, *sources)


def depth_attention(query: torch.Tensor, sources: list[torch.Tensor], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The read of `depth_attention_reference`, same arguments and results, with a backward pass that saves little."""
    scores = torch.cat([source_scores(query[None], source, eps) for source in sources], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return mix_and_norm(weights, sources, norm=None), weights


def key_length(wide_values: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """`sqrt(hidden) * rms` over the last dimension, `[..., hidden]` -> `[..., 1]`; `shift` is `sqrt(hidden * eps)`.

    Two operations, where `inverse_rms` is five: what a step of decoding costs is the number of operations.
    """
    norm = torch.linalg.vector_norm(wide_values, dim=-1, keepdim=True)
    if torch.compiler.is_compiling():  # or exporting: ONNX has no `hypot`
        return (norm.square() + shift.square()).sqrt()
    return torch.hypot(norm, shift)


def length_of_one_token(wide_vector: torch.Tensor, shift: float) -> float:
    """`key_length` of a vector, `[hidden]`, as a number."""
    return math.sqrt(torch.dot(wide_vector, wide_vector).item() + shift * shift) or sys.float_info.min


def read_closed(values: torch.Tensor, scores: torch.Tensor, out: torch.Tensor | None = None):
    """Phase 1: all queries of a block against all closed sources, in one read of them.

    Args:
        values: closed sources, `[tokens, sources, hidden]`.
        scores: their scores, `[tokens, sites, sources]`.
        out: where to write the mixes.

    Returns:
        Their mix per site, `[tokens, sites, hidden]`, and the negative log-sum-exp of the scores, `[tokens, sites]`.
    """
    if use_kernels(values):
        return kernels().read_closed(values, scores, out)
    if values.shape[1] == 1:  # a softmax over one source is 1
        return values.to(scores.dtype).expand(-1, scores.shape[1], -1), -scores.squeeze(-1)
    log_weights = torch.log_softmax(scores, dim=-1)
    mix = torch.bmm(log_weights.exp(), values.to(scores.dtype), out=out)
    return mix, log_weights.select(-1, 0) - scores.select(-1, 0)


def merge_partial(
    query: torch.Tensor, partial: torch.Tensor, mix: torch.Tensor, negative_lse: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """Phase 2: merge the partial sum into the mix of the closed sources by the online-softmax rule.

    Args:
        query: folded query of the site times sqrt(hidden), `[hidden]`.
        partial: partial sum of the open block, `[..., hidden]`.
        mix, negative_lse: results of phase 1 at this site, `[..., hidden]` and `[..., 1]`.
        shift: see `key_length`.

    Returns:
        `[..., hidden]`, of the dtype of `mix`.
    """
    wide_partial = partial if partial.dtype == mix.dtype else partial.to(mix.dtype)
    if torch.compiler.is_compiling():  # which fuses this with all around it, where a matrix product stands alone
        score = (wide_partial * query).sum(-1, keepdim=True)
    else:
        score = wide_partial @ query.unsqueeze(-1)
    alpha = torch.addcdiv(negative_lse, score, key_length(wide_partial, shift)).sigmoid_()
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

    # Made by `start`; a single token has numbers where the others have tensors. `closing` and `reading` have an entry
    # per block: where to write it when it closes, and what to read while it is open
    values: torch.Tensor
    queries: torch.Tensor
    shifts: dict[float, Any]
    closing: list[tuple]
    reading: list[tuple]
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

    def start(self, queries: torch.Tensor, like: torch.Tensor, block_size: int, eps: float, how: Any = None):
        """Empty the cache for a forward pass.

        Args:
            queries: folded queries of all sites, `[sites, hidden]`.
            like: of the shape, dtype and device of every source, `[batch, seq, hidden]`.
            block_size: sublayers per block.
            eps: epsilon of the key RMSNorm.
            how: the `Read` of the stream, for a cache that knows several.
        """
        layout = (like.shape, like.dtype, like.device, len(queries), block_size, eps, how, use_kernels(like))
        # a buffer made under inference mode cannot be written outside of it
        if layout != self.layout or self.values.is_inference() != torch.is_inference_mode_enabled():
            self.layout, self.shape, self.block_size, self.eps, self.how = layout, like.shape, block_size, eps, how
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
        self.shifts = {}
        self.shift = self._shift(self.eps)
        self.blocks = self._by_site(self.values)
        self.site_queries = self.queries.unbind(0)
        self.site_mixes = self._by_site(self.mixes)
        self.closing, self.reading = [], []
        for block, first in enumerate(range(0, num_sites, self.block_size)):
            end = min(first + self.block_size, num_sites)
            values, mixes = self.values[:, : block + 1], self.mixes[:, : end - first]
            if self.is_one_token:
                self.closing.append((values[0, block], self.queries[first:]))
                self.reading.append((values[0], range(first - num_sites, end - num_sites), mixes[0]))
            else:
                self.closing.append((values[:, block], self.queries[first:].mT, self.scores[:, block, first:]))
                self.reading.append((values, self.scores[:, : block + 1, first:end].mT, mixes))

    def _shift(self, eps: float) -> Any:
        """See `key_length`."""
        if eps not in self.shifts:
            shift = (self.shape[-1] * eps) ** 0.5
            self.shifts[eps] = shift if self.is_one_token else self.queries.new_full((), shift)
        return self.shifts[eps]

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
            values, queries = self.closing[self.num_closed]
            values.copy_(vector)
            length = length_of_one_token(vector, self.shift)
            self.scores_of_one_token.append([product / length for product in torch.mv(queries, vector).tolist()])
        else:
            values, queries, scores = self.closing[self.num_closed]
            with maybe_autocast(device_type=block.device.type, enabled=False):
                values.copy_(block.flatten(0, -2))
                wide_block = values.to(scores.dtype)
                scores.copy_((wide_block @ queries).div_(key_length(wide_block, self.shift)))
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
        if use_kernels(partial):
            return kernels().merge(query, partial, mix, negative_lse, self.shift, norm, factor)
        mix = merge_partial(query, partial, mix, negative_lse, self.shift)
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
        rms = key_length(mix, self._shift(eps / factor**2)) * mix.shape[-1] ** -0.5
        return (mix / rms).to(dtype).mul_(weight)

    def _read_closed(self, block: int):
        values, scores, out = self.reading[block]
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
            length = length_of_one_token(vector, self.shift)
            score = torch.dot(vector, self.site_queries[site]).item() / length + self.negative_lse[offset]
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
        values, sites, out = self.reading[block]
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
