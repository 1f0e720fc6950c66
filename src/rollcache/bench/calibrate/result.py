"""What a calibration found: `calibration.json`, which comparisons read.

    calibration = Calibration.load(Path("calibration.json"))
    policy = StepReuse(steps=calibration.steps, anchors=calibration.anchors(16))

Step indices count from 0. Matrices have a row per anchor `a` and a column per step `s`; where `s <= a` they hold 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rollcache.bench.results import dump
from rollcache.bench.schema import Maybe, fault
from rollcache.measure import write_atomic

SCHEMA = "rollcache/calibration-1"
FILE = "calibration.json"
SHAPE = {
    "steps": int,
    "sigmas": [float],
    "clips": [str],
    "family": str,
    "schedules": {"*": {"*": [int]}},
    "replay": [[float]],
    "predict": [[float]],
    "influence": {"*": [float]},
    "risks": [float],
    "magnitude_ratios": Maybe([float]),
    "diagnostics": {},
    "provenance": {},
}
AGAIN = "Run rollcache calibrate again."


class CalibrationError(ValueError):
    """A calibration that cannot be read, or that does not have what is asked for."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured on K clips, for one model, one protocol and one number of steps.

    Attributes:
        steps: denoising steps of a chunk (N).
        sigmas: noise level of every step [N], 1 at pure noise.
        clips: what was measured, "scenario seed window".
        family: the schedules that `anchors` takes unless told otherwise: the best by runs to the end.
        schedules: family -> exact steps -> anchors. Families: "drift" (least predicted error of the clean latent, see
            `proposals`), "replay" (dynamic programming over `replay`), "weighted" (the same weighted by `influence`),
            "uniform", "even in sigma", "dense to sparse".
        replay: relative L2 error of the hidden state that leaves the stack, |h_in(s) + r(a) - h(s)| / |h(s)|, mean over
            the clips [N][N].
        predict: the same for a line through r(a') and r(a) over sigma, a' = max(0, 2a - s) [N][N].
        influence: what replaying only step s does to the end, interpolated [N]. "latent": squared relative error of the
            clean latent per squared local error; "ssim": 1 - SSIM of the decoded window per squared local error;
            "gain": error of the clean latent per error of the latent right after the step.
        risks: FSC's risk of every step that its default schedule does not compute, pooled over the clips; what
            `FSC.recalibrated` takes. Empty if it was not measured.
        magnitude_ratios: MagCache's ratio of every step [N]; None if it was not measured.
        diagnostics: the numbers behind the figures.
        provenance: see `measure.provenance`.
    """

    steps: int
    sigmas: tuple[float, ...]
    clips: tuple[str, ...]
    family: str
    schedules: Mapping[str, Mapping[int, tuple[int, ...]]]
    replay: tuple[tuple[float, ...], ...]
    predict: tuple[tuple[float, ...], ...]
    influence: Mapping[str, tuple[float, ...]]
    risks: tuple[float, ...] = ()
    magnitude_ratios: tuple[float, ...] | None = None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.steps
        for name in ("replay", "predict"):
            matrix = getattr(self, name)
            if len(matrix) != n or any(len(row) != n for row in matrix):
                raise CalibrationError(f"{name} is not a matrix of {n} by {n} steps.")
        rows = {"sigmas": self.sigmas, **{f"influence.{k}": v for k, v in self.influence.items()}}
        if self.magnitude_ratios is not None:
            rows["magnitude_ratios"] = self.magnitude_ratios
        for name, row in rows.items():
            if len(row) != n:
                raise CalibrationError(f"{name} has {len(row)} numbers for {n} steps.")
        if self.family not in self.schedules:
            raise CalibrationError(f"family is {self.family!r}, of which there are no schedules.")
        for family, found in self.schedules.items():
            for exact, anchors in found.items():
                if len(anchors) != exact or list(anchors) != sorted(set(anchors)) or not 0 == anchors[0] <= n - exact:
                    raise CalibrationError(f"schedules.{family}.{exact} is no schedule: {list(anchors)}.")
                if anchors[-1] >= n:
                    raise CalibrationError(f"schedules.{family}.{exact} ends at {anchors[-1]}, past step {n - 1}.")

    def anchors(self, exact: int, family: str | None = None) -> tuple[int, ...]:
        """The steps to compute when `exact` of them may be.

        Raises:
            CalibrationError: there is none of that family or for that budget.
        """
        name = family or self.family
        if name not in self.schedules:
            raise CalibrationError(f"no family {name!r}; there are {', '.join(self.schedules)}.")
        if exact not in self.schedules[name]:
            known = ", ".join(map(str, sorted(self.schedules[name])))
            raise CalibrationError(f"no schedule of family {name!r} with {exact} exact steps; there are {known}.")
        return self.schedules[name][exact]

    def dump(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            WriteError: it could not be written.
        """
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        write_atomic(path, _flat(dump({"schema": SCHEMA, **document})))

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file, or the `calibration.json` of a folder.

        Raises:
            CalibrationError: not there, not JSON, of another kind, or damaged; names the file and the place in it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CalibrationError(f"no calibration at {path}; make one with: rollcache calibrate --out DIR") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CalibrationError(f"{path} is no readable calibration ({error})") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            found = document.get("schema") if isinstance(document, dict) else type(document).__name__
            raise CalibrationError(f"{path} is no calibration of this version: schema is {found!r}, not {SCHEMA!r}")
        if damage := fault(document, SHAPE):
            raise CalibrationError(f"{path} is damaged: {damage}. {AGAIN}")
        try:
            return cls(
                steps=document["steps"],
                sigmas=tuple(document["sigmas"]),
                clips=tuple(document["clips"]),
                family=document["family"],
                schedules={
                    family: {int(exact): tuple(anchors) for exact, anchors in found.items()}
                    for family, found in document["schedules"].items()
                },
                replay=tuple(map(tuple, document["replay"])),
                predict=tuple(map(tuple, document["predict"])),
                influence={name: tuple(row) for name, row in document["influence"].items()},
                risks=tuple(document["risks"]),
                magnitude_ratios=None if document["magnitude_ratios"] is None else tuple(document["magnitude_ratios"]),
                diagnostics=document["diagnostics"],
                provenance=document["provenance"],
            )
        except (ValueError, IndexError) as error:
            raise CalibrationError(f"{path} is damaged: {error} {AGAIN}") from None


def _flat(text: str) -> str:
    """Rows of numbers on one line each: the file stays small, and a person can read it."""
    return re.sub(r"\[\s+([-\d][-\d.,e+\s]*?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
