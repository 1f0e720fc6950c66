"""Videos for people: full compute, cached, and their amplified difference, stacked into one H.264 file.

These files are lossy and never measured. Frames are enlarged by whole pixels, so that a 48-pixel camera can be watched
and a pixel stays a pixel.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcache.measure import FrameError, stitch

if TYPE_CHECKING:
    from rollcache.measure import Frames

GAIN = 20.0
SCALE = 3
GAP = 4  # rows of background between two panels, before scaling
PAPER = 0.07  # grey of the background, in [0, 1]


def panels(full: Frames, cached: Frames, *, gain: float = GAIN) -> Tensor:
    """Mosaics of full compute, of the cached run, and of `gain` times their difference, one above the other.

    Args:
        full: frames [T, V, H, W, 3] in [0, 1] by view group.
        cached: the same of the other run.
        gain: amplification of the absolute difference.

    Returns:
        uint8 [T, 3 * H + 2 * GAP, W, 3] with H and W those of one mosaic.
    """
    difference = {group: ((full[group] - cached[group]).abs() * gain).clamp(0, 1) for group in full}
    parts = [stitch(x, background=PAPER) for x in (full, cached, difference)]  # [T, H, W, 3]
    return to_bytes(_stack(parts))


def panel_places(height: int, count: int = 3) -> list[float]:
    """Top of every panel as a share of the whole picture, for captions laid over it."""
    whole = count * height + (count - 1) * GAP
    return [i * (height + GAP) / whole for i in range(count)]


def encode_mp4(frames: Tensor, fps: int, *, scale: int = SCALE, crf: int = 20) -> bytes:
    """H.264 in MP4 (yuv420p, playable everywhere).

    Args:
        frames: uint8 [T, H, W, 3].
        fps: frames per second.
        scale: whole-number enlargement.
        crf: quality of x264, smaller is better.

    Raises:
        FrameError: wrong shape or dtype, or no frames.
    """
    import av

    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8 or frames.shape[0] == 0:
        raise FrameError(f"a video needs uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    frames = _even(frames.repeat_interleave(scale, 1).repeat_interleave(scale, 2))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf), "preset": "medium"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(picture.contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def encode_png(picture: Tensor, *, scale: int = SCALE) -> bytes:
    """One uint8 [H, W, 3] picture as PNG, enlarged by whole pixels."""
    from PIL import Image

    big = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1).contiguous()
    buffer = io.BytesIO()
    Image.fromarray(big.numpy()).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def to_bytes(frames: Tensor) -> Tensor:
    """Floats in [0, 1] as uint8."""
    return (frames.clamp(0, 1) * 255).round().to(torch.uint8)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    t, _, width, _ = parts[0].shape
    gap = parts[0].new_full((t, GAP, width, 3), PAPER)
    rows: list[Tensor] = []
    for part in parts:
        rows += [gap, part] if rows else [part]
    return torch.cat(rows, 1)


def _even(frames: Tensor) -> Tensor:
    """Repeat the last row or column where a size is odd: yuv420p halves both."""
    if frames.shape[1] % 2:
        frames = torch.cat((frames, frames[:, -1:]), 1)
    if frames.shape[2] % 2:
        frames = torch.cat((frames, frames[:, :, -1:]), 2)
    return frames
