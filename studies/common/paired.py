# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Statistics of the studies: differences between runs of the same seed, over a few seeds."""

import bisect
import math
import statistics
from collections.abc import Hashable
from typing import TypeVar

from scipy import stats

from attnres.eval.statistics import holm


Row = TypeVar("Row", bound=Hashable)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the 95 % interval of Student's t."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    return statistics.mean(values), float(low), float(high)


def in_words(values: list[float], digits: int) -> str:
    """Mean and 95 % interval, with signs."""
    mean, low, high = interval(values)
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def side(values: list[float]) -> float:
    """Half of the 95 % interval, for a figure."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def corrected_p(rows: dict[Row, list[float]]) -> dict[Row, float]:
    """p of each row's differences by the paired t test, corrected for all rows by Holm."""
    return dict(zip(rows, holm([stats.ttest_1samp(differences, 0).pvalue for differences in rows.values()])))


def bold_if_certain(text: str, p: float) -> str:
    return f"**{text}**" if p < 0.05 else text


def detectable(rows: dict[Row, list[float]]) -> float:
    """The difference that a paired t test at 0.05 finds with probability 0.8, by the median spread of the rows."""
    number = len(next(iter(rows.values())))
    spread = statistics.median(statistics.stdev(differences) for differences in rows.values())
    critical = stats.t.ppf(0.975, number - 1)
    shifts = [i / 100 for i in range(2000)]
    found = (
        s for s in shifts if stats.nct.sf(critical, number - 1, s) + stats.nct.cdf(-critical, number - 1, s) >= 0.8
    )
    return next(found) * spread / math.sqrt(number)


def interpolated(by_steps: dict[int, list[float]], steps: float) -> list[float]:
    """What a baseline reaches in so many steps, by seed, from its losses by number of steps, two at least.

    Linearly in the logarithm of the steps, between the two numbers around them. Below the least number, on the line of
    the two least ones; beyond the most, the losses of the most.
    """
    lengths = sorted(by_steps)
    if steps >= lengths[-1]:
        return by_steps[lengths[-1]]
    after = max(bisect.bisect(lengths, steps), 1)
    low, high = lengths[after - 1], lengths[after]
    share = math.log(steps / low) / math.log(high / low)
    return [(1 - share) * a + share * b for a, b in zip(by_steps[low], by_steps[high])]
