"""What a result file must hold for a report, and where a damaged one does not.

A shape is a type, `[shape]` for a list of it, `Maybe(shape)` where null may stand, or a mapping of names to shapes: a
name that ends in `?` may be missing, `*` stands for every name. Names that are not in a shape are left alone, so that
files of a later version with more in them stay readable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Maybe:
    """A shape, or null."""

    shape: Any


NUMBER = Maybe(float)
SPLIT = Maybe({"psnr": float, "pooled": float, "frames": int})
TIMING = {"full_seconds_per_chunk": float, "seconds_per_chunk": float}
CLOSE = {"psnr": float, "pooled": float, "motion_ratio": NUMBER, "trace": [float]}
BESIDE = {"label": str, **CLOSE}
SCENARIO = {
    **dict.fromkeys(("speedup", "ceiling", "efficiency", "flip", "lpips", "motion_ratio", "gate_share"), NUMBER),
    **dict.fromkeys(("skip_rate", "psnr", "psnr_stitched", "ssim"), float),
    "interrupted": bool,
    "unmeasured?": [str],
    "chunks": int,
    "counted": str,
    "take": {
        "scene_seed": int,
        "drive": str,
        "drive_source": str,
        "chunks": int,
        "start_frames": int,
        "injections": [str],
        "speed": [float],
        "yaw_rate": [float],
    },
    "protocol": {"text": str, "kv_every": int},
    "policy": {"label": str, "settings": Maybe({"type": str})},
    "timing": TIMING,
    "fidelity": {
        **CLOSE,
        "ssim": float,
        "flip": NUMBER,
        "ssim_stitched": float,
        "groups": {"*": {"psnr": float, "ssim": float}},
        "metrics": {"*": {"stitched?": NUMBER, "reason?": str}},
        "by_cycle": [{"cycle": int, "psnr": float, "pooled": float, "frames": int}],
        "by_phase": [SPLIT],
        "turning": SPLIT,
        "straight": SPLIT,
    },
    "truth": {
        **dict.fromkeys(("psnr_full", "psnr_cached"), float),
        **dict.fromkeys(("motion_ratio_full", "motion_ratio_cached"), NUMBER),
        **{key: [float] for key in ("psnr_full_by_cycle", "psnr_cached_by_cycle")},
    },
    "floor": {"*": BESIDE},
    "controls": [{"key": str, "speedup": NUMBER, **BESIDE}],
    "decisions": {
        "chunks": [[str]],
        "reasons": {"*": int},
        "skip_by_step_block": [[float]],
        "skip_by_phase": [float],
    },
    "turning": [bool],
    "profile": Maybe(
        {
            "phases": int,
            "steps": int,
            "cosine": [[[NUMBER]]],
            "phase_cosine": [NUMBER],
            "phase_residual_change": [NUMBER],
            "verdict": str,
        }
    ),
    "media?": {"video": str, "panels": [float]},
}
DOCUMENT = {
    "kind": str,
    "status": str,
    "planned": [str],
    "scenarios": {"*": SCENARIO},
    "generated?": {"*": {"chunks": int}},
    "provenance": {
        "config": object,
        "command": str,
        "time": str,
        "dtype": str,
        "revision": Maybe(str),
        "versions": {"*": str},
        "machine": {"cpu": str, "cores": int, "threads": int, "system": str},
    },
}
WORDS = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def fault(value: Any, shape: Any, where: str = "") -> str | None:
    """The first place where a document does not have a shape, in words; None when it has.

    Args:
        value: from JSON.
        shape: see above.
        where: what to call `value`.

    Example:
        >>> fault({"psnr": "high"}, {"psnr": float})
        'psnr is a text where a number belongs'
        >>> fault({}, {"psnr": float, "lpips?": float})
        'psnr is missing'
    """
    if isinstance(shape, Maybe):
        return None if value is None else fault(value, shape.shape, where)
    wanted = type(shape) if isinstance(shape, dict | list) else shape
    if wanted is not object and not _is(value, wanted):
        return f"{where or 'it'} is {_word(value)} where {WORDS[wanted]} belongs"
    if isinstance(shape, list):
        return next((found for i, x in enumerate(value) if (found := fault(x, shape[0], f"{where}[{i}]"))), None)
    if isinstance(shape, dict):
        return _fault_inside(value, shape, where)
    return None


def _fault_inside(value: dict[str, Any], shape: dict[str, Any], where: str) -> str | None:
    for name, inner in shape.items():
        key, optional = name.removesuffix("?"), name.endswith("?")
        for k in value if name == "*" else [key]:
            place = f"{where}.{k}" if where else k
            if k not in value:
                if optional:
                    continue
                return f"{place} is missing"
            if found := fault(value[k], inner, place):
                return found
    return None


def _is(value: Any, wanted: type) -> bool:
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, wanted)


def _word(value: Any) -> str:
    return "null" if value is None else WORDS[type(value)]
