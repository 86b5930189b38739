# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on AttnRes models, by path and by object: the first step is that of the base, and queries train."""

import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tiny_models import WITHOUT_PACKAGE, convert, tiny_base_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from attnres.configuration_attnres import remote_code_auto_map
from attnres.data.text import train_tokenizer
from attnres.training import lora_config, queries_config


SUMS = [f"{a} plus {b} is {a + b}." for a in range(12) for b in range(12)]
PROMPTS, ANSWERS = zip(*((f"{text.split(' is ')[0]} is", f" {text.split(' is ')[1]}") for text in SUMS[:16]))
TEXT = {"text": SUMS[:16]}
PREFERENCES = {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": [" seven."] * len(PROMPTS)}
GENERATION = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
PRECOMPUTED = {"precompute_ref_log_probs": True}


# What trainers log of a step, before it is taken
FIGURES = {
    *("loss", "entropy", "mean_token_accuracy", "num_tokens", "logps/chosen", "logps/rejected", "reward", "kl"),
    *("completions/mean_length", "mean_reward", "min_reward", "max_reward", "margin", "accuracy"),
}


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, TEXT, {}),
    "dpo": (DPOTrainer, DPOConfig, PREFERENCES, {}),
    "grpo": (GRPOTrainer, GRPOConfig, {"prompt": PROMPTS}, {"reward_funcs": lengths}),
    "reward": (RewardTrainer, RewardConfig, PREFERENCES, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base and its conversion, as language models and as classifiers, each with the tokenizer."""
    folder = tmp_path_factory.mktemp("trl")
    tokenizer = train_tokenizer(SUMS, vocab_size=280)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    base_model = tiny_base_model(
        "qwen3", vocab_size=len(tokenizer), num_hidden_layers=2, max_window_layers=1, **special
    )
    for name, model in (("base", base_model), ("attnres", convert(base_model, 3))):
        model.save_pretrained(folder / name)
        classifier = AutoModelForSequenceClassification.from_pretrained(folder / name, num_labels=1)
        with torch.no_grad():
            classifier.score.weight.copy_(torch.linspace(-0.3, 0.3, classifier.score.weight.numel()))
        classifier.save_pretrained(folder / f"{name}-classifier")
        for saved in (name, f"{name}-classifier"):
            tokenizer.save_pretrained(folder / saved)
    return folder


def train(kind, model, output_dir, peft_config=None, max_steps=1, **arguments):
    trainer_class, config_class, data, kwargs = TRAINERS[kind]
    config = config_class(
        output_dir=str(output_dir),
        max_steps=max_steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=1,
        **arguments,
    )
    dataset = Dataset.from_dict({name: list(values) for name, values in data.items()})
    trainer = trainer_class(model, args=config, train_dataset=dataset, peft_config=peft_config, **kwargs)
    trainer.train()
    return trainer


CASES = [
    ("sft", "path", None, {}),
    ("sft", "model", lora_config, {}),
    ("sft", "path", queries_config, {"packing": True, "max_length": 32}),
    ("sft", "model", None, {"padding_free": True, "max_length": None}),
    ("sft", "path", None, {"loss_type": "chunked_nll"}),
    ("dpo", "path", None, {}),
    ("dpo", "model", lora_config, PRECOMPUTED),
    ("grpo", "path", None, GENERATION),
    ("grpo", "model", lora_config, GENERATION),
    ("reward", "path", None, {}),
    ("reward", "model", lora_config, {}),
]
MORE_CASES = [
    ("sft", "path", lora_config, {}),
    ("sft", "model", None, {}),
    ("sft", "model", None, {"packing": True, "max_length": 32}),
    ("sft", "path", None, {"loss_type": "dft"}),
    ("dpo", "model", None, {}),
    ("dpo", "path", lora_config, {}),
    ("dpo", "path", None, PRECOMPUTED),
    ("dpo", "model", queries_config, {}),
    ("grpo", "model", None, GENERATION),
    ("grpo", "path", queries_config, GENERATION),
    ("reward", "model", None, {}),
    ("reward", "path", lora_config, {}),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "kind, given, adapter, arguments",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)],
    ids=lambda value: (
        value if isinstance(value, str) else getattr(value, "__name__", None) or "-".join(value or ["-"])
    ),
)
def test_first_step_is_that_of_the_base(kind, given, adapter, arguments, folder, tmp_path):
    """At queries of zero: its loss, its rewards, what it generates. Then the queries move."""
    suffix, auto_class, task_type = "", AutoModelForCausalLM, "CAUSAL_LM"
    if kind == "reward":
        suffix, auto_class, task_type = "-classifier", AutoModelForSequenceClassification, "SEQ_CLS"
    trainers = {}
    for name in ("base", "attnres"):
        path = str(folder / f"{name}{suffix}")
        model = path if given == "path" else auto_class.from_pretrained(path)
        # an adapter does nothing before its first step, so that the base needs none
        peft_config = adapter(task_type=task_type) if adapter is not None and name == "attnres" else None
        trainers[name] = train(kind, model, tmp_path / name, peft_config, **arguments)
    (expected,), (actual,) = ([e for e in t.state.log_history if "loss" in e] for t in trainers.values())
    compared = expected.keys() & FIGURES
    assert len(compared) > 1
    # Of two layers in fp32, 800 times its rounding (1.2e-7); a mask, a position or a label that is off moves all of
    # these in the second digit
    for figure in compared:
        assert actual[figure] == pytest.approx(expected[figure], rel=1e-4, abs=1e-5), figure

    model = trainers["attnres"].model
    assert isinstance(model, PeftModel) == (adapter is not None)
    names = [name for name, _ in model.named_parameters() if name.endswith("depth_queries.query")]
    names += [name for name, _ in model.named_parameters() if name.endswith("modules_to_save.default.query")]
    moved = model.get_parameter(names[-1])
    assert torch.isfinite(moved).all() and moved.abs().max() > 1e-3


@pytest.mark.slow
def test_adapters_of_experts(folder, tmp_path):
    """Named as single experts: trained by TRL as on the base, and loaded on either."""
    vocab_size = AutoModelForCausalLM.from_pretrained(folder / "base").config.vocab_size
    base_model = tiny_base_model("mixtral", vocab_size=vocab_size, num_hidden_layers=2)
    trainers, logits, input_ids = {}, {}, torch.tensor([[3, 4, 5, 6, 7]])
    for name, model in (("base", base_model), ("attnres", convert(base_model, 3))):
        model.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).write_bytes((folder / "base" / file).read_bytes())
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["w1", "w2", "w3"])
        trainers[name] = train("sft", str(tmp_path / name), tmp_path / "out", config, max_steps=2)
        trainers[name].model.save_pretrained(tmp_path / f"of-{name}")
    for name, other in (("base", "attnres"), ("attnres", "attnres")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            before = model(input_ids).logits
            loaded = PeftModel.from_pretrained(model, tmp_path / f"of-{other}").eval()
            logits[name] = loaded(input_ids).logits
        assert (logits[name] - before).abs().max() > 1e-3, "the adapter does nothing"
    torch.testing.assert_close(logits["base"], logits["attnres"], rtol=0, atol=5e-5)
    expected, actual = (trainer.state.log_history[0]["loss"] for trainer in trainers.values())
    assert actual == pytest.approx(expected, rel=1e-4)


LOAD_WITHOUT_PACKAGE = """
import torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(torch.tensor([[3, 4, 5, 6, 7]])).logits, sys.argv[2])
assert "attnres" not in sys.modules
"""


@pytest.mark.slow
def test_command_line_of_trl_on_a_checkpoint_with_its_code(folder, tmp_path):
    """Where the package is not installed: its modules to adapt are the base's, and the adapter loads there."""
    model = AutoModelForCausalLM.from_pretrained(folder / "attnres")
    model.config.auto_map = remote_code_auto_map(model.config.base_model_type)
    model.save_pretrained(tmp_path / "self-contained")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "self-contained" / name).write_bytes((folder / "attnres" / name).read_bytes())
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SUMS[:8]))
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/sitecustomize.py").write_text(WITHOUT_PACKAGE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "hide"), "HF_MODULES_CACHE": str(tmp_path / "modules")}

    def run(*command):
        result = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stderr

    options = (
        "--max_steps 1 --per_device_train_batch_size 4 --learning_rate 0.1 --use_cpu --bf16 False --report_to none"
    )
    run(
        *("-m", "trl.cli.main", "sft", "--model_name_or_path", "self-contained", "--trust_remote_code", "--use_peft"),
        *("--dataset_name", "rows", "--output_dir", "adapter", *options.split()),
    )
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert set(adapter["target_modules"]) == {"q_proj", "v_proj"}
    run("-c", "import sys" + LOAD_WITHOUT_PACKAGE, "adapter", "logits.pt")
    loaded = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(torch.tensor([[3, 4, 5, 6, 7]])).logits, torch.load(tmp_path / "logits.pt"))
