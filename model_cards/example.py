# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The example of a card: a prompt and what the model answers, kept in the metadata as the Hub's `widget`."""

from pathlib import Path
from typing import Any

import torch

from ..checkpoints.checkpoint import load_language_model, load_tokenizer, open_checkpoint


MAX_NEW_TOKENS = 40


@torch.no_grad()
def answered(folder: str | Path, prompt: str) -> dict[str, Any]:
    """An entry of `widget`: what the checkpoint in a folder answers, greedily and in at most 40 tokens.

    If the tokenizer has a chat template, the prompt is a user's message; otherwise it is text to continue.

    Raises:
        ValueError, OSError: if it is not a language model of text with a tokenizer, or the prompt is not one line.
    """
    if not prompt.strip() or not prompt.isprintable():
        raise ValueError(f"`example={prompt!r}` should be one line of text.")
    if open_checkpoint(folder).is_multimodal:
        raise ValueError(f"`{folder}` is a multimodal model, and examples are made with models of text alone.")
    tokenizer, model = load_tokenizer(folder), load_language_model(folder)
    entry: dict[str, Any] = {"text": prompt}
    if tokenizer.chat_template:
        entry = {"messages": [{"role": "user", "content": prompt}]}
        inputs = tokenizer.apply_chat_template(
            entry["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answer = tokenizer.decode(outputs[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return {**entry, "output": {"text": answer}}


def example_in(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """The first example with an output in a card's metadata: `prompt`, `output`, `is_chat` and `max_new_tokens`."""
    entries = metadata.get("widget")
    for entry in entries if isinstance(entries, list) else []:
        try:
            is_chat = "messages" in entry
            prompt = entry["messages"][0]["content"] if is_chat else entry["text"]
            output = entry["output"]["text"]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(prompt, str) and isinstance(output, str):
            return {"prompt": prompt, "output": output, "is_chat": is_chat, "max_new_tokens": MAX_NEW_TOKENS}
    return None
