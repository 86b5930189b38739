# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A stage of `torch.distributed.pipelining` that a residual stream with all its blocks goes through."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ..base.slices import count_tensors
from ..depth.stream import DepthStream
from ..modeling_attnres import AttnResForCausalLM
from .routing import StageRoute


class StageModule(nn.Module):
    """A part of a model, from tensors to tensors: token ids at the first stage, logits behind the last one.

    Args:
        model: of which only the layers of this stage are left.
        route: of this stage.
    """

    def __init__(self, model: AttnResForCausalLM, route: StageRoute, is_last: bool):
        super().__init__()
        self.model, self.route, self.is_last = model, route, is_last
        self.folded: tuple[torch.Tensor, ...] = ()
        self.queries: list[torch.Tensor] = []
        model.trunk.fold_queries = self.folded_queries  # a method, which a copy of this module binds to the copy

    def forget_queries(self):
        """To be called when parameters have changed: a step folds the queries once, for all its microbatches."""
        self.folded, self.queries = (), []

    def folded_queries(self) -> list[torch.Tensor]:
        return self.queries

    def _fold_queries(self):
        """Fold the queries in the first forward pass of a step, as FSDP2 gathers parameters in there.

        What the layers are given is cut off, as all reads of a stage have a part of it: a zero-bubble schedule, which
        goes back from each weight's uses on its own, would go through the whole stage for that of the queries.
        """
        trunk = self.model.trunk
        self.folded = type(trunk).fold_queries(trunk)
        self.queries = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.folded]

    @property
    def num_open(self) -> tuple[int, int]:
        """How many tensors of the open block are received, and sent."""
        config = self.model.config
        return count_tensors(config, self.route.entry_site)[1], count_tensors(config, self.route.exit_site)[1]

    def forward(self, *tensors: torch.Tensor, **kwargs) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """One microbatch.

        Args:
            tensors: token ids, `[batch, seq]`; or what the stage before has sent (see `routing.py`), and then the
                cached blocks, each `[batch, seq, hidden]`.
            kwargs: of the model, such as `attention_mask` and `position_ids`, the same for every stage.

        Returns:
            What the next stage is sent, or logits.
        """
        if not self.folded:
            self._fold_queries()
        inputs = {"input_ids": tensors[0]} if self.route.entry_site == 0 else {"inputs_embeds": self._stream(tensors)}
        model = self.model if self.is_last else self.model.trunk
        outputs = model(**inputs, **kwargs, use_cache=False)
        if self.is_last:
            return outputs.logits
        stream = outputs.last_hidden_state
        stream.check_memory()
        sent = *stream.open_tensors, *(stream.blocks[block] for block in self.route.sent)
        # Zero-bubble schedules detach in place what a stage has returned. That cannot be done to a view, and must not
        # to what the stage was given, or what a checkpointed layer of it keeps: a block that was closed before it
        keeps = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        return tuple(tensor.clone() if keeps or tensor.is_leaf or tensor._is_view() else tensor for tensor in sent)

    def _stream(self, tensors: tuple[torch.Tensor, ...]) -> DepthStream:
        num_open = self.num_open[0]
        by_number = dict(zip((*self.route.received, *self.route.cached), tensors[num_open:]))
        partial, *outputs = tensors[:num_open] or (None,)
        blocks = [by_number[number] for number in sorted(by_number)]
        return self.model.trunk.start_stream(blocks, partial, self.route.entry_site, outputs=outputs)


class BlockStore:
    """What the stages of one process share: blocks, and the gradients of those that were not sent again.

    Of both there is a tensor for each microbatch and block.
    """

    def __init__(self):
        self.blocks: dict[tuple[int, int], torch.Tensor] = {}
        self.grads: dict[tuple[int, int], torch.Tensor] = {}

    def leaf(self, key: tuple[int, int]) -> torch.Tensor:
        """The block, whose gradient ends at this stage. One without gradients, as of a frozen model, stays so."""
        block = self.blocks[key]
        return block.detach().requires_grad_(block.requires_grad and torch.is_grad_enabled())

    def keep(self, key: tuple[int, int], block: torch.Tensor):
        self.blocks[key] = block.detach().requires_grad_(block.requires_grad)

    def deposit(self, key: tuple[int, int], grad: torch.Tensor | None):
        if grad is not None:
            self.grads[key] = _sum(self.grads.get(key), grad)

    def withdraw(self, key: tuple[int, int], grad: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient with what has been deposited for the block, which is no longer there afterwards."""
        return _sum(grad, self.grads.pop(key, None))


class AttnResStage(PipelineStage):
    """A `PipelineStage` that takes blocks from its process's `BlockStore`, and deposits their gradients there.

    A stage that has been sent a block, or has closed it, adds the deposits to the gradient that it has itself.
    """

    submod: StageModule

    def __init__(self, submodule: StageModule, *args, store: BlockStore, **kwargs):
        super().__init__(submodule, *args, **kwargs)
        self.route, self.store, self.num_open = submodule.route, store, submodule.num_open
        self._cached: list[torch.Tensor] = []
        self._microbatch = 0
        self._query_grads: list[torch.Tensor | None] = []

    def forward_one_chunk(self, fwd_chunk_id: int, args, kwargs=None, save_forward_output: bool = True):
        self._cached = [self.store.leaf((fwd_chunk_id, block)) for block in self.route.cached]
        result = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        inputs = self.inputs_of(fwd_chunk_id)
        if not self.is_first:
            self._keep(fwd_chunk_id, self.route.received, inputs[self.num_open[0] :])
        if not self.is_last:
            self._check_dtype(result)
            self._keep(fwd_chunk_id, self.route.sent, result[self.num_open[1] :])
        inputs += [*self._cached, *self.submod.queries]
        for block in {*self.route.cached, *self.route.received} - {*self.route.kept}:
            self.store.blocks.pop((fwd_chunk_id, block), None)
        self._cached = []
        return result

    @property
    def in_flight(self) -> dict[int, Any]:
        """By microbatch, what the stage keeps for its backward pass."""
        # CODEPATH: torch 2.15 has renamed it
        return self._forward_chunk_states if hasattr(self, "_forward_chunk_states") else self.fwd_cache

    def inputs_of(self, microbatch: int) -> list[torch.Tensor]:
        """The list of tensors of which the backward pass will compute gradients."""
        kept = self.in_flight[microbatch]
        return kept[1] if isinstance(kept, tuple) else kept.input_values

    def _check_dtype(self, outputs: tuple[torch.Tensor, ...]):
        """What is received into a buffer of another dtype would be other numbers."""
        wanted = self._stage_meta.outputs[0].dtype
        if any(tensor.dtype != wanted for tensor in outputs):
            raise ValueError(
                f"The residual stream behind stage {self.stage_index} is of {outputs[0].dtype}, and the pipeline was"
                f" made to send {wanted}: pass `dtype={outputs[0].dtype}` to it."
            )

    def _keep(self, microbatch: int, blocks: tuple[int, ...], tensors):
        for block, tensor in zip(blocks, tensors):
            if block in self.route.kept and (microbatch, block) not in self.store.blocks:
                self.store.keep((microbatch, block), tensor)

    def forward_maybe_with_nosync(self, *args, **kwargs):
        return super().forward_maybe_with_nosync(*args, *self._cached, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        self._microbatch = bwd_chunk_id
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _retrieve_recv_grads(self, bwd_chunk_id: int):
        grads = list(super()._retrieve_recv_grads(bwd_chunk_id))
        for place, block in enumerate(self.route.sent, start=self.num_open[1]):
            if block in self.route.closed:
                grads[place] = self.store.withdraw((bwd_chunk_id, block), grads[place])
        return tuple(grads)

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs: dict, last_backward: bool = False):
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            return grads, groups
        changed: list[Any] = list(grads)
        of_queries = [changed.pop() for _ in self.submod.queries][::-1]
        for leaf in self.submod.queries:
            leaf.grad = None  # which some schedules add to, in the tensor that they have just returned
        self._query_grads = [_sum(*pair) for pair in zip(self._query_grads, of_queries)] or of_queries
        for block in reversed(self.route.cached):
            self.store.deposit((self._microbatch, block), changed.pop())
        for place, block in enumerate(self.route.received, start=self.num_open[0]):
            changed[place] = self.store.withdraw((self._microbatch, block), changed[place])
        return tuple(None if grad is None else grad.contiguous() for grad in changed), groups

    # CODEPATH: in an evaluation there are no gradients, and torch raises where it would pass one to a stage next to it

    def get_local_bwd_output(self, mb_index):
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index: int):
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int):
        self._pass_on_query_grads()
        super().perform_reduce_grad(grad_scale_factor)

    def start_gradient_reduction(self):
        # CODEPATH: what torch 2.15 calls instead with FSDP2
        self._pass_on_query_grads()
        super().start_gradient_reduction()

    def _pass_on_query_grads(self):
        """After the last microbatch: what is left of the way from the queries as they are read to the parameters."""
        with_grads = [pair for pair in zip(self.submod.folded, self._query_grads) if pair[1] is not None]
        if with_grads:
            torch.autograd.backward(*map(list, zip(*with_grads)))
        self._query_grads = []


def _sum(grad: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None or other is None:
        return other if grad is None else grad
    return grad + other
