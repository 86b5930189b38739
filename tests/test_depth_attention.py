# SPDX-License-Identifier: Apache-2.0
"""The operator: every fast path against the definition, values and gradients."""

import copy
import functools

import pytest
import torch
from rounding import UpToRounding, all_in_fp64
from tiny_models import Reference, convert, randomize_queries, tiny_base_model
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.depth.autograd import Scores
from attnres.depth.block_cache import BlockCache
from attnres.depth.definition import depth_attention_reference, num_sources, read_by_definition
from attnres.depth.reads import PAPERS_READ, ReadConfig
from attnres.depth.stream import DepthStream
from attnres.depth.two_phases import Chunk, end_of_chunk


EPS = 1e-6
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# That a single token is read by with numbers
READS = [
    PAPERS_READ,
    ReadConfig(weights="softmax1"),
    ReadConfig(weights="sigmoid"),
    ReadConfig(stream="kept"),
    ReadConfig(num_heads=7),
    ReadConfig(num_heads=7, weights="softmax1", stream="kept"),
    ReadConfig(num_heads=7, weights="sigmoid", stream="kept"),
]


def random_sources(count, dtype, shape=(3, 5, 7)):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count)]


def widened(*tensors):
    """As reads compute with them, in fp32 at least, so that what is rounded to half precision are results alone."""
    wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    return [after.requires_grad_(before.requires_grad) for before, after in zip(tensors, wide)]


def definition(query, *sources):
    """The mix of a read."""
    return depth_attention_reference(query, sources, EPS)[0]


def in_two_phases(local, query, *sources, norm=None, factor=1):
    """The mix of a read by the second of three sites, of which the last sources are not closed.

    Args:
        local: how many, or -1: one that later sites read as well.
    """
    num_closed = max(1, len(sources) - abs(local))
    queries = torch.stack([query.flip(0), query, 1 - query])
    chunk = Chunk((4, 7), queries, sources[:num_closed], EPS, PAPERS_READ)
    of_site = sources[num_closed:]
    num_lasting = len(of_site) if local < 0 else max(0, len(of_site) - 1)
    return chunk.read(5, of_site, num_lasting, norm, factor)


def times(factor, dtype, *inputs, read=PAPERS_READ):
    query, *sources = inputs
    mix, _ = read_by_definition(query, sources, EPS, read.num_heads, read.weights, read.keeps_stream)
    return (factor * mix).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("local", [-1, 0, 1, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("scale", [0.0, 0.5, 30.0])
def test_read_matches_definition(count, local, dtype, scale):
    wide = torch.promote_types(dtype, torch.float32)
    query = (torch.randn(7, dtype=wide, generator=torch.Generator().manual_seed(1)) * scale).requires_grad_()
    sources = [source.requires_grad_() for source in random_sources(count, dtype)]
    grad_mix = torch.randn(3, 5, 7, dtype=torch.float64).to(dtype)

    def run(read, grad_mix, query, *sources):
        mix = read(query, *sources)
        grads = torch.autograd.grad(mix, (query, *sources), grad_mix)
        assert [grad.dtype for grad in grads] == [query.dtype, *(source.dtype for source in sources)]
        # The gradient as one vector: where a softmax is nearly one source, parts of it are differences of large terms
        return mix.to(dtype), torch.cat([grad.to(dtype).flatten() for grad in grads])

    inputs = (grad_mix, query, *sources)
    expected = UpToRounding(functools.partial(run, definition), *widened(*inputs))
    expected.check(run(functools.partial(in_two_phases, local), *inputs))


@pytest.mark.parametrize("local", [-1, 0, 1, 2])
def test_gradients_are_those_of_finite_differences(local):
    query = torch.randn(4, dtype=torch.float64, requires_grad=True)
    inputs = [source.requires_grad_() for source in random_sources(3, torch.float64, (1, 2, 4))]
    assert torch.autograd.gradcheck(functools.partial(in_two_phases, local), (query, *inputs))


@pytest.mark.parametrize(
    "block_size, ends", [(1, [8, 11, 17, 24]), (3, [3, 6, 12, 18]), (6, [6, 6, 12, 18]), (40, 4 * [40])]
)
def test_ends_of_chunks(block_size, ends):
    """With a block, or with the last of a few short ones; and never behind the last site."""
    assert [end_of_chunk(site, block_size, 41) for site in (0, 3, 9, 16)] == ends
    assert end_of_chunk(40, block_size, 41) == 41
    # Of a few sources, which are soon read, there are fewer sites; and none behind the last one
    assert [end_of_chunk(0, 1, num_sites) for num_sites in (1, 2, 5, 9, 31, 32)] == [1, 2, 3, 4, 7, 8]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7)], ids=["tokens", "one token"])
def test_block_cache_matches_definition(shape, block_size, dtype, read):
    """A stack of 8 sublayers whose outputs do not depend on what they read, so that every read is known."""
    outputs = random_sources(9, dtype, shape)
    queries = torch.randn(9, 7, dtype=torch.promote_types(dtype, torch.float32))
    cache = BlockCache()
    for _step in range(2):  # the second one reuses the buffers
        cache.start(queries, outputs[0], block_size, EPS, read)
        pointer = cache.values.data_ptr()
        assert len(cache) == 0
        closed, kept, partial, reads = [outputs[0]], [cache.append(outputs[0])], None, []
        for site in range(9):
            sources = closed if partial is None else [*closed, partial]
            assert len(sources) == num_sources(site, block_size) and len(cache) == len(closed)
            for factor in (1, len(sources)):
                read_times = functools.partial(times, factor, dtype, read=read)
                expected = UpToRounding(read_times, *widened(queries[site], *sources))
                reads.append((cache.read(site, () if partial is None else (partial,), factor=factor), expected))
            if site == 8:
                break
            partial = outputs[site + 1] if partial is None else partial + outputs[site + 1]
            if (site + 1) % block_size == 0:
                closed, kept, partial = [*closed, partial], [*kept, cache.append(partial)], None
        for actual, expected in reads:  # compared at the end: what was given away is not written over
            expected.check(actual)
        assert all(map(torch.equal, kept, closed))
    assert cache.values.data_ptr() == pointer


@pytest.mark.one_in(4)
@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7)], ids=["tokens", "one token"])
def test_block_cache_norms_what_it_has_multiplied(shape, norm_class, dtype, read):
    """Which the epsilon of a norm tells apart."""
    *closed, partial = random_sources(3, dtype, shape)
    queries = torch.randn(6, 7, dtype=torch.promote_types(dtype, torch.float32))
    norm, cache = norm_class(7, eps=0.5).to(dtype), BlockCache()
    with torch.no_grad():
        norm.weight.normal_()
        cache.start(queries, partial, 2, EPS, read)
        for block in closed:
            cache.append(block)
        for site, sources in ((2, closed), (3, [*closed, partial])):
            mixes = UpToRounding(
                lambda *inputs: norm(times(5, dtype, *inputs, read=read)),
                *widened(queries[site], *sources),
                model=norm,
            )
            mixes.check(cache.read(site, () if site == 2 else (partial,), norm, factor=5))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("read", READS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e3, -1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_one_token_is_as_several(scale, eps, read):
    """A single token is read with Python's numbers, which raise where tensors give inf or nan."""
    sources = random_sources(3, torch.float32, (1, 1, 7))
    sources[2] = sources[2] * scale if scale else torch.zeros(1, 1, 7)
    queries = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) * (scale if abs(scale) < 1e9 else 1)

    def reads(count, queries, *sources):
        cache, several = BlockCache(), [source.expand(1, count, 7) for source in sources]
        cache.start(queries, several[0], 3, eps, read)
        assert (cache.one_token is not None) == (count == 1)
        cache.append(several[0])
        mixes = [cache.read(site, (several[site],)) for site in (1, 2)]
        mixes.append(cache.read(2, (several[1] + several[2],), factor=2))
        cache.append(several[2])
        mixes.append(cache.read(3))
        return [(mix[:, 0].nan_to_num(), mix[:, 0].isnan().float()) for mix in mixes]

    of_one = reads(1, queries, *sources)
    if eps or scale:  # the score of a zero at no epsilon is 0 / 0
        UpToRounding(functools.partial(reads, 2), queries, *sources).check(of_one)


@pytest.mark.parametrize(
    "heads, num_blocks, by_numbers",
    [(1, 300, True), (16, 16, True), (16, 17, False), (17, 1, False), (4, 64, True), (4, 65, False)],
)
def test_numbers_are_for_few_heads(heads, num_blocks, by_numbers):
    """Loops over many scores take longer than tensors."""
    cache, hidden_size = BlockCache(), 4 * heads
    queries = torch.zeros(num_blocks, hidden_size)
    cache.start(queries, torch.zeros(1, 1, hidden_size), 1, EPS, ReadConfig(num_heads=heads))
    assert (cache.one_token is not None) == by_numbers


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_norm_of_one_token_does_not_raise(scale, eps):
    norm, source = LlamaRMSNorm(7, eps), torch.ones(1, 1, 7) * scale
    cache = BlockCache()
    cache.start(torch.zeros(2, 7), source, 2, EPS)
    cache.append(source)
    read = cache.read(0, (), norm)
    if eps or scale >= 1:  # the norm of nothing at no epsilon is 0 / 0
        torch.testing.assert_close(read, norm(source), equal_nan=True)


def test_no_tokens():
    sources, queries = random_sources(3, torch.float32, shape=(0, 5, 7)), torch.randn(3, 7)
    assert in_two_phases(1, queries[2], *sources).shape == (0, 5, 7)
    cache = BlockCache()
    cache.start(queries, sources[0], 2, EPS)
    assert [cache.append(sources[0]).shape, cache.read(0).shape] == 2 * [(0, 5, 7)]
    assert cache.read(1, (sources[1],)).shape == (0, 5, 7)
    assert [cache.append(sources[2]).shape, cache.read(2).shape] == 2 * [(0, 5, 7)]


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
        lambda tensor: tensor.repeat(1, 2, 1)[:, 5:],
        lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    ],
)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7)], ids=["tokens", "one token"])
def test_sources_that_are_not_contiguous(shape, laid_out):
    """Such as the tokens that a process has of a batch."""
    queries, sources = torch.randn(4, 7), random_sources(4, torch.float32, shape)
    others = [
        laid_out(source) if shape[1] > 1 else source.repeat_interleave(2, dim=-1)[..., ::2] for source in sources
    ]

    def reads(*sources):
        cache = BlockCache()
        cache.start(queries, sources[0], 2, EPS)
        kept = [cache.append(source) for source in sources[:2]]
        return [cache.read(2), cache.read(3, (sources[2],)), *kept, in_two_phases(-1, queries[0], *sources)]

    UpToRounding(reads, *sources).check(reads(*others))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_stays_alone(bad):
    sources = random_sources(3, torch.float32)
    sources[1][1, 2] = bad
    query = torch.randn(4, 7)
    with_closed, with_local = (in_two_phases(local, query[2], *sources) for local in (1, 2))
    cache = BlockCache()
    cache.start(query, sources[0], 2, EPS)
    cache.append(sources[0])
    as_partial = cache.read(1, (sources[1],))
    cache.append(sources[1])
    as_closing, as_closed = cache.read(2), cache.read(3, (sources[2],))
    for result in (with_closed, with_local, as_partial, as_closing, as_closed):
        is_bad = ~torch.isfinite(result).all(-1)
        assert is_bad[1, 2] and is_bad.sum() == 1


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7)], ids=["tokens", "one token"])
def test_autocast_leaves_scores_in_fp32(shape):
    sources, query = random_sources(3, torch.float32, shape), torch.randn(7)
    expected = in_two_phases(1, query, *sources)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = in_two_phases(1, query, *sources)
        cache = BlockCache()
        cache.start(query.expand(4, -1), sources[0], 2, EPS)
        cache.append(sources[0])
        of_one_closed = cache.read(1, (sources[1],))
        cache.append(sources[1])
        closed, merged = cache.read(2), cache.read(3, (sources[2],))
    assert torch.equal(actual, expected)
    UpToRounding(definition, query, *sources[:2]).check(of_one_closed)
    UpToRounding(definition, query, *sources[:2]).check(closed)
    UpToRounding(definition, query, *sources).check(merged)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("norm", [nn.LayerNorm(7), nn.RMSNorm(7), nn.Sequential(nn.RMSNorm(7), nn.Linear(7, 7))])
def test_norm_is_computed_again_in_backward(norm, local, frozen, autocast):
    """The same numbers as with a norm that autograd keeps tensors for, and no tensor of the size of a source more."""
    norm = copy.deepcopy(norm).requires_grad_(not frozen)
    query = torch.randn(7, requires_grad=True)
    sources = [source.requires_grad_() for source in random_sources(3, torch.float32)]
    inputs = (query, *sources, *([] if frozen else norm.parameters()))
    results, saved = [], []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            results.append(in_two_phases(local, query, *sources, norm=norm))
        results.append(norm(in_two_phases(local, query, *sources)))
    assert torch.equal(*results)
    own = {source.data_ptr() for source in sources}
    if not isinstance(norm, nn.Sequential):  # what has submodules is left to autograd
        saved = [tensor for tensor in saved if tensor.shape[-1:] == (7,) and tensor.numel() >= sources[0].numel()]
        assert saved and {tensor.data_ptr() for tensor in saved} <= own
    grad = torch.randn_like(results[0])
    for a, b in zip(*(torch.autograd.grad(result, inputs, grad) for result in results)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("local", [-1, 0, 1, 2])
@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
def test_reads_with_their_norm(norm_class, local, dtype, factor):
    """Outputs and all gradients. Llama's norm is computed here, with an epsilon that tells the factor apart."""
    norm = norm_class(7, eps=0.5).to(dtype)
    query = torch.randn(7, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    sources = [source.requires_grad_() for source in random_sources(4, dtype)]
    with torch.no_grad():
        norm.weight.normal_()
    grad = torch.randn(3, 5, 7, dtype=torch.float64).to(dtype)

    def run(read, grad, *inputs):
        normed = read(*inputs)
        grads = torch.autograd.grad(normed, (*inputs, *norm.parameters()), grad)
        return normed.to(dtype), [of_input.to(dtype) for of_input in grads]

    expected = UpToRounding(
        functools.partial(run, lambda *inputs: norm(times(factor, dtype, *inputs))),
        *widened(grad, query, *sources),
        model=norm,
    )
    expected.check(run(functools.partial(in_two_phases, local, norm=norm, factor=factor), grad, query, *sources))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_many_sites_are_those_of_each(dtype):
    queries = torch.randn(4, 7, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    (source,) = (source.requires_grad_() for source in random_sources(1, dtype))
    grad = torch.randn(15, 4, dtype=queries.dtype)

    def each(queries, source):
        wide = source.to(queries.dtype).flatten(0, 1)
        keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return torch.stack([(keys * query).sum(-1) for query in queries], dim=-1)

    def fast(queries, source):
        eps_norm = queries.new_full((), (7 * EPS) ** 0.5)
        return torch.cat(Scores.apply(queries * 7**0.5, source, eps_norm, 1), dim=-1)

    def run(scores_of, queries, source):
        scores = scores_of(queries, source)
        grad_queries, grad_source = torch.autograd.grad(scores, (queries, source), grad)
        assert grad_source.dtype == source.dtype
        return scores, grad_queries, grad_source.to(dtype)

    expected = UpToRounding(functools.partial(run, each), *widened(queries, source))
    expected.check(run(fast, queries, source))


def test_operator_compiles_without_breaks():
    query = torch.randn(7, requires_grad=True)
    sources = [source.requires_grad_() for source in random_sources(4, torch.float32)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, s: in_two_phases(2, q, *s), fullgraph=True, backend="aot_eager")
    inputs = (query, *sources)
    UpToRounding(lambda q, *s: torch.autograd.grad(definition(q, *s).square().sum(), (q, *s)), *inputs).check(
        torch.autograd.grad(compiled(query, sources).square().sum(), inputs)
    )


@pytest.mark.one_in(11)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7), (1, 4, 1), (0, 5, 7)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.5, 30.0])
def test_compiled_two_phase_reads(shape, dtype, scale):
    """What a compiled model reads within a block, in one graph."""
    queries = scale * torch.randn(4, shape[-1], generator=torch.Generator().manual_seed(1)).to(
        torch.promote_types(dtype, torch.float32)
    )
    sources = random_sources(4, dtype, shape)

    def read(queries, embedding, *outputs):
        stream = DepthStream(queries, (embedding,), block_size=2, eps=EPS).keep_in(BlockCache())
        for output in outputs:
            stream = stream + output
        return stream.read()

    torch._dynamo.reset()
    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")

    def by_definition(queries, embedding, first, second, third):
        return definition(queries[3], embedding, first + second, third).to(dtype)

    expected = UpToRounding(by_definition, *widened(queries, *sources))
    with torch.no_grad():
        expected.check(compiled(queries, *sources))


def test_compiled_read_within_a_block_is_one_kernel():
    """Phase 2 without a matrix product, which a compiler cannot fuse with what is around it; phase 1 has two."""
    operations = []

    def record(graph, example_inputs):
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    sources = random_sources(4, torch.float32)
    with torch.no_grad():
        torch.compile(in_two_phases, fullgraph=True, backend=record)(1, torch.randn(7), *sources)
    assert any("lerp" in operation for operation in operations)
    assert len([operation for operation in operations if "matmul" in operation or "mm" in operation]) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("family", ["starcoder2", "llama"])
def test_model_matches_definition_in_fp64(family, block_size, zero):
    """Outputs and the gradient of every parameter, through 8 sublayers, on batches and sequences of odd size."""
    kwargs = {"residual_dropout": 0.0, "embedding_dropout": 0.0} if family == "starcoder2" else {}
    with all_in_fp64():
        model = convert(tiny_base_model(family, **kwargs), block_size).model.double()
        assert model.depth_queries.query.dtype == torch.float64
        if not zero:
            randomize_queries(model)
        input_ids = torch.randint(0, 97, (3, 7))
        grad = torch.randn(3, 7, model.config.hidden_size, dtype=torch.float64)
        reference, parameters = Reference(model), dict(model.named_parameters())

        def run(hidden_states, parameters):
            grads = torch.autograd.grad(hidden_states, parameters.values(), grad, materialize_grads=True)
            return hidden_states, dict(zip(parameters, grads))

        def by_definition():
            reference.queries = model.depth_queries.query * model.depth_queries.key_norm
            return run(reference(input_ids)[0], parameters | dict(reference.native.named_parameters()))

        expected = UpToRounding(by_definition, model=reference.native)
        hidden_states, grads = run(model(input_ids).last_hidden_state, parameters)
        expected.check((hidden_states, grads))
        with torch.no_grad():
            expected.check((model(input_ids).last_hidden_state, grads))
        assert grads["depth_queries.key_norm"].any() != zero
