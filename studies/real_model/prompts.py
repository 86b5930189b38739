# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Greedy answers of a model and of its conversion to the same prompts, token by token, in every mode of generation.

Where two answers part, the two candidates are told with their logits in both models: rounding decides between tokens
whose logits lie as close together as the two models' logits of one token do.
"""

from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import attnres  # noqa: F401  (registers the classes)
from attnres.eval.tasks.installed import human_eval


CHAT = (
    "What is gravity?",
    "Write a haiku about autumn leaves.",
    "Explain the difference between a list and a tuple in Python.",
    "Translate to French: Good morning, my friend.",
    "Give me three reasons to learn the piano.",
    "What is 17 + 25?",
    "Who wrote Romeo and Juliet?",
    "Summarise in one sentence: The cat sat on the mat because it was warm.",
    "Name five countries in South America.",
    "How do I boil an egg?",
)
# Of `generate`, beside plain decoding in fp32
MODES = ("bfloat16", "static cache", "assisted by the base", "generate_batch")


def prompts_of(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """Token ids, `[1, seq]` each: chat prompts in the model's template and HumanEval's in turn."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        for text in CHAT
    ]
    problems = [tokenizer(row["prompt"], return_tensors="pt").input_ids for row in human_eval()["test"]]
    both = [ids for pair in zip(chats, problems) for ids in pair] + problems[len(chats) :]
    return both[:count]


def answer(model: PreTrainedModel, ids: torch.Tensor, tokens: int, **options: Any) -> list[int]:
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **options
    )
    return output[0, ids.shape[1] :].tolist()


def in_order(outputs: dict[str, Any]) -> list[list[int]]:
    """The answers of `generate_batch` in the order of their prompts: `req_10` is behind `req_9`."""
    names = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
    return [outputs[name].generated_tokens for name in names]


@torch.no_grad()
def parting(models: list[PreTrainedModel], ids: torch.Tensor, pair: list[list[int]]) -> dict[str, Any] | None:
    """Where two answers part and how close the two tokens are there, in each model; `None` if they do not."""
    first, second = pair
    place = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), None)
    if place is None:
        return None if len(first) == len(second) else {"place": min(len(first), len(second)), "margins": None}
    both = [first[place], second[place]]
    context = torch.cat([ids, torch.tensor([first[:place]], dtype=ids.dtype)], dim=1)
    logits = [model(context).logits[0, -1].float() for model in models]
    return {
        "place": place,
        "tokens": both,
        "margins": [(of_model[both[0]] - of_model[both[1]]).item() for of_model in logits],
        "largest_difference": (logits[0] - logits[1]).abs().max().item(),
    }


def compare_answers(base: Path, converted: Path, count: int, tokens: int = 128) -> dict[str, Any]:
    """Plain greedy decoding of both in fp32 for all prompts, and the other modes for the first few.

    Returns:
        By mode how many answers were compared and equal, the partings, and the first chat answer.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = prompts_of(tokenizer, count)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (base, converted)]
    plain = [[answer(model, ids, tokens) for model in models] for ids in track(prompts, description="Answers in fp32")]
    results: dict[str, Any] = {"tokens": tokens, "modes": {}}

    def add(mode: str, pairs: list[list[list[int]]], compared: list[PreTrainedModel]):
        partings = [{"prompt": i, **p} for i, pair in enumerate(pairs) if (p := parting(compared, prompts[i], pair))]
        results["modes"][mode] = {"compared": len(pairs), "equal": len(pairs) - len(partings), "partings": partings}

    add("float32", plain, models)
    few = prompts[: max(2, count // 5)]
    for mode in MODES:
        if mode == "bfloat16":
            halves = [
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (base, converted)
            ]
            pairs = [[answer(model, ids, tokens) for model in halves] for ids in track(few, description=mode)]
            add(mode, pairs, halves)
            continue
        # Against the base's plain answer
        expected = [plain[i][0] for i in range(len(few))]
        if mode == "generate_batch":
            config = GenerationConfig(
                max_new_tokens=tokens, do_sample=False, eos_token_id=models[1].config.eos_token_id
            )
            outputs = models[1].generate_batch([ids[0].tolist() for ids in few], generation_config=config)
            found = in_order(outputs)
        else:
            options = {"cache_implementation": "static"} if mode == "static cache" else {"assistant_model": models[0]}
            found = [answer(models[1], ids, tokens, **options) for ids in track(few, description=mode)]
        add(mode, [list(pair) for pair in zip(expected, found)], models)
    results["prompt"] = CHAT[0]
    results["answer"] = tokenizer.decode(plain[0][1], skip_special_tokens=True)
    return results
