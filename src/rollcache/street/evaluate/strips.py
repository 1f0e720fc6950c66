"""Pictures to look at: rendered and generated frames side by side, at moments over the horizon."""

from __future__ import annotations

import io
import re
from pathlib import Path

import torch
from torch import Tensor

from rollcache.measure import Frames, stitch, write_atomic
from rollcache.street.evaluate.result import SceneResult
from rollcache.street.rig import FPS

MOMENTS = (1, 2, 4, 8, 15, 21)  # seconds
ENLARGED = 2


def moments(frames: int) -> list[int]:
    """The frames that are shown of `frames`; the last one when there is none at the first moment."""
    return [m * FPS - 1 for m in MOMENTS if m * FPS <= frames] or [frames - 1]


def strip(frames: Frames, truth: Frames) -> Tensor:
    """One row a moment: the rendered mosaic of all cameras, then the generated one. uint8 [rows * H, 2 * W, 3]."""
    rows = []
    for t in moments(len(next(iter(frames.values())))):
        both = [stitch({g: x[t : t + 1] for g, x in f.items()})[0] for f in (truth, frames)]
        rows.append(torch.cat(both, 1))
    picture = (torch.cat(rows).clamp(0, 1) * 255).round().to(torch.uint8)
    return picture.repeat_interleave(ENLARGED, 0).repeat_interleave(ENLARGED, 1)


def strip_path(folder: Path, name: str) -> Path:
    """Where the strip of a scene lies."""
    return folder / f"strip-{re.sub('[^A-Za-z0-9]+', '-', name)}.png"


def write_strip(folder: Path, scene: SceneResult, frames: Frames, truth: Frames) -> Path:
    """Write the strip of a scene as PNG.

    Raises:
        WriteError: the file could not be written.
    """
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, strip(frames, truth).numpy(), format="png")
    return write_atomic(strip_path(folder, scene.name), buffer.getvalue())
