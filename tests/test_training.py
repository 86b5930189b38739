# SPDX-License-Identifier: Apache-2.0
"""Training: checkpointing, autocast, Trainer and resume, and two processes of DDP, FSDP2 and tensor parallelism."""

import contextlib
import copy
import itertools
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rounding import UpToRounding, all_in_fp64, check_beside, wide
from safetensors.torch import load_file
from tiny_models import convert, mostly_slow, randomize_queries, tiny_base_model
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, StaticCache, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from attnres import AttnResConfig, AttnResForCausalLM


def loss_and_grads(model, input_ids):
    model.zero_grad()
    loss = model(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("block_size", mostly_slow([1, 2, 3, 8], every=2))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_gradient_checkpointing_changes_nothing(family, block_size, use_reentrant, input_ids):
    """But the order in which gradients are summed, and for how many sites a block is scored at once."""
    with all_in_fp64():
        model = wide(randomize_queries(convert(tiny_base_model(family), block_size))).train()
        expected = UpToRounding(lambda: loss_and_grads(model, input_ids), model=model)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss, grads = loss_and_grads(model, input_ids)
    expected.check((loss, grads))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_compiled_training_step(family, input_ids):
    """Forward and backward in one graph each."""
    model = randomize_queries(convert(tiny_base_model(family), 3)).train()
    expected = UpToRounding(lambda: loss_and_grads(model, input_ids), model=model)
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    expected.check(loss_and_grads(model, input_ids))


def test_second_step_compiles_nothing():
    """In a new thread, as what the first forward pass leaves behind in its thread must not count as a change."""
    input_ids, counts = torch.randint(0, 97, (2, 5)), []

    def train():
        counter = CompileCounter()
        model = convert(tiny_base_model("llama", num_hidden_layers=2), 3).train()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for _ in range(3):
            loss_and_grads(compiled, input_ids)
            counts.append(counter.frame_count)

    torch._dynamo.reset()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert counts == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in turn", "lengths", "decoding"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiles_as_often_as_its_base(family, kind):
    """Training and inference in turn, other lengths, and steps of decoding with a static cache."""
    input_ids = torch.randint(0, 97, (2, 7))

    def count(model) -> int:
        torch._dynamo.reset()
        counter, cache = CompileCounter(), StaticCache(config=model.config, max_cache_len=16)
        compiled = torch.compile(model.eval(), fullgraph=True, backend=counter)
        for step in range(4):
            if kind == "in turn" and step % 2:
                loss_and_grads(compiled.train(), input_ids)
                continue
            compiled.eval()
            with torch.no_grad():
                if kind == "decoding":
                    position_ids = torch.full((2, 1), step)
                    compiled(input_ids[:, step : step + 1], past_key_values=cache, position_ids=position_ids)
                else:
                    compiled(input_ids[:, step if kind == "lengths" else 0 :], use_cache=False)
        return counter.frame_count

    base_model = tiny_base_model(family, num_hidden_layers=2)
    with ThreadPoolExecutor() as pool:  # see above
        assert pool.submit(count, convert(base_model, 3)).result() == count(base_model)


def test_gradient_checkpointing_from_the_config(input_ids):
    base_model = tiny_base_model("qwen3")
    base_model.config.gradient_checkpointing = True
    model = convert(base_model, 3).train()
    assert model.is_gradient_checkpointing


def test_query_gradients_flow_from_the_first_step(input_ids):
    """At zero queries the key norms cannot have a gradient, and all queries but the first site's have one."""
    _, grads = loss_and_grads(convert(tiny_base_model("qwen3"), 3).train(), input_ids)
    per_site = grads["model.depth_queries.query"].abs().sum(-1)
    assert per_site[0] == 0 and (per_site[1:] > 0).all()
    assert grads["model.depth_queries.key_norm"].abs().max() == 0


def test_autocast_matches_the_base(input_ids):
    base_model = tiny_base_model("qwen3").train()
    model = convert(base_model, 3).train()
    exact_logits, (_, exact) = base_model(input_ids).logits, loss_and_grads(base_model, input_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        of_base, (_, grads_of_base) = base_model(input_ids).logits, loss_and_grads(base_model, input_ids)
        logits, (_, grads) = model(input_ids).logits, loss_and_grads(model, input_ids)
        sums = model(input_ids, output_hidden_states=True).hidden_states
    assert all(partial.dtype == torch.float32 for partial in sums), "sums have the precision of the residual stream"
    # both are off by the rounding of bf16 matrix products
    check_beside(logits, of_base, exact_logits)
    check_beside(grads, grads_of_base, exact)
    assert grads["model.depth_queries.query"].dtype == torch.float32


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 4])
def test_activation_memory_is_near_the_base(num_blocks, checkpointing):
    """Bytes that autograd keeps for the backward pass, weights not counted, against the PreNorm twin."""
    base_model = tiny_base_model("qwen3", num_hidden_layers=16, hidden_size=64, intermediate_size=192, head_dim=32)
    model = convert(base_model, 32 // num_blocks)
    input_ids = torch.randint(3, 97, (2, 64))
    saved = []
    for candidate in (model, base_model):
        if checkpointing:
            candidate.gradient_checkpointing_enable()
        candidate.train()
        weights = {parameter.untyped_storage().data_ptr() for parameter in candidate.parameters()}
        storages = {}

        def pack(tensor, weights=weights, storages=storages):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = candidate(input_ids, labels=input_ids, use_cache=False).loss
        saved.append(sum(storages.values()))
        del loss
    assert saved[0] <= (1.2 if checkpointing else 1.0) * saved[1], saved


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        input_ids = torch.randint(3, 97, (12,), generator=torch.Generator().manual_seed(index % 4))
        return {"input_ids": input_ids, "labels": input_ids}


def train(output_dir, resume=None, **kwargs):
    torch.manual_seed(0)
    model = convert(tiny_base_model("qwen3"), 3)
    arguments = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=2,
        max_steps=8,
        save_steps=4,
        logging_steps=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=1,
        **kwargs,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Text())
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def test_trainer_and_exact_resume(tmp_path):
    model, trainer = train(tmp_path / "run")
    assert model.model.depth_queries.query.abs().max() > 1e-3, "the queries have not moved"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    resumed, _ = train(tmp_path / "resumed", resume=str(tmp_path / "run" / "checkpoint-4"))
    for (name, a), (_, b) in zip(model.named_parameters(), resumed.named_parameters()):
        assert torch.equal(a, b), name
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-8")
    assert torch.equal(saved.model.depth_queries.query, model.model.depth_queries.query)


def test_trainer_with_bf16_and_checkpointing(tmp_path):
    model, _ = train(tmp_path, bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2)
    assert torch.isfinite(model.model.depth_queries.query).all()
    assert model.model.depth_queries.query.abs().max() > 1e-3


def on_processes(number, function, *cases):
    """Call a function with the arguments of each case in turn, as processes take longer to start than most cases."""
    # They meet in a file, as a port that is free now can be taken when they start
    with tempfile.TemporaryDirectory() as folder:
        arguments = (number, function, f"file://{folder}/meeting", cases)
        torch.multiprocessing.spawn(_in_process, args=arguments, nprocs=number)


def _in_process(rank, number, function, meeting, cases):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=number)
    try:
        for case in cases:
            print(f"{function.__name__}{case}", flush=True)
            function(rank, *case)
    finally:
        dist.destroy_process_group()


def _ddp(rank):
    batch = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(0))
    with all_in_fp64():
        model = wide(randomize_queries(convert(tiny_base_model("qwen3"), 3), 0.0)).train()
        expected = UpToRounding(lambda: loss_and_grads(model, batch)[1], model=model)
        model.zero_grad()
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel(batch[2 * rank : 2 * rank + 2], labels=batch[2 * rank : 2 * rank + 2]).loss.backward()
    expected.check({name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.slow
def test_ddp():
    on_processes(2, _ddp, ())


def _fsdp(rank, mixed_precision):
    batch = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    with contextlib.nullcontext() if mixed_precision else all_in_fp64():
        model = randomize_queries(convert(tiny_base_model("qwen3"), 3)).train()
        if mixed_precision:  # bf16 weights around queries in fp32
            model.to(torch.bfloat16)
            (_, in_bf16), (_, exact) = (loss_and_grads(m, batch) for m in (model, copy.deepcopy(model).float()))
        else:
            wide(model)
            expected = UpToRounding(lambda: loss_and_grads(model, batch), model=model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model.model.depth_queries)
        fully_shard(model)
        loss, grads = loss_and_grads(model, batch)
    grads = {name: grad.full_tensor() for name, grad in grads.items()}
    if mixed_precision:
        check_beside(grads, in_bf16, exact)
    else:
        expected.check((loss, grads))


@pytest.mark.slow
def test_fsdp2():
    on_processes(2, _fsdp, (True,), (False,))


def _distributed_config(rank, path, kind):
    batch = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = AttnResForCausalLM.from_pretrained(path).train()
    name = "model.depth_queries.query"

    def loss_and_query_grad(model):
        loss, grads = loss_and_grads(model, batch)
        return loss, grads[name].full_tensor() if hasattr(grads[name], "full_tensor") else grads[name]

    expected = UpToRounding(lambda: loss_and_query_grad(plain), model=plain)
    config = DistributedConfig(tp_size=2) if kind == "tp" else DistributedConfig(fsdp_size=2)
    model = AttnResForCausalLM.from_pretrained(path, distributed_config=config).train()
    expected.check(loss_and_query_grad(model))
    model.save_pretrained(f"{path}-{kind}")
    dist.barrier()
    if rank == 0:
        a, b = (load_file(f"{folder}/model.safetensors") for folder in (path, f"{path}-{kind}"))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_transformers_distributed_config(tmp_path):
    families = "qwen3_moe", "qwen3"
    for family in families:
        randomize_queries(convert(tiny_base_model(family), 3)).save_pretrained(tmp_path / family)
    on_processes(2, _distributed_config, *itertools.product([str(tmp_path / f) for f in families], ["tp", "fsdp"]))


def _pipeline_stages(rank, path, base_path, tp_size=1):
    prompt = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    plain, base = AttnResForCausalLM.from_pretrained(path), AutoModelForCausalLM.from_pretrained(base_path)
    config = DistributedConfig(pp_size=2, tp_size=tp_size)
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    # The base first: what it can do in stages. With tensor parallelism in them transformers 5.23 cannot load it
    for expected_of, folder in ((base, base_path), (plain, path)):
        if tp_size > 1 and expected_of is base:
            with pytest.raises(KeyError, match=r"model\."):
                AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
            continue
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        with torch.no_grad():
            expected, logits = expected_of(prompt).logits, model(prompt).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            assert model.generate(prompt, **options).equal(expected_of.generate(prompt, **options))
            assert model.generate(prompt, num_beams=3, **options).equal(
                expected_of.generate(prompt, num_beams=3, **options)
            )
    # `model` is the AttnRes one. transformers' own stages compute something else with these, in silence
    padded = torch.ones_like(prompt).index_fill(1, torch.arange(3), 0)
    for given, message in (
        ({"attention_mask": padded}, "padding"),
        ({"cache_implementation": "static"}, "a static cache"),
        ({"prefill_chunk_size": 4}, "4 tokens at once"),
    ):
        with pytest.raises(ValueError, match=f"cannot be given .*{message}"):
            model.generate(prompt, **options, **given)
    with pytest.raises(ValueError, match="a part of the layers"):
        model.save_pretrained(f"{path}-saved")
    assert not Path(f"{path}-saved").exists()
    without = {"attention_mask": padded, "use_cache": False, **options}
    assert model.generate(prompt, **without).equal(plain.generate(prompt, **without))


# With every change `test_pipeline_stages` in test_generation.py, which needs no processes
@pytest.mark.slow
def test_transformers_pipeline_stages(tmp_path):
    folders = []
    for family, block_size, fields in (
        ("llama", 3, {}),
        ("llama", 1, {}),
        ("llama", 4, {}),
        ("llama", 100, {}),
        ("qwen3_moe", 2, {}),
        ("llama", 3, {"attn_res_open_block": "each"}),
        ("llama", 4, {"attn_res_open_block": "each"}),
        ("llama", 3, {"attn_res_num_heads": 4, "attn_res_weights": "softmax1"}),
        ("llama", 3, {"attn_res_query": "hybrid"}),
        ("llama", 3, {"attn_res_stream": "kept"}),
    ):
        base = tiny_base_model(family)
        model = AttnResForCausalLM(AttnResConfig.from_base_config(base.config, block_size=block_size, **fields))
        model.load_state_dict(base.state_dict(), strict=False)
        with torch.no_grad():
            for tensor in model.model.depth_queries.zero_initialized():
                tensor.normal_(std=0.3)
        folders.append([str(tmp_path / f"{len(folders)}-{name}") for name in ("model", "base")])
        for saved, folder in zip((model, base), folders[-1]):
            saved.save_pretrained(folder)
    on_processes(2, _pipeline_stages, *folders)


def _sharded_generation(rank, path, fsdp_size, tp_size):
    prompt = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    plain = AttnResForCausalLM.from_pretrained(path)
    config = DistributedConfig(fsdp_size=fsdp_size, tp_size=tp_size)
    model = AttnResForCausalLM.from_pretrained(path, distributed_config=config)
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, plain(prompt).logits, rtol=1e-4, atol=1e-5)
    assert model.generate(prompt, **options).equal(plain.generate(prompt, **options))


@pytest.mark.slow
def test_four_processes(tmp_path):
    """Stages of two processes each, and FSDP2 around tensor parallelism, from files in several parts."""
    folders = []
    for family, fields in (("llama", {}), ("qwen3_moe", {}), ("qwen3", {"tie_word_embeddings": True})):
        base = tiny_base_model(family, **fields)
        folders.append([str(tmp_path / f"{family}-{name}") for name in ("model", "base")])
        for saved, folder in zip((randomize_queries(convert(base, 3)), base), folders[-1]):
            saved.save_pretrained(folder, max_shard_size="50kB")
            assert len(list(Path(folder).glob("*.safetensors"))) > 1
    (llama, _), (moe, _), _ = folders
    on_processes(4, _pipeline_stages, *[[*pair, 2] for pair in folders])
    on_processes(4, _sharded_generation, (llama, 4, 1), (moe, 2, 2))
