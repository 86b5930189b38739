# SPDX-License-Identifier: Apache-2.0
"""The loss curves of fine-tuning: what an axis must not do."""

import matplotlib.pyplot as plt
import pytest

from attnres.training.curves import COLOURS, draw_curves, plot_curves


def history(steps, loss=2.0, entropy=None):
    entries = [{"step": step, "loss": loss, "eval_loss": loss + 0.1} for step in steps]
    return entries if entropy is None else [{**entry, "depth_entropy": entropy} for entry in entries]


@pytest.mark.parametrize("steps", [[3], [0, 1], [0, 5, 20], [0, 100_000, 1_000_000]])
def test_axes_are_readable(steps):
    """Steps are whole numbers, no label needs an offset that stands elsewhere, and one value is still to be seen."""
    figure = draw_curves({"a run": history(steps, loss=1234.5678, entropy=0.99991)}, "title")
    figure.canvas.draw()
    losses, entropies = figure.axes
    for axis in (losses, entropies):
        assert all(tick == int(tick) for tick in axis.get_xticks())
        assert axis.yaxis.get_offset_text().get_text() == axis.xaxis.get_offset_text().get_text() == ""
        for line in axis.lines:
            assert len(line.get_xdata()) > 1 or line.get_marker() == "o"
    assert entropies.get_ylim()[0] <= 0.9 and 1 <= entropies.get_ylim()[1] < 1.01
    assert figure.legends == []  # of one run the title tells
    plt.close(figure)


def test_legend_hides_nothing_and_every_run_is_drawn(tmp_path):
    histories = {f"run {i}": history([0, 10], loss=2 + i, entropy=0.5) for i in range(len(COLOURS) + 2)}
    figure = draw_curves(histories, "title")
    figure.canvas.draw()
    assert len(figure.axes[0].lines) == 2 * len(histories) and len(figure.axes[1].lines) == len(histories)
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(histories)
    assert not any(legend.get_window_extent().overlaps(axis.get_tightbbox()) for axis in figure.axes)
    plt.close(figure)
    assert [path.name for path in plot_curves(histories, tmp_path / "loss", "title")] == ["loss.png", "loss.svg"]


def test_runs_without_depth_have_one_panel():
    figure = draw_curves({"PreNorm": history([0, 10])}, "title")
    assert len(figure.axes) == 1
    plt.close(figure)
