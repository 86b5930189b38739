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
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .backends import backend_of, kernels_for
from .block_cache import BlockCache
from .definition import mix_by_definition, scores_by_definition, weights_by_definition
from .kernels import fused_read
from .norms import norm_of
from .reads import PAPERS_READ
from .recorder import DepthRecorder
from .tensor_like import TensorLike
from .two_phases import Chunk, end_of_chunk


@dataclass(eq=False)  # a dataclass, as FSDP2 looks for tensors in these
class DepthStream(TensorLike):
    """The sources of the reads over depth at one site. Layers get it instead of the residual stream.

    Args:
        queries: the folded queries of all sites, `[sites, hidden]`.
        blocks: the embedding and the sum of every closed block, each `[batch, seq, hidden]`.
        partial: the sum of the outputs in the open block, or `None` if a block has just been closed.
        site: the number of writes so far.
        block_size: writes per block.
        eps: epsilon of the RMSNorm on the keys.
        scale_by_sources: whether a read is multiplied by its number of sources. Queries of zero then read their sum.
        pending_dtype: the dtype of the next read or write, if a reader has asked for one with `.to(dtype)`.
        recorder: the recorder of this forward pass, if there is one.
    """

    queries: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    partial: torch.Tensor | None = None
    site: int = 0
    block_size: int = 1
    eps: float = 1e-6
    scale_by_sources: bool = False
    pending_dtype: torch.dtype | None = None
    recorder: DepthRecorder | None = None
    read_config = PAPERS_READ  # others are read by a `VariantStream`

    def __post_init__(self):
        # Kept from read to read, and computed again where only the fields have come along
        self.mix: torch.Tensor | None = None
        self.phase_1: Chunk | None = None
        # Whether only the fields have come along, as they do into each checkpointed layer: then its sites, up to
        # `read_until`, are the only ones that can share phase 1
        self.is_rebuilt, self.read_until = True, None
        # Its memory may also hold later blocks, written by a stream that has gone further
        self.cache: BlockCache | None = None
        self.cache_pass, self.is_cached = 0, False

    # Writing

    def write(self, output: torch.Tensor) -> "DepthStream":
        """The stream with one more output, `[batch, seq, hidden]`. Closes the block after its last output."""
        pending_dtype = None
        if self.pending_dtype is not None or output.dtype != self.newest.dtype:
            read_as = torch.promote_types(self.dtype, output.dtype)  # as a sum of tensors has it
            dtype = torch.promote_types(read_as, self.newest.dtype)
            if self.newest.dtype != dtype:
                return self.on_sources(lambda source: source.to(dtype)).write(output)  # all sources are of one dtype
            output = output.to(dtype)
            pending_dtype = None if read_as == dtype else read_as
        if self.recorder is not None:
            output = self.recorder.on_output(self.site, output)
        return self._append(output, pending_dtype)

    def _append(self, output: torch.Tensor, pending_dtype: torch.dtype | None) -> "DepthStream":
        partial = output if self.partial is None else self.partial + output
        site = self.site + 1
        if site % self.block_size:
            return self.copy_with(partial=partial, site=site, pending_dtype=pending_dtype)
        cache = self._usable_cache(partial)
        if cache is not None:
            blocks = *self.blocks, cache.append(partial)
            return self.copy_with(blocks=blocks, partial=None, site=site, pending_dtype=pending_dtype, is_cached=True)
        blocks = *self.blocks, partial
        return self.copy_with(blocks=blocks, partial=None, site=site, pending_dtype=pending_dtype, is_cached=False)

    # Reading

    @property
    def newest(self) -> torch.Tensor:
        return self.blocks[-1] if self.partial is None else self.partial

    @property
    def open_sources(self) -> tuple[torch.Tensor, ...]:
        """Those of the open block."""
        return () if self.partial is None else (self.partial,)

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        """All sources of this site: the embedding, the closed blocks, and the partial sum if a block is open."""
        return *self.blocks, *self.open_sources

    @property
    def open_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the open block, as they are sent where a stream is handed on."""
        return () if self.partial is None else (self.partial,)

    def read(self, norm: nn.Module | None = None) -> torch.Tensor:
        """The mix over depth at this site, `[batch, seq, hidden]`. If a norm is given, it is applied to the mix."""
        if self.pending_dtype is not None and norm is not None:
            return norm_of(norm, self.read())
        # With gradients it is computed again, as a layer is in activation checkpointing
        mix = None if torch.is_grad_enabled() else self.mix
        if mix is None and self.recorder is None and self._is_one_source():
            mix = self.blocks[0]
        if mix is not None:
            mix = mix if self.pending_dtype is None else mix.to(self.pending_dtype)
            return mix if norm is None else norm_of(norm, mix)
        cache = self._usable_cache(self.newest)
        if cache is not None:
            result = self._read_cached(cache, norm)
        else:
            result = self._read_sources(norm)
        if self.pending_dtype is not None:
            result = result.to(self.pending_dtype)
        if norm is None:
            self.mix = result
        return result

    def _is_one_source(self) -> bool:
        """Whether there is nothing to mix: the softmax over one source is 1."""
        is_alone = len(self.blocks) == 1 and self.partial is None
        return is_alone and self.read_config.weights == "softmax" and not self.read_config.keeps_stream

    def _factor(self) -> float:
        if not self.scale_by_sources:
            return 1
        return self.read_config.factor(len(self.blocks) + len(self.open_sources))

    def _read_cached(self, cache: BlockCache, norm: nn.Module | None) -> torch.Tensor:
        return cache.read(self.site, self.open_sources, norm, self._factor())

    def _read_sources(self, norm: nn.Module | None) -> torch.Tensor:
        backend = backend_of(self.newest)
        if self.recorder is not None or backend == "reference":
            return read_by_definition(self, norm)
        if backend == "fla" and self.read_config == PAPERS_READ:
            mix = fused_read(self.queries[self.site], self.sources, self.eps) * self._factor()
            return mix if norm is None else norm_of(norm, mix)
        return self._read_in_two_phases(norm)

    def _read_in_two_phases(self, norm: nn.Module | None) -> torch.Tensor:
        chunk = self.phase_1
        if chunk is None or not chunk.has(self.site, len(self.blocks)):
            chunk = self.phase_1 = start_chunk(self, chunk)
        closed_since, open_sources = self.blocks[chunk.num_closed :], self.open_sources
        num_lasting = len(closed_since) + (len(open_sources) if self.read_config.open_block == "each" else 0)
        return chunk.read(self.site, (*closed_since, *open_sources), num_lasting, norm, self._factor())

    def _scores(self) -> list[torch.Tensor]:
        """Of every source for this site, each `[batch, seq]`, or `[batch, seq, heads]` of several heads."""
        query, num_heads = self.queries[self.site], self.read_config.num_heads
        scores = [scores_by_definition(query, source, self.eps, num_heads) for source in self.sources]
        return [of_source.squeeze(-1) for of_source in scores] if num_heads == 1 else scores

    # The block cache

    def keep_in(self, cache: BlockCache) -> "DepthStream":
        """The stream with its closed blocks in a block cache. Reads are then faster, but have no gradients.

        Raises:
            RuntimeError: at a later read, if another forward pass has used the cache in the meantime.
        """
        if torch.compiler.is_compiling():  # a compiled graph plans its own memory
            return self
        cache.start(self.queries, self.newest, self.block_size, self.eps, self.read_config)
        blocks = tuple(cache.append(block) for block in self.blocks)
        new = self.copy_with(blocks=blocks, is_cached=True, cache=cache, cache_pass=cache.num_passes)
        if self.site == 0 and self._is_one_source():
            new.mix = self.newest  # not the copy, which the next forward pass overwrites
        return new

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

    def tree_flatten(self) -> tuple[list[torch.Tensor | None], tuple]:
        """The tensors that a stream is made of, and all else."""
        self.check_memory()
        context = self.site, self.block_size, self.eps, self.scale_by_sources, self.pending_dtype, self.recorder
        return [self.queries, self.partial, *self.blocks], context

    @classmethod
    def tree_unflatten(cls, leaves: Sequence[torch.Tensor | None], context: tuple) -> "DepthStream":
        """The inverse of `tree_flatten`."""
        queries, partial, *blocks = leaves
        return cls(queries, tuple(blocks), partial, *context)

    # Changed as a whole

    def on_newest(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DepthStream":
        """The stream with a function on its newest source, or on what was written last in the open block."""
        self.check_memory()
        if self.partial is not None:
            return self.copy_with(partial=function(self.partial))
        new = self._replaced(blocks=(*self.blocks[:-1], function(self.blocks[-1])))
        # In another one, as a stream that was kept may still read from this one
        return new if self.cache is None else new.keep_in(BlockCache())

    def on_sources(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "DepthStream":
        """The stream with a function on every source: one that is linear and keeps the hidden dimension."""
        self.check_memory()
        partial = None if self.partial is None else function(self.partial)
        new = self._replaced(blocks=tuple(function(block) for block in self.blocks), partial=partial)
        new.cache, new.cache_pass = self.cache, self.cache_pass  # the function may have returned views
        return new

    def on_device(self, device: torch.device | str | int, non_blocking: bool = False) -> "DepthStream":
        """The stream with all of its tensors on a device."""
        self.check_memory()

        def move(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(device, non_blocking=non_blocking)
            return tuple(map(move, value)) if isinstance(value, tuple) else value

        new = self._replaced(**{of_stream.name: move(getattr(self, of_stream.name)) for of_stream in fields(self)})
        return new if self.cache is None else new.keep_in(BlockCache())

    def with_recorder(self, recorder: DepthRecorder) -> "DepthStream":
        """The stream with a recorder, and so without a block cache."""
        self.check_memory()
        recorder.check(len(self.queries))
        recorder.tokens = self.shape[:-1]
        return self._replaced(recorder=recorder)

    def _replaced(self, **fields) -> "DepthStream":
        """The stream with other sources, of which nothing has been computed yet."""
        new = replace(self, **fields)
        new.is_rebuilt, new.read_until = self.is_rebuilt, self.read_until
        return new


def start_chunk(stream: DepthStream, before: Chunk | None) -> Chunk:
    """Phase 1 for the site of a stream and those that share it."""
    end = end_of_chunk(stream.site, stream.block_size, len(stream.queries))
    if stream.read_until is not None and stream.site < stream.read_until:
        end = min(end, stream.read_until)
    queries, kernels = stream.queries[stream.site : end], kernels_for(stream.newest)
    return Chunk((stream.site, end), queries, stream.blocks, stream.eps, stream.read_config, before, kernels)


def read_by_definition(stream: DepthStream, norm: nn.Module | None) -> torch.Tensor:
    """What a stream reads, in plain operations, with weights that are recorded."""
    recorder = stream.recorder
    sources = given = stream.sources
    if recorder is not None:
        sources = recorder.on_sources(stream.site, given)
        if any(source is not before for source, before in zip(sources, given)):
            stream = _with_sources(stream, sources)
    factor = stream._factor()
    scores = torch.stack(stream._scores(), dim=-1)
    masked = None if recorder is None else recorder.masked_at(stream.site, len(sources))
    if masked is not None:
        scores[..., masked] = -torch.inf
    weights = weights_by_definition(scores, stream.read_config.weights)
    if recorder is not None:
        recorder.weights[stream.site] = recorder.by_token(weights, weights.ndim - stream.newest.ndim + 1)
    if stream.read_config.keeps_stream:
        weights = weights + 1
        if masked is not None:
            weights[..., masked] = 0  # of the stream, too
    mix = mix_by_definition(weights * factor if stream.scale_by_sources else weights, sources)
    return mix if norm is None else norm_of(norm, mix)


def _with_sources(stream: DepthStream, sources: Sequence[torch.Tensor]) -> DepthStream:
    """The stream with others in place of its sources, to be read at its site alone."""
    closed, of_open_block = tuple(sources[: len(stream.blocks)]), tuple(sources[len(stream.blocks) :])
    if stream.read_config.open_block == "each":
        return stream._replaced(blocks=closed, outputs=of_open_block)
    return stream._replaced(blocks=closed, partial=of_open_block[0] if of_open_block else None)


def register_stream(cls: type[DepthStream]) -> type[DepthStream]:
    """Tell PyTorch of which tensors a stream is made: for export, pipelines, and FSDP2 before torch 2.13."""
    name = f"{cls.__module__}.{cls.__name__}"
    pytree.register_pytree_node(cls, cls.tree_flatten, cls.tree_unflatten, serialized_type_name=name)
    return cls


register_stream(DepthStream)


def checkpoint_stream(checkpoint: Callable, function: Callable, *args):
    """Activation checkpointing of a layer: only tensors cross `checkpoint`, and each run has a stream of its own."""
    # Before transformers 5.20 the stream may begin in here, as hooks of the layer run within its checkpoint
    stream = args[0] if args and isinstance(args[0], DepthStream) else None
    given, context = ([], None) if stream is None else stream.tree_flatten()
    others = args[1:] if given else args
    written_as: dict[str, Any] = {}

    def on_tensors(*tensors):
        inner = tensors[: len(given)]
        if stream is not None:
            inner_stream = stream.tree_unflatten(inner, context)
            inner_stream.read_until = stream.read_until
            tensors = inner_stream, *tensors[len(given) :]
        output = function(*tensors)
        written, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(written, DepthStream):
            return output
        leaves, written_context = written.tree_flatten()
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
    new = written_as["stream"].tree_unflatten(leaves, written_as["context"])
    return (new, *rest) if written_as["is_tuple"] else new


def _place_of(leaf: torch.Tensor | None, tensors: tuple) -> int | None:
    for place, tensor in enumerate(tensors):
        if leaf is tensor:
            return place
    return None
