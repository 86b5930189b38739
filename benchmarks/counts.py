# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What reads over depth add to a model, counted: operations that compute, and the bytes that they read and write.

    python -m attnres.benchmarks.counts

Qwen3 of 24 layers runs under a dispatch mode, and so does its PreNorm twin. The difference is divided by the number of
sites, and the bytes by those of a hidden state as well. Unlike times, these figures are the same on every machine.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from .twin import DECODE_STEPS, TWIN, Case, make_models, make_twin, work


SHAPE = Qwen3Config(
    vocab_size=16,
    hidden_size=1024,
    intermediate_size=64,
    num_hidden_layers=24,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
)
VARIANTS = ("8", "full")
ROWS = {
    "training step": ("train-32", "float32"),
    "prefill": ("prefill-32", "float32"),
    "prefill, bf16": ("prefill-32", "bfloat16"),
    "decode": ("decode-1-32", "float32"),
}
# Memory without content, other shapes of the same memory, and what is no tensor
WITHOUT_WORK = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
WITHOUT_WORK |= {"promote_types"}
# Their first tensor is not read: they write to it, or take its dtype and device
OVERWRITES = {"copy_", "zero_", "fill_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}


class Counter(TorchDispatchMode):
    """Counts operations, and the bytes of the tensors that they read and write."""

    def __init__(self):
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not is_view and name not in WITHOUT_WORK:
            read = [args[1:] if name in OVERWRITES else args, {k: v for k, v in kwargs.items() if k != "out"}]
            self.operations += 1
            self.bytes += sum(map(bytes_in_memory, tree_leaves([read, result])))
        return result


def bytes_in_memory(value) -> int:
    """Of a tensor that is expanded once."""
    if not isinstance(value, torch.Tensor):
        return 0
    elements = 1
    for size, stride in zip(value.shape, value.stride()):
        elements *= size if stride else min(size, 1)
    return elements * value.element_size()


def counts(case: str, dtype: str = "float32", variants: tuple[str, ...] = VARIANTS) -> dict[str, tuple[float, float]]:
    """By variant the operations per site beyond the twin's, and their traffic per token in hidden states.

    Args:
        case, variants: as of `attnres bench`.
    """
    parsed = Case.parse(case)
    models = make_models(make_twin(SHAPE, getattr(torch, dtype), "cpu"), list(variants), "cpu")
    ids = torch.zeros(1, parsed.tokens, dtype=torch.long)
    sites = 2 * SHAPE.num_hidden_layers
    bytes_of_one = parsed.tokens * SHAPE.hidden_size * models[TWIN].dtype.itemsize
    counters = {}
    for name, model in models.items():
        if parsed.kind == "train":  # without an optimizer

            def step(model=model):
                model(ids, labels=ids, use_cache=False).loss.backward()

        else:
            step = work(parsed, model, None, "cpu", compiled=False)
        step()  # what is made once
        with Counter() as counters[name]:
            step()
        model.zero_grad()
    steps = DECODE_STEPS if parsed.kind == "decode" else 1
    twin = counters.pop(TWIN)
    return {
        name: (
            (counter.operations - twin.operations) / sites / steps,
            (counter.bytes - twin.bytes) / sites / bytes_of_one,
        )
        for name, counter in counters.items()
    }


def main():
    """Print a table for the documentation."""
    print("| per site beyond the twin: operations, traffic | 8 blocks | Full |\n|---|---|---|")
    for row, (case, dtype) in ROWS.items():
        cells = [f"{operations:.1f}, {traffic:.1f}" for operations, traffic in counts(case, dtype).values()]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
