"""The tables of a study, from its results alone: one row a method and target, means over clips.

Rows hold numbers; `markdown` and `rich_table` write the same columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollcache.bench.tables import number, times

if TYPE_CHECKING:
    from rich.table import Table

Result = Mapping[str, Any]
DRAWS, SEED = 4000, 0  # of the bootstrap
MIB = 2**20
SAVES = 1.02  # a method that is no faster than this computes everything


@dataclass(frozen=True)
class Row:
    """A method at a target over its clips.

    Attributes:
        key: of the method.
        label: what tables call it.
        target: speedup that was asked for.
        clips: clips by name.
        predicted: speedup by the price of the decisions, over all clips.
        measured: ratio of times in one process, median.
        ceiling: speedup if nothing but computed tokens cost anything.
        flops: TFLOP a window of executed tokens.
        flops_share: the same, as a share of full compute.
        exact: exact-equivalent steps of a window.
        cache_bytes: most that the cache held.
        psnr: mean over clips, dB.
        interval: 95 % of bootstrap means of it, over clips.
        means: further means over clips by name; None where a metric has no value.
        shares: denoise passes by rung or action.
        word: those of the first window of the first clip, see `Tally`.
        wins: clips on which the reference has the better PSNR, SSIM and perceptual distance, and clips compared; None
            for the reference itself.
        note: why the speed is not the target.
    """

    key: str
    label: str
    target: float
    clips: tuple[str, ...]
    predicted: float
    measured: float
    ceiling: float
    flops: float
    flops_share: float
    exact: float
    cache_bytes: int
    psnr: float
    interval: tuple[float, float]
    means: Mapping[str, float | None]
    shares: Mapping[str, float]
    word: str
    wins: tuple[int, int, int, int] | None
    note: str


def rows(results: Iterable[Result], group: str, reference: str) -> list[Row]:
    """All rows of a group, by target and then as fast as they are.

    Args:
        results: of `Folder.results`.
        group: "methods" or "ablations".
        reference: key of the method that wins are counted for, at the same target or the nearest one.
    """
    everything = list(results)
    mine = comparable([r for r in everything if r["group"] == group])
    found = []
    for job in dict.fromkeys(r["job"] for r in sorted(mine, key=lambda r: (r["target"], r["method"]))):
        at = sorted((r for r in mine if r["job"] == job), key=lambda r: r["clip"])
        beside = _nearest([r for r in everything if r["method"] == reference], at[0]["target"])
        found.append(_row(at, None if at[0]["method"] == reference else beside))
    return found


def comparable(results: Sequence[Result]) -> list[Result]:
    """Those on clips that all jobs have a result on, so that means are of the same clips.

    While that would leave less than half of the clips, everything: then the numbers of clips tell rows apart.
    """
    clips: dict[str, set[str]] = {}
    for r in results:
        clips.setdefault(r["job"], set()).add(r["clip"])
    if not clips:
        return []
    common, seen = set.intersection(*clips.values()), set.union(*clips.values())
    return [r for r in results if r["clip"] in common] if 2 * len(common) >= len(seen) else list(results)


def bootstrap(values: Sequence[float], draws: int = DRAWS, seed: int = SEED) -> tuple[float, float]:
    """95 % interval of the mean, by drawing from `values` with replacement."""
    x = torch.tensor(list(values), dtype=torch.float64)
    picks = torch.randint(len(x), (draws, len(x)), generator=torch.Generator().manual_seed(seed))
    low, high = torch.quantile(x[picks].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def perceptual(results: Iterable[Result]) -> str:
    """The perceptual distance to show: LPIPS if it has values, else FLIP."""
    return "lpips" if any(r["fidelity"]["lpips"] is not None for r in results) else "flip"


def _nearest(results: Sequence[Result], target: float) -> dict[str, Result]:
    """Of a method the results by clip, at the target that comes nearest."""
    if not results:
        return {}
    at = min({r["target"] for r in results}, key=lambda t: abs(t - target))
    return {r["clip"]: r for r in results if r["target"] == at}


def _row(at: Sequence[Result], beside: Mapping[str, Result] | None) -> Row:
    first = at[0]
    psnr = [r["fidelity"]["psnr"] for r in at]
    shares: dict[str, float] = {}
    for r in at:
        for name, share in r["decisions"]["shares"].items():
            shares[name] = shares.get(name, 0.0) + share / len(at)
    return Row(
        key=first["method"],
        label=first["label"],
        target=first["target"],
        clips=tuple(r["clip"] for r in at),
        predicted=len(at) / sum(1 / r["speed"]["predicted"] for r in at),
        measured=statistics.median(r["speed"]["measured"] for r in at),
        ceiling=len(at) / sum(1 / r["speed"]["ceiling"] for r in at),
        flops=statistics.fmean(r["speed"]["tflops_per_window"] for r in at),
        flops_share=statistics.fmean(r["speed"]["flops_share"] for r in at),
        exact=statistics.fmean(r["decisions"]["exact_steps_per_window"] for r in at),
        cache_bytes=max(r["speed"]["cache_bytes"] for r in at),
        psnr=statistics.fmean(psnr),
        interval=bootstrap(psnr),
        means={name: _mean(at, name) for name in ("ssim", "flip", "lpips", "motion", "psnr_truth")},
        shares=shares,
        word=first["decisions"]["words"][0],
        wins=None if not beside else _wins(at, beside),
        note=first["match"]["note"],
    )


def _mean(at: Sequence[Result], name: str) -> float | None:
    values = [r["fidelity"][name] for r in at]
    return None if any(v is None for v in values) else statistics.fmean(values)


def _wins(at: Sequence[Result], beside: Mapping[str, Result]) -> tuple[int, int, int, int]:
    pairs = [(beside[r["clip"]]["fidelity"], r["fidelity"]) for r in at if r["clip"] in beside]
    distance = "lpips" if all(x["lpips"] is not None for pair in pairs for x in pair) else "flip"
    near = sum((a[distance] or 0.0) < (b[distance] or 0.0) for a, b in pairs)
    return sum(a["psnr"] > b["psnr"] for a, b in pairs), sum(a["ssim"] > b["ssim"] for a, b in pairs), near, len(pairs)


Column = tuple[str, Callable[[Row], str]]


def columns(distance: str, reference: str) -> list[Column]:
    """What a table shows: heading and how a row fills it."""
    return [
        ("method", lambda r: r.label),
        ("predicted", lambda r: times(r.predicted)),
        ("measured", lambda r: times(r.measured)),
        ("ceiling", lambda r: times(r.ceiling)),
        ("exact steps", lambda r: number(r.exact, 1)),
        ("TFLOP", lambda r: f"{r.flops:.2f} ({r.flops_share:.0%})"),
        ("cache MiB", lambda r: number(r.cache_bytes / MIB, 1)),
        ("PSNR dB [95 %]", lambda r: f"{r.psnr:.2f} [{r.interval[0]:.2f}, {r.interval[1]:.2f}]"),
        ("SSIM", lambda r: number(r.means["ssim"], 4)),
        (distance.upper(), lambda r: number(r.means[distance], 4)),
        ("motion", lambda r: number(r.means["motion"], 3)),
        ("dB to truth", lambda r: number(r.means["psnr_truth"], 2)),
        (f"{reference} wins PSNR, SSIM, {distance.upper()}", _won),
        ("clips", lambda r: str(len(r.clips))),
    ]


def _won(row: Row) -> str:
    return "–" if row.wins is None else f"{row.wins[0]}, {row.wins[1]}, {row.wins[2]} of {row.wins[3]}"


def routing(row: Row) -> str:
    """Shares of the passes, most frequent first: `C0 70 %, Full 6 %`."""
    ordered = sorted(row.shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered)


def ordered(found: Sequence[Row], target: float) -> list[Row]:
    """Rows of one target, the closest to full compute first; a method that saves nothing there is none."""
    return sorted((r for r in found if r.target == target and r.predicted > SAVES), key=lambda r: -r.psnr)


def markdown(found: Sequence[Row], shown: Sequence[Column]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head for head, _ in shown) + " |", "|---" * len(shown) + "|"]
    lines += ["| " + " | ".join(fill(row) for _, fill in shown) + " |" for row in found]
    return "\n".join(lines)


def rich_table(title: str, found: Sequence[Row], shown: Sequence[Column]) -> Table:
    """The same for a terminal."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, header_style="bold")
    for i, (head, _) in enumerate(shown):
        out.add_column(head, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in found:
        out.add_row(*(fill(row) for _, fill in shown))
    return out
