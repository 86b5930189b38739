# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for a model from scratch, trained on the text of data sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from datasets import Dataset

from ..checkpoints.checkpoint import load_tokenizer
from ..data import text
from ..data.rows import load_rows, text_in
from ..utils.files import atomic_folder, check_destination


# How many texts show how long tokens are
SAMPLE = 1000


@dataclass(frozen=True)
class TrainedTokenizer:
    """Where a tokenizer is, how many tokens it has, and how many bytes of UTF-8 text a token stands for on average."""

    folder: Path
    vocab_size: int
    bytes_per_token: float


def train_tokenizer(
    sources: list[str],
    output: str | Path,
    vocab_size: int = 32_000,
    like: str | None = None,
    text_column: str = "text",
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer and write it to a new folder.

    Args:
        sources: data sets as in `PretrainArguments.dataset`.
        vocab_size: the largest number of tokens. Short texts give fewer.
        like: folder or Hub id of a tokenizer whose rules and special tokens to keep; its tokens are replaced.
        text_column: where the text is.

    Raises:
        ValueError: if there is no text, or the folder is not empty.
    """
    if not sources:
        raise ValueError("`sources=[]` should name at least one data set.")
    for source in sources:
        path = check_destination(output, source)
    data = [load_rows(source, None, "train") for source in sources]
    for source, rows in zip(sources, data):
        if text_column not in rows.column_names:
            raise ValueError(
                f"`{source}` has no column `{text_column}`, but {', '.join(rows.column_names)}: name the one with the"
                " text with `--text-column`."
            )
    if not any(found.strip() for found in texts_of(data, text_column)):
        raise ValueError(f"There is no text in {', '.join(f'`{source}`' for source in sources)}.")
    texts = texts_of(data, text_column)
    if like is None:
        tokenizer = text.train_tokenizer(texts, vocab_size)
    else:
        tokenizer = load_tokenizer(like).train_new_from_iterator(texts, vocab_size, show_progress=False)
    with atomic_folder(path) as folder:
        tokenizer.save_pretrained(folder)
    sample = list(islice(filter(str.strip, texts_of(data, text_column)), SAMPLE))
    num_tokens = sum(len(ids) for ids in tokenizer(sample, add_special_tokens=False).input_ids)
    num_bytes = sum(len(sampled.encode()) for sampled in sample)
    return TrainedTokenizer(path, len(tokenizer), num_bytes / num_tokens)


def texts_of(data: list[Dataset], column: str) -> Iterator[str]:
    return (text_in(row, column) for row in chain(*data))
