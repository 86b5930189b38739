# SPDX-License-Identifier: Apache-2.0
"""Reads that share phase 1: what a graph, a copy or another order of reads can do to them."""

import copy
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres.depth.autograd import ReadClosed
from attnres.depth.block_cache import BlockCache
from attnres.depth.definition import read_by_definition
from attnres.depth.other_reads import start_stream
from attnres.depth.reads import ReadConfig
from attnres.depth.recorder import DepthRecorder
from attnres.depth.two_phases import end_of_chunk


pytestmark = pytest.mark.one_in(3)  # of the reads by two lengths, so that both lengths are among them
SITES, EPS = 14, 1e-3
READS = {
    "paper": ReadConfig(),
    "heads": ReadConfig(num_heads=2, weights="softmax1"),
    "each": ReadConfig(open_block="each"),
    "sigmoid": ReadConfig(num_heads=2, weights="sigmoid", open_block="each"),
    "kept": ReadConfig(stream="kept"),
    "kept, heads": ReadConfig(num_heads=2, weights="softmax1", open_block="each", stream="kept"),
    "kept, sigmoid": ReadConfig(num_heads=2, weights="sigmoid", stream="kept"),
}
# Full, whose chunks have several blocks, and blocks that are chunks
BLOCK_SIZES = (1, 5)


@pytest.fixture(params=itertools.product(READS.values(), BLOCK_SIZES), ids=lambda p: f"{p[0].in_words()} {p[1]}")
def case(request):
    return request.param


@pytest.fixture
def inputs():
    """Queries, embedding and outputs."""
    shapes = [(SITES, 8), *[(2, 3, 8)] * SITES]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def streams_of(case, queries, embedding, *outputs, **fields):
    read_config, block_size = case
    stream = start_stream(read_config, (queries,), (embedding,), block_size=block_size, eps=EPS, **fields)
    stream.is_rebuilt = False
    yield stream
    for output in outputs:
        stream = stream + output
        yield stream


def reads_of(case, *inputs, norm=None):
    return [stream.read(norm) for stream in streams_of(case, *inputs)]


def definitions_of(case, queries, embedding, *outputs, norm=None):
    read_config, block_size = case
    mixes = []
    for site in range(SITES):
        closed = site // block_size * block_size
        sources = [embedding, *(sum(outputs[i : i + block_size]) for i in range(0, closed, block_size))]
        of_block = outputs[closed:site]
        if of_block:
            sources += of_block if read_config.open_block == "each" else [sum(of_block)]
        how = read_config.num_heads, read_config.weights, read_config.keeps_stream
        mix = read_by_definition(queries[site], sources, EPS, *how)[0]
        mixes.append(mix if norm is None else norm(mix))
    return mixes


def loss_of(reads, sites=range(SITES)):
    return sum((1 + site) * reads[site].cos().sum() for site in sites)


def check(actual, expected):
    """In fp64 sums of a few hundred products."""
    for a, b in zip(actual, expected, strict=True):
        if a is None or b is None:
            assert (a is None or not a.any()) and (b is None or not b.any())
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def grads_of(loss, inputs, **kwargs):
    return torch.autograd.grad(loss, inputs, allow_unused=True, **kwargs)


@pytest.mark.parametrize("norm", [None, LlamaRMSNorm(8).double(), nn.LayerNorm(8).double()])
def test_by_definition(case, inputs, norm):
    inputs_and_norm = [*inputs, *([] if norm is None else norm.parameters())]
    actual, expected = reads_of(case, *inputs, norm=norm), definitions_of(case, *inputs, norm=norm)
    rounded = isinstance(norm, LlamaRMSNorm)  # to fp32, in the module
    if not rounded:
        check(actual, expected)
    grads = [grads_of(loss_of(reads), inputs_and_norm) for reads in (actual, expected)]
    if rounded:
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    else:
        check(*grads)


def test_twice_through_one_graph(case, inputs):
    loss = loss_of(reads_of(case, *inputs))
    first = grads_of(loss, inputs, retain_graph=True)
    second = grads_of(loss, inputs)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        grads_of(loss, inputs)


@pytest.mark.parametrize("sites", [[6], [13, 2], [1, 3, 7, 8]])
def test_some_sites_have_no_gradient(case, inputs, sites):
    """One after the other through a graph that is kept, and all at once."""
    actual, expected = reads_of(case, *inputs), definitions_of(case, *inputs)
    for chosen in ([site] for site in sites):
        check(*(grads_of(loss_of(reads, chosen), inputs, retain_graph=True) for reads in (actual, expected)))
    check(*(grads_of(loss_of(reads, sites), inputs) for reads in (actual, expected)))


def test_sites_that_are_not_read(case, inputs):
    """Two sublayers that write one after the other, and a site that is read first in the middle of a block."""
    sites = [0, 3, 4, 9, 12]
    actual = {i: stream.read() for i, stream in enumerate(streams_of(case, *inputs)) if i in sites}
    expected = definitions_of(case, *inputs)
    check([actual[site] for site in sites], [expected[site] for site in sites])
    check(*(grads_of(loss_of(reads, sites), inputs) for reads in (actual, expected)))


@pytest.mark.parametrize("order", [range(SITES), range(SITES)[::-1], [8, 3, 13, 5, 5, 0, 9]])
def test_streams_are_read_in_any_order_and_twice(case, inputs, order):
    streams = list(streams_of(case, *inputs))
    actual, expected = [streams[site].read() for site in order], definitions_of(case, *inputs)
    expected = [expected[site] for site in order]
    check(actual, expected)
    check(*(grads_of(loss_of(reads, range(len(order))), inputs) for reads in (actual, expected)))


@pytest.mark.parametrize(
    "frozen", ["queries", "embedding", "queries and embedding", "all but the last", "but queries"]
)
def test_only_what_is_asked_for(case, inputs, frozen):
    """What is frozen gets no gradient, and the others those that they have without."""
    chosen = {
        "queries": [0],
        "embedding": [1],
        "queries and embedding": [0, 1],
        "all but the last": range(SITES),
        "but queries": range(1, SITES + 1),
    }[frozen]
    for i in chosen:
        inputs[i].requires_grad_(False)
    asked_for = [tensor for tensor in inputs if tensor.requires_grad]
    losses = [loss_of(reads) for reads in (reads_of(case, *inputs), definitions_of(case, *inputs))]
    check(*(grads_of(loss, asked_for) for loss in losses))


def test_gradients_of_one_source_alone(case, inputs):
    """And of the others behind it, through a graph that is kept."""
    losses = [loss_of(reads) for reads in (reads_of(case, *inputs), definitions_of(case, *inputs))]
    for source in (inputs[4], inputs[1], inputs[0]):
        check(*(grads_of(loss, [source], retain_graph=True) for loss in losses))
    check(*(grads_of(loss, inputs) for loss in losses))


@pytest.mark.parametrize("which", [0, 1, 6])
def test_what_was_changed_in_place_is_an_error_or_makes_no_difference(case, inputs, which):
    """Backward is of what forward saw: queries are copied, and so are outputs that a block sums up."""
    inputs[which].requires_grad_(False)
    expected = grads_of(loss_of(definitions_of(case, *inputs)), asked_for := [i for i in inputs if i.requires_grad])
    loss = loss_of(reads_of(case, *inputs))
    inputs[which].add_(1)
    if which == 1 or which == 6 and case[1] == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        check(grads_of(loss, asked_for), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_checkpointing_of_any_run_of_sites(case, inputs, length, use_reentrant):
    """Of a stream that goes on inside from what is given, as a function that somebody else has written does."""
    queries, embedding, *outputs = inputs

    def run(stream, *outputs):
        reads = []
        for output in outputs:
            reads.append(stream.read())
            stream = stream + output
        return reads, stream

    def of_leaves(context, cls, *tensors):
        num_leaves = len(tensors) - length
        reads, stream = run(cls.tree_unflatten(tensors[:num_leaves], context), *tensors[num_leaves:])
        leaves, context = stream.tree_flatten()
        contexts.append((context, type(stream)))
        return *reads, *(leaf for leaf in leaves if leaf is not None)

    (stream, *_), contexts, reads = streams_of(case, *inputs), [], []
    for first in range(0, SITES - length, length):
        leaves, context = stream.tree_flatten()
        given = [*leaves, *outputs[first : first + length]]
        found = checkpoint(of_leaves, context, type(stream), *given, use_reentrant=use_reentrant)
        context, cls = contexts[-1]
        reads += found[:length]
        leaves, has_partial = list(found[length:]), (first + length) % case[1] > 0
        if not has_partial:
            leaves.insert(len(leaves) - (1 + (first + length) // case[1]), None)
        stream = cls.tree_unflatten(leaves, context)
    sites = range(len(reads))
    expected = grads_of(loss_of(definitions_of(case, *inputs), sites), inputs)
    loss_of(reads, sites).backward()
    check([tensor.grad for tensor in inputs], expected)


def test_saved_tensors_elsewhere(case, inputs):
    with torch.autograd.graph.save_on_cpu():
        actual = grads_of(loss_of(reads_of(case, *inputs)), inputs)
    check(actual, grads_of(loss_of(definitions_of(case, *inputs)), inputs))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_copies_in_the_middle_of_a_chunk(case, inputs, copied):
    inputs = [tensor.detach() for tensor in inputs]
    expected = definitions_of(case, *inputs)
    for site, stream in enumerate(streams_of(case, *inputs)):
        torch.testing.assert_close(copied(stream).read(), expected[site], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stream.read(), expected[site], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [0, 4, 7])
def test_who_looks_on_without_gradients(case, inputs, mode, first):
    """What was read without is not used where gradients are wanted."""
    reads = []
    for site, stream in enumerate(streams_of(case, *inputs)):
        if site >= first:
            with mode():
                stream.read(nn.LayerNorm(8).double())
                stream.read()
        reads.append(stream.read())
    check(*(grads_of(loss_of(of_way), inputs) for of_way in (reads, definitions_of(case, *inputs))))


@pytest.mark.parametrize("num_closed", [1, 3])
def test_changed_in_place_between_two_passes_through_parts(inputs, num_closed):
    """The first pass stops before phase 1, and has computed mixes again."""
    case, first = (ReadConfig(), 2), 2 * (num_closed - 1)
    inputs[1].requires_grad_(False)
    queries, embedding, *outputs = inputs
    *_, stream = streams_of(case, queries, embedding, *outputs[: first + 1])
    loss = stream.read().cos().sum()
    torch.autograd.grad(loss, [outputs[first]], retain_graph=True)
    embedding.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [queries])


@pytest.mark.one_in(3)
def test_nothing_is_kept_behind_the_backward_pass(case, inputs, monkeypatch):
    """The mixes of a chunk, once computed again, go with it."""
    mixes, again = [], ReadClosed.mix_again

    def watched(ctx, place):
        mix = again(ctx, place)
        mixes.append(weakref.ref(ctx.mixes_of_sites))
        return mix

    monkeypatch.setattr(ReadClosed, "mix_again", watched)
    loss = loss_of(reads_of(case, *inputs))
    loss.backward(retain_graph=True)
    gc.collect()
    assert mixes and not [mix for mix in mixes if mix() is not None]


def test_threads(case, inputs):
    """Each has a forward and a backward pass; streams share nothing."""
    expected, found = grads_of(loss_of(definitions_of(case, *inputs)), inputs), []

    def work():
        for _ in range(3):
            found.append(grads_of(loss_of(reads_of(case, *inputs)), inputs))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    for grads in found:
        check(grads, expected)


@pytest.mark.slow
def test_compiled_autograd_of_a_forward_pass_that_is_not_compiled(inputs):
    """It lifts what a node saves out of the graph, and phase 2 asks for what another node has saved."""
    from torch._dynamo import compiled_autograd

    loss = loss_of(reads_of((ReadConfig(), 3), *inputs))
    with compiled_autograd._enable(torch.compile(backend="eager")), pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert "Compile the forward pass as well" in str(caught.value)


def test_second_derivatives_are_refused(inputs):
    loss = loss_of(reads_of((ReadConfig(), 3), *inputs))
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(grad.sum() for grad in grads).backward()


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_of_both_passes(case, inputs, autocast):
    inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]

    def grads():
        loss = loss_of(reads_of(case, *inputs))
        return loss.detach(), grads_of(loss, inputs)

    expected = grads()
    with torch.autocast("cpu", dtype=autocast):
        actual = grads()
    assert torch.equal(actual[0], expected[0]) and all(map(torch.equal, actual[1], expected[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(case, inputs, dtype):
    queries = inputs[0].detach().float().requires_grad_()
    sources = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs[1:]]
    grads = [torch.randn(2, 3, 8, dtype=torch.float64).to(dtype) for _ in range(SITES)]

    def run(reads_of, queries, *sources):
        reads = reads_of(case, queries, *sources)
        return [read.to(dtype) for read in reads], torch.autograd.grad(reads, [queries, *sources], grads_of_reads)

    grads_of_reads = grads
    found = run(reads_of, queries, *sources)
    grads_of_reads = [grad.double() for grad in grads]
    exact = run(definitions_of, *(tensor.detach().double().requires_grad_() for tensor in (queries, *sources)))
    # A block is a sum in the dtype, and a gradient of a source a sum of those of up to 14 reads
    tolerance = 32 * torch.finfo(dtype).eps
    for actual, of_definition in zip([*found[0], *found[1]], [*exact[0], *exact[1]], strict=True):
        error = (actual.double() - of_definition.double()).abs().max() / of_definition.double().abs().max()
        assert error < tolerance


@pytest.mark.one_in(1)  # all of them: each reads differently
@pytest.mark.parametrize("read_config", READS.values(), ids=ReadConfig.in_words)
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_block_cache_of_many_blocks(read_config, block_size):
    """So many that a chunk has two blocks, and a site both closed and open sources since it began."""
    generator, num_sites = torch.Generator().manual_seed(0), 18 * block_size
    queries, *outputs = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in [(num_sites, 8), *[(2, 3, 8)] * num_sites]
    )
    assert end_of_chunk(block_size, block_size, num_sites) > 2 * block_size
    with torch.no_grad():
        stream = start_stream(read_config, (queries,), (outputs[0],), block_size=block_size, eps=EPS)
        stream = stream.keep_in(BlockCache())
        for site, output in enumerate(outputs[1:]):
            how = read_config.num_heads, read_config.weights, read_config.keeps_stream
            check([stream.read()], read_by_definition(queries[site], stream.sources, EPS, *how)[:1])
            stream = stream + output


def test_a_block_changed_in_another_stream_stays(case, inputs):
    """A stream with another newest source has the others, whatever is written over in the cache that it came from."""
    read_config, block_size = case
    queries, embedding, *outputs = (tensor.detach() for tensor in inputs)
    cache = BlockCache()

    def start(source):
        return start_stream(read_config, (queries,), (source,), block_size=block_size, eps=EPS).keep_in(cache)

    with torch.no_grad():
        stream = start(embedding)
        for output in outputs[:block_size]:
            stream = stream + output
        doubled = stream.on_newest(lambda source: 2 * source)
        sources = [embedding, 2 * sum(outputs[:block_size])]
        start(3 * embedding)
        how = read_config.num_heads, read_config.weights, read_config.keeps_stream
        check([doubled.read()], read_by_definition(queries[block_size], sources, EPS, *how)[:1])


def test_a_source_that_is_left_out(case, inputs):
    """By a recorder: nothing of it is read, also where the stream is kept."""
    read_config, block_size = case
    queries, embedding, *outputs = inputs
    recorder = DepthRecorder(masked_source={7: 1})
    for site, stream in enumerate(streams_of(case, *inputs, recorder=recorder)):
        if site == 7:
            found, sources = stream.read(), list(stream.sources)
    seen = [sources[0], *sources[2:]]
    how = read_config.num_heads, read_config.weights, read_config.keeps_stream
    mix, weights = read_by_definition(queries[7], seen, EPS, *how)
    check([found], [mix])
    assert not recorder.weights[7][..., 1].any() and recorder.weights[7].sum() > 0
    assert torch.allclose(recorder.weights[7].sum(-1), weights.sum(-1).view(recorder.weights[7].shape[:-1]))
