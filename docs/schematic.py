# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture, for light and for dark pages: `python docs/schematic.py`."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402


# By the colour scheme of the page: text, quiet lines, boxes, the read that is shown
COLOURS = {
    "light": {"text": "#1f2328", "quiet": "#a0a8b1", "box": "#eef1f4", "edge": "#6e7781", "read": "#0072B2"},
    "dark": {"text": "#e6edf3", "quiet": "#626c76", "box": "#21262d", "edge": "#8b949e", "read": "#56B4E9"},
}
LABELS = ["embedding", "attention", "MLP", "attention", "MLP", "attention"]
# Of the last sublayer, over what is below it
WEIGHTS = [0.34, 0.08, 0.28, 0.10, 0.20]
WIDTH, HEIGHT = 1.5, 0.5
# Where what is read comes together, left of the box
READ_AT = -0.32


def box(axis, y: float, label: str, colours: dict[str, str], is_reader: bool = False):
    edge = colours["read"] if is_reader else colours["edge"]
    axis.add_patch(
        FancyBboxPatch(
            (0, y - HEIGHT / 2),
            WIDTH,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=colours["box"],
            edgecolor=edge,
            linewidth=1.8 if is_reader else 1,
        )
    )
    axis.text(WIDTH / 2, y, label, ha="center", va="center", color=colours["text"], fontsize=10)


def arrow(axis, start, end, colour: str, width: float = 1.0, bend: float = 0.0, head: bool = True):
    axis.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>,head_width=2.2,head_length=3.5" if head else "-",
            connectionstyle=f"arc3,rad={bend}",
            color=colour,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            capstyle="round",
        )
    )


def prenorm(axis, colours: dict[str, str]):
    stream = -0.75
    axis.plot([stream, stream], [0, len(LABELS) - 0.35], color=colours["edge"], linewidth=1.6, zorder=0)
    for y, label in enumerate(LABELS):
        box(axis, y, label, colours, is_reader=y == len(LABELS) - 1)
        last = y == len(LABELS) - 1
        if y:
            arrow(
                axis,
                (stream, y - 0.12),
                (0, y - 0.12),
                colours["read"] if last else colours["quiet"],
                2 if last else 1,
            )
        if not y:
            arrow(axis, (0, y), (stream, y), colours["edge"], 1.6, head=False)
        elif not last:
            arrow(axis, (0, y + 0.12), (stream + 0.12, y + 0.12), colours["quiet"])
            axis.text(
                stream, y + 0.12, "+", ha="center", va="center", color=colours["text"], fontsize=9,
                bbox={"boxstyle": "circle,pad=0.1", "facecolor": colours["box"], "edgecolor": colours["edge"]},
            )  # fmt: skip
    axis.set_title("PreNorm\none sum", color=colours["text"], fontsize=11)


def full(axis, colours: dict[str, str]):
    reader = len(LABELS) - 1
    for y, label in enumerate(LABELS):
        box(axis, y, label, colours, is_reader=y == reader)
    for y, weight in enumerate(WEIGHTS):
        arrow(axis, (0, y), (READ_AT, reader), colours["read"], 0.6 + 8 * weight, -0.45 + 0.04 * y, head=False)
        axis.text(WIDTH + 0.12, y, f"{weight:.2f}", ha="left", va="center", color=colours["read"], fontsize=9)
    arrow(axis, (READ_AT, reader), (0, reader), colours["read"], 3)
    axis.set_title("Full Attention Residuals\na weight for each output", color=colours["text"], fontsize=11)


def block(axis, colours: dict[str, str]):
    reader, blocks = len(LABELS) - 1, ((0, 0, 0.40), (1, 2, 0.36), (3, 4, 0.24))
    for y, label in enumerate(LABELS):
        box(axis, y, label, colours, is_reader=y == reader)
    for first, last, weight in blocks:
        middle = (first + last) / 2
        if first != last:
            axis.plot(
                [-0.14, -0.3, -0.3, -0.14],
                [first, first, last, last],
                color=colours["edge"],
                linewidth=1.2,
                solid_joinstyle="round",
            )
        start = (-0.3 if first != last else 0, middle)
        arrow(axis, start, (READ_AT, reader), colours["read"], 0.6 + 8 * weight, -0.45, head=False)
        axis.text(WIDTH + 0.12, middle, f"{weight:.2f}", ha="left", va="center", color=colours["read"], fontsize=9)
    arrow(axis, (READ_AT, reader), (0, reader), colours["read"], 3)
    axis.set_title("Block Attention Residuals\na weight for each block", color=colours["text"], fontsize=11)


def draw(scheme: str) -> Path:
    colours = COLOURS[scheme]
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 3.9))
    for axis, panel in zip(axes, (prenorm, full, block)):
        panel(axis, colours)
        axis.set(xlim=(-1.9, 2.4), ylim=(-0.45, len(LABELS) - 0.4))
        axis.axis("off")
    figure.tight_layout()
    path = Path(__file__).with_name(f"schematic-{scheme}.svg")
    # Without a date, so that the same code gives the same file
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "attnres"
    for scheme in COLOURS:
        print(f"Wrote {draw(scheme)}")
