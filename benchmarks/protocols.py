"""Which loop is worth running? Rollout protocols against the renderer's truth, per unit of transformer work.

    python benchmarks/protocols.py --seeds 0 1 --chunks 32 --json protocols.json

Protocols differ in what a generation step denoises, so they cannot be compared with each other's full compute: only
with the truth. Every loop hears an action when it can: a loop whose chunk is the whole window hears one action per
window and holds it. Reported beside fidelity: how much of the commanded turn and speed comes out (read by the inverse-
dynamics probe), how long an abrupt steer takes to show, motion against the truth's, what a cache would skip, and
transformer passes and time per second of video.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rollcache
from rollcache.bench.lanes import FULL, Lane, Plan, open_lane
from rollcache.bench.options import FlatMachine, Machine
from rollcache.bench.progress import Narrator
from rollcache.bench.results import dump
from rollcache.bench.takes import Injection, Take, plan_take
from rollcache.measure import compare, motion, provenance, write_atomic
from rollcache.street.data import hold, latent_actions
from rollcache.street.evaluate.actions import errors
from rollcache.street.evaluate.probe import Probe, per_latent, read
from rollcache.street.protocol import Protocol
from rollcache.street.rig import FPS, FRAMES_PER_LATENT
from rollcache.street.weights import load_probe
from rollcache.street.world import World

STEER = 0.5  # rad/s of the abrupt steer
STEER_AT = 14  # generation step of the receding loop: the third of a cycle


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which drives, and how long."""

    scenarios: tuple[Literal["urban", "highway", "u-turn"], ...] = ("urban", "highway", "u-turn")
    seeds: tuple[int, ...] = (0,)
    chunks: int = 32
    """Generation steps of the receding loop, a multiple of 16."""
    json: Path | None = None
    machine: FlatMachine = field(default_factory=Machine)


@dataclass(frozen=True)
class Loop:
    """A protocol and what runs in it."""

    name: str
    protocol: Protocol
    plan: Plan = FULL


def loops() -> list[Loop]:
    """All that are compared."""
    receding, chunked, shared = Protocol(), Protocol.named("chunked"), Protocol.named("shared")
    sliding = Protocol.named("sliding")
    ours = Plan(key="xcache", label="X-Cache", policy=rollcache.XCache())
    paper = Plan(key="paper", label="X-Cache as in the paper", policy=rollcache.XCache.paper())
    reuse = Plan(key="reuse", label="WindowReuse", policy=rollcache.WindowReuse(), no_pass=True)
    found = [
        Loop("receding", receding),
        Loop("receding, X-Cache", receding, ours),
        Loop("receding, X-Cache as in the paper", receding, paper),
        Loop("receding, WindowReuse without a pass", receding, reuse),
        Loop("receding, frozen window", receding, Plan(key="frozen", label="frozen window", frozen=True)),
        Loop("receding, 2 steps", replace(receding, steps=2)),
        Loop("receding, 1 step", replace(receding, steps=1)),
        Loop("chunked", chunked),
        Loop("chunked, X-Cache as in the paper", chunked, paper),
        Loop("sliding", sliding),
        Loop("sliding, X-Cache as in the paper", sliding, paper),
        Loop("shared", shared),
        Loop("shared, X-Cache as in the paper", shared, paper),
    ]
    for rho in (0.5, 0.8, 0.95):
        noise = replace(shared, noise="correlated", rho=rho)
        found.append(Loop(f"shared, rho {rho:g}", noise))
        found.append(Loop(f"shared, rho {rho:g}, X-Cache as in the paper", noise, paper))
    return found


def drive(world: World, take: Take, loop: Loop, machine: Machine) -> tuple[Tensor, Lane]:
    """Run a loop over a take; returns its latents [F, P, Z] and the lane."""
    lane = open_lane(world, take, loop.protocol, loop.plan, reload=machine.reload)
    frames = take.actions.flatten(0, 1)
    for action in frames.split(lane.session.frames_per_step):
        lane.step(heard(action))
    return torch.cat(lane.latents).float(), lane


def heard(action: Tensor) -> Tensor:
    """The actions [T, 2] of one generation step as the loop knows them: those of the first latent frame, held."""
    return hold(latent_actions(action), 1).reshape(-1, 2)


def reaction(found: Tensor, plain: Tensor, at: int) -> float | None:
    """Seconds from an abrupt steer to the middle of the latent frame that shows half of it; None when none does.

    Args:
        found: yaw rate read from the steered rollout [F].
        plain: the same without the steer.
        at: the first latent frame that should show it.
    """
    shows = (found - plain)[at:].abs() >= STEER / 2
    if not shows.any():
        return None
    return (int(shows.int().argmax()) + 0.5) * FRAMES_PER_LATENT / FPS


def measure(world: World, probe: Probe, take: Take, steered: Take, loop: Loop, machine: Machine) -> dict[str, Any]:
    """All figures of one loop on one take."""
    latents, lane = drive(world, take, loop, machine)
    frames: Mapping[str, Tensor] = world.decode(latents)
    second = slice(0, FPS)
    before = take.start.latents[-2:].float()
    told = per_latent(take.actions.flatten(0, 1))
    yaw = read(probe, latents, before)
    turned = read(probe, drive(world, steered, loop, machine)[0], before)
    video = len(latents) * FRAMES_PER_LATENT / FPS
    warm = 1 if len(lane.seconds) == 1 else max(1, loop.protocol.kv_every)
    rest = len(lane.seconds[warm:]) / len(lane.seconds) * video
    return {
        "loop": loop.name,
        "scenario": take.scenario,
        "seed": take.seed,
        "psnr_first_second": compare(part(frames, second), part(take.truth, second)).psnr,
        "psnr": compare(frames, take.truth).psnr,
        "motion": motion(frames, take.truth).ratio,
        "actions": asdict(errors(yaw, told)),
        "reaction": reaction(turned[:, 1], yaw[:, 1], STEER_AT),
        "skip": None if lane.handle is None else lane.handle.stats().skip_rate,
        "passes_per_second": sum(lane.passes) / video,
        "seconds_per_second": sum(lane.seconds[warm:]) / rest if rest else None,
    }


def part(frames: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Some frames of every view group."""
    return {group: x[rows] for group, x in frames.items()}


def main(settings: Settings) -> int:
    """Run all loops on all takes and print the means."""
    if settings.chunks % 16 or settings.chunks <= STEER_AT:
        raise ValueError(f"--chunks is {settings.chunks}; it must be a multiple of 16.")
    world, probe = settings.machine.world(), load_probe(settings.machine.weights)
    found: list[dict[str, Any]] = []
    everything = loops()
    with Narrator() as narrator:
        for scenario in settings.scenarios:
            for seed in settings.seeds:
                narrator.begin(f"{scenario} {seed}", len(everything))
                take = plan_take(scenario, seed=seed, chunks=settings.chunks).make(world)
                steered = take.injected(Injection("steer", STEER_AT, STEER))
                for loop in everything:
                    narrator.stage(loop.name)
                    found.append(measure(world, probe, take, steered, loop, settings.machine))
    Console(width=None if sys.stdout.isatty() else 150).print(table(found, everything))
    if settings.json is not None:
        write_atomic(settings.json, dump({"runs": found, "provenance": provenance(settings, dtype=world.dtype)}))
    return 0


def table(found: Sequence[dict[str, Any]], everything: Sequence[Loop]) -> Table:
    """Means over the takes, one row a loop."""
    out = Table(box=box.SIMPLE_HEAD, title="Protocols against the rendered truth")
    for head in ("loop", "dB, 1st s", "dB", "motion", "turn off", "turn gain", "speed off", "reaction", "skip"):
        out.add_column(head, justify="left" if head == "loop" else "right")
    out.add_column("passes/s", justify="right")
    out.add_column("DiT s/s", justify="right")
    for loop in everything:
        rows = [r for r in found if r["loop"] == loop.name]
        reactions = [r["reaction"] for r in rows]
        late = "never" if any(x is None for x in reactions) else _mean(reactions, "{:.2f} s")
        out.add_row(
            loop.name,
            _mean([r["psnr_first_second"] for r in rows], "{:.2f}"),
            _mean([r["psnr"] for r in rows], "{:.2f}"),
            _mean([r["motion"] for r in rows], "{:.2f}"),
            _mean([r["actions"]["turn_percent"] for r in rows], "{:.0f} %"),
            _mean([r["actions"]["turn_gain"] for r in rows], "{:.2f}"),
            _mean([r["actions"]["speed"] for r in rows], "{:.2f} m/s"),
            late,
            _mean([None if r["skip"] is None else 100 * r["skip"] for r in rows], "{:.1f} %"),
            _mean([r["passes_per_second"] for r in rows], "{:.1f}"),
            _mean([r["seconds_per_second"] for r in rows], "{:.2f}"),
        )
    return out


def _mean(values: Sequence[float | None], pattern: str) -> str:
    there = [v for v in values if v is not None]
    return pattern.format(statistics.fmean(there)) if there else ""


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
