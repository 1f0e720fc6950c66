"""Fidelity of a lane against full compute, cut the ways a reader asks for: cameras, cycles, phases, turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcache.measure import FidelityMeter, Metric, Motion, flip, lpips, motion
from rollcache.measure.fidelity import CAP_DB
from rollcache.measure.fidelity import psnr as decibels
from rollcache.street.rig import RIG

if TYPE_CHECKING:
    from rollcache.bench.takes import Take
    from rollcache.measure import Fidelity, Frames
    from rollcache.street.protocol import Protocol

CAMERAS = {group.name: tuple(camera.name for camera in group.cameras) for group in RIG}


@dataclass(frozen=True)
class Perceptual:
    """Which perceptual metrics to compute, and on how many frames.

    Attributes:
        frames: score at most this many frames; 0 leaves FLIP and LPIPS out.
        lpips_weights: file of the LPIPS backbone, default the usual places.
        require: metrics that must have a value, such as ("lpips",).
    """

    frames: int = 24
    lpips_weights: str | None = None
    require: tuple[str, ...] = ()

    def score(self, test: Frames, reference: Frames) -> dict[str, Metric]:
        """FLIP and LPIPS; raises ValueError when a required one has no value."""
        if not self.frames:
            return {}
        found = {
            "flip": flip(test, reference, at_most=self.frames),
            "lpips": lpips(test, reference, at_most=self.frames, weights=self.lpips_weights),
        }
        self.check(found)
        return found

    def check(self, found: dict[str, Metric]) -> None:
        """Raise ValueError when a required metric has no value."""
        for name in self.require:
            if name not in found:
                raise ValueError(f"unknown metric {name!r} in --require; choose {' or '.join(found)}.")
            if found[name].value is None:
                raise ValueError(f"--require {name}: {found[name].reason}")


@dataclass(frozen=True)
class Cut:
    """Which frames belong to which chunk, phase and cycle; frames of the warm-up are left out of every mean.

    Attributes:
        per_step: frames per generation step.
        cycle: generation steps per KV cycle.
        first: first chunk that counts.
        turning: bool [T] over all frames.
    """

    per_step: int
    cycle: int
    first: int
    turning: Tensor

    @classmethod
    def of(cls, take: Take, protocol: Protocol, first: int, chunks: int) -> Cut:
        """The cut of the first `chunks` chunks of a take."""
        per_step = take.actions.shape[1]
        return cls(per_step, protocol.kv_every, first, take.turning[: chunks * per_step])

    def frames(self, frames: Frames) -> dict[str, Tensor]:
        """The frames that count."""
        return {group: x[self.first * self.per_step :] for group, x in frames.items()}

    def split(self, trace: Sequence[float], pooled: Sequence[float]) -> dict[str, Any]:
        """Means of a PSNR trace over cycles, phases and turns.

        Args:
            trace: mean PSNR over cameras of every frame that counts, dB.
            pooled: PSNR of the stitched picture of the same frames, whose squared errors can be pooled.
        """
        chunk = [self.first + i // self.per_step for i in range(len(trace))]
        turning = self.turning[self.first * self.per_step :].tolist()

        def of(keep: list[bool]) -> dict[str, float | int] | None:
            mine = [i for i, k in enumerate(keep) if k]
            if not mine:
                return None
            return {
                "psnr": sum(trace[i] for i in mine) / len(mine),
                "pooled": pool([pooled[i] for i in mine]),
                "frames": len(mine),
            }

        cycles = sorted({n // self.cycle for n in chunk})
        return {
            "by_cycle": [{"cycle": c, **(of([n // self.cycle == c for n in chunk]) or {})} for c in cycles],
            "by_phase": [of([n % self.cycle == j for n in chunk]) for j in range(self.cycle)],
            "turning": of([bool(t) for t in turning]),
            "straight": of([not t for t in turning]),
        }


def pool(decibels: Sequence[float]) -> float:
    """PSNR of the pooled squared error of equally large pictures, from their PSNRs."""
    mse = sum(0.0 if d >= CAP_DB else 10 ** (-d / 10) for d in decibels) / len(decibels)
    return CAP_DB if mse < 10 ** (-CAP_DB / 10) else -10 * math.log10(mse)


def fidelity(test: Frames, reference: Frames, cut: Cut, perceptual: Perceptual) -> dict[str, Any]:
    """Everything about how close `test` is to `reference`; both hold all frames, means leave the warm-up out.

    Returns:
        `psnr` (mean over frames and cameras), `pooled`, `psnr_stitched`, `ssim`, `ssim_stitched`, `flip`, `lpips`
        (numbers or None), `identical` frames, `groups`, `cameras`, `motion`, the splits of `Cut.split`, and `trace`
        (per frame, warm-up included).
    """
    meter = FidelityMeter()
    meter.update(cut.frames(test), cut.frames(reference))
    found = meter.result()
    metrics = perceptual.score(cut.frames(test), cut.frames(reference))
    energy = motion(cut.frames(test), cut.frames(reference))
    warm = psnr_trace({g: x[: cut.first * cut.per_step] for g, x in test.items()}, reference)
    return {
        "psnr": found.psnr,
        "pooled": found.overall.psnr_global,
        "psnr_uint8": found.overall.psnr_uint8,
        "psnr_stitched": found.stitched.psnr,
        "ssim": found.ssim,
        "ssim_stitched": found.stitched.ssim,
        "flip": _value(metrics, "flip"),
        "lpips": _value(metrics, "lpips"),
        "metrics": {name: metric.to_dict() for name, metric in metrics.items()},
        "frames": found.overall.frames,
        "identical": found.overall.identical,
        "groups": _groups(found, metrics, energy),
        "cameras": {n: {"psnr": q.psnr, "pooled": q.psnr_global, "ssim": q.ssim} for n, q in found.cameras.items()},
        "motion_ratio": energy.ratio,
        "motion": energy.to_dict(),
        **cut.split(found.overall.psnr_trace, found.stitched.psnr_trace),
        "trace": [*warm, *found.overall.psnr_trace],
    }


def psnr_trace(test: Frames, reference: Frames) -> list[float]:
    """Mean PSNR over cameras of every frame of `test` against the frames of `reference` with the same number."""
    per_camera = []
    for group, x in test.items():
        if not len(x):
            return []
        error = (x.clamp(0, 1) - reference[group][: len(x)].clamp(0, 1)).double().square().mean((2, 3, 4))  # [T, V]
        per_camera.append(decibels(error))
    trace: list[float] = torch.cat(per_camera, 1).mean(1).tolist()
    return trace


def brief(test: Frames, reference: Frames, cut: Cut) -> dict[str, Any]:
    """The cheap part of `fidelity`: PSNR, mean, pooled, by cycle and turn, and the motion ratio."""
    trace = psnr_trace(test, reference)
    counted = trace[cut.first * cut.per_step :]
    ours, theirs = cut.frames(test), cut.frames(reference)
    gaps = [(x.clamp(0, 1) - theirs[group].clamp(0, 1)).double().flatten(1) for group, x in ours.items()]
    # Background pixels of the mosaic never count, so the stitched picture is all pixels of all cameras.
    stitched: list[float] = decibels(torch.cat(gaps, 1).square().mean(1)).tolist()
    return {
        "psnr": sum(counted) / len(counted),
        "pooled": pool(stitched),
        "psnr_stitched": sum(stitched) / len(stitched),
        "motion_ratio": motion(ours, theirs).ratio,
        **cut.split(counted, stitched),
        "trace": trace,
    }


def _groups(found: Fidelity, metrics: dict[str, Metric], energy: Motion) -> dict[str, dict[str, float | None]]:
    """Means over the cameras of every view group."""
    out: dict[str, dict[str, float | None]] = {}
    for group, names in CAMERAS.items():
        row: dict[str, float | None] = {
            "psnr": _mean([found.cameras[n].psnr for n in names]),
            "ssim": _mean([found.cameras[n].ssim for n in names]),
        }
        for name, metric in metrics.items():
            row[name] = None if metric.value is None else _mean([metric.cameras[n] for n in names])
        ours, theirs = (sum(energy.cameras[n][side] for n in names) for side in (0, 1))
        row["motion_ratio"] = ours / theirs if theirs else None
        out[group] = row
    return out


def _value(metrics: dict[str, Metric], name: str) -> float | None:
    return metrics[name].value if name in metrics else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
