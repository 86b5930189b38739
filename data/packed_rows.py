# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Rows to pretrain on: documents one behind another, cut wherever a row is full. Where it stands can be kept."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset
from datasets import IterableDataset as StreamedDataset
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from .rows import IGNORED_LABEL, row_tokenizer


# The key of a row under which it says where the next one begins
POSITION = "next_position"
# The rows at the ends of so many parts of a data set tell whether it has changed
SAMPLED = 64


class PackedStream(IterableDataset):
    """Rows of exactly `length` tokens, without end: behind the last document the next epoch begins.

    A row has `input_ids` and `labels`, `[length]`, and `next_position`: the epoch, the number of the document in it
    and the token of that document where the next row begins. If documents are kept apart, `position_ids` start again
    with each, and its first token has no label.

    Args:
        documents: rows of text, chats or completions, see `row_tokenizer`. Those of a `datasets.IterableDataset` come
            in its order, others in one that is drawn anew for every epoch.
        seed: of that order.
        apart: whether documents in one row are kept apart.
    """

    def __init__(
        self,
        documents: Dataset | StreamedDataset,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        text_column: str | None = None,
        seed: int = 0,
        apart: bool = True,
    ):
        columns = documents.column_names or list(next(iter(documents), {}))
        used = {text_column, "text", "messages", "prompt", "completion"}
        self.columns = [name for name in columns if name in used]
        self.tokenize = row_tokenizer(columns, tokenizer, text_column)
        self.documents, self.length, self.seed, self.apart = documents, length, seed, apart
        self.start = (0, 0, 0)
        # Of a streamed data set: by epoch and number of a document, what finds it again
        self._places: dict[tuple[int, int], dict[str, Any]] = {}

    @functools.cached_property
    def key(self) -> list[int] | None:
        """What tells a data set that is not streamed from another: how many rows it has, and a hash of some of them.

        The fingerprint of `datasets` is no such key: it changes when the cache is made anew.
        """
        if not isinstance(self.documents, Dataset):
            return None
        count = len(self.documents)
        spread = sorted({i * (count - 1) // SAMPLED for i in range(SAMPLED + 1)})
        rows = self.documents.select_columns(self.columns)[spread]
        return [count, xxhash.xxh3_64_intdigest(repr(rows).encode("utf-8", "surrogatepass"))]

    def state_at(self, position: tuple[int, int, int]) -> dict[str, Any]:
        """What `go_on_at` needs to begin a row there, as JSON has it."""
        epoch, number, _ = position
        return {"position": list(position), "place": self._places.get((epoch, number)), "key": self.key}

    def forget_before(self, position: tuple[int, int, int]):
        """Drop what finds earlier documents of a streamed data set again. What finds the start again is kept."""
        epoch, number, _ = position
        kept = {self.start[:2]} | {key for key in self._places if key >= (epoch, number)}
        self._places = {key: place for key, place in self._places.items() if key in kept}

    def go_on_at(self, state: dict[str, Any]):
        """Begin where a state was taken.

        Raises:
            ValueError: if the data has changed since, as the rows would no longer be the same.
        """
        before = state.get("key")  # older checkpoints have none
        if before is not None and before != self.key:
            count = None if self.key is None else self.key[0]
            reason = "some rows differ" if count == before[0] else f"it had {before[0]} rows and has {count}"
            raise ValueError(
                f"The data to train on has changed since the checkpoint was saved: {reason}. Restore it, or name"
                " another `output_dir`."
            )
        epoch, number, token = state["position"]
        self.start = epoch, number, token
        if state["place"] is not None:
            self._places[epoch, number] = state["place"]

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        epoch, first, token = self.start
        while True:
            num_tokens = 0
            for number, document in self._epoch(epoch, first):
                ids, labels = document["input_ids"], document["labels"]
                num_tokens += len(ids)
                while token < len(ids):
                    end = min(len(ids), token + self.length - len(row["input_ids"]))
                    row["input_ids"] += ids[token:end]
                    row["labels"] += [IGNORED_LABEL] * self.apart + labels[token + self.apart : end]
                    row["position_ids"] += range(end - token)
                    token = end
                    if len(row["input_ids"]) == self.length:
                        yield self._finished(row, (epoch, number, token))
                        row = {name: [] for name in row}
                token = 0
            if num_tokens == 0 and first == 0:
                raise ValueError("The data has no document with a token to learn.")
            epoch, first = epoch + 1, 0

    def _finished(self, row: dict[str, list[int]], position: tuple[int, int, int]) -> dict[str, list[int]]:
        if not self.apart:
            row = {name: row[name] for name in ("input_ids", "labels")}
        return {**row, POSITION: list(position)}

    def _epoch(self, epoch: int, first: int) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """The documents of an epoch from one of them on, with their numbers."""
        if isinstance(self.documents, Dataset):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
            for number in range(first, len(order)):
                yield number, self._tokens(self.documents[int(order[number])], f"row {order[number]}")
            return
        documents, number = copy.copy(self.documents), first  # what is loaded into it stays for all later epochs
        documents.set_epoch(epoch)
        if (epoch, first) in self._places:
            documents.load_state_dict(self._places[epoch, first])
        rows = iter(documents)
        while True:
            self._places[epoch, number] = documents.state_dict()
            row = next(rows, None)
            if row is None:
                return
            yield number, self._tokens(row, f"row {number}")
            number += 1

    def _tokens(self, row: dict[str, Any], name: str) -> dict[str, list[int]]:
        try:
            return self.tokenize(row)
        except ValueError as error:
            raise ValueError(f"{error} It is {name}, counted from 0.") from None


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of rows of one length, `[batch, length]` each."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
