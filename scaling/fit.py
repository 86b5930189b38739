# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A law L = A C^-b through the losses of a ladder, with intervals over seeds, and what AttnRes saves by it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from ..outputs import write_file
from .ladder import LADDER_FILE, TIMES_FILE, Ladder, read_ladder, results_of


PFLOPS_DAY = 1e15 * 86400
RESAMPLES = 1000


def fit_law(compute: np.ndarray, losses: np.ndarray, floor: float = 0.0) -> tuple[float, float]:
    """A and b of `L = floor + A C^-b`, by least squares of logarithms."""
    slope, intercept = np.polyfit(np.log(compute), np.log(losses - floor), 1)
    return float(np.exp(intercept)), float(-slope)


def fit_floor(compute: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """A, b and the floor E of `L = E + A C^-b`, 0 <= E."""

    def error(floor: float) -> float:
        a, b = fit_law(compute, losses, floor)
        return float(np.square(np.log(floor + a * compute**-b) - np.log(losses)).sum())

    floor = minimize_scalar(error, bounds=(0.0, 0.99 * losses.min()), method="bounded").x
    return (*fit_law(compute, losses, floor), float(floor))


def advantage(baseline: tuple[float, float], arm: tuple[float, float], compute: float, time: float = 1.0) -> float:
    """How many times the arm's compute the baseline needs for the same loss.

    Args:
        time: of a step of the arm, in steps of the baseline. Its compute then counts so many times.
    """
    loss = arm[0] * compute ** -arm[1]
    return float((baseline[0] / loss) ** (1 / baseline[1]) / (compute * time))


def fit_ladder(output: str | Path) -> dict[str, Any]:
    """Fit the runs of a ladder and write `fit.json` and `fit.md` beside them.

    Intervals are percentiles of 1,000 fits to seeds drawn with replacement, the same seeds for all arms.

    Raises:
        ValueError: if runs are missing.
    """
    output = Path(output)
    if not (output / LADDER_FILE).exists():
        raise ValueError(f"`{output}` has no runs of a ladder: `attnres scaling run LADDER -o {output}` makes them.")
    ladder = read_ladder(output / LADDER_FILE)
    compute, losses = read_losses(ladder, output)
    times = json.loads((output / TIMES_FILE).read_text(encoding="utf-8")) if (output / TIMES_FILE).exists() else {}
    draws = np.random.default_rng(0).integers(ladder.seeds, size=(RESAMPLES, ladder.seeds))
    arms, laws, drawn = {}, {}, {}
    for arm, of_arm in losses.items():
        laws[arm] = fit_law(compute, of_arm.mean(axis=0))
        drawn[arm] = [fit_law(compute, of_arm[seeds].mean(axis=0)) for seeds in draws]
        a, b, floor = fit_floor(compute, of_arm.mean(axis=0))
        floors = [fit_floor(compute, of_arm[seeds].mean(axis=0))[2] for seeds in np.unique(np.sort(draws), axis=0)]
        fitted = laws[arm][0] * compute ** -laws[arm][1]
        arms[arm] = {
            "A": laws[arm][0],
            "b": laws[arm][1],
            "interval_A": interval([law[0] for law in drawn[arm]]),
            "interval_b": interval([law[1] for law in drawn[arm]]),
            "with_floor": {"A": a, "b": b, "floor": floor, "range_floor": [min(floors), max(floors)]},
            "losses": of_arm.mean(axis=0).tolist(),
            "residuals": (of_arm.mean(axis=0) - fitted).tolist(),
        }
    top = list(ladder.sizes)[-1]
    for arm in [name for name in ladder.arms if name != ladder.baseline]:
        counted = {"equal_compute": 1.0} | ({"equal_time": times[top][arm]} if times else {})
        for kind, time in counted.items():
            resampled = [advantage(*pair, compute[-1], time) for pair in zip(drawn[ladder.baseline], drawn[arm])]
            arms[arm][kind] = {
                "advantage": advantage(laws[ladder.baseline], laws[arm], compute[-1], time),
                "interval": interval(resampled),
            }
    results = {
        "sizes": {name: ladder.num_parameters(name) for name in ladder.sizes},
        "compute": compute.tolist(),
        "seeds": ladder.seeds,
        "baseline": ladder.baseline,
        "arms": arms,
        "times": times,
    }
    write_file(output / "fit.json", json.dumps(results, indent=1) + "\n")
    write_file(output / "fit.md", describe(results) + "\n")
    return results


def read_losses(ladder: Ladder, output: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Compute of each size in PFLOP/s-days, and by arm the losses `[seeds, sizes]`.

    Raises:
        ValueError: if runs are missing.
    """
    found = {(run.arm, run.size, run.seed): result["loss"] for run, result in results_of(output).items()}
    needed = [(arm, size, seed) for arm in ladder.arms for size in ladder.sizes for seed in range(ladder.seeds)]
    missing = [of for of in needed if of not in found]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(needed)} runs have no result in `{output}` yet, the first is {missing[0]}. Go on"
            " with `attnres scaling run`."
        )
    compute = np.array([ladder.compute_of(size) for size in ladder.sizes]) / PFLOPS_DAY
    losses = {
        arm: np.array([[found[arm, size, seed] for size in ladder.sizes] for seed in range(ladder.seeds)])
        for arm in ladder.arms
    }
    return compute, losses


def interval(values: list[float]) -> list[float]:
    """The middle 95 percent."""
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


def describe(results: dict[str, Any]) -> str:
    """The same in Markdown."""
    sizes = list(results["sizes"])
    lines = [
        "Loss as a function of compute, L = A C^-b, C in PFLOP/s-days (6 x parameters x tokens of PreNorm, without"
        f" embeddings), {results['seeds']} seeds. In brackets: the middle 95 % of fits to seeds drawn with"
        " replacement, which are too narrow with few seeds.",
        "",
        "| | A | b | floor, if there is one |",
        "|---|---|---|---|",
    ]
    for arm, found in results["arms"].items():
        low, high = found["interval_b"]
        floor, (below, above) = found["with_floor"]["floor"], found["with_floor"]["range_floor"]
        exponent = f"{found['b']:.4f} [{low:.4f}, {high:.4f}]"
        lines.append(f"| {arm} | {found['A']:.3f} | {exponent} | {floor:.2f} ({below:.2f} to {above:.2f}) |")
    kinds = {"equal_compute": "equal compute", "equal_time": "equal time"}
    there = [kind for kind in kinds if any(kind in found for found in results["arms"].values())]
    lines += [
        "",
        f"Compute that {results['baseline']} needs for the loss of the largest model, over the arm's own:",
        "",
    ]
    lines += [f"| | {' | '.join(kinds[kind] for kind in there)} |", "|---" * (len(there) + 1) + "|"]
    for arm, found in results["arms"].items():
        if arm != results["baseline"]:
            cells = [
                f"{found[k]['advantage']:.3f} [{found[k]['interval'][0]:.3f}, {found[k]['interval'][1]:.3f}]"
                for k in there
            ]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", f"| held-out loss (residual) | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for arm, found in results["arms"].items():
        cells = [f"{loss:.4f} ({residual:+.4f})" for loss, residual in zip(found["losses"], found["residuals"])]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)
