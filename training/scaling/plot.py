# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""The fitted laws of a ladder, and those of the paper beside them."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from ...utils.figures import COLOURS, write_figure  # noqa: E402
from ...utils.markup import figure_text  # noqa: E402
from .fit import read_losses  # noqa: E402
from .ladder import LADDER_FILE, read_ladder  # noqa: E402


# arXiv 2603.15031: A and b, over the compute of its five sizes
PAPER = {"PreNorm": (1.891, 0.057), "Block": (1.870, 0.058), "Full": (1.865, 0.057)}
PAPER_COMPUTE = (0.4, 5.6)
# To be told apart in grey; as many as are no multiple of the colours, so that both together come again late
STYLES: tuple[tuple[str, Any], ...] = (
    ("o", "-"),
    ("s", "--"),
    ("^", ":"),
    ("D", "-."),
    ("v", (0, (9, 2))),
    ("P", (0, (3, 1, 1, 1, 1, 1))),
    ("X", (0, (1, 4))),
    ("*", (0, (8, 2, 2, 2))),
)


def plot_ladder(output: str | Path) -> list[Path]:
    """Draw `scaling.png` and `scaling.svg` of a ladder that was fitted.

    Raises:
        ValueError: if it was not.
    """
    output = Path(output)
    if not (output / "fit.json").exists():
        raise ValueError(f"`{output}` has no fit.json: `attnres scaling fit -o {output}` makes it.")
    results = json.loads((output / "fit.json").read_text(encoding="utf-8"))
    compute, losses = read_losses(read_ladder(output / LADDER_FILE), output)
    figure, (ours, paper) = plt.subplots(1, 2, figsize=(9.6, 4.2), layout="constrained")
    for (arm, found), colour, (marker, line) in zip(results["arms"].items(), cycle(COLOURS), cycle(STYLES)):
        along = np.geomspace(compute[0], compute[-1])
        label = f"{figure_text(arm)}: {found['A']:.2f} C$^{{-{found['b']:.3f}}}$"
        ours.plot(along, found["A"] * along ** -found["b"], linestyle=line, color=colour)
        ours.plot(compute, losses[arm].T, marker, color=colour, markersize=4, alpha=0.6)
        ours.plot([], [], marker=marker, linestyle=line, color=colour, label=label)
    for (arm, (a, b)), colour, (_, line) in zip(PAPER.items(), COLOURS, STYLES):
        along = np.geomspace(*PAPER_COMPUTE)
        paper.plot(along, a * along**-b, linestyle=line, color=colour, label=f"{arm}: {a:.3f} C$^{{-{b:.3f}}}$")
    ours.set(title=f"here, {results['seeds']} seeds (dots)", ylabel="held-out loss, nats per token")
    paper.set(title="the paper (other data and tokens, larger models)")
    for axis in (ours, paper):
        axis.set(xscale="log", yscale="log", xlabel="compute C, PFLOP/s-days")
        axis.yaxis.set_major_formatter("{x:.2f}")
        axis.yaxis.set_minor_formatter("{x:.2f}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, which="both")
        axis.legend(frameon=False)
    paper.set_xticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
    paper.set_xticks([], minor=True)
    paths = write_figure(figure, output / "scaling")
    plt.close(figure)
    return paths
