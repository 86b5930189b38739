# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Sweeps of learning rates that go on beyond their list while the best rate is at an end of it."""

import math


# By so many steps of the factor
MOST_BEYOND = 6


def next_rate(
    losses: dict[float, float], rates: tuple[float, ...], factor: float = 2.0, noise: float = 0.0
) -> float | None:
    """What a sweep still has to try; `None` when the best rate has worse ones on both sides.

    Args:
        losses: of the rates that were tried.
        rates: to try in any case.
        factor: between one rate and the next beyond the list.
        noise: the sweep continues beyond an end whose loss is within this of the best.

    Raises:
        ValueError: if the sweep has gone far beyond the list.
    """
    losses = {rate: math.inf if math.isnan(loss) else loss for rate, loss in losses.items()}  # it has diverged
    missing = [rate for rate in rates if rate not in losses]
    if missing:
        return missing[0]
    best, lowest, highest = min(losses, key=losses.__getitem__), min(losses), max(losses)
    ends = [end for end in (highest, lowest) if end == best or losses[end] - losses[best] < noise]
    if not ends:
        return None
    if len(losses) >= len(rates) + MOST_BEYOND:
        found = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in losses.items())
        raise ValueError(
            f"A sweep of rates finds no best one between others (losses: {found}): begin with other `rates`, in"
            " another folder."
        )
    return float(f"{highest * factor if ends[0] == highest else lowest / factor:.6g}")
