# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Loss curves and what the depth queries did meanwhile, drawn from the log history of a `Trainer`."""

from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from ..utils.figures import COLOURS, write_figure
from ..utils.markup import figure_text


def curve(history: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of what was logged under a name."""
    entries = {entry["step"]: entry[name] for entry in history if name in entry}
    return list(entries), list(entries.values())


def plot_curves(histories: dict[str, list[dict[str, Any]]], stem: Path, title: str) -> list[Path]:
    """Draw the losses of runs by their names, and beside them the entropy of depth weights where one has it.

    Returns:
        The paths of a PNG and an SVG.
    """
    figure = draw_curves(histories, title)
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths


def draw_curves(histories: dict[str, list[dict[str, Any]]], title: str) -> Figure:
    has_depth = any("depth_entropy" in entry for history in histories.values() for entry in history)
    columns = 2 if has_depth else 1
    figure, axes = plt.subplots(1, columns, figsize=(4.5 * columns, 3.8), squeeze=False, layout="constrained")
    for (name, history), colour in zip(histories.items(), cycle(COLOURS)):
        draw(axes[0, 0], *curve(history, "loss"), color=colour, alpha=0.4, linewidth=1)
        draw(axes[0, 0], *curve(history, "eval_loss"), color=colour, marker="o", markersize=3, label=figure_text(name))
        if has_depth:
            draw(axes[0, 1], *curve(history, "depth_entropy"), color=colour)
    axes[0, 0].set(xlabel="step", ylabel="loss", title="held out (dots) and in training (pale)")
    if has_depth:
        axes[0, 1].set(xlabel="step", ylabel="entropy / its maximum", title="depth weights: 1 is uniform, as PreNorm")
        # Zoomed in on the last thousandth, nothing would look like a lot
        axes[0, 1].set_ylim(min(0.9, axes[0, 1].get_ylim()[0]), 1.005)
    for axis in axes.flat:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.ticklabel_format(style="plain", useOffset=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    if len(histories) > 1:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(figure_text(title))
    return figure


def draw(axis: Axes, steps: list[int], values: list[float], **style: Any):
    """A line; of a single value, a dot."""
    axis.plot(steps, values, **({"marker": "o", "markersize": 3} if len(steps) == 1 else {}) | style)
