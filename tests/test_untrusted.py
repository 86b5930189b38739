# SPDX-License-Identifier: Apache-2.0
"""Files of strangers, through every command that opens them: one line of error, soon, and in little memory."""

import ast
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import convert, tiny_base_model

from attnres.checkpoints.checkpoint import COMPANIONS, REPORT_NAMES
from attnres.data import rows
from attnres.data.text import read_sample, train_tokenizer
from attnres.eval.models import EvalModel, EvalOptions, load_model
from attnres.training import lora_config, queries_config
from attnres.utils.untrusted import OPENED, PARSED, TOKENIZER_FILES, is_asked_for


ROOT = Path(__file__).parents[1]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, its conversion, an adapter of each kind, a GGUF file, rows and a run."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = train_tokenizer([read_sample()], vocab_size=300)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    base = tiny_base_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=2)
    for name, model in (("base", base), ("attnres", convert(base, 2))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        (folder / name / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    for name, adapter in (("lora", lora_config(r=4)), ("queries", queries_config())):
        get_peft_model(convert(base, 2), adapter).save_pretrained(folder / name)
    write_gguf(folder / "tiny.gguf")
    (folder / "text.jsonl").write_text(json.dumps({"text": "What there is to learn. " * 9}) + "\n")
    shutil.copy(folder / "text.jsonl", folder / "held_out.jsonl")
    (folder / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}) + "\n"
    )
    return folder


@pytest.fixture
def place(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit(path: Path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def pipe(path: Path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path, target: str | Path):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def sparse(path: Path, size: int):
    with path.open("wb") as file:
        file.truncate(size)


def pickled(folder: Path, name: str, safetensors: str):
    torch.save(load_file(folder / safetensors), folder / name)
    (folder / safetensors).unlink()


def elsewhere(path: Path):
    """Move a file out of its folder and leave a link."""
    target = path.parents[1] / f"{path.name}.elsewhere"
    path.rename(target)
    path.symlink_to(target)


def tampered_gguf(path: Path, field: bytes, value: bytes):
    content = path.read_bytes()
    at = content.index(field) + len(field) + 4  # behind the kind of its value
    path.write_bytes(content[:at] + value + content[at + len(value) :])


def wider(folder: Path):
    """Tensors of an adapter for a wider base."""
    loaded = load_file(folder / "adapter_model.safetensors")
    doubled = {name: torch.cat([t, t], -1) if t.ndim else t for name, t in loaded.items()}
    save_file(doubled, folder / "adapter_model.safetensors")


CONVERT = ("convert", "base", "out", "--no-verify")
INSPECT = ("inspect", "attnres", "-o", "out", "--max-tokens", "20")
EVAL = ("eval", "attnres", "--tasks", "lambada_openai", "-o", "out", "--limit", "1")
ADAPTER = (*EVAL, "--peft", "lora")
FINETUNE = ("finetune", "run.yaml")
PRETRAIN = ("pretrain", "pretrain.yaml")
CARD = ("card", "attnres")
PUSH = ("push", "attnres", "someone/x", "--dry-run")
PROBE = ("families", "--probe", "base")
GGUF = ("convert", "tiny.gguf", "out", "--no-verify")
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NOT_FINISHED = "config.json` is a pipe, a socket or a device"
# Name: what is done to the files, the commands that meet them, what they say
HOSTILE = {
    "pipe as config": (lambda p: pipe(p / "attnres/config.json"), [INSPECT, FINETUNE, EVAL, CARD, PUSH], NOT_FINISHED),
    "pipe as the config of a base": (lambda p: pipe(p / "base/config.json"), [CONVERT, PROBE], NOT_FINISHED),
    "device as config": (lambda p: link(p / "base/config.json", "/dev/zero"), [CONVERT, PROBE], NOT_FINISHED),
    "device as tokenizer": (
        lambda p: link(p / "attnres/tokenizer.json", "/dev/zero"),
        [INSPECT, FINETUNE],
        "tokenizer.json` is a pipe, a socket or a device",
    ),
    "pipe as weights": (
        lambda p: pipe(p / "attnres/model.safetensors"),
        [INSPECT, FINETUNE, EVAL],
        "model.safetensors` is a pipe",
    ),
    "pipe as index": (
        lambda p: pipe(p / "base/model.safetensors.index.json"),
        [CONVERT],
        "model.safetensors.index.json` is a pipe",
    ),
    "pipe as depth.json": (
        lambda p: ((p / "attnres/depth").mkdir(), pipe(p / "attnres/depth/depth.json")),
        [CARD],
        "depth.json` is a pipe",
    ),
    "pipe as card": (lambda p: pipe(p / "attnres/README.md"), [CARD], "README.md` is a pipe"),
    "huge config": (
        lambda p: sparse(p / "base/config.json", 5 << 30),
        [CONVERT, PROBE],
        "has 5,368,709,120 bytes, more than the limit of",
    ),
    "deep config": (lambda p: (p / "base/config.json").write_text(DEEP), [CONVERT, PROBE], "nested too deeply"),
    "deep tokenizer config": (
        lambda p: (p / "attnres/tokenizer_config.json").write_text(f'{{"a": {DEEP}}}'),
        [INSPECT, FINETUNE, EVAL],
        "nested too deeply",
    ),
    "tokenizer of nonsense": (
        lambda p: (p / "attnres/tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}'),
        [INSPECT, FINETUNE],
        "has no tokenizer that loads here",
    ),
    "billions of layers": (
        lambda p: edit(p / "base/config.json", num_hidden_layers=2**31),
        [CONVERT, PROBE],
        "`num_hidden_layers=2147483648` in .* must be at most 10,000",
    ),
    "layers of an absurd width": (
        lambda p: edit(p / "attnres/config.json", intermediate_size=2**24),
        [INSPECT, FINETUNE],
        "`.*attnres` does not load: ",
    ),
    "pickle as weights": (
        lambda p: pickled(p / "attnres", "pytorch_model.bin", "model.safetensors"),
        [INSPECT, FINETUNE, EVAL],
        "weights in `pytorch_model.bin`, a pickle, which can run code",
    ),
    "pickle as adapter": (
        lambda p: pickled(p / "lora", "adapter_model.bin", "adapter_model.safetensors"),
        [ADAPTER],
        "weights in `adapter_model.bin`, a pickle, which can run code",
    ),
    "link to weights elsewhere": (
        lambda p: elsewhere(p / "base/model.safetensors"),
        [CONVERT],
        "`model.safetensors` of `base` is a link to .*elsewhere`, outside the folder",
    ),
    "link to a tokenizer elsewhere": (
        lambda p: elsewhere(p / "attnres/tokenizer.json"),
        [FINETUNE, CARD, PUSH],
        "`tokenizer.json` of .* is a link to .*, outside the folder",
    ),
    "link to a config elsewhere": (
        lambda p: elsewhere(p / "attnres/config.json"),
        [FINETUNE, CARD],
        "`config.json` of .* is a link to .*, outside the folder",
    ),
    "link to nothing": (
        lambda p: link(p / "attnres/chat_template.jinja", "nowhere"),
        [INSPECT, FINETUNE],
        "chat_template.jinja` is a broken link",
    ),
    "adapter of an absurd rank": (
        lambda p: edit(p / "lora/adapter_config.json", r=10**6),
        [ADAPTER],
        "`r=1000000` is more than its tensors have, 4",
    ),
    "adapter with an absurd pattern": (
        lambda p: edit(p / "lora/adapter_config.json", rank_pattern={"q_proj": 10**6}),
        [ADAPTER],
        r"`rank_pattern\[q_proj\]=1000000` is more",
    ),
    "adapter cut off": (
        lambda p: (p / "lora/adapter_model.safetensors").write_bytes(b"\0" * 20),
        [ADAPTER],
        "adapter_model.safetensors` is truncated or not a safetensors file",
    ),
    "GGUF of billions of blocks": (
        lambda p: tampered_gguf(p / "tiny.gguf", b"llama.block_count", struct.pack("<I", 2**31)),
        [GGUF],
        "announces 2,147,483,648 blocks",
    ),
    "GGUF that is elsewhere": (
        lambda p: ((p / "ggufs").mkdir(), link(p / "ggufs/tiny.gguf", "../tiny.gguf")),
        [("convert", "ggufs", "out", "--no-verify", "--gguf-file", "tiny.gguf")],
        "`tiny.gguf` of `ggufs` is a link to .*, outside the folder",
    ),
    "GGUF of too many fields": (
        lambda p: (p / "tiny.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 2**62)),
        [GGUF],
        "announces 1 tensors and 4,611,686,018,427,387,904 fields",
    ),
    "GGUF with a list without end": (
        lambda p: (p / "tiny.gguf").write_bytes(
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**40)
        ),
        [GGUF],
        "announces 4,398,046,511,104 bytes, but there are fewer",
    ),
    "tags that are a number": (
        lambda p: (p / "attnres/README.md").write_text("---\ntags: 5\n---\n"),
        [CARD, PUSH],
        "README.md` cannot be read, mend or remove it: `tags: 5`",
    ),
    "metadata under a number": (
        lambda p: (p / "attnres/README.md").write_text("---\n5: a\n---\n"),
        [CARD, FINETUNE],
        "README.md` cannot be read, mend or remove it",
    ),
    "deep metadata": (
        lambda p: (p / "base/README.md").write_text(f"---\na: {DEEP}\n---\n"),
        [CONVERT],
        "README.md` cannot be read, mend or remove it",
    ),
    "report of nonsense": (
        lambda p: (p / "attnres/conversion_report.json").write_text('{"verification": 5, "versions": []}'),
        [CARD],
        "conversion_report.json` is damaged .*Remove it",
    ),
    "depth.json of nonsense": (
        lambda p: ((p / "attnres/depth").mkdir(), (p / "attnres/depth/depth.json").write_text('{"models": [5]}')),
        [CARD],
        "depth.json` is damaged",
    ),
    "number as a field": (
        lambda p: (p / "run.yaml").write_text("5: a\nmodel: attnres\n"),
        [FINETUNE],
        "`5` is not the name of a field",
    ),
    "deep run": (lambda p: (p / "run.yaml").write_text(f"model: {DEEP}"), [FINETUNE], "nested too deeply"),
    "value of broken YAML": (lambda p: None, [(*FINETUNE, "lora_rank=[")], "`lora_rank=.` is not valid YAML"),
    "empty rows": (
        lambda p: (p / "text.jsonl").write_text(""),
        [FINETUNE, PRETRAIN],
        "text.jsonl` cannot be read as json: ",
    ),
    "template without end": (
        lambda p: (p / "attnres/chat_template.jinja").write_text(LOOP),
        [(*FINETUNE, "dataset=chat.jsonl")],
        "The chat template takes more than 0.5 seconds",
    ),
    "template that is no template": (
        lambda p: (p / "attnres/chat_template.jinja").write_text("{{ messages[0].a.b.c() }}"),
        [(*FINETUNE, "dataset=chat.jsonl")],
        "The chat template fails on a chat",
    ),
}
CASES = [(name, command) for name, (_, commands, _) in HOSTILE.items() for command in commands]


@pytest.mark.timeout(300)
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name, command", CASES, ids=[f"{name}, {command[0]}" for name, command in CASES])
def test_hostile_files(name, command, place, run_attnres, monkeypatch, capsys):
    """And nothing is written."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(rows, "SECONDS_OF_TEMPLATE", 0.5)
    run = {"model": "attnres", "dataset": "text.jsonl", "eval_dataset": "held_out.jsonl", "output_dir": "out"}
    run |= {"max_length": 8, "max_steps": 1, "use_cpu": True, "report_to": "none"}
    for name_of_run in ("run.yaml", "pretrain.yaml"):
        (place / name_of_run).write_text(json.dumps(run))
    damage, _, message = HOSTILE[name]
    damage(place)
    before = sorted(place.rglob("*"))
    assert run_attnres(*command) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and len(errors[0]) < 1200
    assert re.search(message, errors[0]), errors[0]
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "damage, message",
    [
        (wider, "size mismatch"),
        (lambda folder: edit(folder / "adapter_config.json", peft_type="NONSENSE"), "NONSENSE"),
        (lambda folder: edit(folder / "adapter_config.json", target_modules=["c_attn"]), "No modules were targeted"),
    ],
    ids=["of a wider base", "of an unknown kind", "of a base with other layers"],
)
def test_adapters_that_do_not_fit(damage, message, place):
    damage(place / "lora")
    model = EvalModel(str(place / "attnres"), peft=str(place / "lora")).resolved()
    with pytest.raises(ValueError, match=f"`.*lora` does not fit `.*attnres`: .*{message}") as caught:
        load_model(model, EvalOptions(), "cpu", 1)
    assert len(str(caught.value)) < 1200 and "\n" not in str(caught.value)


@pytest.mark.parametrize("adapter", ["lora", "queries"])
def test_adapters_that_are_read(adapter, place):
    """Adapters that PEFT wrote, one of them without low-rank updates, whose rank is PEFT's default."""
    model = EvalModel(str(place / "attnres"), peft=str(place / adapter)).resolved()
    assert load_model(model, EvalOptions(), "cpu", 1).model.peft_config


def test_links_that_are_followed(place, run_attnres, monkeypatch, capsys):
    """Within the folder, of a folder, in the Hub's cache, and out of the folder where files are only read."""
    monkeypatch.chdir(place)
    snapshot = place / "hub/models--someone--x/snapshots/abc"
    snapshot.mkdir(parents=True)
    (place / "hub/models--someone--x/blobs").mkdir()
    for path in (place / "base").iterdir():
        path.rename(place / f"hub/models--someone--x/blobs/{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    (place / "linked").symlink_to(snapshot)
    assert run_attnres("convert", "linked", "out", "--no-verify") == 0
    (place / "attnres/tokenizer.json").rename(place / "attnres/real.json")
    (place / "attnres/tokenizer.json").symlink_to("real.json")
    assert run_attnres("push", "attnres", "someone/x", "--dry-run") == 0
    elsewhere(place / "attnres/model.safetensors")
    assert run_attnres(*INSPECT[:3], "read", "--max-tokens", "20") == 0
    assert run_attnres("push", "attnres", "someone/x", "--dry-run") == 1
    # a cache that leads out of itself
    blob = next((place / "hub/models--someone--x/blobs").glob("model.safetensors*"))
    elsewhere(blob)
    capsys.readouterr()
    assert run_attnres("convert", "linked", "out2", "--no-verify") == 1
    assert ", outside the folder" in capsys.readouterr().err


def test_links_out_are_refused_where_loaders_ask_for_them():
    """A tokenizer that is saved anew would publish what a link under the name of its vocabulary leads to."""
    found = set()
    for path in Path(transformers.__file__).parent.rglob("tokenization*.py"):
        for names in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", path.read_text(), re.DOTALL):
            found |= set(re.findall(r": *\"([^\"]+)\"", names))
    assert {"emoji.json", "vocab.txt", "merges.txt", "tokenizer.json"} <= found
    loaded = PARSED | TOKENIZER_FILES | {name for name in found if Path(name).suffix in OPENED}
    loaded |= {name for name in COMPANIONS[""] if "*" not in name and Path(name).suffix in OPENED}
    of_ours = {"modules.json", *REPORT_NAMES}  # which no loader opens, and which are looked at where they are copied
    assert {name for name in loaded - of_ours if not is_asked_for(name)} == set()
    assert all(map(is_asked_for, ("model-00001-of-00002.safetensors", "x.model", "modeling_x.py")))
    assert not any(map(is_asked_for, ("key.json", "credentials.json", "notes.txt", "setup.py")))


def test_dollars_in_a_name(place, run_attnres, monkeypatch):
    """matplotlib takes what is between two for a formula."""
    monkeypatch.chdir(place)
    (place / "attnres").rename(place / r"a$\frac$b")
    assert run_attnres("inspect", r"a$\frac$b", "-o", "out", "--max-tokens", "20") == 0
    picture = (place / "out/weights.svg").read_text()
    assert "frac" in picture


WITNESS = "open({!r}, 'w')"


@pytest.mark.parametrize("command", [CONVERT, INSPECT, FINETUNE, PRETRAIN, PROBE], ids=lambda command: command[0])
def test_code_of_strangers_is_not_offered_to_be_run(command, place, run_attnres, monkeypatch, capsys):
    """Whoever presses `y` by habit has not decided anything."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for name in ("base", "attnres"):
        (place / name / "mine.py").write_text(WITNESS.format(str(place / "witness")))
        auto_map = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M", "AutoTokenizer": ["mine.T", None]}
        edit(place / name / "config.json", model_type="mine", auto_map=auto_map)
        edit(place / name / "tokenizer_config.json", tokenizer_class="Mine", auto_map=auto_map)
    run = {"model": "attnres", "dataset": "text.jsonl", "output_dir": "out", "max_steps": 1}
    for name in ("run.yaml", "pretrain.yaml"):
        (place / name).write_text(json.dumps(run))
    assert run_attnres(*command) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and ("code of its own" in errors[0] or "not supported" in errors[0]), errors
    assert not (place / "witness").exists()


# What reads folders that it has made itself
OURS = ("studies", "tests", "docs")


def test_every_loader_is_told_what_it_may_do():
    """Nothing in the package loads a checkpoint without `trust_remote_code`, or reads a pickle."""
    untold = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        if parts[0] in OURS or parts[0].startswith(".") or parts[0] in ("build", "site"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            names = {keyword.arg for keyword in node.keywords}
            if called.startswith(("Auto", "checkpoint.auto_class.")) and node.func.attr == "from_pretrained":
                if not names & {"trust_remote_code", None}:
                    untold.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
            if called in ("torch.load", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load"):
                untold.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
    assert untold == []
