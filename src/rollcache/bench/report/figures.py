"""Figures of one scenario, drawn from its result alone: score sheet, skip map, similarity maps, frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollcache.bench.report.style import NINES_MAP, PALETTE, REPLAY_MAP, colormap, drawing, quiet
from rollcache.street.rig import FPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]
CAP = 76.0  # dB drawn at most; identical frames sit at this line
SHEET_LEFT, SHEET_RIGHT = 0.06, 0.95  # of the score sheet's width; the page lays a playhead over it


def figures(result: Result) -> dict[str, Figure]:
    """All figures of a scenario by name."""
    found = {"score": score_sheet(result), "skip": skip_map(result)}
    if result.get("profile"):
        found["cosine"] = cosine_maps(result)
    if result.get("controls") and result["speedup"] is not None:
        found["frontier"] = frontier(result)
    return found


def score_sheet(result: Result) -> Figure:
    """Drive, PSNR per frame and decisions over one time axis: what was asked, what it cost, what was recomputed."""
    take, chunks = result["take"], len(result["decisions"]["chunks"])
    trace = result["fidelity"]["trace"]
    per = len(trace) // chunks
    seconds = [i / FPS for i in range(len(trace))]
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 5.4))
        grid = figure.add_gridspec(
            3, 1, height_ratios=(0.9, 2.3, 1.1), hspace=0.34, left=SHEET_LEFT, right=SHEET_RIGHT, top=0.95, bottom=0.09
        )
        drive, psnr, cells = (figure.add_subplot(grid[i]) for i in range(3))
        for axes in (drive, psnr):
            _turning(axes, result["turning"])
            axes.set_xlim(0, len(trace) / FPS)
            axes.tick_params(labelbottom=False)
        _drive(drive, take, len(trace))
        _traces(psnr, result, seconds)
        _timeline(cells, result["decisions"]["chunks"], per, len(result["decisions"]["skip_by_step_block"]))
    return figure


def skip_map(result: Result) -> Figure:
    """How often every cell (step, block) was skipped."""
    rates = result["decisions"]["skip_by_step_block"]
    with drawing() as figure_class:
        figure = figure_class(figsize=(5.6, 0.42 * len(rates) + 1.2), layout="constrained")
        axes = figure.add_subplot()
        _map(axes, rates, REPLAY_MAP, 0, 1, [[f"{100 * v:.0f}" for v in row] for row in rates], dark_above=0.6)
        axes.set_title("skipped, % of the chunks that count")
        axes.set_ylabel("step t")
        axes.set_xlabel("block b")
    return figure


def cosine_maps(result: Result) -> Figure:
    """Cosine of block inputs with the generation step before, per position in the KV cycle, in nines."""
    profile = result["profile"]
    phases = profile["phases"]
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 0.3 * profile["steps"] + 1.55), layout="constrained")
        plots = figure.subplots(1, phases, sharey=True, squeeze=False)[0]
        for j, axes in enumerate(plots):
            values = [[nines(v) for v in row] for row in profile["cosine"][j]]
            mesh = _map(axes, values, NINES_MAP, 0, 5)
            mean = profile["phase_cosine"][j]
            title = f"j = {j}" if phases > 1 else "every chunk"
            axes.set_title(f"{title}, mean {_cos(mean)}" if mean is not None else title)
            axes.set_xlabel("block b")
        plots[0].set_ylabel("step t")
        bar = figure.colorbar(mesh, ax=plots, shrink=0.9, pad=0.01, aspect=14)
        bar.outline.set_visible(False)
        bar.set_ticks(range(6), labels=["0", ".9", ".99", ".999", ".9999", ".99999"])
        bar.set_label("cosine")
    return figure


def frontier(result: Result) -> Figure:
    """Speed against fidelity of the cache and of every control."""
    points = [(result["policy"]["label"], result["speedup"], result["psnr"], True)]
    points += [(c["label"], c["speedup"], c["psnr"], False) for c in result["controls"]]
    with drawing() as figure_class:
        figure = figure_class(figsize=(5.6, 3.7), layout="constrained")
        axes = figure.add_subplot()
        floor = [f["psnr"] for f in result["floor"].values()]
        if floor:
            low, high = min(floor), max(floor)
            axes.axhspan(low if high - low > 0.4 else low - 0.2, high + 0.2, color=PALETTE.floor, lw=0)
            axes.text(
                0.99,
                high + 0.2,
                "numerical floor",
                transform=_across(axes),
                ha="right",
                va="bottom",
                fontsize=8.5,
                color=PALETTE.muted,
            )
        for _, speed, quality, ours in points:
            colour = PALETTE.cached if ours else PALETTE.muted
            axes.plot(speed, min(quality, CAP), "o", ms=8 if ours else 6, color=colour, mec=PALETTE.paper, mew=0.8)
        axes.set_xlabel("speedup of the transformer (full compute = 1)")
        axes.set_ylabel("PSNR to full compute, dB")
        axes.axvline(1, color=PALETTE.line, lw=0.8)
        axes.margins(x=0.1, y=0.1)
        _labels(axes, points)
    return figure


def nines(cosine: float | None) -> float:
    """0.9 -> 1, 0.99 -> 2, ...: how many nines a cosine has, between 0 and 5."""
    if cosine is None:
        return math.nan
    return min(5.0, max(0.0, -math.log10(max(1e-5, 1 - cosine))))


def _cos(value: float) -> str:
    return f"{value:.2f}" if value < 0.995 else f"{value:.5f}".rstrip("0")


def _drive(axes: Axes, take: Mapping[str, Any], frames: int) -> None:
    times = [i / FPS for i in range(frames)]
    speed, yaw = take["speed"][:frames], take["yaw_rate"][:frames]
    axes.plot(times, speed, color=PALETTE.ink, lw=1.3)
    axes.set_ylim(min(0, *speed), max(5.0, max(speed) * 1.25))
    axes.set_ylabel("speed, m/s")
    right = axes.twinx()
    right.plot(times, yaw, color=PALETTE.third, lw=1.3)
    reach = max(0.25, *(abs(v) for v in yaw)) * 1.15
    right.set_ylim(-reach, reach)
    right.set_yticks([-_tick(reach), 0, _tick(reach)])
    right.tick_params(colors=PALETTE.third, size=0)
    right.spines[:].set_visible(False)
    right.set_ylabel("yaw, rad/s", color=PALETTE.third)
    axes.set_title("What the car was told: speed and yaw rate (left is positive); turning is shaded", pad=4)


def _tick(reach: float) -> float:
    return next((t for t in (1.0, 0.5, 0.4, 0.2) if t < reach), 0.1)


def _traces(axes: Axes, result: Result, seconds: Sequence[float]) -> None:
    floors = [f["trace"] for f in result["floor"].values()]
    if floors:
        low = [min(CAP, *v) if len(v) > 1 else min(CAP, v[0]) for v in zip(*floors, strict=True)]
        high = [min(CAP, max(v)) for v in zip(*floors, strict=True)]
        pad = [max(0.0, 0.8 - (h - x)) / 2 for x, h in zip(low, high, strict=True)]
        axes.fill_between(
            seconds,
            [x - p for x, p in zip(low, pad, strict=True)],
            [x + p for x, p in zip(high, pad, strict=True)],
            color=PALETTE.floor,
            lw=0,
            label="numerical floor",
        )
    others = {c["key"]: c for c in result.get("controls", ())}
    for key, colour in (("frozen", PALETTE.third), ("action-gate", PALETTE.second)):
        if key in others:
            axes.plot(
                seconds, _capped(others[key]["trace"]), color=colour, lw=1.0, alpha=0.9, label=others[key]["label"]
            )
    axes.plot(
        seconds, _capped(result["fidelity"]["trace"]), color=PALETTE.cached, lw=1.9, label=result["policy"]["label"]
    )
    axes.grid(axis="y")
    axes.set_ylabel("PSNR, dB")
    axes.set_title("Distance from full compute, mean over cameras", pad=4)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 0.985),
        ncols=4,
        fontsize=8.5,
        handlelength=1.3,
        columnspacing=1.2,
        borderaxespad=0,
    )
    drawn = [result["fidelity"]["trace"], *(others[k]["trace"] for k in ("frozen", "action-gate") if k in others)]
    axes.set_ylim(min(CAP - 10, *(min(trace) for trace in drawn)) - 2, CAP + 1)


def _timeline(axes: Axes, chunks: Sequence[Sequence[str]], per: int, steps: int) -> None:
    shares = [[_share(words, t) for words in chunks] for t in range(steps)]
    width = per / FPS
    for n, words in enumerate(chunks):
        if not words:
            axes.plot((n + 0.5) * width, steps / 2, ".", color=PALETTE.paper, ms=4)
    edges = [n * width for n in range(len(chunks) + 1)]
    axes.pcolormesh(
        edges,
        range(steps + 1),
        shares,
        cmap=colormap(REPLAY_MAP),
        vmin=0,
        vmax=1,
        edgecolors=PALETTE.paper,
        linewidth=0.7,
    )
    axes.set_ylim(steps, 0)
    axes.set_xlim(0, len(chunks) * width)
    axes.set_yticks([t + 0.5 for t in range(steps)], labels=[str(t) for t in range(steps)])
    axes.set_ylabel("step t")
    axes.set_xlabel("time, s")
    quiet(axes, left=False)
    axes.set_title("Decisions: pale computed, deep green replayed; one column per generation step", pad=4)


def _share(words: Sequence[str], step: int) -> float:
    return 1.0 if not words else words[step].count("R") / len(words[step])


def _turning(axes: Axes, turning: Sequence[bool]) -> None:
    start = None
    for i, turns in enumerate([*turning, False]):
        if turns and start is None:
            start = i
        elif not turns and start is not None:
            axes.axvspan(start / FPS, i / FPS, color=PALETTE.turn, lw=0, alpha=0.55)
            start = None


def _map(
    axes: Axes,
    values: Sequence[Sequence[float]],
    stops: tuple[str, ...],
    low: float,
    high: float,
    texts: Sequence[Sequence[str]] | None = None,
    dark_above: float = 1.0,
) -> Any:
    rows, columns = len(values), len(values[0])
    mesh = axes.pcolormesh(values, cmap=colormap(stops), vmin=low, vmax=high, edgecolors=PALETTE.paper, linewidth=1.0)
    axes.set_ylim(rows, 0)
    axes.set_yticks([t + 0.5 for t in range(rows)], labels=[str(t) for t in range(rows)])
    every = 1 if columns <= 16 and texts is not None else max(1, math.ceil(columns / 6))
    axes.set_xticks([b + 0.5 for b in range(0, columns, every)], labels=[str(b) for b in range(0, columns, every)])
    quiet(axes, left=False, bottom=False)
    for t in range(rows if texts is not None else 0):
        for b in range(columns):
            colour = "#fefefe" if values[t][b] >= dark_above else PALETTE.muted
            axes.text(b + 0.5, t + 0.5, texts[t][b], ha="center", va="center", fontsize=8, color=colour)  # type: ignore[index]
    return mesh


def _labels(axes: Axes, points: Sequence[tuple[str, float, float, bool]]) -> None:
    """Write every label beside its point, on the first side where it covers nothing."""
    figure: Any = axes.figure
    figure.canvas.draw()  # the layout engine settles the axes' size
    box = axes.get_window_extent()
    spots = [tuple(axes.transData.transform((x, min(y, CAP)))) for _, x, y, _ in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    for i in sorted(range(len(points)), key=lambda i: (not points[i][3], -spots[i][1])):
        label, ours = points[i][0], points[i][3]
        width, height = len(label) * (7.2 if ours else 6.4), 14
        x, y = spots[i]
        options = [
            (x + dx if dx > 0 else x + dx - width, y + dy - height / 2, dx, dy)
            for dy in (0, 11, -11, 22, -22, 33, -33)
            for dx in (10, -10)
        ]

        def clash(
            option: tuple[float, float, float, float], i: int = i, size: tuple[int, float] = (height, width)
        ) -> float:
            left, low = option[:2]
            mine = (left, low, left + size[1], low + size[0])
            hits: float = sum(_overlap(mine, other) for j, other in enumerate(taken) if j != i)
            outside = max(0.0, mine[2] - box.x1 - 4) + max(0.0, box.x0 - mine[0])
            return float(hits + 14 * outside)

        left, low, dx, dy = min(options, key=lambda option: (round(clash(option)), abs(option[3]), -option[2]))
        taken.append((left, low, left + width, low + height))
        axes.annotate(
            label,
            (points[i][1], min(points[i][2], CAP)),
            xytext=(dx * 72 / figure.dpi, dy * 72 / figure.dpi),
            textcoords="offset points",
            fontsize=8.5,
            va="center",
            ha="left" if dx > 0 else "right",
            color=PALETTE.ink if ours else PALETTE.muted,
            fontweight="bold" if ours else "normal",
            arrowprops={"arrowstyle": "-", "color": PALETTE.line, "lw": 0.8, "shrinkA": 0, "shrinkB": 4}
            if dy
            else None,
        )


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Common area of two boxes (left, bottom, right, top)."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _across(axes: Axes) -> Any:
    """The transform with x in axes and y in data."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.transAxes, axes.transData)


def _capped(trace: Sequence[float]) -> list[float]:
    return [min(CAP, v) for v in trace]
