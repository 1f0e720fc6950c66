"""From the numbers of clips to a calibration: means, proposals, and the diagnostics that the figures show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from rollcache.bench.calibrate.association import auc, deciles, spearman
from rollcache.bench.calibrate.checks import FEWER, Run, key
from rollcache.bench.calibrate.clips import Clip
from rollcache.bench.calibrate.drift import Drift
from rollcache.bench.calibrate.errors import Matrix, mean_matrix
from rollcache.bench.calibrate.influence import interpolated
from rollcache.bench.calibrate.proposals import Anchors, order, proposals, random_schedules, surrogate, weighted
from rollcache.bench.calibrate.result import Calibration

UNSAFE = 0.05  # the paper's limit for E
RANDOM = 500


@dataclass(frozen=True)
class Findings:
    """A calibration, and what predicts the end error of any schedule."""

    calibration: Calibration
    drift: Drift

    @property
    def schedules(self) -> Mapping[str, Mapping[int, Anchors]]:
        """Family -> exact steps -> anchors."""
        return self.calibration.schedules

    def checked(self, runs: Mapping[str, Mapping[str, Run]], budgets: Sequence[int]) -> Findings:
        """With the runs to the end of some clips; the best family by mean PSNR becomes the calibration's own.

        Args:
            runs: clip -> `checks.key` -> run.
            budgets: exact steps to surrogate costs and runs are shown for.
        """
        found = self.calibration
        rows = []
        for clip, done in runs.items():
            for n in budgets:
                ways: dict[str, Anchors | int] = {f: s[n] for f, s in found.schedules.items() if n in s}
                for how, what in (*ways.items(), (FEWER, n)):
                    run = done[key(what)]
                    predicted = None if isinstance(what, int) else self.drift.error(what)
                    rows.append({"clip": clip, "exact": n, "how": how, "predicted": predicted, **vars(run)})
        whole = [f for f in found.schedules if all(n in found.schedules[f] for n in budgets)]
        score = {f: fmean(r["psnr"] for r in rows if r["how"] == f) for f in whole} if rows else {}
        family = max(score, key=lambda f: score[f]) if score else found.family
        costs = {n: self._surrogate(n) for n in budgets}
        more = {
            "checks": rows,
            "surrogate": {str(n): c for n, c in costs.items()},
            "agreement": _agreement(rows, costs),
        }
        return replace(self, calibration=replace(found, family=family, diagnostics={**found.diagnostics, **more}))

    def _surrogate(self, exact: int) -> dict[str, Any]:
        """Cost J of the named schedules, plain and weighted by influence, and of random ones."""
        found = self.calibration
        errors = [list(row) for row in found.replay]
        heavy = weighted(errors, _weights(found.influence["latent"]))
        named = {f: s[exact] for f, s in found.schedules.items() if exact in s}
        drawn = random_schedules(found.steps, exact, RANDOM)
        plain = {f: surrogate(errors, a) for f, a in named.items()}
        return {
            "plain": plain,
            "weighted": {f: surrogate(heavy, a) for f, a in named.items()},
            "predicted": {f: self.drift.error(a) for f, a in named.items()},
            "order": order(plain),
            "random": [float(f"{surrogate(errors, a):.4g}") for a in drawn],
        }


def summarise(steps: int, clips: Sequence[Clip]) -> Findings:
    """Means over the clips, and what follows from them.

    Args:
        steps: N.
        clips: one or more, all of N steps.
    """
    sigmas = clips[0].sigmas
    replay = mean_matrix([c.replay for c in clips])
    influence = influences(steps, clips)
    drift = Drift(steps, torch.stack([c.products for c in clips]).mean(0), influence["gain"])
    calibration = Calibration(
        steps=steps,
        sigmas=sigmas,
        clips=tuple(c.name for c in clips),
        family="drift",
        schedules=proposals(sigmas, replay, _weights(influence["latent"]), drift),
        replay=_short(replay),
        predict=_short(mean_matrix([c.predict for c in clips])),
        influence=influence,
        risks=tuple(j.risk for c in clips for j in c.judged),
        magnitude_ratios=(1.0, *(fmean(c.ratios[s] for c in clips) for s in range(1, steps))),
        diagnostics={
            "touches": touched(clips),
            "reuse": reused(clips),
            "ages": ages(clips),
            "oracle": judged(clips),
        },
    )
    return Findings(calibration, drift)


def influences(steps: int, clips: Sequence[Clip]) -> dict[str, tuple[float, ...]]:
    """Medians over the clips, interpolated: see `Calibration.influence`.

    Now and then one replayed step makes something appear or vanish; that is no property of the step.
    """
    at = [t.step for t in clips[0].touches]
    touches = [[c.touches[i] for c in clips] for i in range(len(at))]
    measured = {
        "gain": [median(t.gain for t in some) for some in touches],
        "latent": [median((t.latent / t.error) ** 2 if t.error else 0.0 for t in some) for some in touches],
        "ssim": [median(t.damage / t.error**2 if t.error else 0.0 for t in some) for some in touches],
    }
    return {name: interpolated(at, values, steps) for name, values in measured.items()}


def touched(clips: Sequence[Clip]) -> dict[str, Any]:
    """What single replayed steps did, per step and clip (Fig. 10a)."""
    return {
        "steps": [t.step for t in clips[0].touches],
        "clips": [
            {
                "clip": c.name,
                "gain": [t.gain for t in c.touches],
                "error": [t.error for t in c.touches],
                "latent": [t.latent for t in c.touches],
                "damage": [t.damage for t in c.touches],
            }
            for c in clips
        ],
    }


def reused(clips: Sequence[Clip]) -> dict[str, list[float]]:
    """Relative error of reusing each block's residual of the step before, per step: quartiles (Fig. 1a)."""
    pooled = np.array([c.reuse for c in clips]).transpose(1, 0, 2).reshape(len(clips[0].reuse), -1)
    low, middle, high = np.quantile(pooled, (0.25, 0.5, 0.75), axis=1)
    return {"low": low.tolist(), "median": middle.tolist(), "high": high.tolist(), "mean": pooled.mean(1).tolist()}


def ages(clips: Sequence[Clip]) -> dict[str, Any]:
    """Error of the two bands of block residuals by age, and their ratio, of all clips and of each (Fig. 5)."""
    low, high = ([fmean(x) for x in zip(*(getattr(c, name) for c in clips), strict=True)] for name in ("low", "high"))
    return {
        "low": low,
        "high": high,
        "ratio": [h / lo for h, lo in zip(high, low, strict=True)],
        "clips": {c.name: [h / lo for h, lo in zip(c.high, c.low, strict=True)] for c in clips},
    }


def judged(clips: Sequence[Clip]) -> dict[str, Any]:
    """FSC's risk against the oracle's error (Figs. 3 and 6)."""
    pooled = [j for c in clips for j in c.judged]
    risk, error = [j.risk for j in pooled], [j.error for j in pooled]
    unsafe = [e > UNSAFE for e in error]
    return {
        "unsafe": UNSAFE,
        "unsafe_share": fmean(unsafe) if unsafe else 0.0,
        "spearman": spearman(risk, error),
        "within": {c.name: spearman([j.risk for j in c.judged], [j.error for j in c.judged]) for c in clips},
        "auc": auc(risk, unsafe),
        "deciles": [list(d) for d in deciles(risk, error)],
        "clips": [
            {
                "clip": c.name,
                "steps": [j.step for j in c.judged],
                "risk": [j.risk for j in c.judged],
                "error": [j.error for j in c.judged],
            }
            for c in clips
        ],
    }


def _agreement(rows: Sequence[Mapping[str, Any]], costs: Mapping[int, Mapping[str, Any]]) -> dict[str, float | None]:
    """Spearman of each cost and the real error among the schedules of one budget and clip, mean over those."""
    groups = {(r["clip"], r["exact"]) for r in rows}
    out: dict[str, float | None] = {}
    for cost in ("plain", "weighted", "predicted"):
        found = []
        for clip, n in sorted(groups):
            mine = [r for r in rows if (r["clip"], r["exact"]) == (clip, n) and r["how"] in costs[n][cost]]
            found.append(spearman([costs[n][cost][r["how"]] for r in mine], [r["latent"] for r in mine]))
        known = [f for f in found if f is not None]
        out[cost] = fmean(known) if known else None
    return out


def _weights(influence: Sequence[float]) -> list[float]:
    """Influence per squared error as a weight of an error."""
    return [v**0.5 for v in influence]


def _short(matrix: Matrix) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{v:.5g}") for v in row) for row in matrix)
