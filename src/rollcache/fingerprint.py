"""The cheap linear summary of a hidden state that gates compare.

A fingerprint is a matrix of *rows*: a few tokens of every camera, on a uniform grid, then the token mean of every
camera. Consecutive rows form *entries*: one of sampled tokens and one of means per view group. Everything is linear in
the hidden state, so the fingerprint of `h + r` is the sum of theirs: that is what makes look-ahead gating possible.

Shapes: `Bt` batch, `N` rows, `E` entries, `G` view groups, `C` channels, `n` spans that are compared at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollcache.passes import ZERO_NORM, RollcacheError, Segment

Hidden = tuple[Tensor, ...]
"""The tensors of one hidden state, each `[Bt, ..., C]`."""

EPS = 1e-6
_ZERO = ZERO_NORM**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What of a hidden state a policy wants to see.

    Attributes:
        tokens: budget K of sampled tokens per camera.
        min_frames: at least so many latent frames are sampled (as far as there are any).
        deviation: `element` is Eq. 6, the largest change of a single number; `token` the largest mean change of a
            token.
        refresh_on_replay: also remember the fingerprint of a replayed input (Eq. 5 read literally).
    """

    tokens: int = 32
    min_frames: int = 2
    deviation: Literal["element", "token"] = "element"
    refresh_on_replay: bool = False


def allocate(grid: tuple[int, int, int], tokens: int, min_frames: int = 1) -> tuple[int, int, int]:
    """Split a budget of sampled tokens over the axes of a token grid, in proportion to their lengths.

    Args:
        grid: (F, H, W).
        tokens: budget K; the product of the result does not exceed it.
        min_frames: lower bound for the first axis. Strict proportionality looks at one frame of every realistic chunk.

    Returns:
        (k_F, k_H, k_W), each between 1 and the length of its axis.

    >>> allocate((2, 16, 32), 32)
    (1, 4, 8)
    >>> allocate((2, 16, 32), 32, min_frames=2)
    (2, 3, 5)
    """
    counts = _proportional(list(grid), tokens)
    frames = min(min_frames, grid[0], tokens)
    if counts[0] < frames:
        counts = [frames, *_proportional(list(grid[1:]), tokens // frames)]
    return counts[0], counts[1], counts[2]


def _proportional(lengths: list[int], budget: int) -> list[int]:
    """Counts proportional to `lengths` with a product of about `budget`, never above it."""
    if _product(lengths) <= budget:
        return lengths
    free = set(range(len(lengths)))
    while True:
        scale = (budget / _product([lengths[a] for a in free])) ** (1 / len(free))
        short = {a for a in free if lengths[a] * scale < 1}
        if not short or short == free:
            break
        free -= short
    counts = [min(n, max(1, round(n * scale))) if a in free else 1 for a, n in enumerate(lengths)]
    while _product(counts) > budget:
        widest = max((a for a in free if counts[a] > 1), key=lambda a: (counts[a] / lengths[a], counts[a]))
        counts[widest] -= 1
    return counts


def _product(values: list[int]) -> int:
    result = 1
    for v in values:
        result *= v
    return result


def uniform(length: int, count: int) -> list[int]:
    """`count` uniformly spaced indices of an axis, both ends included; the centre for one.

    >>> uniform(10, 4)
    [0, 3, 6, 9]
    """
    if count == 1:
        return [length // 2]
    return [(2 * i * (length - 1) + count - 1) // (2 * (count - 1)) for i in range(count)]


def sample(segment: Segment, sampling: Sampling) -> list[int]:
    """Token indices of the sampled Cartesian grid, camera by camera."""
    counts = allocate(segment.grid, sampling.tokens, sampling.min_frames)
    f, h, w = (uniform(length, count) for length, count in zip(segment.grid, counts, strict=True))
    width = segment.grid[2]
    return [
        segment.start + v * segment.view_stride + i * segment.frame_stride + j * width + k
        for v in range(segment.views)
        for i in f
        for j in h
        for k in w
    ]


class Sampler:
    """Takes fingerprints of hidden states of one shape.

    Attributes:
        entries: row range of every entry: sampled tokens of each group, then means of each group.
        groups: number of view groups G; the first G entries are the spatial ones.
        membership: `[N, E]` float32, 1 where a row belongs to an entry: sums over entries are a product with it.
        average: `[N, G]` float32: sums of magnitudes of rows to mean magnitudes of groups.
    """

    def __init__(self, hidden: Hidden, segments: tuple[Segment, ...], sampling: Sampling) -> None:
        """Plan the indices.

        Args:
            hidden: example of the hidden state, tensors `[Bt, ..., C]`.
            segments: token layout; empty means one flat row of tokens per tensor.
            sampling: how much to look at.

        Raises:
            RollcacheError: a segment does not fit, or the tensors differ in batch or channels.
        """
        if any(h.ndim < 3 for h in hidden):
            shapes = ", ".join(str(list(h.shape)) for h in hidden)
            raise RollcacheError(
                f"a hidden state must be [batch, ..., channels] with at least 3 dimensions, got {shapes}."
            )
        tokens = [_tokens(h).shape[1] for h in hidden]
        if len({(h.shape[0], h.shape[-1]) for h in hidden}) != 1:
            shapes = ", ".join(str(list(h.shape)) for h in hidden)
            raise RollcacheError(f"the tensors of a hidden state must agree in batch and channels, got {shapes}.")
        segments = segments or tuple(
            Segment.contiguous(f"tensor {i}", 1, (1, 1, n), tensor=i) for i, n in enumerate(tokens)
        )
        for s in segments:
            if s.tensor >= len(hidden) or s.stop > tokens[s.tensor]:
                raise RollcacheError(
                    f"segment {s.name!r} needs {s.stop} tokens in tensor {s.tensor}, the hidden state has {tokens}."
                )
        self.device = hidden[0].device
        self.groups = len(segments)
        self.segments = sorted(segments, key=lambda s: s.tensor)
        self.sampling = sampling
        picked = [sample(s, sampling) for s in self.segments]
        sizes = [len(p) for p in picked] + [s.views for s in self.segments]
        stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.entries = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        with torch.inference_mode(False):
            self.membership = torch.zeros(stops[-1], len(sizes), device=self.device)
            for e, (start, stop) in enumerate(self.entries):
                self.membership[start:stop, e] = 1
            spatial = self.membership[:, : self.groups]
            self.average = spatial / (spatial.sum(0) * hidden[0].shape[-1])
            self.index: list[Tensor] = []
            self.weights: list[Tensor] = []
            for t, count in enumerate(tokens):
                mine = [i for i, s in enumerate(self.segments) if s.tensor == t]
                rows = [r for i in mine for r in picked[i]]
                self.index.append(torch.tensor(rows, dtype=torch.long, device=self.device))
                self.weights.append(_mean_weights([self.segments[i] for i in mine], count, self.device))

    def tokens(self, hidden: Hidden) -> Tensor:
        """The sampled tokens, float32 `[Bt, N - means, C]`. Streams beyond the planned tensors are not looked at."""
        parts = [_tokens(h).index_select(1, i) for h, i in zip(hidden, self.index, strict=False)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).float()

    def __call__(self, hidden: Hidden) -> Tensor:
        """The fingerprint, float32 `[Bt, N, C]`."""
        return torch.cat((self.tokens(hidden), *self._means(hidden)), 1)

    def _means(self, hidden: Hidden) -> list[Tensor]:
        """Token mean of every camera, float32 `[Bt, V, C]` per tensor or segment.

        One small matrix product where that is exact float32 (a strided mean is several times slower on a CPU);
        reductions elsewhere, since a matrix product may run in TF32 there.
        """
        if self.device.type == "cpu":
            pairs = zip(self.weights, hidden, strict=False)
            return [torch.stack([torch.mm(w, row) for row in _tokens(h).float()]) for w, h in pairs]
        return [_cameras(hidden[s.tensor], s).mean((2, 3), dtype=torch.float32) for s in self.segments]


def _tokens(hidden: Tensor) -> Tensor:
    """`[Bt, ..., C]` as `[Bt, L, C]`."""
    return hidden if hidden.ndim == 3 else hidden.flatten(1, -2)


def _mean_weights(segments: list[Segment], tokens: int, device: torch.device) -> Tensor:
    """`[V, L]` float32 whose product with `[L, C]` is the token mean of every camera."""
    weights = torch.zeros(sum(s.views for s in segments), tokens, device=device)
    row = 0
    for s in segments:
        frames, height, width = s.grid
        for v in range(s.views):
            for f in range(frames):
                start = s.start + v * s.view_stride + f * s.frame_stride
                weights[row, start : start + height * width] = 1 / (frames * height * width)
            row += 1
    return weights


def _cameras(hidden: Tensor, s: Segment) -> Tensor:
    """View of one segment as `[Bt, V, F, H*W, C]`."""
    x = _tokens(hidden)
    frames, height, width = s.grid
    batch, token, channel = x.stride()
    return x.as_strided(
        (x.shape[0], s.views, frames, height * width, x.shape[2]),
        (batch, s.view_stride * token, s.frame_stride * token, token, channel),
        x.storage_offset() + s.start * token,
    )


class Sizes(NamedTuple):
    """Sizes of one stored fingerprint, batch row after batch row."""

    squares: list[float]  # Bt * E squared norms of the entries
    magnitudes: list[float]  # Bt * G mean magnitudes of the view groups


class Similarity(NamedTuple):
    """How much the input of a span resembles the one its residual was computed from; `nan`: nothing can be said."""

    cosine: float
    deviation: float


def measure(stored: Tensor, sampler: Sampler) -> list[Sizes]:
    """Sizes of stored fingerprints `[n, Bt, N, C]`, in one transfer to the host."""
    squares = torch.linalg.vector_norm(stored, dim=-1).square() @ sampler.membership  # [n, Bt, E]
    magnitudes = stored.abs().sum(-1) @ sampler.average  # [n, Bt, G]
    split = squares[0].numel()
    table = torch.cat((squares.flatten(1), magnitudes.flatten(1)), 1).tolist()
    return [Sizes(row[:split], row[split:]) for row in table]


def compare(stored: Tensor, sizes: list[Sizes], change: Tensor, sampler: Sampler) -> list[Similarity]:
    """Similarity of `n` look-ahead fingerprints to the stored ones.

    Between blocks that were stored in one pass, stored and look-ahead fingerprints advance by the same residuals, so
    their difference is the same for all of them: `change` at the first. With `a = |p|^2`, `c = <p, change>` and
    `d = |change|^2` for an entry `p`, the cosine of `p + change` and `p` is `(a + c) / sqrt(a (a + 2c + d))`. A run of
    blocks therefore costs one difference and one matrix product, and one transfer to the host.

    Args:
        stored: fingerprints `[n, Bt, N, C]`.
        sizes: their sizes.
        change: current minus stored fingerprint, `[Bt, N, C]`.
        sampler: row layout, and which deviation.

    Returns:
        For each: cosine, the minimum over entries and batch; deviation, the maximum over view groups and batch. The
        cosine is not-a-number where anything is not finite.
    """
    entries, groups = sampler.entries, sampler.groups
    size = change.abs()
    largest = size.mean(-1) if sampler.sampling.deviation == "token" else size.amax(-1)  # [Bt, N]
    energy = torch.linalg.vector_norm(change, dim=-1).square() @ sampler.membership  # [Bt, E]
    inner = _inner(stored, change, sampler)  # [n, Bt, E]
    numbers = torch.cat((inner.flatten(), energy.flatten(), largest.flatten())).tolist()
    count, step = inner.numel(), energy.numel()
    energies, by_row = numbers[count : count + step], numbers[count + step :]
    starts = range(0, len(by_row), largest.shape[1])
    worst = [max(by_row[row + i : row + j]) for row in starts for i, j in entries[:groups]]
    known = isfinite(sum(energies))
    result = []
    for n, (squares, magnitudes) in enumerate(sizes):
        cosine = nan
        if known and isfinite(sum(squares)):
            cosine = min(map(_cosine, squares, numbers[n * step : (n + 1) * step], energies))
        deviation = max([most / (mean + EPS) for most, mean in zip(worst, magnitudes, strict=True)])
        result.append(Similarity(cosine, deviation))
    return result


def _cosine(a: float, c: float, d: float) -> float:
    """Cosine of `p` and `p + change`, from `|p|^2`, `<p, change>` and `|change|^2`."""
    now = a + 2 * c + d
    if a > _ZERO and now > _ZERO:
        return (a + c) / sqrt(a * now)
    return float(a <= _ZERO and now <= _ZERO)


def _inner(stored: Tensor, change: Tensor, sampler: Sampler) -> Tensor:
    """Inner products per entry of `[n, Bt, N, C]` with `[Bt, N, C]`: `[n, Bt, E]`.

    Few fingerprints are multiplied element by element; for many, a matrix product per entry reads them only once.
    Should it run in TF32, no harm is done: `1 - cosine` depends on this product in second order only.
    """
    if len(stored) <= 4:
        return (stored * change).sum(-1) @ sampler.membership
    products = [
        torch.bmm(
            stored[:, :, i:j].flatten(2).transpose(0, 1),  # [Bt, n, rows * C]
            change[:, i:j].flatten(1).unsqueeze(-1),  # [Bt, rows * C, 1]
        )
        for i, j in sampler.entries
    ]
    return torch.cat(products, -1).transpose(0, 1)
