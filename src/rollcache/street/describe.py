"""What a camera sees of a scenery, as tokens: the boxes nearest to the eye, projected into its picture.

Every token describes one box in one camera and latent frame: its eight corners and the rectangle around them in
picture coordinates, depth, size, heading, colour and kind. The rectangle also says how far a latent cell is from the
box, which the transformer's cross-attention takes as a bias.

Shape letters: F latent frames, V all cameras of the rig, E tokens per camera, S boxes, P cells of the rig.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache

import torch
import torch.nn.functional as nnf
from torch import Tensor

from rollcache.street.ego import CAMERA_HEIGHT
from rollcache.street.rig import RIG
from rollcache.street.scenery import AGENTS, KINDS, Scenery, driven

TOKENS = 48  # boxes told per camera and latent frame
REACH = 110.0  # metres
NEAR = 0.3  # metres: corners behind the eye are drawn at this depth
FEATURES = 16 + 4 + 24 + 2 + 3 + 2 + 3 + len(KINDS)
_SIGNS = [(x, y, z) for x in (-0.5, 0.5) for y in (-0.5, 0.5) for z in (-0.5, 0.5)]


@dataclass(frozen=True)
class Described:
    """Tokens of some latent frames.

    Attributes:
        features: [..., F, V, E, FEATURES].
        rectangle: left, right, top, bottom in picture coordinates, -1..1 and a little beyond [..., F, V, E, 4].
        there: which tokens stand for a box [..., F, V, E] (bool).
        attributes: of the scene [..., F, ATTRIBUTES].
    """

    features: Tensor
    rectangle: Tensor
    there: Tensor
    attributes: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Described:
        """The same tokens with a function applied to every tensor."""
        return Described(*(f(getattr(self, field.name)) for field in fields(self)))

    def to(self, device: torch.device) -> Described:
        """The same tokens on `device`."""
        return self.map(lambda x: x.to(device))

    @classmethod
    def cat(cls, parts: list[Described]) -> Described:
        """Latent frames one after the other (tensors without leading batch dimensions)."""
        return cls(*(torch.cat([getattr(p, field.name) for p in parts]) for field in fields(cls)))

    def agents(self) -> Tensor:
        """How much of every latent cell an agent covers [F, P], 0 to 1: what a reaction to traffic depends on."""
        is_agent = self.features[..., -len(KINDS) :][..., : len(AGENTS)].sum(-1) > 0
        weight = (self.there & is_agent).float()
        covered, v = [], 0
        for group in RIG:
            rows, columns = group.grid
            x, y = _centres(rows, columns, self.rectangle.device)
            for _ in group.cameras:
                r = self.rectangle[..., v, None, :, :]  # [F, 1, E, 4]
                wide = (r[..., 1].clamp_max(x + 1 / columns) - r[..., 0].clamp_min(x - 1 / columns)) * columns / 2
                high = (r[..., 3].clamp_max(y + 1 / rows) - r[..., 2].clamp_min(y - 1 / rows)) * rows / 2
                share = wide.clamp_min(0) * high.clamp_min(0) * weight[..., v, None, :]
                covered.append(share.amax(-1))
                v += 1
        return torch.cat(covered, -1)


def describe(scenery: Scenery, pose: Tensor, box: Tensor, there: Tensor) -> Described:
    """Tokens for latent frames with the ego at `pose` [F, 3] and the agents of `scenery` at `box` [F, M, 7].

    Args:
        scenery: standing things, and what the agents are.
        pose: x, y, yaw of the ego.
        box: the agents' boxes.
        there: which agents are there at all [F, M] (bool).
    """
    frames = len(pose)
    near = (scenery.box[:, :2] - pose[:, None, :2].mean(0)).norm(dim=-1) < REACH + 30.0
    still = scenery.box[near]
    boxes = torch.cat((still.expand(frames, -1, -1), box), 1)  # [F, S, 7]
    exists = torch.cat((torch.ones_like(still[:, 0], dtype=torch.bool).expand(frames, -1), there), 1)
    kind = torch.cat((scenery.kind[near], scenery.agent_kind))
    colour = torch.cat((scenery.colour[near], scenery.agent_colour))
    is_agent = kind < len(AGENTS)
    corner = _corners(boxes, pose)  # [F, S, 8, 3] in the ego's frame: ahead, to the left, up
    heading = boxes[..., 6] - pose[:, None, 2]
    distance = boxes[..., :2].sub(pose[:, None, :2]).norm(dim=-1)
    out: list[tuple[Tensor, Tensor, Tensor]] = []
    for yaw, slope_x, slope_y, columns, rows in _cameras():
        depth = math.cos(yaw) * corner[..., 0] + math.sin(yaw) * corner[..., 1]
        left = math.cos(yaw) * corner[..., 1] - math.sin(yaw) * corner[..., 0]
        ahead = depth.clamp_min(NEAR)
        u, v = -left / ahead / slope_x, (CAMERA_HEIGHT - corner[..., 2]) / ahead / slope_y
        edge = torch.stack((u.amin(-1), u.amax(-1), v.amin(-1), v.amax(-1)), -1).clamp(-1.2, 1.2)  # [F, S, 4]
        inside = (edge[..., 0] < 1.1) & (edge[..., 1] > -1.1) & (edge[..., 2] < 1.1) & (edge[..., 3] > -1.1)
        seen = exists & inside & (depth.amax(-1) > NEAR) & (distance < REACH)
        size = (edge[..., 1] - edge[..., 0]) * columns / 2 + (edge[..., 3] - edge[..., 2]) * rows / 2 + 0.2
        score = torch.where(seen, size / (1 + distance / 20) * torch.where(is_agent, 3.0, 1.0), -1.0)
        best = score.topk(min(TOKENS, score.shape[1]), 1)  # [F, E]
        pick = best.indices

        def chosen(x: Tensor, pick: Tensor = pick) -> Tensor:
            index = pick.reshape(*pick.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
            return x.gather(1, index)

        rectangle = chosen(edge)
        waves = torch.cat([f(rectangle * math.pi * k / 2) for k in (1, 2, 4) for f in (torch.sin, torch.cos)], -1)
        turned = chosen(heading) - yaw
        features = torch.cat(
            (
                chosen(u).clamp(-2.5, 2.5),
                chosen(v).clamp(-2.5, 2.5),
                rectangle,
                waves,
                torch.stack((chosen(distance), chosen(ahead.mean(-1))), -1).clamp_min(NEAR).log() / 2,
                chosen(boxes[..., 3:6]).clamp_min(0.1).log() / 2,
                torch.stack((turned.sin(), turned.cos()), -1),
                colour[pick] * 2 - 1,
                nnf.one_hot(kind[pick], len(KINDS)).to(u.dtype),
            ),
            -1,
        )
        out.append((features, rectangle, best.values > 0))
    features, rectangle, present = (_padded(torch.stack(x, 1)) for x in zip(*out, strict=True))
    features = features * present[..., None]
    return Described(features, rectangle, present, scenery.attributes.expand(frames, -1))


def describe_log(
    scenery: Scenery, start: int, stop: int, known: int | None = None, held: Tensor | None = None
) -> Described:
    """Tokens of latent frames start..stop-1 of the log, as they were known when `known` of them had happened.

    Args:
        scenery: the log.
        start: first latent frame.
        stop: one after the last.
        known: latent frames that have happened, default all. Later ones are where the actions lead the ego, and where
            the agents come when they go on as they did.
        held: actions [stop - start, A] of the frames with the unknown ones held; needed when `known` is given.
    """
    known = stop - start if known is None else known
    pose = scenery.pose[start : start + known]
    if known < stop - start:
        assert held is not None
        pose = torch.cat((pose, driven(pose[-1], held[known:])))
    return describe(scenery, pose, *scenery.agents(start, stop, known))


def distances(rectangle: Tensor) -> list[Tensor]:
    """Squared distance in cells of every cell from every rectangle [..., V, E, 4], per camera [..., cells, E]."""
    out: list[Tensor] = []
    v = 0
    for group in RIG:
        rows, columns = group.grid
        x, y = _centres(rows, columns, rectangle.device)
        for _ in group.cameras:
            r = rectangle[..., v, None, :, :]  # [..., 1, E, 4]
            dx = ((r[..., 0] - x).clamp_min(0) + (x - r[..., 1]).clamp_min(0)) * columns / 2
            dy = ((r[..., 2] - y).clamp_min(0) + (y - r[..., 3]).clamp_min(0)) * rows / 2
            out.append(dx.square() + dy.square())
            v += 1
    return out


def _centres(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Picture coordinates of the cells' middles, each [cells, 1]."""
    y = (torch.arange(rows, device=device) + 0.5) * 2 / rows - 1
    x = (torch.arange(columns, device=device) + 0.5) * 2 / columns - 1
    return x.repeat(rows)[:, None], y.repeat_interleave(columns)[:, None]


def _corners(box: Tensor, pose: Tensor) -> Tensor:
    """Corners [F, S, 8, 3] of boxes [F, S, 7] as the ego at `pose` [F, 3] has them: ahead, to the left, up."""
    sign = box.new_tensor(_SIGNS)
    along, across, up = (sign * box[..., None, 3:6]).unbind(-1)  # [F, S, 8]
    cos, sin = box[..., 6, None].cos(), box[..., 6, None].sin()
    x = box[..., 0, None] + cos * along - sin * across - pose[:, 0, None, None]
    y = box[..., 1, None] + sin * along + cos * across - pose[:, 1, None, None]
    cos, sin = pose[:, 2, None, None].cos(), pose[:, 2, None, None].sin()
    return torch.stack((cos * x + sin * y, cos * y - sin * x, box[..., 2, None] + up), -1)


def _padded(x: Tensor) -> Tensor:
    """[F, V, E', ...] with zeros up to TOKENS."""
    missing = TOKENS - x.shape[2]
    if missing == 0:
        return x
    return torch.cat((x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])), 2)


@cache
def _cameras() -> list[tuple[float, float, float, int, int]]:
    """Per camera of the rig: yaw (rad), slope of the picture's edge across and up, latent columns and rows."""
    out = []
    for group in RIG:
        rows, columns = group.grid
        for camera in group.cameras:
            slope = math.tan(math.radians(camera.fov) / 2)
            out.append((math.radians(camera.yaw), slope, slope * group.height / group.width, columns, rows))
    return out


def camera_features(device: torch.device | None = None) -> Tensor:
    """Intrinsics and extrinsics of every camera [V, 5]: yaw as sine and cosine, slopes of the edges, height."""
    rows = [(math.sin(yaw), math.cos(yaw), sx, sy, CAMERA_HEIGHT) for yaw, sx, sy, *_ in _cameras()]
    return torch.tensor(rows, device=device)
