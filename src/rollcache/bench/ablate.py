"""The analogue of the paper's Table 3: X-Cache's switches one by one, the paper's own figures beside ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollcache.bench.compare import lane_result
from rollcache.bench.costs import PassClock
from rollcache.bench.decisions import Decisions, Window
from rollcache.bench.fidelity import Cut, brief
from rollcache.bench.lanes import FULL, Lane, OnChunk, Plan, clone, open_lane, race
from rollcache.measure import structural_skip
from rollcache.passes import RollcacheWarning
from rollcache.policies import XCache

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

OPEN: dict[str, Any] = {"min_cosine": -1.0, "margin": 2.0, "max_deviation": None, "condition_cosine": False}
"""Settings that let every comparison pass."""


@dataclass(frozen=True)
class Row:
    """One row: a variant and what the paper reports for it (PSNR in dB, skip rate, speedup), if it does."""

    plan: Plan
    paper: tuple[float, float, float] | None = None


def rows() -> list[Row]:
    """The table. From the third row on the paper ran with step-0 protection, as its footnotes and arithmetic say."""

    def paper(
        key: str, label: str, figures: tuple[float, float, float] | None, one_noise: bool = False, **changes: Any
    ) -> Row:
        return Row(Plan(key=key, label=label, policy=XCache.paper(**changes), one_noise=one_noise), figures)

    def ours(key: str, label: str, **changes: Any) -> Row:
        return Row(Plan(key=key, label=label, policy=XCache(**changes)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RollcacheWarning)  # protection is taken away on purpose here
        return [
            paper("default", "paper's defaults", (53.38, 0.713, 2.59)),
            paper("step0", "+ step-0 protection", (53.39, 0.535, 1.84), first_step="on"),
            paper("no-protect", "step-0, no commit protection", (21.46, 0.628, 2.18), first_step="on", protect="off"),
            paper("no-protect-open", "  the same, gate open", None, first_step="on", protect="off", **OPEN),
            paper(
                "no-protect-one-noise",
                "  the same, noise never new",
                None,
                True,
                first_step="on",
                protect="off",
                **OPEN,
            ),
            paper("no-anchor", "step-0, no front anchor", (53.62, 0.554, 1.91), first_step="on", front_blocks=0),
            paper("floor-90", "step-0, floor .90", (53.37, 0.535, 1.84), first_step="on", min_cosine=0.90),
            paper("floor-93", "step-0, floor .93", (53.38, 0.535, 1.84), first_step="on", min_cosine=0.93),
            paper("floor-96", "step-0, floor .96", (53.40, 0.535, 1.84), first_step="on", min_cosine=0.96),
            paper("floor-999", "floor .999, blind to actions", None, min_cosine=0.999, condition_cosine=False),
            paper("floor-9995", "floor .9995, blind to actions", None, min_cosine=0.9995, condition_cosine=False),
            ours("ours", "our defaults"),
            ours("ours-03", "our defaults, tolerance .03", condition_tol=0.03),
            ours("ours-10", "our defaults, tolerance .1", condition_tol=0.1),
            ours("ours-30", "our defaults, tolerance .3", condition_tol=0.3),
            ours("ours-no-anchor", "our defaults, no front anchor", front_blocks=0),
        ]


def ablate(
    world: World,
    take: Take,
    protocol: Protocol,
    table: Sequence[Row],
    *,
    reload: Callable[[str], World],
    on_chunk: OnChunk | None = None,
) -> dict[str, Any]:
    """Run all rows in turns; rows whose noise never changes are measured against full compute with that noise.

    Raises:
        KeyboardInterrupt: Ctrl-C before two chunks were finished.
    """
    plans = [FULL, *(row.plan for row in table)]
    if any(plan.one_noise for plan in plans):
        plans.append(Plan(key="full-one-noise", label="full compute, noise never new", one_noise=True))
    home = clone(world)
    lanes = {p.key: open_lane(home if p is FULL else world, take, protocol, p, reload=reload) for p in plans}
    with PassClock(home) as clock:
        finished = race(list(lanes.values()), take.actions, on_chunk)
    chunks = len(lanes[FULL.key].seconds)
    if chunks < 2:
        raise KeyboardInterrupt
    window = Window.of(chunks, protocol)
    times = clock.times(window, lanes[FULL.key].seconds)
    cut = Cut.of(take, protocol, window.first, chunks)
    frames = {key: world.decode(torch.cat(lane.latents)) for key, lane in lanes.items()}

    def measured(row: Row) -> dict[str, Any]:
        lane = lanes[row.plan.key]
        reference: Lane = lanes["full-one-noise" if row.plan.one_noise else FULL.key]
        timing = lane_result(lane, reference, times, window)
        decisions = Decisions.of(lane)
        close = brief(frames[lane.key], frames[reference.key], cut)
        paper = None if row.paper is None else dict(zip(("psnr", "skip_rate", "speedup"), row.paper, strict=True))
        return {
            "key": lane.key,
            "label": row.plan.label,
            **{
                k: timing[k]
                for k in ("skip_rate", "speedup", "ceiling", "efficiency", "gate_share", "seconds_per_chunk")
            },
            **{
                k: close[k]
                for k in ("psnr", "pooled", "psnr_stitched", "motion_ratio", "by_cycle", "turning", "straight")
            },
            "skip_by_phase": decisions.by_phase(window, protocol.kv_every),
            "reasons": decisions.reasons,
            "paper": paper,
        }

    depth = len(world.model.blocks)
    return {
        "interrupted": not finished,
        "take": take.describe(),
        "counted": window.describe(),
        "protocol": {"text": protocol.describe()},
        "structural_skip": structural_skip(depth, exact_every=protocol.kv_every if protocol.kv_every > 1 else None),
        "rows": [measured(row) for row in table],
    }
