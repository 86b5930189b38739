# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The reads over depth in two phases as Triton kernels, see `attnres.set_backend`.

Phase 1 reads the closed sources once for all sites of a chunk, phase 2 merges at each what has been written since.
Every kernel computes in fp32, from sources in whatever dtype they have. The sources of a training step are tensors of
their own, so a kernel is given a table of their addresses. Nothing is added up in an order that depends on the run.

A head is a slice of the hidden dimension, which tiles have as `[heads, width]`, both filled up to a power of 2.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


# Where a sum goes over tokens: some for each multiprocessor of a large GPU, and as many on every other, so that all
# add up in the same order
MOST_PROGRAMS = 1024

# Numbers to a program that fit the registers of a multiprocessor, with what else it holds: of the queries and mixes of
# a group of sites, of the gradients of their mixes alone, and of some columns of queries and both gradients
MOST_OF_FORWARD, MOST_OF_SCORES, MOST_OF_COLUMNS = 16384, 32768, 4096


def row_shape(hidden_size: int, num_heads: int, dtype: torch.dtype) -> dict[str, int]:
    """One program holds a whole row of the hidden dimension.

    While one source is computed with, the next one is loaded, and the address of that behind it: three stages. Two
    sources are then in shared memory, so these are no longer than smaller GPUs have room for.
    """
    heads, width = triton.next_power_of_2(num_heads), triton.next_power_of_2(hidden_size // num_heads)
    stages = 3 if heads * width * dtype.itemsize <= 16384 else 1
    return {"HEADS": heads, "WIDTH": width, "STAGES": stages, "num_warps": min(16, max(1, heads * width // 256))}


def sites_shape(num_sites: int, hidden_size: int, num_heads: int, dtype: torch.dtype, most: int) -> dict[str, int]:
    """One program holds whole rows of a group of sites."""
    shape = row_shape(hidden_size, num_heads, dtype)
    row = shape["HEADS"] * shape["WIDTH"]
    sites = min(triton.next_power_of_2(num_sites), max(1, most // row))
    return shape | {"SITES": sites, "num_warps": min(16, max(1, sites * row // 1024))}


def columns_shape(num_sites: int, hidden_size: int, num_heads: int) -> dict[str, int]:
    """One program holds some columns of one head, of all sites."""
    sites, width = triton.next_power_of_2(num_sites), triton.next_power_of_2(hidden_size // num_heads)
    block = min(width, max(16, MOST_OF_COLUMNS // sites))
    return {"SITES": sites, "BLOCK": block, "STAGES": 3, "num_warps": min(16, max(1, sites * block // 1024))}


def programs_over(num_tokens: int, parts: int = 1) -> tuple[int, int]:
    """Number of programs, and how many tokens each of them takes, where `parts` programs share these tokens."""
    per_program = max(1, triton.cdiv(num_tokens, max(1, MOST_PROGRAMS // parts)))
    return triton.cdiv(num_tokens, per_program), per_program


def launch(kernel, grid: tuple[int, ...], *arguments, **options):
    """Triton launches on the current device, and layers may be on several: on that of the first argument."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an address on that 16 divides: the kernels load 16 bytes at once."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def rows_of(sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Sources `[..., hidden]` as `[tokens, hidden]`, and the stride between tokens, which all have in common."""
    device, dtype, hidden_size = sources[0].device, sources[0].dtype, sources[0].shape[-1]
    if any(source.device != device or source.dtype != dtype for source in sources):
        kinds = ", ".join(f"{source.dtype} on {source.device}" for source in sources)
        raise ValueError(f"The sources of a read must be of one dtype on one device, and are {kinds}.")
    rows = [source.reshape(-1, hidden_size) for source in sources]
    stride = rows[0].stride(0)
    if all(row.stride() == (stride, 1) and row.data_ptr() % 16 == 0 for row in rows):
        return rows, stride
    return [in_one_piece(row) for row in rows], hidden_size


def addresses(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """A table for `pointer`, with a zero for `None`."""
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    # Out of pinned memory, as any other copy would wait for all that the GPU has still to do
    table = torch.tensor(pointers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


@triton.jit
def pointer(table, i, like):
    """The `i`th address of a table, of the kind of `like`. The compiler cannot know by itself that 16 divides it."""
    return tl.multiple_of(tl.load(table + i).to(like.dtype), 16)


@triton.jit
def columns_of(num_heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where in a row the numbers of a tile `[heads, width]` are, and which of them are in it."""
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    return heads * width + columns, (heads < num_heads) & (columns < width)


@triton.jit
def row_of(table, i, like, start, columns, inside):
    return tl.load(pointer(table, i, like) + start + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def weights_of(scores, states, WEIGHTS: tl.constexpr):
    if WEIGHTS == "sigmoid":
        return tl.sigmoid(scores)
    else:
        return tl.exp(scores - states)


@triton.jit
def rms_norm(row, weight, eps, hidden_size, like):
    """Llama's, of a row that is rounded already; rounded where the module rounds, to what `like` points to."""
    row *= tl.rsqrt(tl.sum(row * row) / hidden_size + eps)
    return (row.to(like.dtype.element_ty).to(tl.float32) * weight).to(like.dtype.element_ty)


@triton.jit
def read_closed_kernel(
    queries, table, like, mixes, states, scores, inverse_rms, eps, num_tokens, per_program, token_stride,
    num_sources, num_sites, num_heads, width,
    WEIGHTS: tl.constexpr, SITES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    hidden_size = num_heads * width
    columns, inside = columns_of(num_heads, width, HEADS, WIDTH)
    sites = tl.program_id(0) * SITES + tl.arange(0, SITES).to(tl.int64)
    heads = tl.arange(0, HEADS)
    is_number = (sites < num_sites)[:, None] & (heads < num_heads)[None, :]
    is_tile = (sites < num_sites)[:, None, None] & inside[None]
    place = (sites * hidden_size)[:, None, None] + columns[None]
    wide_queries = tl.load(queries + place, mask=is_tile, other=0.0).to(tl.float32)
    first = tl.program_id(1).to(tl.int64) * per_program
    for token in range(first, tl.minimum(first + per_program, num_tokens)):
        total = tl.zeros([SITES, HEADS, WIDTH], tl.float32)
        largest = tl.full([SITES, HEADS], 0.0 if WEIGHTS == "softmax1" else float("-inf"), tl.float32)
        normaliser = tl.full([SITES, HEADS], 1.0 if WEIGHTS == "softmax1" else 0.0, tl.float32)
        for i in tl.range(num_sources, num_stages=STAGES):
            value = row_of(table, i, like, token * token_stride, columns, inside)
            inv_rms = tl.rsqrt(tl.sum(value * value) / hidden_size + eps)
            score = tl.sum(value[None] * wide_queries, 2) * inv_rms
            if WEIGHTS == "sigmoid":
                total += tl.sigmoid(score)[:, :, None] * value[None]
            else:
                new_largest = tl.maximum(largest, score)
                shrink, weight = tl.exp(largest - new_largest), tl.exp(score - new_largest)
                total = total * shrink[:, :, None] + weight[:, :, None] * value[None]
                normaliser = normaliser * shrink + weight
                largest = new_largest
            number = token * num_sources + i
            own_scores = scores + (number * num_sites + sites[:, None]) * num_heads + heads[None, :]
            tl.store(own_scores, score, mask=is_number)
            tl.store(inverse_rms + number, inv_rms, mask=tl.program_id(0) == 0)
        rows = sites * num_tokens + token
        if WEIGHTS != "sigmoid":
            total /= normaliser[:, :, None]
            state = largest + tl.log(normaliser)
            tl.store(states + rows[:, None] * num_heads + heads[None, :], state, mask=is_number)
        tl.store(mixes + (rows * hidden_size)[:, None, None] + columns[None], total, mask=is_tile)


def read_closed(
    queries: torch.Tensor, sources: Sequence[torch.Tensor], eps: float, num_heads: int = 1, weights: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Phase 1: the queries of all sites of a chunk against the closed sources, which are read once.

    Args:
        queries: folded queries, `[sites, hidden]`.
        sources: each `[..., hidden]`.
        eps: epsilon of the key RMSNorm.
        weights: `softmax`, `softmax1` or `sigmoid`.

    Returns:
        In fp32 the mixes, `[sites, ..., hidden]`, the states, `[sites, ..., heads]`, which are the log-sum-exp of the
        scores and for a sigmoid `None`, and for the backward pass the scores, `[..., sources, sites, heads]`, and the
        inverse rms of the sources, `[..., sources]`.
    """
    rows, token_stride = rows_of(sources)
    (num_sites, hidden_size), (*shape, _), num_sources = queries.shape, sources[0].shape, len(sources)
    mixes = queries.new_empty(num_sites, *shape, hidden_size, dtype=torch.float32)
    states = None if weights == "sigmoid" else mixes.new_empty(num_sites, *shape, num_heads)
    scores, inverse_rms = (
        mixes.new_empty(*shape, num_sources, num_sites, num_heads),
        mixes.new_empty(*shape, num_sources),
    )
    options = sites_shape(num_sites, hidden_size, num_heads, rows[0].dtype, MOST_OF_FORWARD)
    groups, num_tokens = triton.cdiv(num_sites, options["SITES"]), len(rows[0])
    num_programs, per_program = programs_over(num_tokens, groups)
    if mixes.numel():
        launch(
            read_closed_kernel, (groups, num_programs),
            queries.contiguous(), addresses(rows, mixes.device), rows[0], mixes, states, scores, inverse_rms, eps,
            num_tokens, per_program, token_stride, num_sources, num_sites, num_heads, hidden_size // num_heads,
            WEIGHTS=weights, **options,
        )  # fmt: skip
    return mixes, states, scores, inverse_rms


@triton.jit
def closed_scores_backward_kernel(
    table, like, states, scores, inverse_rms, to_queries, to_sources, num_tokens, token_stride,
    num_sources, num_sites, num_heads, width,
    WEIGHTS: tl.constexpr, SOURCES: tl.constexpr, SITES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of a token's scores: by how much its sources are in those of the queries and of themselves."""
    token = tl.program_id(0).to(tl.int64)
    hidden_size = num_heads * width
    columns, inside = columns_of(num_heads, width, HEADS, WIDTH)
    sources, heads = tl.arange(0, SOURCES), tl.arange(0, HEADS)
    numbers, is_source = token * num_sources + sources, sources < num_sources
    inv_rms = tl.load(inverse_rms + numbers, mask=is_source, other=0.0)
    through_norm = tl.zeros([SOURCES], tl.float32)
    for first in range(0, num_sites, SITES):
        sites = first + tl.arange(0, SITES)
        is_site = sites < num_sites
        grads = tl.load(table + 2 * num_sources + sites, mask=is_site, other=0)
        grad = tl.load(
            tl.multiple_of(grads.to(scores.dtype), 16)[:, None, None] + token * hidden_size + columns[None],
            mask=(grads != 0)[:, None, None] & inside[None], other=0.0,
        )  # fmt: skip
        grad_weights = tl.zeros([SOURCES, SITES, HEADS], tl.float32)
        for i in tl.range(num_sources, num_stages=STAGES):
            value = row_of(table, i, like, token * token_stride, columns, inside)
            product = tl.sum(value[None] * grad, 2)
            grad_weights = tl.where((sources == i)[:, None, None], product[None], grad_weights)

        is_number = is_site[:, None] & (heads < num_heads)[None, :]
        is_score = is_source[:, None, None] & is_number[None]
        place = (numbers[:, None, None] * num_sites + sites[None, :, None]) * num_heads + heads[None, None, :]
        score = tl.load(scores + place, mask=is_score, other=0.0)
        if WEIGHTS == "sigmoid":
            weight = tl.sigmoid(score)
            grad_scores = grad_weights * weight * (1 - weight)
        else:
            rows = sites.to(tl.int64)[:, None] * num_tokens + token
            state = tl.load(states + rows * num_heads + heads[None, :], mask=is_number, other=0.0)
            grads = tl.load(table + 2 * num_sources + num_sites + sites, mask=is_site, other=0)
            grad_state = tl.load(
                grads.to(scores.dtype)[:, None] + token * num_heads + heads[None, :],
                mask=(grads != 0)[:, None] & is_number, other=0.0,
            )  # fmt: skip
            weight = tl.where(is_score, tl.exp(score - state[None]), 0.0)
            mean = tl.sum(weight * grad_weights, 0)
            grad_scores = weight * (grad_weights + (grad_state - mean)[None])
        tl.store(to_queries + place, grad_scores * inv_rms[:, None, None], mask=is_score)
        through_norm += tl.sum(tl.sum(grad_scores * score, 2), 1)
    # score = query . v / rms(v), whose derivative is query / rms - score * v / (hidden * rms^2)
    tl.store(to_sources + numbers, -through_norm * inv_rms * inv_rms / hidden_size, mask=is_source)


@triton.jit
def read_closed_backward_kernel(
    queries, table, like, states, scores, to_queries, to_sources, grad_queries, num_tokens, per_program, token_stride,
    num_sources, num_sites, num_heads, width, blocks,
    WEIGHTS: tl.constexpr, SITES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From the gradients of the scores on every column is by itself: some of one head, and all sites."""
    hidden_size, head = num_heads * width, tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    columns += head * width
    sites = tl.arange(0, SITES)
    is_site = sites < num_sites
    place, is_tile = sites[:, None] * hidden_size + columns[None, :], is_site[:, None] & inside[None, :]
    wide_queries = tl.load(queries + place, mask=is_tile, other=0.0).to(tl.float32)
    grads = tl.load(table + 2 * num_sources + sites, mask=is_site, other=0)
    rows = tl.multiple_of(grads.to(scores.dtype), 16)[:, None] + columns[None, :]
    is_grad = (grads != 0)[:, None] & inside[None, :]
    grad_query = tl.zeros([SITES, BLOCK], tl.float32)
    first = tl.program_id(1).to(tl.int64) * per_program
    for token in range(first, tl.minimum(first + per_program, num_tokens)):
        grad = tl.load(rows + token * hidden_size, mask=is_grad, other=0.0)
        state = tl.zeros([SITES], tl.float32)
        if WEIGHTS != "sigmoid":
            own_state = (sites.to(tl.int64) * num_tokens + token) * num_heads + head
            state = tl.load(states + own_state, mask=is_site, other=0.0)
        for i in tl.range(num_sources, num_stages=STAGES):
            number = token * num_sources + i
            own_scores = (number * num_sites + sites) * num_heads + head
            weight = weights_of(tl.load(scores + own_scores, mask=is_site, other=0.0), state, WEIGHTS)
            to_query = tl.load(to_queries + own_scores, mask=is_site, other=0.0)
            value = row_of(table, i, like, token * token_stride, columns, inside)
            grad_value = tl.sum(weight[:, None] * grad + to_query[:, None] * wide_queries, 0)
            grad_value += tl.load(to_sources + number) * value
            grad_source = pointer(table, num_sources + i, like) + token * hidden_size
            tl.store(grad_source + columns, grad_value.to(like.dtype.element_ty), mask=inside)
            grad_query += to_query[:, None] * value[None, :]
    # Every program has a row of its own, so that the order of the sum is fixed
    tl.store(grad_queries + tl.program_id(1).to(tl.int64) * num_sites * hidden_size + place, grad_query, mask=is_tile)


def read_closed_backward(
    grad_mixes: Sequence[torch.Tensor | None],
    grad_states: Sequence[torch.Tensor | None],
    queries: torch.Tensor,
    sources: Sequence[torch.Tensor],
    states: torch.Tensor | None,
    scores: torch.Tensor,
    inverse_rms: torch.Tensor,
    num_heads: int = 1,
    weights: str = "softmax",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of `read_closed`, from its results and those of them.

    Args:
        grad_mixes: of every site, `[..., hidden]` or `None`.
        grad_states: of every site, `[..., heads]` or `None`.

    Returns:
        Those of the queries, `[sites, hidden]` in fp32, and of every source in its dtype.
    """
    rows, token_stride = rows_of(sources)
    grad_sources = [source.new_empty(source.shape) for source in sources]
    (num_sites, hidden_size), num_sources, num_tokens = queries.shape, len(sources), len(rows[0])
    grads = [None if grad is None else in_one_piece(grad.float()) for grad in (*grad_mixes, *grad_states)]
    options = columns_shape(num_sites, hidden_size, num_heads)
    width = hidden_size // num_heads
    blocks = triton.cdiv(width, options["BLOCK"])
    num_programs, per_program = programs_over(num_tokens, num_heads * blocks)
    grad_queries = scores.new_empty(num_programs, num_sites, hidden_size)
    if scores.numel():
        to_queries, to_sources = torch.empty_like(scores), torch.empty_like(inverse_rms)
        table = addresses([*rows, *grad_sources, *grads], scores.device)
        launch(
            closed_scores_backward_kernel, (num_tokens,),
            table, rows[0], states, scores, inverse_rms, to_queries, to_sources, num_tokens, token_stride,
            num_sources, num_sites, num_heads, width, WEIGHTS=weights, SOURCES=triton.next_power_of_2(num_sources),
            **sites_shape(num_sites, hidden_size, num_heads, rows[0].dtype, MOST_OF_SCORES),
        )  # fmt: skip
        launch(
            read_closed_backward_kernel, (num_heads * blocks, num_programs),
            queries.contiguous(), table, rows[0], states, scores, to_queries, to_sources, grad_queries,
            num_tokens, per_program, token_stride, num_sources, num_sites, num_heads, width, blocks,
            WEIGHTS=weights, **options,
        )  # fmt: skip
    return grad_queries.sum(0), grad_sources


@triton.jit
def merged(
    query, mix, state, table, like, start, columns, inside, eps, num_local, hidden_size,
    HAS_MIX: tl.constexpr, WEIGHTS: tl.constexpr, LOCAL: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The merge of a token, `[heads, width]`, the state with it, `[heads]`, and of the local sources the scores,
    `[local, heads]`, and the inverse rms, `[local]`.
    """
    sources = tl.arange(0, LOCAL)
    scores, inverse_rms = tl.zeros([LOCAL, HEADS], tl.float32), tl.zeros([LOCAL], tl.float32)
    normaliser = tl.full([HEADS], 1.0 if HAS_MIX or WEIGHTS == "softmax1" else 0.0, tl.float32)
    for i in tl.range(num_local, num_stages=STAGES):
        value = row_of(table, i, like, start, columns, inside)
        inv_rms = tl.rsqrt(tl.sum(value * value) / hidden_size + eps)
        score = tl.sum(value * query, 1) * inv_rms
        if WEIGHTS == "sigmoid":
            mix += tl.sigmoid(score)[:, None] * value
        else:
            largest = tl.maximum(state, score)
            shrink, weight = tl.exp(state - largest), tl.exp(score - largest)
            mix = mix * shrink[:, None] + weight[:, None] * value
            normaliser = normaliser * shrink + weight
            state = largest
        scores = tl.where((sources == i)[:, None], score[None, :], scores)
        inverse_rms = tl.where(sources == i, inv_rms, inverse_rms)
    if WEIGHTS != "sigmoid":
        mix /= normaliser[:, None]
        state += tl.log(normaliser)
    return mix, state, scores, inverse_rms


@triton.jit
def closed_of(
    mix, state, token, columns, inside, num_heads, hidden_size,
    HAS_MIX: tl.constexpr, WEIGHTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What phase 1 hands on for a token: mix and state. Without it nothing, and `softmax1` has a score of zero."""
    heads = tl.arange(0, HEADS)
    own_mix = tl.zeros([HEADS, WIDTH], tl.float32)
    own_state = tl.full([HEADS], float("-inf") if WEIGHTS == "softmax" and not HAS_MIX else 0.0, tl.float32)
    if HAS_MIX:
        own_mix = tl.load(mix + token * hidden_size + columns, mask=inside, other=0.0)
        if WEIGHTS != "sigmoid":
            own_state = tl.load(state + token * num_heads + heads, mask=heads < num_heads, other=0.0)
    return own_mix, own_state


@triton.jit
def merge_kernel(
    query, mix, state, table, like, norm_weight, result, eps, norm_eps, factor, query_stride, token_stride,
    num_local, num_heads, width,
    HAS_MIX: tl.constexpr, HAS_NORM: tl.constexpr, WEIGHTS: tl.constexpr,
    LOCAL: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token, hidden_size = tl.program_id(0).to(tl.int64), num_heads * width
    columns, inside = columns_of(num_heads, width, HEADS, WIDTH)
    wide_query = tl.load(query + token * query_stride + columns, mask=inside, other=0.0).to(tl.float32)
    own_mix, own_state = closed_of(
        mix, state, token, columns, inside, num_heads, hidden_size, HAS_MIX, WEIGHTS, HEADS, WIDTH
    )
    total, _, _, _ = merged(
        wide_query, own_mix, own_state, table, like, token * token_stride, columns, inside, eps, num_local,
        hidden_size, HAS_MIX, WEIGHTS, LOCAL, HEADS, STAGES,
    )  # fmt: skip
    dtype = result.dtype.element_ty
    if HAS_NORM:
        weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
        total = rms_norm(total.to(dtype).to(tl.float32), weight, norm_eps, hidden_size, result)
    else:
        total = (total * factor).to(dtype)
    tl.store(result + token * hidden_size + columns, total, mask=inside)


def merge(
    query: torch.Tensor,
    mix: torch.Tensor | None,
    state: torch.Tensor | None,
    sources: Sequence[torch.Tensor],
    dtype: torch.dtype,
    eps: float,
    norm: tuple[torch.Tensor, float] | None = None,
    factor: float = 1,
    num_heads: int = 1,
    weights: str = "softmax",
) -> torch.Tensor:
    """Phase 2: the local sources of a site merged into its mix of the closed ones, and the norm behind it.

    Args:
        query: folded query of the site, `[hidden]`, or one for each token, `[..., hidden]`.
        mix, state: results of phase 1 at this site, `[..., hidden]` and `[..., heads]`, or `None` of nothing.
        sources: the local ones, each `[..., hidden]`. May be none if something is closed.
        dtype: of the result.
        norm: weight and epsilon of Llama's RMSNorm.
        factor: by which the mix is multiplied, without rounding in between.

    Returns:
        `[..., hidden]`.
    """
    rows, token_stride, like = local_of(mix, sources)
    norm_weight, norm_eps = norm or (None, 0.0)
    *shape, hidden_size = like.shape
    result = query.new_empty(*shape, hidden_size, dtype=dtype)
    if result.numel():
        launch(
            merge_kernel, (result.numel() // hidden_size,),
            *contiguous(query, mix, state), addresses(rows, query.device), rows[0] if rows else mix,
            *contiguous(norm_weight), result,
            eps, norm_eps / factor**2, float(factor), 0 if query.ndim == 1 else hidden_size, token_stride,
            len(rows), num_heads, hidden_size // num_heads,
            HAS_MIX=mix is not None, HAS_NORM=norm_weight is not None, WEIGHTS=weights,
            LOCAL=triton.next_power_of_2(max(1, len(rows))), **row_shape(hidden_size, num_heads, like.dtype),
        )  # fmt: skip
    return result


def local_of(
    mix: torch.Tensor | None, sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], int, torch.Tensor]:
    """As `rows_of`, where there may be none, and a tensor of the shape of the result."""
    if not sources and mix is None:
        raise ValueError("There is nothing to merge: no mix of closed sources, and no local source.")
    return (*rows_of(sources), sources[0]) if sources else ([], 0, mix)


@triton.jit
def merge_backward_kernel(
    grad_result, query, mix, state, table, like, norm_weight, grad_queries, grad_mix, grad_state, grad_norm_weights,
    eps, norm_eps, factor, num_tokens, per_program, token_stride, num_local, num_heads, width,
    QUERY_OF_TOKEN: tl.constexpr, HAS_MIX: tl.constexpr, HAS_NORM: tl.constexpr, WEIGHTS: tl.constexpr,
    LOCAL: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    hidden_size = num_heads * width
    dtype = grad_result.dtype.element_ty
    columns, inside = columns_of(num_heads, width, HEADS, WIDTH)
    sources, heads = tl.arange(0, LOCAL), tl.arange(0, HEADS)
    grad_query, grad_norm_weight = tl.zeros([HEADS, WIDTH], tl.float32), tl.zeros([HEADS, WIDTH], tl.float32)
    if not QUERY_OF_TOKEN:
        wide_query = tl.load(query + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight_of_norm = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * per_program
    for token in range(first, tl.minimum(first + per_program, num_tokens)):
        start, place = token * token_stride, token * hidden_size + columns
        if QUERY_OF_TOKEN:
            wide_query = tl.load(query + place, mask=inside, other=0.0).to(tl.float32)
            grad_query = tl.zeros([HEADS, WIDTH], tl.float32)
        own_mix, own_state = closed_of(
            mix, state, token, columns, inside, num_heads, hidden_size, HAS_MIX, WEIGHTS, HEADS, WIDTH
        )
        # The merge and its norm again
        total, merged_state, scores, inverse_rms = merged(
            wide_query, own_mix, own_state, table, like, start, columns, inside, eps, num_local, hidden_size,
            HAS_MIX, WEIGHTS, LOCAL, HEADS, STAGES,
        )  # fmt: skip
        grad = tl.load(grad_result + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            rounded = total.to(dtype).to(tl.float32)
            inv_rms = tl.rsqrt(tl.sum(rounded * rounded) / hidden_size + norm_eps)
            normalised = rounded * inv_rms
            grad_norm_weight += grad * normalised.to(dtype).to(tl.float32)
            grad = (grad * weight_of_norm).to(dtype).to(tl.float32)
            grad = inv_rms * (grad - normalised * (tl.sum(grad * normalised) / hidden_size))
            grad = grad.to(dtype).to(tl.float32)
        else:
            grad *= factor

        mean = tl.sum(grad * total, 1)
        grad_closed = tl.zeros([HEADS], tl.float32)
        for i in tl.range(num_local, num_stages=STAGES):
            score = tl.sum(tl.where((sources == i)[:, None], scores, 0.0), 0)
            inv_rms = tl.sum(tl.where(sources == i, inverse_rms, 0.0))
            weight = weights_of(score, merged_state, WEIGHTS)
            value = row_of(table, i, like, start, columns, inside)
            grad_weight = tl.sum(grad * value, 1)
            if WEIGHTS == "sigmoid":
                grad_score = grad_weight * weight * (1 - weight)
            else:
                grad_score = weight * (grad_weight - mean)
            # The source is in the merge and in its own score, see `closed_scores_backward_kernel`
            to_query = (grad_score * inv_rms)[:, None]
            to_source = -tl.sum(grad_score * score) * inv_rms * inv_rms / hidden_size
            grad_value = weight[:, None] * grad + to_query * wide_query + to_source * value
            grad_source = pointer(table, num_local + i, like)
            tl.store(grad_source + place, grad_value.to(like.dtype.element_ty), mask=inside)
            grad_query += to_query * value
            grad_closed -= grad_score  # those of a softmax add up to zero
        if HAS_MIX:
            if WEIGHTS != "sigmoid":
                tl.store(grad_state + token * num_heads + heads, grad_closed, mask=heads < num_heads)
                grad *= tl.exp(own_state - merged_state)[:, None]
            tl.store(grad_mix + place, grad, mask=inside)
        if QUERY_OF_TOKEN:
            tl.store(grad_queries + place, grad_query, mask=inside)
    own_row = tl.program_id(0).to(tl.int64) * hidden_size + columns
    if not QUERY_OF_TOKEN:
        tl.store(grad_queries + own_row, grad_query, mask=inside)
    if HAS_NORM:
        tl.store(grad_norm_weights + own_row, grad_norm_weight, mask=inside)


def merge_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    mix: torch.Tensor | None,
    state: torch.Tensor | None,
    sources: Sequence[torch.Tensor],
    eps: float,
    norm: tuple[torch.Tensor, float] | None = None,
    factor: float = 1,
    num_heads: int = 1,
    weights: str = "softmax",
) -> tuple[torch.Tensor | None | list[torch.Tensor], ...]:
    """Gradients of `merge`, from its arguments and that of its result, which is of the dtype of the result.

    Returns:
        Those of query, mix, state and norm weight, each in fp32 and of the shape of what it is of, or `None` where
        that is, and of every local source in its dtype.
    """
    rows, token_stride, like = local_of(mix, sources)
    norm_weight, norm_eps = norm or (None, 0.0)
    grad_sources = [source.new_empty(source.shape) for source in sources]
    hidden_size, of_token = like.shape[-1], query.ndim > 1
    num_tokens = like.shape[:-1].numel()
    num_programs, per_program = programs_over(num_tokens)
    grad_mix, grad_state = (None if closed is None else closed.new_empty(closed.shape) for closed in (mix, state))
    grad_queries = query.new_empty(query.shape if of_token else (num_programs, hidden_size), dtype=torch.float32)
    of_norm = None if norm_weight is None else grad_queries.new_empty(num_programs, hidden_size)
    if num_tokens:
        launch(
            merge_backward_kernel, (num_programs,),
            *contiguous(grad, query, mix, state), addresses([*rows, *grad_sources], query.device),
            rows[0] if rows else mix, *contiguous(norm_weight), grad_queries, grad_mix, grad_state, of_norm,
            eps, norm_eps / factor**2, float(factor), num_tokens, per_program, token_stride,
            len(rows), num_heads, hidden_size // num_heads,
            QUERY_OF_TOKEN=of_token, HAS_MIX=mix is not None, HAS_NORM=norm_weight is not None, WEIGHTS=weights,
            LOCAL=triton.next_power_of_2(max(1, len(rows))), **row_shape(hidden_size, num_heads, like.dtype),
        )  # fmt: skip
    grad_query = grad_queries if of_token else grad_queries.sum(0)
    return grad_query, grad_mix, grad_state, None if of_norm is None else of_norm.sum(0), grad_sources
