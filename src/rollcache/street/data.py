"""Training data of the street world: rendered clips on disk, their latents, and random window samples.

A clip file holds the frames of every view group (uint8) and the actions of one episode; its scenery lies beside it.
Latents are computed once per clip and codec, for the clip and for its mirror image, and kept beside it, too.
"""

from __future__ import annotations

import multiprocessing
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollcache.street.codec import Codec, check_frames
from rollcache.street.describe import Described, describe_log
from rollcache.street.rig import FRAMES_PER_LATENT, RIG
from rollcache.street.scenery import Scenery, scenery_of

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
            if not (path.exists() and scenery_path(path).exists()):
                episode = make_episode(scenario, seed, frames)
                _save(scenery_of(episode).tensors(), scenery_path(path))
            if not path.exists():
                images = renderer.frames(episode, 0, frames)
                action = np.stack([episode.drive.speed[:frames], episode.drive.yaw_rate[:frames]], 1)
                part = path.with_suffix(".part.npz")
                np.savez(part, action=action.astype(np.float32), **images)
                part.replace(path)
            paths.append(path)
            if progress:
                progress(done)
    return paths


@contextmanager
def rendering(folder: Path, clips: int, frames: int = 96) -> Iterator[None]:
    """Render `clips` more training clips into `folder` meanwhile, in a process of its own; it ends with the block."""
    if clips == 0:
        yield
        return
    there = [int(p.name[5:11]) for p in folder.glob("clip-??????-*.npz")]
    first = 1 + max((s for s in there if s < HELD_OUT_SEED), default=-1)
    process = multiprocessing.get_context("spawn").Process(
        target=render_clips, args=(folder, range(first, first + clips), frames), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def scenery_path(clip: Path) -> Path:
    """Where the scenery of a clip file lies."""
    return clip.with_suffix(".scenery.safetensors")


def load_scenery(clip: Path) -> Scenery:
    """The scenery of a clip file; raises ValueError when it is not there."""
    path = scenery_path(clip)
    if not path.exists():
        raise ValueError(f"{path} is missing; make it: rollcache street data --folder {clip.parent}")
    return Scenery(**load_file(path))


def mirror_frames(frames: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mirror the world: flip every image and swap the left and right side cameras."""
    out = {name: x.flip(3) for name, x in frames.items()}
    names = [c.name for g in RIG if g.name == "sides" for c in g.cameras]
    swap = [names.index(n.replace("left", "#").replace("right", "left").replace("#", "right")) for n in names]
    out["sides"] = out["sides"][:, swap]
    return out


def load_clip(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Frames (group -> uint8 [T, V, H, W, 3]) and actions [T, 2] (m/s, rad/s) of a clip file.

    Raises:
        ValueError: the file is no clip, or was rendered with another rig; the message names it.
    """
    try:
        with np.load(path) as data:
            frames = {name: torch.from_numpy(data[name]) for name in data.files if name != "action"}
            action = torch.from_numpy(data["action"])
        check_frames(frames)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no clip of this rig: {error}") from error
    return frames, action


def latent_actions(action: Tensor) -> Tensor:
    """Per-frame actions [..., T, 2] as per-latent actions [..., T/2, 4]."""
    return action.unflatten(-2, (-1, FRAMES_PER_LATENT)).flatten(-2)


@dataclass
class LatentClip:
    """One clip in latent space: `z` [F, P, Z] float16, `action` [F, A] in physical units, and its scenery."""

    z: Tensor
    action: Tensor
    scenery: Scenery


class LatentSet:
    """All clips of a folder (and their mirror images) as latents in memory."""

    def __init__(self, folder: Path, codec: Codec, *, held_out: bool = False, mirror: bool = True) -> None:
        self.folder, self.codec, self.held_out, self.mirror = folder, codec, held_out, mirror
        self.tag = codec.tag
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
            _save(data, cached)
        scenery = load_scenery(path)
        clips = [LatentClip(data["z0"], data["a0"], scenery)]
        return [*clips, LatentClip(data["z1"], data["a1"], scenery.mirrored())] if self.mirror else clips


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    part = path.with_suffix(".part")
    save_file(tensors, part)
    part.replace(path)


@dataclass
class WindowSample:
    """`W` windows of one clip. Letters as in dit.py; batch dimension 1.

    Attributes:
        x0: clean latents [1, N, P, Z].
        action: actions [1, N, A], held from a random sub-chunk on.
        context: the clean latent before each window [1, W, P, Z].
        known: 1 where context exists [1, W].
        time: latent-frame time of each window's start [1, W].
        seen: the latents that stand where context is clean [1, N, P, Z]: the truth, or what a model made of it.
        told: what every camera sees in each latent frame, as it was known when the actions were; None tells nothing.
    """

    x0: Tensor
    action: Tensor
    context: Tensor
    known: Tensor
    time: Tensor
    seen: Tensor
    told: Described | None = None

    def to(self, device: torch.device) -> WindowSample:
        """The same sample on `device`."""
        values = (getattr(self, f.name) for f in fields(self))
        return WindowSample(*(None if v is None else v.to(device) for v in values))

    def window(self, index: int, size: int) -> WindowSample:
        """One of its windows."""
        frames, one = slice(index * size, (index + 1) * size), slice(index, index + 1)
        return WindowSample(
            self.x0[:, frames],
            self.action[:, frames],
            self.context[:, one],
            self.known[:, one],
            self.time[:, one],
            self.seen[:, frames],
            None if self.told is None else self.told.map(lambda x: x[:, frames]),
        )


def hold(action: Tensor, known: int) -> Tensor:
    """Window actions [..., F, A] with everything after the first `known` latents held at the last known frame."""
    if known >= action.shape[-2]:
        return action
    last = action[..., known - 1 : known, -2:]  # the last known frame's (speed, yaw rate)
    held = last.repeat(*[1] * (last.ndim - 1), FRAMES_PER_LATENT).expand_as(action[..., known:, :])
    return torch.cat((action[..., :known, :], held), -2)


def extrapolate(action: Tensor, known: int, damping: float = 0.5) -> Tensor:
    """Window actions [..., F, A] with everything after the first `known` latents carried on from its last change.

    The change from the last but one to the last known frame goes on, `damping` times smaller with every latent. Speed
    stays at or above 0.
    """
    count = action.shape[-2] - known
    if count <= 0:
        return action
    last = action[..., known - 1, -2:]
    before = action[..., known - 1, -4:-2]
    out, value, change = [], last, last - before
    for _ in range(count):
        frames = []
        for _ in range(FRAMES_PER_LATENT):
            value = value + change
            value = torch.stack((value[..., 0].clamp_min(0), value[..., 1]), -1)
            frames.append(value)
        change = change * damping
        out.append(torch.cat(frames, -1))
    return torch.cat((action[..., :known, :], torch.stack(out, -2)), -2)


def sample_windows(
    clips: list[LatentClip],
    windows: int,
    size: int,
    generator: torch.Generator,
    silent: float = 0.0,
    seen: Tensor | None = None,
) -> WindowSample:
    """Draw `windows` windows of `size` latents from a random clip, mostly contiguous, sometimes with gaps in time.

    With probability `silent` nothing is told of the scene. `seen` [F, P, Z] replaces the truth as context, when there
    is but one clip to draw from.
    """

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
    seen = clip.z if seen is None else seen
    shown = torch.cat([seen[s : s + size] for s in starts]).float()
    happened = [1 + draw(size) for _ in starts]
    held = [hold(clip.action[s : s + size], k) for s, k in zip(starts, happened, strict=True)]
    context = torch.stack([seen[s - 1] if s else torch.zeros_like(seen[0]) for s in starts]).float()
    known = torch.tensor([float(s > 0) for s in starts])
    if draw(16) == 0:
        known[0] = 0
    told = None
    if float(torch.rand((), generator=generator)) >= silent:
        parts = zip(starts, happened, held, strict=True)
        told = Described.cat([describe_log(clip.scenery, s, s + size, k, h) for s, k, h in parts])
        told = told.map(lambda x: x[None])
    time = torch.tensor(starts).float()[None]
    return WindowSample(x0[None], torch.cat(held)[None], context[None], known[None], time, shown[None], told)
