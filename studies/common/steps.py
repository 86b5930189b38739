# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""How long training steps take: all arms by turns in one process, as ratios to the first one's."""

from collections.abc import Callable
from typing import Any

import torch

from attnres.utils.timing import alternate

from .arms import BATCH, LENGTH, SHAPE


QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def training_step(model, ids: torch.Tensor | None = None, rate: float = 1e-3) -> Callable[[], None]:
    """A step of training, to be timed.

    Args:
        ids: token ids, `[batch, length]`; by default made-up ones of the small models.
        rate: learning rate.
    """
    if ids is None:
        ids = torch.randint(0, SHAPE.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def figures_of(seconds: torch.Tensor, baseline: torch.Tensor) -> dict[str, Any]:
    """Median seconds of an arm, and quartiles of its ratio to a baseline, from the seconds of each round."""
    ratios = (seconds / baseline).quantile(QUARTILES).tolist()
    return {"seconds": seconds.median().item(), "ratio_quartiles": ratios}


def time_steps(steps: dict[str, Callable[[], None]], pairs: int, label: str) -> dict[str, dict[str, Any]]:
    """By arm, `figures_of` its step, with the first arm as the baseline.

    Args:
        pairs: rounds, in each of which every arm has a step.
    """
    seconds = alternate(list(steps.values()), pairs, label)
    return {arm: figures_of(seconds[:, i], seconds[:, 0]) for i, arm in enumerate(steps)}


def ratio_in_words(figures: dict[str, Any] | None) -> str:
    """Median and quartiles; nothing if they were not measured."""
    if figures is None:
        return ""
    low, median, high = figures["ratio_quartiles"]
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
