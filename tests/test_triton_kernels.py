# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels for reads in two phases, in its interpreter or on a GPU, beside a literal definition in fp64.

They go with the kernels into a kernel repository, see `tests/tools/export_kernels.py`, so without other helpers.
"""

import importlib.util

import pytest
import torch


if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton

from attnres.depth import triton_kernels as kernels


pytestmark = pytest.mark.one_in(3)


EPS, NORM_EPS = 1e-3, 1e-2
KINDS = ["softmax", "softmax1", "sigmoid"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [(33, 1), (33, 3), (96, 1), (96, 2), (1000, 1), (96, 4), (1000, 4)]  # of the hidden dimension, and heads
DEVICE = "cuda" if isinstance(kernels.merge_kernel, triton.JITFunction) else "cpu"  # in the interpreter
# Sums in fp32, each of up to a thousand products in a tree, and several of them one after the other
SUMS = 16 * torch.finfo(torch.float32).eps


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.fixture
def small(monkeypatch):
    """Few programs, so that each has several tokens and the last fewer, and sites in groups."""
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(kernels, "MOST_OF_FORWARD", 2048)
    monkeypatch.setattr(kernels, "MOST_OF_SCORES", 4096)
    monkeypatch.setattr(kernels, "MOST_OF_COLUMNS", 1024)


def unit(dtype):
    """What rounding does, as a part of a number. Triton's interpreter cuts bf16 off, where GPUs round."""
    cuts_off = dtype == torch.bfloat16 and not isinstance(kernels.merge_kernel, triton.JITFunction)
    return torch.finfo(dtype).eps * (1 if cuts_off else 0.5)


class Rounding(torch.autograd.Function):
    """What rounding to a dtype may do to a tensor, and in backward to its gradient: every number a bit up or down."""

    @staticmethod
    def forward(ctx, tensor, generator, dtype):
        ctx.arguments = generator, dtype
        draw = torch.randint(0, 2, tensor.shape, generator=generator)
        return tensor * (1 + unit(dtype) * (2 * draw.to(DEVICE) - 1))

    @staticmethod
    def backward(ctx, grad):
        return Rounding.apply(grad, *ctx.arguments), None, None


def leaf(tensor):
    return None if tensor is None else tensor.detach().double().requires_grad_()


def scores_of(query, source, num_heads):
    """`[..., heads]`, of a query `[hidden]` or `[..., hidden]`."""
    key = source * (source.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (query * key).unflatten(-1, (num_heads, -1)).sum(-1)


def weighted(weights, sources):
    """Sum of sources `[..., hidden]` by weights `[..., heads]` each."""
    parts = [w.unsqueeze(-1) * source.unflatten(-1, (w.shape[-1], -1)) for w, source in zip(weights, sources)]
    return sum(parts).flatten(-2)


def read_closed(queries, sources, num_heads, kind):
    """Mixes `[sites, ..., hidden]`, states `[sites, ..., heads]`, and scores `[..., sources, sites, heads]`."""
    mixes, states, scores = [], [], []
    for query in queries:
        own = torch.stack([scores_of(query, source, num_heads) for source in sources])
        scores.append(own)
        if kind == "sigmoid":
            weights = own.sigmoid()
        else:
            states.append(own.logsumexp(0))
            if kind == "softmax1":
                states[-1] = torch.logaddexp(states[-1], torch.zeros_like(states[-1]))
            weights = (own - states[-1]).exp()
        mixes.append(weighted(weights, sources))
    return torch.stack(mixes), torch.stack(states) if states else None, torch.stack(scores).movedim((1, 0), (-3, -2))


def merge(query, mix, state, sources, norm_weight, factor, num_heads, kind, rounded=lambda tensor: tensor):
    scores = [scores_of(query, source, num_heads) for source in sources]
    if kind == "sigmoid":
        weights = [score.sigmoid() for score in scores]
        if mix is not None:
            weights, sources = [torch.ones_like(mix[..., :num_heads]), *weights], [mix, *sources]
    else:
        if mix is not None:
            scores, sources = [state, *scores], [mix, *sources]
        elif kind == "softmax1":
            scores, sources = [torch.zeros_like(scores[0]), *scores], [torch.zeros_like(sources[0]), *sources]
        weights = torch.stack(scores).softmax(0)
    read = factor * weighted(weights, sources)
    if norm_weight is None:
        return read
    read = rounded(read)
    return rounded(read * (read.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()) * norm_weight


def check(actual, expected, others=()):
    """Up to the sums in fp32, the rounding of the result, and what the rounding within does in other draws of it."""
    assert actual.shape == expected.shape
    if actual.numel():
        tolerance = SUMS + (0 if actual.dtype == torch.float32 else unit(actual.dtype))
        spread = max(((other - expected).abs().max() for other in others), default=0)
        # What is zero by definition cancels exactly
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max() + 2 * spread + 1e-12


def check_closed(queries, sources, num_heads, kind, grad_mixes, grad_states):
    """Phase 1, forward and backward."""
    wide_queries, wide_sources = leaf(queries), [leaf(source) for source in sources]
    *outputs, scores = read_closed(wide_queries, wide_sources, num_heads, kind)
    results = kernels.read_closed(queries, sources, EPS, num_heads, kind)
    assert all(result is None or result.dtype == torch.float32 for result in results)
    mixes, states, *saved = results
    check(mixes, outputs[0])
    assert (states is None) == (kind == "sigmoid")
    if states is not None:
        check(states, outputs[1])
    check(saved[0], scores)
    check(saved[1], torch.stack([(s.double().square().mean(-1) + EPS).rsqrt() for s in sources], dim=-1))

    pairs = [(outputs[0][i], grad) for i, grad in enumerate(grad_mixes) if grad is not None]
    pairs += [(outputs[1][i], grad) for i, grad in enumerate(grad_states) if grad is not None and kind != "sigmoid"]
    expected = torch.autograd.grad(
        [output for output, _ in pairs],
        [wide_queries, *wide_sources],
        [grad.double() for _, grad in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    grad_queries, grad_sources = kernels.read_closed_backward(
        grad_mixes, grad_states, queries, sources, states, *saved, num_heads, kind
    )
    assert grad_queries.dtype == torch.float32
    check(grad_queries, expected[0])
    for source, actual, of_source in zip(sources, grad_sources, expected[1:], strict=True):
        assert actual.dtype == source.dtype
        check(actual, of_source)


# Every number beside others of each kind, as their cycles are of different length
CLOSED = [
    (*WIDTHS[i % 7], [1, 2, 5, 9][i % 4], [8, 1, 3, 13][i // 2 % 4], DTYPES[i % 3], KINDS[i // 3 % 3])
    for i in range(28)
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("hidden_size, num_heads, num_sources, num_sites, dtype, kind", CLOSED, ids=str)
def test_closed(hidden_size, num_heads, num_sources, num_sites, dtype, kind, random, small):
    queries = random(num_sites, hidden_size) / hidden_size**0.5
    sources = [random(3, hidden_size, dtype=dtype) for _ in range(num_sources)]
    grad_mixes = [None if site % 4 == 1 else random(3, hidden_size) for site in range(num_sites)]
    grad_states = [None if site % 3 == 1 or kind == "sigmoid" else random(3, num_heads) for site in range(num_sites)]
    check_closed(queries, sources, num_heads, kind, grad_mixes, grad_states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_closed_as_it_is_launched(kind, dtype, random):
    """Two dimensions of tokens, queries of the dtype, and sources and gradients that are not in one piece."""
    queries = (random(3, 96) / 10).to(dtype)
    sources = [random(2, 3, 96, dtype=dtype), random(3, 2, 96, dtype=dtype).transpose(0, 1)]
    grad_mixes = [random(3, 2, 96).transpose(0, 1), None, random(1, 1, 96).expand(2, 3, 96)]
    check_closed(queries, sources, 2, kind, grad_mixes, [None, random(2, 3, 2), None])


@pytest.mark.parametrize("kind", KINDS)
def test_closed_without_gradients(kind, random):
    queries, sources = random(2, 33), [random(2, 33), random(2, 33)]
    _, states, *saved = kernels.read_closed(queries, sources, EPS, 1, kind)
    nothing = [None, None]
    grad_queries, grad_sources = kernels.read_closed_backward(
        nothing, nothing, queries, sources, states, *saved, 1, kind
    )
    assert not any(grad.any() for grad in (grad_queries, *grad_sources))


def test_large_scores(random):
    """Whose exponentials are no numbers of fp32."""
    queries, sources = 100 * random(2, 33), [random(2, 33) for _ in range(3)]
    mixes, states, scores, _ = kernels.read_closed(queries, sources, EPS)
    assert scores.abs().max() > 200
    expected = read_closed(queries.double(), [source.double() for source in sources], 1, "softmax")
    check(states, expected[1])
    result = kernels.merge(queries[0], mixes[0], states[0], sources, torch.float32, EPS)
    assert result.isfinite().all()


def check_merge(query, mix, state, sources, dtype, norm_weight, factor, num_heads, kind, grad):
    """Phase 2, forward and backward."""
    generator = torch.Generator().manual_seed(1)

    def by_definition(rounded):
        leaves = [leaf(tensor) for tensor in (query, mix, state, norm_weight, *sources)]
        result = merge(*leaves[:3], leaves[4:], leaves[3], factor, num_heads, kind, rounded)
        wanted = [tensor for tensor in leaves if tensor is not None]
        if not grad.numel():
            return [result, *map(torch.zeros_like, wanted)]
        grads = torch.autograd.grad(result, wanted, grad.double(), allow_unused=True, materialize_grads=True)
        return [result.detach(), *grads]

    expected = by_definition(lambda tensor: tensor)
    others = [by_definition(lambda tensor: Rounding.apply(tensor, generator, dtype)) for _ in range(4)]

    norm = None if norm_weight is None else (norm_weight, NORM_EPS)
    options = {"norm": norm, "factor": factor, "num_heads": num_heads}
    result = kernels.merge(query, mix, state, sources, dtype, EPS, weights=kind, **options)
    assert result.dtype == dtype
    *grads, grad_sources = kernels.merge_backward(grad, query, mix, state, sources, EPS, weights=kind, **options)
    for tensor, of_tensor in zip((query, mix, state, norm_weight), grads, strict=True):
        assert (of_tensor is None) == (tensor is None) and (tensor is None or of_tensor.dtype == torch.float32)
    assert all(of_source.dtype == source.dtype for source, of_source in zip(sources, grad_sources, strict=True))
    results = [result, *(of_tensor for of_tensor in grads if of_tensor is not None), *grad_sources]
    for actual, *definitions in zip(results, expected, *others, strict=True):
        check(actual, definitions[0], definitions[1:])


MERGED = [
    (*WIDTHS[i % 7], [1, 0, 3, 1, 3][i % 5], DTYPES[i % 3], KINDS[i // 3 % 3], [1, 4][i % 2], i // 2 % 2, i // 4 % 3)
    for i in range(42)
]


@pytest.mark.parametrize("hidden_size, num_heads, local, dtype, kind, factor, has_norm, mode", MERGED, ids=str)
def test_merge(hidden_size, num_heads, local, dtype, kind, factor, has_norm, mode, random, small):
    """Of modes one has a query of every token, and one nothing that is closed."""
    tokens = (3,)
    query = random(*(tokens if mode == 1 else ()), hidden_size) / hidden_size**0.5
    sources = [random(*tokens, hidden_size, dtype=dtype) for _ in range(local)]
    mix = None if mode == 2 and local else random(*tokens, hidden_size)
    state = None if mix is None or kind == "sigmoid" else random(*tokens, num_heads)
    norm_weight = random(hidden_size, dtype=dtype) if has_norm else None
    grad = random(*tokens, hidden_size, dtype=dtype)
    check_merge(query, mix, state, sources, dtype, norm_weight, factor, num_heads, kind, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_rounds_where_the_module_does(dtype, random):
    """Of a mix alone. In bf16 the interpreter does not round, see `unit`."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm, mix, grad = llama.LlamaRMSNorm(96, eps=NORM_EPS).to(DEVICE, dtype), random(5, 96), random(5, 96, dtype=dtype)
    norm.weight.data.copy_(random(96))
    arguments, of_norm = (random(96), mix, random(5, 1), []), ((norm.weight.data, NORM_EPS),)
    result = kernels.merge(*arguments, dtype, EPS, *of_norm)
    _, grad_mix, _, grad_norm_weight, _ = kernels.merge_backward(grad, *arguments, EPS, *of_norm)
    mix.requires_grad_()
    expected = norm(mix.to(dtype))
    expected.backward(grad)
    for actual, of_module in ((result, expected), (grad_mix, mix.grad)):
        if dtype == torch.float32:
            check(actual, of_module.double())
        else:  # a number in the middle of two may become either
            assert (actual == of_module).float().mean() > 0.98
    # Of the weight the module's own is a sum in its dtype
    normalised = mix.to(dtype).float()
    normalised = (normalised * (normalised.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()).to(dtype)
    of_weight = (grad.double() * normalised.double()).sum(0)
    assert ((grad_norm_weight - of_weight).abs() < SUMS * of_weight.abs().max()).float().mean() > 0.95


@pytest.mark.parametrize("tokens", [(0,), (2, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(tokens, kind, random):
    sources = [random(*tokens, 32) for _ in range(2)]
    mixes, states, *saved = kernels.read_closed(random(3, 32), sources, EPS, 2, kind)
    assert mixes.shape == (3, *tokens, 32) and (states is None or states.shape == (3, *tokens, 2))
    grads = [random(*tokens, 32)] * 3, [None] * 3
    grad_queries, grad_sources = kernels.read_closed_backward(*grads, random(3, 32), sources, states, *saved, 2, kind)
    assert (
        torch.equal(grad_queries, torch.zeros_like(grad_queries))
        and [grad.shape for grad in grad_sources] == [(*tokens, 32)] * 2
    )
    state = None if states is None else states[0]
    check_merge(random(32), mixes[0], state, sources, torch.float32, random(32), 2, 2, kind, random(*tokens, 32))


def check_both(sources, random):
    """Both phases, with these sources of 4 tokens and 32 numbers."""
    queries, mix, state, grad = random(2, 32) / 6, random(4, 32), random(4, 1), random(4, 32)
    check_closed(queries, sources, 1, "softmax", [mix, grad], [state, None])
    check_merge(queries[0], mix, state, sources, torch.float32, None, 1, 1, "softmax", grad)


def test_sources_are_taken_as_they_lie(random):
    """Rows of a buffer are not copied."""
    buffer = random(4, 3, 32)
    rows, stride = kernels.rows_of(buffer[:, 1:].unbind(1))
    assert stride == 96 and [row.data_ptr() for row in rows] == [buffer[:, i].data_ptr() for i in (1, 2)]
    check_both(list(buffer[:, 1:].unbind(1)), random)


@pytest.mark.parametrize("how", ["of two strides", "transposed", "at odd addresses"])
def test_sources_that_are_copied(how, random):
    sources = {
        "of two strides": lambda: [random(4, 3, 32)[:, 0], random(4, 32)],
        "transposed": lambda: [random(32, 4).T, random(32, 4).T],
        "at odd addresses": lambda: [random(129)[1:].view(4, 32), random(129)[1:].view(4, 32)],
    }[how]()
    rows, stride = kernels.rows_of(sources)
    assert stride == 32 and all(row.data_ptr() % 16 == 0 and row.is_contiguous() for row in rows)
    check_both(sources, random)


def test_what_is_refused(random):
    with pytest.raises(ValueError, match="one dtype on one device, and are torch.float32 on .*, torch.bfloat16 on"):
        kernels.read_closed(random(1, 32), [random(2, 32), random(2, 32, dtype=torch.bfloat16)], EPS)
    with pytest.raises(ValueError, match="nothing to merge"):
        kernels.merge(random(32), None, None, [], torch.float32, EPS)
