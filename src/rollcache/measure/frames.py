"""Decoded frames of a rollout: what they look like, how two rollouts are matched, how seven cameras become one picture.

Every measure in this package reads `Frames`: a mapping from view group to float tensors `[T, V, H, W, 3]` in [0, 1]
(T frames, V cameras of one grid shape, RGB). Cameras are named in rig order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Frames = Mapping[str, Tensor]
Names = Mapping[str, Sequence[str]]

# The rig of the embedded world: names in rig order, and the two rows of the mosaic a person looks at (forward half
# above, backward half below, left on the left).
STREET_CAMERAS: Names = {
    "front": ("front_narrow", "front_wide"),
    "sides": ("left_front", "right_front", "left_rear", "right_rear"),
    "rear": ("rear",),
}
STREET_ROWS = (("left_front", "front_narrow", "front_wide", "right_front"), ("left_rear", "rear", "right_rear"))

# Decoders overshoot a little; anything beyond this is frames on another scale ([-1, 1] or bytes).
LOWEST, HIGHEST = -0.5, 1.5


class FrameError(ValueError):
    """Frames have the wrong groups, shapes, dtype or values, or two rollouts do not match."""


@dataclass(frozen=True)
class Tile:
    """One camera's place in the mosaic; `top` and `left` in pixels."""

    name: str
    group: str
    view: int
    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Mosaic:
    """Where every camera goes in the stitched picture of `height` x `width` pixels."""

    height: int
    width: int
    tiles: tuple[Tile, ...]

    def mask(self) -> Tensor:
        """Which pixels belong to a camera: bool [height, width]; the rest is background."""
        covered = torch.zeros(self.height, self.width, dtype=torch.bool)
        for tile in self.tiles:
            covered[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width] = True
        return covered

    def draw(self, frames: Frames, background: float = 0.0) -> Tensor:
        """Lay the cameras of `frames` out as one picture a frame: [T, height, width, 3], dtype and device kept."""
        first = next(iter(frames.values()))
        canvas = first.new_full((first.shape[0], self.height, self.width, 3), background)
        for tile in self.tiles:
            rows, columns = slice(tile.top, tile.top + tile.height), slice(tile.left, tile.left + tile.width)
            canvas[:, rows, columns] = frames[tile.group][:, tile.view]
        return canvas


def check_frames(frames: Frames, what: str = "frames") -> None:
    """Raise `FrameError` unless `frames` is a mapping of float [T, V, H, W, 3] tensors in [0, 1] with one common T."""
    if not isinstance(frames, Mapping) or not frames:
        raise FrameError(f"{what}: expected a non-empty mapping from view group to tensor, got {type(frames).__name__}")
    lengths: dict[str, int] = {}
    for group, x in frames.items():
        where = f"{what}, view group {group!r}"
        if not isinstance(x, Tensor):
            raise FrameError(f"{where}: expected a tensor, got {type(x).__name__}")
        if x.ndim != 5 or x.shape[-1] != 3 or 0 in x.shape:
            raise FrameError(f"{where}: expected shape [T, V, H, W, 3] without empty axes, got {list(x.shape)}")
        if not x.is_floating_point():
            raise FrameError(f"{where}: expected floats in [0, 1], got {x.dtype}; divide bytes by 255")
        lengths[group] = x.shape[0]
        low, high = x.aminmax()
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
            raise FrameError(f"{where}: NaN or infinite values, first in frame {bad}")
        if low < LOWEST or high > HIGHEST:
            raise FrameError(f"{where}: values span [{low:.3g}, {high:.3g}]; bring them to [0, 1] first")
    if len(set(lengths.values())) > 1:
        raise FrameError(f"{what}: view groups have different numbers of frames: {lengths}")


def check_pair(test: Frames, reference: Frames) -> None:
    """Raise `FrameError` unless both are valid frames of the same groups and shapes."""
    check_frames(test, "test frames")
    check_frames(reference, "reference frames")
    if set(test) != set(reference):
        raise FrameError(f"view groups differ: test has {sorted(test)}, reference has {sorted(reference)}")
    for group, x in test.items():
        if x.shape != reference[group].shape:
            raise FrameError(
                f"view group {group!r}: test has shape {list(x.shape)}, reference {list(reference[group].shape)}"
            )


def camera_names(frames: Frames, names: Names | None = None) -> dict[str, tuple[str, ...]]:
    """Names of the cameras of each group, in the order of `frames`.

    Args:
        frames: Tensors `[T, V, H, W, 3]` by view group.
        names: Names by group. Default: those of the embedded world when the groups are its own, else `group` for a
            group of one camera and `group_0`, `group_1`, ... for more.

    Raises:
        FrameError: a group has another number of names than cameras, or a name is given twice.
    """
    views = {group: x.shape[1] for group, x in frames.items()}
    if names is None:
        if views == {group: len(cameras) for group, cameras in STREET_CAMERAS.items()}:
            names = STREET_CAMERAS
        else:
            names = {g: (g,) if v == 1 else tuple(f"{g}_{i}" for i in range(v)) for g, v in views.items()}
    for group, count in views.items():
        if len(names.get(group, ())) != count:
            raise FrameError(f"view group {group!r} has {count} cameras but {len(names.get(group, ()))} names")
    chosen = {group: tuple(names[group]) for group in frames}
    flat = [name for cameras in chosen.values() for name in cameras]
    if len(set(flat)) != len(flat):
        raise FrameError(f"camera names must be unique, got {flat}")
    return chosen


def by_camera(frames: Frames, names: Names | None = None) -> dict[str, Tensor]:
    """The same pixels by camera: name -> [T, H, W, 3], views of the tensors in `frames`."""
    chosen = camera_names(frames, names)
    return {name: frames[group][:, v] for group, cameras in chosen.items() for v, name in enumerate(cameras)}


def mosaic(frames: Frames, names: Names | None = None) -> Mosaic:
    """Plan the stitched picture: two centred rows, forward cameras above, backward cameras below.

    Rigs other than the embedded one are split, in their own order, into the two rows whose wider one is narrowest.
    Width and height are even, as video codecs ask.
    """
    chosen = camera_names(frames, names)
    tiles = {
        name: Tile(name, group, v, 0, 0, frames[group].shape[2], frames[group].shape[3])
        for group, cameras in chosen.items()
        for v, name in enumerate(cameras)
    }
    rows = [[tiles[name] for name in row] for row in _rows(tiles)]
    width = max(sum(t.width for t in row) for row in rows)
    width += width % 2
    placed: dict[str, Tile] = {}
    top = 0
    for row in rows:
        height, left = max(t.height for t in row), (width - sum(t.width for t in row)) // 2
        for t in row:
            drop = (height - t.height) // 2
            placed[t.name] = Tile(t.name, t.group, t.view, top + drop, left, t.height, t.width)
            left += t.width
        top += height
    return Mosaic(top + top % 2, width, tuple(placed[name] for name in tiles))


def stitch(frames: Frames, names: Names | None = None, background: float = 0.0) -> Tensor:
    """All cameras as one picture a frame: [T, H, W, 3]. The layout is `mosaic`'s and depends on the shapes alone."""
    check_frames(frames)
    return mosaic(frames, names).draw(frames, background)


def _rows(tiles: Mapping[str, Tile]) -> list[list[str]]:
    order = list(tiles)
    if {name for row in STREET_ROWS for name in row} == set(order):
        return [list(row) for row in STREET_ROWS]
    if len(order) < 3:
        return [order]

    def wider(cut: int) -> int:
        return max(sum(tiles[n].width for n in order[:cut]), sum(tiles[n].width for n in order[cut:]))

    cut = min(range(1, len(order)), key=wider)
    return [order[:cut], order[cut:]]
