# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The reads over depth as Triton kernels, see `attnres.set_backend`.

Every kernel reads its sources once, in whatever dtype they have, and computes in fp32. The sources of a training step
are tensors of their own, so a kernel is given a table of their addresses. Nothing is added up in an order that depends
on the run.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .norms import norm_of, rms_norm_parameters


# Where a sum goes over tokens: some for each multiprocessor of a large GPU, and as many on every other, so that all
# add up in the same order
MOST_PROGRAMS = 1024


def launch_shape(hidden_size: int) -> dict[str, int]:
    """One program holds a whole row of the hidden dimension."""
    block = triton.next_power_of_2(hidden_size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def programs_over(num_tokens: int) -> tuple[int, int]:
    """Number of programs, and how many tokens each of them takes."""
    per_program = max(1, triton.cdiv(num_tokens, MOST_PROGRAMS))
    return triton.cdiv(num_tokens, per_program), per_program


def launch(kernel, grid: tuple[int, ...], *arguments, **options):
    """Triton launches on the current device, and layers may be on several: on that of the first argument."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an address on that 16 divides: the kernels load 16 bytes at once."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    device, dtype = tensors[0].device, tensors[0].dtype
    if any(tensor.device != device or tensor.dtype != dtype for tensor in tensors):
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"The sources of a read must be of one dtype on one device, and are {kinds}.")
    pointers = [tensor.data_ptr() for tensor in tensors]
    # Out of pinned memory, as any other copy would wait for all that the GPU has still to do
    table = torch.tensor(pointers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


@triton.jit
def pointer(table, i, like):
    """The `i`th address of a table, of the kind of `like`. The compiler cannot know by itself that 16 divides it."""
    return tl.multiple_of(tl.load(table + i).to(like.dtype), 16)


@triton.jit
def rms_norm(row, weight, eps, hidden_size, like):
    """Llama's, of a row that is rounded already; rounded where the module rounds, to what `like` points to."""
    row *= tl.rsqrt(tl.sum(row * row) / hidden_size + eps)
    return (row.to(like.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)).to(like.dtype.element_ty)


@triton.jit
def score_kernel(query, source, scores, inverse_rms, eps, hidden_size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    value = tl.load(source + token * hidden_size + columns, mask=inside, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(value * value) / hidden_size + eps)
    score = inv_rms * tl.sum(value * tl.load(query + columns, mask=inside, other=0.0).to(tl.float32))
    tl.store(inverse_rms + token, inv_rms)
    tl.store(scores + token, score)


@triton.jit
def score_backward_kernel(
    grad, query, source, inverse_rms, scores, grad_source, grad_queries, num_tokens, per_program, hidden_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    wide_query = tl.load(query + columns, mask=inside, other=0.0).to(tl.float32)
    grad_query = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * per_program
    for token in range(first, tl.minimum(first + per_program, num_tokens)):
        place = token * hidden_size + columns
        value = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        inv_rms = tl.load(inverse_rms + token)
        # score = query . v / rms(v), whose derivative is query / rms - score * v / (hidden * rms^2)
        to_query = tl.load(grad + token) * inv_rms
        to_source = -to_query * inv_rms * tl.load(scores + token) / hidden_size
        total = to_query * wide_query + to_source * value
        tl.store(grad_source + place, total.to(grad_source.dtype.element_ty), mask=inside)
        grad_query += to_query * value
    # Every program has a row of its own, so that the order of the sum is fixed
    tl.store(grad_queries + tl.program_id(0) * hidden_size + columns, grad_query, mask=inside)


def score(query: torch.Tensor, source: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a source for one query, and its inverse rms, from one read of it.

    Args:
        query: folded query, `[hidden]`.
        source: `[..., hidden]`.
        eps: epsilon of the key RMSNorm.

    Returns:
        Two tensors `[..., 1]` in fp32.
    """
    source, hidden_size = source.contiguous(), source.shape[-1]
    scores = source.new_empty(*source.shape[:-1], 1, dtype=torch.float32)
    inverse_rms = torch.empty_like(scores)
    if source.numel():
        launch(
            score_kernel, (scores.numel(),), query.contiguous(), source, scores, inverse_rms, eps, hidden_size,
            **launch_shape(hidden_size),
        )  # fmt: skip
    return scores, inverse_rms


def score_backward(
    grad: torch.Tensor, query: torch.Tensor, source: torch.Tensor, inverse_rms: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of query and source, in their dtypes, from one read of the source."""
    source, hidden_size, num_tokens = source.contiguous(), source.shape[-1], scores.numel()
    grad_source = torch.empty_like(source)
    num_programs, per_program = programs_over(num_tokens)
    grad_queries = query.new_zeros(num_programs, hidden_size, dtype=torch.float32)
    if source.numel():
        launch(
            score_backward_kernel, (num_programs,),
            grad.contiguous(), query.contiguous(), source, inverse_rms, scores, grad_source, grad_queries,
            num_tokens, per_program, hidden_size, **launch_shape(hidden_size),
        )  # fmt: skip
    return grad_queries.sum(0).to(query.dtype), grad_source


@triton.jit
def weighted_sum_kernel(sources, weights, mix, num_sources, hidden_size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    place = token * hidden_size + columns
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(num_sources):
        source = pointer(sources, i, mix)
        weight = tl.load(weights + token * num_sources + i)
        total += weight * tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(mix + place, total.to(mix.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum_backward_kernel(
    sources, grad_sources, weights, grad_weights, grad_mix, num_sources, hidden_size, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    place = token * hidden_size + columns
    grad = tl.load(grad_mix + place, mask=inside, other=0.0).to(tl.float32)
    for i in range(num_sources):
        source = pointer(sources, i, grad_mix)
        grad_source = pointer(grad_sources, i, grad_mix)
        weight = tl.load(weights + token * num_sources + i)
        value = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_weights + token * num_sources + i, tl.sum(grad * value))
        tl.store(grad_source + place, (weight * grad).to(grad_mix.dtype.element_ty), mask=inside)


def weighted_sum(weights: torch.Tensor, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """As in `autograd.py`: weights `[..., sources]` in fp32, sources `[..., hidden]` of one dtype."""
    sources = [in_one_piece(source) for source in sources]
    mix, hidden_size = torch.empty_like(sources[0]), sources[0].shape[-1]
    if mix.numel():
        launch(
            weighted_sum_kernel,
            (weights[..., 0].numel(),),
            addresses(sources),
            weights.contiguous(),
            mix,
            len(sources),
            hidden_size,
            **launch_shape(hidden_size),
        )
    return mix


def weighted_sum_backward(
    grad: torch.Tensor, weights: torch.Tensor, sources: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of the weights and of the sources, from one read of the sources."""
    sources = [in_one_piece(source) for source in sources]
    grad_sources, grad_weights = [torch.empty_like(source) for source in sources], torch.empty_like(weights)
    hidden_size = grad.shape[-1]
    if grad.numel():
        launch(
            weighted_sum_backward_kernel,
            (weights[..., 0].numel(),),
            addresses(sources),
            addresses(grad_sources),
            weights.contiguous(),
            grad_weights,
            grad.to(sources[0].dtype).contiguous(),
            len(sources),
            hidden_size,
            **launch_shape(hidden_size),
        )
    return grad_weights, *grad_sources


@triton.jit
def read_kernel(
    query, scores, sources, norm_weight, normed, weights, score_of_partial, inverse_rms,
    norm_eps, eps, num_closed, hidden_size, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    place = token * hidden_size + columns
    partial = pointer(sources, num_closed, normed)
    value = tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(value * value) / hidden_size + eps)
    score = inv_rms * tl.sum(value * tl.load(query + columns, mask=inside, other=0.0).to(tl.float32))
    tl.store(inverse_rms + token, inv_rms)
    tl.store(score_of_partial + token, score)

    closed = tl.arange(0, SOURCES)
    is_closed = closed < num_closed
    closed_scores = tl.load(scores + token * num_closed + closed, mask=is_closed, other=float("-inf"))
    largest = tl.maximum(tl.max(closed_scores), score)
    exponentials, exponential = tl.exp(closed_scores - largest), tl.exp(score - largest)
    normaliser = tl.sum(exponentials) + exponential
    own_weights = weights + token * (num_closed + 1)
    tl.store(own_weights + closed, exponentials / normaliser, mask=is_closed)
    tl.store(own_weights + num_closed, exponential / normaliser)
    mix = exponential / normaliser * value
    for i in range(num_closed):
        source = pointer(sources, i, normed)
        weight = tl.exp(tl.load(scores + token * num_closed + i) - largest) / normaliser
        mix += weight * tl.load(source + place, mask=inside, other=0.0).to(tl.float32)

    mix = mix.to(normed.dtype.element_ty).to(tl.float32)
    norm = tl.load(norm_weight + columns, mask=inside, other=0.0)
    tl.store(normed + place, rms_norm(mix, norm, norm_eps, hidden_size, normed), mask=inside)


@triton.jit
def softmax_backward(weight, grad_above_mean, given_grad, HAS_GRAD_WEIGHTS: tl.constexpr):
    if HAS_GRAD_WEIGHTS:
        grad_above_mean += tl.load(given_grad)
    return weight * grad_above_mean


@triton.jit
def read_backward_kernel(
    grad_normed, grad_weights, query, norm_weight, weights, score_of_partial, inverse_rms, sources,
    grad_sources, grad_scores, grad_queries, grad_norm_weights,
    norm_eps, num_tokens, per_program, num_closed, hidden_size,
    HAS_GRAD_WEIGHTS: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    dtype = grad_normed.dtype.element_ty
    wide_query = tl.load(query + columns, mask=inside, other=0.0).to(tl.float32)
    wide_norm_weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    grad_query = tl.zeros([BLOCK], tl.float32)
    grad_norm_weight = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * per_program
    for token in range(first, tl.minimum(first + per_program, num_tokens)):
        place = token * hidden_size + columns
        own_weights = weights + token * (num_closed + 1)
        # The mix and its norm again
        mix = tl.zeros([BLOCK], tl.float32)
        for i in range(num_closed + 1):
            source = pointer(sources, i, grad_normed)
            mix += tl.load(own_weights + i) * tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        rounded = mix.to(dtype).to(tl.float32)
        inv_rms = tl.rsqrt(tl.sum(rounded * rounded) / hidden_size + norm_eps)
        normalised = rounded * inv_rms

        grad = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        grad_norm_weight += grad * normalised.to(dtype).to(tl.float32)
        grad = (grad * wide_norm_weight).to(dtype).to(tl.float32)
        grad_mix = inv_rms * (grad - normalised * (tl.sum(grad * normalised) / hidden_size))
        grad_mix = grad_mix.to(dtype).to(tl.float32)

        # Softmax: the gradient of a score is weight * (gradient of the weight - the mean of these)
        own_grads = grad_weights + token * (num_closed + 1)
        mean = tl.sum(grad_mix * mix)
        if HAS_GRAD_WEIGHTS:
            given = tl.arange(0, SOURCES)
            is_source = given <= num_closed
            given_grads = tl.load(own_grads + given, mask=is_source, other=0.0)
            mean += tl.sum(given_grads * tl.load(own_weights + given, mask=is_source, other=0.0))
        for i in range(num_closed):
            source = pointer(sources, i, grad_normed)
            grad_source = pointer(grad_sources, i, grad_normed)
            weight = tl.load(own_weights + i)
            value = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
            grad_score = softmax_backward(weight, tl.sum(grad_mix * value) - mean, own_grads + i, HAS_GRAD_WEIGHTS)
            tl.store(grad_scores + token * num_closed + i, grad_score)
            tl.store(grad_source + place, (weight * grad_mix).to(dtype), mask=inside)

        # The partial sum is in the mix and in its own score, see `score_backward_kernel`
        partial = pointer(sources, num_closed, grad_normed)
        grad_partial = pointer(grad_sources, num_closed, grad_normed)
        weight = tl.load(own_weights + num_closed)
        value = tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
        to_query = softmax_backward(weight, tl.sum(grad_mix * value) - mean, own_grads + num_closed, HAS_GRAD_WEIGHTS)
        inv_rms = tl.load(inverse_rms + token)
        to_query *= inv_rms
        to_source = -to_query * inv_rms * tl.load(score_of_partial + token) / hidden_size
        total = weight * grad_mix + to_query * wide_query + to_source * value
        tl.store(grad_partial + place, total.to(dtype), mask=inside)
        grad_query += to_query * value
    own_row = tl.program_id(0) * hidden_size + columns
    tl.store(grad_queries + own_row, grad_query, mask=inside)
    tl.store(grad_norm_weights + own_row, grad_norm_weight, mask=inside)


def read(
    query: torch.Tensor,
    scores: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    sources: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """A read of closed sources and a partial sum, and the RMSNorm behind it, in one pass over them.

    Args:
        query: folded query, `[hidden]`.
        scores: of the closed sources, `[..., closed]`, in fp32.
        norm_weight, norm_eps: of Llama's RMSNorm.
        eps: epsilon of the key RMSNorm.
        sources: the closed ones and last the partial sum, each `[..., hidden]`.

    Returns:
        The normed mix, `[..., hidden]`, the weights, `[..., sources]`, and the score and inverse rms of the partial
        sum, `[..., 1]`, all but the first in fp32.
    """
    sources = [in_one_piece(source) for source in sources]
    normed, hidden_size, num_closed = torch.empty_like(sources[0]), sources[0].shape[-1], len(sources) - 1
    weights = scores.new_empty(*normed.shape[:-1], num_closed + 1)
    score_of_partial, inverse_rms = (scores.new_empty(*normed.shape[:-1], 1) for _ in range(2))
    if normed.numel():
        launch(
            read_kernel, (inverse_rms.numel(),),
            query.contiguous(), scores.contiguous(), addresses(sources), norm_weight, normed, weights,
            score_of_partial, inverse_rms, norm_eps, eps, num_closed, hidden_size,
            SOURCES=triton.next_power_of_2(num_closed + 1), **launch_shape(hidden_size),
        )  # fmt: skip
    return normed, weights, score_of_partial, inverse_rms


def read_backward(
    grad: torch.Tensor,
    grad_weights: torch.Tensor | None,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    weights: torch.Tensor,
    score_of_partial: torch.Tensor,
    inverse_rms: torch.Tensor,
    sources: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, scores, norm weight and every source of `read`, from its results and those of these."""
    sources = [in_one_piece(source) for source in sources]
    grad_sources = [torch.empty_like(source) for source in sources]
    num_tokens, num_closed, hidden_size = inverse_rms.numel(), len(sources) - 1, query.shape[0]
    grad_scores = weights.new_empty(*weights.shape[:-1], num_closed)
    num_programs, per_program = programs_over(num_tokens)
    grad_queries, grad_norm_weights = weights.new_zeros(2, num_programs, hidden_size).unbind(0)
    if grad.numel():
        launch(
            read_backward_kernel, (num_programs,),
            grad.to(sources[0].dtype).contiguous(), weights if grad_weights is None else grad_weights.contiguous(),
            query.contiguous(), norm_weight, weights, score_of_partial, inverse_rms, addresses(sources),
            addresses(grad_sources), grad_scores, grad_queries, grad_norm_weights,
            norm_eps, num_tokens, per_program, num_closed, hidden_size,
            HAS_GRAD_WEIGHTS=grad_weights is not None, SOURCES=triton.next_power_of_2(num_closed + 1),
            **launch_shape(hidden_size),
        )  # fmt: skip
    sums = grad_queries.sum(0).to(query.dtype), grad_scores, grad_norm_weights.sum(0).to(norm_weight.dtype)
    return *sums, *grad_sources


@triton.jit
def read_closed_kernel(
    values, scores, mixes, negative_lse, token_stride, mixes_token_stride, scores_token_stride, scores_source_stride,
    num_sources, num_sites, hidden_size, SITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden_size
    sites = tl.arange(0, SITES)
    is_site = sites < num_sites
    total = tl.zeros([SITES, BLOCK], tl.float32)
    largest = tl.full([SITES], float("-inf"), tl.float32)
    normaliser = tl.zeros([SITES], tl.float32)
    for i in range(num_sources):
        score = tl.load(
            scores + token * scores_token_stride + i * scores_source_stride + sites, mask=is_site, other=0.0
        )
        value = tl.load(values + token * token_stride + i * hidden_size + columns, mask=inside, other=0.0)
        new_largest = tl.maximum(largest, score)
        shrink, weight = tl.exp(largest - new_largest), tl.exp(score - new_largest)
        total = total * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
        normaliser = normaliser * shrink + weight
        largest = new_largest
    place = token * mixes_token_stride + sites[:, None] * hidden_size + columns[None, :]
    tl.store(mixes + place, total / normaliser[:, None], mask=is_site[:, None] & inside[None, :])
    if tl.program_id(1) == 0:
        tl.store(negative_lse + token * num_sites + sites, -(largest + tl.log(normaliser)), mask=is_site)


def read_closed(
    values: torch.Tensor, scores: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in `block_cache.py`: all queries of a block against the closed sources, which are read once.

    Args:
        values: `[tokens, sources, hidden]`, contiguous within a token.
        scores: `[tokens, sites, sources]`, in fp32, the sites side by side in memory.
        out: where to write the mixes, `[tokens, sites, hidden]`, contiguous within a token.
    """
    (tokens, num_sources, hidden_size), num_sites = values.shape, scores.shape[1]
    mixes = scores.new_empty(tokens, num_sites, hidden_size) if out is None else out
    negative_lse = scores.new_empty(tokens, num_sites)
    sites = triton.next_power_of_2(num_sites)
    # 8192 sums in fp32 fit the registers of a program
    block = min(triton.next_power_of_2(hidden_size), max(16, 8192 // sites))
    if tokens:
        launch(
            read_closed_kernel, (tokens, triton.cdiv(hidden_size, block)),
            values, scores, mixes, negative_lse,
            values.stride(0), mixes.stride(0), scores.stride(0), scores.stride(2),
            num_sources, num_sites, hidden_size, SITES=sites, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return mixes, negative_lse


@triton.jit
def merge_kernel(
    query, partial, mix, negative_lse, norm_weight, merged,
    mix_stride, lse_stride, eps_norm, factor, norm_eps, hidden_size,
    HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    place = token * hidden_size + columns
    value = tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(value * value) + tl.load(eps_norm) * tl.load(eps_norm))
    score = tl.sum(value * tl.load(query + columns, mask=inside, other=0.0)) / length
    alpha = tl.sigmoid(score + tl.load(negative_lse + token * lse_stride))
    closed = tl.load(mix + token * mix_stride + columns, mask=inside, other=0.0)
    total = ((closed + alpha * (value - closed)) * factor).to(merged.dtype.element_ty)
    if HAS_NORM:
        norm = tl.load(norm_weight + columns, mask=inside, other=0.0)
        total = rms_norm(total.to(tl.float32), norm, norm_eps, hidden_size, merged)
    tl.store(merged + place, total, mask=inside)


def merge(
    query: torch.Tensor,
    partial: torch.Tensor,
    mix: torch.Tensor,
    negative_lse: torch.Tensor,
    eps_norm: torch.Tensor,
    norm: nn.Module | None,
    factor: int = 1,
) -> torch.Tensor:
    """Phase 2 in one pass: the score of the partial sum, the merge, and the norm behind it.

    Args:
        query, partial, mix, negative_lse, eps_norm: as of `block_cache.merge_partial`.
        norm, factor: as of `BlockCache.read`.

    Returns:
        The normed mix, of the shape of `partial`.
    """
    partial = partial.contiguous()
    merged, hidden_size = torch.empty_like(partial), partial.shape[-1]
    mix, negative_lse = mix.flatten(0, -2), negative_lse.flatten()
    norm_parameters = rms_norm_parameters(norm, partial.dtype)
    weight, eps = norm_parameters or (query, 0.0)
    if merged.numel():
        launch(
            merge_kernel, (len(mix),),
            query, partial, mix, negative_lse, weight, merged,
            mix.stride(0), negative_lse.stride(0), eps_norm, float(factor), eps, hidden_size,
            HAS_NORM=norm_parameters is not None, **launch_shape(hidden_size),
        )  # fmt: skip
    return merged if norm is None or norm_parameters else norm_of(norm, merged)


@torch.inference_mode(False)
def try_on(device: torch.device, dtype: torch.dtype):
    """Run every kernel on a few numbers.

    Raises:
        ArithmeticError: if one computes something else than its definition.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    # 2 tokens, 3 closed sources, 2 sites, and a hidden size that is no power of 2
    numbers = {"closed": random(2, 3, 96), "partial": random(2, 96), "grad": random(2, 96), "norm_weight": random(96)}
    wide = {"scores": (2, 3, 2), "query": (96,), "grad_scores": (2, 1), "grad_weights": (2, 4), "weights": (2, 4)}
    numbers |= {name: random(*shape, dtype=torch.float32) for name, shape in wide.items()}
    numbers |= {
        "scores": numbers["scores"].mT,
        "query": numbers["query"] / 10,
        "weights": numbers["weights"].softmax(-1),
    }
    actual, expected = _by_kernels(**numbers), _by_definition(**numbers)
    # in fp32 sums of 96 products, in a half precision the rounding of the result and of what it is made of
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    for name, results in actual.items():
        for result, definition in zip(results, expected[name], strict=True):
            error = (result.double() - definition).abs().max() / definition.abs().max()
            if not error <= tolerance:
                raise ArithmeticError(f"`{name}` is off by {error:.1e}")


def _by_kernels(closed, partial, grad, norm_weight, scores, query, grad_scores, grad_weights, weights):
    sources, eps_norm = [*closed.unbind(1), partial], query.new_ones(())
    mixes, negative_lse = read_closed(closed, scores)
    score_of_partial, inverse_rms = score(query, partial, 1.0)
    saved = read(query, scores[:, 0], norm_weight, 1.0, 1.0, sources)
    norm = LlamaRMSNorm(96, eps=1.0).to(partial.device, partial.dtype)
    norm.weight.data.copy_(norm_weight)
    return {
        "score": [score_of_partial, inverse_rms],
        "score_backward": score_backward(grad_scores, query, partial, inverse_rms, score_of_partial),
        "weighted_sum": [weighted_sum(weights, sources)],
        "weighted_sum_backward": weighted_sum_backward(grad, weights, sources),
        "read": saved,
        "read_backward": read_backward(grad, grad_weights, query, norm_weight, 1.0, *saved[1:], sources),
        "read_closed": [mixes, negative_lse],
        "merge": [merge(query, partial, mixes[:, 0], negative_lse[:, :1], eps_norm, norm, factor=3)],
    }


@torch.enable_grad()
def _by_definition(closed, partial, grad, norm_weight, scores, query, grad_scores, grad_weights, weights):
    query, scores, weights, norm_weight, *sources = (
        tensor.double().requires_grad_()
        for tensor in (query, scores, weights, norm_weight, *closed.unbind(1), partial)
    )
    values, partial = torch.stack(sources, dim=1), sources[-1]

    def normed(mix: torch.Tensor) -> torch.Tensor:
        return mix * (mix.square().mean(-1, keepdim=True) + 1).rsqrt() * norm_weight

    inverse_rms = (partial.square().mean(-1, keepdim=True) + 1).rsqrt()
    score_of_partial = partial @ query[:, None] * inverse_rms
    mix = (weights[:, None] @ values)[:, 0]
    read_weights = torch.cat([scores[:, 0], score_of_partial], dim=-1).softmax(-1)
    normed_mix = normed((read_weights[:, None] @ values)[:, 0])
    shifted = partial @ query[:, None] / (partial.square().sum(-1, keepdim=True) + 1).sqrt()
    merge_weights = torch.cat([scores[:, 0], shifted], dim=-1).softmax(-1)
    grad, grad_scores, grad_weights = grad.double(), grad_scores.double(), grad_weights.double()
    leaves = [query, scores, norm_weight, *sources]
    grads = torch.autograd.grad([normed_mix, read_weights], leaves, [grad, grad_weights], retain_graph=True)
    return {
        "score": [score_of_partial, inverse_rms],
        "score_backward": torch.autograd.grad(score_of_partial, [query, partial], grad_scores, retain_graph=True),
        "weighted_sum": [mix],
        "weighted_sum_backward": torch.autograd.grad(mix, [weights, *sources], grad),
        "read": [normed_mix, read_weights, score_of_partial, inverse_rms],
        "read_backward": [grads[0], grads[1][:, 0], *grads[2:]],
        "read_closed": [scores.softmax(-1) @ values[:, :3], -scores.logsumexp(-1)],
        "merge": [normed(3 * (merge_weights[:, None] @ values)[:, 0])],
    }
