# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""A law L = A C^-b through the losses of a ladder, with intervals over seeds, and what AttnRes saves by it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from ...utils.files import write_file
from .ladder import LADDER_FILE, TIMES_FILE, Ladder, Run, read_ladder, results_of


PFLOPS_DAY = 1e15 * 86400
RESAMPLES = 1000
# Those of the paper are about 0.06. By one below this, the same loss would take any amount of compute
SMALLEST_EXPONENT = 1e-3
NOT_FALLING = "not known: losses do not fall with compute"


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


def is_falling(*laws: tuple[float, float]) -> bool:
    """Whether losses fall with compute by all of these laws."""
    return all(exponent >= SMALLEST_EXPONENT for _, exponent in laws)


def advantage(
    baseline: tuple[float, float], arm: tuple[float, float], compute: float, time: float = 1.0
) -> float | None:
    """How many times the arm's compute the baseline needs for the same loss. `None`: losses do not fall with compute.

    Args:
        time: of a step of the arm, in steps of the baseline. Its compute then counts so many times.
    """
    if not is_falling(baseline, arm):
        return None
    loss = arm[0] * compute ** -arm[1]
    return float((baseline[0] / loss) ** (1 / baseline[1]) / (compute * time))


def fit_arm(compute: np.ndarray, losses: np.ndarray, draws: np.ndarray) -> tuple[dict[str, Any], list[tuple]]:
    """What is said of one arm, and the laws of the draws.

    Args:
        losses: `[seeds, sizes]`.
        draws: `[resamples, seeds]`, which seeds each one has.
    """
    means = losses.mean(axis=0)
    law = fit_law(compute, means)
    drawn = [fit_law(compute, losses[seeds].mean(axis=0)) for seeds in draws]
    return {
        "A": law[0],
        "b": law[1],
        "interval_A": interval([a for a, _ in drawn]),
        "interval_b": interval([b for _, b in drawn]),
        "with_floor": fit_arm_with_floor(compute, losses, draws),
        "losses": means.tolist(),
        "residuals": (means - law[0] * compute ** -law[1]).tolist(),
    }, drawn


def fit_arm_with_floor(compute: np.ndarray, losses: np.ndarray, draws: np.ndarray) -> dict[str, Any] | None:
    """`None` where any floor would do: two sizes, or losses that do not fall."""
    means = losses.mean(axis=0)
    if len(compute) < 3 or not is_falling(fit_law(compute, means)):
        return None
    a, b, floor = fit_floor(compute, means)
    resampled = [losses[seeds].mean(axis=0) for seeds in np.unique(np.sort(draws), axis=0)]
    falling = [of_draw for of_draw in resampled if is_falling(fit_law(compute, of_draw))]
    floors = [floor, *(fit_floor(compute, of_draw)[2] for of_draw in falling)]
    return {"A": a, "b": b, "floor": floor, "range_floor": [min(floors), max(floors)]}


def fit_ladder(output: str | Path) -> dict[str, Any]:
    """Fit the runs of a ladder and write `fit.json` and `fit.md` next to them.

    Intervals are percentiles of 1,000 fits to seeds drawn with replacement, the same seeds for all arms. A seed of
    which a run has diverged is left out of all arms.

    Raises:
        ValueError: if runs are missing, or one of every seed has diverged.
    """
    output = Path(output)
    if not (output / LADDER_FILE).exists():
        raise ValueError(f"`{output}` has no runs of a ladder: `attnres scaling run LADDER -o {output}` makes them.")
    ladder = read_ladder(output / LADDER_FILE)
    compute, losses = read_losses(ladder, output)
    losses, diverged = without_diverged(ladder, losses)
    times = json.loads((output / TIMES_FILE).read_text(encoding="utf-8")) if (output / TIMES_FILE).exists() else {}
    seeds = len(losses[ladder.baseline])
    draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    arms, drawn = {}, {}
    for arm, of_arm in losses.items():
        arms[arm], drawn[arm] = fit_arm(compute, of_arm, draws)
    top = list(ladder.sizes)[-1]
    baseline = ladder.baseline
    for arm in [name for name in ladder.arms if name != baseline]:
        counted = {"equal_compute": 1.0} | ({"equal_time": times[top][arm]} if times else {})
        laws = [(arms[name]["A"], arms[name]["b"]) for name in (baseline, arm)]
        for kind, time in counted.items():
            resampled = [advantage(*pair, compute[-1], time) for pair in zip(drawn[baseline], drawn[arm])]
            arms[arm][kind] = {"advantage": advantage(*laws, compute[-1], time), "interval": interval(resampled)}
    results = {
        "sizes": {name: ladder.num_parameters(name) for name in ladder.sizes},
        "compute": compute.tolist(),
        "seeds": seeds,
        "diverged": diverged,
        "baseline": baseline,
        "arms": arms,
        "times": times,
    }
    write_file(output / "fit.json", json.dumps(results, indent=1) + "\n")
    write_file(output / "fit.md", describe(results) + "\n")
    return results


def without_diverged(ladder: Ladder, losses: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The losses of the seeds without a diverged run, and the names of the diverged runs.

    Raises:
        ValueError: if no seed is left.
    """
    sizes = list(ladder.sizes)
    diverged = [
        Run(arm, sizes[size], int(seed), 0.0)
        for arm, of_arm in losses.items()
        for seed, size in np.argwhere(~np.isfinite(of_arm))
    ]
    left = [seed for seed in range(ladder.seeds) if seed not in {run.seed for run in diverged}]
    names = [run.name for run in diverged]
    if not left:
        raise ValueError(
            f"Of every seed a run has diverged: {', '.join(names)}. Leave the arm out, or choose a lower"
            " `rate_exponent`, in a new ladder."
        )
    return {arm: of_arm[left] for arm, of_arm in losses.items()}, names


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


def interval(values: Sequence[float | None]) -> list[float] | None:
    """The middle 95 percent. `None` if one of them is not known."""
    if None in values:
        return None
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


def describe(results: dict[str, Any]) -> str:
    """The same in Markdown."""
    sizes, names = list(results["sizes"]), ", ".join(results["diverged"])
    lines = [
        "Loss as a function of compute, L = A C^-b, C in PFLOP/s-days (6 x parameters x tokens of PreNorm, without"
        f" embeddings), {results['seeds']} seeds. In brackets: the middle 95 % of fits to seeds drawn with"
        " replacement, which are too narrow with few seeds.",
        *(["", f"Left out of all arms: the seeds of {names}, which diverged."] if names else []),
        "",
        "| | A | b | floor, if there is one |",
        "|---|---|---|---|",
    ]
    for arm, found in results["arms"].items():
        low, high = found["interval_b"]
        exponent = f"{found['b']:.4f} [{low:.4f}, {high:.4f}]"
        lines.append(f"| {arm} | {found['A']:.3f} | {exponent} | {describe_floor(found, len(sizes))} |")
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
            cells = [describe_advantage(found[kind]) for kind in there]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", f"| held-out loss (residual) | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for arm, found in results["arms"].items():
        cells = [f"{loss:.4f} ({residual:+.4f})" for loss, residual in zip(found["losses"], found["residuals"])]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_floor(found: dict[str, Any], num_sizes: int) -> str:
    if found["with_floor"] is None:
        return "not known: two sizes" if num_sizes < 3 else NOT_FALLING
    floor, (below, above) = found["with_floor"]["floor"], found["with_floor"]["range_floor"]
    return f"{floor:.2f} ({below:.2f} to {above:.2f})"


def describe_advantage(found: dict[str, Any]) -> str:
    if found["advantage"] is None:
        return NOT_FALLING
    if found["interval"] is None:  # of some draws of seeds
        return f"{found['advantage']:.3f} [{NOT_FALLING}]"
    return f"{found['advantage']:.3f} [{found['interval'][0]:.3f}, {found['interval'][1]:.3f}]"
