"""Whether the agents are where they should be: the picture inside their projected boxes.

For every agent that the renderer shows, what the generated picture has at its place (mean colour and edges of three by
three pieces, spread) is compared with what the renderer has there. The control is the same measure with the rectangle
moved along the row to a place without an agent: a world that left the agent out has there what it has here. The
contrast is 1 - distance / control: 1 when the agent is as rendered, 0 when its place is not more like it than road is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollcache.measure import Frames
from rollcache.measure.frames import by_camera
from rollcache.street.describe import describe
from rollcache.street.evaluate.fidelity import WINDOW_FRAMES
from rollcache.street.evaluate.flow import luma
from rollcache.street.rig import FPS, FRAMES_PER_LATENT, RIG
from rollcache.street.scenery import AGENTS, KINDS, Scenery

SMALLEST = 5  # pixels a side
FARTHEST = 45.0  # metres
WIDEST = 0.5  # of the picture: beyond it there is no place without the agent
VISIBLE = 0.12  # distance in the rendered picture between an agent and the control below which nothing can be told
PIECES = 3
_DISTANCE = 44  # the feature of a token that holds half of the logarithm of its distance

Rectangle = tuple[int, int, int, int]  # left, right, top, bottom in pixels
Seen = tuple[str, float, Rectangle]  # moving, parked or building; metres to it; where it is


@dataclass(frozen=True)
class Place:
    """An agent in one picture, and a place in the same rows where there is none."""

    frame: int
    camera: str
    box: Rectangle
    control: Rectangle


@dataclass(frozen=True)
class Score:
    """Distances of an agent's place, and of its control, from the agent as rendered: generated, and after the codec."""

    frame: int
    distance: float
    control: float
    codec: float
    codec_control: float


@dataclass(frozen=True)
class Evidence:
    """Agents found again.

    Attributes:
        contrast: 1 as rendered, 0 as if left out, over all of them; None when the renderer shows no agent.
        reference: the same of the rendered frames after the codec: what the world can reach.
        seconds: where every window ends.
        by_window: contrast of every window; None where no agent is visible.
        agents: agents in pictures that were looked at.
        moving: contrast of the moving ones alone.
        parked: contrast of the parked ones alone.
    """

    contrast: float | None
    reference: float | None
    seconds: tuple[float, ...]
    by_window: tuple[float | None, ...]
    agents: int
    moving: float | None
    parked: float | None


def evidence(
    frames: Frames, truth: Frames, scenery: Scenery, begin: int, through_codec: Frames, size: int = WINDOW_FRAMES
) -> Evidence:
    """Look for the agents in generated frames.

    Args:
        frames: generated, group -> [T, V, H, W, 3] in [0, 1].
        truth: rendered, the same shapes.
        scenery: the log of the drive.
        begin: frames of the log before the first generated one, even.
        through_codec: the rendered frames, encoded and decoded.
        size: frames a window.
    """
    ours, real, codec = (by_camera(f) for f in (frames, truth, through_codec))
    count = len(next(iter(frames.values())))
    scores: dict[str, list[Score]] = {"moving": [], "parked": []}
    for kind, found in places(scenery, begin, count).items():
        for p in found:
            if score := _score(p, *(x[p.camera][p.frame] for x in (ours, real, codec))):
                scores[kind].append(score)
    rows = scores["moving"] + scores["parked"]
    edges = range(0, count, size)
    return Evidence(
        contrast=_contrast(rows),
        reference=_contrast([replace(r, distance=r.codec, control=r.codec_control) for r in rows]),
        seconds=tuple(min(e + size, count) / FPS for e in edges),
        by_window=tuple(_contrast([r for r in rows if e <= r.frame < e + size]) for e in edges),
        agents=len(rows),
        moving=_contrast(scores["moving"]),
        parked=_contrast(scores["parked"]),
    )


def look(picture: Tensor, box: Rectangle) -> Tensor:
    """What a picture [H, W, 3] has in a rectangle: mean colour and edges of 3 x 3 pieces, spread of the luma [37]."""
    left, right, top, bottom = box
    part = picture[top:bottom, left:right]
    grey = luma(part)
    edges = torch.zeros_like(grey)
    edges[:, 1:] += grey.diff(dim=1).abs()
    edges[1:] += grey.diff(dim=0).abs()
    layers = torch.cat((part, edges[..., None]), -1).movedim(-1, 0)  # [4, h, w]
    means = torch.nn.functional.adaptive_avg_pool2d(layers, PIECES).flatten()
    return torch.cat((means, grey.std()[None])) / PIECES


def places(scenery: Scenery, begin: int, frames: int) -> dict[str, list[Place]]:
    """Where agents are in `frames` frames of the log from frame `begin` on, in the last frame of every latent one.

    Far, small and very large ones are left out, and those that a nearer agent or building covers by half or more.
    """
    first, last = begin // FRAMES_PER_LATENT, min(len(scenery), (begin + frames) // FRAMES_PER_LATENT)
    out: dict[str, list[Place]] = {"moving": [], "parked": []}
    for f in range(first, last):
        frame = (f - first + 1) * FRAMES_PER_LATENT - 1
        for camera, width, seen in _seen(scenery, f):
            agents = [b for kind, _, b in seen if kind in out]
            for kind, distance, b in seen:
                if kind not in out or distance > FARTHEST or not _fits(b, width):
                    continue
                if any(d < distance and _covered(b, other) >= 0.5 for _, d, other in seen):
                    continue
                control = _elsewhere(b, agents, width)
                if control is not None:
                    out[kind].append(Place(frame, camera, b, control))
    return out


def _seen(scenery: Scenery, f: int) -> list[tuple[str, int, list[Seen]]]:
    """What every camera sees in latent frame f: its name, its width in pixels, what is there."""
    now = scenery.part(f, f + 1)
    is_agent, is_building = now.kind < len(AGENTS), now.kind == KINDS.index("building")
    nowhere = torch.zeros_like(now.agent_there)
    layers = {
        "moving": (_only(now, torch.zeros_like(is_agent)), now.agent_there),
        "parked": (_only(now, is_agent), nowhere),
        "building": (_only(now, is_building), nowhere),
    }
    told = {kind: describe(s, now.pose, now.agent_box, there) for kind, (s, there) in layers.items()}
    out, v = [], 0
    for group in RIG:
        for camera in group.cameras:
            seen = [
                (kind, float((2 * row[_DISTANCE]).exp()), _pixels(edge, group.height, group.width))
                for kind, d in told.items()
                for row, edge in zip(d.features[0, v][d.there[0, v]], d.rectangle[0, v][d.there[0, v]], strict=True)
            ]
            out.append((camera.name, group.width, seen))
            v += 1
    return out


def _score(place: Place, ours: Tensor, real: Tensor, codec: Tensor) -> Score | None:
    """Distances in three pictures [H, W, 3]; None when the renderer's shows nothing that stands out."""
    true = look(real, place.box)
    if math.dist(true.tolist(), look(real, place.control).tolist()) < VISIBLE:
        return None
    there, away = ([float((look(x, b) - true).norm()) for x in (ours, codec)] for b in (place.box, place.control))
    return Score(place.frame, there[0], away[0], there[1], away[1])


def _contrast(rows: list[Score]) -> float | None:
    control = sum(r.control for r in rows)
    return 1 - sum(r.distance for r in rows) / control if control > 0 else None


def _only(scenery: Scenery, keep: Tensor) -> Scenery:
    """Of the standing things only those of the mask [S]."""
    return replace(scenery, box=scenery.box[keep], kind=scenery.kind[keep], colour=scenery.colour[keep])


def _pixels(edge: Tensor, height: int, width: int) -> Rectangle:
    """A rectangle in picture coordinates (left, right, top, bottom in -1..1) as pixels inside the picture."""
    left, right, top, bottom = ((edge.clamp(-1, 1) + 1) / 2 * edge.new_tensor([width, width, height, height])).tolist()
    return round(left), round(right), round(top), round(bottom)


def _fits(box: Rectangle, width: int) -> bool:
    left, right, top, bottom = box
    return SMALLEST <= right - left <= WIDEST * width and bottom - top >= SMALLEST


def _covered(box: Rectangle, other: Rectangle) -> float:
    """Share of `box` that `other` covers."""
    wide = min(box[1], other[1]) - max(box[0], other[0])
    high = min(box[3], other[3]) - max(box[2], other[2])
    return max(wide, 0) * max(high, 0) / max(1, (box[1] - box[0]) * (box[3] - box[2]))


def _elsewhere(box: Rectangle, agents: list[Rectangle], width: int) -> Rectangle | None:
    """The nearest place in the same rows that no agent touches; None when there is none."""
    left, right, top, bottom = box
    for shift in range(right - left + 1, width):
        for step in (shift, -shift):
            if left + step >= 0 and right + step <= width:
                moved = (left + step, right + step, top, bottom)
                if all(_covered(moved, a) == 0 for a in agents):
                    return moved
    return None
