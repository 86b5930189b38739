# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A pretraining run over the stages of a pipeline: the loop that takes the Trainer's place, started by torchrun.

Processes are a mesh of `pp_size` stages x replicas x `tp_size`. Replicas share their parameters with FSDP2.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, get_scheduler
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..base.families import survey
from ..base.probe import decoder_layers
from ..base.slices import PassThrough
from ..checkpoints.checkpoint import load_language_model
from ..data.packed_rows import POSITION, collate
from ..data.rows import IGNORED_LABEL
from ..parallel import AttnResPipeline
from ..parallel.schedule import microbatches_needed, ranks_of_stages, spread
from ..utils.files import write_file
from .arguments import AttnResTrainingArguments, PretrainArguments
from .checkpoints import MANIFEST, write_manifest
from .optimizer import separate_queries, with_muon
from .progress import bar, log_line
from .runs import PretrainRun


STATE_FILE = "trainer_state.json"
# What the loop knows of transformers' `TrainingArguments`; with anything else it would do nothing
FIELDS = {
    *("output_dir", "max_steps", "seed", "use_cpu", "bf16", "optim", "optim_args", "max_grad_norm", "disable_tqdm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "warmup_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "logging_steps"),
    *("eval_strategy", "eval_steps", "eval_on_start", "save_strategy", "save_steps", "save_total_limit"),
    *("query_learning_rate", "query_weight_decay", "muon_learning_rate"),
}

OF_OWN_HEADS = "replicated_with_grad_allreduce"
INTERVALS = ("logging_steps", "eval_steps", "save_steps")


def steps_of(interval: float | None, max_steps: int) -> int:
    """A number of steps, or a part of the run, as in `TrainingArguments`."""
    return math.ceil(interval * max_steps) if interval and interval < 1 else int(interval or max_steps)


def check_fields_over_stages(
    arguments: PretrainArguments,
    training: AttnResTrainingArguments,
    model_config: PreTrainedConfig,
    config: dict[str, Any],
):
    """Raise a `ValueError` for what the loop over stages cannot do, before anything is read."""
    names = {n for n in config if hasattr(training, n) and config[n] not in (None, False, "none", "no")} - FIELDS
    if names:
        raise ValueError(f"`{sorted(names)[0]}` is not a field of runs with `pp_size` or `tp_size`.")
    if model_config.model_type != "attnres":
        raise ValueError(
            f"`pp_size` and `tp_size` are for AttnRes models, and this is a {model_config.model_type}. Train it with"
            " replicas: leave them out."
        )
    if training.save_strategy not in ("steps", "no"):
        name = training.save_strategy.value
        raise ValueError(
            f"`save_strategy: {name}` is not possible with `pp_size` or `tp_size`: set it to steps or no."
        )
    if isinstance(training.query_learning_rate, str):
        raise ValueError("`query_learning_rate: auto` is measured on a whole model: give a number, or null.")
    if arguments.tp_size > 1:
        check_matrices(model_config, arguments.tp_size)
    num_stages = count_stages(arguments)
    count = training.gradient_accumulation_steps
    needed = microbatches_needed(count, arguments.pp_size, num_stages, arguments.schedule)
    if needed is not None:
        raise ValueError(
            f"`gradient_accumulation_steps: {count}` is the number of microbatches, and must be {needed}, with"
            f" `schedule: {arguments.schedule}`."
        )
    processes = training.world_size
    inner = arguments.pp_size * arguments.tp_size
    if processes % inner:
        raise ValueError(
            f"`pp_size: {arguments.pp_size}` and `tp_size: {arguments.tp_size}` need a multiple of {inner} processes,"
            f" and there are {processes}. Start the run with torchrun --nproc-per-node {inner}."
        )
    spread(len(model_config.sublayers_per_layer()), num_stages)


def count_stages(arguments: PretrainArguments) -> int:
    stages_per_rank = arguments.stages_per_rank or (1 if arguments.schedule.lower() in ("1f1b", "gpipe") else 2)
    return len(ranks_of_stages(arguments.pp_size, stages_per_rank, arguments.schedule))


def check_matrices(config: PreTrainedConfig, tp_size: int):
    """Raise a `ValueError` where tensor parallelism would train with wrong gradients, or is not known not to."""
    name = config.base_model_type
    no_plan = f"transformers {transformers.__version__} has no plan for it"
    found = survey()["supported"].get(name, {}).get("tp_training", no_plan)
    if isinstance(found, float) and not config.base_model_tp_plan:
        base_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config.to_base_config())]
        found = found if base_class._tp_plan else no_plan  # of a newer version only
    if not isinstance(found, float):
        raise ValueError(
            f"`tp_size: {tp_size}` is not possible with base `{name}`: {found}. Use `pp_size` and replicas."
        )
    if not hasattr(PreTrainedModel, "_resolve_parallel_plans"):
        raise ValueError(f"`tp_size: {tp_size}` needs transformers 5.23, and {transformers.__version__} is installed.")
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % tp_size:
            raise ValueError(f"`tp_size: {tp_size}` does not divide `{field}` of the base, which is {heads}.")


def divide_matrices(model: torch.nn.Module, mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Tensor parallelism by transformers' plan, of those layers that a stage has.

    Returns:
        The modules of which a process sees its own heads alone; see `add_up_gradients`.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))[0]
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, PassThrough)}
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    tied = [(n, names[p]) for n, p in model.named_parameters(remove_duplicate=False) if n not in parameters]
    of_own_heads = [name for name in plan if plan[name] == OF_OWN_HEADS and name in modules]
    there = (modules.keys() | parameters.keys()) - {*of_own_heads}
    apply_tensor_parallelism(model, mesh, {name: plan[name] for name in plan if name in there})
    for name, first in tied:
        owner, _, leaf = name.rpartition(".")
        modules[owner].register_parameter(leaf, model.get_parameter(first))
    return [modules[name] for name in of_own_heads]


def add_up_gradients(of_own_heads: list[torch.nn.Module], mesh: DeviceMesh):
    """Make whole gradients of those of single heads, once per step.

    transformers' hook adds up after every microbatch what has gathered, and counts the first microbatches again.
    """
    for module in of_own_heads:
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                part = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(part, group=mesh.get_group())


class StageLoop:
    """Steps, evaluations and checkpoints of a run, which every process calls alike."""

    def __init__(
        self,
        run: PretrainRun,
        model: torch.nn.Module,
        checkpoint: str | None = None,
        fingerprints: dict[str, str | None] | None = None,
    ):
        self.fingerprints = fingerprints or {}
        arguments, training = run.arguments, run.training
        self.run, self.training, self.output = run, training, Path(arguments.output_dir)
        device = training.device
        replicas = dist.get_world_size() // (arguments.pp_size * arguments.tp_size)
        shape = (arguments.pp_size, replicas, arguments.tp_size)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
        self.replicas, self.replica = replicas, self.mesh["dp"].get_local_rank()
        self.part = self.mesh["pp"].get_local_rank() * replicas + self.replica
        self.batch_size = training.per_device_train_batch_size * training.gradient_accumulation_steps
        self.of_own_heads: list[torch.nn.Module] = []
        if checkpoint is not None:
            model = load_language_model(checkpoint, dtype="float32")
        model.train()  # one that was read is in evaluation mode, without dropout
        decay = {*Trainer.get_decay_parameter_names(None, model)}
        self.pipeline = AttnResPipeline(
            model,
            schedule=arguments.schedule,
            microbatches=training.gradient_accumulation_steps,
            batch_size=self.batch_size,
            sequence_length=arguments.max_length,
            stages_per_rank=arguments.stages_per_rank,
            group=self.mesh["pp"].get_group(),
            device=device,
            # FSDP2 casts what the residual stream is made of, and autocast alone does not
            dtype=torch.bfloat16 if training.bf16 and replicas > 1 else None,
            parallelize=self._parallelize,
        )
        self.optimizer = self._make_optimizer(decay)
        warmup = training.get_warmup_steps(training.max_steps)
        schedule = get_scheduler(
            training.lr_scheduler_type, self.optimizer, warmup, training.max_steps, training.lr_scheduler_kwargs
        )
        if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            raise ValueError(f"`lr_scheduler_type: {training.lr_scheduler_type.value}` needs the Trainer.")
        self.rates = list(zip(self.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas))
        self.every = {name: steps_of(getattr(training, name), training.max_steps) for name in INTERVALS}
        self.step, self.history, self.losses, self.position = 0, [], [], (0, 0, 0)
        if checkpoint is not None:
            state = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))
            self.step, self.history, self.losses = (state[name] for name in ("global_step", "log_history", "losses"))
            self.position = tuple(state["stream"]["position"])
            run.train.go_on_at(state["stream"])
            self.pipeline.load_optimizer(checkpoint, self.optimizer)

    def _parallelize(self, stage: torch.nn.Module):
        """Divide the parameters of a stage over the other dimensions of the mesh."""
        model = stage.model
        if self.run.arguments.tp_size > 1:
            self.of_own_heads += divide_matrices(model, self.mesh["tp"])
        if self.replicas > 1:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if self.training.bf16 else MixedPrecisionPolicy()
            for layer in decoder_layers(model.trunk):
                if any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=self.mesh["dp"], mp_policy=policy)
            fully_shard(model.trunk.depth_queries, mesh=self.mesh["dp"])
            fully_shard(stage, mesh=self.mesh["dp"], mp_policy=policy)

    def _make_optimizer(self, decay: set[str]) -> torch.optim.Optimizer:
        training, named = self.training, [(n, p) for n, p in self.pipeline.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for name, p in named if (name in decay) == decays],
                "weight_decay": training.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(training)
        optimizer = optimizer_class([group for group in groups if group["params"]], **kwargs)
        names = {id(parameter): name for name, parameter in named}
        separate_queries(optimizer, names, training)
        if training.muon_learning_rate is not None:
            optimizer = with_muon(optimizer, names, training, **kwargs)
        return optimizer

    # Steps

    def train(self):
        training = self.training
        rows, is_first = iter(self.run.train), dist.get_rank() == 0
        if self.step == 0 and training.eval_on_start:
            self._evaluate()
        begun, counted = time.perf_counter(), self.step
        progress = bar("Training", training.max_steps, training.disable_tqdm or not is_first, initial=self.step)
        while self.step < training.max_steps:
            for group, base, factor in self.rates:
                group["lr"] = base * factor(self.step)
            # Of a step and a part of the batch in a stage, so that a resumed run draws those of the uninterrupted one
            torch.manual_seed(training.seed + self.step * dist.get_world_size() + self.part)
            loss, norm = self._train_step(rows)
            self.losses.append(loss)  # since the last entry in the history
            self.step += 1
            progress.update()
            is_last = self.step == training.max_steps
            if is_last or self.step % self.every["logging_steps"] == 0:
                entry = {"loss": sum(self.losses) / len(self.losses), "grad_norm": norm}
                entry |= {"learning_rate": self.optimizer.param_groups[0]["lr"]}
                self._log({**entry, "seconds_per_step": (time.perf_counter() - begun) / (self.step - counted)})
                begun, counted, self.losses = time.perf_counter(), self.step, []
            if is_last or (training.eval_strategy == "steps" and self.step % self.every["eval_steps"] == 0):
                self._evaluate()
            if training.save_strategy == "steps" and (is_last or self.step % self.every["save_steps"] == 0):
                self._save()
        progress.close()

    def _train_step(self, rows: Iterator[dict[str, Any]]) -> tuple[float, float]:
        batch = collate(list(islice(rows, self.batch_size * self.replicas)))
        self.position = tuple(batch.pop(POSITION)[-1].tolist())
        self.run.train.forget_before(self.position)
        loss = self._over_stages(self.pipeline.step, batch)
        add_up_gradients(self.of_own_heads, self.mesh["tp"])
        norm = float(self.pipeline.clip_grad_norm_(self.training.max_grad_norm or float("inf")))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _over_stages(self, function, batch: dict[str, torch.Tensor]) -> float:
        """The mean loss over the labels of a batch, of which every replica has its rows."""
        count = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
        mine = {name: value.chunk(self.replicas)[self.replica] for name, value in batch.items()}
        cast = torch.autocast(self.training.device.type, torch.bfloat16, enabled=self.training.bf16)
        with cast:
            # FSDP2 takes the mean of the replicas' gradients, of which each is then of as many labels
            loss = function(**mine, num_items=count / self.replicas)
        dist.all_reduce(loss, group=self.mesh["dp"].get_group())
        return loss.item() / self.replicas

    def _evaluate(self):
        size = self.batch_size * self.replicas
        total, count, rows = 0.0, 0, list(self.run.held_out)
        for start in range(0, len(rows), size):
            batch = collate((rows[start : start + size] * size)[:size])  # all batches have one shape
            batch["labels"][len(rows) - start :] = IGNORED_LABEL
            num_items = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
            total += self._over_stages(self.pipeline.evaluate, batch) * num_items
            count += num_items
        self._log({"eval_loss": total / count})

    def _log(self, entry: dict[str, float]):
        entry = {**entry, "step": self.step}
        self.history.append(entry)
        if dist.get_rank() == 0:
            seconds = entry.get("seconds_per_step")
            tokens = self.batch_size * self.replicas * self.run.arguments.max_length
            left = None if seconds is None else seconds * (self.training.max_steps - self.step)
            speed = None if seconds is None else tokens / seconds
            tqdm.write(log_line(entry, self.step, self.training.max_steps, speed, left))

    def _save(self):
        folder = self.output / f"checkpoint-{self.step}"
        self.pipeline.save_pretrained(folder, self.optimizer)
        if dist.get_rank() == 0:
            state = {"global_step": self.step, "log_history": self.history, "losses": self.losses}
            state["stream"] = self.run.train.state_at(self.position)
            write_file(folder / STATE_FILE, json.dumps(state))
            write_manifest(folder, self.fingerprints)  # at last: without it a checkpoint is not whole
            limit = self.training.save_total_limit
            saved = sorted(self.output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            for old in saved[:-limit] if limit else []:
                (old / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(old)
        dist.barrier()
