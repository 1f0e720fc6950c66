"""Noise for the chunks of a rollout that is shared between them, for loops of one's own and pipelines that take noise.

Whether there is anything to reuse between chunks is decided by their noise: from fresh noise the inputs of the first
steps are orthogonal, whatever the chunks show. A *bank* draws the noise of a loop so that chunks share it:

| bank | noise of chunks n and m at one step |
|---|---|
| `fresh()` | independent |
| `per_cycle(every)` | the same in a cycle of `every` chunks, independent between cycles |
| `correlated(rho, every)` | correlation `rho` in a cycle, independent between cycles |

Every single draw is standard normal, so no chunk by itself looks different to the model. What changes is what chunks
have in common, and a model that was trained on chunks with independent noise may answer with chunks that look alike or
stand still. A bank is therefore never used unless a loop asks for it; print `describe()` beside what came out.

>>> import torch
>>> bank = per_cycle(4, seed=7)
>>> randn = bank.at(chunk=5, step=0)
>>> x = randn(2, 3)
>>> torch.equal(x, bank.at(chunk=6, step=0)(2, 3)), torch.equal(x, bank.at(chunk=8, step=0)(2, 3))
(True, False)
>>> print(bank.describe())
noise: one per cycle of 4 chunks, seed 7

A pipeline that takes the noise of a whole video at once is given `video`:

>>> latents = bank.video(1, 7, 16, 8, 8, frames=[1, 3, 3])  # three chunks along dimension 1
>>> torch.equal(latents[:, 1:4], latents[:, 4:7]), torch.equal(latents[:, :1], latents[:, 1:2])
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rollcache.settings import check_count, check_range


@dataclass(frozen=True, kw_only=True)
class Bank:
    """A law of noise, from which any chunk and step can be drawn, in any order and again.

    Attributes:
        rho: correlation of two chunks of one cycle, from 0 (independent) to 1 (the same noise).
        every: chunks of a cycle; None is one cycle for the whole rollout.
        seed: of all draws. Rollouts with other seeds are independent.
    """

    rho: float
    every: int | None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("rho", self.rho, 0, 1)
        if self.every is not None:
            object.__setattr__(self, "every", _count("every", self.every, 1))
        object.__setattr__(self, "seed", _count("seed", self.seed))

    def at(self, chunk: int, step: int = 0) -> Draws:
        """Stands in for `torch.randn` at one step of one chunk."""
        return Draws(self, _count("chunk", chunk), _count("step", step))

    def video(
        self,
        *size: int | Sequence[int],
        frames: int | Sequence[int],
        dim: int = 1,
        step: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The noise of all latent frames of a video, chunk by chunk, for pipelines that take it at once.

        Chunk n is the first draw of `at(n, step)` in the size of the longest chunk, of which a shorter one has the
        leading frames.

        Args:
            size: shape of the latents, as numbers or as one sequence.
            frames: latent frames of every chunk, or of each in turn.
            dim: dimension of the latent frames; -4 is that of [..., F, C, H, W], and -3 that of [..., C, F, H, W].
            step: the same for all chunks; noise that a loop adds after a step is drawn with `at`.
            dtype: see `Draws`.
            device: see `Draws`.

        Raises:
            ValueError: the chunks do not make up the latent frames that `size` has.
        """
        shape = _shape(size)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"dim={dim} is no dimension of latents of shape {shape}.")
        lengths = _lengths(frames, shape[dim], f"latents of shape {shape} have {shape[dim]} frames in dimension {dim}")
        longest = list(shape)
        longest[dim] = max(lengths)
        draws = (self.at(n, step)(longest, dtype=dtype, device=device) for n in range(len(lengths)))
        return torch.cat([x.narrow(dim, 0, length) for x, length in zip(draws, lengths, strict=True)], dim)

    def is_fresh(self, chunk: int) -> bool:
        """Whether a chunk starts from noise that the one before did not use; see `Pass.fresh_noise`."""
        chunk = _count("chunk", chunk)
        return chunk == 0 or self.rho < 1 or (self.every is not None and chunk % self.every == 0)

    def describe(self) -> str:
        """One line for logs and reports."""
        cycle = "for the whole rollout" if self.every is None else f"per cycle of {self.every} chunks"
        law = {0.0: "fresh for every chunk", 1.0: f"one {cycle}"}.get(
            self.rho, f"correlated between chunks with rho={self.rho:g}, one shared part {cycle}"
        )
        return f"noise: {law}, seed {self.seed}"


class Draws:
    """The draws of one step, in the place of `torch.randn` and `torch.randn_like`; each call is another draw.

    Numbers are drawn on the host in float32, then moved and rounded: they are the same on every device.
    """

    def __init__(self, bank: Bank, chunk: int, step: int) -> None:
        """Use `Bank.at`."""
        self._bank, self._chunk, self._step = bank, chunk, step
        self._count = 0

    def __call__(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The next draw.

        Args:
            size: shape, as numbers or as one sequence.
            dtype: of the result; by default the one of `torch.randn`.
            device: likewise.
        """
        shape = _shape(size)
        bank, cycle = self._bank, 0 if self._bank.every is None else self._chunk // self._bank.every
        parts: list[Tensor] = []
        if bank.rho > 0:
            parts.append(bank.rho**0.5 * self._normal(shape, "shared", cycle))
        if bank.rho < 1:
            parts.append((1 - bank.rho) ** 0.5 * self._normal(shape, "own", self._chunk))
        self._count += 1
        target = torch.get_default_device() if device is None else device
        mixed = torch.stack(parts).sum(0)
        return mixed.to(device=target, dtype=dtype or torch.get_default_dtype())

    def like(self, x: Tensor) -> Tensor:
        """The next draw, with the shape, dtype and device of `x`."""
        return self(*x.shape, dtype=x.dtype, device=x.device)

    def _normal(self, shape: tuple[int, ...], part: str, place: int) -> Tensor:
        key = f"{self._bank.seed} {part} {place} {self._step} {self._count}".encode()
        seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True)
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _shape(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    """A shape that was given as numbers or as one sequence."""
    given: Any = size[0] if size and isinstance(size[0], Sequence) else size
    return tuple(given)


def _lengths(frames: int | Sequence[int], total: int, have: str) -> list[int]:
    """Latent frames of each chunk of a video of `total`; `have` says what there is, for messages."""
    if isinstance(frames, Sequence):
        lengths = [_count("frames", length, 1) for length in frames]
        if not lengths or sum(lengths) != total:
            raise ValueError(f"{have}, but frames={list(frames)} add up to {sum(lengths)}.")
        return lengths
    length = _count("frames", frames, 1)
    if not total or total % length:
        raise ValueError(f"{have}, which frames={length} does not divide: pass the length of every chunk, e.g. [1, 3].")
    return [length] * (total // length)


def _count(name: str, value: Any, low: int = 0) -> int:
    """A whole number as a plain integer; those of NumPy are welcome."""
    plain = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
    check_count(name, plain, low)
    return plain


def fresh(*, seed: int = 0) -> Bank:
    """Independent noise for every chunk, as most models were trained with."""
    return Bank(rho=0.0, every=None, seed=seed)


def per_cycle(every: int | None, *, seed: int = 0) -> Bank:
    """One noise for `every` chunks in a row; None is one for the whole rollout."""
    return Bank(rho=1.0, every=every, seed=seed)


def correlated(rho: float, every: int | None = None, *, seed: int = 0) -> Bank:
    """Noise whose correlation between two chunks of a cycle is `rho`: a shared part and one of its own."""
    return Bank(rho=rho, every=every, seed=seed)
