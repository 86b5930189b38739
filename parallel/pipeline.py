# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Training of a model whose layers lie in several processes, on the schedules of `torch.distributed.pipelining`."""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, distribute_tensor

from ..base.library_lookups import is_depth_query
from ..base.probe import decoder_layers, probe_slices
from ..base.slices import PassThrough, count_tensors
from ..depth.queries import AttnResDepthQueries
from ..modeling_attnres import AttnResForCausalLM
from ..utils.files import hidden_folder
from ..utils.keywords import with_keywords_of
from .agreement import check_agreement, check_batch
from .routing import route_blocks
from .schedule import PipelineSettings, sites_of_stages
from .stage import AttnResStage, BlockStore, StageModule


OPTIMIZER_FILE = "optimizer.safetensors"


class AttnResPipeline:
    """A model whose layers are divided over processes.

    Every process makes one from the same model, and calls the same methods.

    ```python
    pipeline = AttnResPipeline(model, schedule="1F1B", microbatches=8, batch_size=32, sequence_length=1024)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    loss = pipeline.step(input_ids, labels)
    optimizer.step()
    pipeline.save_pretrained(folder)
    ```

    Args:
        model: the whole model, on the CPU. Each process keeps its layers, on `device`.
        group: the processes of the pipeline. By default all of them.
        device: where this process computes.
        dtype: dtype of the tensors that are sent between stages. By default that of the embedding. Set it if FSDP2 or
            autocast casts parameters.
        parallelize: a function that divides the module of a stage further, whose `model` has the layers of the stage,
            with `fully_shard` or `parallelize_module` over other dimensions of a device mesh. With FSDP2, shard the
            module itself last, and the depth queries separately, because they may have another dtype.
        settings: the fields of [`PipelineSettings`]. `microbatches`, `batch_size` and `sequence_length` are required.

    Raises:
        ValueError: if the schedule and the numbers do not fit each other; if the model is not an `AttnResForCausalLM`,
            differs between processes, or has layers that need more from each other than the stream.
        TypeError: if a setting is unknown or missing.
    """

    @with_keywords_of(PipelineSettings)
    def __init__(
        self,
        model: AttnResForCausalLM,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        parallelize: Callable[[StageModule], None] | None = None,
        **settings: Any,
    ):
        check_model(model)
        self.settings = PipelineSettings(**settings)
        self.config, self.group, self.device = model.config, group, torch.device(device)
        self.rank, self.ranks = dist.get_rank(group), self.settings.ranks(dist.get_world_size(group))
        self.layers_per_stage = self.settings.layers(self.config, self.ranks)
        self.probe = probe_slices(self.config.to_base_config())
        # A block that is scaled in every layer is another one at the next stage
        cache = self.settings.cache and not self.probe.scales_blocks
        sites = sites_of_stages(self.config, self.layers_per_stage)
        self.routes = route_blocks(sites, self.ranks, self.config.attn_res_block_size, cache=cache)
        agreed = dataclasses.replace(self.settings, layers_per_stage=self.layers_per_stage, cache=cache)
        check_agreement(model, (agreed, str(dtype)), group)
        self.is_tied = self.config.tie_word_embeddings and len(self.ranks) > 1
        self.store, self.num_items = BlockStore(), 1.0
        self.skeleton = _without_weights(model)
        self.shape = self.settings.batch_size, self.settings.sequence_length
        dtype = dtype or self.skeleton.get_input_embeddings().weight.dtype
        self.stages = self._make_stages(model, dtype, parallelize)
        self.own, self.foreign = self._list_parameters()
        self.schedule = get_schedule_class(self.settings.schedule)(
            self.stages[0] if self.settings.takes_one_stage else self.stages,
            n_microbatches=self.settings.microbatches,
            loss_fn=self._loss,
            scale_grads=False,  # the loss is of the whole batch's tokens
        )

    def _make_stages(
        self, model: AttnResForCausalLM, dtype: torch.dtype, parallelize: Callable[[StageModule], None] | None
    ) -> list[AttnResStage]:
        """Those of this process."""
        stages = []
        for number in [i for i, rank in enumerate(self.ranks) if rank == self.rank]:
            module = StageModule(self._part(model, number), self.routes[number], number == len(self.ranks) - 1)
            if parallelize is not None:
                parallelize(module)
            stages.append(self._stage(module, number, dtype))
        return stages

    def _part(self, model: AttnResForCausalLM, number: int) -> AttnResForCausalLM:
        """A copy of the model with what a stage needs of it."""
        start = sum(self.layers_per_stage[:number])
        is_last = number == len(self.ranks) - 1
        layers = decoder_layers(model.trunk)
        mine = range(start, start + self.layers_per_stage[number])
        # Not copied in the first place, as all layers may be more than there is memory for
        left_out = [*(module for i, module in enumerate(layers) if i not in mine)]
        if number > 0:
            left_out.append(model.get_input_embeddings())
        memo = {id(module): PassThrough(module) for module in left_out}
        if is_last and self.is_tied:  # kept by the head, which shares it with the embedding
            weight = model.get_output_embeddings().weight
            memo[id(weight)] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        part = copy.deepcopy(model, memo)
        part.trunk.keep_layers(mine.start, mine.stop, self.probe)
        if not is_last:
            for name, child in part.named_children():
                if child is not part.trunk:
                    setattr(part, name, PassThrough())
        return part.to(self.device)

    def _stage(self, module: StageModule, number: int, dtype: torch.dtype) -> AttnResStage:
        route, shape = module.route, self.settings.microbatch_shape

        def on_the_wire(site: int, blocks: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
            size = (*shape, self.config.hidden_size)
            return tuple(
                torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
                for _ in range(count_tensors(self.config, site)[1] + len(blocks))
            )

        if number == 0:
            received: tuple[torch.Tensor, ...] = (torch.empty(shape, dtype=torch.long, device="meta"),)
        else:
            received = on_the_wire(route.entry_site, route.received)
        sent = on_the_wire(route.exit_site, route.sent)
        if module.is_last:
            logits = torch.empty(*shape, self.config.vocab_size, dtype=dtype, device="meta")
            sent = (logits.requires_grad_(),)
        return AttnResStage(
            module,
            number,
            len(self.ranks),
            self.device,
            received,
            sent,
            group=self.group,
            store=self.store,
        )

    # Training

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.skeleton.loss_function(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=self.num_items
        )

    def step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, *, num_items: float | None = None, **kwargs
    ) -> torch.Tensor:
        """Compute the mean loss of a batch, and add its gradients to those of the parameters.

        Args:
            input_ids: `[batch, seq]`, the same in every process.
            labels: `[batch, seq]`, -100 for tokens without a label. The model shifts them.
            num_items: number of labels to divide by. By default those of this batch; pass another number if other
                replicas have further rows of it.
            kwargs: other arguments of the model for the whole batch, such as `attention_mask`.

        Returns:
            The loss, in every process.

        Raises:
            ValueError: if the batch has another shape, has no labels, or differs between processes.
        """
        self._begin(input_ids, labels, num_items, kwargs)
        earlier = [(weight, weight.grad) for weight in self._tied()] if self.is_tied else []
        for weight, _ in earlier:
            weight.grad = None
        losses = self._run(self.schedule.step, input_ids, labels, kwargs)
        if self.store.blocks or self.store.grads:
            raise RuntimeError(
                "Blocks or gradients were left over after a step:"
                f" {sorted(self.store.blocks)}, {sorted(self.store.grads)}."
            )
        self._check_unused()
        if self.is_tied:
            self._sum_tied()
        for weight, grad in earlier:
            if grad is not None:
                weight.grad = grad if weight.grad is None else grad + weight.grad
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(
        self, input_ids: torch.Tensor, labels: torch.Tensor, *, num_items: float | None = None, **kwargs
    ) -> torch.Tensor:
        """Compute the mean loss of a batch without gradients or dropout.

        Arguments, result and errors are those of `step`.
        """
        self._begin(input_ids, labels, num_items, kwargs)
        modes = [(module, module.training) for stage in self.stages for module in stage.submod.modules()]
        try:
            for stage in self.stages:
                stage.submod.eval()
            return self._sum(self._run(self.schedule.eval, input_ids, labels, kwargs))
        finally:
            for module, training in modes:
                module.training = training

    def _begin(self, input_ids: torch.Tensor, labels: torch.Tensor, num_items: float | None, kwargs: dict[str, Any]):
        """Check a batch, and forget what is left of the one before."""
        for name, tensor in (("input_ids", input_ids), ("labels", labels)):
            if tensor.shape != self.shape:
                raise ValueError(f"`{name}` is {tuple(tensor.shape)}, and the pipeline was made for {self.shape}.")
        self.num_items = int((labels[:, 1:] != -100).sum()) if num_items is None else num_items
        if self.num_items <= 0:
            raise ValueError("The batch has no labels: all are -100, or the first of a sample.")
        batch = {"input_ids": input_ids, "labels": labels, "num_items": num_items, **kwargs}
        check_batch(batch, self.group, self.device)
        self.store.blocks.clear()  # of a step that has failed
        self.store.grads.clear()
        for stage in self.stages:
            stage.submod.forget_queries()

    def _run(
        self, schedule: Callable, input_ids: torch.Tensor, labels: torch.Tensor, kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The losses of the microbatches, in the process of the last stage."""
        losses: list[torch.Tensor] = []
        numbers = [stage.stage_index for stage in self.stages]
        schedule(
            *((input_ids.to(self.device),) if 0 in numbers else ()),
            target=labels.to(self.device) if len(self.ranks) - 1 in numbers else None,
            losses=losses,
            **{name: value.to(self.device) if torch.is_tensor(value) else value for name, value in kwargs.items()},
        )
        return losses

    def _sum(self, losses: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        # The dtype of the last stage's
        loss = loss.detach().to(torch.float64)
        dist.broadcast(loss, self._global_rank(self.ranks[-1]), group=self.group)
        return loss

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _check_unused(self):
        """A base may use what is not of a layer behind the first stage as well: its gradient would be lost."""
        for name, parameter in self.foreign:
            if parameter.grad is not None and parameter.grad.any():
                raise ValueError(
                    f"Base `{self.config.base_model_type}` uses `{name}` in several stages of a pipeline, which is not"
                    " supported."
                )

    def _tied(self) -> list[nn.Parameter]:
        """The copies of a shared embedding that this process has."""
        found = []
        for stage in self.stages:
            if stage.is_first:
                found.append(stage.submod.model.get_input_embeddings().weight)
            if stage.is_last:
                found.append(stage.submod.model.get_output_embeddings().weight)
        return found

    def _sum_tied(self):
        """Both copies of a shared embedding get the sum of their gradients, here of this step alone."""
        copies = [weight for weight in self._tied() if weight.requires_grad]
        if not copies:
            return
        first, last = self.ranks[0], self.ranks[-1]
        grads = [_placed_as_itself(weight) for weight in copies]
        total = sum(grads[1:], grads[0])
        if first != last:
            local = total.to_local() if isinstance(total, DTensor) else total
            other = torch.empty_like(local)
            peer = self._global_rank(last if self.rank == first else first)
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, local.contiguous(), peer, self.group),
                    dist.P2POp(dist.irecv, other, peer, self.group),
                ]
            ):
                work.wait()
            local = local + other if self.rank == first else other + local
            total = _like(local, total)
        for weight in copies:
            weight.grad = total.clone()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm is at most `max_norm`. Returns the norm before that."""
        counted = [p.grad for _, p in self.named_parameters(copies=False) if p.grad is not None]
        norms = [_whole(torch.nn.utils.get_total_norm(grads)) for grads in _by_mesh(counted)]
        square = torch.stack([torch.zeros((), device=self.device), *norms]).to(torch.float64).square().sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt().to(norms[0].dtype if norms else torch.float64)
        for parameters in _by_mesh([p for p in self.parameters() if p.grad is not None]):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return square.sqrt()

    # Parameters

    def named_parameters(self, copies: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process's stages, with their names in the whole model.

        Each stage has a copy of the depth queries and uses the rows of its sites.

        Args:
            copies: whether to include the copy of a tied embedding in the last stage.
        """
        return ((name, parameter) for _, name, parameter in self._parameters(copies))

    def _parameters(self, copies: bool) -> Iterator[tuple[AttnResStage, str, nn.Parameter]]:
        return (entry for entry, is_copy in self.own if copies or not is_copy)

    def _list_parameters(self) -> tuple[list, list[tuple[str, nn.Parameter]]]:
        """`(stage, name, parameter)` with whether it is a copy; and those that are there but not used by a stage."""
        own, foreign = [], []
        shared = self.skeleton.get_input_embeddings().weight
        embedding = next(name for name, parameter in self.skeleton.named_parameters() if parameter is shared)
        for stage in self.stages:
            model = stage.submod.model
            trunk, names = model.trunk, {id(module): name for name, module in model.named_modules()}
            inside = f"{names[id(trunk)]}."
            used = (f"{names[id(decoder_layers(trunk))]}.", f"{inside}depth_queries.")
            used += tuple(f"{inside}{name}." for name in self.probe.behind)
            for name, parameter in model.named_parameters():
                is_copy = self.is_tied and stage.is_last and parameter is model.get_output_embeddings().weight
                if stage.is_first or is_copy or name.startswith(used) or not name.startswith(inside):
                    own.append(((stage, embedding if is_copy else name, parameter), is_copy))
                else:
                    foreign.append((name, parameter))
        return own, foreign

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    # Checkpoints

    def save_pretrained(self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None):
        """Save a checkpoint of the whole model, as its own `save_pretrained` does, and the state of an optimizer.

        Call it in every process. The first process gathers everything in memory and writes it into a hidden folder,
        whose files then replace those of an earlier checkpoint.
        """
        weights = self._gather(list(self._parameters(copies=False)))
        state = {} if optimizer is None else self._gather(self._optimizer_state(optimizer))
        if dist.get_rank() == 0:  # and not the first of each of several pipelines
            path, num_bytes = Path(folder), sum(tensor.nbytes for tensor in (*weights.values(), *state.values()))
            with hidden_folder(path, "unfinished", num_bytes) as unfinished:
                self.skeleton.save_pretrained(unfinished, state_dict={**weights, **self._shared(weights)})
                if optimizer is not None:
                    state = {name: tensor.contiguous() for name, tensor in state.items()}
                    save_file(state, unfinished / OPTIMIZER_FILE)
                path.mkdir(exist_ok=True)
                written = {file.name for file in unfinished.iterdir()}
                for old in path.glob("*.safetensors*"):  # parts of it, or what its optimizer knew
                    if old.name not in written:
                        old.unlink()
                for name in sorted(written):
                    os.replace(unfinished / name, path / name)
        dist.barrier()

    def _shared(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Other names of tied weights, as a state dict has them."""
        by_id = {id(p): name for name, p in self.skeleton.named_parameters()}
        names = {name: by_id[id(p)] for name, p in self.skeleton.named_parameters(remove_duplicate=False)}
        return {name: weights[first] for name, first in names.items() if name != first}

    def load_optimizer(self, folder: str | os.PathLike, optimizer: torch.optim.Optimizer):
        """Load the state of an optimizer that was saved with a pipeline, of this layout or another."""
        path = Path(folder) / OPTIMIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"`{folder}` has no {OPTIMIZER_FILE}: it was saved without its optimizer.")
        saved = load_file(path)
        known = {name for name, _ in self.skeleton.named_parameters()}
        for key in saved:
            if key.rpartition("|")[0] not in known:
                raise ValueError(f"{path} is of another model: this one has no parameter `{key.rpartition('|')[0]}`.")
        for name, parameter in self.named_parameters():
            for key in [key for key in saved if key.startswith(f"{name}|")]:
                kind, tensor = key.rpartition("|")[2], saved[key].clone()  # of copies each has its own
                if tensor.ndim and tensor.shape != parameter.shape:
                    raise ValueError(
                        f"{path} is of another model: its `{name}` has the shape {tuple(tensor.shape)}, and this one's"
                        f" {tuple(parameter.shape)}."
                    )
                if tensor.ndim and isinstance(parameter, DTensor):
                    tensor = distribute_tensor(
                        tensor.to(parameter.device), parameter.device_mesh, parameter.placements
                    )
                optimizer.state[parameter][kind] = tensor.to(parameter.device) if tensor.ndim else tensor

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> list[tuple[AttnResStage, str, torch.Tensor]]:
        return [
            (stage, f"{name}|{kind}", value)
            for stage, name, parameter in self._parameters(copies=False)
            for kind, value in optimizer.state.get(parameter, {}).items()
            if torch.is_tensor(value)
        ]

    def _gather(self, tensors: Sequence[tuple[AttnResStage, str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """In the first process what all of them have; of depth queries each stage has the rows of its sites."""
        mine = [
            (name, _whole(tensor).detach().cpu(), (stage.route.entry_site, stage.route.exit_site + stage.is_last))
            for stage, name, tensor in tensors
        ]
        gathered: list = [None] * len(set(self.ranks)) if self.rank == 0 else []
        dist.gather_object(mine, gathered or None, self._global_rank(0), group=self.group)
        found: dict[str, torch.Tensor] = {}
        for name, tensor, (start, end) in [of_tensor for of_rank in gathered for of_tensor in of_rank]:
            if is_depth_query(name) and tensor.ndim:
                found.setdefault(name, torch.empty_like(tensor))[start:end] = tensor[start:end]
            else:
                found[name] = tensor
        return found


def check_model(model: AttnResForCausalLM):
    """Whether stages can be made of a model, and compute what it computes."""
    queries = model.trunk.depth_queries if isinstance(model, AttnResForCausalLM) else None
    if not isinstance(queries, AttnResDepthQueries) or getattr(model, "peft_config", None):
        raise ValueError(
            f"A pipeline is made of an `AttnResForCausalLM` without adapters, not of a {type(model).__name__}"
            f"{'' if queries is None else ' with adapters'}. An adapter can be merged first (`merge_and_unload`)."
        )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "`output_router_logits` adds a loss that needs the routers of all layers, which no stage has: set it to"
            " False in the config."
        )


def _without_weights(model: AttnResForCausalLM) -> AttnResForCausalLM:
    """Names, shapes and configs of a model."""
    memo: dict[int, torch.Tensor] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that are divided over one mesh, or over none, together: others cannot be in one call of torch."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _placed_as_itself(weight: nn.Parameter) -> torch.Tensor:
    """Its gradient: of an embedding, tensor parallelism leaves all of it in each process, and of a head a part."""
    if weight.grad is None:
        return torch.zeros_like(weight)
    if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor):
        return weight.grad.redistribute(placements=weight.placements)
    return weight.grad


def _like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A process's part of a tensor that is divided as another one is."""
    if not isinstance(other, DTensor):
        return tensor
    return DTensor.from_local(tensor, other.device_mesh, other.placements, shape=other.shape, stride=other.stride())
