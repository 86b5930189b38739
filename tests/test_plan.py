# SPDX-License-Identifier: Apache-2.0
"""`attnres plan`: what it says of a run is what runs have. Of several processes: `_plans` in test_parallel.py."""

import copy
import json
import re
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decoder_configs import decoder_config
from tiny_models import convert, mostly_slow, tiny_base_model
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from transformers import Qwen3Config

from attnres import AttnResConfig, AttnResForCausalLM
from attnres.benchmarks.twin import SHAPES
from attnres.depth.block_cache import BlockCache
from attnres.parallel import Layout, plan
from attnres.parallel.plan import activation_bytes, in_flight, parameters


def kept_bytes(model, shape) -> int:
    """Of the distinct storages that autograd keeps for a loss, but the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.zeros(shape, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.train()(ids, labels=ids, use_cache=False).loss
    del loss
    return sum(storages.values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "family, block_size",
    mostly_slow([("qwen3", 3), ("llama", 1), ("cohere2", 3), ("gemma2", 5), ("gpt2", 2)], every=3),
)
def test_activations(family, block_size, checkpointing):
    """Those of a real model: with masks of windows, heads that are repeated, and gemma2's attention with scores."""
    base = decoder_config(family)
    if family == "gpt2":
        base.attn_pdrop = 0.0  # on a CPU, dropout needs the matrix of scores
    config = AttnResConfig.from_base_config(base, block_size=block_size)
    model = AttnResForCausalLM(copy.deepcopy(config))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layout = Layout(microbatch_size=2, sequence_length=48, dtype="float32", gradient_checkpointing=checkpointing)
    assert sum(activation_bytes(config, layout)) == pytest.approx(kept_bytes(model, (2, 48)), rel=0.05)


@pytest.mark.slow
def test_activations_with_rotary_embeddings_that_depend_on_positions():
    """On both sides of the limit beyond which they are computed anew."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    base = decoder_config("llama", rope_parameters=rope, max_position_embeddings=32)
    config = AttnResConfig.from_base_config(base, block_size=3)
    for length in (24, 48):
        layout = Layout(microbatch_size=2, sequence_length=length, dtype="float32")
        model = AttnResForCausalLM(copy.deepcopy(config))
        assert sum(activation_bytes(config, layout)) == pytest.approx(kept_bytes(model, (2, length)), rel=0.05)


def test_a_plan_leaves_the_config_alone():
    """A model that shares it computes what it did, and its gradients."""
    config = AttnResConfig.from_base_config(decoder_config("llama"))
    model, ids = AttnResForCausalLM(config).eval(), torch.arange(8)[None]
    fields, attention, expected = config.to_dict(), config._attn_implementation, model(ids).logits
    plan(config, Layout(sequence_length=64, prefill_length=64))
    assert (config.to_dict(), config._attn_implementation) == (fields, attention)
    found = model(ids, labels=ids)
    found.loss.backward()
    assert torch.equal(found.logits, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba2", "gpt_oss", "qwen3_moe"])
def test_parameters(family):
    config = AttnResConfig.from_base_config(decoder_config(family))
    expected = sum(map(torch.numel, AttnResForCausalLM(config).parameters()))
    assert sum(parameters(config)) == expected == plan(config, Layout())["parameters"]


def test_parameters_of_tensor_parallelism():
    """The projections of a layer are divided, and its norms are not."""
    config = AttnResConfig.from_base_config(tiny_base_model("llama").config)
    model = AttnResForCausalLM(config)
    whole, divided = parameters(config), parameters(config, tp=2)
    norms = sum(p.numel() for name, p in model.model.layers[0].named_parameters() if "norm" in name)
    assert divided[1] == (whole[1] - norms) // 2 + norms and divided[-1] == whole[-1]


@pytest.mark.parametrize("block_size", [1, 3, 4, 100])
def test_block_cache(block_size):
    model = convert(tiny_base_model("llama"), block_size)
    planned = plan(model.config, Layout(prefill_length=48, dtype="float32"))["prefill"]
    made = []
    start = BlockCache.start

    def starting(self, *args):
        start(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(BlockCache, "start", starting)
        model(torch.zeros(1, 48, dtype=torch.long))
    assert planned["block_cache"] == made[0].values.nbytes
    assert planned["weights"] == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.slow
def test_numbers_of_the_paper():
    """15 GB for 128K tokens, 1.9 GB divided by 8, below 0.3 GB in chunks of 16K; and 28 blocks that cross."""
    base = Qwen3Config(
        hidden_size=7168,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
    )
    config = AttnResConfig.from_base_config(base, num_blocks=8)
    whole = plan(config, Layout(gpus=8, tp=8))["prefill"]
    in_chunks = plan(config, Layout(gpus=8, tp=8, prefill_chunk=16384))["prefill"]
    # The paper does not count the last block, which only the head reads
    assert [round(whole[key] * 8 / 9 / 1e9, 1) for key in ("block_cache", "block_cache_divided")] == [15.0, 1.9]
    assert in_chunks["block_cache_divided"] < 0.3e9
    layout = Layout(gpus=4, pp=4, stages_per_rank=2, schedule="Interleaved1F1B")
    crossing = plan(config, layout)["transfers"]
    # As the paper counts: without the block that has just been closed
    assert crossing["blocks_naive"] - crossing["boundaries"] == 28
    assert crossing["blocks_cached"] - crossing["boundaries"] == 14
    assert crossing["bytes_cached"] == 21 * 4096 * 7168 * 2 and crossing["bytes_twin"] == 7 * 4096 * 7168 * 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "schedule, pp, stages, microbatches",
    [("GPipe", 4, 1, 8), ("1F1B", 4, 1, 8), ("Interleaved1F1B", 4, 2, 8), ("Interleaved1F1B", 2, 2, 3)],
)
def test_bubble(schedule, pp, stages, microbatches):
    """The wait of a timeline: a stage runs what is next in its process's order as soon as it has its input."""
    layout = Layout(gpus=pp, pp=pp, stages_per_rank=stages, schedule=schedule, microbatches=microbatches)
    config = AttnResConfig.from_base_config(decoder_config("llama", num_hidden_layers=8))
    busy, end = microbatches * stages * 3, timeline(schedule, pp, stages, microbatches)
    assert plan(config, layout)["bubble"] == pytest.approx(1 - busy / end, abs=1e-9)


@pytest.mark.parametrize("pp, stages, microbatches", [(2, 2, 1), (2, 2, 3), (2, 3, 8), (4, 2, 6), (4, 2, 10)])
def test_in_flight(pp, stages, microbatches):
    """Of torch's own order."""
    layout = Layout(gpus=pp, pp=pp, stages_per_rank=stages, schedule="Interleaved1F1B", microbatches=microbatches)
    rounds = max(1, microbatches // pp)
    schedule = SimpleNamespace(
        n_local_stages=stages,
        pp_group_size=pp,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    for rank in range(pp):
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(schedule, rank)
        steps = [1 if action.computation_type.name == "FORWARD" else -1 for action in actions if action is not None]
        assert in_flight(layout, rank) == max(accumulate(steps))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"gpus": 3, "tp": 3}, "`tp=3` must divide `num_attention_heads=4`"),
        ({"gpus": 4, "tp": 4}, "`tp=4` must divide `num_key_value_heads=2`"),
        ({"gpus": 4, "pp": 4, "microbatches": 2}, "`microbatches=2` must be at least 4, the number of stages"),
        (
            {"gpus": 2, "pp": 2, "stages_per_rank": 2, "schedule": "Interleaved1F1B", "microbatches": 5},
            "`microbatches=5` must be a multiple of 2, the number of processes",
        ),
    ],
)
def test_layouts_that_do_not_run(fields, message):
    config = AttnResConfig.from_base_config(decoder_config("llama"))
    with pytest.raises(ValueError, match=message):
        plan(config, Layout(**fields))


def timeline(schedule, pp, stages, microbatches) -> int:
    """The end of a step whose forward passes take 1 and backward passes 2."""
    num_stages, ends = pp * stages, {}
    free, waiting = [0] * pp, [order(schedule, rank, pp, stages, microbatches) for rank in range(pp)]
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                kind, stage, number = actions[0]
                if kind == "F":
                    needs = [("F", stage - 1, number)] if stage else []
                else:
                    needs = [("F", stage, number), ("B", stage + 1, number)][: 1 + (stage + 1 < num_stages)]
                if any(need not in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = ends[actions.pop(0)] = start + (1 if kind == "F" else 2)
    return max(ends.values())


def order(schedule, rank, pp, stages, microbatches) -> list:
    """Of forward and backward passes in one process."""
    total, of_round = stages * microbatches, microbatches // max(1, microbatches // pp)

    def forward(i):
        round_, within = divmod(i, of_round * stages)
        return "F", within // of_round * pp + rank, round_ * of_round + within % of_round

    def backward(i):
        round_, within = divmod(i, of_round * stages)
        return "B", (stages - 1 - within // of_round) * pp + rank, round_ * of_round + within % of_round

    if schedule == "GPipe":
        warm_up = total
    elif schedule == "1F1B":
        warm_up = min(total, pp - rank - 1)
    else:
        warm_up = min(total, (stages - 1) * of_round + 2 * (pp - 1 - rank))
    actions = [forward(i) for i in range(warm_up)]
    for i in range(total - warm_up):
        actions += [forward(warm_up + i), backward(i)]
    return actions + [backward(i) for i in range(total - warm_up, total)]


@pytest.mark.slow
def test_command(tmp_path, run_attnres, capsys):
    tiny_base_model("llama").config.save_pretrained(tmp_path / "base")
    config = AttnResConfig.from_base_config(tiny_base_model("llama").config, block_size=2)
    config.save_pretrained(tmp_path / "attnres")
    options = ["--gpus", 8, "--tp", 2, "--pp", 2, "--sequence-length", 64]
    assert run_attnres("plan", tmp_path / "attnres", *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["transfers"]["blocks_cached"] == 3 and len(found["stages"]) == 2 and found["bubble"] == 1 / 9
    assert run_attnres("plan", tmp_path / "base", *options, "--num-blocks", 2) == 0
    printed = capsys.readouterr().out
    assert "tensor parallelism 2, pipeline 2, FSDP2 2" in printed and "11.1%" in printed
    for wrong, message in (
        (["--gpus", 3, "--pp", 2], "`tp=1` times `pp=2` must divide `gpus=3`"),
        (["--gpus", 8, "--pp", 8], "4 layers cannot be divided into 8 stages"),
        (["--dtype", "fp33"], "`dtype='fp33'` is none of torch's"),
        (["--schedule", "none"], "Unknown schedule name"),
        (["--stages-per-rank", 2], "Schedule 1F1B takes 1 stage of each process, not 2"),
        (["--num-blocks", 2], "is an AttnRes checkpoint and has its blocks"),
    ):
        assert run_attnres("plan", tmp_path / "attnres", *wrong) in (1, 2)
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_table_of_the_page(tmp_path, run_attnres, capsys):
    """The command of docs/how_to/pipelines.md prints what stands below it, for a model of Qwen3-0.6B's sizes."""
    page = (Path(__file__).parents[1] / "docs/how_to/pipelines.md").read_text()
    command, table = re.search(r"```bash\nattnres (plan Qwen.*?)\n```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    SHAPES["qwen3-0.6b"].save_pretrained(tmp_path / "qwen3")
    arguments = command.replace("Qwen/Qwen3-0.6B", str(tmp_path / "qwen3")).split()
    assert run_attnres(*arguments) == 0
    printed = capsys.readouterr().out
    for line in table.splitlines()[1:]:
        label, figure = re.split(r"  +", line.strip())
        assert re.search(rf"{re.escape(label)} +{re.escape(figure)}", printed), f"{line}\n{printed}"
