"""Figures of a calibration, drawn from its file alone; the numbers in their names are those of FSC's figures."""

from __future__ import annotations

from math import inf
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rollcache.bench.calibrate.association import roc
from rollcache.bench.calibrate.checks import FEWER
from rollcache.bench.calibrate.result import Calibration
from rollcache.bench.report.style import PALETTE, drawing, quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (PALETTE.cached, PALETTE.second, PALETTE.third, PALETTE.ink)
FAMILY_COLOURS = {"drift": PALETTE.cached, "even in sigma": PALETTE.second, "dense to sparse": PALETTE.third}
MARKS = "osD^v"


def figures(calibration: Calibration) -> dict[str, Figure]:
    """All figures for which there is something to draw, by name."""
    found = calibration.diagnostics
    drawn: dict[str, Figure] = {}
    if "reuse" in found:
        drawn["1a-reuse-error"] = reuse_error(calibration)
    if found.get("oracle", {}).get("clips"):
        drawn["3-6-risk"] = risk(calibration)
    if "ages" in found:
        drawn["5-bands"] = bands(calibration)
    if "touches" in found:
        drawn["10a-influence"] = influence(calibration)
    if found.get("surrogate"):
        drawn["10b-surrogate"] = surrogate_costs(calibration)
    drawn["schedules"] = schedules(calibration)
    if found.get("checks"):
        drawn["checks"] = checks(calibration)
    return drawn


def reuse_error(calibration: Calibration) -> Figure:
    """Error of reusing each block's residual of the step before, and the whole stack's."""
    found, n = calibration.diagnostics["reuse"], calibration.steps
    steps = range(1, n)
    with drawing() as figure_class:
        figure = figure_class(figsize=(6.4, 3.5), layout="constrained")
        axes = figure.add_subplot()
        axes.fill_between(steps, found["low"], found["high"], color=PALETTE.cached, alpha=0.18, lw=0)
        axes.plot(steps, found["median"], color=PALETTE.cached, lw=1.6, label="residual of a block: median, quartiles")
        whole = [calibration.replay[s - 1][s] for s in steps]
        axes.plot(steps, whole, color=PALETTE.third, lw=1.2, label="hidden state after the stack")
        axes.set_yscale("log")
        axes.set_ylabel("relative L2 error, replay of the step before")
        axes.legend(fontsize=8.5, loc="upper center")
        _steps(axes, calibration)
    return figure


def risk(calibration: Calibration) -> Figure:
    """FSC's risk against the oracle's error: every replayed step, in tenths, and as a detector."""
    found = calibration.diagnostics["oracle"]
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 3.7), layout="constrained")
        scatter, tenths, curve = figure.subplots(1, 3)
        for clip, mark in zip(found["clips"], MARKS * len(found["clips"]), strict=False):
            points = scatter.scatter(
                clip["risk"], clip["error"], c=clip["steps"], s=20, marker=mark, cmap="viridis", lw=0, alpha=0.85
            )
        scatter.axhline(found["unsafe"], color=PALETTE.third, lw=0.8, ls="--")
        scatter.set(xscale="log", yscale="log", xlabel="risk", ylabel="E, oracle reuse error")
        scatter.xaxis.set_minor_formatter("")
        scatter.set_title(f"Spearman {_text(found['spearman'])}")
        bar = figure.colorbar(points, ax=scatter, pad=0.02, aspect=24)
        bar.outline.set_visible(False)
        bar.set_label("step")
        rows = found["deciles"]
        where = range(1, len(rows) + 1)
        for i, (name, style) in enumerate((("mean", "-"), ("median", "--"), ("95th percentile", ":"))):
            tenths.plot(where, [r[i] for r in rows], style, color=PALETTE.cached, marker="o", ms=3.5, label=name)
        tenths.set(xlabel="tenth of the risk", ylabel="E", yscale="log")
        tenths.set_xticks(list(where))
        tenths.legend(fontsize=8.5)
        risks = [r for clip in found["clips"] for r in clip["risk"]]
        unsafe = [e > found["unsafe"] for clip in found["clips"] for e in clip["error"]]
        curve.plot((0, 1), (0, 1), color=PALETTE.muted, lw=0.8, ls="--")
        curve.plot(*roc(risks, unsafe), color=PALETTE.cached, lw=1.6)
        curve.set(xlabel="false positive rate", ylabel="true positive rate")
        curve.set_title(f"E > {found['unsafe']:g}: ROC-AUC {_text(found['auc'])}")
    return figure


def bands(calibration: Calibration) -> Figure:
    """How block residuals age in two bands."""
    found = calibration.diagnostics["ages"]
    ages = range(1, len(found["low"]) + 1)
    with drawing() as figure_class:
        figure = figure_class(figsize=(8.4, 3.5), layout="constrained")
        error, ratio = figure.subplots(1, 2)
        error.plot(ages, found["high"], color=PALETTE.third, marker="o", ms=3.5, label="high frequencies")
        error.plot(ages, found["low"], color=PALETTE.cached, marker="o", ms=3.5, label="low frequencies")
        error.set(xlabel="age, steps", ylabel="relative L2 error of block residuals", ylim=(0, None))
        error.legend(fontsize=8.5)
        for (name, values), colour in zip(found["clips"].items(), COLOURS * len(found["clips"]), strict=False):
            ratio.plot(ages, values, color=colour, lw=1.2, marker="o", ms=3, label=_clip(name))
        ratio.axhline(1, color=PALETTE.muted, lw=0.8, ls="--")
        ratio.set(xlabel="age, steps", ylabel="high / low")
        ratio.legend(fontsize=8.5)
    return figure


def influence(calibration: Calibration) -> Figure:
    """What one replayed step does to the end, per unit of its own error."""
    found = calibration.diagnostics["touches"]
    steps, clips = found["steps"], found["clips"]
    damage = [[d / e for d, e in zip(c["damage"], c["error"], strict=True)] for c in clips]
    with drawing() as figure_class:
        figure = figure_class(figsize=(9, 3.5), layout="constrained")
        for axes, values, label in zip(
            figure.subplots(1, 2),
            ([c["gain"] for c in clips], damage),
            ("latent error at the end / after the step", "1 - SSIM at the end / local error"),
            strict=True,
        ):
            columns = list(zip(*values, strict=True))
            axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=PALETTE.floor, lw=0)
            axes.plot(steps, [median(c) for c in columns], color=PALETTE.cached, marker="o", ms=4, lw=1.6)
            axes.set(yscale="log", ylabel=label)
            if max(columns[0]) > 0.1:
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
            _steps(axes, calibration)
    return figure


def surrogate_costs(calibration: Calibration) -> Figure:
    """Surrogate cost of random schedules, with the named ones and how they fared."""
    found = calibration.diagnostics["surrogate"]
    exact = min(found, key=int)
    entry = found[exact]
    with drawing() as figure_class:
        figure = figure_class(figsize=(8.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        axes.hist(entry["random"], bins=40, color=PALETTE.computed, edgecolor=PALETTE.line, lw=0.5)
        top = axes.get_ylim()[1]
        names = sorted(entry["plain"], key=lambda name: entry["plain"][name])
        for i, name in enumerate(names):
            cost, colour = entry["plain"][name], FAMILY_COLOURS.get(name, PALETTE.ink)
            height = top * (1.0 - 0.11 * i)
            axes.plot((cost, cost), (0, height), color=colour, lw=1.1)
            axes.annotate(
                f"{name}{_fared(calibration, name, int(exact))}",
                (cost, height),
                (4, 0),
                textcoords="offset points",
                fontsize=8.5,
                color=colour,
                va="top",
            )
        axes.set_xlabel(f"surrogate cost J of {exact} exact steps: sum of local errors")
        axes.set_ylabel(f"of {len(entry['random'])} random schedules")
        axes.set_title(f"{exact} of {calibration.steps} steps exact; PSNR is that of runs to the end")
    return figure


def schedules(calibration: Calibration) -> Figure:
    """Where every family puts its anchors."""
    found = calibration.diagnostics.get("surrogate") or {}
    budgets = sorted(map(int, found)) or sorted(calibration.schedules[calibration.family])[:1]
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 0.5 + 1.35 * len(budgets)), layout="constrained")
        for axes, n in zip(figure.subplots(len(budgets), 1, squeeze=False)[:, 0], budgets, strict=True):
            names = [f for f, some in calibration.schedules.items() if n in some]
            for row, name in enumerate(names):
                anchors = calibration.schedules[name][n]
                colour = FAMILY_COLOURS.get(name, PALETTE.muted)
                axes.plot(anchors, [row] * n, "|", color=colour, ms=9, mew=2)
                axes.text(calibration.steps, row, _fared(calibration, name, n).strip(", "), fontsize=8.5, va="center")
            axes.set_yticks(range(len(names)), labels=names, fontsize=8.5)
            axes.invert_yaxis()
            axes.set_xlim(-0.8, 1.07 * calibration.steps)
            axes.set_xticks(range(0, calibration.steps, max(1, calibration.steps // 10)))
            axes.set_title(f"{n} exact steps")
            quiet(axes, left=False)
        axes.set_xlabel("step")
    return figure


def checks(calibration: Calibration) -> Figure:
    """Predicted and real error of the clean latent, and PSNR by budget."""
    rows = calibration.diagnostics["checks"]
    names = list(dict.fromkeys(r["how"] for r in rows))
    shades = dict(zip(names, (*COLOURS, PALETTE.muted, "#b58900", "#2a6fb0"), strict=False))
    budgets = sorted({r["exact"] for r in rows})
    with drawing() as figure_class:
        figure = figure_class(figsize=(11, 3.9), layout="constrained")
        real, quality = figure.subplots(1, 2)
        for name in names:
            mine = [r for r in rows if r["how"] == name]
            pairs = [(r["predicted"], r["latent"]) for r in mine if r["predicted"] not in (None, inf)]
            if pairs:
                real.plot(*zip(*pairs, strict=True), "o", ms=5, color=shades[name], label=name)
            means = [fmean(r["psnr"] for r in mine if r["exact"] == n) for n in budgets]
            style = "--" if name == FEWER else "-"
            quality.plot(budgets, means, style, marker="o", ms=4, color=shades[name], label=name)
        both = [v for r in rows if r["predicted"] is not None for v in (r["latent"], r["predicted"]) if 0 < v < inf]
        low, high = min(both, default=0.1), max(both, default=1.0)
        real.plot((low, high), (low, high), color=PALETTE.muted, lw=0.8, ls="--")
        real.set(xscale="log", yscale="log", xlabel="predicted error of the clean latent", ylabel="real error")
        quality.set(xlabel="exact steps", ylabel="PSNR to full compute, dB")
        quality.set_xticks(budgets)
        figure.legend(*quality.get_legend_handles_labels(), fontsize=8.5, loc="outside right center")
    return figure


def _fared(calibration: Calibration, name: str, exact: int) -> str:
    rows = [r for r in calibration.diagnostics.get("checks", ()) if r["how"] == name and r["exact"] == exact]
    return f", {fmean(r['psnr'] for r in rows):.1f} dB" if rows else ""


def _steps(axes: Axes, calibration: Calibration) -> None:
    """Steps below, noise levels above."""
    n = calibration.steps
    axes.set_xlim(0, n - 1)
    axes.set_xlabel("step")
    at = sorted({round(i * (n - 1) / 5) for i in range(6)})
    top: Any = axes.secondary_xaxis("top")
    top.set_xticks(at, labels=[f"{calibration.sigmas[s]:.2f}" for s in at], fontsize=8)
    top.set_xlabel("sigma", fontsize=8.5)
    top.spines["top"].set_visible(False)


def _clip(name: str) -> str:
    return " ".join(name.split()[:2])


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
