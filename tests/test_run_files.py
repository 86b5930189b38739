# SPDX-License-Identifier: Apache-2.0
"""Where the fields of a run come from: the table of them, a file to edit, files with a name, and a new tokenizer."""

import dataclasses
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
import yaml
from tiny_models import convert, tiny_base_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from attnres.cli.checks import packaged_configs
from attnres.data.rows import LOADERS, kind_of_rows
from attnres.data.text import read_sample, train_tokenizer
from attnres.training import AttnResTrainer, AttnResTrainingArguments, FinetuneArguments, PretrainArguments
from attnres.training.config import read_config
from attnres.training.progress import duration, log_line


PARAGRAPHS = [text for text in read_sample().split("\n\n") if text.strip()]
REQUIRED = {"finetune": ["model", "dataset", "output_dir"], "pretrain": ["dataset", "output_dir"]}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to work in, with a checkpoint and its data."""
    tokenizer = train_tokenizer(PARAGRAPHS, vocab_size=400)
    convert(tiny_base_model("qwen3", vocab_size=len(tokenizer)), 3).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in PARAGRAPHS * 10)
    (tmp_path / "text.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command, fields", [("finetune", FinetuneArguments), ("pretrain", PretrainArguments)])
def test_every_field_is_in_the_table(command, fields, run_attnres, capsys):
    assert run_attnres(command, "--fields") == 0
    shown = capsys.readouterr().out
    for field in (*dataclasses.fields(fields), *dataclasses.fields(TrainingArguments)):
        without_effect = field.name.startswith(("do_", "resume_from")) or not field.init
        assert (f" {field.name}:" in shown) != without_effect, field.name
    for name in REQUIRED[command]:
        assert re.search(rf"^  {name}: \(required\)", shown, re.MULTILINE)
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(fields))
    assert "  eval_on_start: true " in shown  # the default of a run, not that of transformers
    rate = {"finetune": "auto", "pretrain": "null"}[command]
    assert f"  query_learning_rate: {rate} " in shown


@pytest.mark.parametrize("command, fields", [("finetune", FinetuneArguments), ("pretrain", PretrainArguments)])
def test_a_file_to_edit(command, fields, tmp_path, run_attnres, capsys):
    """It is a run as it is, and stays one with a field that was commented out. What is there is not overwritten."""
    path = tmp_path / "new" / "run.yaml"
    assert run_attnres(command, "--init", path) == 0
    assert capsys.readouterr().out == f"Wrote {path}\n"
    text = path.read_text()
    start = {"finetune": "laptop_cpu", "pretrain": "pretrain_cpu"}[command]
    assert yaml.safe_load(text) == yaml.safe_load((packaged(start)).read_text())
    commented = yaml.safe_load(re.sub(r"^# (\w+: )", r"\1", "\n".join(without_help(text)), flags=re.MULTILINE))
    assert {field.name for field in dataclasses.fields(fields)} <= commented.keys()
    read_config({**commented, "model": "m", "max_steps": 1}, None, fields, REQUIRED[command])
    path.write_text("mine")
    assert run_attnres(command, "--init", path) == 1
    assert path.read_text() == "mine" and "is not overwritten" in capsys.readouterr().err


def packaged(name):
    from attnres.cli.checks import CONFIGS

    return CONFIGS / f"{name}.yaml"


def without_help(text: str) -> list[str]:
    """The lines of a file without comments that are sentences."""
    return [line for line in text.splitlines() if not line.startswith("# ") or re.match(r"# [a-z_0-9]+: ", line)]


def test_files_by_name(files, run_attnres, capsys):
    """From any folder, and an unknown name lists those that there are."""
    assert packaged_configs("finetune") == ["fsdp2", "laptop_cpu", "one_gpu"]
    assert {"pretrain_cpu", "pretrain_one_gpu", "paper_194m"} <= {*packaged_configs("pretrain")}
    assert run_attnres("finetune", "laptop_cpus", "model=model") == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "There is no file `laptop_cpus`." in error and error.endswith("fsdp2, laptop_cpu, one_gpu.")
    assert run_attnres("pretrain", "laptop_cpu") == 1
    assert "pretrain_cpu" in capsys.readouterr().err
    fields = ["model=model", "dataset=text.jsonl", "max_steps=2", "report_to=none", "query_learning_rate=0.01"]
    assert run_attnres("finetune", "laptop_cpu", *fields, "max_length=32") == 0
    assert (files / "finetuned/final/adapter_model.safetensors").exists()


SHORT_RUN = [
    *(sys.executable, "-m", "attnres", "finetune", "laptop_cpu", "model=model", "dataset=text.jsonl", "output_dir=a"),
    *("max_steps=4", "logging_steps=2", "eval_steps=4", "max_length=32", "report_to=none", "query_learning_rate=1e-5"),
    "save_strategy=no",
]


@pytest.mark.slow
def test_lines_of_a_run(files):
    """In a file: one for each entry of the log, and no control characters."""
    result = subprocess.run(SHORT_RUN, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "\r" not in result.stdout and "{" not in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/4" for n in (0, 2, 4, 4)]
    assert re.fullmatch(r"step 0/4  held-out loss \d+\.\d{4}", lines[0])
    line = r"step 2/4  loss \d+\.\d{4}  learning rate \d\.\de-\d  [\d,]+ tokens/s  \d+ s left"
    assert re.fullmatch(line, lines[1]) and lines[2].endswith(" 0 s left")
    assert result.stdout.splitlines()[-4].startswith("Wrote ")


@pytest.mark.slow
def test_bars_of_a_run(files):
    """On a terminal."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    bars = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}  # which other tests may set
    with (
        open(files / "out.txt", "w") as out,
        subprocess.Popen(SHORT_RUN, stdout=out, stderr=end, env=bars),
    ):
        os.close(end)
        shown = b""
        while chunk := read(terminal):
            shown += chunk
    assert b"Training: " in shown and b"4/4" in shown and b"Loading weights" not in shown and b"Map" not in shown


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # nobody writes any more
        return b""


def test_a_line():
    entry = {"loss": 2.5, "learning_rate": 2e-4, "grad_norm": 1.0, "query_norm": 0.1}
    assert log_line(entry, 5, 200, 1234.5, 130) == (
        "step   5/200  loss 2.5000  learning rate 2.0e-4  1,234 tokens/s  2 min 10 s left"
    )
    assert log_line({"eval_loss": 2.25, "eval_runtime": 3.0}, 200, 200) == "step 200/200  held-out loss 2.2500"
    assert log_line({"loss": float("nan")}, 1, 2) == "step 1/2  loss nan"
    assert log_line({"train_runtime": 3.0}, 2, 2) is None
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 7500)] == [
        "0 s",
        "1 min 0 s",
        "59 min 59 s",
        "2 h 5 min",
    ]


def test_forms_of_data_on_the_page():
    page = (Path(__file__).parent.parent / "docs/how_to/finetune.md").read_text(encoding="utf-8")
    rows = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    assert [kind_of_rows(list(row)) for row in rows] == ["text", "chat", "completion"]
    kinds = re.findall(r"`(\.\w+)`", page[page.index("| file | a document is |") : page.index("A row or an entry")])
    assert set(kinds) == LOADERS.keys()


def test_a_new_tokenizer(files, run_attnres, capsys):
    """From files of several kinds; one like another keeps its special tokens; nothing is overwritten."""
    (files / "texts").mkdir()
    for number, text in enumerate(PARAGRAPHS):
        (files / f"texts/{number}.txt").write_text(text)
    assert run_attnres("tokenizer", "texts", "text.jsonl", "-o", "new", "--vocab-size", 500, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained(files / "new")
    assert made["vocab_size"] == len(tokenizer) == 500 and made["bytes_per_token"] > 2
    ids = tokenizer(PARAGRAPHS[0]).input_ids
    assert tokenizer.decode(ids) == PARAGRAPHS[0] and tokenizer.eos_token == "<|endoftext|>"
    assert run_attnres("tokenizer", "texts", "-o", "like", "--like", "new", "--vocab-size", 100_000) == 0
    shown = capsys.readouterr().out
    like = AutoTokenizer.from_pretrained(files / "like")
    assert f"no more than {len(like):,} tokens" in shown and like.eos_token == "<|endoftext|>"
    assert like.decode(like(PARAGRAPHS[0]).input_ids) == PARAGRAPHS[0]

    assert run_attnres("tokenizer", "texts", "-o", "new") == 1
    assert "`new` is not empty" in capsys.readouterr().err
    (files / "chats.jsonl").write_text('{"messages": [], "body": "a b c"}\n')
    assert run_attnres("tokenizer", "chats.jsonl", "-o", "chats") == 1
    assert "has no column `text`, but messages, body" in capsys.readouterr().err
    assert run_attnres("tokenizer", "chats.jsonl", "-o", "chats", "--text-column", "body") == 0
    (files / "late.jsonl").write_text('{"text": " "}\n' * 1001 + '{"text": "a b c"}\n')
    assert run_attnres("tokenizer", "late.jsonl", "-o", "late") == 0
    (files / "empty.txt").write_text(" \n")
    assert run_attnres("tokenizer", "empty.txt", "-o", "none") == 1
    assert "There is no text in `empty.txt`" in capsys.readouterr().err and not (files / "none").exists()
    assert run_attnres("tokenizer", "nope.txt", "-o", "none") == 1
    assert "There is no file or folder `nope.txt`" in capsys.readouterr().err


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mask", [None, "of tokens", "of scores"])
def test_embeddings_and_masks_of_scores(files, tmp_path, mask, capsys):
    """Tokens are counted for the lines of a run, and whatever a model takes can be trained on."""
    model = AutoModelForCausalLM.from_pretrained(files / "model")
    ids = torch.arange(8)
    row = {"labels": ids, "inputs_embeds" if mask is None else "input_ids": ids}
    if mask is None:
        row["inputs_embeds"] = torch.randn(8, model.config.hidden_size)
    else:
        scores = torch.ones(1, 8, 8, dtype=torch.bool).tril()
        row["attention_mask"] = scores if mask == "of scores" else torch.tensor([1] * 5 + [0] * 3)
    fields = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": []}
    trainer = AttnResTrainer(model, AttnResTrainingArguments(str(tmp_path), **fields), train_dataset=[row] * 4)
    trainer.train()
    assert trainer.count_tokens() == 20 if mask == "of tokens" else 32
    assert capsys.readouterr().out.count("tokens/s") == 2
    assert all(0 < entry["depth_entropy"] < 1.001 for entry in trainer.state.log_history if "loss" in entry)
