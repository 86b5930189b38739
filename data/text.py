# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Text that is on every machine, windows of tokens, and a tokenizer trained on a text."""

import sysconfig
import zlib
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def read_sample() -> str:
    """The built-in text."""
    return resources.files(__package__).joinpath("sample.txt").read_text(encoding="utf-8")


def package_sources(package: str) -> dict[str, str]:
    """The modules of an installed package by name, sorted, without empty ones and tests."""
    root = Path(str(metadata.distribution(package).locate_file(package)))
    names = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    texts = {name.as_posix(): (root / name).read_text(encoding="utf-8") for name in names if "tests" not in name.parts}
    return {name: text for name, text in texts.items() if text}


def standard_library() -> tuple[list[str], list[str]]:
    """Sources of the standard library, tests and vendored packages left out: for training, and one in 20 held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "pydoc_data", "encodings"}
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skipped & set(name.parts):
            texts = held_out if zlib.crc32(name.as_posix().encode()) % 20 == 0 else train
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return train, held_out


def windows(tokenizer, texts: list[str], length: int) -> torch.Tensor:
    """The texts' tokens in one row after the other, `[windows, length]`; the rest that fills no window is dropped."""
    ids = [i for text in texts for i in [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
