# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""Pictures of depth statistics: where every site reads from, how sharply, what it is worth, how large things are."""

from pathlib import Path
from textwrap import wrap

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import Colormap, Normalize, PowerNorm, SymLogNorm  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.image import AxesImage  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter  # noqa: E402

from ..utils.figures import write_figure  # noqa: E402
from ..utils.markup import figure_text  # noqa: E402
from .measure import DepthStatistics  # noqa: E402


# Okabe and Ito's, which colour-blind people can tell apart
ATTENTION, MLP, READ = "#0072B2", "#D55E00", "#009E73"
KINDS = (("attention", "attention", ATTENTION), ("mlp", "MLP", MLP), ("sublayer", "sublayers", ATTENTION))
NO_SOURCE = "#e6e6e6"


def weight_matrix(statistics: DepthStatistics) -> np.ndarray:
    """Mean weights, `[sites, sources]`: the embedding, then block by block; NaN without a source or without a read."""
    return _matrix(statistics, [site.weights for site in statistics.sites])


def ablation_matrix(statistics: DepthStatistics) -> np.ndarray:
    """Rise of the loss by what is masked out, `[sites, sources]`; NaN where there is no source, or no other one."""
    return _matrix(statistics, [site.ablation for site in statistics.sites])


def _matrix(statistics: DepthStatistics, rows: list[list[float | None]]) -> np.ndarray:
    num_sources = max(len(site.weights) for site in statistics.sites)
    matrix = np.full((statistics.sites[-1].site + 1, num_sources), np.nan)
    for site, row in zip(statistics.sites, rows):
        matrix[site.site, : len(row)] = row  # None becomes NaN
    return matrix


def heat_map(statistics: list[DepthStatistics]) -> Figure:
    """Mean weights, site by source: one panel for a model and, for two, their difference."""
    norm = _weight_norm([site.weights for of_model in statistics for site in of_model.sites])
    panels = [(of_model.model, of_model, weight_matrix(of_model), "viridis", norm) for of_model in statistics]
    if len(panels) == 2 and panels[0][2].shape == panels[1][2].shape:
        difference = panels[1][2] - panels[0][2]
        largest = max(np.nanmax(np.abs(difference)), 1e-3)
        title = f"{statistics[1].model}\nminus {statistics[0].model}"
        panels.append((title, statistics[1], difference, "PuOr", Normalize(-largest, largest)))
    return _heat_maps(panels, "mean weight")


def _weight_norm(reads: list[list[float]]) -> Normalize:
    """From the smallest to the largest weight of reads that have a choice: a single source always has weight 1.

    Most weights are small, and their roots are easier to tell apart.
    """
    weights = [weight for read in reads if len(read) > 1 for weight in read]
    low, high = min(weights), max(weights)
    return PowerNorm(0.5, vmin=low if high - low > 1e-6 else 0, vmax=high)


def heads_map(statistics: list[DepthStatistics]) -> Figure:
    """Mean weights of every head side by side, for a model with several."""
    (of_model,) = [of_model for of_model in statistics if of_model.sites[0].heads is not None][-1:]
    norm = _weight_norm([weights for site in of_model.sites for weights in site.heads or []])
    num_heads = len(of_model.sites[0].heads or [])
    matrices = [_matrix(of_model, [(site.heads or [])[head] for site in of_model.sites]) for head in range(num_heads)]
    agreement = np.mean([site.head_agreement for site in of_model.sites if len(site.weights) > 1])
    titles = [f"{of_model.model}\nhead {head + 1} (heads have {agreement:.2f} in common)" for head in range(num_heads)]
    panels = [(title, of_model, matrix, "viridis", norm) for title, matrix in zip(titles, matrices)]
    return _heat_maps(panels, "mean weight")


def ablation_map(statistics: list[DepthStatistics]) -> Figure:
    """By how much the loss rises when a source is masked out at a site, one panel for a model."""
    matrices = [ablation_matrix(of_model) for of_model in statistics]
    largest = max(max(np.nanmax(np.abs(matrix)) for matrix in matrices), 1e-6)
    # A few sources are worth a hundred times the others: linear around zero, logarithmic beyond
    norm = SymLogNorm(linthresh=largest / 100, vmin=-largest, vmax=largest)
    panels = [(of_model.model, of_model, matrix, "PuOr", norm) for of_model, matrix in zip(statistics, matrices)]
    return _heat_maps(panels, "rise of the loss, nats per token")


def _heat_maps(panels: list[tuple[str, DepthStatistics, np.ndarray, str | Colormap, Normalize]], unit: str) -> Figure:
    num_sites, num_sources = panels[0][2].shape
    size = (min(5.6, 2.8 + 0.11 * num_sources), min(7.0, 2.6 + 0.09 * num_sites))
    # Ten characters of a title are 0.85 inches, and titles need room between them
    width = int((size[0] - 0.8) / 0.085)
    titles = ["\n".join(part for line in title.split("\n") for part in wrap(line, width)) for title, *_ in panels]
    height = size[1] + 0.16 * max(title.count("\n") for title in titles)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(size[0] * len(panels), height), squeeze=False, layout="constrained"
    )
    images: dict[Normalize, tuple[AxesImage, list[Axes]]] = {}
    for axis, title, (_, of_model, matrix, colours, norm) in zip(axes[0], titles, panels):
        axis.set_facecolor(NO_SOURCE)
        image = axis.imshow(matrix, aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
        if of_model.block_size > 1:
            for boundary in range(of_model.block_size, len(matrix), of_model.block_size):
                axis.axhline(boundary - 0.5, color="black", linewidth=0.8)
                axis.axhline(boundary - 0.5, color="white", linewidth=0.8, linestyle=(0, (3, 3)))
        _label_heat_map(axis, of_model, "\n".join(map(figure_text, title.split("\n"))))
        images.setdefault(norm, (image, []))[1].append(axis)
    for norm, (image, of_norm) in images.items():  # a bar for all panels that share its colours
        bar = figure.colorbar(image, ax=of_norm, label=unit, fraction=0.08, aspect=30)
        if isinstance(norm, PowerNorm):  # at equal distances, so that both ends have one
            bar.set_ticks(norm.inverse(np.linspace(0, 1, 6)))
            bar.formatter = StrMethodFormatter("{x:.3g}")
    return figure


def _label_heat_map(axis: Axes, statistics: DepthStatistics, title: str):
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(f"source: E embedding, then {'blocks' if statistics.block_size > 1 else 'sublayers'}")
    alternating = all(site.kind in (("attention", "mlp")[site.site % 2], "final") for site in statistics.sites)
    axis.set_ylabel("site\n(2n: attention of layer n, 2n + 1: its MLP)" if alternating else "site", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    axis.xaxis.set_major_formatter(lambda place, _: "E" if place == 0 else f"{place:.0f}")


def profiles(statistics: list[DepthStatistics]) -> Figure:
    """Over the depth of sites, a row for a model: entropy, weight of the newest source and of the embedding, sizes."""
    has_gradients = any(of_model.sites[0].gradient_rms is not None for of_model in statistics)
    columns = 5 if has_gradients else 4
    figure, axes = plt.subplots(
        len(statistics),
        columns,
        figsize=(3.3 * columns, 0.7 + 2.9 * len(statistics)),
        squeeze=False,
        layout="constrained",
        sharey="col",
    )
    for row, of_model in zip(axes, statistics):
        _draw_profiles(row, of_model)
        for axis in row[3:]:
            low, high = axis.get_ylim()
            # Less than a decade may hold no round number of a logarithmic scale
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(5))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(NullLocator())
        for axis in row:
            _finish(axis, of_model)
        row[0].set_ylabel("\n".join(figure_text(line) for line in wrap(of_model.model, 30)), fontsize=11)
    for axis in axes[0, 1:3]:  # once all rows are drawn, which share the axis
        axis.set_ylim(bottom=0)
    for column in axes.T:
        lines = {line.get_label(): line for axis in column for line in axis.get_legend_handles_labels()[0]}
        if lines:  # below all rows, where it hides nothing
            column[-1].legend(
                handles=list(lines.values()), frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2)
            )
    return figure


def _draw_profiles(row: np.ndarray, of_model: DepthStatistics):
    """Draw the lines of a model on its axes, `[columns]`."""
    sites = of_model.sites
    has_gradients = len(row) > 4
    for kind, label, colour in KINDS:
        of_kind = [site for site in sites if site.kind == kind]
        several = [site for site in of_kind if len(site.weights) > 1]
        for axis, field in zip(row, ("relative_entropy", "predecessor_weight", "embedding_weight")):
            _line(axis, several, field, f"before {label}", colour, marker="o")
        if has_gradients:
            _line(row[4], of_kind, "gradient_rms", f"of {label}", colour, marker="o")
    _line(row[3], sites, "rms", "result of the read", READ, marker="o")
    if sites[0].stream_rms is not None:
        _line(row[3], sites, "stream_rms", "PreNorm stream", "black", linestyle="--")
    if has_gradients and sites[0].base_gradient_rms is not None:
        _line(row[4], sites[:-1], "base_gradient_rms", "PreNorm base", "black", linestyle="--")
    row[0].set(title="entropy, fraction of its maximum", ylim=(0, 1.05))
    row[1].set_title("weight of the newest source")
    row[2].set_title("weight of the embedding")
    row[3].set(title="hidden states, RMS", yscale="log")
    if has_gradients:
        row[4].set(title="gradient of outputs, RMS", yscale="log")


def _line(axis: Axes, sites: list, field: str, label: str, colour: str, **kwargs):
    if not sites:
        return
    values = [getattr(site, field) for site in sites]
    if len(sites) == 1:  # no line, so a dotted one would not be seen
        kwargs["marker"] = "x" if "linestyle" in kwargs else "o"
    axis.plot([site.site for site in sites], values, color=colour, label=label, markersize=3, linewidth=1.3, **kwargs)


def _finish(axis: Axes, statistics: DepthStatistics):
    last = statistics.sites[-1].site
    if statistics.block_size > 1:
        for boundary in range(statistics.block_size, last + 1, statistics.block_size):
            axis.axvline(boundary - 0.5, color="black", alpha=0.15, linewidth=0.8)
    axis.set_xlim(-0.5, last + 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axis.set_xlabel("site")
    axis.title.set_fontsize(10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.tick_params(labelleft=True)


def draw(statistics: list[DepthStatistics], output: Path) -> list[Path]:
    """Write all pictures as PNG and SVG; their paths."""
    figures = {"weights": heat_map(statistics), "profiles": profiles(statistics)}
    if any(of_model.sites[0].heads is not None for of_model in statistics):
        figures["heads"] = heads_map(statistics)
    if statistics[0].sites[0].ablation is not None:
        figures["ablation"] = ablation_map(statistics)
    paths = []
    for name, figure in figures.items():
        paths += write_figure(figure, output / name)
        plt.close(figure)
    return paths
