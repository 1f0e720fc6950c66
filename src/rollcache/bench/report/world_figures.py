"""Figures of an evaluation, drawn from its document alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollcache.bench.report.style import NINES_MAP, PALETTE, colormap, drawing, quiet
from rollcache.street.rig import FPS, FRAMES_PER_LATENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SceneDict = Mapping[str, Any]
COLOURS = {"urban": PALETTE.cached, "highway": PALETTE.second, "u-turn": PALETTE.third}


def figures(scenes: Sequence[SceneDict]) -> dict[str, Figure]:
    """All figures for which there is something to draw, by name."""
    drawn: dict[str, Figure] = {}
    for name, part, draw in (
        ("horizon", "horizon", horizon),
        ("cameras", "horizon", cameras),
        ("stability", "stability", stability),
        ("actions", "actions", actions),
        ("agents", "agents", agents),
    ):
        there = [s for s in scenes if part in s["parts"]]
        if there:
            drawn[name] = draw(there)
    return drawn


def horizon(scenes: Sequence[SceneDict]) -> Figure:
    """PSNR, SSIM and FLIP over the horizon, a line a scene."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 3.6), layout="constrained")
        for axes, (key, title) in zip(
            figure.subplots(1, 3),
            (("psnr", "PSNR, dB"), ("ssim", "SSIM"), ("flip", "FLIP, less is closer")),
            strict=True,
        ):
            for s in scenes:
                part = s["parts"]["horizon"]
                _line(axes, part["seconds"], part[key], s)
                if key == "psnr":
                    _line(axes, part["seconds"], part["held"], s, linestyle=":", linewidth=0.9, label=None)
            if key == "psnr":
                for s in scenes:
                    if "codec" in s["parts"]:
                        axes.axhline(s["parts"]["codec"]["psnr"], color=_colour(s), linewidth=0.8, linestyle="-.")
                axes.legend(fontsize=8)
            _dress(axes, title)
    return figure


def cameras(scenes: Sequence[SceneDict]) -> Figure:
    """PSNR of every camera and window, a map a scene."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 1.75 * len(scenes) + 0.5), layout="constrained")
        values = [v for s in scenes for row in s["parts"]["horizon"]["cameras"]["psnr"].values() for v in row]
        low, high = math.floor(min(values)), math.ceil(max(values))
        for axes, s in zip(figure.subplots(len(scenes), 1, squeeze=False)[:, 0], scenes, strict=True):
            part = s["parts"]["horizon"]
            rows = part["cameras"]["psnr"]
            edges = [0.0, *part["seconds"]]
            mesh = axes.pcolormesh(
                edges, range(len(rows) + 1), list(rows.values()), cmap=colormap(NINES_MAP), vmin=low, vmax=high
            )
            axes.set_yticks([i + 0.5 for i in range(len(rows))], labels=list(rows), fontsize=8)
            axes.invert_yaxis()
            axes.set_title(s["name"])
            quiet(axes, left=False)
        axes.set_xlabel("seconds")
        bar = figure.colorbar(mesh, ax=figure.axes, shrink=0.9, pad=0.01)
        bar.outline.set_visible(False)
        bar.set_label("PSNR, dB")
    return figure


def stability(scenes: Sequence[SceneDict]) -> Figure:
    """Sharpness, colours and flow over the horizon."""
    shown = (
        ("sharpness", "sharpness / rendered", 1.0),
        ("contrast", "spread of colours / rendered", 1.0),
        ("colour_shift", "shift of the mean colour", 0.0),
        ("flow", "flow along the rendered one", 1.0),
    )
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 5.2), layout="constrained")
        for axes, (key, title, ideal) in zip(figure.subplots(2, 2).flat, shown, strict=True):
            axes.axhline(ideal, color=PALETTE.line, linewidth=1.2)
            for s in scenes:
                part = s["parts"]["stability"]
                _line(axes, part["seconds"], part[key], s)
            _dress(axes, title)
            if key == "sharpness":
                axes.legend(fontsize=8)
    return figure


def actions(scenes: Sequence[SceneDict]) -> Figure:
    """Commanded and recovered yaw rate and speed, a row a scene."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 1.9 * len(scenes) + 0.4), layout="constrained")
        for row, s in zip(figure.subplots(len(scenes), 2, squeeze=False), scenes, strict=True):
            part = s["parts"]["actions"]
            seconds = [(i + 1) * FRAMES_PER_LATENT / FPS for i in range(len(part["commanded"]))]
            for axes, column, title in ((row[0], 1, "yaw rate, rad/s"), (row[1], 0, "speed, m/s")):
                for key, style in (
                    ("rendered", {"color": PALETTE.second, "linewidth": 0.9}),
                    ("recovered", {"color": PALETTE.cached, "linewidth": 1.4}),
                    ("commanded", {"color": PALETTE.ink, "linewidth": 1.0, "linestyle": "--"}),
                ):
                    label = {"rendered": "read from rendered", "recovered": "read from generated"}.get(key, key)
                    axes.plot(seconds, [v[column] for v in part[key]], label=label, **style)
                _dress(axes, f"{s['name']}: {title}")
        figure.axes[0].legend(fontsize=8)
    return figure


def agents(scenes: Sequence[SceneDict]) -> Figure:
    """Contrast of the agents over the horizon."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 2.9), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(0, color=PALETTE.line, linewidth=1.2)
        for s in scenes:
            part = s["parts"]["agents"]
            _line(axes, part["seconds"], part["by_window"], s)
        for s in scenes:
            if s["parts"]["agents"]["reference"] is not None:
                axes.axhline(s["parts"]["agents"]["reference"], color=_colour(s), linewidth=0.8, linestyle="-.")
        axes.legend(fontsize=8)
        _dress(axes, "agents where they should be: 1 as rendered, 0 as if left out")
    return figure


def _colour(scene: SceneDict) -> str:
    return COLOURS.get(scene["scenario"], PALETTE.ink)


def _line(axes: Axes, seconds: Sequence[float], values: Sequence[float | None], scene: SceneDict, **style: Any) -> None:
    """A line of a scene; recorded drives are dashed, missing values gaps."""
    if len(values) != len(seconds):
        return
    kept = [math.nan if v is None else v for v in values]
    usual = {
        "color": _colour(scene),
        "linewidth": 1.5,
        "linestyle": "-" if scene["source"] == "scripted" else "--",
        "label": scene["name"],
    }
    marker = {"marker": "o", "markersize": 3} if len(values) < 4 else {}
    axes.plot(seconds, kept, **{**usual, **marker, **style})


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
