"""The methods that are compared, as a table: how each is made from the value of its knob.

A larger knob is faster. Settings that count steps are given for the 50 that publications have, and scaled to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollcache.bench.calibrate.result import Calibration
from rollcache.bench.lanes import Plan
from rollcache.bench.steps.match import Knob
from rollcache.policies import StepReuse, schedules
from rollcache.policies.c3ache import C3ache
from rollcache.policies.easycache import EasyCache
from rollcache.policies.flowcache import FlowCache
from rollcache.policies.magcache import MagCache
from rollcache.policies.motioncache import MotionCache
from rollcache.policies.scope import Scope
from rollcache.policies.seacache import SeaCache
from rollcache.policies.taylorseer import TaylorSeer
from rollcache.policies.teacache import TeaCache

Make = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method, or one variant of one.

    Attributes:
        key: short name, for files and the command line.
        label: what tables call it.
        make: the policy for a value of the knob; of "fewer steps" the number of steps.
        knob: what is matched; None for a method that takes the value of another one's knob.
        follows: key of that other method.
        group: which tables it is in.
        factors: speeds at which an ablation is run, as parts of that of the ablations.
        dry: decides by a schedule alone, so that a model of any size shows what it decides.
        solver: of the loop, where it is not that of the study.
        across: works across chunks, so that it is matched on as many windows as are tested.
    """

    key: str
    label: str
    make: Make
    knob: Knob | None = None
    follows: str | None = None
    group: Literal["methods", "ablations"] = "methods"
    factors: tuple[float, ...] = (1.0,)
    dry: bool = False
    solver: Literal["multistep"] | None = None
    across: bool = False

    def plan(self, value: float | None) -> Plan:
        """The variant to run."""
        made = self.make(value)
        if isinstance(made, int):
            return Plan(key=self.key, label=self.label, steps=made, solver=self.solver)
        return Plan(key=self.key, label=self.label, policy=made)


@dataclass(frozen=True)
class Setup:
    """What methods are made for.

    Attributes:
        sigmas: noise level of every step [N].
        calibration: what was measured of the model; None leaves out what needs it.
    """

    sigmas: tuple[float, ...]
    calibration: Calibration | None = None

    @property
    def steps(self) -> int:
        """Denoising steps of a chunk (N)."""
        return len(self.sigmas)

    def scaled(self, of_50: int, least: int = 1) -> int:
        """A number of steps that is published for 50."""
        return max(least, round(of_50 * self.steps / 50))


def methods(setup: Setup) -> list[Method]:
    """All methods that can be made here, but FSC: see `ablations.py`."""
    return [*_schedules(setup), *_drifts(setup), *_others(setup)]


def missing(setup: Setup) -> dict[str, str]:
    """Methods that cannot be made here, and why."""
    found = setup.calibration
    if found is None:
        return dict.fromkeys(("measured", "measured-2", "magcache"), "needs --calibration")
    return {} if found.magnitude_ratios is not None else {"magcache": "the calibration has no magnitude ratios"}


def schedule(
    key: str,
    label: str,
    setup: Setup,
    anchors: Callable[[int], Sequence[int]],
    *,
    budgets: Sequence[int] = (),
    order: int = 0,
    **more: Any,
) -> Method:
    """Step reuse by schedules of any number of exact steps; the knob are the steps that are replayed.

    Args:
        key: see `Method`, as are `label` and `more`.
        label: likewise.
        setup: what for.
        anchors: the schedule of a number of exact steps.
        budgets: those numbers; all by default.
        order: of `StepReuse`.
        more: further fields.
    """
    n = setup.steps
    return Method(
        key=key,
        label=label,
        make=lambda left_out: StepReuse(steps=n, anchors=tuple(anchors(n - int(left_out))), order=order),
        knob=Knob.whole("steps replayed", [n - exact for exact in budgets or range(1, n + 1)]),
        dry=True,
        **more,
    )


def taylorseer(steps: int, exact: int, warmup: int) -> TaylorSeer:
    """TaylorSeer with `exact` computed steps: the smallest interval that needs no more, then more warm-up.

    Intervals alone are too coarse to match speeds with: of 50 steps 2 computes 26 and 3 computes 18.
    """

    def computed(interval: int, first: int) -> int:
        return first + (steps - first) // interval

    interval = next(i for i in range(1, steps + 1) if computed(i, warmup) <= exact)
    first = max(w for w in range(warmup, exact + 1) if computed(interval, w) <= exact)
    return TaylorSeer(steps=steps, interval=interval, warmup=first)


def _schedules(setup: Setup) -> list[Method]:
    """Methods without a signal: fewer steps, and step reuse between anchors of several schedules and orders."""
    n, calibration = setup.steps, setup.calibration
    left_out = Knob.whole("steps left out", range(n))
    fewer: dict[str, Any] = {"make": lambda left_out: n - int(left_out), "knob": left_out, "dry": True}

    def even(exact: int) -> Sequence[int]:
        return schedules.even_in_sigma(setup.sigmas, exact)

    found = [
        Method(key="fewer", label="fewer steps", **fewer),
        Method(key="fewer-2", label="fewer steps, second-order solver", solver="multistep", **fewer),
        schedule("uniform", "StepReuse, uniform", setup, lambda exact: schedules.uniform(n, exact)),
        schedule("sigma", "StepReuse, even in sigma", setup, even),
        schedule("sigma-1", "StepReuse, even in sigma, lines", setup, even, order=1),
        schedule("sigma-2", "StepReuse, even in sigma, parabolas", setup, even, order=2),
    ]
    if calibration is not None:
        budgets = sorted(calibration.schedules[calibration.family])
        kinds = (("measured", "StepReuse, measured", 0), ("measured-2", "StepReuse, measured, parabolas", 2))
        found += [
            schedule(key, label, setup, calibration.anchors, budgets=budgets, order=order)
            for key, label, order in kinds
        ]
    return found


def _drifts(setup: Setup) -> list[Method]:
    """Methods that compute when a signal has drifted too far."""
    n, warmup = setup.steps, setup.scaled(5)
    kinds: list[tuple[str, str, Make, str]] = [
        ("teacache", "TeaCache", lambda x: TeaCache(max_drift=x, warmup=warmup, steps=n), "max_drift"),
        ("flowcache", "FlowCache", lambda x: FlowCache(max_drift=x, warmup=warmup, steps=n), "max_drift"),
        ("seacache", "SeaCache", lambda x: SeaCache(max_drift=x, steps=n), "max_drift"),
        ("easycache", "EasyCache", lambda x: EasyCache(max_drift=x, warmup=setup.scaled(10, 2), steps=n), "max_drift"),
        (
            "scope",
            "SCOPE-style",
            lambda x: Scope(steps=n, cache_below=x / 3, predict_below=x, warmup=warmup),
            "predict_below",
        ),
    ]
    return [
        Method(key=key, label=label, make=make, knob=Knob(name, low=1e-3, high=10.0))
        for key, label, make, name in kinds
    ]


def _others(setup: Setup) -> list[Method]:
    n, calibration = setup.steps, setup.calibration
    found = [
        Method(
            key="taylorseer",
            label="TaylorSeer",
            make=lambda left_out: taylorseer(n, n - int(left_out), setup.scaled(3)),
            knob=Knob.whole("steps predicted", range(n - setup.scaled(3))),
            dry=True,
        ),
        Method(
            key="motioncache",
            label="MotionCache",
            make=lambda x: MotionCache(threshold=x, warmup=setup.scaled(4), chunk_updates=setup.scaled(6), steps=n),
            knob=Knob("threshold", low=1e-3, high=10.0),
        ),
        Method(
            key="c3ache",
            label="C3ache (across chunks)",
            make=lambda x: C3ache(period=int(x)),
            knob=Knob.whole("period", range(1, 9)),
            dry=True,
            across=True,
        ),
    ]
    if calibration is not None and calibration.magnitude_ratios is not None:
        ratios = calibration.magnitude_ratios
        found.append(
            Method(
                key="magcache",
                label="MagCache",
                make=lambda x: MagCache.interpolated(ratios, n, max_error=x),
                knob=Knob("max_error", low=1e-4, high=10.0),
                dry=True,
            )
        )
    return found
