"""What stands and drives in a scene, as the world model is told it: oriented boxes, the ego's way, scene attributes.

A `Scenery` is a log of one drive in world coordinates. `describe.py` turns the part of it that a camera sees into
tokens, from wherever the ego really is: a rollout may leave the logged path, and the road stays where it is.

Shape letters: S standing things, F latent frames, M moving agents.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from rollcache.street.rig import FPS, FRAMES_PER_LATENT
from rollcache.street.scene import Episode
from rollcache.street.scene_layout import SCENARIOS, make_layout
from rollcache.street.scene_mesh import rng_of
from rollcache.street.traffic import Box

AGENTS = ("car", "van", "truck", "bus", "pedestrian")
KINDS = (*AGENTS, "building", "tree", "lamp", "wall", "sign", "bridge", "kerb", "line", "zebra")
SKIES = 4
ATTRIBUTES = len(SCENARIOS) + SKIES + 1  # scenario, sky, the side that traffic keeps to


@dataclass(frozen=True)
class Scenery:
    """Everything a model may be told about one drive.

    Boxes are x, y, z of the middle, length, width, height in metres and the yaw in radians. Latent frame i is taken at
    its last pixel frame.

    Attributes:
        box: standing things [S, 7].
        kind: index into `KINDS` [S].
        colour: [S, 3] in 0..1.
        agent_box: moving agents per latent frame [F, M, 7]; anything where `agent_there` is False.
        agent_there: [F, M] bool.
        agent_kind: [M].
        agent_colour: [M, 3].
        pose: x, y, yaw of the ego per latent frame [F, 3].
        attributes: of the whole scene [ATTRIBUTES]: the stand-in for a caption.
    """

    box: Tensor
    kind: Tensor
    colour: Tensor
    agent_box: Tensor
    agent_there: Tensor
    agent_kind: Tensor
    agent_colour: Tensor
    pose: Tensor
    attributes: Tensor

    def __len__(self) -> int:
        """Latent frames of the log."""
        return len(self.pose)

    def tensors(self) -> dict[str, Tensor]:
        """All fields by name, to be stored."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to(self, device: torch.device) -> Scenery:
        """The same scenery on `device`."""
        return Scenery(**{k: v.to(device) for k, v in self.tensors().items()})

    def part(self, start: int, stop: int) -> Scenery:
        """Latent frames start..stop-1 of the log."""
        rows = slice(start, stop)
        there = self.agent_there[rows]
        return replace(self, pose=self.pose[rows], agent_box=self.agent_box[rows], agent_there=there)

    def mirrored(self) -> Scenery:
        """The mirror image of the world: left becomes right."""
        flip = self.box.new_tensor([1, -1, 1, 1, 1, 1, -1])
        attributes = self.attributes.clone()
        attributes[-1] *= -1
        return replace(
            self,
            box=self.box * flip,
            agent_box=self.agent_box * flip,
            pose=self.pose * flip[[0, 1, 6]],
            attributes=attributes,
        )

    def with_agent(self, kind: str, colour: tuple[float, float, float], box: Tensor, there: Tensor) -> Scenery:
        """One more moving agent: box [F, 7] and where it is there [F] (bool).

        Raises:
            ValueError: `kind` is no agent, or the shapes do not fit the log.
        """
        if kind not in AGENTS:
            raise ValueError(f"unknown agent {kind!r}; choose one of {', '.join(AGENTS)}.")
        if box.shape != (len(self), 7) or there.shape != (len(self),):
            raise ValueError(
                f"box {tuple(box.shape)} and there {tuple(there.shape)}; expected ({len(self)}, 7) and ({len(self)},)."
            )
        return replace(
            self,
            agent_box=torch.cat((self.agent_box, box[:, None].to(self.agent_box)), 1),
            agent_there=torch.cat((self.agent_there, there[:, None]), 1),
            agent_kind=torch.cat((self.agent_kind, self.agent_kind.new_tensor([KINDS.index(kind)]))),
            agent_colour=torch.cat((self.agent_colour, self.agent_colour.new_tensor([colour]))),
        )

    def agents(self, start: int, stop: int, known: int | None = None) -> tuple[Tensor, Tensor]:
        """The agents in latent frames start..stop-1: boxes [F, M, 7], and which are there [F, M].

        Only the first `known` frames (default all) have happened, and the log may end before. From there on every
        agent goes on as it moved during the last latent frame.
        """
        last = min(stop if known is None else start + known, len(self)) - 1
        box, there = self.agent_box[last], self.agent_there[last]
        step = torch.zeros_like(box)
        if last > 0:
            both = (there & self.agent_there[last - 1])[:, None]
            step = torch.where(both, box - self.agent_box[last - 1], step)
            turn = torch.remainder(step[:, 6] + torch.pi, 2 * torch.pi) - torch.pi
            step = torch.cat((step[:, :3], torch.zeros_like(step[:, 3:6]), turn[:, None]), 1)
        ahead = torch.arange(max(start, last + 1), stop, device=box.device) - last
        later = box + step * ahead[:, None, None]
        rows = slice(start, max(start, last + 1))
        return torch.cat((self.agent_box[rows], later)), torch.cat(
            (self.agent_there[rows], there.expand(len(ahead), -1))
        )


def scenery_of(episode: Episode) -> Scenery:
    """The scenery of a simulated episode, whose frame count must be even."""
    standing = [(n.kind, n.box, n.colour) for chunk in episode.chunks for n in chunk.mesh.notes]
    standing += [(b.kind, _row(b)[None], np.array([b.colour])) for b in episode.parked]
    kind = np.concatenate([np.full(len(box), KINDS.index(name)) for name, box, _ in standing])
    frames = range(FRAMES_PER_LATENT - 1, len(episode), FRAMES_PER_LATENT)
    seen: dict[int, Box] = {}
    rows = []
    for f in frames:
        moving = episode.boxes[f][: episode.moving[f]]
        seen |= {b.agent: b for b in moving}
        rows.append({b.agent: _row(b) for b in moving})
    numbers = list(seen)
    boxes = np.zeros((len(rows), len(numbers), 7))
    there = np.zeros((len(rows), len(numbers)), bool)
    for f, row in enumerate(rows):
        for m, number in enumerate(numbers):
            if number in row:
                boxes[f, m], there[f, m] = row[number], True
    return Scenery(
        box=_tensor(np.concatenate([box for _, box, _ in standing])),
        kind=torch.from_numpy(kind),
        colour=_tensor(np.concatenate([colour for *_, colour in standing])),
        agent_box=_tensor(boxes),
        agent_there=torch.from_numpy(there),
        agent_kind=torch.tensor([KINDS.index(b.kind) for b in seen.values()], dtype=torch.int64),
        agent_colour=_tensor(np.array([b.colour for b in seen.values()]).reshape(-1, 3)),
        pose=_tensor(episode.poses[list(frames)]),
        attributes=attributes_of(episode.scenario, episode.seed),
    )


def attributes_of(scenario: str, seed: int) -> Tensor:
    """Scene attributes [ATTRIBUTES]: one-hot scenario, one-hot sky, and +1 or -1 where traffic keeps right or left."""
    sky = int(rng_of(seed, 61).integers(SKIES))
    hot = [float(name == scenario) for name in SCENARIOS] + [float(i == sky) for i in range(SKIES)]
    return torch.tensor([*hot, float(make_layout(scenario, seed).side)])


def driven(pose: Tensor, action: Tensor) -> Tensor:
    """Poses [F, 3] of the ego after each latent frame, from `pose` [3] on, with actions [F, A] in m/s and rad/s."""
    x, y, yaw = (float(v) for v in pose)
    out = []
    for row in action.double().reshape(len(action), -1, 2).tolist():
        for speed, yaw_rate in row:
            turn = yaw_rate / FPS
            chord = speed / FPS * float(np.sinc(0.5 * turn / np.pi))
            x, y = x + chord * float(np.cos(yaw + 0.5 * turn)), y + chord * float(np.sin(yaw + 0.5 * turn))
            yaw += turn
        out.append((x, y, yaw))
    return torch.tensor(out, device=pose.device).to(pose.dtype)


def _row(box: Box) -> np.ndarray:
    return np.array([*box.centre, *box.size, box.yaw])


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).float()
