# SPDX-License-Identifier: Apache-2.0
"""A run that is started again comes to the same weights, or is refused: damaged checkpoints, other rows, another base,
two runs at once, and no room on the disk. Kills are in `killed_runs.py`."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from tiny_models import convert, tiny_base_model

from attnres.data.text import read_sample, train_tokenizer
from attnres.training import AttnResTrainer, finetune, pretrain


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, rows, a LoRA run as it was stopped between its 4th and its 6th step, and the weights of a whole one."""
    folder = tmp_path_factory.mktemp("resuming")
    tokenizer = train_tokenizer([read_sample()], vocab_size=300)
    convert(tiny_base_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=2), 2).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    write_rows(folder / "text.jsonl", range(60))
    finetune(fields(folder, output_dir=str(folder / "whole")))
    with pytest.MonkeyPatch.context() as patch:
        step = AttnResTrainer.training_step

        def stops(self, *args, **kwargs):
            if self.state.global_step == 5:
                raise KeyboardInterrupt
            return step(self, *args, **kwargs)

        patch.setattr(AttnResTrainer, "training_step", stops)
        with pytest.raises(KeyboardInterrupt):
            finetune(fields(folder))
    assert steps(folder / "out") == [2, 4]
    shutil.copytree(folder / "out", folder / "stopped")
    return folder


@pytest.fixture
def run(made):
    """The folder with the run as it was stopped."""
    shutil.rmtree(made / "out", ignore_errors=True)
    shutil.copytree(made / "stopped", made / "out")
    return made


def write_rows(path: Path, numbers):
    path.write_text("".join(json.dumps({"text": f"{n} and {n} is {2 * n}, and not {3 * n}."}) + "\n" for n in numbers))


def fields(folder: Path, **kwargs) -> dict:
    return {
        **{"model": str(folder / "m"), "dataset": str(folder / "text.jsonl"), "output_dir": str(folder / "out")},
        **{"mode": "lora", "max_length": 32, "max_steps": 6, "save_steps": 2, "eval_steps": 6, "learning_rate": 1e-2},
        **{
            "query_learning_rate": 1e-2,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "lora_dropout": 0.1,
            **kwargs,
        },
    }


def steps(output: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*"))


def weights(output: Path) -> dict[str, bytes]:
    (file,) = (output / "final").glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip(path: Path):
    """One bit, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "no optimizer": lambda last: (last / "optimizer.pt").unlink(),
    "no scheduler": lambda last: (last / "scheduler.pt").unlink(),
    "a bit of the weights": lambda last: flip(last / "adapter_model.safetensors"),
    "a bit of the optimizer": lambda last: flip(last / "optimizer.pt"),
    "half a state": lambda last: (last / "rng_state.pth").write_bytes((last / "rng_state.pth").read_bytes()[:99]),
    "another step": lambda last: (last / "trainer_state.json").write_text(
        (last / "trainer_state.json").read_text().replace('"global_step": 4', '"global_step": 3')
    ),
    "a manifest of nonsense": lambda last: (last / "files.json").write_text("[]"),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage, run, capsys):
    """The run goes on from the one before it, and its weights are those of the run that was left alone."""
    DAMAGES[damage](run / "out/checkpoint-4")
    finetune(fields(run))
    assert weights(run / "out") == weights(run / "whole")
    said = capsys.readouterr().out
    assert "checkpoint-4 is damaged: " in said and "The run continues from checkpoint-2." in said
    assert (run / "out/damaged-checkpoint-4").is_dir() and steps(run / "out") == [2, 4, 6]


@pytest.mark.slow
def test_no_whole_checkpoint(run, capsys):
    for step in (2, 4):
        flip(run / f"out/checkpoint-{step}/optimizer.pt")
    finetune(fields(run))
    assert weights(run / "out") == weights(run / "whole")
    assert capsys.readouterr().out.count("The run starts over.") == 2


@pytest.mark.slow
def test_an_unharmed_run_goes_on(run, capsys):
    finetune(fields(run))
    assert weights(run / "out") == weights(run / "whole") and "is damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("other", ["rows", "base"])
def test_other_rows_and_another_base_are_refused(other, run):
    """The folder of the run stays as it was."""
    changed = run / ("text.jsonl" if other == "rows" else "m/model.safetensors")
    kept, before = changed.read_bytes(), contents(run / "out")
    try:
        if other == "rows":
            write_rows(changed, [*range(59), 61])
        else:
            loaded = load_file(changed)
            name = "model.layers.1.mlp.up_proj.weight"
            save_file({**loaded, name: loaded[name] * 1.01}, changed, metadata={"format": "pt"})
        message = "other rows to train on" if other == "rows" else "a model with other files"
        with pytest.raises(ValueError, match=f"holds an unfinished run that began with {message} and would come to"):
            finetune(fields(run))
    finally:
        changed.write_bytes(kept)
    assert contents(run / "out") == before


def test_pretraining_on_another_row_is_refused(run, monkeypatch):
    """Whichever of many it is."""
    kept = (run / "text.jsonl").read_bytes()
    write_rows(run / "text.jsonl", range(300))
    config = {name: value for name, value in fields(run, max_steps=4).items() if name not in ("lora_dropout", "mode")}
    config |= {"output_dir": str(run / "pretrained"), "eval_documents": 2}
    step = AttnResTrainer.training_step
    try:
        with monkeypatch.context() as patch:
            patch.setattr(
                AttnResTrainer,
                "training_step",
                lambda self, *args: sys.exit() if self.state.global_step == 3 else step(self, *args),
            )
            with pytest.raises(SystemExit):
                pretrain(config)
        write_rows(run / "text.jsonl", [*range(101), 1000, *range(102, 300)])
        with pytest.raises(ValueError, match="other rows to train on"):
            pretrain(config)
        write_rows(run / "text.jsonl", range(300))
        pretrain(config)
    finally:
        (run / "text.jsonl").write_bytes(kept)


def start(folder: Path, command: str, config: dict, limit: int | None = None) -> subprocess.Popen:
    """The program in a process of its own.

    Args:
        limit: bytes of the largest file that it may write.
    """
    (folder / f"{command}.yaml").write_text(yaml.safe_dump(config))

    def set_limit():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "attnres", command, str(folder / f"{command}.yaml")],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=set_limit,
    )


def errors_of(process: subprocess.Popen) -> list[str]:
    _, errors = process.communicate(timeout=600)
    assert "Traceback" not in errors, errors
    return [line for line in errors.splitlines() if line.startswith("Error: ")]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["finetune", "pretrain"])
def test_two_runs_in_one_folder(command, made, tmp_path):
    config = fields(made, output_dir=str(tmp_path / "out"), max_steps=100_000, save_steps=50_000, eval_steps=50_000)
    if command == "pretrain":
        config = {n: v for n, v in config.items() if n not in ("lora_dropout", "mode")} | {"eval_documents": 2}
    first = start(tmp_path, command, config)
    try:
        while not (tmp_path / f"out/{command}.yaml").exists():
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.1)
        second = start(tmp_path, command, config)
        (error,) = errors_of(second)
        assert second.returncode == 1 and "Another run is writing" in error
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("mode, limit", [("full", 100_000), ("lora", 30_000)])
def test_no_room_for_a_checkpoint(mode, limit, made, tmp_path):
    """One line, nothing half-written, and with room the run goes on to the same weights."""
    finetune(fields(made, output_dir=str(tmp_path / "whole"), mode=mode))  # and its rows are in the cache
    config = fields(made, output_dir=str(tmp_path / "out"), mode=mode)
    process = start(tmp_path, "finetune", config, limit)
    (error,) = errors_of(process)
    assert process.returncode == 1 and "cannot be written: " in error and "it resumes from its last complete" in error
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"finetune.yaml", ".lock"}
    finetune(config)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
