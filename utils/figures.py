# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib: their colours, their axes, and files that come out the same again."""

from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which colour-blind people can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def finish_axis(axis: "Axes"):
    """No frame on the right and above, and a light grid, as our figures have it."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def write_figure(figure: "Figure", stem: Path) -> list[Path]:
    """Write a figure of matplotlib as PNG and SVG, undated, so that it comes out the same again; their paths."""
    import matplotlib as mpl

    paths = []
    for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
        path = stem.with_name(stem.name + suffix)
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with mpl.rc_context({"svg.hashsalt": stem.name}):  # by which ids are made, and by chance without one
                figure.savefig(unfinished, format=suffix[1:], dpi=150, metadata=metadata, bbox_inches="tight")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        paths.append(path)
    return paths
