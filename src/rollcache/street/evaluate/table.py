"""The one table: a row a figure, a column a scenario (mean over its scenes) or recorded drive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcache.street.evaluate.result import mean
from rollcache.street.rig import FPS

if TYPE_CHECKING:
    from rich.console import Console

    from rollcache.street.evaluate.result import Evaluation

SceneDict = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure: from which part it is, how it is read from that part, and how it is written."""

    label: str
    part: str
    value: Callable[[Any], float | None]
    digits: int = 2
    beside: Callable[[Any], float | None] | None = None  # in brackets after it


def _at(key: str, seconds: float | None = None, index: int | None = None) -> Callable[[Any], float | None]:
    """The entry of a trace at an index, or in the window that `seconds` fall into; None beyond its end."""

    def read(part: Any) -> float | None:
        trace = part[key]
        if not trace:
            return None
        if index is not None:
            return trace[index]  # type: ignore[no-any-return]
        inside = [v for end, v in zip(part["seconds"], trace, strict=True) if end + 0.5 / FPS >= (seconds or 0)]
        return inside[0] if inside else None

    return read


def _third(key: str, which: int) -> Callable[[Any], float | None]:
    """Mean over the first (0) or last (2) third of a trace."""

    def read(part: Any) -> float | None:
        trace = part[key]
        size = max(1, len(trace) // 3)
        return mean(trace[:size] if which == 0 else trace[-size:])

    return read


ROWS = (
    Row("codec alone: PSNR, dB", "codec", lambda p: p["psnr"]),
    Row("codec alone: sharpness / rendered", "codec", lambda p: p["sharpness"]),
    Row("codec alone: flow along the rendered one", "codec", lambda p: p["flow"]),
    Row("next window: PSNR, dB (picture held)", "horizon", _at("psnr", index=0), 2, _at("held", index=0)),
    Row("next window: SSIM", "horizon", _at("ssim", index=0), 3),
    Row("next window: FLIP", "horizon", _at("flip", index=0), 3),
    Row("next window: LPIPS", "horizon", _at("lpips", index=0), 3),
    Row("PSNR after 2 s, dB (held)", "horizon", _at("psnr", 2.0), 2, _at("held", 2.0)),
    Row("PSNR after 8 s, dB (held)", "horizon", _at("psnr", 8.0), 2, _at("held", 8.0)),
    Row("PSNR in the last window, dB (held)", "horizon", _at("psnr", index=-1), 2, _at("held", index=-1)),
    Row("SSIM in the last window", "horizon", _at("ssim", index=-1), 3),
    Row("FLIP in the last window", "horizon", _at("flip", index=-1), 3),
    Row("sharpness / rendered, first third", "stability", _third("sharpness", 0)),
    Row("sharpness / rendered, last third", "stability", _third("sharpness", 2)),
    Row("spread of colours / rendered, last third", "stability", _third("contrast", 2)),
    Row("shift of the mean colour, last third", "stability", _third("colour_shift", 2), 3),
    Row("flow along the rendered one, first third", "stability", _third("flow", 0)),
    Row("flow along the rendered one, last third", "stability", _third("flow", 2)),
    Row(
        "flow error, px/frame (standing still)",
        "stability",
        lambda p: mean(p["flow_error"]),
        2,
        lambda p: mean(p["flow_size"]),
    ),
    Row(
        "yaw rate on turns: error, % (probe's own)",
        "actions",
        lambda p: p["generated"]["turn_percent"],
        1,
        lambda p: p["floor"]["turn_percent"],
    ),
    Row(
        "yaw rate on turns: recovered / commanded (rendered)",
        "actions",
        lambda p: p["generated"]["turn_gain"],
        2,
        lambda p: p["floor"]["turn_gain"],
    ),
    Row(
        "speed on brakes: error, % (probe's own)",
        "actions",
        lambda p: p["generated"]["brake_percent"],
        1,
        lambda p: p["floor"]["brake_percent"],
    ),
    Row(
        "speed: error, m/s (probe's own)",
        "actions",
        lambda p: p["generated"]["speed"],
        2,
        lambda p: p["floor"]["speed"],
    ),
    Row(
        "yaw rate: error, rad/s (probe's own)",
        "actions",
        lambda p: p["generated"]["yaw_rate"],
        3,
        lambda p: p["floor"]["yaw_rate"],
    ),
    Row(
        "agents where they should be, contrast (codec's)",
        "agents",
        lambda p: p["contrast"],
        2,
        lambda p: p["reference"],
    ),
    Row("of the moving ones", "agents", lambda p: p["moving"]),
    Row("of the parked ones", "agents", lambda p: p["parked"]),
    Row("told to stop instead: change found / commanded", "response", lambda p: p["stopped"]),
    Row("told to turn instead: change found / commanded", "response", lambda p: p["steered"]),
    Row("student's lead over the teacher at 50 steps, dB", "teacher", lambda p: p["teacher"]["50"]["student_lead"]),
    Row("student's lead over the teacher at 4 steps, dB", "teacher", lambda p: p["teacher"]["4"]["student_lead"]),
    Row("transformer time a generation step, s", "cost", lambda p: p["mean"], 3),
    Row("that time / duration of its frames", "cost", lambda p: p["share"], 1),
)


def columns(scenes: Sequence[SceneDict]) -> dict[str, list[SceneDict]]:
    """The scenes of every column, by its title."""
    groups: dict[tuple[str, str], list[SceneDict]] = {}
    for s in scenes:
        drive = "" if s["source"] == "scripted" else s["drive"]
        groups.setdefault((s["scenario"], drive), []).append(s)
    out = {}
    for (scenario, drive), found in groups.items():
        title = f"{scenario}, {drive}" if drive else scenario
        out[title if len(found) == 1 else f"{title} ({len(found)} scenes)"] = found
    return out


def cells(row: Row, scenes: Sequence[SceneDict]) -> str:
    """A cell's text: the mean over the scenes that have the part; why there is none; or a dash."""
    there = [s["parts"][row.part] for s in scenes if row.part in s["parts"]]
    if not there:
        reasons = {s["skipped"][row.part] for s in scenes if row.part in s["skipped"]}
        return f"n/a ({reasons.pop()})" if reasons else "–"
    value = mean(row.value(p) for p in there)
    if value is None:
        return "–"
    beside = mean(row.beside(p) for p in there) if row.beside else None
    return f"{value:.{row.digits}f}" + (f" ({beside:.{row.digits}f})" if beside is not None else "")


def table(scenes: Sequence[SceneDict]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Titles of the columns and the rows; rows of which nothing is known are left out."""
    groups = columns(scenes)
    rows = [(row.label, [cells(row, found) for found in groups.values()]) for row in ROWS]
    return list(groups), [(label, texts) for label, texts in rows if set(texts) != {"–"}]


def print_table(evaluation: Evaluation, console: Console) -> None:
    """The table on a terminal."""
    from rich.table import Table

    titles, rows = table(evaluation.to_dict()["scenes"])
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for title in titles:
        shown.add_column(title, justify="right")
    for label, texts in rows:
        shown.add_row(label, *texts)
    console.print(shown)
