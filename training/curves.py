# Copyright 2026 The attnres authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Loss curves and what the depth queries did meanwhile, drawn from the log history of a `Trainer`."""

from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from ..outputs import write_figure


# Okabe and Ito's colours, which colour-blind people can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def curve(history: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of what was logged under a name."""
    entries = {entry["step"]: entry[name] for entry in history if name in entry}
    return list(entries), list(entries.values())


def plot_curves(histories: dict[str, list[dict[str, Any]]], stem: Path, title: str) -> list[Path]:
    """Draw the losses of runs by their names, and beside them the entropy of depth weights where one has it.

    Returns:
        The paths of a PNG and an SVG.
    """
    has_depth = any("depth_entropy" in entry for history in histories.values() for entry in history)
    figure, axes = plt.subplots(1, 2 if has_depth else 1, figsize=(9 if has_depth else 5.5, 3.6), squeeze=False)
    for (name, history), colour in zip(histories.items(), COLOURS):
        steps, losses = curve(history, "loss")
        axes[0, 0].plot(steps, losses, color=colour, alpha=0.4, linewidth=1)
        steps, losses = curve(history, "eval_loss")
        axes[0, 0].plot(steps, losses, color=colour, marker="o", markersize=3, label=name)
        if has_depth:
            steps, entropies = curve(history, "depth_entropy")
            if steps:
                axes[0, 1].plot(steps, entropies, color=colour, label=name)
    axes[0, 0].set(xlabel="step", ylabel="loss", title="held out (dots) and in training (pale)")
    axes[0, 0].legend(frameon=False)
    if has_depth:
        axes[0, 1].set(xlabel="step", ylabel="entropy / its maximum", title="depth weights: 1 is uniform, as PreNorm")
        axes[0, 1].legend(frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(title)
    figure.tight_layout()
    paths = write_figure(figure, stem)
    plt.close(figure)
    return paths
