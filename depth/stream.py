# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The residual stream as an object: what the layers of a base get in place of the tensor.

A decoder treats its residual stream in two ways only. It adds the output of a sublayer to it, and it reads it. A
`DepthStream` keeps what was added apart, and lets every read attend over it (arXiv 2603.15031, equations 2 to 6):

    stream + output    writes: a new stream whose open block has one more output
    anything else      reads: the mix over depth at this site, a plain tensor

A *site* is a place between two writes; site 0 is in front of the first one, and the last site is where the final norm
reads. After every `block_size` writes the sum of their outputs becomes a source of its own, a closed block; the first
source is the embedding. A stream is a value, as a tensor is: nothing changes one that exists, so what recomputes a
layer (activation checkpointing) or hands streams about (FSDP, pipelines) computes the same again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .attention import BlockCache, depth_weights, has_kernel, mix_and_norm, norm_of, read_and_norm, source_scores
from .backends import backend_of, fused_read


@dataclass
class DepthRecorder:
    """What is to be seen of the reads and writes of one forward pass, and what is to be left out.

    Pass one to a model as `depth_recorder=`. With a recorder every read computes its weights, without block cache.
    """

    # By site: the source that is left out of the softmax there; a site has to have another one
    masked_source: dict[int, int] = field(default_factory=dict)
    # By site, `[batch, seq, sources]`: the embedding, the closed blocks, and the partial sum if a block is open
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    # By the site before it, `[batch, seq, hidden]` or as a layer that flattens tokens has it: what a sublayer has
    # written; `None`: not kept
    outputs: dict[int, torch.Tensor] | None = field(default_factory=dict)
    # `[batch, seq]` of the forward pass, set by the model
    tokens: torch.Size | None = None

    def by_token(self, tensor: torch.Tensor, num_dims: int = 1) -> torch.Tensor:
        """A layer's tensor as `[batch, seq, ...]`, also of one that flattens the tokens; `num_dims` follow them."""
        if self.tokens is None or tensor.shape[:-num_dims] != (self.tokens.numel(),):
            return tensor
        return tensor.unflatten(0, self.tokens)


@dataclass(eq=False)  # a dataclass, as FSDP2 looks for tensors in these
class DepthStream:
    """The sources of the reads over depth, at one site.

    Args:
        queries: the folded queries of all sites, `[sites, hidden]`.
        blocks: the embedding and the sum of every closed block, each `[batch, seq, hidden]`.
        partial: the sum of the outputs in the open block, or `None` if a block has just been closed.
        site: the number of writes so far.
        block_size: writes per block.
        eps: epsilon of the RMSNorm on the keys.
        sums: whether a read is multiplied by its number of sources, so that queries of zero read the sum of all.
        cast: what a reader has asked for by `.to(dtype)`, given to the next read or write.
        recorder: of this forward pass, if there is one.
    """

    queries: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    partial: torch.Tensor | None = None
    site: int = 0
    block_size: int = 1
    eps: float = 1e-6
    sums: bool = False
    cast: torch.dtype | None = None
    recorder: DepthRecorder | None = None

    def __post_init__(self):
        # Kept from read to read, and computed again where only the fields have come along
        self.mix: torch.Tensor | None = None
        # For each block the first site that it was scored for, and its scores from there on
        self.scores: tuple[tuple[int, tuple[torch.Tensor, ...]], ...] = ()
        self.scored_until: int | None = None  # up to which site blocks are scored at once; `None`: all
        # Its memory may also hold later blocks, written by a stream that has gone further
        self.cache: BlockCache | None = None
        self.cache_pass, self.is_cached = 0, False

    # Writing

    def write(self, output: torch.Tensor) -> "DepthStream":
        """The stream with one more output, `[batch, seq, hidden]`; closes the block if this is its last."""
        cast = None
        if self.cast is not None or output.dtype != self.newest.dtype:
            read_as = torch.promote_types(self.dtype, output.dtype)  # as a sum of tensors has it
            dtype = torch.promote_types(read_as, self.newest.dtype)
            if self.newest.dtype != dtype:
                return self._widened(dtype).write(output)
            output = output.to(dtype)
            cast = None if read_as == dtype else read_as
        if self.recorder is not None and self.recorder.outputs is not None:
            self.recorder.outputs[self.site] = output  # itself, as somebody may want its gradient
        return self._append(output, cast)

    def _append(self, output: torch.Tensor, cast: torch.dtype | None) -> "DepthStream":
        partial = output if self.partial is None else self.partial + output
        site = self.site + 1
        if site % self.block_size:
            return self._with(self.blocks, partial, site, cast, self.is_cached)
        cache = self._usable_cache(partial)
        if cache is not None:
            return self._with((*self.blocks, cache.append(partial)), None, site, cast, is_cached=True)
        new = self._with((*self.blocks, partial), None, site, cast, is_cached=False)
        # Now rather than at a read, which may run inside a checkpointed layer, where the same has to be done again
        last = len(self.queries) if self.scored_until is None else self.scored_until
        if site < last:
            new.prepare_reads()
        return new

    def prepare_reads(self):
        """What is done once when a block closes, and not at every read."""
        if backend_of(self.newest) != "fla":
            self._scores_of_blocks()

    def _with(self, blocks, partial, site: int, cast: torch.dtype | None, is_cached: bool) -> "DepthStream":
        new = object.__new__(type(self))  # a step of decoding makes one at every site
        new.__dict__.update(self.__dict__)
        new.blocks, new.partial, new.site, new.cast, new.is_cached = blocks, partial, site, cast, is_cached
        new.mix = None
        return new

    def _widened(self, dtype: torch.dtype) -> "DepthStream":
        """The stream with sources of a dtype that holds all their numbers: they are all of one."""
        return self if self.newest.dtype == dtype else self.on_sources(lambda source: source.to(dtype))

    # Reading

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        return self.blocks if self.partial is None else (*self.blocks, self.partial)

    @property
    def open_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the open block, as they are sent where a stream is handed on."""
        return () if self.partial is None else (self.partial,)

    def read(self, norm: nn.Module | None = None) -> torch.Tensor:
        """The mix over depth at this site, `[batch, seq, hidden]`, with the norm that reads it if that is given."""
        if self.cast is not None and norm is not None:
            return norm_of(norm, self.read())
        # With gradients it is computed again, as a layer is in activation checkpointing
        mix = None if torch.is_grad_enabled() else self.mix
        if mix is None and self.recorder is None and self._is_one_source():
            mix = self.blocks[0]
        if mix is not None:
            mix = mix if self.cast is None else mix.to(self.cast)
            return mix if norm is None else norm_of(norm, mix)
        cache = self._usable_cache(self.newest)
        if cache is not None:
            result = self._read_cached(cache, norm)
        else:
            result = self._read_sources(norm)
        if self.cast is not None:
            result = result.to(self.cast)
        if norm is None:
            self.mix = result
        return result

    def _is_one_source(self) -> bool:
        """Whether there is nothing to mix: the softmax over one source is 1."""
        return len(self.blocks) == 1 and self.partial is None

    def _factor(self) -> int:
        return len(self.sources) if self.sums else 1

    def _read_cached(self, cache: BlockCache, norm: nn.Module | None) -> torch.Tensor:
        return cache.read(self.site, self.partial, norm, self._factor())

    def _read_sources(self, norm: nn.Module | None) -> torch.Tensor:
        if self.recorder is None and backend_of(self.newest) == "fla":
            mix = fused_read(self.queries[self.site], self.sources, self.eps) * self._factor()
            return mix if norm is None else norm_of(norm, mix)
        scores = self._scores_of_blocks()
        masked = self.masked_source()
        if self.recorder is None and self.partial is not None and has_kernel(norm, self.partial):
            query = self.queries[self.site]
            return read_and_norm(query, self.sources, scores, self.eps, norm, self._factor())[0]
        if self.partial is not None:
            query = self.queries[self.site : self.site + 1]
            scores.append(source_scores(query, self.partial, self.eps)[..., 0])
        weights = depth_weights(scores, masked)
        if self.recorder is not None:
            self.recorder.weights[self.site] = self.recorder.by_token(weights)
        return mix_and_norm(weights * len(scores) if self.sums else weights, self.sources, norm)

    def masked_source(self) -> int | None:
        """The source that the recorder leaves out at this site.

        Raises:
            ValueError: if it is not there, or the only one.
        """
        masked = None if self.recorder is None else self.recorder.masked_source.get(self.site)
        if masked is not None and (len(self.sources) == 1 or not 0 <= masked < len(self.sources)):
            raise ValueError(
                f"`masked_source={{{self.site}: {masked}}}` cannot be left out: site {self.site} has"
                f" {len(self.sources)} sources, of which one has to be read."
            )
        return masked

    def _scores_of_blocks(self) -> list[torch.Tensor]:
        """Of every closed block for this site, `[batch, seq]`: a block is scored for all later sites at once."""
        scores, end = self.scores, self.scored_until
        if end is not None and self.site >= end:
            scores, end = (), None
        if torch.is_grad_enabled():  # for which scores made under `no_grad` are of no use, such as a recorder's
            wanted = [self.queries.requires_grad or block.requires_grad for block in self.blocks]
            if any(of_block and not columns[0].requires_grad for of_block, (_, columns) in zip(wanted, scores)):
                scores = ()
        for block in self.blocks[len(scores) :]:
            # A tensor for each site: slices, taken where they are read, would have gradients as large as the whole
            columns = self._score(self.queries[self.site : end], block).unbind(-1)
            scores = (*scores, (self.site, columns))
        self.scores, self.scored_until = scores, end
        return [columns[self.site - first] for first, columns in scores]

    def _score(self, queries: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Scores of a source for the queries of some sites, `[batch, seq, sites]`."""
        return source_scores(queries, source, self.eps)

    # The block cache

    def keep_in(self, cache: BlockCache) -> "DepthStream":
        """The stream with its closed blocks in a block cache, which makes reads faster where no gradients are wanted.

        Raises:
            RuntimeError: at a later read, if the cache has been given to another forward pass in the meantime.
        """
        self._start(cache)
        blocks = tuple(cache.append(block) for block in self.blocks)
        new = self._with(blocks, self.partial, self.site, self.cast, is_cached=True)
        new.cache, new.cache_pass = cache, cache.num_passes
        if self.site == 0 and self._is_one_source():
            new.mix = self.newest  # not the copy, which the next forward pass overwrites
        return new

    def _start(self, cache: BlockCache):
        cache.start(self.queries, self.newest, self.block_size, self.eps)

    def _usable_cache(self, source: torch.Tensor) -> BlockCache | None:
        """The block cache, if it holds the blocks of this stream and not those of one that has gone further.

        Args:
            source: what is to be read or kept, which has to be of the dtype of the cache.
        """
        cache = self.cache
        if cache is None:
            return None
        self.check_memory()
        is_current = self.is_cached and cache.num_closed == len(self.blocks)
        return cache if is_current and source.dtype == cache.dtype else None

    def check_memory(self):
        if self.cache is not None and self.cache.num_passes != self.cache_pass:
            raise RuntimeError(
                f"This residual stream (site {self.site}) is of an earlier forward pass: its blocks are no longer in"
                " memory. Read it before the model runs again."
            )

    def __reduce__(self):
        """Copies and pickles have the fields, and not the cache, whose parts share their memory."""
        self.check_memory()
        return type(self), tuple(getattr(self, of_dataclass.name) for of_dataclass in fields(self))

    def parts(self) -> tuple[list[torch.Tensor | None], tuple]:
        """The tensors that a stream is made of, and all else."""
        self.check_memory()
        context = self.site, self.block_size, self.eps, self.sums, self.cast, self.recorder
        return [self.queries, self.partial, *self.blocks], context

    @classmethod
    def of_parts(cls, leaves: Sequence[torch.Tensor | None], context: tuple) -> "DepthStream":
        """The inverse of `parts`."""
        queries, partial, *blocks = leaves
        return cls(queries, tuple(blocks), partial, *context)

    # As a tensor

    def on_newest(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DepthStream":
        """The stream with a function on its newest source, or on what was written last in the open block."""
        self.check_memory()
        if self.partial is not None:
            return self._with(self.blocks, function(self.partial), self.site, self.cast, self.is_cached)
        new = replace(self, blocks=(*self.blocks[:-1], function(self.blocks[-1])))
        new.scored_until = self.scored_until
        if self.cache is not None:  # another one, as a stream that was kept may still read from this one
            return new.keep_in(type(self.cache)())
        if new.scored_until is None or new.site < new.scored_until:
            new.prepare_reads()
        return new

    def on_sources(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DepthStream":
        """The stream with a function on every source: one that is linear and keeps the hidden dimension."""
        self.check_memory()
        partial = None if self.partial is None else function(self.partial)
        new = replace(self, blocks=tuple(function(block) for block in self.blocks), partial=partial)
        new.cache, new.cache_pass = self.cache, self.cache_pass  # the function may have returned views
        return new

    def to(self, *args, **kwargs) -> "DepthStream":
        """As of a tensor. Neither is a read: a dtype is remembered for the next one, a device moves the sources."""
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, (torch.device, str, int)) and not isinstance(arg, bool):
                device = arg
            elif hasattr(arg, "dtype"):
                dtype, device = arg.dtype, arg.device
        stream = self
        if dtype is not None and dtype != self.dtype:
            stream = self._with(self.blocks, self.partial, self.site, dtype, self.is_cached)
        if device is not None and torch.device(device) != self.device:
            non_blocking = kwargs.get("non_blocking", False)
            moved = stream.on_sources(lambda source: source.to(device, non_blocking=non_blocking))
            moved = moved._with_queries(lambda queries: queries.to(device, non_blocking=non_blocking))
            moved.scored_until = stream.scored_until
            stream = moved if stream.cache is None else moved.keep_in(type(stream.cache)())
        return stream

    def with_recorder(self, recorder: DepthRecorder) -> "DepthStream":
        """The stream with a recorder, and so without a block cache."""
        self.check_memory()
        recorder.tokens = self.shape[:-1]
        return replace(self, recorder=recorder)

    def _with_queries(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DepthStream":
        return replace(self, queries=function(self.queries))

    def reshape(self, *shape):
        shape = tuple(shape[0]) if isinstance(shape[0], (tuple, list)) else shape
        if shape[-1] == self.shape[-1]:
            return self.on_sources(lambda source: source.reshape(shape))
        return self.read().reshape(shape)

    view = reshape

    def contiguous(self) -> "DepthStream":
        return self

    def clone(self, **kwargs) -> "DepthStream":
        return self._with(self.blocks, self.partial, self.site, self.cast, self.is_cached)

    @property
    def newest(self) -> torch.Tensor:
        return self.blocks[-1] if self.partial is None else self.partial

    @property
    def shape(self) -> torch.Size:
        return self.newest.shape

    @property
    def ndim(self) -> int:
        return self.newest.ndim

    @property
    def device(self) -> torch.device:
        return self.newest.device

    @property
    def is_cuda(self) -> bool:
        return self.newest.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        return self.newest.dtype if self.cast is None else self.cast

    @property
    def requires_grad(self) -> bool:
        return self.newest.requires_grad

    def size(self, *args):
        return self.newest.size(*args)

    def dim(self) -> int:
        return self.newest.dim()

    def is_floating_point(self) -> bool:
        return True

    def __add__(self, other):
        if isinstance(other, torch.Tensor) and other.shape == self.newest.shape:
            return self.write(other)
        return self.read() + _read_all(other)

    __radd__ = __add__
    __iadd__ = __add__

    def __mul__(self, other):
        if self._is_factor(other):
            return self.on_sources(lambda source: source * other)
        return self.read() * _read_all(other)

    __rmul__ = __mul__
    __imul__ = __mul__

    def __truediv__(self, other):
        if self._is_factor(other):
            return self.on_sources(lambda source: source / other)
        return self.read() / _read_all(other)

    def _is_factor(self, other: Any) -> bool:
        """Whether it is a number, which scales every source. Of a number, scores have no more than the sign."""
        if isinstance(other, torch.Tensor):  # of more dimensions it goes with the tokens, if there is one
            return other.ndim <= 1 and other.numel() == 1
        return not isinstance(other, DepthStream)

    def __sub__(self, other):
        return self.read() - other

    def __getitem__(self, index):
        slices = index if isinstance(index, tuple) else (index,)
        mask = slices[0]
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == self.shape[:-1]:
            if slices[1:] in ((), (slice(None),)):
                return SelectedTokens(self, mask)
        if all(isinstance(of_dim, slice) for of_dim in slices) and slices[self.ndim - 1 :] in ((), (slice(None),)):
            is_whole = all(of_dim.indices(size) == (0, size, 1) for of_dim, size in zip(slices, self.shape))
            return self if is_whole else self.on_sources(lambda source: source[index])  # some of the tokens
        return self.read()[index]

    def __setitem__(self, index, value):
        """`stream[mask] = stream[mask] + output`; see `SelectedTokens`. Of all methods the only one in place."""
        if not isinstance(value, SelectedTokens) or not value.is_of(self, self[index]):
            raise TypeError(
                "Of the residual stream of an AttnRes model, tokens can be replaced only by themselves with something"
                " added to them: `stream[mask] = stream[mask] + output`."
            )
        self.__dict__.update(value.put_back().__dict__)

    def masked_scatter(self, mask: torch.Tensor, source) -> "DepthStream | torch.Tensor":
        if isinstance(source, SelectedTokens) and source.is_of(self, self[mask.squeeze(-1)]):
            return source.put_back()
        return self.read().masked_scatter(mask, _read_all(source))

    def __len__(self) -> int:
        return len(self.newest)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("add", "__add__", "__radd__", "__iadd__") and len(args) == 2 and not kwargs:
            stream, output = args if isinstance(args[0], cls) else args[::-1]
            return stream.__add__(output)  # not `+`, which a compiler brings back here
        if name in ("mul", "__mul__", "__rmul__", "__imul__") and len(args) == 2 and not kwargs:
            stream, number = args if isinstance(args[0], cls) else args[::-1]
            if stream._is_factor(number):
                return stream.on_sources(lambda source: source * number)
        if name == "dropout" and not (kwargs.get("training", True) and kwargs.get("p", 0.5)):
            return args[0] if args else kwargs["input"]
        if name in _IN_PLACE:
            raise TypeError(f"`{name}` works in place, and the residual stream of an AttnRes model is a value.")
        return function(*_read_all(args), **{name: _read_all(value) for name, value in kwargs.items()})


class SelectedTokens(DepthStream):
    """`stream[mask]`: the tokens of a stream where a mask is true, `[tokens, hidden]`.

    Some models give features of an image to the tokens of that image between their layers (DeepStack, arXiv
    2406.04334). That is no output of a sublayer, and a text has none: it belongs to the newest source, the output that
    has been written last and is in the open block, or in the block that has just been closed.

    Args:
        stream: the tokens are of.
        mask: `[batch, seq]`, bool.
        added: what has been added to them, `[tokens, hidden]`.
    """

    def __init__(self, stream: DepthStream, mask: torch.Tensor, added: torch.Tensor | None = None):
        super().__init__(stream.queries, (stream.newest[mask],), cast=stream.cast)
        self.stream, self.mask, self.added = stream, mask, added

    def write(self, output: torch.Tensor) -> "SelectedTokens":
        return SelectedTokens(self.stream, self.mask, output if self.added is None else self.added + output)

    def read(self, norm: nn.Module | None = None) -> torch.Tensor:
        if self.added is not None:
            raise TypeError(
                "What was added to some tokens of the residual stream of an AttnRes model has to be put back,"
                " `stream[mask] = stream[mask] + output`, before it is read."
            )
        tokens = self.stream.read()[self.mask]
        return tokens if norm is None else norm_of(norm, tokens)

    def on_sources(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return function(self.read())

    def reshape(self, *shape):
        return self if shape in ((-1,), ((-1,),)) and self.added is not None else self.read().reshape(*shape)

    view = reshape  # flat, as `masked_scatter` takes them

    def is_of(self, stream: DepthStream, selected: Any) -> bool:
        """Whether they are tokens of this stream, those that are selected there."""
        if not isinstance(selected, SelectedTokens) or self.stream.site != stream.site:
            return False
        if not all(own is other for own, other in zip(self.stream.sources, stream.sources, strict=True)):
            return False
        return self.mask is selected.mask or torch.equal(self.mask, selected.mask)

    def put_back(self) -> DepthStream:
        """The stream with what was added to its tokens."""
        added = self.added
        if added is None:
            return self.stream
        return self.stream.on_newest(lambda newest: newest.index_put((self.mask,), newest[self.mask] + added))


# Looked up, as a compiler cannot call methods of the name of a function
_IN_PLACE = frozenset(
    name for name in (*dir(torch.Tensor), *dir(torch), *dir(F)) if name.endswith("_") and not name.endswith("__")
)


def _read_all(value: Any) -> Any:
    if isinstance(value, DepthStream):
        return value.read()
    return type(value)(_read_all(item) for item in value) if type(value) in (tuple, list) else value


def _reading(name: str) -> Callable:
    def method(self: DepthStream, *args, **kwargs):
        return getattr(self.read(), name)(*args, **kwargs)

    return method


# By name, as a compiler recurses in `__getattr__`
for _name in (
    *(name for name in dir(torch.Tensor) if not name.startswith("_") and not name.endswith("_")),  # none in place
    *("__rtruediv__", "__pow__", "__matmul__", "__rmatmul__", "__rsub__", "__neg__"),
):
    if callable(getattr(torch.Tensor, _name)) and not hasattr(DepthStream, _name):
        setattr(DepthStream, _name, _reading(_name))
for _name, _dtype in (("float", "float32"), ("double", "float64"), ("half", "float16"), ("bfloat16", "bfloat16")):
    setattr(DepthStream, _name, lambda self, _dtype=_dtype: self.to(getattr(torch, _dtype)))


def register_stream(cls: type[DepthStream]) -> type[DepthStream]:
    """Tell PyTorch of which tensors a stream is made: for export, pipelines, and FSDP2 before torch 2.13."""
    pytree.register_pytree_node(cls, cls.parts, cls.of_parts, serialized_type_name=f"{cls.__module__}.{cls.__name__}")
    return cls


register_stream(DepthStream)


def checkpoint_stream(checkpoint: Callable, function: Callable, *args):
    """Activation checkpointing of a layer: only tensors cross `checkpoint`, and each run has a stream of its own."""
    # Before transformers 5.20 the stream may begin in here, as hooks of the layer run within its checkpoint
    stream = args[0] if args and isinstance(args[0], DepthStream) else None
    given, context = ([], None) if stream is None else stream.parts()
    others = args[1:] if given else args
    written_as: dict[str, Any] = {}

    def on_tensors(*tensors):
        inner = tensors[: len(given)]
        if stream is not None:
            inner_stream = stream.of_parts(inner, context)
            inner_stream.scored_until = stream.scored_until
            tensors = inner_stream, *tensors[len(given) :]
        output = function(*tensors)
        written, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(written, DepthStream):
            return output
        leaves, written_context = written.parts()
        # What the layer has been given and not changed does not come back: queries, and most of the blocks
        places = [_place_of(leaf, inner) for leaf in leaves]
        written_as.update(stream=type(written), context=written_context, places=places, rest=len(rest))
        written_as["is_tuple"] = isinstance(output, tuple)
        return *rest, *(leaf for leaf, place in zip(leaves, places) if place is None)

    outputs = checkpoint(on_tensors, *given, *others)
    if not written_as:  # the layer's hook says what is wrong with that
        return outputs
    rest, changed = outputs[: written_as["rest"]], list(outputs[written_as["rest"] :])
    leaves = [changed.pop(0) if place is None else given[place] for place in written_as["places"]]
    new = written_as["stream"].of_parts(leaves, written_as["context"])
    return (new, *rest) if written_as["is_tuple"] else new


def _place_of(leaf: torch.Tensor | None, tensors: tuple) -> int | None:
    for place, tensor in enumerate(tensors):
        if leaf is tensor:
            return place
    return None
