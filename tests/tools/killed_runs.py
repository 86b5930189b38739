# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning runs killed with SIGKILL at random moments and started again, compared with one that was left alone.

    python tests/tools/killed_runs.py FOLDER [--kills 40] [--seed 0] [--cases NAME ...]

A run is started again until it is finished. Its weights have to be those of the uninterrupted run bit for bit, and
its held-out losses the same at the same steps. Every run is a process of its own, forked from one that has imported
what they need. `test_finetune.py` calls this with a few kills.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))


import torch
from safetensors.torch import load_file
from tiny_models import convert, tiny_base_model

from attnres.data.text import read_sample, train_tokenizer
from attnres.training import finetune


STEPS = {"max_steps": 6, "save_steps": 3, "eval_steps": 3}
EPOCHS = {"num_train_epochs": 2, "gradient_accumulation_steps": 3, "save_steps": 2, "eval_steps": 2}
CASES = {
    "queries-constant": {"mode": "queries", "lr_scheduler_type": "constant", **STEPS},
    "lora-cosine": {"mode": "lora", "lr_scheduler_type": "cosine", "lora_dropout": 0.1, **STEPS},
    "full-linear": {"mode": "full", "lr_scheduler_type": "linear", "warmup_steps": 2, **STEPS},
    # an epoch ends in a step of fewer batches than the others
    "full-constant-epochs": {"mode": "full", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2, **EPOCHS},
    # the evaluation behind the last checkpoint of an epoch is lost with the process
    "lora-epochs": {
        **{"mode": "lora", "lr_scheduler_type": "constant", "lora_dropout": 0.1, "num_train_epochs": 3},
        **{"eval_strategy": "epoch", "save_steps": 1},
    },
    "lora-stopped-early": {
        **{"mode": "lora", "lr_scheduler_type": "constant", "learning_rate": 0.3, "query_learning_rate": 0.3},
        **{"early_stopping_patience": 1, "max_steps": 20, "save_steps": 2, "eval_steps": 2, "save_total_limit": 1},
    },
    "full-plateau": {
        **{"mode": "full", "lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 8, "save_steps": 2},
        **{"eval_steps": 1, "save_total_limit": 2, "packing": False},
    },
    "queries-restarts": {
        **{"mode": "queries", "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        **{"max_steps": 7, "save_steps": 2, "eval_steps": 3, "logging_steps": 3},
    },
}


def make_model(folder: Path):
    """An AttnRes checkpoint with its tokenizer, and texts."""
    tokenizer = train_tokenizer([read_sample()] * 3, vocab_size=400)
    convert(tiny_base_model("qwen3", vocab_size=len(tokenizer)), 3).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    texts = [f"{number} and {number} is {2 * number}." for number in range(80)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(folder: Path, output: Path, case: dict, attempt: int) -> int:
    """Start a run in a process of its own; its id."""
    process = os.fork()
    if process:
        return process
    try:
        for stream in (sys.stdout, sys.stderr):
            log = os.open(output.with_name(f"{output.name}-{attempt}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, stream.fileno())
        shared = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "query_learning_rate": 1e-2}
        shared |= {"logging_steps": 1, "report_to": "none", "use_cpu": True, "max_length": 64, "disable_tqdm": True}
        paths = {name: str(folder / file) for name, file in (("model", "model"), ("dataset", "text.jsonl"))}
        finetune({**paths, **shared, **case, "output_dir": str(output)})
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def killed_within(process: int, seconds: float) -> bool:
    """Kill a process after a time; `False` if it was finished earlier, with exit code 0."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            assert status == 0, f"a run failed with status {status}; see the logs"
            return False
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def outcome(output: Path) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """Weights, and held-out losses by step."""
    (file,) = (output / "final").glob("*.safetensors")
    history = json.loads((output / "history.json").read_text())
    return load_file(file), [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]


def compare(output: Path, whole: Path, case: dict):
    (weights, losses), (expected_weights, expected_losses) = outcome(output), outcome(whole)
    assert weights.keys() == expected_weights.keys()
    different = [name for name in weights if not torch.equal(weights[name], expected_weights[name])]
    assert not different, f"{output}: other weights in {different}"
    if case.get("eval_strategy") == "epoch":  # one may be lost with the process, see `CASES`
        assert set(losses) <= set(expected_losses), f"{output}: {losses}, not {expected_losses}"
    else:
        assert losses == expected_losses, f"{output}: {losses}, not {expected_losses}"


def kill_runs(folder: Path, kills: int, seed: int, cases: list[str]) -> list[dict]:
    """Kill runs of these cases in turn; where each kill found them."""
    generator, found = random.Random(seed), []
    make_model(folder)
    durations = {}
    for name in cases:
        for attempt in ("cold", "whole"):  # the first one fills caches of the data
            start = time.monotonic()
            assert not killed_within(run(folder, folder / f"{name}-{attempt}", CASES[name], 0), 600)
            durations[name] = time.monotonic() - start
    number = 0
    while len(found) < kills:
        name = cases[number % len(cases)]
        output, attempt = folder / f"{name}-{number}", 0
        while killed_within(run(folder, output, CASES[name], attempt), generator.uniform(0, 1) * durations[name]):
            there = sorted((path.name for path in output.glob("[!l]*")), key=lambda name: (len(name), name))
            found.append({"case": name, "run": number, "attempt": attempt, "there": there})
            attempt += 1
            if (output / "final").exists():  # killed behind its last word
                break
            if len(found) >= kills or attempt == 4:
                assert not killed_within(run(folder, output, CASES[name], attempt), 600)
                break
        compare(output, folder / f"{name}-whole", CASES[name])
        shutil.rmtree(output)
        number += 1
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = kill_runs(arguments.folder.resolve(), arguments.kills, arguments.seed, arguments.cases)
    for kill in found:
        print(f"{kill['case']}, run {kill['run']}, attempt {kill['attempt']}: {', '.join(kill['there']) or 'nothing'}")
    print(f"{len(found)} kills, {len({kill['run'] for kill in found})} runs: all weights bit-identical")


if __name__ == "__main__":
    main()
