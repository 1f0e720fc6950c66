"""The result of an evaluation: one document that grows part by part and is whole on disk at any time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcache.measure import write_atomic
from rollcache.measure.provenance import plain
from rollcache.street.evaluate.truth import Plan

SCHEMA = "rollcache/street-eval-1"
PARTS = ("codec", "horizon", "stability", "agents", "actions", "response", "cost", "teacher")


@dataclass
class SceneResult:
    """What was measured in one scene.

    Attributes:
        name: of the plan.
        scenario: scene group.
        seed: among the held-out scenes.
        drive: name of the drive.
        source: "scripted", or the file it was read from.
        chunks: generation steps.
        frames: generated frames.
        parts: finished parts by name, see `PARTS`; plain values.
        skipped: part -> why it was left out.
    """

    name: str
    scenario: str
    seed: int
    drive: str
    source: str
    chunks: int
    frames: int
    parts: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> SceneResult:
        """Nothing measured yet."""
        d = plan.drive
        return cls(plan.name, plan.scenario, plan.seed, d.name, d.source, plan.chunks, plan.frames)

    @property
    def missing(self) -> list[str]:
        """Parts that are still to be measured."""
        return [p for p in PARTS if p not in self.parts and p not in self.skipped]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**plain(self), "missing": self.missing}


@dataclass
class Evaluation:
    """The document.

    Attributes:
        planned: names of all scenes that were asked for.
        provenance: see `measure.provenance`.
        settings: what was asked for, in words and numbers.
        path: the file; None writes none.
        scenes: finished or begun ones.
        interrupted: somebody stopped it.
    """

    planned: tuple[str, ...]
    provenance: Mapping[str, Any]
    settings: Mapping[str, Any]
    path: Path | None = None
    scenes: list[SceneResult] = field(default_factory=list)
    interrupted: bool = False

    @property
    def lacking(self) -> list[str]:
        """What was planned and is not there, one line a scene."""
        there = {s.name: s for s in self.scenes}
        lines = []
        for name in self.planned:
            missing = there[name].missing if name in there else list(PARTS)
            if missing:
                lines.append(f"{name}: {'everything' if len(missing) == len(PARTS) else ', '.join(missing)}")
        return lines

    @property
    def status(self) -> str:
        """`complete`, or `interrupted` or `running` and what is missing."""
        if not self.lacking:
            return "complete"
        return f"{'interrupted' if self.interrupted else 'running'}; missing: {'; '.join(self.lacking)}"

    def to_dict(self) -> dict[str, Any]:
        """The document."""
        return {
            "schema": SCHEMA,
            "status": self.status,
            "planned": list(self.planned),
            "settings": dict(self.settings),
            "scenes": [s.to_dict() for s in self.scenes],
            "provenance": self.provenance,
        }

    def save(self) -> None:
        """Write the file; the earlier version stays whole when that fails.

        Raises:
            WriteError: it could not be written.
        """
        if self.path is not None:
            write_atomic(self.path, dump(self.to_dict()))


def dump(document: Any) -> str:
    """JSON with at most six significant digits a number."""
    return json.dumps(_short(plain(document)), indent=1, allow_nan=False) + "\n"


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are there; None of none."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_short(v) for v in value]
    return value
