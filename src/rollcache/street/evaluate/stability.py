"""Whether a long rollout stays a street: sharpness, colours and flow of every window beside the renderer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.measure import Frames
from rollcache.street.evaluate.fidelity import WINDOW_FRAMES, windows
from rollcache.street.evaluate.flow import block_flow, luma
from rollcache.street.rig import FPS


@dataclass(frozen=True)
class Stability:
    """Statistics of every window; ratios are generated over rendered, 1 is right.

    Attributes:
        seconds: where every window ends.
        sharpness: ratio of gradient energies.
        contrast: ratio of the standard deviations of the colours.
        colour_shift: distance of the mean colours, generated and rendered, in the camera where it is largest; 0 to 1.
        mean: generated mean colour (red, green, blue).
        true_mean: rendered mean colour.
        flow: rendered flow found again in the generated frames: projection on it, 1 moves alike, 0 stands still. None
            where the renderer's picture has no flow that can be told.
        flow_error: mean distance of the two flows, pixels a frame.
        flow_size: mean length of the rendered flow, pixels a frame: the error of a picture that stands still.
    """

    seconds: tuple[float, ...]
    sharpness: tuple[float | None, ...]
    contrast: tuple[float | None, ...]
    colour_shift: tuple[float, ...]
    mean: tuple[tuple[float, ...], ...]
    true_mean: tuple[tuple[float, ...], ...]
    flow: tuple[float | None, ...]
    flow_error: tuple[float | None, ...]
    flow_size: tuple[float | None, ...]


def gradient_energy(frames: Tensor) -> Tensor:
    """Mean squared difference of neighbouring pixels' luma, [..., H, W, 3] -> [...]."""
    grey = luma(frames)
    right, down = grey.diff(dim=-1), grey.diff(dim=-2)
    return right.square().mean((-1, -2)) + down.square().mean((-1, -2))


def stability(frames: Frames, truth: Frames, size: int = WINDOW_FRAMES) -> Stability:
    """Statistics of a rollout beside the renderer's, both group -> [T, V, H, W, 3] in [0, 1]; flow of all cameras.

    The flow of a window is that between its own frames.
    """
    rows: dict[str, list[object]] = {k: [] for k in Stability.__dataclass_fields__}
    done = 0
    for ours, theirs in zip(windows(frames, size), windows(truth, size), strict=True):
        done += len(next(iter(ours.values())))
        rows["seconds"].append(done / FPS)
        rows["sharpness"].append(_ratio(*(_pooled(x, gradient_energy) for x in (ours, theirs))))
        rows["contrast"].append(_ratio(*(_pooled(x, _spread) for x in (ours, theirs))))
        means = [torch.cat([x.mean((0, 2, 3)) for x in f.values()]) for f in (ours, theirs)]  # [V, 3]
        rows["colour_shift"].append(float((means[0] - means[1]).norm(dim=-1).max()) / 3**0.5)
        rows["mean"].append(tuple(means[0].mean(0).tolist()))
        rows["true_mean"].append(tuple(means[1].mean(0).tolist()))
        for key, value in zip(("flow", "flow_error", "flow_size"), compare_flow(ours, theirs), strict=True):
            rows[key].append(value)
    return Stability(**{k: tuple(v) for k, v in rows.items()})  # type: ignore[arg-type]


def compare_flow(frames: Frames, truth: Frames) -> tuple[float | None, float | None, float | None]:
    """Projection of the flow on the rendered one, mean distance to it, its mean length; None when it cannot be told."""
    along = square = error = length = 0.0
    count = 0
    for group, real in truth.items():
        if len(real) < 2:
            return None, None, None
        grey = [luma(x).transpose(0, 1) for x in (frames[group], real)]  # [V, T, H, W]
        (ours, _), (theirs, told) = (block_flow(g[:, :-1].flatten(0, 1), g[:, 1:].flatten(0, 1)) for g in grey)
        ours, theirs = ours[told], theirs[told]
        along += float((ours * theirs).sum())
        square += float(theirs.square().sum())
        error += float((ours - theirs).norm(dim=-1).sum())
        length += float(theirs.norm(dim=-1).sum())
        count += len(theirs)
    if count == 0:
        return None, None, None
    return (along / square if length / count > 0.1 else None), error / count, length / count


def _spread(frames: Tensor) -> Tensor:
    """Standard deviation of the colours of every picture, mean over red, green and blue."""
    return frames.flatten(-3, -2).std(-2).mean(-1)


def _pooled(frames: Mapping[str, Tensor], measure: object) -> float:
    """Mean of a measure over frames and cameras."""
    assert callable(measure)
    return float(torch.cat([measure(x).flatten() for x in frames.values()]).mean())


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs > 1e-9 else None
