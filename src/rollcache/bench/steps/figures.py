"""Fidelity against speed: the operating points of every method joined, the closer to the upper right the better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollcache.bench.report.style import PALETTE, drawing
from rollcache.bench.steps.tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"psnr": "PSNR against full compute, dB", "ssim": "SSIM against full compute"}
COLOURS = {"fsc": PALETTE.cached, "measured": PALETTE.second, "fewer": PALETTE.third}  # the others stay grey
MARKERS = "osD^vPX*<>hd8p"
APART = 0.042  # of the height, between two labels


def frontier(rows: Sequence[Row], metric: str) -> Figure:
    """One line a method.

    Args:
        rows: of the methods, see `tables.rows`.
        metric: "psnr" or "ssim".
    """
    lines = {
        key: sorted((r.predicted, _value(r, metric)) for r in rows if r.key == key)
        for key in dict.fromkeys(r.key for r in rows)
    }
    labels = {r.key: r.label for r in rows}
    with drawing() as figure_class:
        figure = figure_class(figsize=(8.6, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for (key, points), marker in zip(lines.items(), MARKERS * 4, strict=False):
            xs, ys = zip(*points, strict=True)
            bold = key in COLOURS
            colour = COLOURS.get(key, PALETTE.muted)
            axes.plot(
                xs,
                ys,
                color=colour,
                marker=marker,
                markersize=5.5 if bold else 4.5,
                linewidth=2.0 if bold else 0.9,
                alpha=1.0 if bold else 0.75,
                zorder=3 if bold else 2,
            )
        axes.grid(axis="both")
        axes.set_axisbelow(True)
        axes.set_xlabel("predicted speedup")
        axes.set_title(NAMES[metric])
        _label(axes, lines, labels)
    return figure


def _value(row: Row, metric: str) -> float:
    value = row.psnr if metric == "psnr" else row.means["ssim"]
    assert value is not None
    return value


def _label(axes: Axes, lines: dict[str, list[tuple[float, float]]], labels: dict[str, str]) -> None:
    """Names at the right, in the order of the lines' ends, pushed apart where they would overlap."""
    bottom, top = axes.get_ylim()
    right = max(x for points in lines.values() for x, _ in points)
    left = min(x for points in lines.values() for x, _ in points)
    axes.set_xlim(left - 0.03 * (right - left + 0.1), right + 0.45 * (right - left + 0.1))
    at = right + 0.06 * (right - left + 0.1)
    previous = float("inf")
    places = {}
    for key in sorted(lines, key=lambda k: -lines[k][-1][1]):
        y = min(lines[key][-1][1], previous - APART * (top - bottom))
        places[key] = previous = y
    shift = max(0.0, bottom - min(places.values()))
    for key, y in places.items():
        x_end, y_end = lines[key][-1]
        colour = COLOURS.get(key, PALETTE.ink)
        axes.annotate(
            labels[key],
            (x_end, y_end),
            (at, y + shift),
            color=colour,
            fontsize=8.5,
            fontweight="bold" if key in COLOURS else "normal",
            va="center",
            arrowprops={"arrowstyle": "-", "color": PALETTE.line, "linewidth": 0.6},
        )
    axes.set_ylim(bottom, top)
