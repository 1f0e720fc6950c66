"""Chosen tokens of a hidden state: some latent frames, and in each of them the same number of cells of every camera.

That every camera and frame gives the same number keeps all gathers, attention calls and scatters rectangular.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.passes import RollcacheError, Segment


@dataclass(frozen=True, eq=False)
class Tokens:
    """A choice of tokens, in the layout that `Pass.segments` describes.

    Attributes:
        frames: chosen latent frames of the window, rising.
        cells: per segment the chosen cells of every camera in every chosen frame, as rising indices `h*W + w` into the
            grid, `[views, len(frames), k]`; None chooses all cells of that segment.
    """

    frames: tuple[int, ...]
    cells: tuple[Tensor | None, ...]

    @classmethod
    def whole_frames(cls, frames: tuple[int, ...], segments: tuple[Segment, ...]) -> Tokens:
        """All cells of some latent frames.

        Raises:
            RollcacheError: a frame that the window does not have.
        """
        count = min(s.grid[0] for s in segments)
        if not all(0 <= frame < count for frame in frames):
            raise RollcacheError(
                f"latent frames {frames} of a window of {count}: Pass.frame or the segments are wrong."
            )
        return cls(frames, (None,) * len(segments))

    @classmethod
    def top(cls, score: tuple[Tensor, ...], share: float, frames: tuple[int, ...] | None = None) -> Tokens:
        """The cells with the highest score: `share` of every camera and latent frame, at least one of each.

        Args:
            score: per segment `[views, F, cells]`; see `unfold`.
            share: in (0, 1].
            frames: latent frames to choose from; all of them by default.
        """
        chosen = tuple(range(score[0].shape[1])) if frames is None else frames
        at = list(chosen)
        cells = []
        for s in score:
            count = min(s.shape[2], max(1, round(share * s.shape[2])))
            cells.append(s[:, at].topk(count, dim=2, sorted=False).indices.sort(2).values)
        return cls(chosen, tuple(cells))

    def count(self, segments: tuple[Segment, ...]) -> int:
        """How many tokens these are."""
        per_frame = 0
        for segment, cells in zip(segments, self.cells, strict=True):
            per_frame += segment.views * (segment.cells if cells is None else cells.shape[2])
        return per_frame * len(self.frames)

    def share(self, segments: tuple[Segment, ...]) -> float:
        """Their part of all tokens of the window."""
        return self.count(segments) / sum(s.views * s.grid[0] * s.cells for s in segments)

    def rows(self, segments: tuple[Segment, ...], device: torch.device) -> Tensor:
        """Indices into the token axis [k]: by latent frame, then segment, then camera, then cell."""
        parts = []
        for i, frame in enumerate(self.frames):
            for segment, cells in zip(segments, self.cells, strict=True):
                if segment.tensor:
                    raise RollcacheError("tokens can be chosen only where the hidden state is one tensor.")
                if cells is None:
                    inside = torch.arange(segment.cells, device=device).expand(segment.views, -1)
                else:
                    inside = cells[:, i].to(device)
                first = segment.start + segment.frame_stride * frame
                views = torch.arange(segment.views, device=device)[:, None] * segment.view_stride
                parts.append((first + views + inside).flatten())
        return torch.cat(parts)


def unfold(x: Tensor, segments: tuple[Segment, ...]) -> tuple[Tensor, ...]:
    """Values per token `[L]` or `[L, C]` as `[views, F, cells]` or `[views, F, cells, C]`, one tensor a segment."""
    token = x.stride(0)
    out = []
    for s in segments:
        shape = (s.views, s.grid[0], s.cells, *x.shape[1:])
        strides = (s.view_stride * token, s.frame_stride * token, token, *x.stride()[1:])
        out.append(x.as_strided(shape, strides, x.storage_offset() + s.start * token))
    return tuple(out)


def fold(parts: tuple[Tensor, ...], segments: tuple[Segment, ...], length: int) -> Tensor:
    """The inverse of `unfold`: values per token [length] or [length, C]; tokens of no segment are 0."""
    out = parts[0].new_zeros(length, *parts[0].shape[3:])
    for part, whole in zip(parts, unfold(out, segments), strict=True):
        whole.copy_(part)
    return out
