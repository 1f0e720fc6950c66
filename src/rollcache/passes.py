"""Where in a rollout are we: passes, their token layout, their conditions, and the address of a cached residual.

An adapter (or the marks of a hand-written loop) describes each forward of the transformer as a `Pass`.
Nothing below this line of the library ever looks at a model's arguments again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor


class RollcacheError(ValueError):
    """Something that rollcache does not support or that was used out of order; the message says what to do."""


class RollcacheWarning(UserWarning):
    """A setting that gives up a guarantee, or that has no effect."""


EVERY_BRANCH = "*"
"""Branch of a commit pass whose K/V all branches share."""

ZERO_NORM = 1e-6
"""Vectors shorter than this count as zero: similar to each other, to nothing else."""


class Role(Enum):
    """What one forward of the transformer is for."""

    DENOISE = "denoise"
    """A denoising step. The only role whose blocks may be replayed."""
    COMMIT = "commit"
    """Writes the clean K/V that later chunks attend to. Always exact, and never touches the cache."""
    PREFILL = "prefill"
    """Encodes given context (first frames, a new prompt). Always exact, and never touches the cache."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of `views` cameras that share a grid, inside one hidden-state tensor.

    Token (v, f, h, w) is `start + v*view_stride + f*frame_stride + h*W + w`, which expresses camera-major layouts
    (`view_stride = F*H*W`, `frame_stride = H*W`) as well as frame-interleaved ones (`frame_stride` = tokens of all
    cameras of one frame). Middle dimensions of a `[B, V, L, C]` tensor count as flattened.

    Attributes:
        name: name of the view group, for messages.
        views: number of cameras.
        grid: token grid (F, H, W) of one camera.
        start: index of the first token.
        view_stride: tokens from one camera to the next.
        frame_stride: tokens from one latent frame to the next.
        tensor: index into the hidden state when that is a list of tensors.
    """

    name: str
    views: int
    grid: tuple[int, int, int]
    start: int
    view_stride: int
    frame_stride: int
    tensor: int = 0

    @classmethod
    def contiguous(cls, name: str, views: int, grid: tuple[int, int, int], start: int = 0, tensor: int = 0) -> Segment:
        """A segment whose cameras follow each other, frame-major inside a camera."""
        frames, height, width = grid
        return cls(name, views, grid, start, frames * height * width, height * width, tensor)

    @property
    def cells(self) -> int:
        """Tokens of one camera and latent frame."""
        return self.grid[1] * self.grid[2]

    @property
    def stop(self) -> int:
        """One past the largest token index."""
        frames, height, width = self.grid
        return self.start + (self.views - 1) * self.view_stride + (frames - 1) * self.frame_stride + height * width


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """What the blocks are conditioned on besides their hidden state, e.g. the ego actions of the window.

    Attributes:
        name: for messages.
        value: any real tensor whose shape stays the same during a rollout. A tensor on the host saves a
            synchronisation. Where it is not finite the blocks are computed.
        scale: typical size of a change, broadcastable to `value` (for actions: their standard deviation). It makes the
            scaled test `max|value - stored| / scale` see a change in any dimension, whatever its unit. Without it the
            test is the relative change of the whole vector, `|value - stored| / |stored|`, in which small units drown.
        in_cosine: whether the paper's similarity has the raw cosine of this vector as an entry. It has none of what
            enters the model by cross-attention alone, so there such a condition changes unseen.

    Raises:
        TypeError: the name is no string, or the value or the scale no real tensor.
        ValueError: the value is empty, or the scale does not broadcast to it or is not positive and finite. An
            accelerator is not waited for: a scale that lives on one is checked when it is used, and a wrong one makes
            the blocks compute.
    """

    name: str
    value: Tensor
    scale: Tensor | None = None
    in_cosine: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a condition must be a string, got {type(self.name).__name__}.")
        _check_real(f"the value of condition {self.name!r}", self.value)
        if not self.value.numel():
            raise ValueError(f"the value of condition {self.name!r} is empty; leave the condition out.")
        if self.scale is None:
            return
        _check_real(f"the scale of condition {self.name!r}", self.scale)
        if not _broadcasts(self.scale, self.value):
            raise ValueError(
                f"the scale of condition {self.name!r} has shape {list(self.scale.shape)}, which does not broadcast to "
                f"that of its value, {list(self.value.shape)}."
            )
        if self.scale.device.type == "cpu" and not bool(usable(self.scale).all()):
            raise ValueError(
                f"the scale of condition {self.name!r} must be positive and finite, got {self.scale.tolist()}: it is "
                "the typical size of a change."
            )


def usable(scale: Tensor) -> Tensor:
    """Where a scale can be divided by, in the float32 of the comparison."""
    scale = scale.float()
    return (scale > 0) & scale.isfinite()


def _check_real(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(value).__name__}: write torch.tensor(...).")
    if value.is_complex():
        raise TypeError(f"{what} must be real, got {value.dtype}: use torch.view_as_real.")


def _broadcasts(small: Tensor, large: Tensor) -> bool:
    """Whether `small` broadcasts to the shape of `large` without making it any larger."""
    pairs = zip(reversed(small.shape), reversed(large.shape), strict=False)
    return small.ndim <= large.ndim and all(s in (1, n) for s, n in pairs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pass:
    """One forward of the transformer.

    Attributes:
        role: only `DENOISE` passes are ever approximated.
        rollout: key of the rollout whose state this pass uses.
        chunk: index of the generation step. It never decreases in a rollout: a smaller one starts a new rollout.
        step: denoising step inside the chunk, from 0.
        branch: classifier-free-guidance branch; branches never share state. Of a commit pass: whose K/V it writes, `*`
            for those that all branches share.
        segments: token layout of the hidden state. Empty: one flat row of tokens.
        conditions: what else the blocks are conditioned on.
        kv_update: committed K/V rest on this chunk: its latent will be committed, or a cycle of chunks begins with it
            that share their noise. Exact under `protect="chunk"`.
        kv_write: K/V that *this denoise pass* writes stay in the cache, as in loops without a commit pass: exact unless
            `protect="off"`.
        fresh_noise: the chunk starts from noise that the chunk before did not use (`first_step="auto"`).
        time: noise level or timestep. Across chunks a residual is never reused at another one; None trusts `step`.
            Methods that work across steps read it as the noise level sigma, 1 at pure noise.
        steps: denoising steps of a chunk, where the loop says it: a method that is set up for another number refuses.
        frame: the latent frame of the window that this chunk emits, in loops that emit one of several; None emits all.

    Raises:
        TypeError: an attribute is of another kind.
    """

    role: Role
    rollout: Hashable = 0
    chunk: int
    step: int = 0
    branch: str = "cond"
    segments: tuple[Segment, ...] = ()
    conditions: tuple[Condition, ...] = ()
    kv_update: bool = False
    kv_write: bool = False
    fresh_noise: bool = False
    time: float | None = None
    steps: int | None = None
    frame: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.role, Role):
            raise TypeError(f"Pass.role must be a Role such as Role.DENOISE, got {self.role!r}.")
        for name, index in (("chunk", self.chunk), ("step", self.step)):
            if isinstance(index, bool) or not isinstance(index, Integral) or (index < 0 and self.role is Role.DENOISE):
                raise TypeError(f"Pass.{name} must be an integer of at least 0, got {index!r}.")
        if not isinstance(self.branch, str):
            raise TypeError(f"Pass.branch must be the name of a branch, got {self.branch!r}.")
        check_items("Pass.segments", self.segments, Segment)
        check_items("Pass.conditions", self.conditions, Condition)


def check_items(what: str, items: Any, kind: type) -> None:
    """Raise `TypeError` unless `items` is a sequence of instances of a class."""
    if not isinstance(items, tuple | list) or not all(isinstance(item, kind) for item in items):
        raise TypeError(f"{what} must be a list or tuple of {kind.__name__}, got {items!r}.")


class Cell(NamedTuple):
    """Address of a residual in a rollout: consecutive blocks `start <= b < stop` at one step of one branch.

    The shape signature belongs to the rollout, not to the cell: a rollout holds one signature per branch at a time and
    forgets everything when it changes.
    """

    branch: str
    step: int
    start: int
    stop: int
