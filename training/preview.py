# SPDX-License-Identifier: Apache-2.0
"""A batch as a person reads it: its documents, and which of their tokens are learned."""

import re

import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..data.rows import IGNORED_LABEL


# Some of them are commands for a terminal
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def render_batch(batch: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Row by row and document by document, what is learned in bold green and between ⟦ and ⟧; padding is left out."""
    shown = Text()
    for number, ids in enumerate(batch["input_ids"].tolist()):
        if "attention_mask" in batch:
            real = batch["attention_mask"][number].bool().tolist()
            ids = [i for i, is_real in zip(ids, real) if is_real]
            labels = [i for i, is_real in zip(batch["labels"][number].tolist(), real) if is_real]
            positions = list(range(len(ids)))
        else:
            labels, positions = batch["labels"][number].tolist(), batch["position_ids"][number].tolist()
            while positions[-2:] == [0, 0]:  # a token of padding is a document of its own
                positions.pop()
            if positions[-1] == 0 and len(positions) < len(ids):
                positions.pop()
        # There is nothing to predict a first token from
        learned = [bool(position) and label != IGNORED_LABEL for position, label in zip(positions, labels)]
        num_documents = positions.count(0)
        documents = f"{num_documents} document{'s' if num_documents != 1 else ''}"
        counts = f"{len(positions)} tokens in {documents}, {sum(learned)} learned"
        shown.append(f"Row {number + 1}: {counts}\n", style="bold underline")
        start = 0
        for end in range(1, len(positions) + 1):
            ends_document = end == len(positions) or positions[end] == 0
            if ends_document or learned[end] != learned[start]:
                text = CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", tokenizer.decode(ids[start:end]))
                shown.append(f"⟦{text}⟧" if learned[start] else text, style="bold green" if learned[start] else "")
                start = end
            if ends_document:
                shown.append("\n---\n", style="dim")
    return shown
