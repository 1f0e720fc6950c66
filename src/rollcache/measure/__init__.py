"""Measuring: fidelity against the full-compute twin, motion, cost ceilings, paired clocks, provenance.

Everything here needs torch alone, except FLIP (`flip-evaluator`), the weights of the learned distances and, for the
heads of LPIPS, `safetensors`.
"""

from rollcache.measure.clock import Paired, Spread, Stopwatch, paired
from rollcache.measure.cost import (
    Ceiling,
    PassTimes,
    ceiling,
    count_flops,
    structural_ceiling,
    structural_skip,
    time_passes,
)
from rollcache.measure.fidelity import Fidelity, FidelityMeter, Quality, compare
from rollcache.measure.flip import flip
from rollcache.measure.frames import FrameError, Frames, by_camera, camera_names, mosaic, stitch
from rollcache.measure.learned import WeightsError
from rollcache.measure.lpips import lpips
from rollcache.measure.metric import Metric
from rollcache.measure.motion import Motion, MotionMeter, motion
from rollcache.measure.provenance import WriteError, provenance, write_atomic
from rollcache.measure.stlpips import stlpips

__all__ = [
    "Ceiling",
    "Fidelity",
    "FidelityMeter",
    "FrameError",
    "Frames",
    "Metric",
    "Motion",
    "MotionMeter",
    "Paired",
    "PassTimes",
    "Quality",
    "Spread",
    "Stopwatch",
    "WeightsError",
    "WriteError",
    "by_camera",
    "camera_names",
    "ceiling",
    "compare",
    "count_flops",
    "flip",
    "lpips",
    "mosaic",
    "motion",
    "paired",
    "provenance",
    "stitch",
    "stlpips",
    "structural_ceiling",
    "structural_skip",
    "time_passes",
    "write_atomic",
]
