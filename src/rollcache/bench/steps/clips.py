"""The clips of a study: which drives through which held-out scenes, and full compute on each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcache.bench.lanes import FULL, open_lane
from rollcache.bench.steps.folder import Folder, StudyError
from rollcache.bench.steps.timing import clock
from rollcache.bench.takes import Draw, Take, plan_take, rendered
from rollcache.measure import write_atomic

if TYPE_CHECKING:
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World

SCENARIOS = ("urban", "highway", "u-turn")


@dataclass(frozen=True)
class Clip:
    """A scene group and a seed; written `urban-0`."""

    scenario: str
    seed: int

    @classmethod
    def parse(cls, text: str) -> Clip:
        """Read `urban-0`.

        Raises:
            ValueError: it is none.
        """
        scenario, _, seed = text.rpartition("-")
        if scenario not in SCENARIOS or not seed.isdecimal():
            raise ValueError(f"{text!r} is no clip; write one of {', '.join(SCENARIOS)}, a dash, and a seed: urban-0.")
        return cls(scenario, int(seed))

    def __str__(self) -> str:
        return f"{self.scenario}-{self.seed}"

    def take(self, world: World, protocol: Protocol, windows: int, draw: Draw = rendered) -> Take:
        """Draw it, with `windows` generated windows."""
        take = plan_take(self.scenario, seed=self.seed, chunks=max(2, windows), protocol=protocol).make(world, draw)
        frames = windows * take.actions.shape[1]
        return replace(take, actions=take.actions[:windows], truth={g: x[:frames] for g, x in take.truth.items()})


def all_clips(scenarios: Sequence[str], seeds: Sequence[int]) -> list[Clip]:
    """All of them, seed by seed, so that the first few are of all scene groups."""
    return [Clip(scenario, seed) for seed in seeds for scenario in scenarios]


def chosen(clips: Sequence[Clip], part: str | None) -> list[Clip]:
    """`part` A:B of the clips, counted from 0 as in Python.

    Raises:
        ValueError: it is no such range, or holds none.
    """
    if part is None:
        return list(clips)
    ends = part.split(":")
    try:
        if len(ends) != 2:
            raise ValueError
        first, stop = (int(e) if e else None for e in ends)
    except ValueError:
        raise ValueError(f"--clips is {part!r}; write a range A:B such as 0:6.") from None
    found = list(clips[first:stop])
    if not found:
        raise ValueError(f"--clips {part} holds none of the {len(clips)} clips.")
    return found


@dataclass(frozen=True)
class Reference:
    """Full compute on one clip.

    Attributes:
        take: what is driven.
        latents: of all windows [F, P, Z].
        frames: the same decoded.
    """

    take: Take
    latents: Tensor
    frames: Mapping[str, Tensor]


class FullCompute:
    """Full compute on clips, once each: kept in the folder, and its time in this process.

    Attributes:
        seconds: of a window at full compute (see `timing.clock`), the last measured in this process; None before.
    """

    def __init__(self, world: World, protocol: Protocol, folder: Folder, *, windows: int, draw: Draw) -> None:
        self._world, self._protocol, self._folder, self._windows, self._draw = world, protocol, folder, windows, draw
        self.seconds: float | None = None

    def of(self, clip: Clip, say: Callable[[str], None] = lambda _: None) -> Reference:
        """The reference of a clip; full compute is read when it is there and made when it is not."""
        say("drawing the scene")
        take = clip.take(self._world, self._protocol, self._windows, self._draw)
        path = self._folder.path / "full" / f"{clip}.safetensors"
        with self._folder.lock(f"full-{clip}", wait=True):
            if path.is_file():
                latents = self._read(path, clip)
            else:
                from safetensors.torch import save

                say("full compute")
                latents = self._run(take, self._windows)
                write_atomic(path, save({"latents": latents.contiguous().cpu()}))
        if self.seconds is None:
            say("timing full compute")
            self._run(take, 1)
        return Reference(take, latents, self._world.decode(latents))

    def _run(self, take: Take, windows: int) -> Tensor:
        lane = open_lane(self._world, take, self._protocol, FULL, reload=lambda _: self._world)
        now = clock(self._world.device)
        began = now()
        for action in take.actions[:windows]:
            lane.step(action)
        self.seconds = (now() - began) / windows
        return torch.cat(lane.latents)

    def _read(self, path: object, clip: Clip) -> Tensor:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            latents = load_file(str(path))["latents"]
        except (OSError, SafetensorError, KeyError) as error:
            raise StudyError(f"{path} cannot be read ({error}); remove it and run again.") from None
        if len(latents) != self._windows * self._protocol.latents_per_chunk:
            raise StudyError(f"{path} holds {len(latents)} latent frames, not those of this study; remove it.")
        return latents.to(self._world.device)
