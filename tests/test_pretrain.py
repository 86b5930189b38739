# SPDX-License-Identifier: Apache-2.0
"""`attnres pretrain`: rows of a stream that can be found again, the Trainer, and the loop over pipeline stages."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from datasets import Dataset, IterableDataset
from family_tensor_parallel import difference
from safetensors.torch import load_file
from test_parallel import in_processes
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, __version__

from attnres import AttnResForCausalLM
from attnres.data.packed_rows import PackedStream
from attnres.data.text import read_sample, train_tokenizer
from attnres.training import AttnResTrainingArguments, PretrainArguments, pretrain
from attnres.training.checkpoints import last_whole_checkpoint
from attnres.training.config import of_fields, read_config
from attnres.training.loss_guard import LossGuard
from attnres.training.optimizer import WithMuon, with_muon
from attnres.training.pretrain import make_model, prepare, read_model_config, train_over_stages
from attnres.training.stages import StageLoop


CONFIGS = sorted((Path(__file__).parents[1] / "training" / "configs").glob("p*.yaml"), reverse=True)
MODEL = {
    **{"base_model_type": "llama", "attn_res_block_size": 3, "vocab_size": 400, "max_position_embeddings": 128},
    **{"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
}
BLOCKS = {**{name: MODEL[name] for name in MODEL if name != "attn_res_block_size"}, "num_blocks": 2}
TWIN = {
    **{name: BLOCKS[name] for name in BLOCKS if name not in ("base_model_type", "num_blocks")},
    "model_type": "llama",
}
APERTUS = {"base_model_type": "apertus", "attn_res_block_size": 1, "vocab_size": 400}
MAMBA = {"base_model_type": "mamba", "attn_res_block_size": 1, "vocab_size": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("pretrain")
    train_tokenizer([read_sample()] * 3, vocab_size=400).save_pretrained(folder / "tokenizer")
    paragraphs = [text for text in read_sample().split("\n\n") if text.strip()] * 20
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    return folder


def fields(folder, output, **kwargs):
    return {
        "model_config": MODEL,
        "tokenizer": str(folder / "tokenizer"),
        "dataset": str(folder / "text.jsonl"),
        "output_dir": str(output),
        "eval_documents": 20,
        "max_length": 48,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        **kwargs,
    }


# --- the stream


class Numbers:
    """A tokenizer of numbers, with 0 at the end."""

    eos_token_id, chat_template = 0, None

    def __call__(self, text):
        self.input_ids = [int(word) for word in text.split()]
        return self


def stream_of(kind, **kwargs):
    documents = [" ".join(str(10 * i + j + 1) for j in range(i % 5 + 1)) for i in range(9)]
    rows = Dataset.from_dict({"text": documents})
    return PackedStream(rows if kind == "map" else rows.to_iterable_dataset(num_shards=3), Numbers(), 7, **kwargs)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", ["map", "streamed"])
def test_a_stream_goes_on_where_it_was(kind, apart):
    """From every row, over several epochs, by a state that went through a file."""
    expected = list(itertools.islice(stream_of(kind, apart=apart), 40))
    stream = stream_of(kind, apart=apart)
    for number, row in enumerate(itertools.islice(stream, 30)):
        again = stream_of(kind, apart=apart)
        again.go_on_at(json.loads(json.dumps(stream.state_at(tuple(row["next_position"])))))
        assert list(itertools.islice(again, 8)) == expected[number + 1 : number + 9]
    assert max(row["next_position"][0] for row in expected[:30]) >= 2  # epochs


def test_a_stream_of_other_data():
    """It is not gone on with: its rows would be others, or the same again."""

    def stream(texts):
        return PackedStream(Dataset.from_dict({"text": texts}), Numbers(), 7)

    texts = [str(i) for i in range(200)]
    state = json.loads(json.dumps(stream(texts).state_at((0, 3, 1))))
    stream(list(texts)).go_on_at(state)
    with pytest.raises(ValueError, match="it had 200 rows and has 201. Restore it, or name another `output_dir`"):
        stream([*texts, "200"]).go_on_at(state)
    with pytest.raises(ValueError, match="some rows differ"):
        stream([*texts[1:], "200"]).go_on_at(state)
    del state["key"]  # a checkpoint of an older version
    stream([*texts, "200"]).go_on_at(state)


def test_a_stream_forgets():
    """What finds documents again is kept of those that are still to come, however long it goes on."""
    stream = stream_of("streamed")
    for row in itertools.islice(stream, 60):
        stream.forget_before(tuple(row["next_position"]))
        again = stream_of("streamed")
        again.go_on_at(stream.state_at(tuple(row["next_position"])))
    expected = list(itertools.islice(stream_of("streamed"), 64))
    assert list(itertools.islice(again, 4)) == expected[60:]


def test_rows_of_a_stream():
    """Every token of every epoch is there once, in full rows, and documents begin at position 0 without a label."""
    documents = {int(f"{10 * i + j + 1}") for i in range(9) for j in range(i % 5 + 1)}
    rows = list(itertools.islice(stream_of("map", seed=3), 40))
    assert all(len(row["input_ids"]) == 7 for row in rows)
    tokens = [token for row in rows for token in row["input_ids"]]
    epoch = len(documents) + 9  # and the end of each
    for start in range(0, len(tokens) - epoch + 1, epoch):
        assert sorted(tokens[start : start + epoch]) == sorted([*documents, *[0] * 9])
    assert tokens[:epoch] != tokens[epoch : 2 * epoch]  # in another order
    for row in rows:
        firsts = [position == 0 for position in row["position_ids"]]
        assert firsts[0] and [label == -100 for label in row["labels"]] == firsts
        for before, first in zip(row["input_ids"], firsts[1:]):
            assert first == (before == 0)
    plain = list(itertools.islice(stream_of("map", seed=3, apart=False), 40))
    assert [row["input_ids"] for row in plain] == [row["input_ids"] for row in rows]
    assert all(row["labels"] == row["input_ids"] and "position_ids" not in row for row in plain)


def test_a_stream_of_nothing():
    stream = PackedStream(Dataset.from_dict({"text": ["", "  "]}), Numbers(), 7)
    with pytest.raises(ValueError, match="no document with a token to learn"):
        next(iter(stream))


# --- the Trainer


def losses_of(history, name):
    return {entry["step"]: entry[name] for entry in history if name in entry}


def test_from_scratch(folder, tmp_path):
    result = pretrain(fields(folder, tmp_path / "out"))
    assert result.losses[-1] < result.losses[0] and all(path.exists() for path in result.files)
    model = AutoModelForCausalLM.from_pretrained(result.folder)
    assert isinstance(model, AttnResForCausalLM) and model.config.attn_res_block_size == 3
    assert model.trunk.depth_queries.query.abs().max() > 0.01 and model.config.use_cache
    card = " ".join((result.folder / "README.md").read_text().split())
    assert "trained from scratch on text.jsonl for 6 steps" in card and str(folder) not in card
    # Further on from there, and a PreNorm twin of the same fields
    further = pretrain(fields(folder, tmp_path / "further", model=str(result.folder), model_config=None))
    assert further.losses[0] == pytest.approx(result.losses[-1], rel=1e-5) and further.losses[-1] < further.losses[0]
    assert "`final` was trained further on" in " ".join((further.folder / "README.md").read_text().split())
    twin = {**{name: MODEL[name] for name in MODEL if "attn" not in name or name == "num_attention_heads"}}
    del twin["base_model_type"]
    result = pretrain(fields(folder, tmp_path / "twin", model_config={"model_type": "llama", **twin}))
    assert (
        result.losses[-1] < result.losses[0]
        and type(AutoModelForCausalLM.from_pretrained(result.folder)).__name__ == "LlamaForCausalLM"
    )
    assert result.query_learning_rate is None and not (result.folder / "README.md").exists()


@pytest.mark.slow
def test_stopped_and_resumed(folder, tmp_path, monkeypatch):
    """The same weights bit for bit, and no row twice."""
    from attnres.training.pretrain import PretrainTrainer

    whole = pretrain(fields(folder, tmp_path / "whole", muon_learning_rate=5e-3))
    step = PretrainTrainer.training_step

    def stops(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    config = fields(folder, tmp_path / "stopped", muon_learning_rate=5e-3)
    with monkeypatch.context() as patch:
        patch.setattr(PretrainTrainer, "training_step", stops)
        with pytest.raises(KeyboardInterrupt):
            pretrain(config)
    assert sorted(path.name for path in (tmp_path / "stopped").glob("checkpoint-*")) == ["checkpoint-2"]
    resumed = pretrain(config)
    expected, found = (load_file(run.folder / "model.safetensors") for run in (whole, resumed))
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())
    assert losses_of(resumed.history, "eval_loss") == losses_of(whole.history, "eval_loss")


def test_the_loss_of_the_model_that_is_kept(folder, tmp_path):
    """With `load_best_model_at_end`, it is the one that is said, and not that of the last evaluation."""
    settings = {
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "max_steps": 2,
        "eval_steps": 1,
        "save_steps": 1,
    }
    result = pretrain(fields(folder, tmp_path / "out", **settings, load_best_model_at_end=True, eval_on_start=False))
    assert result.losses[-1] == min(result.losses) < result.losses[-2]  # which has risen
    assert f"{result.losses[-1]:.4f}" in (result.folder / "README.md").read_text()


def test_streamed_rows_to_evaluate_on(folder, tmp_path, monkeypatch):
    """No more than the first of them are read."""
    read = []

    def documents(split):
        for number in range(1000):
            read.append(split)
            yield {"text": f"{number} is a number, and so is the next one. " * 5}

    def load_streamed(source, config, split, streaming):
        assert streaming
        return IterableDataset.from_generator(documents, gen_kwargs={"split": split})

    monkeypatch.setattr(sys.modules[prepare.__module__], "load_rows", load_streamed)
    run = prepare(fields(folder, tmp_path / "out", streaming=True, eval_split="test", eval_documents=7))
    assert 0 < len(run.held_out) < 100 and read.count("test") <= 8


def test_resumed_by_another_number_of_processes(folder, tmp_path):
    """It is refused before anything is read; what a kill has left of a checkpoint is not of fewer processes."""
    config = fields(folder, tmp_path / "out", dataset="/nowhere")

    def write(step, *states):
        checkpoint = tmp_path / "out" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for name in (*(f"rng_state{state}.pth" for state in states), "trainer_state.json"):
            (checkpoint / name).write_text("{}")

    write(2, "_0", "_1", "_2")
    (tmp_path / "out" / "pretrain.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"has checkpoints of 3 processes, and this run has 1: start 3 processes"):
        pretrain(config)
    with pytest.raises(ValueError, match="checkpoints of 3 processes, and this run has 4: start 3"):
        last_whole_checkpoint(tmp_path / "out", 4)
    write(4, "_1", "_2")
    assert last_whole_checkpoint(tmp_path / "out", 3, verify=False).endswith("checkpoint-2")
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    assert last_whole_checkpoint(tmp_path / "out", 3, verify=False) is None
    write(6, "")
    assert last_whole_checkpoint(tmp_path / "out", 1, verify=False).endswith("checkpoint-6")
    with pytest.raises(ValueError, match="checkpoints of 1 processes, and this run has 2: start 1"):
        last_whole_checkpoint(tmp_path / "out", 2)


def test_muon(folder, tmp_path):
    """It has the matrices of the layers and nothing else, and its rates follow the schedule."""
    run = prepare(fields(folder, tmp_path / "out", muon_learning_rate=7e-3, query_learning_rate=3e-3))
    model = make_model(run)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adamw = torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=5e-3)
    optimizer = with_muon(adamw, names, run.training, lr=5e-3)
    assert isinstance(optimizer, WithMuon)
    others, matrices = (
        {names[id(p)] for group in part.param_groups for p in group["params"]} for part in optimizer.parts
    )
    assert matrices == {name for name in names.values() if "_proj." in name} and others | matrices == {*names.values()}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        scheduler.step()
    rates = [part.param_groups[0]["lr"] for part in optimizer.parts]
    assert rates == pytest.approx([5e-3 / 3, 7e-3 / 3])
    # A checkpoint goes into both
    groups, matrices = ([{**group} for group in part.param_groups] for part in optimizer.parts)
    again = WithMuon(
        groups,
        [{**{name: group[name] for name in ("params", "weight_decay")}, "lr": 1.0} for group in matrices],
        torch.optim.AdamW,
    )
    again.load_state_dict(optimizer.state_dict())
    assert [part.param_groups[0]["lr"] for part in again.parts] == rates
    kinds = {kind for part in again.parts for kind in part.state[part.param_groups[0]["params"][0]]}
    assert kinds == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}


def test_a_loss_that_is_no_number():
    """Of several batches as of one, it is a rise and not the end of the run."""
    guard = LossGuard()
    guard.first_batches = [5.0, 5.1]
    for last in (math.nan, math.inf):
        assert f"to {last}" in guard.check_held_out(5.05, last, [last, last])
    guard.first_batches = [5.0, math.inf]
    assert guard.check_held_out(math.inf, 5.05, [5.0, 5.1]) is None


# --- what does not go together


def decay(**kwargs):
    return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_steps": None}, "`max_steps` is missing"),
        ({"max_steps": -1}, "is not above 0; the data repeats without end"),
        ({"model_config": None}, "Give either a `model` to continue with, or the `model_config`"),
        ({"tokenizer": None}, "`tokenizer` is missing"),
        ({"model_config": {**MODEL, "vocab_size": 10}}, "400 tokens, more than the model's `vocab_size` of 10"),
        ({"model_config": {**MODEL, "hiden_size": 10}}, "hiden_size"),
        ({"model_config": {**MODEL, "base_model_type": "zaya"}}, "zaya"),
        ({"model_config": {**MODEL, "base_model_type": "lama"}}, "'lama' is not a type of model that transformers"),
        ({"model_config": {"model_type": "lama"}, "max_steps": 1}, "'lama' is not a type of model that transformers"),
        ({"model_config": {**BLOCKS, "attn_res_wieghts": "sigmoid"}}, "Did you mean attn_res_weights"),
        ({"model_config": {**BLOCKS, "num_key_value_head": 2}}, "Did you mean num_key_value_heads"),
        ({"model_config": {**TWIN, "num_key_value_head": 2}}, "a model of type `llama`.*Did you mean num_key_value"),
        ({"model_config": {**TWIN, "num_blocks": 2}}, "`num_blocks: 2` and `model_type: llama` contradict"),
        ({"model_config": {**MODEL, "num_blocks": 4}}, "`num_blocks: 4` and `attn_res_block_size: 3` contradict"),
        ({"model_config": {**BLOCKS, "rms_norm_eps": "1e-6"}}, "'rms_norm_eps' expected float.* write 1.0e-6"),
        ({"model_config": {**TWIN, "num_attention_heads": 5}}, "not a multiple of the number of attention heads"),
        ({"model_config": "/nowhere"}, "There is no folder `/nowhere`"),
        ({"max_length": 1}, "leaves nothing to predict"),
        ({"max_length": 129}, "more than the 128 tokens of the model"),
        ({"max_length": 100_000, "model_config": {**MODEL, "max_position_embeddings": 10**6}}, "shorter than a row"),
        ({"eval_documents": 200}, "too few to hold out `eval_documents: 200`"),
        ({"streaming": True}, "`streaming: true` needs an `eval_dataset`"),
        ({"dataloader_num_workers": 2}, "`dataloader_num_workers` must be 0"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` has no effect"),
        ({"eval_strategy": "epoch"}, "`eval_strategy: epoch` is not possible"),
        ({"mode": "full"}, "There is no field `mode`"),
        ({"apart": True, "model_config": MAMBA}, "`apart: true` is not possible"),
        ({"pp_size": 2}, "need a multiple of 2 processes, and there are 1"),
        ({"pp_size": 2, "torch_compile": True}, "`torch_compile` is not a field of runs with"),
        ({"dataloader_drop_last": True, "per_device_eval_batch_size": 500}, "nothing of .* a batch has 500: lower"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "cannot be made with .*: missing 1 .* 'num_decay_steps'"),
        ({**decay(num_decay_step=2)}, "lr_scheduler_kwargs: {num_decay_step: 2}.*'num_decay_step'"),
        ({**decay(num_decay_steps="many")}, "lr_scheduler_kwargs: {num_decay_steps: many}"),
        ({**decay(num_decay_steps=5), "warmup_steps": 2}, "`num_decay_steps: 5` .* the 4 steps that `max_steps: 6`"),
        ({"pp_size": 2, "gradient_accumulation_steps": 1}, "`gradient_accumulation_steps: 1` .* `schedule: 1F1B`"),
        (
            {"pp_size": 2, "schedule": "Interleaved1F1B", "gradient_accumulation_steps": 5},
            "`gradient_accumulation_steps: 5` .* must be a multiple of 2, the number of processes",
        ),
        ({"pp_size": 2, "save_strategy": "best"}, "`save_strategy: best` is not possible with `pp_size`"),
        ({"pp_size": 2, "query_learning_rate": "auto"}, "is measured on a whole model"),
        ({"pp_size": 2, "model_config": {"model_type": "llama", "vocab_size": 400}}, "are for AttnRes models"),
        ({"tp_size": 2, "model_config": MAMBA}, "`tp_size: 2` is not possible with base `mamba`: transformers .* has"),
        ({"tp_size": 2, "model_config": APERTUS}, "with base `apertus`: gradients over several processes differ"),
        ({"tp_size": 3}, "`tp_size: 3` does not divide `num_attention_heads` of the base, which is 4"),
        ({"pp_size": 0}, "`pp_size: 0` is not above 0"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(folder, tmp_path, change, message):
    config = {
        name: value for name, value in {**fields(folder, tmp_path / "out"), **change}.items() if value is not None
    }
    with pytest.raises(ValueError, match=message):
        pretrain(config)
    assert not (tmp_path / "out").exists()


def test_tensor_parallelism_with_a_plan_of_a_newer_transformers_only(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", None)
    monkeypatch.setattr(LlamaForCausalLM, "_tp_plan", None)
    message = (
        rf"`tp_size: 2` is not possible with base `llama`: transformers {re.escape(__version__)} has no plan for it"
    )
    with pytest.raises(ValueError, match=message):
        pretrain(fields(folder, tmp_path / "out", tp_size=2))


def test_fields_of_a_model_with_a_number_of_blocks():
    """They are those of the model, reads over depth and all, and generic ones are taken of a PreNorm twin."""
    fields = {**BLOCKS, "attn_res_weights": "sigmoid", "attn_res_num_heads": 4}
    config = read_model_config(PretrainArguments("", "", model_config=fields))
    assert (config.attn_res_block_size, config.attn_res_weights, config.attn_res_num_heads) == (4, "sigmoid", 4)
    assert read_model_config(PretrainArguments("", "", model_config={**TWIN, "dtype": "float32"})).hidden_size == 32


def test_another_run_is_there(folder, tmp_path):
    config = fields(folder, tmp_path / "out", max_steps=1)
    pretrain(config)
    with pytest.raises(ValueError, match="holds a finished run"):
        pretrain(config)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_prepared_configs(path):
    config = read_config(path, None, PretrainArguments, ("dataset", "output_dir", "max_steps"))
    arguments = of_fields(PretrainArguments, config)
    model_config = read_model_config(arguments)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    size = sum(parameter.numel() for parameter in model.parameters())
    said = path.read_text().splitlines()[0:3]
    if path.stem.startswith("paper"):
        outside = sum(p.numel() for name, p in model.named_parameters() if "embed" in name or "lm_head" in name)
        experts = sum(
            p.numel() for name, p in model.named_parameters() if ".experts." in name and "shared" not in name
        )
        activated = size - outside - experts * (1 - model_config.num_experts_per_token / model_config.num_experts)
        assert f"{activated / 1e6:.1f}M activated" in " ".join(said).replace("# ", "")
        assert activated == pytest.approx(float(path.stem.removeprefix("paper_").removesuffix("m")) * 1e6, rel=0.02)
    else:
        assert any(
            f"{size / unit:.{digits}f}{letter} parameters" in said[0]
            for unit, digits, letter in ((1e6, 0, "M"), (1e9, 1, "B"))
        )
    assert {*config} <= {*AttnResTrainingArguments.__dataclass_fields__, *PretrainArguments.__dataclass_fields__}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_prepared_configs_of_fewer_steps(path, tmp_path):
    """A decay that is then longer than the run is refused."""
    overrides = {"max_steps": 1000, "output_dir": str(tmp_path / "out"), "bf16": False}
    config = read_config(path, overrides, PretrainArguments, ("dataset", "output_dir", "max_steps"))
    if "num_decay_steps" not in config.get("lr_scheduler_kwargs", {}):
        pytest.skip("it does not decay by a number of steps")
    with pytest.raises(ValueError, match="`num_decay_steps: .* steps that `max_steps: 1000` leaves"):
        prepare(config)


# --- stages


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def over_stages(config):
    run = prepare(config)
    Path(config["output_dir"]).mkdir(exist_ok=True)
    (Path(config["output_dir"]) / "pretrain.yaml").write_text(yaml.safe_dump(config))
    return train_over_stages(run, make_model(run))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", [{}, {"muon_learning_rate": 4e-3, "query_learning_rate": 2e-3}])
def test_stages_train_what_the_trainer_does(folder, tmp_path, one_process, optimizer):
    """The same losses, with two stages in one process, and the same after a resume."""
    shared = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "warmup_steps": 2,
    }
    shared |= {"weight_decay": 0.1, **optimizer}
    config = fields(folder, tmp_path / "stages", schedule="Interleaved1F1B", stages_per_rank=2, **shared)
    config["logging_steps"] = shared["logging_steps"] = 3
    final, history, _, _ = over_stages(config)
    expected = pretrain(fields(folder, tmp_path / "trainer", **shared))
    for name in ("loss", "eval_loss"):
        found, wanted = losses_of(history, name), losses_of(expected.history, name)
        assert found == pytest.approx(wanted, rel=2e-3 if name == "eval_loss" else 1e-5)  # the Trainer's is of batches
        assert found.keys() == wanted.keys()
    weights, wanted = (load_file(path / "model.safetensors") for path in (final, expected.folder))
    assert weights.keys() == wanted.keys()
    if not optimizer:  # Muon's orthogonalisation is in bf16
        for name, tensor in wanted.items():
            assert (weights[name] - tensor).abs().max() < 1e-3 * max(1e-2, tensor.abs().max()), name
    tokens = [(run / "config.json").read_text().count('"eos_token_id": 0') for run in (final, expected.folder)]
    assert tokens == [1, 1]
    # From a checkpoint in the middle, it comes to the same weights bit for bit
    for checkpoint in (4, 6):  # between two entries in the history
        shutil.rmtree(tmp_path / "stages" / f"checkpoint-{checkpoint}")
    final.rename(tmp_path / "first")
    again, resumed, _, _ = over_stages(config)
    resumed_weights = load_file(again / "model.safetensors")
    assert all(tensor.equal(resumed_weights[name]) for name, tensor in weights.items())
    assert losses_of(resumed, "loss") == losses_of(history, "loss")


def test_modes_of_stages(folder, tmp_path, one_process):
    """A model that was read, in evaluation mode, trains with dropout; an evaluation leaves modes as they are."""
    run = prepare(fields(folder, tmp_path / "out", schedule="Interleaved1F1B", stages_per_rank=2))
    loop = StageLoop(run, make_model(run).eval())
    modules = [module for stage in loop.pipeline.stages for module in stage.submod.model.modules()]
    assert all(module.training for module in modules)
    for module in modules[::2]:
        module.training = False
    loop._evaluate()
    assert [module.training for module in modules] == [number % 2 == 1 for number in range(len(modules))]


@pytest.mark.slow
def test_checkpoints_of_stages(folder, tmp_path, one_process):
    """As many as asked for, by parts of the run; and none."""
    config = fields(folder, tmp_path / "out", max_steps=10, save_steps=0.2, save_total_limit=2, eval_strategy="no")
    _, history, _, _ = over_stages({**config, "logging_steps": 0.5})
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-8"]
    assert losses_of(history, "eval_loss").keys() == {0, 10} and [*losses_of(history, "loss")] == [5, 10]
    config = fields(folder, tmp_path / "none", max_steps=2, save_strategy="no", bf16=True)
    over_stages(config)
    assert not list((tmp_path / "none").glob("checkpoint-*")) and (tmp_path / "none" / "final").is_dir()


def start(folder, num_processes, config):
    """torchrun, whose output is kept."""
    path = folder / f"{Path(config['output_dir']).name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    command += ["-m", "attnres", "pretrain", str(path)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finished(folder, num_processes, config):
    process = start(folder, num_processes, config)
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output[-3000:]
    output_dir = Path(config["output_dir"])
    return json.loads((output_dir / "history.json").read_text()), load_file(output_dir / "final" / "model.safetensors")


LAYOUTS = {
    "pipeline": (2, {"pp_size": 2, "schedule": "ZBVZeroBubble"}),
    "tensor parallelism": (2, {"tp_size": 2}),
    "replicas": (4, {"pp_size": 2, "per_device_train_batch_size": 2}),
    "all": (8, {"pp_size": 2, "tp_size": 2, "per_device_train_batch_size": 2}),
    "data parallelism": (2, {"per_device_train_batch_size": 2}),
}


def _gradients_of_tensor_parallelism(rank):
    for family in ("llama", "qwen3", "gemma2", "qwen3_moe", "deepseek_v3"):
        # Routers of experts and Gemma's norms compute in fp32
        assert difference(rank, family) < (1e-12 if family in ("llama", "qwen3", "qwen3_moe") else 1e-6), family


def _gradients_in_stages(rank):
    for family in ("qwen3", "gemma2"):
        assert difference(rank, family, pp_size=2) < (1e-12 if family == "qwen3" else 1e-6), family


@pytest.mark.slow
def test_gradients_of_tensor_parallelism():
    """Norms of single heads, ties between embedding and head in one stage and in two, and experts."""
    in_processes(_gradients_of_tensor_parallelism, 2)
    in_processes(_gradients_in_stages, 4)


@pytest.mark.slow
def test_layouts(folder, tmp_path):
    """Whoever shares the work, the losses of every step are the same."""
    model = {**MODEL, "base_model_type": "qwen3", "num_key_value_heads": 2, "tie_word_embeddings": True}
    for optimizer in ({}, {"muon_learning_rate": 5e-3}):
        settings = {**optimizer, "model_config": model, "max_steps": 4, "eval_strategy": "no", "eval_on_start": False}
        expected = pretrain(fields(folder, tmp_path / f"one-{len(optimizer)}", **settings))
        for name, (num_processes, layout) in LAYOUTS.items():
            if (name == "replicas") != bool(optimizer):
                continue
            output = tmp_path / f"{name}-{len(optimizer)}".replace(" ", "-")
            history, _ = finished(tmp_path, num_processes, {**fields(folder, output, **settings), **layout})
            wanted = losses_of(expected.history, "loss")
            # Muon's orthogonalisation is in bf16
            assert losses_of(history, "loss") == pytest.approx(wanted, rel=1e-3 if optimizer else 2e-5), name


@pytest.mark.slow
def test_another_layout_goes_on(folder, tmp_path):
    """Killed with two stages, it goes on with two processes of tensor parallelism."""
    config = fields(folder, tmp_path / "out", max_steps=6, save_steps=3, eval_strategy="no", eval_on_start=False)
    expected, _ = finished(tmp_path, 2, {**config, "output_dir": str(tmp_path / "whole"), "pp_size": 2})
    finished(tmp_path, 2, {**config, "pp_size": 2})
    for name in ("final", "checkpoint-6"):
        shutil.rmtree(tmp_path / "out" / name)
    (tmp_path / "out" / "pretrain.yaml").unlink()
    (tmp_path / "out" / "history.json").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "out" / "checkpoint-3").rename(tmp_path / "other" / "checkpoint-3")
    other = {**config, "output_dir": str(tmp_path / "other"), "tp_size": 2}
    (tmp_path / "other" / "pretrain.yaml").write_text(yaml.safe_dump(other))
    history, _ = finished(tmp_path, 2, other)
    assert losses_of(history, "loss") == pytest.approx(losses_of(expected, "loss"), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, kills",
    [({"pp_size": 2}, ("all", "one")), ({"per_device_train_batch_size": 2}, ("one",))],
    ids=["stages", "replicas"],
)
def test_killed(folder, tmp_path, layout, kills):
    """SIGKILL behind each of some checkpoints, of all processes or of one: the weights are those of a run without."""
    config = {**fields(folder, tmp_path / "killed", max_steps=60, save_steps=2, save_total_limit=3), **layout}
    history, expected = finished(tmp_path, 2, {**config, "output_dir": str(tmp_path / "whole")})

    def newest():
        saved = (tmp_path / "killed").glob("checkpoint-*")
        return max((int(path.name.split("-")[1]) for path in saved), default=0)

    for kill in kills:
        before, process = newest(), start(tmp_path, 2, config)
        while newest() == before and process.poll() is None:
            time.sleep(0.005)
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.1 * (kill == "one"))
        torchrun = psutil.Process(process.pid)
        ranks = torchrun.children()  # each in a session of its own
        for killed in ranks[1:] if kill == "one" else [torchrun, *ranks]:
            killed.kill()
        process.communicate()
    assert not (tmp_path / "killed" / "final").exists()
    found_history, found = finished(tmp_path, 2, config)
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())
    assert losses_of(found_history, "eval_loss") == losses_of(history, "eval_loss")
