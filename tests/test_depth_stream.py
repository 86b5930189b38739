# SPDX-License-Identifier: Apache-2.0
"""The residual stream as layers see it: a tensor to add to, whose reads are the definition, and a value."""

import copy
import functools
import operator
import pickle
import random

import pytest
import torch
from rounding import UpToRounding
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres import BlockCache, DepthRecorder, DepthStream
from attnres.base.classes import ReadingNorm, combined_class
from attnres.base.slices import stack_sources
from attnres.depth.definition import depth_attention_reference
from attnres.depth.other_reads import VariantStream
from attnres.depth.reads import ReadConfig
from attnres.depth.stream import checkpoint_stream


EPS = 1e-6
SITES = 9
WAYS = ["with gradients", "without gradients", "block cache"]


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def queries_embedding_outputs(shape=(3, 5, 7), dtype=torch.float64):
    """What a stack of 8 sublayers reads and writes, if that does not depend on what it reads."""
    queries = numbers(SITES, shape[-1], dtype=torch.promote_types(dtype, torch.float32))
    inputs = (queries, *(numbers(*shape, dtype=dtype, seed=1 + i) for i in range(SITES)))
    return [tensor.requires_grad_() for tensor in inputs]


def sources_at(site, block_size, embedding, *outputs):
    return [embedding, *(sum(outputs[i : min(i + block_size, site)]) for i in range(0, site, block_size))]


def definition(site, block_size, sums, queries, embedding, *outputs):
    """A read at a site, times its number of sources if queries of zero are to read the sum."""
    sources = sources_at(site, block_size, embedding, *outputs)
    return depth_attention_reference(queries[site], sources, EPS)[0] * (len(sources) if sums else 1)


def start(queries, embedding, block_size, way="with gradients", **kwargs):
    stream = DepthStream(queries, (embedding,), block_size=block_size, eps=EPS, **kwargs)
    return stream.keep_in(BlockCache()) if way == "block cache" else stream


def written(queries, embedding, outputs, block_size, way="with gradients", **kwargs):
    """The streams at all sites, each of the one before it."""
    streams = [start(queries, embedding, block_size, way, **kwargs)]
    for output in outputs:
        streams.append(streams[-1] + output)
    return streams


def in_way(way):
    return torch.set_grad_enabled(way == "with gradients")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7), (5, 7)], ids=str)
def test_reads_are_the_definition(shape, block_size, sums, way):
    inputs = queries_embedding_outputs(shape)

    def run(read_all, *inputs):
        with in_way(way):
            mixes = read_all(*inputs)
        if way != "with gradients":
            return mixes
        return mixes, torch.autograd.grad(mixes, inputs, list(numbers(SITES, *shape, seed=99)))

    def by_definition(*inputs):
        return [definition(site, block_size, sums, *inputs) for site in range(SITES)]

    def by_stream(queries, embedding, *outputs):
        streams = written(queries, embedding, outputs, block_size, way, scale_by_sources=sums)
        assert [stream.site for stream in streams] == list(range(SITES))
        return [stream.read() for stream in streams]

    expected = UpToRounding(functools.partial(run, by_definition), *inputs)
    expected.check(run(by_stream, *inputs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("is_reader", [False, True])
def test_reads_with_their_norm(is_reader, sums, way):
    """Whose epsilon tells what is multiplied by the number of sources in front of it."""
    queries, embedding, *outputs = queries_embedding_outputs(dtype=torch.float32)
    norm = LlamaRMSNorm(7, eps=0.5)
    nn.init.normal_(norm.weight)
    expected = [
        UpToRounding(
            lambda *inputs, site=site: norm(definition(site, 3, sums, *inputs)),
            queries,
            embedding,
            *outputs,
            model=norm,
        )
        for site in range(SITES)
    ]
    if is_reader:
        norm.__class__ = combined_class(ReadingNorm, LlamaRMSNorm)
    with in_way(way):
        for site, stream in enumerate(written(queries, embedding, outputs, 3, way, scale_by_sources=sums)):
            expected[site].check(norm(stream) if is_reader else stream.read(norm))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_streams_are_values(seed, block_size, way):
    """Two different writes to every stream, with reads in between, in any order: each reads its own outputs."""
    queries, embedding, *outputs = queries_embedding_outputs()
    choices, dice = [outputs[:4], outputs[4:]], random.Random(seed)
    expected, streams = {}, {}
    with in_way(way):
        streams[()] = start(queries, embedding, block_size, way)
        unwritten = [(0,), (1,)]
        for _ in range(90):
            if unwritten and dice.random() < 0.4:
                path = unwritten.pop(dice.randrange(len(unwritten)))
                streams[path] = streams[path[:-1]] + choices[path[-1]][len(path) - 1]
                unwritten += [(*path, choice) for choice in (0, 1) if len(path) < 4]
            path = dice.choice(list(streams))
            if path not in expected:
                own_outputs = [choices[choice][i] for i, choice in enumerate(path)]
                read = functools.partial(definition, len(path), block_size, False)
                expected[path] = UpToRounding(read, queries, embedding, *own_outputs)
            expected[path].check(streams[path].read())
    assert not unwritten or len(expected) > 20


@pytest.mark.parametrize("first_reads", ["before", "after", "both"])
def test_second_writer_to_a_cached_block(first_reads):
    queries, embedding, *outputs = queries_embedding_outputs()
    with torch.no_grad():
        stream = start(queries, embedding, 2, "block cache") + outputs[0]
        first = stream + outputs[1]
        expected = UpToRounding(functools.partial(definition, 2, 2, False), queries, embedding, *outputs[:2])
        if first_reads != "after":
            expected.check(first.read())
        second = stream + outputs[2]
        UpToRounding(functools.partial(definition, 2, 2, False), queries, embedding, outputs[0], outputs[2]).check(
            second.read()
        )
        if first_reads != "before":
            expected.check(first.read())
        UpToRounding(functools.partial(definition, 1, 2, False), queries, embedding, outputs[0]).check(stream.read())
        UpToRounding(functools.partial(definition, 3, 2, False), queries, embedding, *outputs[:3]).check(
            (first + outputs[2]).read()
        )


def test_stream_of_an_earlier_forward_pass():
    """Its blocks are no longer there, and nothing says so but the stream."""
    queries, embedding, *outputs = queries_embedding_outputs()
    with torch.no_grad():
        cache = BlockCache()
        first = start(queries, embedding, 1).keep_in(cache)
        # The last two have blocks that the cache has never had
        streams = [first + outputs[0], first + outputs[0] + outputs[1], first + outputs[2], (first + outputs[0]) * 2]
        start(queries, outputs[5], 1).keep_in(cache)
        for stream in streams:
            for use in (
                DepthStream.read,
                lambda stream: stream + outputs[3],
                lambda stream: stream * 2,
                lambda stream: stream.reshape(-1, 7),
                lambda stream: stream.to("cpu:0"),
                pickle.dumps,
            ):
                with pytest.raises(RuntimeError, match=rf"\(site {stream.site}\) is of an earlier forward pass"):
                    use(stream)
        assert torch.equal(first.read(), embedding), "the embedding is not in the memory of the cache"


def test_a_cache_for_many_passes():
    """The buffers are used again, and what was read before stays."""
    queries, embedding, *outputs = queries_embedding_outputs()
    cache, reads = BlockCache(), []
    with torch.no_grad():
        for inputs in (outputs[:4], outputs[4:]):
            stream = start(queries, embedding, 2).keep_in(cache)
            for site in range(4):
                stream = stream + inputs[site]
                expected = functools.partial(definition, site + 1, 2, False)
                reads.append((stream.read(), UpToRounding(expected, queries, embedding, *inputs[: site + 1])))
    for read, expected in reads:
        expected.check(read)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7)], ids=["tokens", "one token"])
def test_layers_that_go_on_on_another_device(shape, is_open):
    """As far as a CPU can tell, which is another device than itself by number."""
    queries, embedding, *outputs = queries_embedding_outputs(shape, torch.float32)
    with torch.no_grad():
        stream = written(queries, embedding, outputs[: 3 if is_open else 4], 2, "block cache")[-1]
        expected = stream.read()
        moved = stream.to("cpu:0")
        assert torch.equal(moved.read(), expected)
        for output in outputs[stream.site :]:
            stream, moved = stream + output, moved + output
            assert torch.equal(stream.read(), moved.read())
        assert not {block.data_ptr() for block in moved.blocks} & {block.data_ptr() for block in stream.blocks}
    stream = written(queries, embedding, outputs[:3], 2)[-1]
    grads = [
        torch.autograd.grad(moved.read(), (queries, embedding), torch.ones(shape), retain_graph=True)
        for moved in (stream, stream.to("cpu:0"), stream.to(torch.zeros(1, device="cpu:0")))
    ]
    assert all(map(torch.equal, grads[0], grads[1])) and all(map(torch.equal, grads[0], grads[2]))


def test_a_dtype_is_remembered_and_not_read():
    queries, embedding, *outputs = queries_embedding_outputs(dtype=torch.float32)
    recorder = DepthRecorder()
    stream = written(queries, embedding, outputs[:4], 3, recorder=recorder)[-1]
    for cast, dtype in (
        (stream.to(torch.bfloat16), torch.bfloat16),
        (stream.to(dtype=torch.float64), torch.float64),
        (stream.to("cpu", torch.float16), torch.float16),
        (stream.to(outputs[0].bfloat16()), torch.bfloat16),
        (stream.double(), torch.float64),
        (stream.half(), torch.float16),
        (stream.bfloat16(), torch.bfloat16),
        (stream.half().double(), torch.float64),
    ):
        assert isinstance(cast, DepthStream) and cast.dtype == dtype and cast.site == 4
        assert stream.dtype == torch.float32 and not recorder.weights
        assert torch.equal(cast.read(), stream.read().to(dtype))
        recorder.weights.clear()
    assert stream.float() is stream.to("cpu") is stream


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float64")], ids=str
)
def test_outputs_of_another_dtype_than_the_embedding(dtypes, block_size, way):
    """The sources are as wide as the widest of them, and nothing is rounded on the way."""
    of_embedding, *of_output = (getattr(torch, name) for name in dtypes)
    queries, embedding, *outputs = queries_embedding_outputs()
    embedding, outputs = embedding.to(of_embedding), [output.to(*of_output) for output in outputs]
    with in_way(way):
        for site, stream in enumerate(written(queries, embedding, outputs, block_size, way)[1:], start=1):
            widest = torch.promote_types(of_embedding, *of_output)
            assert stream.dtype == widest
            inputs = [queries, *(tensor.to(widest) for tensor in (embedding, *outputs[:site]))]
            UpToRounding(functools.partial(definition, site, block_size, False), *inputs).check(stream.read())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_output", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_are_those_of_tensors(dtype, cast, of_output, block_size, way):
    """Reads are in the dtype that was asked for, or that sums of tensors have, and no source is rounded for that."""
    queries, embedding, *outputs = queries_embedding_outputs()
    norm, tensor = nn.LayerNorm(7), embedding.to(dtype)
    with in_way(way):
        stream = start(queries, tensor, block_size, way)
        for output in outputs[:3]:
            tensor, stream = tensor.to(cast) + output.to(of_output), stream.to(cast) + output.to(of_output)
            assert tensor.dtype == stream.dtype == stream.read().dtype
            assert norm.to(torch.float32)(tensor.float()).dtype == stream.float().read(norm).dtype
        sources_dtype = functools.reduce(torch.promote_types, (dtype, cast, of_output))
        inputs = [
            queries,
            embedding.to(dtype).to(sources_dtype),
            *(o.to(of_output).to(sources_dtype) for o in outputs),
        ]
        mix = UpToRounding(lambda *inputs: definition(3, block_size, False, *inputs).to(stream.dtype), *inputs)
        mix.check(stream.read())


def test_a_norm_is_given_the_dtype_that_was_asked_for():
    """As `norm(stream.to(dtype))` is of a tensor, whatever the norm's own dtype makes of it."""
    queries, embedding, *outputs = queries_embedding_outputs(dtype=torch.float32)
    norm = LlamaRMSNorm(7)
    for way in WAYS:
        with in_way(way):
            stream = written(queries, embedding, outputs[:4], 3, way)[-1].bfloat16()
            assert torch.equal(stream.read(norm), norm(stream.read())) and stream.read(norm).dtype == torch.float32


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [2.5, -3, torch.tensor(2.5), torch.tensor([2.5])], ids=repr)
def test_multiplication_by_a_number(number, way):
    """Is no read: it multiplies every source, and what is written behind it comes on top."""
    inputs = queries_embedding_outputs()
    with in_way(way):
        stream = written(inputs[0], inputs[1], inputs[2:6], 3, way)[-1]
        multiplied = stream
        multiplied *= number
        for result in (stream * number, number * stream, multiplied, stream / (1 / float(number))):
            assert isinstance(result, DepthStream) and result.site == 4

            def by_definition(queries, *sources, site):
                return definition(site, 3, False, queries, *(number * source for source in sources[:5]), *sources[5:])

            UpToRounding(functools.partial(by_definition, site=4), *inputs).check(result.read())
            UpToRounding(functools.partial(by_definition, site=5), *inputs).check((result + inputs[6]).read())
        UpToRounding(functools.partial(definition, 4, 3, False), *inputs).check(stream.read())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", [0, 3, 4])
def test_some_of_the_tokens(site, way):
    """Are a stream of their own, which is written to and read as the whole one is."""
    inputs = queries_embedding_outputs()
    with in_way(way):
        stream = written(inputs[0], inputs[1], inputs[2 : 2 + site], 3, way)[-1]
        assert stream[:, :] is stream and stream[:, 0:, :] is stream and stream[:, -5:] is stream
        for index in ((slice(None), slice(-2, None)), (slice(None), slice(1, 4), slice(None)), slice(1, None)):
            some = stream[index]
            assert isinstance(some, DepthStream) and some.site == site
            expected = UpToRounding(functools.partial(definition, site, 3, False), *inputs).expected["result"]
            torch.testing.assert_close(some.read(), expected[index])
            behind = UpToRounding(functools.partial(definition, site + 1, 3, False), *inputs).expected["result"]
            torch.testing.assert_close((some + inputs[2 + site][index]).read(), behind[index])
        assert isinstance(stream[..., -1:], torch.Tensor) and isinstance(stream[:, :, :3], torch.Tensor)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", [3, 4])
def test_reshape(site, way):
    inputs = queries_embedding_outputs()
    with in_way(way):
        stream = written(inputs[0], inputs[1], inputs[2 : 2 + site], 3, way)[-1]
        expected = UpToRounding(functools.partial(definition, site, 3, False), *inputs)
        for flat in (
            stream.reshape(-1, 7),
            stream.reshape(15, 7),
            stream.view((15, 7)),
            stream.view(torch.Size((15, 7))),
        ):
            assert isinstance(flat, DepthStream) and flat.shape == (15, 7) and flat.site == site
            expected.check(flat.read().view(3, 5, 7))
            again = (flat + inputs[2 + site].view(15, 7)).view(3, 5, 7)
            UpToRounding(functools.partial(definition, site + 1, 3, False), *inputs).check(again.read())
        for other in (stream.reshape(-1), stream.view(3, -1), stream.flatten(1), stream.reshape([5, 21])):
            assert isinstance(other, torch.Tensor) and torch.equal(other, stream.read().reshape(other.shape))


def write_by_iadd(stream, output):
    stream += output
    return stream


WRITES = {
    "stream + output": operator.add,
    "output + stream": lambda stream, output: output + stream,
    "stream += output": write_by_iadd,
    "output += stream": lambda stream, output: write_by_iadd(output, stream),
    "torch.add(stream, output)": torch.add,
    "torch.add(output, stream)": lambda stream, output: torch.add(output, stream),
    "write": DepthStream.write,
    "behind dropout that is off": lambda stream, output: F.dropout(stream, 0.5, training=False) + output,
    "behind dropout of zero": lambda stream, output: nn.Dropout(0.0)(stream) + output,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITES)
def test_additions_that_write(write, way):
    queries, embedding, *outputs = (tensor.detach() for tensor in queries_embedding_outputs())
    before = outputs[4].clone()
    with in_way(way):
        stream = written(queries, embedding, outputs[:4], 3, way)[-1]
        after = WRITES[write](stream, outputs[4])
        assert isinstance(after, DepthStream) and (stream.site, after.site) == (4, 5)
        assert torch.equal(after.read(), (stream + outputs[4]).read()) and torch.equal(outputs[4], before)


@pytest.mark.parametrize("function", [torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.copy_])
def test_nothing_is_done_in_place(function):
    queries, embedding, *outputs = queries_embedding_outputs()
    stream = written(queries, embedding, outputs[:4], 3)[-1]
    with pytest.raises(TypeError, match=f"`{function.__name__}` works in place, and the residual stream"):
        function(outputs[4].detach(), stream)


def test_a_stream_is_read_into_a_tensor():
    """By a method whose name ends as those that are refused."""
    queries, embedding, *outputs = queries_embedding_outputs()
    stream = written(queries, embedding, outputs[:4], 3)[-1]
    tensor = torch.zeros_like(embedding)
    tensor[:] = stream
    assert torch.equal(tensor, stream.read())


READS = {
    "a part of an output": lambda stream, x: stream + x[:1],
    "an output that is scaled": lambda stream, x: torch.add(stream, x, alpha=2.0),
    "a number": lambda stream, x: 1.0 + stream,
    "itself": lambda stream, x: stream + stream,
    "itself, times": lambda stream, x: stream * stream,
    "a vector, times": lambda stream, x: stream * x[0, 0],
    "a vector, in front": lambda stream, x: x[0, 0] * stream,
    "a number for each token": lambda stream, x: stream * x[..., :1],
    "a quotient of two": lambda stream, x: x / stream + stream / (x * x + 1),
    "powers": lambda stream, x: -(stream**2) @ x.mT,
    "differences": lambda stream, x: (stream - x) + (x - stream) * 2,
    "items": lambda stream, x: stream[1:, 2],
    "lists": lambda stream, x: torch.cat([stream, x], dim=-1),
    "linear": lambda stream, x: F.linear(stream, x[0]),
    "rms": lambda stream, x: stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True)),
    "matmul": lambda stream, x: stream @ x.mT if isinstance(stream, torch.Tensor) else stream.matmul(x.mT),
    "transpose": lambda stream, x: stream.transpose(0, 1).unsqueeze(0),
    "dropout of all": lambda stream, x: F.dropout(stream, 1.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", READS)
def test_anything_else_reads(name, way):
    queries, embedding, *outputs = queries_embedding_outputs()
    with in_way(way):
        stream = written(queries, embedding, outputs[:4], 3, way)[-1]
        result = READS[name](stream, outputs[4])
        assert isinstance(result, torch.Tensor) and torch.equal(result, READS[name](stream.read(), outputs[4]))


def test_what_a_tensor_says_of_itself():
    queries, embedding, *outputs = queries_embedding_outputs()
    for stream in written(queries, embedding, outputs, 3):
        assert stream.shape == stream.size() == (3, 5, 7) and stream.size(-1) == 7 and len(stream) == 3
        assert stream.ndim == stream.dim() == 3 and stream.numel() == 105 and stream.is_floating_point()
        assert stream.requires_grad and not stream.is_cuda and stream.contiguous() is stream
        assert (stream.dtype, stream.device) == (torch.float64, embedding.device)


def copies_by_pytree(stream):
    """Taken apart and put together, as tensors cross the border of a wrapper; and with other tensors in it."""
    leaves, spec = pytree.tree_flatten(stream)
    assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert sum(leaf is not None for leaf in leaves) == 1 + len(stream.sources)
    cloned = pytree.tree_map(lambda leaf: None if leaf is None else leaf.clone(), stream)
    return pytree.tree_unflatten(leaves, spec), cloned


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", range(SITES))
def test_pytree(site, way):
    inputs = queries_embedding_outputs()
    grads = numbers(2, 3, 5, 7, seed=99)

    def reads_of(stream):
        """And those of a later site; with gradients."""
        mixes = [stream.read(), (stream + inputs[-1] if site < SITES - 1 else stream).read()]
        if way != "with gradients":
            return mixes
        return mixes, torch.autograd.grad(mixes, inputs, list(grads), materialize_grads=True)

    def by_definition(*inputs):
        outputs = [*inputs[2 : 2 + site], inputs[-1]]
        mixes = [definition(s, 3, True, *inputs[:2], *outputs) for s in (site, min(site + 1, SITES - 1))]
        if way != "with gradients":
            return mixes
        return mixes, torch.autograd.grad(mixes, inputs, list(grads), materialize_grads=True)

    expected = UpToRounding(by_definition, *inputs)
    with in_way(way):
        stream = written(inputs[0], inputs[1], inputs[2 : 2 + site], 3, way, scale_by_sources=True)[-1]
        for again in copies_by_pytree(stream):
            assert again.site == site and again is not stream
            expected.check(reads_of(again))


class Layer(nn.Module):
    """Two sublayers with a norm each, which hands on a tensor besides the stream."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(7, eps=0.5) for _ in range(2))
        self.sublayers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        for norm in self.norms:
            norm.__class__ = combined_class(ReadingNorm, nn.RMSNorm)

    def forward(self, stream, scale):
        for norm, sublayer in zip(self.norms, self.sublayers):
            stream = stream + scale * torch.tanh(sublayer(norm(stream)))
        return stream, scale + stream.read().mean()


def call(function, *args):
    return function(*args)


def gradients(mix, *inputs):
    """By `backward`, as reentrant checkpointing has it."""
    for tensor in inputs:
        tensor.grad = None
    mix.backward(numbers(*mix.shape, dtype=mix.dtype, seed=99))
    return [tensor.grad for tensor in inputs]


CHECKPOINTS = {
    "reentrant": functools.partial(checkpoint_stream, functools.partial(checkpoint, use_reentrant=True)),
    "not reentrant": functools.partial(checkpoint_stream, functools.partial(checkpoint, use_reentrant=False)),
    # As by a wrapper around the layer, which knows nothing of streams
    "by a wrapper": functools.partial(checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_activation_checkpointing(block_size, how):
    """The same values and gradients, and layers are computed twice."""
    layers = nn.ModuleList(Layer() for _ in range(4)).double()
    queries, embedding, *_ = queries_embedding_outputs()
    scale, calls = torch.ones((), dtype=torch.float64), []
    layers[2].register_forward_pre_hook(lambda *args: calls.append(1))

    def run(run_layer):
        stream, extra = start(queries, embedding, block_size, scale_by_sources=True), scale
        for layer in layers:
            stream, extra = run_layer(layer, stream, extra)
        mix = stream.read() + extra
        return mix, gradients(mix, queries, embedding, *layers.parameters())

    expected = UpToRounding(lambda: run(call), model=layers)
    calls.clear()
    expected.check(run(CHECKPOINTS[how]))
    assert len(calls) == 2


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_activation_checkpointing_of_outputs_of_another_dtype(block_size, how):
    def layer(stream, *outputs):
        for output in outputs:
            stream = stream + output
        return stream

    def run(run_layer, queries, embedding, *outputs):
        stream = start(queries, embedding.bfloat16(), block_size)
        stream = run_layer(layer, stream, *outputs[:2])
        stream = run_layer(layer, stream, *outputs[2:5])
        as_bfloat16 = run_layer(lambda stream: stream.bfloat16(), stream)
        assert isinstance(as_bfloat16, DepthStream) and as_bfloat16.dtype == torch.bfloat16
        assert (stream.site, stream.dtype) == (5, torch.float32)
        mix = stream.read()
        return mix, gradients(mix, queries, embedding, *outputs[:5])

    inputs = queries_embedding_outputs(dtype=torch.float32)
    UpToRounding(functools.partial(run, call), *inputs).check(run(CHECKPOINTS[how], *inputs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy, lambda stream: pickle.loads(pickle.dumps(stream))])
@pytest.mark.parametrize("site", [0, 3, 4])
def test_copies(site, make_copy, way):
    """They can be read and written to as what they are of, and have nothing to do with it."""
    queries, embedding, *outputs = (tensor.detach() for tensor in queries_embedding_outputs())
    cache = BlockCache()
    with in_way(way):
        stream = start(queries, embedding, 2)
        stream = stream.keep_in(cache) if way == "block cache" else stream
        for output in outputs[:site]:
            stream = stream + output
        copied = make_copy(stream)
        for output in outputs[site:]:
            assert copied.site == stream.site
            UpToRounding(functools.partial(definition, stream.site, 2, False), queries, embedding, *outputs).check(
                [stream.read(), copied.read()][stream.site % 2]
            )
            stream, copied = stream + output, copied + output
        expected = UpToRounding(functools.partial(definition, 8, 2, False), queries, embedding, *outputs)
        expected.check(stream.read())
        if make_copy is not copy.copy:  # the only one that shares memory
            start(queries, outputs[0], 2).keep_in(cache)
        expected.check(copied.read())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 7)], ids=["tokens", "one token"])
def test_autocast(shape, way):
    """Outputs come in half precision, and reads are computed as without it."""
    inputs = queries_embedding_outputs(shape, torch.float32)
    grads = list(numbers(SITES, *shape, dtype=torch.float32, seed=99))

    def run(read_all, *inputs):
        with in_way(way):
            mixes = read_all(*inputs)
        return (mixes, torch.autograd.grad(mixes, inputs, grads)) if way == "with gradients" else mixes

    def by_definition(queries, embedding, *outputs):
        outputs = [output.bfloat16().float() for output in outputs]
        return [definition(site, 3, False, queries, embedding, *outputs) for site in range(SITES)]

    def by_stream(queries, embedding, *outputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            streams = written(queries, embedding, [output.bfloat16() for output in outputs], 3, way)
            return [stream.read() for stream in streams]

    inputs = [inputs[0], inputs[1], *(output.detach().bfloat16().float().requires_grad_() for output in inputs[2:])]
    UpToRounding(functools.partial(run, by_definition), *inputs).check(run(by_stream, *inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("of_fields", [False, True])
def test_who_looks_on_takes_no_gradients_away(of_fields, mode):
    """A hook that reads streams without gradients, as one does for a log."""
    inputs = queries_embedding_outputs()
    grads = list(numbers(SITES, 3, 5, 7, seed=99))

    def run(look, *inputs):
        stream, mixes = start(inputs[0], inputs[1], 3), []
        for site in range(SITES):
            if of_fields:
                stream = copies_by_pytree(stream)[0]
            if look:
                with mode():
                    stream.read().norm()
            mixes.append(stream.read())
            stream = stream + inputs[2 + site] if site < SITES - 1 else stream
        return mixes, torch.autograd.grad(mixes, inputs, grads)

    UpToRounding(functools.partial(run, False), *inputs).check(run(True, *inputs))


@pytest.mark.parametrize("sums", [False, True])
def test_recorder(sums):
    """Weights, what has been written, and reads without one of the sources."""
    queries, embedding, *outputs = queries_embedding_outputs()
    recorder = DepthRecorder(masked_source={4: 1, 8: 0})
    for site, stream in enumerate(written(queries, embedding, outputs, 3, scale_by_sources=sums, recorder=recorder)):
        sources = sources_at(site, 3, embedding, *outputs)
        seen = [source for i, source in enumerate(sources) if recorder.masked_source.get(site) != i]

        def by_definition(query, factor, *seen):
            mix, weights = depth_attention_reference(query, seen, EPS)
            return mix * factor, weights

        mix, weights = stream.read(), recorder.weights[site]
        assert weights.shape == (3, 5, len(sources))
        if len(seen) < len(sources):
            masked = recorder.masked_source[site]
            assert not weights[..., masked].any()
            weights = torch.cat([weights[..., :masked], weights[..., masked + 1 :]], dim=-1)
        UpToRounding(by_definition, queries[site], len(sources) if sums else 1, *seen).check((mix, weights))
    assert list(recorder.outputs) == list(range(8)) and all(map(torch.equal, recorder.outputs.values(), outputs))


def test_weights_are_by_token_where_layers_flatten_tokens():
    """As those of OPT do."""
    queries, *of_tokens = queries_embedding_outputs()
    flat = [tensor.flatten(0, 1) for tensor in of_tokens]
    recorders = DepthRecorder(tokens=torch.Size((3, 5))), DepthRecorder(tokens=torch.Size((3, 5)))
    for recorder, (embedding, *outputs) in zip(recorders, (of_tokens, flat)):
        for stream in written(queries, embedding, outputs, 3, recorder=recorder):
            stream.read()
    expected, found = (recorder.weights for recorder in recorders)
    assert expected.keys() == found.keys()
    torch.testing.assert_close(list(found.values()), list(expected.values()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("site, masked", [(0, 0), (4, 3), (4, -1)])
def test_what_cannot_be_left_out(site, masked):
    """The only source, of which the softmax would be NaN, and one that is not there."""
    queries, embedding, *outputs = queries_embedding_outputs()
    recorder = DepthRecorder(masked_source={site: masked})
    stream = written(queries, embedding, outputs[:site], 3, recorder=recorder)[-1]
    with pytest.raises(ValueError, match=f"`masked_source={{{site}: {masked}}}` cannot be left out: site {site} has"):
        stream.read()


def test_a_stream_whose_memory_is_gone_is_not_handed_on():
    queries, embedding, *outputs = queries_embedding_outputs()
    cache = BlockCache()
    with torch.no_grad():
        earlier = DepthStream(queries, (embedding,), block_size=3, eps=EPS).keep_in(cache)
        for output in outputs[:4]:
            earlier = earlier + output
        stacked = stack_sources(earlier)
        assert torch.equal(stacked[0], embedding) and len(stacked) == 3
        DepthStream(queries, (2 * embedding,), block_size=3, eps=EPS).keep_in(cache)
        for hand_on in (stack_sources, DepthStream.tree_flatten, pytree.tree_flatten, copy.deepcopy):
            with pytest.raises(RuntimeError, match="is of an earlier forward pass"):
                hand_on(earlier)


def test_a_norm_with_more_arguments_reads_by_itself():
    """What it does with them is its own."""

    class GatedRMSNorm(nn.RMSNorm):
        def forward(self, hidden_states, gate=None):
            return super().forward(hidden_states if gate is None else hidden_states * torch.sigmoid(gate))

    queries, embedding, *outputs = queries_embedding_outputs()
    stream = written(queries, embedding, outputs[:4], 3)[-1]
    plain = GatedRMSNorm(7)
    norm = copy.deepcopy(plain)
    norm.__class__ = combined_class(ReadingNorm, GatedRMSNorm)
    assert torch.equal(norm(stream), plain(stream.read()))
    assert torch.equal(norm(stream, outputs[0]), plain(stream.read(), outputs[0]))
    assert torch.equal(norm(stream, gate=outputs[0]), plain(stream.read(), gate=outputs[0]))


@pytest.mark.parametrize("way", ["with gradients", "block cache"])
def test_compiles_without_breaks(way):
    inputs = queries_embedding_outputs(dtype=torch.float32)

    def read_all(queries, embedding, *outputs):
        stream = start(queries, embedding, 3, way, scale_by_sources=True)
        mixes = [stream.read()]
        for output in outputs:
            stream = stream + output
            mixes.append(stream.read())
        return mixes

    torch._dynamo.reset()
    compiled = torch.compile(read_all, fullgraph=True, backend="aot_eager")
    with in_way(way):
        UpToRounding(read_all, *inputs).check(compiled(*inputs))


def started(queries, tensor, block_size: int, each: bool, cached: bool):
    if each:
        stream = VariantStream(
            queries, (tensor,), block_size=block_size, scale_by_sources=True, read_config=ReadConfig(open_block="each")
        )
        return stream.keep_in(BlockCache()) if cached else stream
    stream = DepthStream(queries, (tensor,), block_size=block_size, scale_by_sources=True)
    return stream.keep_in(BlockCache()) if cached else stream


@pytest.mark.parametrize("each", [False, True], ids=["sum", "each"])
@pytest.mark.parametrize("cached", [False, True], ids=["gradients", "cache"])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_features_of_some_tokens(block_size, cached, each):
    """They belong to the newest output, in an open block and in one that has just been closed."""
    torch.manual_seed(0)
    queries = torch.randn(5, 8, dtype=torch.float64)
    embedding, *outputs = torch.randn(5, 2, 3, 8, dtype=torch.float64).unbind(0)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    features = torch.randn(2, 3, 8, dtype=torch.float64).unbind(0)
    with torch.set_grad_enabled(not cached):
        stream = started(queries, embedding, block_size, each, cached)
        expected = started(queries, embedding, block_size, each, cached=False)
        for number, output in enumerate(outputs):
            before, stream = stream + output, (stream + output).clone()
            more = torch.zeros_like(output)
            if number < 2:
                if number == 0:
                    stream[mask, :] = stream[mask, :] + features[number]
                else:
                    taken = (stream[mask] + features[number]).view(-1)
                    stream = stream.masked_scatter(mask.unsqueeze(-1), taken)
                more[mask] = features[number]
                assert not torch.equal(stream.newest, before.newest)  # a stream that was kept has not changed
            expected = expected + (output + more)
            torch.testing.assert_close(stream.read(), expected.read(), rtol=0, atol=1e-13)
            assert stream.site == number + 1


def test_tokens_are_replaced_by_themselves_alone():
    stream = DepthStream(torch.zeros(3, 8), (torch.randn(1, 4, 8),)) + torch.randn(1, 4, 8)
    mask = torch.tensor([[True, True, False, False]])
    assert torch.equal(torch.relu(stream[mask]), torch.relu(stream.read()[mask]))
    added = stream[mask] + torch.randn(2, 8)
    for value in (stream.read()[mask], (stream + torch.randn(1, 4, 8))[mask], stream[~mask]):
        with pytest.raises(TypeError, match="tokens can be replaced only by themselves"):
            stream[mask] = value
    with pytest.raises(TypeError, match="has to be put back"):
        torch.relu(added)
