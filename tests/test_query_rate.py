# SPDX-License-Identifier: Apache-2.0
"""The measured learning rate of the depth queries, and the guard over the losses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from tiny_models import convert, mostly_slow, randomize_queries, tiny_base_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from attnres.data.text import read_sample, train_tokenizer, windows
from attnres.training import AttnResTrainer, AttnResTrainingArguments, finetune
from attnres.training import trainer as trainer_module
from attnres.training.learning_rate import best_rate, measure_losses, measure_rate, plan_effort, rates_for
from attnres.training.loss_guard import LossGuard


LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model that has learned something, converted, with its tokenizer and the text it knows half of."""
    folder = tmp_path_factory.mktemp("query-rate")
    paragraphs = [text for text in read_sample().split("\n\n") if text.strip()]
    tokenizer = train_tokenizer(paragraphs, vocab_size=400)
    torch.manual_seed(0)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    rows = windows(tokenizer, paragraphs[::2], LENGTH)
    arguments = TrainingArguments(
        folder / "trainer", per_device_train_batch_size=8, max_steps=60, learning_rate=1e-2, use_cpu=True, report_to=[]
    )
    Trainer(base, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
    shutil.rmtree(folder / "trainer")
    converted = convert(base.eval(), 3)
    converted.save_pretrained(folder / "model")
    randomize_queries(converted).save_pretrained(folder / "tuned")
    for name in ("model", "tuned"):
        tokenizer.save_pretrained(folder / name)
    for name, texts in (("text", paragraphs * 5), ("every text once", paragraphs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def fields(folder, output, **kwargs):
    return {
        "model": str(folder / "model"),
        "dataset": str(folder / "text.jsonl"),
        "output_dir": str(output),
        "mode": "queries",
        "max_length": LENGTH,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_steps": 6,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        **kwargs,
    }


def measured(history):
    return [entry["query_learning_rate"] for entry in history if "query_learning_rate" in entry]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]):
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    mostly_slow(
        [
            {"mode": "lora", "lora_dropout": 0.1, "bf16": True, "model": "tuned", "gradient_checkpointing": True},
            {"mode": "queries", "gradient_accumulation_steps": 2},
            {"mode": "full", "warmup_steps": 3, "lr_scheduler_type": "linear", "packing": False},
        ],
        every=3,
    ),
    ids=lambda changed: changed["mode"],
)
def test_measuring_disturbs_nothing(folder, tmp_path, changed):
    """The run is that with the same rate given by hand, bit for bit; from trained queries, too."""
    changed = {**changed, "model": str(folder / changed.get("model", "model"))}
    auto = finetune(fields(folder, tmp_path / "auto", **changed))
    assert measured(auto.history) == [auto.query_learning_rate]
    by_hand = finetune(fields(folder, tmp_path / "hand", query_learning_rate=auto.query_learning_rate, **changed))
    assert by_hand.query_learning_rate == auto.query_learning_rate and not measured(by_hand.history)
    assert_equal(weights(auto.folder), weights(by_hand.folder))
    assert auto.losses == by_hand.losses
    losses = [[entry["loss"] for entry in run.history if "loss" in entry] for run in (auto, by_hand)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    # the scheduler takes it for the peak, also where it has to be reached first
    rates = [entry["learning_rate"] for entry in auto.history if "learning_rate" in entry]
    assert changed["mode"] != "full" or rates[0] < max(rates)


@pytest.mark.slow
def test_it_lowers_the_loss(folder, tmp_path):
    # On texts like those that are learned, of which the model knows half. Whether it does so on others is shown by
    # studies/query_rate/study.py; a few paragraphs are too few for that
    everything = str(folder / "every text once.jsonl")
    result = finetune(
        fields(folder, tmp_path / "out", max_steps=12, per_device_train_batch_size=16, eval_dataset=everything)
    )
    assert result.losses[-1] < result.losses[0]
    line = next(entry for entry in result.history if "query_learning_rate" in entry)
    losses = {float(key.split("/")[1]): loss for key, loss in line.items() if key.startswith("query_rate_loss/")}
    assert losses[result.query_learning_rate] < losses[0]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_rate(folder, tmp_path, monkeypatch):
    """It is read from the checkpoint: measured there, it would be another one."""
    config = fields(folder, tmp_path / "out", save_strategy="steps", save_steps=2)
    whole = finetune(config)
    expected = weights(whole.folder)
    for name in ("final", "checkpoint-4", "checkpoint-6"):
        shutil.rmtree(tmp_path / "out" / name)
    monkeypatch.setattr(trainer_module, "measure_rate", None)
    resumed = finetune(config)
    assert resumed.query_learning_rate == whole.query_learning_rate and len(measured(resumed.history)) == 1
    assert_equal(weights(resumed.folder), expected)


def rows_of(count: int) -> Dataset:
    ids = torch.randint(3, 300, (count, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def make_trainer(folder, tmp_path, data, **kwargs):
    arguments = AttnResTrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=3, use_cpu=True, report_to=[], save_strategy="no", **kwargs
    )
    return AttnResTrainer(AutoModelForCausalLM.from_pretrained(folder / "model"), arguments, train_dataset=data)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [40, 1])
@pytest.mark.parametrize("streamed", [False, True])
def test_any_amount_of_data_serves(folder, tmp_path, rows, streamed):
    """Streams, too, and what is measured does not depend on the state of the random numbers."""
    queries = []
    for rate in ("auto", None):
        data = rows_of(rows).to_iterable_dataset() if streamed else rows_of(rows)
        trainer = make_trainer(folder, tmp_path, data, query_learning_rate=rate or queries[0][0])
        trainer.train()
        queries.append((trainer.query_learning_rate, trainer.model.model.depth_queries.query))
    assert queries[0][0] == queries[1][0] > 0
    assert torch.equal(queries[0][1], queries[1][1])


def test_measuring_leaves_everything_as_it_was(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, rows_of(40))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.model.eval()
    trainer.model.model.layers[0].train()
    state = torch.get_rng_state()
    effort = plan_effort(10_000, 2, rates_for(32))
    first = measure_losses(trainer, effort)
    assert_equal(before, trainer.model.state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    modes = [module.training for module in trainer.model.model.layers]
    assert modes[0] and not any(modes[1:])
    torch.rand(3)
    second = measure_losses(trainer, effort)
    assert first.keys() == second.keys() and all(torch.equal(first[rate], second[rate]) for rate in first)


def test_measuring_takes_a_tenth_of_a_run_at_most():
    """In forward passes of a row, of which a training step takes three. Where that is too little, there is none."""
    for width in (32, 576, 4096):
        rates = rates_for(width)
        efforts = {rows: plan_effort(rows, 8, rates) for rows in range(0, 2000, 7)}
        assert all(effort is None or effort.cost <= 0.1 * 3 * rows for rows, effort in efforts.items())
        assert efforts[70] is None and efforts[1995].rates == rates
        assert efforts[1995].gradient_rows == efforts[1995].loss_rows == 16 and not efforts[1995].cut_short
        short = efforts[287]
        assert short.cut_short and 4 <= short.loss_rows < 16 and set(short.rates) < set(rates)
    assert plan_effort(100_000, 500, rates).gradient_rows == 64


@pytest.mark.slow
def test_short_runs_say_how_the_rate_was_found(folder, tmp_path, capsys):
    trainer = make_trainer(folder, tmp_path, rows_of(40), query_learning_rate="auto")
    for steps, words in {6: "too short to measure one", 100: "(cut short to ", 500: "measured in "}.items():
        found = measure_rate(trainer, steps)
        assert words in found.in_words() and found.rate > 0 and ("cut short" in found.in_words()) == (steps == 100)
    capsys.readouterr()
    trainer.train()  # three steps
    lowest = rates_for(32)[0]
    assert capsys.readouterr().out.splitlines()[0] == (
        f"Learning rate of the depth queries: {lowest:g}, the lowest of those to try, as the run is too short to"
        " measure one. `query_learning_rate` sets another."
    )
    assert trainer.query_learning_rate == lowest


def test_luck_does_not_raise_the_rate():
    start = torch.tensor([2.0, 3.0, 4.0, 5.0]).double()
    even, lucky = torch.full((4,), -0.01), torch.tensor([0.1, 0.1, 0.1, -0.36])
    assert best_rate({0.0: start, 1e-4: start + even, 1e-3: start + lucky}) == 1e-4
    assert best_rate({0.0: start, 1e-4: start + 0.1, 1e-3: start + 0.2}) == 1e-4
    assert best_rate({0.0: start, 1e-4: start + 0.1, 1e-3: start * float("nan")}) == 1e-4


@pytest.mark.parametrize("value", ["fast", -1, float("nan"), float("inf"), True, [1e-3]], ids=str)
def test_bad_rates(folder, tmp_path, value, run_attnres, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(fields(folder, tmp_path / "out", query_learning_rate=value)))
    assert run_attnres("finetune", tmp_path / "run.yaml") == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("`query_learning_rate: ") == 1 and "Traceback" not in printed
    assert str(value).lower() in printed.lower()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_optimizers_need_a_number(folder, tmp_path):
    with pytest.raises(ValueError, match="`optim: sgd` takes other steps than Adam. Give a number"):
        finetune(fields(folder, tmp_path / "out", optim="sgd"))
    # without queries there is nothing to measure
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    base.model.depth_queries.requires_grad_(False)
    arguments = AttnResTrainingArguments(tmp_path / "sgd", max_steps=1, optim="sgd", use_cpu=True, report_to=[])
    AttnResTrainer(base, arguments, train_dataset=rows_of(4)).train()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["queries", "lora"])
def test_a_ruinous_rate_is_told(folder, tmp_path, run_attnres, capsys, caplog, mode):
    """At the evaluation that shows it, and at the end beside the result."""
    config = fields(folder, tmp_path / "out", mode=mode, query_learning_rate=1.0, eval_steps=3)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert run_attnres("finetune", tmp_path / "run.yaml") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Peak learning rate of the depth queries: 1 " in printed
    assert "Note: The model is worse than at the start" in printed
    warned = [record.getMessage() for record in caplog.records if "has risen" in record.getMessage()]
    assert len(warned) == 1 and "(step 3)" in warned[0]
    for text in (printed, warned[0]):
        assert "a lower query_learning_rate (now 1)" in text
        assert (" and learning_rate (now 0.001)" in text) == (mode == "lora")


def test_the_guard_tells_a_rise_from_noise():
    """Of 200 runs that stay where they are hardly one is warned of, and of those that go up all are."""
    false_alarms = 0
    for seed in range(200):
        noise = 0.4 * torch.randn(100, generator=torch.Generator().manual_seed(seed))
        steady, rising = LossGuard(), LossGuard()
        steady.add_steps(dict(enumerate((2.5 + noise).tolist())))
        false_alarms += steady.check_training() is not None
        up = torch.tensor([0, 0.5, 2, 4, 7, 10, 10.5, 10.5, 10.5, 10.5])
        rising.add_steps(dict(enumerate((2.5 + noise[:10] + up).tolist())))
        assert "has risen" in rising.check_training()
    # One in 30000 is beyond four standard deviations; the deviation itself is an estimate
    assert false_alarms <= 2
    broken = LossGuard()
    broken.add_steps({0: 2.5, 1: float("nan")})
    assert "not a finite number" in broken.check_training()


def test_the_guard_of_held_out_losses():
    guard = LossGuard()
    assert guard.check_held_out(2.5, 2.6, [2.6]) is not None
    assert guard.check_held_out(2.5, 2.4, [2.4]) is None
    assert guard.check_held_out(2.5, float("nan"), [float("nan")]) is not None
    guard.first_batches = [1.0, 2.0, 3.0, 4.0]
    assert guard.check_held_out(2.5, 2.51, [1.5, 1.6, 3.34, 3.6]) is None  # one batch against the other
    assert guard.check_held_out(2.5, 2.51, [1.01, 2.01, 3.01, 4.01]) is not None  # all of them
