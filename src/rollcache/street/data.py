"""Training data of the street world: rendered clips on disk, their latents, and random window samples.

A clip file holds the frames of every view group (uint8) and the actions of one episode. Latents are computed once per
clip and codec, for the clip and for its mirror image, and kept beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollcache.street.codec import Codec
from rollcache.street.rig import FRAMES_PER_LATENT, RIG

HELD_OUT_SEED = 100_000  # seeds from here on are never trained on


def render_clips(
    folder: Path,
    seeds: range,
    frames: int = 96,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Render one clip per seed into `folder`, scenarios in turn; existing files are kept.

    Args:
        folder: target folder, made if missing.
        seeds: scene seeds; seed `s` shows scenario `s % 3`.
        frames: pixel frames per clip, even.
        progress: called with the number of finished clips.
    """
    from rollcache.street.drives import SCENARIOS
    from rollcache.street.render import Renderer
    from rollcache.street.scene import make_episode

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with Renderer() as renderer:
        for done, seed in enumerate(seeds, 1):
            scenario = SCENARIOS[seed % len(SCENARIOS)]
            path = folder / f"clip-{seed:06d}-{scenario}.npz"
            if not path.exists():
                episode = make_episode(scenario, seed, frames)
                images = renderer.frames(episode, 0, frames)
                action = np.stack([episode.drive.speed[:frames], episode.drive.yaw_rate[:frames]], 1)
                part = path.with_suffix(".part.npz")
                np.savez(part, action=action.astype(np.float32), **images)
                part.replace(path)
            paths.append(path)
            if progress:
                progress(done)
    return paths


def mirror_frames(frames: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mirror the world: flip every image and swap the left and right side cameras."""
    out = {name: x.flip(3) for name, x in frames.items()}
    names = [c.name for g in RIG if g.name == "sides" for c in g.cameras]
    swap = [names.index(n.replace("left", "#").replace("right", "left").replace("#", "right")) for n in names]
    out["sides"] = out["sides"][:, swap]
    return out


def load_clip(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Frames (group -> uint8 [T, V, H, W, 3]) and actions [T, 2] (m/s, rad/s) of a clip file."""
    with np.load(path) as data:
        frames = {g.name: torch.from_numpy(data[g.name]) for g in RIG}
        return frames, torch.from_numpy(data["action"])


def latent_actions(action: Tensor) -> Tensor:
    """Per-frame actions [..., T, 2] as per-latent actions [..., T/2, 4]."""
    return action.unflatten(-2, (-1, FRAMES_PER_LATENT)).flatten(-2)


@dataclass
class LatentClip:
    """One clip in latent space: `z` [F, P, Z] float16 and `action` [F, A] in physical units."""

    z: Tensor
    action: Tensor


class LatentSet:
    """All clips of a folder (and their mirror images) as latents in memory."""

    def __init__(self, folder: Path, codec: Codec, *, held_out: bool = False, mirror: bool = True) -> None:
        self.folder, self.codec, self.held_out, self.mirror = folder, codec, held_out, mirror
        digest = hashlib.sha256(codec.basis.numpy().tobytes() + codec.scale.numpy().tobytes())
        self.tag = digest.hexdigest()[:8]
        self.clips: list[LatentClip] = []
        self._seen: set[Path] = set()
        self.refresh()
        if not self.clips:
            raise ValueError(f"no clips in {folder}; render some first: rollcache street data --folder {folder}")

    def refresh(self) -> int:
        """Read clips that appeared since the last call; returns the number of clips (mirrors included)."""
        for path in sorted(self.folder.glob("clip-??????-*.npz")):
            if path in self._seen or ".part" in path.name:
                continue
            seed = int(path.name[5:11])
            if (seed >= HELD_OUT_SEED) == self.held_out:
                self.clips += self._latents(path)
            self._seen.add(path)
        return len(self.clips)

    def _latents(self, path: Path) -> list[LatentClip]:
        cached = path.with_suffix(f".{self.tag}.safetensors")
        if cached.exists():
            data = load_file(cached)
        else:
            frames, action = load_clip(path)
            flipped = action * action.new_tensor([1.0, -1.0])
            data = {
                "z0": self.codec.encode(frames).half(),
                "a0": latent_actions(action),
                "z1": self.codec.encode(mirror_frames(frames)).half(),
                "a1": latent_actions(flipped),
            }
            part = cached.with_suffix(".part")
            save_file(data, part)
            part.replace(cached)
        sides = (0, 1) if self.mirror else (0,)
        return [LatentClip(data[f"z{i}"], data[f"a{i}"]) for i in sides]


@dataclass
class WindowSample:
    """`W` windows of one clip. Letters as in dit.py; batch dimension 1.

    Attributes:
        x0: clean latents [1, N, P, Z].
        action: actions [1, N, A], held from a random sub-chunk on.
        context: the clean latent before each window [1, W, P, Z].
        known: 1 where context exists [1, W].
        time: latent-frame time of each window's start [1, W].
    """

    x0: Tensor
    action: Tensor
    context: Tensor
    known: Tensor
    time: Tensor

    def to(self, device: torch.device) -> WindowSample:
        """The same sample on `device`."""
        return WindowSample(*(getattr(self, f.name).to(device) for f in fields(self)))

    def window(self, index: int, size: int) -> WindowSample:
        """One of its windows."""
        frames, one = slice(index * size, (index + 1) * size), slice(index, index + 1)
        return WindowSample(
            self.x0[:, frames], self.action[:, frames], self.context[:, one], self.known[:, one], self.time[:, one]
        )


def hold(action: Tensor, known: int) -> Tensor:
    """Window actions [..., F, A] with everything after the first `known` latents held at the last known frame."""
    if known >= action.shape[-2]:
        return action
    last = action[..., known - 1 : known, -2:]  # the last known frame's (speed, yaw rate)
    held = last.repeat(*[1] * (last.ndim - 1), FRAMES_PER_LATENT).expand_as(action[..., known:, :])
    return torch.cat((action[..., :known, :], held), -2)


def sample_windows(clips: list[LatentClip], windows: int, size: int, generator: torch.Generator) -> WindowSample:
    """Draw `windows` windows of `size` latents from a random clip, mostly contiguous, sometimes with gaps in time."""

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    clip = clips[draw(len(clips))]
    gaps = [1 if draw(10) < 8 else 1 + draw(4) for _ in range(windows - 1)]
    while sum(gaps) * size + size > len(clip.z) - 1:
        gaps[gaps.index(max(gaps))] -= 1
        if 0 in gaps:
            raise ValueError(f"clips of {len(clip.z)} latents are too short for {windows} windows of {size}.")
    offsets = [sum(gaps[:i]) * size for i in range(windows)]
    start = draw(len(clip.z) - offsets[-1] - size + 1)
    starts = [start + o for o in offsets]
    x0 = torch.cat([clip.z[s : s + size] for s in starts]).float()
    action = torch.cat([hold(clip.action[s : s + size], 1 + draw(size)) for s in starts])
    context = torch.stack([clip.z[s - 1] if s else torch.zeros_like(clip.z[0]) for s in starts]).float()
    known = torch.tensor([float(s > 0) for s in starts])
    if draw(16) == 0:
        known[0] = 0
    return WindowSample(x0[None], action[None], context[None], known[None], torch.tensor(starts).float()[None])
