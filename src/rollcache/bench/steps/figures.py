"""Fidelity against speed: the operating points of every method joined, the closer to the upper right the better."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollcache.bench.report.style import PALETTE, drawing
from rollcache.bench.steps.tables import SAVES, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = list[tuple[float, float]]
TITLES = {
    "psnr": "PSNR against full compute, dB",
    "ssim": "1 - SSIM against full compute, logarithmic; higher up is better",
}
COLOURS = {"fsc": PALETTE.cached, "sigma-2": PALETTE.second, "fewer": PALETTE.third}  # the others stay grey
MARKERS = "osD^vPX*<>hd8p"
APART = 0.042  # of the height, between two labels
FAR = 10.0  # dB below the median of the methods: not drawn, or all others would be one line
LEAST = 1e-6  # of 1 - SSIM


def frontier(rows: Sequence[Row], metric: str) -> Figure:
    """One line a method.

    Args:
        rows: of the methods, see `tables.rows`.
        metric: "psnr" or "ssim".
    """
    rows = [r for r in rows if r.predicted > SAVES]
    psnr = {key: [r.psnr for r in rows if r.key == key] for key in dict.fromkeys(r.key for r in rows)}
    labels = {r.key: r.label for r in rows}
    middle = statistics.median(r.psnr for r in rows)
    far = [key for key, found in psnr.items() if key not in COLOURS and max(found) < middle - FAR]
    lines: dict[str, Line] = {
        key: sorted((r.predicted, _value(r, metric)) for r in rows if r.key == key) for key in psnr if key not in far
    }
    with drawing() as figure_class:
        figure = figure_class(figsize=(8.6, 5.2), layout="constrained")
        axes = figure.add_subplot()
        if metric == "ssim":
            axes.set_yscale("log")
            axes.invert_yaxis()
        for (key, points), marker in zip(lines.items(), MARKERS * len(lines), strict=False):
            _draw(axes, key, points, marker)
        axes.grid(axis="both")
        axes.set_axisbelow(True)
        left_out = [f"{labels[key]} ({min(psnr[key]):.1f} to {max(psnr[key]):.1f} dB)" for key in far]
        axes.set_xlabel("predicted speedup" + ("\nnot drawn: " + ", ".join(left_out) if left_out else ""))
        axes.set_title(TITLES[metric])
        _label(axes, lines, labels)
    return figure


def spread(places: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Places in the same order, `apart` or more from each other and as near as can be to where they were.

    Args:
        places: falling.
        apart: least distance.
        low: none lies below, as long as there is room.
        high: none lies above.
    """
    groups: list[list[float]] = []  # [sum of wanted tops, count]: labels that touch move as one
    for i, place in enumerate(places):
        groups.append([place + i * apart, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] <= groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    tops = [total / count for total, count in groups for _ in range(int(count))]
    found = [top - i * apart for i, top in enumerate(tops)]
    found = [min(y, high - i * apart) for i, y in enumerate(found)]
    last = len(found) - 1
    return [max(y, min(low + (last - i) * apart, high - i * apart)) for i, y in enumerate(found)]


def _value(row: Row, metric: str) -> float:
    if metric == "psnr":
        return row.psnr
    ssim = row.means["ssim"]
    assert ssim is not None
    return max(1 - ssim, LEAST)


def _draw(axes: Axes, key: str, points: Line, marker: str) -> None:
    bold = key in COLOURS
    xs, ys = zip(*points, strict=True)
    axes.plot(
        xs,
        ys,
        color=COLOURS.get(key, PALETTE.muted),
        marker=marker,
        markersize=5.5 if bold else 4.5,
        linewidth=2.0 if bold else 0.9,
        alpha=1.0 if bold else 0.75,
        zorder=3 if bold else 2,
    )


def _label(axes: Axes, lines: Mapping[str, Line], labels: Mapping[str, str]) -> None:
    """Names beside the axes, each near the end of its line."""
    axes.autoscale_view()  # else what follows asks before the limits are known
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = {key: float(to_axes.transform(points[-1])[1]) for key, points in lines.items()}
    order = sorted(heights, key=lambda key: -heights[key])
    for key, y in zip(order, spread([heights[key] for key in order], APART, 0.0, 1.0), strict=True):
        axes.annotate(
            labels[key],
            lines[key][-1],
            (1.06, y),
            textcoords="axes fraction",
            annotation_clip=False,
            color=COLOURS.get(key, PALETTE.ink),
            fontsize=8.5,
            fontweight="bold" if key in COLOURS else "normal",
            va="center",
            arrowprops={"arrowstyle": "-", "color": PALETTE.line, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1},
        )
