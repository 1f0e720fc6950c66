"""Videos for people: full compute, cached, and their amplified difference, stacked into one H.264 file.

These files are lossy and never measured. Frames are enlarged, so that a 48-pixel camera can be watched.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as nnf
from torch import Tensor

from rollcache.measure import FrameError, stitch

if TYPE_CHECKING:
    from rollcache.measure import Frames

GAIN = 20.0
SCALE = 3
GAP = 4  # rows of background between two panels, before scaling
PAPER = 0.07  # grey of the background, in [0, 1]


def panels(full: Frames, cached: Frames, *, gain: float = GAIN, scale: int = SCALE) -> Tensor:
    """Mosaics of full compute, of the cached run, and of `gain` times their difference, one above the other.

    Args:
        full: frames [T, V, H, W, 3] in [0, 1] by view group.
        cached: the same of the other run.
        gain: amplification of the absolute difference.
        scale: whole-number enlargement; smooth for pictures, pixel by pixel for the difference.

    Returns:
        uint8 [T, scale * (3 * H + 2 * GAP), scale * W, 3] with H and W those of one mosaic.
    """
    difference = {group: ((full[group] - cached[group]).abs() * gain).clamp(0, 1) for group in full}
    parts = [picture(full, scale=scale), picture(cached, scale=scale), picture(difference, scale=scale, smooth=False)]
    return _stack(parts, scale * GAP)


def picture(frames: Frames, *, scale: int = SCALE, smooth: bool = True) -> Tensor:
    """The enlarged mosaic of all cameras, uint8 [T, scale * H, scale * W, 3]; cameras do not bleed into each other."""
    large = {}
    for group, x in frames.items():
        flat = x.flatten(0, 1).permute(0, 3, 1, 2)  # [T * V, 3, H, W]
        if smooth and scale > 1:
            flat = nnf.interpolate(flat, scale_factor=scale, mode="bicubic").clamp(0, 1)
        else:
            flat = flat.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
        if scale > 1:
            flat = nnf.pad(flat[..., 1:-1, 1:-1], (1, 1, 1, 1), value=PAPER)  # a thin frame tells cameras apart
        large[group] = flat.permute(0, 2, 3, 1).reshape(*x.shape[:2], *flat.shape[2:], 3)
    return to_bytes(stitch(large, background=PAPER))


def panel_places(height: int, count: int = 3) -> list[float]:
    """Top of every panel as a share of the whole picture, for captions laid over it."""
    whole = count * height + (count - 1) * GAP
    return [i * (height + GAP) / whole for i in range(count)]


def encode_mp4(frames: Tensor, fps: int, *, crf: int = 22) -> bytes:
    """H.264 in MP4 (yuv420p, playable everywhere).

    Args:
        frames: uint8 [T, H, W, 3].
        fps: frames per second.
        crf: quality of x264, smaller is better.

    Raises:
        FrameError: wrong shape or dtype, or no frames.
    """
    import av

    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8 or frames.shape[0] == 0:
        raise FrameError(f"a video needs uint8 [T, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    frames = _even(frames)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf), "preset": "medium"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for image in frames:
            frame = av.VideoFrame.from_ndarray(image.contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def to_bytes(frames: Tensor) -> Tensor:
    """Floats in [0, 1] as uint8."""
    return (frames.clamp(0, 1) * 255).round().to(torch.uint8)


def _stack(parts: Sequence[Tensor], gap_rows: int) -> Tensor:
    t, _, width, _ = parts[0].shape
    gap = parts[0].new_full((t, gap_rows, width, 3), round(255 * PAPER))
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
