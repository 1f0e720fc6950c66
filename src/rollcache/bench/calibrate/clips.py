"""The numbers of one measured clip, in a file of its own: an interrupted calibration goes on after the last of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rollcache.bench.calibrate.influence import Touch
from rollcache.bench.calibrate.oracle import Judged
from rollcache.bench.calibrate.result import CalibrationError
from rollcache.bench.schema import fault
from rollcache.measure import write_atomic

SCHEMA = "rollcache/calibration-clip-1"
SHAPE = {
    "name": str,
    "sigmas": [float],
    "replay": [[float]],
    "predict": [[float]],
    "touches": [{"step": int, "error": float, "local": float, "latent": float, "damage": float}],
    "reuse": [[float]],
    "low": [float],
    "high": [float],
    "judged": [{"step": int, "risk": float, "error": float}],
    "ratios": [float],
}


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One window of one drive.

    Attributes:
        name: "scenario seed window".
        sigmas: noise level of every step [N].
        replay: see `errors` [N][N].
        predict: likewise.
        touches: see `influence`.
        reuse: relative error of every block's residual of the step before [N - 1][blocks].
        low: mean relative error of the low band of block residuals at age 1, 2, ...
        high: likewise of the high band.
        judged: see `oracle`.
        ratios: MagCache's ratio of every step [N].
        products: see `drift` [M, M].
    """

    name: str
    sigmas: tuple[float, ...]
    replay: list[list[float]]
    predict: list[list[float]]
    touches: tuple[Touch, ...]
    reuse: list[list[float]]
    low: list[float]
    high: list[float]
    judged: tuple[Judged, ...]
    ratios: tuple[float, ...]
    products: Tensor

    def save(self, path: Path, made: Mapping[str, Any]) -> None:
        """Write the file, whole or not at all; `made` says under which settings.

        Raises:
            WriteError: it could not be written.
        """
        from safetensors.torch import save

        numbers = asdict(replace(self, products=None))  # type: ignore[arg-type]
        del numbers["products"]
        head = {"schema": SCHEMA, "made": json.dumps(made, sort_keys=True), "clip": json.dumps(numbers)}
        write_atomic(path, save({"products": self.products.contiguous()}, head))

    @classmethod
    def load(cls, path: Path, made: Mapping[str, Any]) -> Clip | None:
        """Read a file; None if there is none.

        Raises:
            CalibrationError: it is damaged, or was made under other settings; names the file.
        """
        from safetensors import SafetensorError, safe_open

        if not path.exists():
            return None
        again = "delete it, and run again"
        try:
            with safe_open(path, "pt") as file:
                head = file.metadata() or {}
                products = file.get_tensor("products")
            if head.get("schema") != SCHEMA:
                raise ValueError(f"its schema is {head.get('schema')!r}")
            numbers, before = json.loads(head["clip"]), json.loads(head["made"])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CalibrationError(f"{path} is no readable clip ({error}): {again}.") from None
        if damage := fault(numbers, SHAPE):
            raise CalibrationError(f"{path} is damaged: {damage}: {again}.")
        if differ := sorted(k for k in {*made, *before} if made.get(k) != before.get(k)):
            k = differ[0]
            raise CalibrationError(
                f"{path} was measured with {k} {before.get(k)!r}, not {made.get(k)!r}: give another --out, or {again}."
            )
        kinds = {"touches": Touch, "judged": Judged}
        known = {f.name: numbers[f.name] for f in fields(cls) if f.name in numbers}
        for name, kind in kinds.items():
            known[name] = tuple(kind(**row) for row in known[name])
        return cls(**{**known, "sigmas": tuple(known["sigmas"]), "ratios": tuple(known["ratios"])}, products=products)
