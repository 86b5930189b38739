# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Text and chats from a `datasets` source to rows of token ids with labels."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase


# By suffix: the loader of `datasets`, and what it needs
LOADERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
    ".md": ("text", {"sample_by": "document"}),
    ".py": ("text", {"sample_by": "document"}),
}
IGNORED_LABEL = -100


def load(source: str, config: str | None, split: str, streaming: bool = False) -> Dataset | IterableDataset:
    """A data set of the Hub, a file, or a folder of files of one kind.

    Args:
        streaming: read a data set of the Hub as it is iterated over, without downloading all of it.

    Raises:
        ValueError: if it is not there, or has no such split.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _load_files([path])
    if path.is_dir() and not (path / "README.md").exists() and not (path / "dataset_dict.json").exists():
        files = sorted(file for file in path.rglob("*") if file.suffix in LOADERS and file.is_file())
        if not files:
            raise ValueError(f"`{source}` holds none of {', '.join(LOADERS)}.")
        kinds = {LOADERS[file.suffix][0] for file in files}
        if len(kinds) > 1:
            raise ValueError(
                f"`{source}` holds files of several kinds ({', '.join(sorted(kinds))}): take one of them."
            )
        return _load_files(files)
    if not path.exists() and (path.suffix in LOADERS or source.startswith((".", "/", "~"))):
        raise ValueError(f"There is no file or folder `{source}`.")
    try:
        if (path / "dataset_dict.json").exists():
            return DatasetDict.load_from_disk(str(path))[split]
        return load_dataset(source, config, split=split, streaming=streaming)
    except Exception as error:  # of many kinds, and the way out is the same
        raise ValueError(
            f"The data set `{source}`{f' ({config})' if config else ''} has no split `{split}` to load:"
            f" {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _load_files(files: list[Path]) -> Dataset:
    if files[0].suffix not in LOADERS:
        raise ValueError(f"`{files[0]}` is none of {', '.join(LOADERS)}.")
    loader, kwargs = LOADERS[files[0].suffix]
    try:
        return load_dataset(loader, data_files=[str(file) for file in files], split="train", **kwargs)
    except Exception as error:
        reason = error.__cause__ or error
        raise ValueError(f"`{files[0]}` cannot be read as {loader}: {str(reason).splitlines()[0]}") from error


def row_tokenizer(
    columns: list[str], tokenizer: PreTrainedTokenizerBase, text_column: str | None = None
) -> Callable[[dict[str, Any]], dict[str, list[int]]]:
    """What makes token ids and labels (`input_ids`, `labels`) of a row with these columns.

    A row is a chat (`messages`, through the tokenizer's chat template; loss on the answers where the template marks
    them, on everything otherwise), a `prompt` with a `completion` (loss on the completion), or text (`text` or
    `text_column`). Text and completions end with the end-of-sequence token.

    Raises:
        ValueError: if there is no such column.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if text_column is not None and text_column not in columns:
        raise ValueError(f"`text_column={text_column!r}` is none of the columns {', '.join(columns)}.")
    column = text_column or ("text" if "text" in columns else None)

    def of_text(row: dict[str, Any]) -> dict[str, list[int]]:
        ids = tokenizer(row[column]).input_ids
        ids = ids if ids[-1:] == end else ids + end
        return {"input_ids": ids, "labels": ids}

    def of_completion(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt = tokenizer(row["prompt"]).input_ids
        prompt = prompt[:-1] if end and prompt[-1:] == end else prompt
        completion = tokenizer(row["completion"], add_special_tokens=False).input_ids + end
        return {"input_ids": prompt + completion, "labels": [IGNORED_LABEL] * len(prompt) + completion}

    marked = "{% generation" in (tokenizer.chat_template or "") or "{%- generation" in (tokenizer.chat_template or "")

    def of_chat(row: dict[str, Any]) -> dict[str, list[int]]:
        encoded = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
        )
        ids, mask = encoded["input_ids"], encoded.get("assistant_masks") if marked else None
        return {
            "input_ids": ids,
            "labels": ids if mask is None else [i if answer else IGNORED_LABEL for i, answer in zip(ids, mask)],
        }

    if text_column is None and "messages" in columns:
        if tokenizer.chat_template is None:
            raise ValueError("The data has `messages`, but the tokenizer has no chat template.")
        return of_chat
    if text_column is None and {"prompt", "completion"} <= set(columns):
        return of_completion
    if column is not None:
        return of_text
    raise ValueError(
        f"The data has the columns {', '.join(columns)}: it takes `text`, `messages`, `prompt` with `completion`,"
        " or `text_column`."
    )


def tokenize(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, text_column: str | None = None) -> Dataset:
    """Token ids and labels of every row; see `row_tokenizer`."""
    columns = dataset.column_names
    of_row = row_tokenizer(columns, tokenizer, text_column)
    return dataset.map(of_row, remove_columns=columns, desc="Tokenizing")


def pack(dataset: Dataset, length: int) -> Dataset:
    """Every thousand rows in one, cut into rows of `length` tokens; what fills no row is left out."""

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain.from_iterable(rows)) for name, rows in batch.items()}
        starts = range(0, len(joined["input_ids"]) - length + 1, length)
        return {name: [ids[start : start + length] for start in starts] for name, ids in joined.items()}

    return dataset.map(cut, batched=True, desc="Packing")


def truncate(dataset: Dataset, length: int) -> Dataset:
    """Rows of at most `length` tokens; what is behind is left out, and so are rows without anything to learn."""
    dataset = dataset.map(lambda row: {name: ids[:length] for name, ids in row.items()}, desc="Truncating")
    return dataset.filter(lambda row: any(label != IGNORED_LABEL for label in row["labels"][1:]), desc="Filtering")
