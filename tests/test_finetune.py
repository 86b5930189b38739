# SPDX-License-Identifier: Apache-2.0
"""`attnres finetune` and the adapters it makes: real files, real processes, the tools people use around them."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from rounding import FACTOR, UpToRounding, one_unit_away
from safetensors.torch import load_file, save_file
from tiny_models import convert, mostly_slow, randomize_queries, tiny_base_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres import AttnResForCausalLM
from attnres.data.text import read_sample, train_tokenizer
from attnres.training import AttnResTrainingArguments, FinetuneArguments, finetune, lora_config, queries_config
from attnres.training.config import MODES, read_config
from attnres.training.finetune import four_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base with its tokenizer, conversions of it, and texts."""
    folder = tmp_path_factory.mktemp("finetune")
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    torch.manual_seed(0)
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer))
    for name, model in (("base", base), ("blocks-of-3", convert(base, 3)), ("blocks-of-2", convert(base, 2))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    paragraphs = [text for text in read_sample().split("\n\n") if text.strip()] * 20
    write_jsonl(folder / "text.jsonl", [{"text": text} for text in paragraphs])
    return folder


def write_jsonl(path: Path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fields(folder, output, **kwargs):
    return {
        "model": str(folder / "blocks-of-3"),
        "dataset": str(folder / "text.jsonl"),
        "output_dir": str(output),
        "mode": "full",
        "max_length": 32,
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": "1e-2",  # as YAML reads it
        "query_learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_steps": 6,
        "save_steps": 3,
        "report_to": "none",
        "use_cpu": True,
        **kwargs,
    }


def input_ids():
    return torch.randint(3, 300, (2, 11), generator=torch.Generator().manual_seed(0))


def trained(model):
    """As if trained: every trainable number moved."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("mode", mostly_slow(MODES, every=3))
def test_modes(folder, tmp_path, mode):
    result = finetune(fields(folder, tmp_path / "out", mode=mode))
    assert result.losses[-1] < result.losses[0]
    assert result.explanation is None and all(path.exists() for path in result.files)
    logged = [entry for entry in result.history if "loss" in entry]
    assert len(logged) == 12 and logged[-1]["query_norm"] > 0.05 and 0 < logged[-1]["depth_entropy"] < 1
    config = AttnResForCausalLM.from_pretrained(folder / "blocks-of-3").config
    sites = [key for key in logged[-1] if key.startswith("depth/entropy_")]
    assert len(sites) == config.num_sites - 1  # the first site has one source
    if mode == "full":
        model = AutoModelForCausalLM.from_pretrained(result.folder).eval()
    else:
        model = AutoPeftModelForCausalLM.from_pretrained(result.folder).eval()
    if mode == "queries":
        assert result.trainable_parameters == config.num_sites * 2 * config.hidden_size
        assert (result.folder / "adapter_model.safetensors").stat().st_size < 1_000_000
    card = (result.folder / "README.md").read_text()
    assert "\n# out\n" in card and 'from_pretrained("out/final"' in card and "unfinished" not in card
    assert f"(`mode: {mode}`) on text.jsonl for 12 steps" in " ".join(card.split())
    assert f"from {result.losses[0]:.4f} to {result.losses[-1]:.4f}" in " ".join(card.split())
    assert "More Information Needed" not in card and str(folder) not in card
    assert not list(result.folder.glob("*.bin")) and AutoTokenizer.from_pretrained(result.folder)
    assert model.config.use_cache in (None, True)
    # what was saved is what was evaluated
    held_out = [row["eval_loss"] for row in result.history if "eval_loss" in row][-1]
    again = finetune(fields(folder, tmp_path / "again", mode=mode))
    assert again.losses[-1] == held_out and again.losses == result.losses


@pytest.mark.slow
def test_the_prenorm_twin_trains_too(folder, tmp_path):
    for mode in ("lora", "full"):
        result = finetune(fields(folder, tmp_path / mode, model=str(folder / "base"), mode=mode))
        assert result.losses[-1] < result.losses[0] and "query_norm" not in result.history[1]


def command(config: Path, *overrides):
    return [sys.executable, "-m", "attnres", "finetune", str(config), *overrides]


@pytest.mark.slow
def test_killed_and_resumed(folder, tmp_path):
    """SIGKILL in the middle; run again, it comes to the same weights bit for bit. Other modes: `killed_runs.py`."""
    config = fields(folder, tmp_path / "killed", mode="lora", max_steps=40, lora_dropout=0.1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(command(tmp_path / "run.yaml"), stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "killed/checkpoint-6/trainer_state.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed/final").exists()
    # a checkpoint that was cut off is passed over
    (tmp_path / "killed/checkpoint-99").mkdir()
    done = max(int(path.parent.name[11:]) for path in (tmp_path / "killed").glob("checkpoint-*/trainer_state.json"))
    for name in ("killed", "whole"):
        result = subprocess.run(
            command(tmp_path / "run.yaml", f"output_dir={tmp_path / name}"), capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
    history = json.loads((tmp_path / "killed/history.json").read_text())
    assert 6 <= done < 40 and history[-1]["step"] == 40
    killed, whole = (load_file(tmp_path / name / "final/adapter_model.safetensors") for name in ("killed", "whole"))
    assert killed.keys() == whole.keys()
    assert all(torch.equal(killed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_finished_run_is_finished(folder, tmp_path):
    """Killed between its last checkpoint and `final`, it trains no more."""
    for mode in ("queries", "full"):
        config = fields(folder, tmp_path / mode, mode=mode, max_steps=6, lr_scheduler_type="constant")
        first = finetune(config)
        weights = {path.name: path.read_bytes() for path in first.folder.glob("*.safetensors")}
        shutil.rmtree(first.folder)
        (tmp_path / mode / ".final.unfinished").mkdir()
        second = finetune(config)
        assert weights == {path.name: path.read_bytes() for path in second.folder.glob("*.safetensors")} and weights
        assert second.losses == first.losses and second.history[-1]["step"] == 6


@pytest.mark.slow
def test_early_stopping_goes_on_where_it_was(folder, tmp_path):
    """Stopped early, a run is finished too, and the model that is kept is the one whose loss is told."""
    stopping = {"early_stopping_patience": 1, "learning_rate": 3.0, "max_steps": 60, "eval_steps": 3}
    config = fields(folder, tmp_path / "out", mode="lora", **stopping)
    first = finetune(config)
    shutil.rmtree(first.folder)
    second = finetune(config)
    assert second.losses == first.losses and len(first.losses) < 10
    best = min(first.losses[1:-1])  # the loss of the start is of no checkpoint
    assert first.losses[-1] == best


def killed_runs(folder, *arguments):
    script = Path(__file__).with_name("tools") / "killed_runs.py"
    result = subprocess.run([sys.executable, script, folder, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all weights bit-identical" in result.stdout


@pytest.mark.slow
def test_kills_of_every_mode_and_schedule(tmp_path):
    killed_runs(tmp_path, "--kills", "10")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["start", "training", "saving"])
def test_interrupted(folder, tmp_path, moment):
    """SIGINT: one line, no traceback, exit code 130, and the run goes on when it is started again."""
    config = fields(folder, tmp_path / "out", max_steps=30, save_steps=1, disable_tqdm=True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    script = tmp_path / "interrupted.py"  # the program, with a signal from within at the moment
    hooks = {
        "start": "attnres.training.finetune.prepare",
        "training": "attnres.training.AttnResTrainer.training_step",
        "saving": "attnres.training.AttnResTrainer._save_rng_state",
    }
    target, _, name = hooks[moment].rpartition(".")
    script.write_text(
        "import importlib, os, pkgutil, signal, sys\n"
        "import attnres.training\n"
        "from attnres.__main__ import main\n"
        f"target = {'sys.modules[' + repr(target) + ']' if moment == 'start' else target}\n"
        f"original = target.{name}\n"
        "def interrupt(*args, **kwargs):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return original(*args, **kwargs)\n"
        f"target.{name} = interrupt\n"
        "main()\n"
    )
    arguments = ["finetune", str(tmp_path / "run.yaml")]
    result = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("Interrupted")]
    assert said == ["Interrupted. Run the same command again to resume."]
    assert not (tmp_path / "out/final").exists()
    if moment == "saving":
        assert not (tmp_path / "out/checkpoint-1").exists()  # not whole, and so not left
        assert finetune(config).history[-1]["step"] == 30


@pytest.mark.slow
def test_two_processes_match_one(folder, tmp_path):
    """DDP, and FSDP2 sharded at load: the loss curve of one process."""
    base = fields(folder, tmp_path / "one", save_strategy="no", query_learning_rate="auto")

    def rate_curve_and_queries(output):
        history = json.loads((output / "history.json").read_text())
        rates = [entry["query_learning_rate"] for entry in history if "query_learning_rate" in entry]
        queries = load_file(output / "final/model.safetensors")["model.depth_queries.query"]
        return rates, torch.tensor([entry["loss"] for entry in history if "loss" in entry]), queries

    finetune(base)
    rate, *expected = rate_curve_and_queries(tmp_path / "one")
    # Adam makes much of small differences. How much, is seen in one process: the same sums in other orders, and a
    # start whose weights are one unit in the last place away
    shutil.copytree(folder / "blocks-of-3", tmp_path / "nearby")
    weights, generator = load_file(folder / "blocks-of-3/model.safetensors"), torch.Generator().manual_seed(0)
    nearby = {name: one_unit_away(weight, generator) for name, weight in weights.items()}
    save_file(nearby, tmp_path / "nearby/model.safetensors", {"format": "pt"})
    moved = []
    for number, changes in enumerate(
        (
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
            {"model": str(tmp_path / "nearby")},
        )
    ):
        finetune({**base, **changes, "output_dir": str(tmp_path / f"moved-{number}")})
        found = rate_curve_and_queries(tmp_path / f"moved-{number}")[1:]
        moved.append([(a - b).abs().max() for a, b in zip(found, expected)])
    allowed = [FACTOR * max(differences) + 1e-6 for differences in zip(*moved)]
    assert allowed[0] < 1e-2 and allowed[1] < 2e-2, allowed  # of losses around 6, and of 12 steps of 1e-2
    for name, extra in (("ddp", {}), ("fsdp", {"fsdp_size": 2})):
        config = {**base, **extra, "output_dir": str(tmp_path / name), "per_device_train_batch_size": 2}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
        result = subprocess.run(
            [*torchrun, *command(tmp_path / f"{name}.yaml")[1:]], capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert result.stdout.count("Held-out loss") == 1
        rate_of_two, *found = rate_curve_and_queries(tmp_path / name)
        assert rate_of_two == rate
        for actual, of_one, largest in zip(found, expected, allowed):
            assert (actual - of_one).abs().max() <= largest
        names = [load_file(tmp_path / kind / "final/model.safetensors").keys() for kind in (name, "one")]
        assert names[0] == names[1]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"lerning_rate": 1}, "There is no field `lerning_rate`; is it `learning_rate`?"),
        ({"dataset": None}, "`dataset` is missing"),
        ({"mode": "half"}, "`mode: half` is not one of queries, lora, full"),
        ({"learning_rate": "fast"}, "`learning_rate: fast` is not a number"),
        ({"max_steps": 1.5}, "`max_steps: 1.5` is not a whole number"),
        ({"packing": "perhaps"}, "`packing: perhaps` is not true or false or null"),
        ({"max_length": 10**6}, "`max_length: 1000000` is more than the"),
        ({"max_length": 1}, "leaves nothing to predict"),
        ({"dataset": "./nowhere.jsonl"}, "There is no file or folder `./nowhere.jsonl`"),
        ({"dataset": "{folder}/empty"}, "holds none of .jsonl"),
        ({"dataset": "{folder}/broken.jsonl"}, "cannot be read as json"),
        ({"dataset": "{folder}/other.jsonl"}, "The data has the columns story. It needs `text`, `messages`"),
        ({"dataset": "{folder}/one.jsonl"}, "too few to hold out"),
        ({"text_column": "story"}, "`text_column='story'` is not one of the columns text"),
        ({"dataset": "{folder}/chat.jsonl"}, "the tokenizer has no chat template"),
        ({"model": "./nowhere"}, "There is no folder `./nowhere`"),
        ({"model": "{folder}/base", "mode": "queries"}, "`mode: queries` needs an AttnRes checkpoint"),
        ({"fsdp_size": 2, "mode": "lora"}, "`fsdp_size: 2` needs `mode: full`"),
        ({"load_in_4bit": True}, "`load_in_4bit: true` needs `mode: lora` or `mode: queries`"),
        ({"eval_fraction": 2.0}, "`eval_fraction: 2.0` is not between 0 and 0.5"),
        ({"output_dir": "{folder}/base"}, "is not empty: name another folder"),
        ({"output_dir": "{folder}/text.jsonl"}, "is a file"),
        ({"eval_strategy": "sometimes"}, "`eval_strategy: sometimes` is not one of no, steps, epoch"),
        ({"lr_scheduler_type": "triangle"}, "`lr_scheduler_type: triangle` is not one of linear, cosine"),
        ({"optim": "newton"}, "`optim: newton` is not one of adamw_torch"),
        ({"optim": "grokadamw"}, "Please install grokadamw"),
        ({"lr_scheduler_kwargs": {"cycles": 1}}, "unexpected keyword argument 'cycles'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"report_to": "paper"}, "paper is not supported"),
        ({"accelerator_config": {"splits": 1}}, "unexpected keyword argument 'splits'"),
        ({"deepspeed": {"stage": 3}}, "'deepspeed"),
        ({"log_level": "loud"}, "`log_level: loud` is not one of passive, detail, debug"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size: 0` is not above 0"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps: 0` is not above 0"),
        ({"learning_rate": -1}, "`learning_rate: -1.0` is negative"),
        ({"learning_rate": float("nan")}, "`learning_rate: nan` is not a finite number"),
        ({"query_learning_rate": -1e-3}, "`query_learning_rate: -0.001` is negative"),
        ({"max_steps": -5}, "`max_steps: -5` is not above 0; -1 trains for `num_train_epochs`"),
        ({"max_steps": 0}, "`max_steps: 0` is not above 0"),
        ({"num_train_epochs": 0}, "`num_train_epochs: 0.0` is not above 0"),
        ({"save_steps": 0}, "`save_steps: 0.0` is not above 0"),
        ({"save_steps": 2.5}, "`save_steps: 2.5` must be a whole number, or below 1"),
        ({"eval_steps": 0}, "`eval_steps: 0.0` is not above 0"),
        ({"logging_steps": 0}, "`logging_steps: 0.0` is not above 0"),
        ({"warmup_steps": -1}, "`warmup_steps: -1.0` is negative"),
        ({"weight_decay": "lots"}, "`weight_decay: lots` is not a number"),
        ({"adam_beta2": 1.5}, "`adam_beta2: 1.5` is not between 0 and 1"),
        ({"lora_rank": 0, "mode": "lora"}, "`lora_rank: 0` is not above 0"),
        ({"lora_dropout": 1.0, "mode": "lora"}, "`lora_dropout: 1.0` is not between 0 and 1"),
        ({"lora_target_modules": "heads", "mode": "lora"}, "`lora_target_modules: heads`: No modules were targeted"),
        ({"early_stopping_patience": 0}, "`early_stopping_patience: 0` is not above 0"),
        ({"early_stopping_patience": 1, "save_steps": 4}, "4, which is not a round multiple of 6"),
        ({"metric_for_best_model": "accuracy"}, "`metric_for_best_model: accuracy` is not measured"),
        ({"dtype": "float7"}, "`dtype: float7` is not one of auto, float32"),
        ({"seed": -1}, "`seed: -1` is negative"),
        ({"resume_from_checkpoint": "there"}, "`resume_from_checkpoint` has no effect here"),
        ({"revision": "main"}, "`revision: main` is for a Hub id"),
        ({"dataloader_num_workers": -1}, "`dataloader_num_workers: -1` is negative"),
        (
            {"dataloader_drop_last": True, "per_device_eval_batch_size": 999},
            "as a batch has 999: lower `per_device_ev",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 9},
                "max_steps": 6,
            },
            "`num_decay_steps: 9` of `lr_scheduler_kwargs` is more than the 6 steps that `max_steps: 6` leaves",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_configurations(folder, tmp_path, monkeypatch, capsys, changed, message, run_attnres):
    """One line and exit code 1, before a model is loaded or a folder made."""
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "broken.jsonl").write_text('{"text": ')
    write_jsonl(folder / "other.jsonl", [{"story": "once"}] * 30)
    write_jsonl(folder / "one.jsonl", [{"text": "once"}])
    write_jsonl(folder / "chat.jsonl", [{"messages": [{"role": "user", "content": "a"}]}] * 30)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    changed = {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in changed.items()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**fields(folder, tmp_path / "out"), **changed}))
    assert run_attnres("finetune", tmp_path / "run.yaml") == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed and "Traceback" not in printed
    assert not (tmp_path / "out").exists()


FIELDS = [f for cls in (FinetuneArguments, AttnResTrainingArguments) for f in dataclasses.fields(cls) if f.init]


@pytest.mark.parametrize("name", sorted({f.name for f in FIELDS} - {"trackio_static_space_id"}))  # takes anything
def test_every_field_has_its_kind(folder, name):
    """A value of another kind is an error that names field and value, before anything is read."""
    kind = str({f.name: f.type for f in FIELDS}[name])
    wrong = [value for value, allowed in (([1], "list"), ({"a": 1}, "dict"), (7, "int")) if allowed not in kind]
    wrong = [value for value in wrong if not (value == 7 and ("float" in kind or "str" not in kind))]
    assert wrong
    for value in wrong:
        with pytest.raises(ValueError, match=f"`{name}(: .*` is (not|neither) |` has no effect)"):
            read_config({**fields(folder, "out"), name: value})


def test_outputs_are_not_mixed_up(folder, tmp_path):
    finetune(fields(folder, tmp_path / "out", max_steps=3))
    with pytest.raises(ValueError, match="holds a finished run"):
        finetune(fields(folder, tmp_path / "out", max_steps=3))
    (tmp_path / "out/final").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="unfinished run with another `learning_rate`: 0.01, not 0.1"):
        finetune(fields(folder, tmp_path / "out", max_steps=3, learning_rate=0.1))


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def test_kinds_of_data(folder, tmp_path):
    """Chats and completions learn the answers alone; text, Parquet and folders are read alike."""
    from datasets import Dataset

    from attnres.data import packing
    from attnres.data.rows import load_rows

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat}])
    write_jsonl(tmp_path / "answers.jsonl", [{"prompt": "two and two", "completion": "four"}])
    for name in ("chat", "answers"):
        row = packing.tokenize(load_rows(str(tmp_path / f"{name}.jsonl"), None, "train"), tokenizer)[0]
        learned = [i for i, label in zip(row["input_ids"], row["labels"]) if label != -100]
        assert tokenizer.decode(learned) == f"four{tokenizer.eos_token}"
        assert "two and two" in tokenizer.decode(row["input_ids"])
    text = "first line\nsecond line\n"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text(text)
    Dataset.from_list([{"text": text}]).to_parquet(tmp_path / "text.parquet")
    rows = [
        packing.tokenize(load_rows(str(tmp_path / name), None, "train"), tokenizer)[0]
        for name in ("texts", "text.parquet")
    ]
    assert rows[0]["input_ids"] == rows[1]["input_ids"] and rows[0]["input_ids"][-1] == tokenizer.eos_token_id
    (tmp_path / "texts/b.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="files of several kinds"):
        load_rows(str(tmp_path / "texts"), None, "train")


@pytest.mark.slow
def test_early_stopping_checkpointing_and_unpacked_rows(folder, tmp_path):
    result = finetune(
        fields(
            folder,
            tmp_path / "out",
            mode="lora",
            packing=False,
            gradient_checkpointing=True,
            gradient_accumulation_steps=2,
            bf16=True,
            early_stopping_patience=1,
            learning_rate=10.0,
            max_steps=60,
            eval_steps=3,
        )
    )
    assert result.history[-1]["step"] < 60, "nothing has stopped it"


@pytest.mark.slow
def test_queries_that_do_not_move_are_explained(folder, tmp_path):
    result = finetune(fields(folder, tmp_path / "out", query_learning_rate=1e-5, query_weight_decay=0.1))
    assert "The depth queries have hardly moved" in result.explanation
    assert (
        "query_learning_rate (now 1e-05)" in result.explanation
        and "query_weight_decay (now 0.1)" in result.explanation
    )


@pytest.mark.slow
def test_tensorboard(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finetune(fields(folder, tmp_path / "out", report_to="tensorboard", max_steps=3))
    folders = {path.parent for path in (tmp_path / "out").rglob("events.out.*")} - {tmp_path / "out/runs/depth"}
    events = EventAccumulator(str(folders.pop())).Reload()
    assert {"train/loss", "train/query_norm", "train/depth_entropy", "eval/loss"} <= set(events.Tags()["scalars"])
    pictures = EventAccumulator(str(tmp_path / "out/runs/depth")).Reload()
    assert pictures.Tags()["images"] == ["depth/weights", "depth/profiles"]
    assert [event.step for event in pictures.Images("depth/weights")] == [0, 3]


def test_ready_configurations_are_valid():
    import attnres.training
    from attnres.training.config import read_config, split_config

    configs = Path(attnres.training.__file__).parent / "configs"
    names = {path.stem for path in configs.glob("*.yaml") if not path.stem.startswith(("paper", "pretrain"))}
    assert names == {"laptop_cpu", "one_gpu", "fsdp2", "accelerate_fsdp2"}
    for name in names - {"accelerate_fsdp2"}:
        config = read_config(configs / f"{name}.yaml", {"bf16": False})
        assert split_config(config)[0].mode in MODES


# --- adapters, with PEFT's own tools


@pytest.mark.parametrize("kind", ["lora", "queries"])
def test_adapters_load_switch_disable_and_merge(folder, tmp_path, kind):
    model = AttnResForCausalLM.from_pretrained(folder / "blocks-of-3").eval()
    of_model = UpToRounding(lambda: model(input_ids()).logits, model=model)
    untouched = of_model.expected["result"]
    make = {"lora": lambda: lora_config(r=4), "queries": queries_config}[kind]
    adapted = trained(get_peft_model(model, make()))
    expected = adapted(input_ids()).logits
    assert (expected - untouched).abs().max() > 1e-2
    adapted.save_pretrained(tmp_path / "adapter")
    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")(input_ids()).logits, expected)
    plain = AttnResForCausalLM.from_pretrained(folder / "blocks-of-3")
    plain.load_adapter(tmp_path / "adapter")
    assert torch.equal(plain(input_ids()).logits, expected)
    plain.disable_adapters()
    assert torch.equal(plain(input_ids()).logits, untouched)
    adapted.add_adapter("other", make())
    adapted.set_adapter("other")
    of_model.check(adapted(input_ids()).logits)
    adapted.set_adapter("default")
    assert torch.equal(adapted(input_ids()).logits, expected)
    with adapted.disable_adapter():
        assert torch.equal(adapted(input_ids()).logits, untouched)
    of_adapted = UpToRounding(lambda: adapted(input_ids()).logits, model=adapted)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert isinstance(merged, AttnResForCausalLM)
    of_adapted.check(merged(input_ids()).logits)
    names = load_file(tmp_path / "merged/model.safetensors").keys()
    assert names == load_file(folder / "blocks-of-3/model.safetensors").keys()


@pytest.mark.parametrize("kind", ["lora", "queries"])
def test_an_adapter_for_other_blocks_is_refused(folder, tmp_path, kind):
    model = AttnResForCausalLM.from_pretrained(folder / "blocks-of-3")
    make = {"lora": lambda: lora_config(r=4), "queries": queries_config}[kind]
    get_peft_model(model, make()).save_pretrained(tmp_path / "adapter")
    message = "trained with `attn_res_block_size=3` and this model has 2"
    with pytest.raises(RuntimeError, match=message):
        PeftModel.from_pretrained(AttnResForCausalLM.from_pretrained(folder / "blocks-of-2"), tmp_path / "adapter")
    other = AttnResForCausalLM.from_pretrained(folder / "blocks-of-2")
    before = other(input_ids()).logits
    with pytest.raises(ValueError, match=message):
        other.load_adapter(tmp_path / "adapter")
    assert torch.equal(other(input_ids()).logits, before)


def test_an_adapter_of_the_base_acts_the_same_on_its_conversion(folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    adapted = trained(get_peft_model(base, config))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = UpToRounding(lambda: adapted(input_ids()).logits, model=adapted)
    for name in ("blocks-of-3", "blocks-of-2"):
        model = PeftModel.from_pretrained(AttnResForCausalLM.from_pretrained(folder / name), tmp_path / "adapter")
        expected.check(model.eval()(input_ids()).logits)


@pytest.mark.slow
@pytest.mark.parametrize("mode", mostly_slow(["lora", "queries"], every=2))
def test_quantised_base_keeps_wide_queries(folder, tmp_path, mode):
    """QLoRA: a base in 4 bits, read back on a base in 4 bits."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}  # 4-bit blocks have 64 weights
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    convert(tiny_base_model("qwen3", vocab_size=len(tokenizer), **sizes), 3).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    changed = {"model": str(tmp_path / "model"), "load_in_4bit": True, "dtype": "bfloat16"}
    result = finetune(fields(folder, tmp_path / "out", mode=mode, **changed))
    assert result.losses[-1] < result.losses[0] and result.history[-2]["step"] == 12
    queries = load_file(result.folder / "adapter_model.safetensors")
    query = next(tensor for name, tensor in queries.items() if name.endswith("query"))
    assert query.dtype == torch.float32 and query.norm() > 0.1
    base = AttnResForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=four_bits(), dtype=torch.bfloat16, device_map="cpu"
    )
    assert base.model.depth_queries.query.dtype == torch.float32
    assert type(base.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    model = PeftModel.from_pretrained(base, result.folder).eval()
    assert torch.isfinite(model(input_ids()).logits).all()


@pytest.mark.slow
def test_generation_keeps_its_caches(folder, tmp_path):
    """One token a step through the trunk, with the block cache, as before fine-tuning."""
    result = finetune(fields(folder, tmp_path / "out", mode="queries"))
    adapted = AutoPeftModelForCausalLM.from_pretrained(result.folder).eval()
    merged = AutoPeftModelForCausalLM.from_pretrained(result.folder).merge_and_unload().eval()
    expected = None
    for model in (adapted, merged):
        trunk, seen = model.base_model.model.model if model is adapted else model.model, []
        hook = trunk.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append((args[0].shape[1], args[0].cache)),
            with_kwargs=True,
        )
        tokens = model.generate(input_ids=input_ids(), max_new_tokens=6, do_sample=False, pad_token_id=0)
        hook.remove()
        assert [length for length, _ in seen] == [11, 1, 1, 1, 1, 1] and all(cache is not None for _, cache in seen)
        expected = tokens if expected is None else expected
        assert torch.equal(tokens, expected)


def test_randomised_queries_survive_a_change_of_nothing(folder, tmp_path):
    """Zero steps away: an adapter of the queries starts from those of the model."""
    model = randomize_queries(AttnResForCausalLM.from_pretrained(folder / "blocks-of-3")).eval()
    expected = model(input_ids()).logits
    assert torch.equal(get_peft_model(model, queries_config()).eval()(input_ids()).logits, expected)
