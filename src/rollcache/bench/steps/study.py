"""A study: what it runs, what a pass costs on this machine, and its methods with their knobs set."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rollcache.bench.results import dump
from rollcache.bench.steps.clips import Clip
from rollcache.bench.steps.folder import Folder
from rollcache.bench.steps.match import Knob, Match, Search
from rollcache.bench.steps.measure import predicted
from rollcache.bench.steps.methods import Method
from rollcache.bench.steps.pricing import Price, measure_price
from rollcache.bench.takes import Draw, Take, rendered
from rollcache.measure import provenance
from rollcache.measure.provenance import plain

if TYPE_CHECKING:
    from rollcache.bench.progress import Narrator
    from rollcache.street.protocol import Protocol
    from rollcache.street.world import World


@dataclass(frozen=True)
class Job:
    """A method at a target speed."""

    method: Method
    target: float

    @property
    def name(self) -> str:
        """Name of its result files."""
        return f"{self.method.key}@{self.target:.2f}"


def jobs(methods: Sequence[Method], targets: Sequence[float], ablate_at: float) -> list[Job]:
    """What is run on a clip: methods at every target, ablations around one."""
    found = []
    for method in methods:
        speeds = targets if method.group == "methods" else [round(ablate_at * f, 4) for f in method.factors]
        found += [Job(method, target) for target in speeds]
    return found


@dataclass
class Study:
    """Everything that is needed to run.

    Attributes:
        world: bare.
        protocol: chunked, with the steps of the study.
        folder: where results go.
        methods: by key, those that others follow included.
        dev: clips on which knobs are set.
        windows: generated windows of a test clip.
        draw: renders clips.
    """

    world: World
    protocol: Protocol
    folder: Folder
    methods: dict[str, Method]
    dev: Sequence[Clip]
    windows: int
    draw: Draw = rendered

    @cached_property
    def dev_takes(self) -> dict[str, Take]:
        """The clips on which knobs are set."""
        return {str(c): c.take(self.world, self.protocol, self.windows, self.draw) for c in self.dev}

    @cached_property
    def small(self) -> World:
        """A tiny world of random weights: what a schedule decides, it decides there too."""
        from rollcache.street.dit import StreetDiT
        from rollcache.street.world import World

        config = self.world.model.config
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = StreetDiT(replace(config, width=16, depth=2, heads=1, rank=1, mlp=1))
        return World(model, self.world.codec, dtype="float32", device=str(self.world.device))

    @cached_property
    def price(self) -> Price:
        """Read it, or measure it once for all processes."""
        with self.folder.lock("price", wait=True):
            known = self.folder.read("price.json")
            if known is None:
                price = measure_price(self.world, next(iter(self.dev_takes.values())), self.protocol)
                where = provenance(dtype=self.world.dtype, device=self.world.device)
                known = self.folder.write("price.json", {**plain(price), "provenance": where})
        return Price.of(known)

    def match(self, method: Method, targets: Sequence[float]) -> dict[float, Match]:
        """The knob at every target: read, or searched on the development clips. Ctrl-C keeps what was tried."""
        name = f"match/{method.key}.json"
        known = self.folder.read(name) or {}
        assert method.knob is not None
        made = json.loads(dump(plain(method.plan(middle(method.knob)).policy)))
        if known.get("sample") != made:  # other settings: what was tried is of no use
            known = {}
        found = {t: _read(m) for t, m in _by_target(known.get("targets", [])).items()}
        if all(t in found for t in targets):
            return found
        tried = {float(v): float(s) for v, s in known.get("tried", [])}
        search = Search(method.knob, self._evaluator(method), tried)

        def keep() -> None:
            rows = [found[t].to_dict() for t in sorted(found)]
            tries = sorted(search.found.items())
            self.folder.write(
                name, {"method": method.key, "knob": method.knob, "sample": made, "targets": rows, "tried": tries}
            )

        try:
            for target in targets:
                if target not in found:
                    found[target] = search.match(target)
        finally:
            keep()
        return found

    def _evaluator(self, method: Method) -> Callable[[float], float]:
        world = self.small if method.dry else self.world
        windows = self.windows if method.across else 1
        takes = dict(list(self.dev_takes.items())[:1]) if method.dry else self.dev_takes
        speed = predicted(world, takes, self.protocol, windows, self.price)
        return lambda value: speed(method.plan(value))


def middle(knob: Knob) -> float:
    """Some value of a knob, to see the settings that go with it."""
    return knob.values[len(knob.values) // 2] if knob.values else knob.low


def _by_target(rows: Sequence[dict[str, Any]]) -> dict[float, dict[str, Any]]:
    return {float(row["target"]): row for row in rows}


def _read(row: dict[str, Any]) -> Match:
    return Match(float(row["target"]), float(row["knob"]), float(row["speedup"]), str(row["note"]))


def match_all(study: Study, needed: dict[str, list[float]], narrator: Narrator) -> dict[str, dict[float, Match]]:
    """Set all knobs; methods that another process is at come last.

    Args:
        study: it.
        needed: targets by key of a method with a knob.
        narrator: tells what is done.
    """
    found: dict[str, dict[float, Match]] = {}
    narrator.begin("matching speeds", len(needed))
    narrator.stage("what a pass costs")
    _ = study.price
    for wait in (False, True):
        for key in [k for k in needed if k not in found]:
            with study.folder.lock(f"match-{key}", wait=wait) as mine:
                if mine:
                    narrator.units(len(found), study.methods[key].label)
                    found[key] = study.match(study.methods[key], needed[key])
                    said = ", ".join(f"{m.speedup:.2f}x" for t, m in sorted(found[key].items()) if t in needed[key])
                    narrator.done(f"{study.methods[key].label}: {said}")
    return found


def needed_matches(methods: dict[str, Method], wanted: Sequence[Job]) -> dict[str, list[float]]:
    """The targets at which knobs must be known, by the key of the method whose knob it is."""
    found: dict[str, list[float]] = {}
    for job in wanted:
        key = job.method.follows or job.method.key
        if methods[key].knob is not None and job.target not in found.setdefault(key, []):
            found[key].append(job.target)
    return found
