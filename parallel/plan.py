# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a run costs before it is started: memory of a process, what crosses between stages, and the idle part."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..base.classes import ReadingNorm
from ..base.probe import KnownValues, decoder_layers, move_off_meta, probe_slices, probe_sublayers
from ..base.slices import count_tensors
from ..checkpoints.checkpoint import read_decoder_config
from ..configuration_attnres import AttnResConfig
from ..depth.queries import AttnResDepthQueries
from ..modeling_attnres import AttnResForCausalLM
from .routing import num_transfers, route_blocks
from .schedule import V_SCHEDULES, microbatches_needed, num_rounds, ranks_of_stages, sites_of_stages, spread


# Weight, gradient, and the two means of AdamW, in fp32
TRAINING_BYTES = 16
# They fill the waiting with gradients of weights: how much of it depends on the machine, and until then parts of the
# activations are kept
ZERO_BUBBLE = ("interleavedzerobubble", *V_SCHEDULES)


@dataclass(frozen=True)
class Layout:
    """How a run is divided over processes.

    Args:
        gpus: number of processes.
        tp: number of processes that share a layer.
        pp: number of processes that the layers are divided over. FSDP2 uses the remaining factor of `gpus`.
        stages_per_rank: pipeline stages per process.
        schedule: schedule of the pipeline.
        microbatches: microbatches in a step.
        microbatch_size: samples in a microbatch.
        sequence_length: tokens in a sample.
        dtype: dtype of activations.
        gradient_checkpointing: whether layers are computed again in the backward pass.
        prefill_length: tokens in a prompt.
        prefill_chunk: how many of them are computed at once. `None` means all.
    """

    gpus: int = 1
    tp: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    schedule: str = "1F1B"
    microbatches: int = 8
    microbatch_size: int = 1
    sequence_length: int = 4096
    dtype: str = "bfloat16"
    gradient_checkpointing: bool = False
    prefill_length: int = 131072
    prefill_chunk: int | None = None

    def __post_init__(self):
        for name, value in asdict(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"`dtype={self.dtype!r}` is none of torch's floating point dtypes, such as bfloat16.")
        if self.gpus % (self.tp * self.pp):
            raise ValueError(f"`tp={self.tp}` times `pp={self.pp}` must divide `gpus={self.gpus}`.")

    @property
    def dp(self) -> int:
        """Number of processes that FSDP2 divides a stage over."""
        return self.gpus // (self.tp * self.pp)

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize


def plan_checkpoint(model: str, layout: Layout, num_blocks: int | None = None) -> dict[str, Any]:
    """`plan` of a checkpoint: a folder or a Hub id.

    Args:
        num_blocks: of a base, which becomes an AttnRes model of so many; by default 8.
    """
    config = read_decoder_config(model)
    if not isinstance(config, AttnResConfig):
        config = AttnResConfig.from_base_config(config, num_blocks=num_blocks or min(8, sum(probe_sublayers(config))))
    elif num_blocks is not None:
        raise ValueError(
            f"`{model}` is an AttnRes checkpoint and has its blocks: leave `num_blocks={num_blocks}` out."
        )
    return plan(config, layout)


def plan(config: AttnResConfig, layout: Layout) -> dict[str, Any]:
    """Estimate memory in bytes, transfers in blocks and bytes, and the idle fraction of a step.

    Parameters and transfers are counted. Activations are those of a run without weights, for a process that has its
    layers undivided: tensor parallelism divides some of them.

    Returns:
        `parameters`, `stages`, `training`, `transfers`, `bubble` and `prefill`.

    Raises:
        ValueError: if the layout does not fit the model.
    """
    num_stages = layout.pp * layout.stages_per_rank
    ranks = ranks_of_stages(layout.pp, layout.stages_per_rank, layout.schedule)
    check_layout(config, layout)
    layers = spread(len(config.sublayers_per_layer()), num_stages)
    # Where layers scale the stream, a block is another one at every stage
    cache = num_stages == 1 or not probe_slices(config.to_base_config()).scales_blocks
    sites = sites_of_stages(config, layers)
    *sizes, queries = parameters(config, copies=num_stages > 1)
    *divided, _ = parameters(config, layout.tp, copies=num_stages > 1)
    activations = activation_bytes(config, layout)
    routes = route_blocks(sites, ranks, config.attn_res_block_size, cache=cache)
    stages, start = [], 0
    for number, (num_layers, route) in enumerate(zip(layers, routes)):
        parts = range(start + 1, start + num_layers + 1)
        parts = [*([0] if number == 0 else []), *parts, *([len(sizes) - 1] if number == num_stages - 1 else [])]
        start += num_layers
        stages.append(
            {
                "process": ranks[number],
                "layers": num_layers,
                # Depth queries are in every stage
                "parameters": sum(sizes[part] for part in parts) + queries,
                "parameters_of_tp_rank": sum(divided[part] for part in parts) + queries,
                "activations": None if activations is None else sum(activations[part] for part in parts),
                "receives": list(route.received),
            }
        )
    return {
        "parameters": sum(parameters(config)),
        "stages": stages,
        "training": training(stages, layout),
        "transfers": transfers(config, layout, sites, ranks, cache),
        "bubble": bubble(layout),
        "prefill": prefill(config, layout, sum(divided) + queries),
    }


def check_layout(config: AttnResConfig, layout: Layout):
    """Raise a `ValueError` for a layout with which a run does not start."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % layout.tp:
            raise ValueError(f"`tp={layout.tp}` must divide `{name}={heads}` of the model.")
    num_stages = layout.pp * layout.stages_per_rank
    needed = microbatches_needed(layout.microbatches, layout.pp, num_stages, layout.schedule)
    if needed is not None:
        raise ValueError(
            f"`microbatches={layout.microbatches}` must be {needed}, with `schedule={layout.schedule!r}`."
        )


class FlashAttention(torch.autograd.Function):
    """Not computed: it keeps what an attention keeps that has no matrix of scores."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        batch, heads, length, _ = query.shape
        output = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        # Kernels take numbers that they add, and make them of a mask in each layer
        masks = [] if mask is None else [mask.to(query.dtype)]
        ctx.save_for_backward(query, key, value, output, log_sums, *masks)
        return output

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("Nothing goes back in a plan.")


class WithoutScores(TorchFunctionMode):
    """torch's attention as a kernel without a matrix of scores. Without numbers it would have one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def attend(query, key, value, attn_mask=None, *args, **kwargs):
        return FlashAttention.apply(query, key, value, attn_mask)


def _mask(*args, **kwargs):
    """Without numbers transformers takes samples for packed ones, with a mask also where `is_causal` would do."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": True})


ALL_ATTENTION_FUNCTIONS.register("attnres_plan", sdpa_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register("attnres_plan", _mask)


def empty_model(config: AttnResConfig, dtype: torch.dtype) -> AttnResForCausalLM:
    """A model on the device "meta", without memory for its weights."""
    with torch.device("meta"):
        # A model writes into its config
        return AttnResForCausalLM._from_config(copy.deepcopy(config), dtype=dtype)


def parameters(config: AttnResConfig, tp: int = 1, copies: bool = False) -> list[int]:
    """How many a process has that shares each layer with `tp - 1` others.

    In front of the layers, in each, behind them, and in the depth queries.

    Args:
        copies: whether a head that shares the embedding has its own, as in a pipeline.
    """
    model = empty_model(config, torch.float32)
    plan = {name: style for name, style in (model.tp_plan or {}).items() if tp > 1}
    trunk = model.trunk
    layers = decoder_layers(trunk)
    prefix = next(path for path, module in trunk.named_modules() if module is layers)
    trunk_prefix = next(path for path, module in model.named_modules() if module is trunk)
    counts, behind, of_queries = [0] * (len(layers) + 3), -2, -1
    for name, parameter in model.named_parameters(remove_duplicate=not copies):
        inner = name.removeprefix(f"{trunk_prefix}.")
        if inner.startswith(f"{prefix}."):
            place = int(inner.removeprefix(f"{prefix}.").split(".")[0]) + 1
        else:
            child = getattr(trunk, inner.split(".")[0], None) if name != inner else None
            place = 0 if child is not None and not isinstance(child, ReadingNorm) else behind
            place = of_queries if isinstance(child, AttnResDepthQueries) else place
        counts[place] += numbers_of_rank(name, parameter, plan, tp)
    return counts


def numbers_of_rank(name: str, parameter: torch.Tensor, plan: dict[str, str], tp: int) -> int:
    """How many of a parameter's numbers the process has that has most, of `tp`, by transformers' plan of styles."""
    module = name.rpartition(".")[0]
    for pattern, style in plan.items():
        if fnmatch(module, pattern) or fnmatch(name, pattern):
            if style in ("embedding_rowwise", "embedding_colwise"):
                dim = int(style == "embedding_colwise")
            elif style == "grouped_gemm":
                dim = 0
            elif "colwise" in style:  # of experts in one tensor the second
                dim = max(parameter.ndim - 2, 0)
            elif "rowwise" in style and parameter.ndim > 1:  # a bias is added once
                dim = parameter.ndim - 1
            else:
                continue
            return parameter.numel() // parameter.shape[dim] * math.ceil(parameter.shape[dim] / tp)
    return parameter.numel()


def activation_bytes(config: AttnResConfig, layout: Layout) -> list[int] | None:
    """What autograd keeps of one microbatch: in front of the layers, in each, and behind them, with logits and loss.

    `None` if the base cannot be run without weights.
    """
    found: list[dict[int, int]] = [{} for _ in range(config.num_hidden_layers + 2)]
    kept, place = set(), 0

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept.add(storage._cdata)
            found[place][storage._cdata] = storage.nbytes()
            alive.append(tensor)  # so that no other storage takes its place
        return tensor

    def at(number: int):
        def hook(*args):
            nonlocal place
            place = number

        return hook

    alive: list[torch.Tensor] = []
    shape = layout.microbatch_size, layout.sequence_length
    try:
        model = empty_model(config, getattr(torch, layout.dtype)).train()
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.device("cpu"):
            move_off_meta(model)
            model.tie_weights()
            if model.config._attn_implementation == "sdpa":
                model.config._attn_implementation = "attnres_plan"
            if layout.gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            layers = decoder_layers(model.trunk)
            for number, layer in enumerate(layers):
                layer.register_forward_pre_hook(at(number + 1))
            layers[-1].register_forward_hook(at(len(layers) + 1))
            kept.update(parameter.untyped_storage()._cdata for parameter in model.parameters())
            keep = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with KnownValues(), WithoutScores(), keep:
                ids = torch.zeros(shape, dtype=torch.long)
                loss = model(ids, labels=ids, use_cache=False).loss
            del loss
    except Exception:  # of the base, in a mode that it does not know
        return None
    return [sum(of_place.values()) for of_place in found]


def in_flight(layout: Layout, rank: int) -> int | None:
    """How many microbatches of stages a process has activations of at once, at most. `None`: it is not known."""
    schedule = layout.schedule.lower()
    if schedule in ZERO_BUBBLE:
        return None
    if schedule == "1f1b":
        return min(layout.microbatches, layout.pp - rank)
    whole = layout.microbatches * layout.stages_per_rank
    if schedule == "interleaved1f1b":
        of_round = layout.microbatches // num_rounds(layout.microbatches, layout.pp)
        return min(whole, (layout.stages_per_rank - 1) * of_round + 2 * (layout.pp - 1 - rank) + 1)
    return whole


def activations_in_flight(
    mine: Sequence[dict[str, Any]], last: dict[str, Any], layout: Layout, rank: int
) -> int | None:
    """Bytes of the microbatches that a process has in flight, at most. `None`: they are not known.

    Args:
        mine: its stages.
        last: of all stages, behind which a microbatch goes back at once unless all go forward first.
    """
    count = in_flight(layout, rank)
    if count is None or any(stage["activations"] is None for stage in mine):
        return None
    if len(mine) == 1 or layout.schedule.lower() == "loopedbfs":
        return count * sum(stage["activations"] for stage in mine) // len(mine)
    others = [stage["activations"] for stage in mine if stage is not last]
    of_last = [stage["activations"] for stage in mine if stage is last]
    return sum(of_last) + (count - len(of_last)) * max(others)


def training(stages: Sequence[dict[str, Any]], layout: Layout) -> dict[str, Any]:
    """Bytes of the process that needs most: parameters with gradients and AdamW in fp32, and activations."""
    worst: dict[str, Any] = {}
    for rank in range(layout.pp):
        mine = [stage for stage in stages if stage["process"] == rank]
        state = TRAINING_BYTES * sum(stage["parameters_of_tp_rank"] for stage in mine) / layout.dp
        kept = activations_in_flight(mine, stages[-1], layout, rank)
        total = state + (kept or 0)
        if total > worst.get("total", -1):
            worst = {"process": rank, "state": round(state), "activations": kept, "total": round(total)}
    return worst


def transfers(
    config: AttnResConfig, layout: Layout, sites: Sequence[int], ranks: Sequence[int], cache: bool
) -> dict[str, Any]:
    """What crosses between processes for one microbatch, forward. As much comes back as gradients."""
    tensor = layout.microbatch_size * layout.sequence_length * config.hidden_size * layout.itemsize
    hops = [site for site, rank, other in zip(sites[1:], ranks, ranks[1:]) if rank != other]
    num_open = sum(count_tensors(config, site)[1] for site in hops)
    blocks = {
        name: num_transfers(route_blocks(sites, ranks, config.attn_res_block_size, cache=is_cached), ranks)
        for name, is_cached in (("naive", False), ("cached", cache))
    }
    return {
        "boundaries": len(hops),
        "blocks_naive": blocks["naive"],
        "blocks_cached": blocks["cached"],
        "bytes_naive": (blocks["naive"] + num_open) * tensor,
        "bytes_cached": (blocks["cached"] + num_open) * tensor,
        "bytes_twin": len(hops) * tensor,
    }


def bubble(layout: Layout) -> float | None:
    """The part of a step in which a process waits, if all stages take as long. `None`: it depends on the machine."""
    if layout.pp == 1:
        return 0.0
    if layout.schedule.lower() in ZERO_BUBBLE:
        return None
    idle, busy = layout.pp - 1, layout.microbatches * layout.stages_per_rank
    return idle / (idle + busy)


def prefill(config: AttnResConfig, layout: Layout, num_parameters: int) -> dict[str, Any]:
    """Bytes of a process that reads a prompt and has all layers: weights, and the block cache of what is read at once.

    With the cache's tokens divided over tensor-parallel processes, each has its part (arXiv 2603.15031, section 4.2).
    """
    tokens = min(layout.prefill_chunk or layout.prefill_length, layout.prefill_length)
    num_blocks = 1 + (config.num_sites - 1) // config.attn_res_block_size
    block_cache = num_blocks * tokens * config.hidden_size * layout.itemsize
    return {
        "tokens_at_once": tokens,
        "weights": num_parameters * layout.itemsize,
        "block_cache": block_cache,
        "block_cache_divided": math.ceil(block_cache / layout.tp),
    }


def describe(found: dict[str, Any], layout: Layout) -> str:
    """A plan as Markdown."""
    training, crossing, reading = found["training"], found["transfers"], found["prefill"]
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("processes", f"{layout.gpus}: tensor parallelism {layout.tp}, pipeline {layout.pp}, FSDP2 {layout.dp}"),
        ("weights, gradients and AdamW of a process, fp32", gib(training["state"])),
        ("activations of a process", "not known" if training["activations"] is None else gib(training["activations"])),
    ]
    if crossing["boundaries"]:
        idle = found["bubble"]
        rows += [
            (
                "blocks sent for a microbatch, without and with cache",
                f"{crossing['blocks_naive']}, {crossing['blocks_cached']}",
            ),
            ("bytes sent for a microbatch, with cache", gib(crossing["bytes_cached"])),
            ("the same of the PreNorm twin", gib(crossing["bytes_twin"])),
            ("part of a step that a process waits", "not known" if idle is None else f"{idle:.1%}"),
        ]
    rows += [
        (f"block cache of {reading['tokens_at_once']:,} tokens of a prompt", gib(reading["block_cache"])),
        ("the same, its tokens divided over tensor parallelism", gib(reading["block_cache_divided"])),
    ]
    if layout.tp == 1:
        rows.pop()
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
