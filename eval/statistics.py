# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Paired statistics: two models on the same documents.

Scores of one benchmark come by subtask (MMLU has 57), and a benchmark's score is the mean over all of its documents.
The two models are paired by document, so that what makes a document hard drops out of their difference.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests


@dataclass(frozen=True)
class Comparison:
    """The second model against the first on one benchmark; scores are means over documents, between 0 and 1.

    `interval` is the paired bootstrap's 95 % interval of the difference, resampled within every subtask; `p_value` is
    of McNemar's exact test for scores of 0 and 1, and of a paired permutation test for others.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    test: str


def score(scores: dict[str, np.ndarray]) -> tuple[float, float]:
    """Mean over all documents, and its standard error; by subtask `[documents]`."""
    values = np.concatenate(list(scores.values()))
    return float(values.mean()), float(stats.sem(values)) if len(values) > 1 else math.nan


def compare(first: dict[str, np.ndarray], second: dict[str, np.ndarray], seed: int = 0) -> Comparison:
    """Compare two models on one benchmark.

    Args:
        first, second: scores by subtask, `[documents]` each, in the same order of documents.
        seed: of the resampling.

    Raises:
        ValueError: if the two do not have the same subtasks and numbers of documents.
    """
    sizes = [{subtask: len(values) for subtask, values in scores.items()} for scores in (first, second)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"The scores are not paired: {sizes[0]} documents against {sizes[1]}.")
    differences = {subtask: second[subtask] - first[subtask] for subtask in first}
    a, b = (np.concatenate([scores[subtask] for subtask in first]) for scores in (first, second))
    p_value, test = significance(a, b, seed)
    return Comparison(
        difference=float(b.mean() - a.mean()),
        interval=bootstrap_interval(list(differences.values()), seed),
        p_value=p_value,
        test=test,
    )


def bootstrap_interval(strata: list[np.ndarray], seed: int, resamples: int = 9999) -> tuple[float, float]:
    """95 % percentile interval of the mean over all strata, each of them resampled on its own."""
    total = sum(len(stratum) for stratum in strata)
    # Of a stratum with one document there is nothing to resample
    fixed = sum(float(stratum[0]) for stratum in strata if len(stratum) == 1) / total
    strata = [stratum for stratum in strata if len(stratum) > 1]
    if not strata:
        return (math.nan, math.nan)

    def mean(*samples, axis):
        return fixed + sum(sample.sum(axis=axis) for sample in samples) / total

    interval = stats.bootstrap(
        strata, mean, n_resamples=resamples, batch=100, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return (float(interval.low), float(interval.high))


def significance(a: np.ndarray, b: np.ndarray, seed: int) -> tuple[float, str]:
    """p-value of the hypothesis that both models are equally good, and the name of the test."""
    if np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all():
        only_a, only_b = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
        return float(mcnemar([[0, only_a], [only_b, 0]], exact=True).pvalue), "McNemar, exact"
    if (a == b).all():
        return 1.0, "paired permutation"
    result = stats.permutation_test(
        (a, b),
        lambda x, y, axis: (y - x).mean(axis=axis),
        permutation_type="samples",
        n_resamples=9999,
        batch=100,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue), "paired permutation"


def holm(p_values: list[float]) -> list[float]:
    """p-values corrected for how many there are, by Holm's method."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]] if p_values else []
