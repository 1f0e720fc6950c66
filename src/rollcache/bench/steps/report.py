"""report.md and the figures of a study, and the same tables for a terminal: made from the folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rollcache.bench.steps import tables
from rollcache.bench.steps.folder import Folder, StudyError
from rollcache.bench.steps.tables import Column, Result, Row
from rollcache.measure import write_atomic

REFERENCE = "fsc"


def report(folder: Folder, console: Console) -> list[Path]:
    """Print the tables, then write report.md and the figures.

    Returns:
        The files.

    Raises:
        StudyError: there are no results.
        WriteError: something could not be written; the tables are printed then.
    """
    results = folder.results()
    if not results:
        raise StudyError(f"{folder.path} holds no results yet.")
    distance = tables.perceptual(results)
    shown = tables.columns(distance, "FSC")
    narrow = [c for c in shown if c[0] not in ("TFLOP", "ceiling", "dB to truth", "cache MiB")]
    methods = tables.rows(results, "methods", REFERENCE)
    ablations = sorted(tables.rows(results, "ablations", REFERENCE), key=lambda r: -r.psnr)
    ablations = [*_base(results, ablations), *ablations]
    for target in dict.fromkeys(r.target for r in methods):
        console.print(tables.rich_table(f"at {target:.2f}x", tables.ordered(methods, target), narrow))
    if ablations:
        console.print(tables.rich_table("ablations of FSC", ablations, [*narrow, _ROUTING]))
    written = [write_atomic(folder.path / "report.md", _page(folder, methods, ablations, shown, distance))]
    if methods:
        written += _figures(folder.path, methods)
    return written


def _figures(path: Path, methods: Sequence[Row]) -> list[Path]:
    from rollcache.bench.report.style import png
    from rollcache.bench.steps.figures import frontier

    return [write_atomic(path / f"{m}-speed.png", png(frontier(methods, m))) for m in ("psnr", "ssim")]


def _base(results: Sequence[Result], ablations: Sequence[Row]) -> list[Row]:
    """FSC at the speed of the ablations, on the clips of the ablations: what they modify."""
    if not ablations:
        return []
    clips, top = {clip for row in ablations for clip in row.clips}, max(row.target for row in ablations)
    beside = [r for r in results if r["method"] == REFERENCE and r["clip"] in clips and abs(r["target"] - top) < 1e-3]
    return tables.rows(beside, "methods", REFERENCE)


_ROUTING: Column = ("passes", tables.routing)


def _page(
    folder: Folder, methods: Sequence[Row], ablations: Sequence[Row], shown: Sequence[Column], distance: str
) -> str:
    study: dict[str, Any] = folder.read("study.json") or {}
    lines = ["# Methods across the steps of a chunk, at matched speed", "", _about(study, methods or ablations), ""]
    for target in dict.fromkeys(r.target for r in methods):
        lines += [f"## At {target:.2f}x", "", tables.markdown(tables.ordered(methods, target), shown), ""]
        if notes := [f"- {r.label}: {r.note}." for r in methods if r.target == target and r.note]:
            lines += ["Not at the target:", "", *notes, ""]
    if methods:
        lines += ["![PSNR against speed](psnr-speed.png)", "", "![SSIM against speed](ssim-speed.png)", ""]
        lines += ["## What the passes were", "", tables.markdown(methods, _routing_columns()), ""]
    if ablations:
        lines += ["## Ablations of FSC", "", tables.markdown(ablations, [*shown, _ROUTING]), ""]
        if notes := [f"- {r.label}: {r.note}." for r in ablations if r.note]:
            lines += ["Not at the target:", "", *notes, ""]
    lines += ["## What was matched", "", *_matches(folder), "", "## How to read the columns", "", *_captions(distance)]
    return "\n".join(lines) + "\n"


def _routing_columns() -> list[Column]:
    return [
        ("method", lambda r: r.label),
        ("target", lambda r: f"{r.target:.2f}x"),
        ("predicted", lambda r: f"{r.predicted:.2f}x"),
        _ROUTING,
        ("first window", lambda r: f"`{r.word}`"),
    ]


def _about(study: dict[str, Any], found: Sequence[Row]) -> str:
    clips = max((r.clips for r in found), key=len)
    return (
        f"{study.get('protocol', '')}. {study.get('stage', '')} of the street world, {study.get('dtype', '')}, "
        f"{study.get('windows', '?')} generated windows a clip, {len(clips)} held-out clips: {', '.join(clips)}. "
        f"Knobs were set on other clips: {', '.join(study.get('dev', []))}."
    )


def _matches(folder: Folder) -> list[str]:
    lines = ["| method | knob | target | value | predicted on the development clips |", "|---|---|---|---|---|"]
    for key, found in folder.matches().items():
        for row in found["targets"]:
            note = f" ({row['note']})" if row["note"] else ""
            lines.append(
                f"| {key} | {found['knob']['name']} | {row['target']:.2f}x | {row['knob']:.4g} | "
                f"{row['speedup']:.3f}x{note} |"
            )
    return lines


def _captions(distance: str) -> list[str]:
    name = distance.upper()
    return [
        "- predicted: price of full compute / price of the decisions of the run, by the latency model in price.json "
        "(computed, replayed, sparsely repaired and commit passes). This is what was matched, on the development "
        "clips; here it is that of the test clips. It leaves out what a method spends on its own signal.",
        "- measured: seconds of full compute / of the run, median over clips; on one thread of a processor these are "
        "seconds of that thread. Full compute is timed once in every process and not beside every run, so this is a "
        "check of the prediction and no result.",
        "- ceiling: the speedup if replays cost nothing but what is outside the blocks, and repairs their share.",
        "- exact steps: steps' worth of tokens that ran through the blocks, a window. TFLOP: executed-token operations "
        "of a window, and their share of full compute.",
        "- cache: residuals and K/V held by the cache after a chunk, at most; not what a method keeps for its signal.",
        f"- PSNR, SSIM, {name}, motion: against full compute of the same seed; mean over frames, cameras and clips. "
        "PSNR with the 95 % interval of a seeded bootstrap over clips. Motion: energy of frame differences relative to "
        "full compute.",
        "- clips: means are over the clips on which every row of its part has a result, unless these are fewer than "
        "half of all; then the numbers differ, and rows with different numbers cannot be compared.",
        "- dB to truth: PSNR against the rendered frames, which full compute does not reach either.",
        f"- FSC wins ...: clips on which FSC, at the same target or the nearest, has the higher PSNR and SSIM and the "
        f"lower {name}.",
        "- passes: share of the denoise passes by what was done; C0 replays, C1 to C3 repair, Full repairs all, "
        "anchors and computed passes are exact.",
        "- first window: one letter a step of the first clip: C computed, - replayed, p predicted, r repaired; of FSC "
        "1, 2, 3 for its repairs and F for a full one.",
    ]
