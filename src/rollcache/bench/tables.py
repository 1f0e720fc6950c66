"""Tables of results for a terminal; the report has the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, Any]


def number(value: float | None, digits: int = 1, suffix: str = "") -> str:
    """A number for a table, a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def times(value: float | None, sign: str = "x") -> str:
    """A speedup or ceiling; n/a where none could be measured (`notes` says why)."""
    return "n/a" if value is None else f"{value:.2f}{sign}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def headline(result: Result) -> str:
    """Speed, fidelity and skip rate in a few words."""
    return f"{times(result['speedup'])} at {result['psnr']:.1f} dB, {percent(result['skip_rate'])} skipped"


def too_short(chunks: int, cycle: int) -> str:
    """Why a rollout gives no speedup."""
    return f"{chunks} chunks hold no whole KV cycle after the first, which is warm-up; it takes {2 * cycle} or more."


def main_table(scenarios: Mapping[str, Result]) -> Table:
    """One block of rows per scenario: every camera group, then the stitched picture with speed and skip."""
    from rich import box
    from rich.table import Table

    has_lpips = any(s["lpips"] is not None for s in scenarios.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", header_style="bold")
    table.add_column("scenario", no_wrap=True)
    table.add_column("cameras", no_wrap=True)
    for name in (
        "PSNR dB",
        "SSIM",
        "FLIP",
        *(["LPIPS"] if has_lpips else []),
        "skip",
        "s/chunk",
        "speedup",
        "ceiling",
        "reached",
        "gate",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, s in scenarios.items():
        close, timing = s["fidelity"], s["timing"]
        for group, row in close["groups"].items():
            table.add_row(
                name if group == next(iter(close["groups"])) else "",
                group,
                number(row["psnr"], 2),
                number(row["ssim"], 4),
                number(row.get("flip"), 4),
                *([number(row.get("lpips"), 4)] if has_lpips else []),
                style="dim",
            )
        metrics = close["metrics"]
        table.add_row(
            "",
            "stitched",
            number(s["psnr_stitched"], 2),
            number(close["ssim_stitched"], 4),
            number((metrics.get("flip") or {}).get("stitched"), 4),
            *([number((metrics.get("lpips") or {}).get("stitched"), 4)] if has_lpips else []),
            percent(s["skip_rate"]),
            f"{timing['full_seconds_per_chunk']:.3f} → {timing['seconds_per_chunk']:.3f}",
            times(s["speedup"]),
            times(s["ceiling"]),
            "n/a" if s["efficiency"] is None else percent(s["efficiency"], 0),
            percent(s["gate_share"]),
            style="bold",
            end_section=True,
        )
    return table


def controls_table(scenarios: Mapping[str, Result]) -> Table:
    """The cache and every control: speed and PSNR (mean and pooled) side by side for all scenarios, least motion."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("\nbeside it", no_wrap=True)
    for name in scenarios:
        table.add_column(f"{name}\nspeed", justify="right", no_wrap=True)
        table.add_column("PSNR\n(pooled)", justify="right", no_wrap=True)
    table.add_column("least\nmotion", justify="right", no_wrap=True)

    def add(label: str, cells: list[Result | None], style: str, timed: bool = True) -> None:
        row = [label]
        for cell in cells:
            row += (
                ["–", "–"] if cell is None else [times(cell["speedup"]) if "speedup" in cell else "–", psnr_pair(cell)]
            )
        motions = [cell["motion_ratio"] for cell in cells if cell is not None and cell["motion_ratio"] is not None]
        table.add_row(*row, number(min(motions, default=None), 2), style=style)

    for label, cells in variant_rows(scenarios):
        add(label, cells, "bold" if label == _tested(scenarios) else "")
    table.add_section()
    for label, cells in floor_rows(scenarios):
        add(f"floor: {label}", cells, "dim", timed=False)
    return table


def psnr_pair(cell: Result) -> str:
    """Mean over frames and cameras, and in brackets that of the pooled error."""
    return f"{number(cell['psnr'])} ({number(cell['pooled'])})"


def variant_rows(scenarios: Mapping[str, Result]) -> list[tuple[str, list[Result | None]]]:
    """The cache under test and every control: (label, one result per scenario, None where it did not run)."""
    rows: dict[str, dict[str, Result]] = {}
    for name, s in scenarios.items():
        ours = {**s["timing"], **{k: s["fidelity"][k] for k in ("psnr", "pooled", "ssim", "flip", "motion_ratio")}}
        rows.setdefault(s["policy"]["label"], {})[name] = ours
        for control in s["controls"]:
            rows.setdefault(control["label"], {})[name] = control
    return [(label, [cells.get(name) for name in scenarios]) for label, cells in rows.items()]


def floor_rows(scenarios: Mapping[str, Result]) -> list[tuple[str, list[Result | None]]]:
    """The numerical floors: (label, one result per scenario)."""
    rows: dict[str, dict[str, Result]] = {}
    for name, s in scenarios.items():
        for floor in s["floor"].values():
            rows.setdefault(floor["label"], {})[name] = floor
    return [(label, [cells.get(name) for name in scenarios]) for label, cells in rows.items()]


def notes(scenarios: Mapping[str, Result]) -> list[str]:
    """What the columns mean, and what is missing."""
    first = next(iter(scenarios.values()))
    lines = [
        f"Skip: replayed / all block evaluations of denoise passes in {first['counted']}; commit passes are never "
        "skipped and not counted. PSNR, SSIM, FLIP: against full compute with the same seed, noise, actions and "
        "protocol, frames after the warm-up.",
        "s/chunk: seconds in the transformer per generation step, full compute → cached, measured in turns in one "
        "process. Ceiling: what this skip allows at most, from measured block and pass times; reached: speedup / "
        "ceiling. Gate: share of the cached run spent deciding.",
    ]
    lines += [
        f"{name}: {s['chunks']} of {s['take']['chunks']} chunks"
        f"{'' if s['interrupted'] else ', the time budget was used up'}."
        for name, s in scenarios.items()
        if s["chunks"] < s["take"]["chunks"]
    ]
    lines += [
        f"{name}: speedup and ceiling n/a. {too_short(s['chunks'], s['protocol']['kv_every'])}"
        for name, s in scenarios.items()
        if s["speedup"] is None
    ]
    lines += [
        f"{name}: not measured: {', '.join(s['unmeasured'])}." for name, s in scenarios.items() if s.get("unmeasured")
    ]
    reasons = {s["fidelity"]["metrics"].get("lpips", {}).get("reason") for s in scenarios.values()} - {None}
    lines += [f"LPIPS: n/a. {reason}" for reason in sorted(reasons)]
    return lines


def _tested(scenarios: Mapping[str, Result]) -> str:
    label: str = next(iter(scenarios.values()))["policy"]["label"]
    return label
