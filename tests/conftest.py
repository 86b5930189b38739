"""Settings that hold for every test, before transformers is imported."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tiny_models import TINY


@pytest.fixture
def input_ids():
    return torch.randint(3, TINY["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(0))
