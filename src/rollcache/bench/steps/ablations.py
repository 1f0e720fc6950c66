"""FSC, and what becomes of it when its parts are taken away or moved: the variants of its Tables 3, 6, 16, 17 and 18.

Variants that keep FSC's risk take the threshold scale r that FSC itself was given, as the paper's rows "modify
FSC-Quality"; those without it (anchors alone, one reactive signal, a fixed table) are matched in speed on their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollcache.bench.steps.match import Knob
from rollcache.bench.steps.methods import Method, Setup, schedule
from rollcache.policies import schedules
from rollcache.policies.fsc import FSC

SLOWER = (1.0, 1 / 1.13, 1 / 1.31)  # the latencies at which the paper has its reactive variant
SCALE = Knob("risk_scale", low=1e-2, high=30.0)


def fsc(setup: Setup) -> FSC:
    """FSC-Quality for this model: thresholds from the risks of the calibration, the published shares otherwise."""
    config = FSC(steps=setup.steps)
    found = setup.calibration
    return config.recalibrated(found.risks) if found is not None and found.risks else config


def methods(setup: Setup) -> list[Method]:
    """FSC as published, and with what was measured here: anchors even in noise level, C0 along lines."""
    base = fsc(setup)
    anchors = schedules.even_in_sigma(setup.sigmas, len(base.exact))
    placed = replace(base, warmup=1, at=anchors[1:], order=1)
    return [
        Method(key="fsc", label="FSC", make=lambda r: replace(base, risk_scale=r), knob=SCALE),
        Method(
            key="fsc-sigma",
            label="FSC, even in sigma, lines",
            make=lambda r: replace(placed, risk_scale=r),
            knob=SCALE,
        ),
    ]


def ablations(setup: Setup) -> list[Method]:
    """All variants that can be made here."""
    return [*_anchors(setup), *_signal(setup), *_parts(setup), *_placed(setup)]


def _anchors(setup: Setup) -> list[Method]:
    """Anchors without any repair, as many as the speed allows."""
    base, n = fsc(setup), setup.steps
    kinds = (
        ("anchors", "anchors only, dense to sparse", "dense_to_sparse"),
        ("anchors-uniform", "anchors only, uniform", "uniform"),
        ("anchors-reversed", "anchors only, sparse to dense", "sparse_to_dense"),
    )
    first = round(0.12 * n)
    room = int(base.end * (n - 1)) + 1  # steps up to the last anchor

    def exact(kind: Any) -> Callable[[int], tuple[int, ...]]:
        return lambda count: replace(base, schedule=kind, anchors=count - first).exact

    return [
        schedule(key, label, setup, exact(kind), budgets=range(first + 1, room + 1), group="ablations")
        for key, label, kind in kinds
    ]


def _signal(setup: Setup) -> list[Method]:
    """Other ways to decide when: one reactive signal for both roles, a table, thresholds of another model."""
    base = fsc(setup)
    sigmas = setup.sigmas

    def table(r: float) -> FSC:
        config = replace(base, risk_scale=r)
        return replace(config, table=config.levels_on_a_line(sigmas))

    found = [
        Method(
            key="reactive",
            label="purely reactive",
            make=lambda r: replace(base, coupled=True, risk_scale=r),
            knob=SCALE,
            group="ablations",
            factors=SLOWER,
        ),
        Method(key="table", label="fixed table of levels", make=table, knob=SCALE, group="ablations", dry=True),
    ]
    if base.thresholds != (published := FSC(steps=setup.steps).thresholds):
        found.append(
            Method(
                key="published",
                label="published routing, not recalibrated",
                make=lambda r: replace(base, thresholds=published, risk_scale=r),
                knob=SCALE,
                group="ablations",
            )
        )
    return found


def _parts(setup: Setup) -> list[Method]:
    """One part changed, the rest as FSC has it."""
    base, n = fsc(setup), setup.steps
    tail = tuple(dict.fromkeys(round(share * (n - 1)) for share in (0.9, 0.96)))
    tail = tuple(step for step in tail if step > base.exact[-1])
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("uniform-repair", "uniform anchors + repair", {"schedule": "uniform"}),
        ("reversed-repair", "sparse-to-dense anchors + repair", {"schedule": "sparse_to_dense"}),
        ("collapsed", "collapsed repair thresholds", {"collapsed": True}),
        ("phase", "with phase shaping", {"phase": "late_relax"}),
        ("no-gate", "no low-frequency gate", {"low_gate": False}),
        ("w5", "W=5 of 50 (FSC-Speed)", {"warmup": setup.scaled(5)}),
        ("tail", "tail anchors", {"tail": tail}),
        ("parabola", "C0 along parabolas", {"order": 2}),
        ("q-low", "q_scale -20 %", {"share_scale": 0.8 * base.share_scale}),
        ("q-high", "q_scale +20 %", {"share_scale": 1.2 * base.share_scale}),
    ]
    found = [_follower(key, label, base, lambda r: r, more) for key, label, more in changes]
    found.append(_follower("r-low", "r -15 %", base, lambda r: 0.85 * r, {}))
    found.append(_follower("r-high", "r +15 %", base, lambda r: 1.15 * r, {}))
    return found


def _placed(setup: Setup) -> list[Method]:
    """As many anchors as FSC has, placed by another rule or by a measured local cost, with FSC's repair."""
    base, calibration = fsc(setup), setup.calibration
    count = len(base.exact)
    found = {"sigma": ("anchors even in sigma + repair", schedules.even_in_sigma(setup.sigmas, count))}
    labels = {
        "drift": "anchors by measured drift + repair",
        "replay": "DP anchors, unweighted, + repair",
        "weighted": "DP anchors, influence-weighted, + repair",
    }
    for family, label in labels.items():
        known = {} if calibration is None else calibration.schedules.get(family, {})
        if count in known:
            found[family] = (label, known[count])
    return [
        _follower(f"{name}-repair", label, base, lambda r: r, {"warmup": 1, "at": anchors[1:]})
        for name, (label, anchors) in found.items()
    ]


def _follower(key: str, label: str, base: FSC, scale: Callable[[float], float], changes: dict[str, Any]) -> Method:
    return Method(
        key=key,
        label=label,
        make=lambda r: replace(base, risk_scale=scale(r), **changes),
        follows="fsc",
        group="ablations",
    )
