"""Measuring: fidelity against the full-compute twin, motion, cost ceilings, paired clocks, provenance.

Everything here needs torch alone, except FLIP (`flip-evaluator`) and the weights of the learned metrics.
"""

from rollcache.measure.clock import Paired, Spread, Stopwatch, paired
from rollcache.measure.cost import Ceiling, PassTimes, ceiling, structural_skip
from rollcache.measure.fidelity import Fidelity, FidelityMeter, Quality, compare
from rollcache.measure.flip import flip
from rollcache.measure.frames import FrameError, Frames, by_camera, camera_names, mosaic, stitch
from rollcache.measure.lpips import lpips
from rollcache.measure.metric import Metric
from rollcache.measure.motion import Motion, MotionMeter, motion
from rollcache.measure.provenance import WriteError, provenance, write_atomic

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
    "WriteError",
    "by_camera",
    "camera_names",
    "ceiling",
    "compare",
    "flip",
    "lpips",
    "mosaic",
    "motion",
    "paired",
    "provenance",
    "stitch",
    "structural_skip",
    "write_atomic",
]
