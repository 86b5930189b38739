# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The block cache of a long prompt, its tokens divided over processes that otherwise have the same."""

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..depth.norms import norm_of
from ..depth.stream import DepthStream
from ..modeling_attnres import AttnResModel, AttnResPreTrainedModel


def divide_block_cache(model: AttnResPreTrainedModel, group: dist.ProcessGroup | None = None):
    """Divide the block cache of a prompt over the processes of tensor parallelism (arXiv 2603.15031, section 4.2).

    Reads over depth are per token, so each process reads its own tokens, and then all gather the results. This takes
    one collective more per read, and divides the size of the block cache by the number of processes. Nothing changes
    with gradients, or with fewer tokens than processes, as in a step of decoding.

    Args:
        model: the same in every process, or divided by a tensor-parallel plan. It is changed in place.
        group: the processes. By default all of them.
    """
    # A method, which a copy of the model binds to the copy
    model.trunk.start_stream = types.MethodType(functools.partial(start_divided, group=group), model.trunk)


def start_divided(trunk: AttnResModel, blocks, partial=None, *args, group: dist.ProcessGroup | None, **kwargs):
    """`start_stream` of a process that keeps the blocks of its tokens."""
    start = functools.partial(type(trunk).start_stream, trunk)
    num_tokens, num_ranks = blocks[0].shape[1], dist.get_world_size(group)
    if torch.is_grad_enabled() or num_tokens < num_ranks or kwargs.get("recorder") is not None:
        return start(blocks, partial, *args, **kwargs)
    sizes = [len(part) for part in torch.arange(num_tokens).tensor_split(num_ranks)]
    kwargs["outputs"] = [mine(output, sizes, group) for output in kwargs.get("outputs", ())]
    partial = None if partial is None else mine(partial, sizes, group)
    stream = start([mine(block, sizes, group) for block in blocks], partial, *args, **kwargs)
    divided_class = _divided(type(stream))  # type: ignore[arg-type]
    divided: Any = object.__new__(divided_class)  # with what is not a field as well, such as its block cache
    vars(divided).update(vars(stream), token_counts=tuple(sizes), group=group)
    return divided


def mine(tensor: torch.Tensor, token_counts: Sequence[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """The tokens of this process, of `[batch, seq, hidden]`."""
    return tensor.split(list(token_counts), dim=1)[dist.get_rank(group)]


@dataclass(eq=False)
class DividedStream(DepthStream):
    """A stream that has the sources of some tokens, and gives and takes what is of all of them. See `_divided`."""

    token_counts: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None

    def read(self, norm=None) -> torch.Tensor:
        if self.pending_dtype is not None and norm is not None:  # what the norm is given has been gathered
            return norm_of(norm, self.read())
        local = super().read(norm)
        # Of one size, as some backends gather no others
        padded = local.new_zeros(local.shape[0], max(self.token_counts), *local.shape[2:])
        padded[:, : local.shape[1]] = local
        gathered = [torch.empty_like(padded) for _ in self.token_counts]
        dist.all_gather(gathered, padded, group=self.group)
        return torch.cat([part[:, :count] for part, count in zip(gathered, self.token_counts)], dim=1)

    @property
    def shape(self) -> torch.Size:
        of_some = self.newest.shape
        return torch.Size((of_some[0], sum(self.token_counts), *of_some[2:]))

    def size(self, *args):
        return self.shape if not args else self.shape[args[0]]

    def __add__(self, other):
        if isinstance(other, torch.Tensor) and other.shape == self.shape:
            return self.write(mine(other, self.token_counts, self.group))
        return self.read() + other

    __radd__ = __add__
    __iadd__ = __add__

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if isinstance(found, torch.Tensor) or found is self:
            return found
        raise ValueError(
            f"The base takes some tokens of its residual stream, {index}, and its block cache cannot be divided: leave"
            " `divide_block_cache` out."
        )

    def reshape(self, *shape):
        return self.read().reshape(*shape)

    view = reshape


@functools.cache
def _divided(of_read: type[DepthStream]) -> type[DepthStream]:
    """A stream of this class, whichever way it reads, with the fields of both."""
    return dataclass(eq=False)(type(f"Divided{of_read.__name__}", (DividedStream, of_read), {}))
