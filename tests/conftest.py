"""Settings that hold for every test, before transformers is imported."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


if not torch.cuda.is_available():  # read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tiny_models import TINY

from attnres.cli import main


@pytest.fixture
def input_ids():
    return torch.randint(3, TINY["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def run_attnres(monkeypatch):
    """The `attnres` program in this process, `main` included: arguments in, exit code out."""

    def run(*args) -> int:
        monkeypatch.setattr("sys.argv", ["attnres", *map(str, args)])
        try:
            main()
        except SystemExit as exit:
            return exit.code or 0
        return 0

    return run
