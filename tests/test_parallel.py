# SPDX-License-Identifier: Apache-2.0
"""Training over the stages of a pipeline: what crosses, and that it computes what one process computes."""

import copy
import itertools
import json
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from decoder_configs import decoder_config
from families_page import RECORD
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import tiny_base_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnres import AttnResConfig, AttnResForCausalLM, AttnResForSequenceClassification
from attnres.depth.block_cache import BlockCache
from attnres.parallel import (
    AttnResPipeline,
    Layout,
    divide_block_cache,
    num_transfers,
    plan,
    route_blocks,
    sites_of_stages,
)
from attnres.parallel.pipeline import OPTIMIZER_FILE
from attnres.parallel.plan import in_flight, parameters
from attnres.parallel.schedule import spread
from attnres.parallel.stage import BlockStore


# --- routing


def loop(processes, rounds):
    return [i % processes for i in range(processes * rounds)]


def v_shape(processes):
    return [*range(processes), *reversed(range(processes))]


@pytest.mark.parametrize(
    "processes, rounds, naive, cached", [(2, 2, 9, 4), (2, 4, 35, 8), (4, 2, 35, 21), (4, 4, 135, 45), (8, 1, 35, 35)]
)
def test_blocks_that_cross(processes, rounds, naive, cached):
    """A block for each stage, as in the paper, which does not count the one that the stage in front has just closed:
    for 4 processes with 2 stages each it has 28 and, with a cache, 22; here the same numbers are 28 and 14."""
    ranks = loop(processes, rounds)
    hops = len(ranks) - 1
    sites = [4 * i for i in range(len(ranks) + 1)]
    assert num_transfers(route_blocks(sites, ranks, 4, cache=False), ranks) == naive == hops * (hops + 3) // 2
    # In the first round all, and later what the other processes have closed since
    first_round = (processes - 1) * (processes + 2) // 2
    later = processes * (rounds - 1) * (processes - 1)
    assert num_transfers(route_blocks(sites, ranks, 4), ranks) == cached == first_round + later


def layouts():
    for processes, rounds in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        num_stages = processes * rounds
        if num_stages > 1:
            shapes = [loop(processes, rounds)] + [v_shape(processes)] * (rounds == 2)
            for ranks, block_size, lengths in itertools.product(shapes, (1, 2, 3, 5, 100), ((2,), (1, 4), (3, 2, 2))):
                sites = [0, *itertools.accumulate(itertools.islice(itertools.cycle(lengths), num_stages))]
                yield sites, ranks, block_size


@pytest.mark.parametrize("cache", [True, False])
def test_every_stage_has_what_it_reads(cache):
    """Blocks and stages may end anywhere. Nothing is sent that a process has, but what its last stage has closed."""
    for sites, ranks, block_size in layouts():
        has = {rank: set() for rank in ranks}
        for i, route in enumerate(route_blocks(sites, ranks, block_size, cache=cache)):
            assert (route.entry_site, route.exit_site) == (sites[i], sites[i + 1])
            given = {*route.received, *route.cached}
            assert given == ({*range(sites[i] // block_size + 1)} if i else set())
            assert not {*route.received} & {*route.cached} and {*route.cached} <= has[ranks[i]]
            if cache and i and ranks[i] != ranks[i - 1]:
                assert not {*route.received} & has[ranks[i]]
            assert {*route.sent} <= given | {*route.closed} and not given & {*route.closed}
            has[ranks[i]] |= given | {*route.closed}
            if ranks[i] not in ranks[i + 1 :]:
                assert not route.kept
        assert has[ranks[-1]] == {*range(sites[-1] // block_size + 1)}


@pytest.mark.parametrize("sites, ranks", [([0, 2, 4], [0]), ([0, 2, 2], [0, 1]), ([1, 2, 3], [0, 1])])
def test_wrong_routes(sites, ranks):
    with pytest.raises(ValueError, match="must grow from 0"):
        route_blocks(sites, ranks, 2)


def test_layers_of_stages():
    config = AttnResConfig.from_base_config(tiny_base_config("llama"))
    assert spread(7, 3) == [3, 2, 2] and sites_of_stages(config, [1, 3]) == [0, 2, 8]
    with pytest.raises(ValueError, match=r"`layers_per_stage=\[1, 2\]` must be .* sum to the 4 layers"):
        sites_of_stages(config, [1, 2])
    with pytest.raises(ValueError, match="4 layers cannot be divided into 5 stages"):
        spread(4, 5)


def test_settings_of_a_pipeline():
    with pytest.raises(TypeError, match=r"AttnResPipeline\(\) got an unexpected keyword argument 'microbatch'"):
        AttnResPipeline(make_model(), microbatch=4)
    with pytest.raises(TypeError, match=r"AttnResPipeline\(\) missing a required argument: 'sequence_length'"):
        AttnResPipeline(make_model(), microbatches=4, batch_size=8)
    with pytest.raises(ValueError, match="`microbatches=3` must divide `batch_size=8`"):
        AttnResPipeline(make_model(), microbatches=3, batch_size=8, sequence_length=7)


# --- training


BATCH = torch.randint(3, 97, (8, 7), generator=torch.Generator().manual_seed(0))


def make_model(family="llama", block_size=3, num_hidden_layers=8, frozen=False, checkpointing=False, **fields):
    of_base = {name: fields.pop(name) for name in ("tie_word_embeddings", "vocab_size") if name in fields}
    torch.manual_seed(0)
    base = tiny_base_config(family, num_hidden_layers=num_hidden_layers, **of_base)
    model = AttnResForCausalLM(AttnResConfig.from_base_config(base, block_size=block_size, **fields)).double().train()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others have no fp64
    with torch.no_grad():
        for tensor in model.trunk.depth_queries.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.3)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("depth_queries" in name)
    return model


def in_processes(function, num_processes, *args):
    with tempfile.TemporaryDirectory() as folder:
        arguments = function, num_processes, f"file://{folder}/meeting", args
        torch.multiprocessing.spawn(_in_process, args=arguments, nprocs=num_processes)


def _in_process(rank, function, num_processes, meeting, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_processes))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_processes)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def pipeline_of(model, **settings):
    settings = {"microbatches": 4, "batch_size": 8, "sequence_length": 7, **settings}
    return AttnResPipeline(model, **settings)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_gradient(pipeline, model, of_all=False) -> float:
    """The largest difference from the gradients of the whole model, over all processes, relative to the tensor's.

    Args:
        of_all: relative to 1e-9 of the largest gradient of all, where that is more: a gradient that is nothing but
            rounding errors, as of the bias of keys, is another one each time.
    """
    expected, worst, seen = dict(model.named_parameters()), 0.0, set()
    largest = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None) if of_all else 0.0

    def relative(found, expected):
        if found is None or expected is None:
            assert found is None or not found.any(), "a gradient that the whole model has not"
            assert expected is None or not expected.any(), "a gradient that is missing"
            return 0.0
        scale = max(expected.abs().max().item(), 1e-9 * largest, 1e-30)
        return (found - expected).abs().max().item() / scale

    for stage in pipeline.stages:
        for name, parameter in stage.submod.model.named_parameters():
            # Of one source there is nothing to mix: queries that a stage does not use have no gradient
            if "depth_queries" in name and (parameter.grad is not None or not of_all):
                rows = slice(stage.route.entry_site, stage.route.exit_site + stage.is_last)
                worst = max(worst, relative(whole(parameter.grad)[rows], expected[name].grad[rows]))
                others = torch.ones(len(parameter), dtype=torch.bool)
                others[rows] = False
                assert not whole(parameter.grad)[others].any()
    for name, parameter in pipeline.named_parameters():
        seen.add(name)
        if "depth_queries" not in name and expected[name].requires_grad:
            found = None if parameter.grad is None else whole(parameter.grad)
            worst = max(worst, relative(found, expected[name].grad))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (worst, seen))
    assert set().union(*(names for _, names in gathered)) == {*expected}, "some parameters are of no stage"
    return max(worst for worst, _ in gathered)


def relative(found, expected) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


class Wire:
    """Counts the numbers that this process sends while it is active."""

    def __enter__(self):
        self.sent, self.original = 0, dist.P2POp

        class Counted(dist.P2POp):
            def __init__(operation, op, tensor, *args, **kwargs):
                super().__init__(op, tensor, *args, **kwargs)
                self.sent += tensor.numel() if op is dist.isend else 0

        dist.P2POp = Counted
        return self

    def __exit__(self, *exception):
        dist.P2POp = self.original


def _gradients(rank, cases):
    for settings, of_model in cases:
        model = make_model(**of_model)
        expected = model(BATCH, labels=BATCH).loss
        expected.backward()
        pipeline = pipeline_of(model, **settings)
        with Wire() as wire:
            loss = pipeline.step(BATCH, BATCH)
        # Its logits are cast to fp32
        assert abs(loss - expected.detach()) < 1e-6, (settings, of_model)
        worst = worst_gradient(pipeline, model)
        assert worst < 1e-12, (settings, of_model, worst)
        check_wire(pipeline, wire, model)
        if settings.get("cache", True):
            assert abs(pipeline.evaluate(BATCH, BATCH) - expected.detach()) < 1e-6, (settings, of_model)
        pipeline.step(BATCH, BATCH)  # added to those of the first
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else 2 * parameter.grad
        assert worst_gradient(pipeline, model) < 1e-12, (settings, of_model)


def check_wire(pipeline, wire, model):
    """As many numbers have been sent as the routes say: forward, and the gradients back."""
    routes, ranks, block_size = pipeline.routes, pipeline.ranks, model.config.attn_res_block_size
    tensors = num_transfers(routes, ranks)
    for route, rank, other in zip(routes, ranks, ranks[1:]):
        if rank != other:
            num_open = route.exit_site % block_size
            tensors += min(num_open, 1) + (num_open if model.config.attn_res_open_block == "each" else 0)
    sent = torch.tensor(wire.sent)
    dist.all_reduce(sent)
    expected = 2 * tensors * BATCH.numel() * model.config.hidden_size
    if pipeline.is_tied and ranks[0] != ranks[-1]:
        expected += 2 * model.get_input_embeddings().weight.numel()
    assert sent == expected, (sent, expected)


SCHEDULES = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FIRST_CASES = [
    (
        {"schedule": "Interleaved1F1B", "layers_per_stage": [3, 1, 2, 2]},
        {"family": "qwen3", "tie_word_embeddings": True},
    ),
    ({"schedule": "ZBVZeroBubble", "microbatches": 8}, {"block_size": 2, "attn_res_query": "input"}),
    ({"schedule": "Interleaved1F1B"}, {"frozen": True}),
    # What a stage sends is a view, the output of experts alone
    (
        {"schedule": "InterleavedZeroBubble", "microbatches": 8, "layers_per_stage": [2, 3, 2, 1]},
        {"family": "qwen3_moe"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_gradients_of_all_schedules(num_processes):
    """Every second case over two processes, the others over four."""
    cases = [({"schedule": schedule}, {"block_size": 3}) for schedule in ("GPipe", "1F1B")]
    cases += [({"schedule": "1F1B"}, {"block_size": block_size}) for block_size in (1, 2, 4, 16)]
    cases += [
        ({"schedule": schedule, "microbatches": 8, "cache": cache}, {"block_size": block_size})
        for schedule, (cache, block_size) in itertools.product(SCHEDULES, ((True, 2), (False, 3)))
    ]
    for fields in (
        {"attn_res_open_block": "each", "attn_res_num_heads": 2},
        {"attn_res_query": "hybrid", "attn_res_query_rank": 3},
        {"attn_res_stream": "kept"},
        {"attn_res_weights": "sigmoid"},
        {"frozen": True},
        {"family": "qwen3_moe"},
        {"family": "granite"},
    ):
        cases += [
            ({"schedule": schedule, "microbatches": 8}, fields) for schedule in ("1F1B", "InterleavedZeroBubble")
        ]
    cases += [({"schedule": schedule}, {"checkpointing": True}) for schedule in ("1F1B", "Interleaved1F1B")]
    cases += [({"schedule": schedule, "microbatches": 8}, {"checkpointing": True}) for schedule in SCHEDULES[2:]]
    cases = cases[num_processes == 4 :: 2]
    if num_processes == 2:
        cases.append(({"schedule": "Interleaved1F1B", "layers_per_stage": [1] * 8, "stages_per_rank": 4}, {}))
        cases.append(({"schedule": "1F1B", "layers_per_stage": [7, 1]}, {}))
    in_processes(_gradients, num_processes, cases)


def _without_deposits(rank):
    model = make_model(block_size=2)
    model(BATCH, labels=BATCH).loss.backward()
    BlockStore.deposit = lambda self, key, grad: None
    pipeline = pipeline_of(model, schedule="Interleaved1F1B")
    pipeline.step(BATCH, BATCH)
    assert worst_gradient(pipeline, model) > 0.05


@pytest.mark.slow
def test_a_dropped_gradient_is_seen():
    """A mutant that forgets the gradients of blocks which a later stage has taken from memory."""
    in_processes(_without_deposits, 2)


def _padded(rank):
    """Rows of different lengths: the loss is over all tokens and not a mean of the microbatches'."""
    mask = (torch.arange(7) < torch.arange(8, 0, -1).clamp(3, 7)[:, None]).long()
    labels = BATCH.masked_fill(mask == 0, -100)
    model = make_model()
    expected = model(BATCH, attention_mask=mask, labels=labels).loss
    expected.backward()
    pipeline = pipeline_of(model, schedule="Interleaved1F1B")
    loss = pipeline.step(BATCH, labels, attention_mask=mask)
    assert abs(loss - expected) < 1e-6 and worst_gradient(pipeline, model) < 1e-12
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert relative(pipeline.clip_grad_norm_(0.1), norm) < 1e-12 and worst_gradient(pipeline, model) < 1e-12


def _packed(rank):
    """Two documents in a row, told apart by their positions."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand(8, 7)
    model = make_model()
    expected = model(BATCH, position_ids=positions, labels=BATCH, use_cache=False).loss
    expected.backward()
    pipeline = pipeline_of(model, schedule="Interleaved1F1B")
    loss = pipeline.step(BATCH, BATCH, position_ids=positions)
    assert abs(loss - expected) < 1e-6 and worst_gradient(pipeline, model) < 1e-12
    assert abs(pipeline.step(BATCH, BATCH) - expected) > 1e-5


def _layouts_of_a_run(rank, folder, models):
    """Two steps in one layout and two in another are four in one process."""
    for of_model in models:
        model = make_model(**of_model)
        whole_model = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(whole_model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            whole_model(BATCH, labels=BATCH).loss.backward()
            torch.nn.utils.clip_grad_norm_(whole_model.parameters(), 0.5)
            optimizer.step()
        for number, settings in enumerate(({"schedule": "1F1B"}, {"schedule": "ZBVZeroBubble", "microbatches": 8})):
            pipeline = pipeline_of(model, **settings)
            optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
            if number:
                pipeline.load_optimizer(f"{folder}/0", optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                pipeline.step(BATCH, BATCH)
                pipeline.clip_grad_norm_(0.5)
                optimizer.step()
            pipeline.save_pretrained(f"{folder}/{number}", optimizer)
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/{number}", dtype=torch.float64).train()
            for name, parameter in model.named_parameters():  # which a file does not say
                parameter.requires_grad_(dict(whole_model.named_parameters())[name].requires_grad)
        for (name, found), (_, expected) in zip(model.named_parameters(), whole_model.named_parameters()):
            # Adam divides by the square root of squares: where these are rounding errors it makes steps of them
            assert (found - expected).abs().max() < 1e-9, name
        if rank == 0:
            names = {*load_file(f"{folder}/1/model.safetensors")}
            whole_model.save_pretrained(f"{folder}/whole")
            assert names == {*load_file(f"{folder}/whole/model.safetensors")}
        dist.barrier()


def _plans(rank):
    """What a plan says is what is there."""
    config = make_model().config
    for settings in (
        {"schedule": "1F1B"},
        {"schedule": "GPipe"},
        {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
        {"schedule": "LoopedBFS", "stages_per_rank": 2},
    ):
        layout = Layout(gpus=2, pp=2, microbatches=8, sequence_length=7, dtype="float32", **settings)
        planned = plan(config, layout)
        pipeline = pipeline_of(make_model().float(), **settings, microbatches=8)
        stages = [planned["stages"][stage.stage_index] for stage in pipeline.stages]
        assert sum(stage["parameters"] for stage in stages) == sum(map(torch.numel, pipeline.parameters()))
        deepest = count_in_flight(pipeline)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        with Wire() as wire:
            pipeline.step(BATCH, BATCH)
        optimizer.step()
        sent = torch.tensor(wire.sent)
        dist.all_reduce(sent)
        assert sent == 2 * 8 * planned["transfers"]["bytes_cached"] / 4, "forward and back, 8 microbatches"
        assert max(deepest) == in_flight(layout, rank)
        worst = planned["training"]
        if worst["process"] == rank:
            kept = [*pipeline.parameters(), *(parameter.grad for parameter in pipeline.parameters())]
            kept += [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
            assert sum(tensor.nbytes for tensor in kept) == worst["state"]


def count_in_flight(pipeline) -> list[int]:
    """Of how many microbatches the stages of this process hold activations, behind each forward pass."""
    found = []
    for stage in pipeline.stages:
        forward = stage.forward_one_chunk

        def counting(*args, forward=forward, **kwargs):
            result = forward(*args, **kwargs)
            found.append(sum(len(stage.in_flight) for stage in pipeline.stages))
            return result

        stage.forward_one_chunk = counting
    return found


def counting_elements(start, made):
    def counting(self, *args, **kwargs):
        start(self, *args, **kwargs)
        made.append(self.values.numel())

    return counting


def _divided_prefill(rank):
    """Each process has the blocks of its tokens; logits and tokens are as of a model that has all."""
    for fields in (
        {},
        {"attn_res_num_heads": 2},
        {"attn_res_query": "input"},
        {"attn_res_open_block": "each"},
        {"attn_res_stream": "kept"},
    ):
        model = make_model(**fields).eval()
        prompt = BATCH[:2]
        options = {"max_new_tokens": 4, "do_sample": False}
        with torch.no_grad():
            expected, generated = model(prompt).logits, model.generate(prompt, **options)
        divide_block_cache(model)
        made = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(BlockCache, "start", counting_elements(BlockCache.start, made))
            with torch.no_grad():
                assert relative(model(prompt).logits, expected) < 1e-12
        blocks = 1 + (model.config.num_sites - 1) // model.config.attn_res_block_size
        # 7 tokens are 4 and 3, of 2 samples
        assert made == [2 * (4 - rank) * blocks * model.config.hidden_size], (fields, made)
        assert model.generate(prompt, **options).equal(generated)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
        with torch.no_grad():
            padded = model(prompt, attention_mask=mask).logits[:, 2:]
            assert relative(padded, make_model(**fields).eval()(prompt, attention_mask=mask).logits[:, 2:]) < 1e-12
        model(prompt, labels=prompt).loss.backward()  # as before
    # A copy has its own queries
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in copied.trunk.depth_queries.parameters():
            tensor.zero_()
        assert relative(copied(prompt).logits, model(prompt).logits) > 1e-3


def _divided_families(rank, families):
    for family in families:
        model = model_of(family)
        with torch.no_grad():
            expected = model(BATCH, use_cache=False).logits
            divide_block_cache(model)
            if family == "opt":  # flattens its tokens
                with pytest.raises(ValueError, match="should have handed on the residual stream"):
                    model(BATCH, use_cache=False)
                continue
            assert relative(model(BATCH, use_cache=False).logits, expected) < 1e-9, family


def test_a_copy_divides_its_own_block_cache():
    model = make_model()
    divide_block_cache(model)
    copied = copy.deepcopy(model)
    assert copied.trunk.start_stream.__self__ is copied.trunk


@pytest.mark.slow
def test_divided_prefill_of_many_families():
    in_processes(_divided_families, 2, sorted({"opt", *SUPPORTED[::4]}))


def _tensor_parallel(rank, folder, families):
    """Really divided by transformers' plan: as many numbers as planned, and with the block cache's tokens divided."""
    for family in families:
        whole_model = AutoModelForCausalLM.from_pretrained(f"{folder}/{family}", dtype=torch.float64)
        config = DistributedConfig(tp_size=2)
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/{family}", dtype=torch.float64, distributed_config=config
        )
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        if rank == 0:  # which has the odd row
            assert sum(map(torch.numel, local)) == sum(parameters(model.config, tp=2)), family
        with torch.no_grad():
            expected = whole_model(BATCH, use_cache=False).logits
            divide_block_cache(model)
            assert relative(model(BATCH, use_cache=False).logits, expected) < 1e-12, family


@pytest.mark.slow
def test_tensor_parallelism(tmp_path):
    families = ["llama", "gemma2", "olmo2", "phi3", "glm4"]
    for family in families:
        model_of(family).float().save_pretrained(tmp_path / family)
    in_processes(_tensor_parallel, 2, str(tmp_path), families)


def _errors(rank):
    model = make_model()
    for settings, message in (
        ({"schedule": "1F1B", "stages_per_rank": 2}, "Schedule 1F1B takes 1 stage of each process, not 2"),
        ({"schedule": "ZBVZeroBubble", "stages_per_rank": 3}, "takes 2 stages of each process, not 3"),
        ({"microbatches": 3}, "`microbatches=3` must divide `batch_size=8`"),
        ({"layers_per_stage": [1, 1, 6]}, "is of 3 stages, and 2 processes with 1 each have 2"),
        ({"schedule": "no such"}, "Unknown schedule name"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline_of(model, **settings)
    moe = make_model("qwen3_moe")
    moe.config.output_router_logits = True
    with pytest.raises(ValueError, match="set it to False in the config"):
        pipeline_of(moe)
    pipeline = pipeline_of(model)
    for batch, labels, message in (
        (BATCH[:4], BATCH[:4], r"`input_ids` is \(4, 7\), and the pipeline was made for \(8, 7\)"),
        (BATCH, BATCH[:, :6], r"`labels` is \(8, 6\)"),
        (BATCH, torch.full_like(BATCH, -100), "no labels"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.step(batch, labels)
    # All processes have to have the same: otherwise one waits for another, or trains on what does not belong together
    different = make_model()
    with torch.no_grad():
        different.get_output_embeddings().weight[0, 0] += rank * 1e-9
    for wrong, settings, message in (
        (different, {}, "different models: model of process 1 are others than those of process 0"),
        (make_model(block_size=2 + rank), {}, "different models"),
        (make_model(), {"microbatches": 4 + 4 * rank}, "settings of process 1"),
        (make_model(frozen=rank == 1), {}, "requires_grad of process 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline_of(wrong, **settings)
    for batch, labels, kwargs in (
        (BATCH.roll(rank, 1), BATCH, {}),
        (BATCH, BATCH.roll(rank, 0), {}),
        (BATCH, BATCH, {"attention_mask": torch.ones_like(BATCH) if rank else None}),
        (BATCH, BATCH, {"num_items": 8 + rank}),
    ):
        with pytest.raises(ValueError, match="were given different batches"):
            pipeline.step(batch, labels, **kwargs)
    with pytest.raises(FileNotFoundError, match="saved without its optimizer"):
        pipeline.load_optimizer("/nowhere", torch.optim.SGD(pipeline.parameters(), lr=1.0))


def _several(rank, folder):
    _gradients(rank, FIRST_CASES)
    _errors(rank)
    _padded(rank)
    _packed(rank)
    _layouts_of_a_run(rank, folder, [{"family": "qwen3", "tie_word_embeddings": True}])
    _plans(rank)
    _divided_prefill(rank)


@pytest.mark.slow
def test_training_over_two_processes(tmp_path):
    """In one test, as processes take long to start."""
    in_processes(_several, 2, str(tmp_path))


@pytest.fixture
def one_process():
    torch.set_default_dtype(torch.float64)  # as in several
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)


SUPPORTED = [name for name in json.loads(RECORD.read_text())["supported"] if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
# What their layers are given besides the stream, or what else is between the embedding and them
NOT_IN_SLICES = {
    "cpmant": "`attention_mask`",
    "gemma4_text": "`per_layer_input`",
    "gemma4_unified_text": "`shared_kv_states`",
    "glm_moe_dsa": "`prev_topk_indices`",
    "hy_v4": "`prev_topk_indices`",
    "opt": "its embedding has 16 features, and its residual stream 32",
    "zamba": "`original_hidden_states`",
    "zamba2": "`original_hidden_states`",
}


def model_of(family):
    """Without dropout, which every stage would draw for itself."""
    torch.manual_seed(0)
    model = AttnResForCausalLM(AttnResConfig.from_base_config(decoder_config(family), block_size=3)).double().eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for tensor in model.trunk.depth_queries.zero_initialized():
        torch.nn.init.normal_(tensor, std=0.3)
    return model


# They differ in what comes before the layers or after them, in what layers take and return, and in whether they scale
# the stream
DIFFERENT = ("beam", "bloom", "gptj", "megatron-bert", "nanochat", "opt", "zamba")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.slow) for name in SUPPORTED]
)
def test_every_family(one_process, family):
    """Right or refused, in slices by hand and as a pipeline of up to four stages."""
    model = model_of(family)
    num_stages = min(4, len(model.config.sublayers_per_layer()))
    settings = {"schedule": "Interleaved1F1B", "stages_per_rank": num_stages}
    if family in NOT_IN_SLICES:
        for divide in (lambda: model.trunk.keep_layers(0, 1), lambda: pipeline_of(model, **settings)):
            with pytest.raises(ValueError, match=f"cannot be divided into slices: .*{NOT_IN_SLICES[family]}"):
                divide()
        return
    pipeline = pipeline_of(model, **settings)
    with torch.no_grad():
        # Some of a base's own code is in fp32: 5e-7 at most
        expected, stream = model.trunk(BATCH, use_cache=False).last_hidden_state, None
        ends = [0, *itertools.accumulate(pipeline.layers_per_stage)]
        for start, end in zip(ends, ends[1:]):
            part = copy.deepcopy(model.trunk)
            part.keep_layers(start, end, pipeline.probe)
            stream = part(**{"inputs_embeds": stream} if start else {"input_ids": BATCH}, use_cache=False)[0]
        assert relative(stream, expected) < 2e-6
    model(BATCH, labels=BATCH, use_cache=False).loss.backward()
    pipeline.step(BATCH, BATCH)
    assert worst_gradient(pipeline, model, of_all=True) < 2e-6


def test_models_that_are_no_pipeline(one_process):
    with pytest.raises(ValueError, match="without adapters, not of a PeftModel"):
        pipeline_of(get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"])))
    with_adapter = make_model()
    with_adapter.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="with adapters. An adapter can be merged first"):
        pipeline_of(with_adapter)
    head = AttnResForSequenceClassification(make_model().config)
    with pytest.raises(ValueError, match="not of a AttnResForSequenceClassification"):
        pipeline_of(head)
    with pytest.raises(ValueError, match="not of a LlamaForCausalLM"):
        pipeline_of(AutoModelForCausalLM.from_config(tiny_base_config("llama")))


@pytest.mark.slow
def test_files_of_a_run(one_process, tmp_path):
    """What is there already is replaced by what is written beside it; an optimizer's file has to fit."""
    model = make_model()
    pipeline = pipeline_of(model, schedule="Interleaved1F1B")
    optimizer = torch.optim.AdamW(pipeline.parameters())
    pipeline.step(BATCH, BATCH)
    optimizer.step()
    (tmp_path / "run").mkdir()
    for name in ("model-00001-of-00002.safetensors", "notes.txt"):
        (tmp_path / "run" / name).write_text("of an earlier run")
    pipeline.save_pretrained(tmp_path / "run", optimizer)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", OPTIMIZER_FILE, "notes.txt"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    for other, message in (
        (make_model("qwen3"), None),
        (make_model("qwen3_moe"), "has no parameter"),
        (None, "has the shape"),
    ):
        if other is None:
            other = make_model(num_hidden_layers=8, vocab_size=55)
        of_other = pipeline_of(other, schedule="Interleaved1F1B")
        empty = torch.optim.AdamW(of_other.parameters())
        if message is None:  # it has all that llama has
            of_other.load_optimizer(tmp_path / "run", empty)
        else:
            with pytest.raises(ValueError, match=f"is of another model: .*{message}"):
                of_other.load_optimizer(tmp_path / "run", empty)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("attnres.parallel.pipeline.save_file", None)
        with pytest.raises(TypeError):
            pipeline.save_pretrained(tmp_path / "run", optimizer)
    assert {path.name for path in (tmp_path / "run").iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_bfloat16(one_process):
    """What crosses is of the model's dtype, and queries stay as wide as they were. Another is refused."""
    model = make_model().bfloat16()
    expected = model(BATCH, labels=BATCH).loss
    expected.backward()
    pipeline = pipeline_of(model, schedule="Interleaved1F1B")
    assert abs(pipeline.step(BATCH, BATCH) - expected) < 1e-2
    for name, parameter in pipeline.named_parameters():
        grad = dict(model.named_parameters())[name].grad
        assert parameter.dtype == (torch.float64 if "depth_queries" in name else torch.bfloat16)
        if "depth_queries" not in name:  # of which each stage has some rows
            assert relative(parameter.grad.float(), grad.float()) < 0.1, name
    pipeline = pipeline_of(make_model(), schedule="Interleaved1F1B", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"is of torch.float64, and the pipeline was made to send torch.float32"):
        pipeline.step(BATCH, BATCH)


def test_checkpointed_layers_with_a_zero_bubble(one_process):
    """What a stage in the middle sends on is detached in place, and checkpointed layers behind it still keep it."""
    model = make_model(block_size=2, checkpointing=True)
    pipeline = pipeline_of(model, schedule="InterleavedZeroBubble", stages_per_rank=4)
    model(BATCH, labels=BATCH).loss.backward()
    pipeline.step(BATCH, BATCH)
    assert worst_gradient(pipeline, model) < 1e-12


@pytest.mark.slow
def test_layouts_of_a_run(tmp_path):
    in_processes(_layouts_of_a_run, 2, str(tmp_path), [{}, {"frozen": True}])


def _composed(rank, folder, kind):
    """Two stages of two processes each, which share a stage's parameters, and with FSDP2 the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    inner = mesh["inner"]

    def parallelize(stage):
        if kind == "tp":
            plan = {f"{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {"down_proj": RowwiseParallel()}
            for layer in stage.model.trunk.layers:
                if hasattr(layer, "mlp"):
                    parallelize_module(layer.mlp, inner, plan)
            return
        for layer in stage.model.trunk.layers:
            if hasattr(layer, "mlp"):
                fully_shard(layer, mesh=inner)
        fully_shard(stage.model.trunk.depth_queries, mesh=inner)
        fully_shard(stage, mesh=inner)

    model = make_model()
    model(BATCH, labels=BATCH).loss.backward()
    mine = BATCH if kind == "tp" else BATCH.chunk(2)[inner.get_local_rank()]
    pipeline = pipeline_of(
        model,
        schedule="Interleaved1F1B",
        group=mesh["pp"].get_group(),
        batch_size=len(mine),
        parallelize=parallelize,
        **{"microbatches": 4},
    )
    # FSDP2 takes the mean over the processes of what each has of the sum
    num_items = BATCH[:, 1:].numel() // (1 if kind == "tp" else 2)
    pipeline.step(mine, mine, num_items=num_items)
    assert worst_gradient(pipeline, model) < 1e-12
    pipeline.save_pretrained(f"{folder}/{kind}")
    saved = load_file(f"{folder}/{kind}/model.safetensors")
    assert all(saved[name].equal(parameter) for name, parameter in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_composed(kind, tmp_path):
    in_processes(_composed, 4, str(tmp_path), kind)
