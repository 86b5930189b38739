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
"""Pictures of depth statistics: where every site reads from, how sharply, and how large hidden states are."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from ..outputs import write_figure
from .measure import DepthStatistics  # noqa: E402


ATTENTION, MLP = "#0072B2", "#D55E00"  # Okabe and Ito's, which colour-blind people can tell apart


def weight_matrix(statistics: DepthStatistics) -> np.ndarray:
    """Mean weights, `[sites, sources]`: the embedding, then block by block; nothing (NaN) where there is no source."""
    sites = statistics.sites
    matrix = np.full((len(sites), 1 + statistics.num_blocks), np.nan)
    for site in sites:
        matrix[site.site, : len(site.weights)] = site.weights
    return matrix


def heat_map(statistics: list[DepthStatistics]) -> Figure:
    """Site by source, one panel for a model and, for two, their difference."""
    matrices = [weight_matrix(of_model) for of_model in statistics]
    titles = [of_model.model for of_model in statistics]
    comparable = len(matrices) == 2 and matrices[0].shape == matrices[1].shape
    panels = len(matrices) + comparable
    height = min(9.0, 2.0 + 0.12 * max(map(len, matrices)))
    figure, axes = plt.subplots(1, panels, figsize=(1.5 + 4.0 * panels, height), squeeze=False)
    for axis, matrix, title, of_model in zip(axes[0], matrices, titles, statistics):
        image = axis.imshow(matrix, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        _label(axis, of_model, f"{title}: mean weight")
        figure.colorbar(image, ax=axis, fraction=0.046)
    if comparable:
        difference = matrices[1] - matrices[0]
        largest = max(np.nanmax(np.abs(difference)), 1e-3)
        image = axes[0, -1].imshow(
            difference, aspect="auto", cmap="PuOr", vmin=-largest, vmax=largest, interpolation="nearest"
        )
        _label(axes[0, -1], statistics[1], f"{titles[1]} less {titles[0]}")
        figure.colorbar(image, ax=axes[0, -1], fraction=0.046)
    figure.tight_layout()
    return figure


def _label(axis, statistics: DepthStatistics, title: str):
    for boundary in range(statistics.block_size, len(statistics.sites), statistics.block_size):
        if statistics.block_size > 1:
            axis.axhline(boundary + 0.5, color="white", linewidth=0.6, alpha=0.7)
    axis.set(title=title, xlabel="source: embedding, then blocks", ylabel="site: attention, MLP, ...")
    axis.title.set_fontsize(10)


def profiles(statistics: list[DepthStatistics]) -> Figure:
    """Over the depth of sites: entropy, weight of the embedding and of the newest source, size of hidden states."""
    figure, axes = plt.subplots(len(statistics), 3, figsize=(12, 3.2 * len(statistics)), squeeze=False)
    for row, of_model in zip(axes, statistics):
        for kind, colour in (("attention", ATTENTION), ("mlp", MLP)):
            sites = [site for site in of_model.sites if site.kind == kind]
            places = [site.site for site in sites]
            label = {"attention": "attention", "mlp": "MLP"}[kind]
            row[0].plot(places, [site.relative_entropy for site in sites], "o-", ms=3, color=colour, label=label)
            newest, embedding = zip(*((site.predecessor_weight, site.embedding_weight) for site in sites))
            row[1].plot(places, newest, "o-", ms=3, color=colour, label=f"{label}, newest")
            row[1].plot(places, embedding, ":", color=colour, label=f"{label}, embedding")
        row[0].set(title=f"{of_model.model}: entropy", ylabel="entropy / its maximum", ylim=(0, 1.05))
        row[1].set(title="weight of newest source and embedding", ylim=(0, 1.05))
        places = [site.site for site in of_model.sites]
        row[2].plot(places, [site.rms for site in of_model.sites], color="#009E73", label="what is read")
        if of_model.sites[0].stream_rms is not None:
            row[2].plot(places, [site.stream_rms for site in of_model.sites], color="black", label="PreNorm stream")
        row[2].set(title="root mean square", yscale="log")
        for axis in row:
            axis.set_xlabel("site")
            axis.title.set_fontsize(10)
            axis.legend(frameon=False, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
    figure.tight_layout()
    return figure


def draw(statistics: list[DepthStatistics], output: Path) -> list[Path]:
    """Write all pictures as PNG and SVG; their paths."""
    paths = []
    for name, figure in (("weights", heat_map(statistics)), ("profiles", profiles(statistics))):
        paths += write_figure(figure, output / name)
        plt.close(figure)
    return paths
