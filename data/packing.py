# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Rows of token ids with labels, as models are trained on them: cut off or packed beside each other, in batches."""

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from .rows import IGNORED_LABEL, row_tokenizer


def tokenize(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, text_column: str | None = None) -> Dataset:
    """Token ids and labels of every row, see `row_tokenizer`; rows without anything to learn are left out."""
    columns = dataset.column_names
    of_row = row_tokenizer(columns, tokenizer, text_column)

    def of_numbered_row(row: dict[str, Any], number: int) -> dict[str, list[int]]:
        try:
            return of_row(row)
        except ValueError as error:
            raise ValueError(f"{error} It is row {number}, counted from 0.") from None

    dataset = dataset.map(of_numbered_row, with_indices=True, remove_columns=columns, desc="Tokenizing")
    return dataset.filter(has_labels, desc="Filtering")


def has_labels(row: dict[str, list[int]]) -> bool:
    return any(label != IGNORED_LABEL for label in row["labels"][1:])


def truncate(dataset: Dataset, length: int) -> Dataset:
    """Rows of at most `length` tokens; what is behind is left out, and so are rows without anything to learn."""
    dataset = dataset.map(lambda row: {name: ids[:length] for name, ids in row.items()}, desc="Truncating")
    return dataset.filter(has_labels, desc="Filtering")


def pack(dataset: Dataset, length: int) -> Dataset:
    """Documents beside each other in rows of at most `length` tokens; those that are longer are cut into several.

    Positions (`position_ids`) start again with each, by which transformers' masks keep them apart, and the first token
    of each has no label, as there is nothing to predict it from.
    """
    from trl import pack_dataset

    def restart(row: dict[str, list[int]]) -> dict[str, list[int]]:
        positions = [position for size in row["seq_lengths"] for position in range(size)]
        labels = [label if position else IGNORED_LABEL for label, position in zip(row["labels"], positions)]
        return {"position_ids": positions, "labels": labels}

    packed = pack_dataset(dataset, length, strategy="bfd_split", map_kwargs={"desc": "Packing"})
    return packed.map(restart, remove_columns="seq_lengths", desc="Packing").filter(has_labels, desc="Filtering")


def collate_packed(rows: list[dict[str, list[int]]], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """A batch of packed rows, `[batch, seq]` each, without an attention mask.

    With one, transformers would not look at the positions. Padding lies at the end; every token of it is at position
    0, a document of its own.
    """
    padding = {"input_ids": pad_token_id, "labels": IGNORED_LABEL, "position_ids": 0}
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }


def sees_other_documents(model: nn.Module) -> str | None:
    """Why the documents of a packed row would not be kept apart by this model, or `None` if they are.

    Not every model hands the positions on to its masks, and then a document attends to those in front of it. So it is
    tried: the outputs of the second of two documents must have a gradient of exactly zero at the tokens of the first.
    """
    first, second = 6, 5
    embedded = []

    def keep(module, args, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # some models scale it in place

    input_ids = torch.arange(first + second, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(first), torch.arange(second)]).to(model.device)[None]
    was_training, handle = model.training, model.get_input_embeddings().register_forward_hook(keep)
    try:
        model.eval()
        with torch.enable_grad():
            logits = model(input_ids, position_ids=positions, use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits[:, first:].float().square().sum(), embedded[:1])
    finally:
        handle.remove()
        model.train(was_training)
    if gradient[:, :first].count_nonzero() == 0:
        return None
    base_model_type = getattr(model.config, "base_model_type", model.config.model_type)
    return (
        f"`{base_model_type}` with `attn_implementation={model.config._attn_implementation!r}` does not keep documents"
        " in one row apart"
    )
