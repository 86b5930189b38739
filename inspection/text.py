# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What is read: a text, a file or a data set, a piece at a time, up to a number of tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..data.text import read_sample
from ..utils.untrusted import in_one_line


PIECE = 1 << 20  # characters of a file to tokenise at once


@dataclass(frozen=True)
class TextToRead:
    """What an inspection reads, and how much of it: keywords of [`inspect`].

    Attributes:
        text, file, dataset: what to read, in place of the built-in text. A data set is an id of the Hub, a file
            (JSONL, Parquet, text) or a folder of such files.
        dataset_config, split: of a data set on the Hub; by default its split `train`.
        max_tokens: how much to read.
        length: tokens of a window, or the context of the model if that is shorter.
    """

    text: str | None = None
    file: str | Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    split: str | None = None
    max_tokens: int = 10_000
    length: int = 512

    @property
    def name(self) -> str:
        """What to call it."""
        if self.dataset is not None:
            return f"`{self.dataset}`"
        if self.file is not None:
            return f"`{Path(self.file).name}`"
        return "the built-in text" if self.text is None else "the given text"

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
        """Token ids, text after text."""
        if self.dataset is not None:
            return tokens_of_dataset(self.dataset, self.dataset_config, self.split or "train", tokenizer)
        if self.file is not None:
            return tokens_of_text(pieces(Path(self.file)), tokenizer)
        return tokens_of_text([read_sample() if self.text is None else self.text], tokenizer)


def pieces(file: Path) -> Iterator[str]:
    """A UTF-8 text, a piece at a time."""
    try:
        with file.open(encoding="utf-8") as opened:
            yield from iter(lambda: opened.read(PIECE), "")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{file}` is not UTF-8 text: {error}.") from None


def read_windows(ids: Iterable[list[int]], max_tokens: int, length: int, source: str) -> torch.Tensor:
    """The first tokens, `[windows, length]`, without an incomplete last window. A short text is one short window.

    Args:
        ids: of text after text; no more of it is read than needed.
        source: what to call the text.

    Raises:
        ValueError: if there is nothing to read.
    """
    tokens = list(islice(chain.from_iterable(ids), max_tokens))
    if len(tokens) < 2:
        raise ValueError(f"{source} has {len(tokens)} tokens: there is nothing to read.")
    length = min(length, len(tokens))
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def tokens_of_text(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Token ids of one text after the other."""
    return (tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts)


def tokens_of_dataset(
    dataset: str, config: str | None, split: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    """Token ids of one row after the other, of the same kinds of data that models are fine-tuned on.

    Raises:
        ValueError: if it is not there, empty, or has columns of no such kind.
    """
    from ..data.rows import load_rows, row_tokenizer

    rows = iter(load_rows(dataset, config, split, streaming=True))
    try:
        first = next(rows, None)
    except Exception as error:  # of many kinds, when a stream starts
        raise ValueError(f"`{dataset}` cannot be read: {in_one_line(error.__cause__ or error)}") from error
    if first is None:
        raise ValueError(f"`{dataset}` is empty: there is nothing to read.")
    of_row = row_tokenizer(list(first), tokenizer)
    return (of_row(row)["input_ids"] for row in chain([first], rows))
