# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Rows of a data set, text or chats, and the token ids and labels that come of each."""

import contextlib
import functools
import re
import signal
import threading
from collections.abc import Callable, Iterator
from os.path import commonprefix
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase

from ..utils.untrusted import in_one_line
from .location import check_rows


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
# A chat template is a program of whoever made the checkpoint; one of a thousand turns takes milliseconds
SECONDS_OF_TEMPLATE = 10.0
# In place of an answer, to see what a chat template puts around it: a character for private use
STAND_IN = "\ue000"


def load_rows(source: str, config: str | None, split: str, streaming: bool = False) -> Dataset | IterableDataset:
    """A data set of the Hub, a file, or a folder of files of one kind.

    Args:
        streaming: read a data set of the Hub as it is iterated over, without downloading all of it.

    Raises:
        ValueError: if it is not there, or has no such split.
    """
    check_rows(source)
    path = Path(source).expanduser()
    if path.is_file():
        _check_whole(source, config, split)
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
        _check_whole(source, config, split)
        return _load_files(files)
    try:
        if (path / "dataset_dict.json").exists():
            return DatasetDict.load_from_disk(str(path))[split]
        return load_dataset(source, config, split=split, streaming=streaming)
    except Exception as error:  # of many kinds, and the way out is the same
        raise ValueError(
            f"The data set `{source}`{f' ({config})' if config else ''} has no split `{split}` to load:"
            f" {in_one_line(error)}"
        ) from error


def _check_whole(source: str, config: str | None, split: str):
    """Files have no parts: to ask for one and get all of them would be to evaluate on what was trained on."""
    for name, value in (("split", split if split != "train" else None), ("configuration", config)):
        if value is not None:
            raise ValueError(
                f"`{source}` is a file or a folder of files, which has no {name} `{value}`: only data sets on the Hub"
                " have one. Name another file."
            )


def _load_files(files: list[Path]) -> Dataset:
    if files[0].suffix not in LOADERS:
        raise ValueError(f"`{files[0]}` is not one of {', '.join(LOADERS)}.")
    loader, kwargs = LOADERS[files[0].suffix]
    try:
        return load_dataset(loader, data_files=[str(file) for file in files], split="train", **kwargs)
    except Exception as error:
        reason = error.__cause__ or error
        raise ValueError(f"`{files[0]}` cannot be read as {loader}: {in_one_line(reason)}") from error


def kind_of_rows(columns: list[str], text_column: str | None = None) -> str:
    """`text`, `chat` or `completion`, by the columns.

    Raises:
        ValueError: if it is none of them.
    """
    if text_column is not None and text_column not in columns:
        raise ValueError(f"`text_column={text_column!r}` is not one of the columns {', '.join(columns)}.")
    if text_column is None and "messages" in columns:
        return "chat"
    if text_column is None and {"prompt", "completion"} <= set(columns):
        return "completion"
    if text_column is not None or "text" in columns:
        return "text"
    raise ValueError(
        f"The data has the columns {', '.join(columns)}. It needs `text`, `messages`, or `prompt` and"
        " `completion`. `text_column` names another column."
    )


def row_tokenizer(
    columns: list[str], tokenizer: PreTrainedTokenizerBase, text_column: str | None = None
) -> Callable[[dict[str, Any]], dict[str, list[int]]]:
    """What makes token ids and labels (`input_ids`, `labels`) of a row with these columns.

    A row is a chat (`messages`, through the tokenizer's chat template; loss on the assistant's turns), a `prompt` with
    a `completion` (loss on the completion), or text (`text` or `text_column`). Text and completions end with the
    end-of-sequence token. Of an empty row comes nothing.

    Raises:
        ValueError: if there is no such column, or, when it is called, for a row that is something else.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    column = text_column or "text"

    def of_text(row: dict[str, Any]) -> dict[str, list[int]]:
        text = text_in(row, column)
        ids = tokenizer(text).input_ids if text.strip() else []
        ids = ids if ids[-1:] == end or not ids else ids + end
        return {"input_ids": ids, "labels": ids}

    def of_completion(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt, completion = text_in(row, "prompt"), text_in(row, "completion")
        if not completion.strip():
            return {"input_ids": [], "labels": []}
        prompt = tokenizer(prompt).input_ids
        prompt = prompt[:-1] if end and prompt[-1:] == end else prompt
        completion = tokenizer(completion, add_special_tokens=False).input_ids + end
        return {"input_ids": prompt + completion, "labels": [IGNORED_LABEL] * len(prompt) + completion}

    kind = kind_of_rows(columns, text_column)
    if kind == "chat" and tokenizer.chat_template is None:
        raise ValueError("The data has `messages`, but the tokenizer has no chat template.")
    of_chat: Callable[[dict[str, Any]], dict[str, list[int]]] = functools.partial(tokenize_chat, tokenizer=tokenizer)
    return {"chat": of_chat, "completion": of_completion, "text": of_text}[kind]


def text_in(row: dict[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        missing = row[column] is None
        found = "nothing" if missing else f"{row[column]!r:.60}, which is not text,"
        raise ValueError(f"A row of the data has {found} in `{column}`.")
    return row[column]


def tokenize_chat(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Token ids and labels of a chat: what the assistant says is learned, and that a turn of it ends there."""
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and m.get("role") for m in messages):
        raise ValueError(
            f"A row of the data has {messages!r:.60} in `messages`, which is not a list of `role` and `content`."
        )
    if not messages:
        return {"input_ids": [], "labels": []}
    # A column of dicts gives each the keys of all
    messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        if re.search(r"\{%[-+]?\s*generation\b", tokenizer.get_chat_template()):
            with template_time_limit():
                encoded = tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
            ids, answers = encoded["input_ids"], encoded["assistant_masks"]
        else:
            text, spans = find_answers(messages, functools.partial(render_chat, tokenizer))
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids = encoded["input_ids"]
            answers = [any(a <= start and stop <= b for a, b in spans) for start, stop in encoded["offset_mapping"]]
    except ValueError:
        raise
    except Exception as error:  # of many kinds, as a template is a program
        raise ValueError(f"The chat template fails on a chat: {in_one_line(error)}.") from error
    return {"input_ids": ids, "labels": [i if answer else IGNORED_LABEL for i, answer in zip(ids, answers)]}


@contextlib.contextmanager
def template_time_limit() -> Iterator[None]:
    """Inside, a chat template that does not come to an end is stopped, in the main thread, which signals go to.

    Raises:
        ValueError: if it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise ValueError(
            f"The chat template takes more than {SECONDS_OF_TEMPLATE:g} seconds for one chat: it may never"
            " end. Replace chat_template.jinja in the folder of the checkpoint."
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_TEMPLATE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **kwargs: Any) -> str:
    """A chat as the tokenizer's chat template has it, within a time."""
    with template_time_limit():
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def find_answers(messages: list[dict], render: Callable[..., str]) -> tuple[str, list[tuple[int, int]]]:
    """A rendered chat, and from where to where in it the assistant's turns go.

    A turn begins where the chat in front of it, with the generation prompt, is no longer the same, and ends where the
    chat up to it ends. Templates that render a turn differently when others follow (Qwen3's leaves out the thoughts)
    are asked with another answer in its place: what is behind that one, is behind the turn.

    Raises:
        ValueError: if the turns cannot be told from the rest.
    """
    chat, spans = render(messages), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, up_to = render(messages[:i]) if i else "", render(messages[: i + 1])
        other = {**message, "content": STAND_IN}
        prompt = render(messages[:i], add_generation_prompt=True) if i else render([other])
        start = len(commonprefix([prompt, chat]))
        if chat.startswith(up_to):
            end = len(up_to)
        else:
            behind = render([*messages[:i], other, *messages[i + 1 :]]).rpartition(STAND_IN)[2]
            closing = render([*messages[:i], other]).rpartition(STAND_IN)[2]
            found = chat.endswith(behind) and behind.startswith(closing) and not message.get("tool_calls")
            end = len(chat) - len(behind) + len(closing) if found else 0
        if not chat.startswith(before) or start < len(before) or end <= start:
            raise ValueError(
                f"The output of the chat template does not show where message {i} of a chat, an answer to learn,"
                " begins and ends: put {% generation %} and {% endgeneration %} around the assistant's turns in"
                " the chat template."
            )
        spans.append((start, end))
    return chat, spans
