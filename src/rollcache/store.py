"""Residuals and fingerprints of one rollout: bytes, dtype, budget, and the sums that make a replayed run one addition.

A `Row` holds one denoising step of one branch. Its buffers are allocated once and overwritten in place: nothing stored
is ever an alias of a tensor that the model owns, and memory does not grow with the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollcache.conditions import Snapshot
from rollcache.fingerprint import Hidden, Sampler, Sizes, measure
from rollcache.passes import Cell

Reduce = Callable[[Tensor], Tensor]
"""Elementwise maximum, over the ranks of a distributed model, of a float32 tensor in which larger is worse."""


@dataclass(slots=True)
class Budget:
    """Bytes that all rollouts of a cache may hold together; `limit=None` is unlimited.

    `strict` raises when the device has no room, instead of doing without: ranks of one model must store the same.
    """

    limit: int | None = None
    strict: bool = False
    used: int = 0
    refused: int = 0

    def admit(self, size: int) -> bool:
        """Reserve `size` bytes. A refusal means computing, never failing."""
        if self.limit is not None and self.used + size > self.limit:
            self.refused += 1
            return False
        self.used += size
        return True

    def buffers(self, like: Hidden, dtype: torch.dtype | None, copies: int | None = None) -> Hidden | None:
        """Empty tensors of the shapes of `like`, that often if `copies` says so; None without room, here or there."""
        size = bytes_of(like, dtype) * (copies or 1)
        if not self.admit(size):
            return None
        leading = () if copies is None else (copies,)
        try:
            with torch.inference_mode(False):
                return tuple(torch.empty(leading + t.shape, dtype=dtype or t.dtype, device=t.device) for t in like)
        except torch.OutOfMemoryError:
            if self.strict:
                raise
            self.used -= size
            self.refused += 1
            return None


@dataclass(slots=True)
class Entry:
    """What is stored for one cell.

    Attributes:
        residual: output minus input of the span, one tensor per stream, in the storage dtype.
        dtypes: dtype of the output, per stream.
        chunk: when it was computed.
        snapshot: the conditions it was computed under.
        replays: how many times in a row it was replayed.
        finite: False once the residual is known to hold something that is not.
    """

    residual: Hidden
    dtypes: tuple[torch.dtype, ...]
    chunk: int
    snapshot: Snapshot
    replays: int = 0
    finite: bool = True


class Row:
    """Everything stored for one step of one branch: an `Entry` per span, and the fingerprints of all in one tensor.

    Most of what is computed is never compared with: the next chunk is computed anyway, because it is protected or the
    conditions moved. So of spans that are computed in a row only the first has its fingerprint taken; the others' are
    *pending*, the one before plus that of the residual, until somebody looks.

    Attributes:
        cells: addresses of the spans, in block order.
        entries: what is stored, None where nothing is.
        bank: fingerprints of the inputs, `[n, Bt, N, C]`, once there are any.
        time: the noise level that the entries belong to.
        bytes: what is held.
        predicted: what will be held when every span is stored, known from the shapes of the first.
    """

    def __init__(self, cells: tuple[Cell, ...], budget: Budget, dtype: torch.dtype | None = None) -> None:
        """Start empty; `dtype` is the storage dtype of residuals, None keeps that of the hidden state."""
        self.cells = cells
        self.entries: list[Entry | None] = [None] * len(cells)
        self._buffers: list[Hidden | None] = [None] * len(cells)
        self.bank: Tensor | None = None
        self.time: float | None = None
        self.bytes = self.predicted = 0
        self._budget = budget
        self._dtype = dtype
        self._stamps = [-1] * len(cells)  # the pass that a fingerprint belongs to, -1 for none
        self._pending = [False] * len(cells)
        self._sizes: list[Sizes | None] = [None] * len(cells)  # None where a fingerprint is not measured yet
        self._sound: tuple[int, int] | None = None  # the run whose total is known to be finite
        self._run: tuple[int, int] | None = None  # the spans whose summed residual is in _total
        self._total: Hidden | None = None

    def keep(
        self,
        span: int,
        before: Hidden,
        after: Hidden,
        *,
        chunk: int,
        snapshot: Snapshot,
        stamp: int,
        fingerprint: Tensor | None = None,
        pending: bool = False,
    ) -> bool:
        """Store the residual `after - before` of a span.

        Args:
            span: index into `cells`.
            before: its input, one tensor per stream.
            after: its output, of the same shapes.
            chunk: index of the chunk.
            snapshot: conditions of the pass.
            stamp: serial number of the pass.
            fingerprint: of the input, `[Bt, N, C]`; None for policies that do not look, or when it is
            pending: the span before was stored just now, in the same pass.

        Returns:
            False when the budget did not allow it: then nothing is stored for this span.
        """
        if self._run is not None and self._run[0] <= span < self._run[1]:
            self._run = None
        self._sound = None
        if not self.predicted:
            self.predicted = self._predict(after, fingerprint)
        if fingerprint is not None and self.bank is None:
            bank = self._reserve((fingerprint,), fingerprint.dtype, len(self.cells))
            self.bank = None if bank is None else bank[0]
        looks = fingerprint is not None or pending
        residual = self._buffers[span] or (None if looks and self.bank is None else self._reserve(after, self._dtype))
        if residual is None:
            return False
        self._buffers[span] = residual
        subtract(residual, after, before)
        self.entries[span] = Entry(residual, tuple(a.dtype for a in after), chunk, snapshot)
        if fingerprint is not None:
            self.write(span, fingerprint, stamp)
        elif pending:
            self._stamps[span], self._pending[span], self._sizes[span] = stamp, True, None
        return True

    def write(self, span: int, fingerprint: Tensor, stamp: int) -> None:
        """Remember the fingerprint of a span's input."""
        assert self.bank is not None
        self.bank[span].copy_(fingerprint)
        self._stamps[span], self._pending[span], self._sizes[span] = stamp, False, None

    def linked(self, span: int) -> bool:
        """Whether the fingerprints of `span` and `span + 1` stem from one pass, i.e. differ by the stored residual."""
        return self._stamps[span] == self._stamps[span + 1] >= 0

    def sizes(self, start: int, stop: int, sampler: Sampler) -> list[Sizes]:
        """Sizes of the fingerprints of the spans `start <= s < stop`; those written since are measured together."""
        assert self.bank is not None
        stale = [s for s in range(start, stop) if self._sizes[s] is None]
        if stale:
            first, last = stale[0], stale[-1] + 1
            self._sizes[first:last] = measure(self.bank[first:last], sampler)
        return [s for s in self._sizes[start:stop] if s is not None]

    def waiting(self, stamp: int) -> list[int]:
        """Spans whose pending fingerprint hangs on residuals of an earlier pass, which this one may overwrite."""
        return [s for s, pending in enumerate(self._pending) if pending and self._stamps[s] != stamp]

    def derive(self, sampler: Sampler) -> None:
        """Take all pending fingerprints."""
        for span, pending in enumerate(self._pending):
            entry = self.entries[span - 1]
            if pending and entry is not None and self.bank is not None:
                torch.add(self.bank[span - 1], sampler(entry.residual), out=self.bank[span])
                self._pending[span] = False

    def give_up(self, spans: list[int]) -> None:
        """Fingerprints that nobody will ask for, since their spans are about to be computed."""
        for span in spans:
            self._pending[span], self._stamps[span] = False, -1

    def known(self, span: int) -> bool:
        """Whether there is a fingerprint to compare with."""
        return self._stamps[span] >= 0 and not self._pending[span]

    def sound(self, start: int, stop: int, reduce: Reduce | None) -> Hidden | None:
        """What replaying a run adds, or None if that is not finite on some rank: then the culprits are marked."""
        total = self.total(start, stop)
        if self._sound == (start, stop) or finite(total, reduce):
            self._sound = (start, stop)
            return total
        entries = [e for e in self.entries[start:stop] if e is not None]
        for entry in entries:
            entry.finite = finite(entry.residual, reduce)
        if all(e.finite for e in entries):  # they overflow together
            entries[0].finite = False
        return None

    def keep_run(self, start: int, stop: int, before: Hidden, after: Hidden) -> None:
        """Store the residual of a run of spans computed in one pass: what went in, subtracted from what came out."""
        total = self._room(start, stop)
        if total is not None:
            subtract(total, after, before)
            self._run = (start, stop)

    def total(self, start: int, stop: int) -> Hidden:
        """Residual of the spans `start <= s < stop` together, so that replaying them is one addition.

        A run that was computed in one pass has it already. Any other is summed up in float32, and kept for the next
        time unless a longer one is.
        """
        parts = [e.residual for e in self.entries[start:stop] if e is not None]
        assert len(parts) == stop - start > 0
        if len(parts) == 1:
            return parts[0]
        if self._run == (start, stop) and self._total is not None:
            return self._total
        total: list[Tensor] = []
        for stream in zip(*parts, strict=True):
            acc = stream[0].float() + stream[1]
            for r in stream[2:]:
                acc += r
            total.append(acc.to(stream[0].dtype))
        room = self._room(start, stop)
        if room is not None:
            for r, t in zip(room, total, strict=True):
                r.copy_(t)
            self._run = (start, stop)
        return tuple(total)

    def forget(self) -> None:
        """Forget what was stored; the buffers stay for what comes."""
        self.entries = [None] * len(self.cells)
        self._run = self._sound = None
        self._stamps = [-1] * len(self.cells)
        self._pending = [False] * len(self.cells)

    def drop(self) -> None:
        """Forget everything and give the bytes back."""
        self._budget.used -= self.bytes
        self.bytes = 0
        self.entries = [None] * len(self.cells)
        self._buffers = [None] * len(self.cells)
        self.bank = self._run = self._total = self._sound = None
        self._stamps = [-1] * len(self.cells)
        self._pending = [False] * len(self.cells)
        self._sizes = [None] * len(self.cells)

    def _room(self, start: int, stop: int) -> Hidden | None:
        """Where to put the total of a run; None when a longer one is there or the budget says no."""
        if self._run is not None and self._run[1] - self._run[0] > stop - start:
            return None
        if self._total is None:
            like = self._buffers[start]
            assert like is not None
            self._total = self._reserve(like, None)
        return self._total

    def _reserve(self, like: Hidden, dtype: torch.dtype | None, copies: int | None = None) -> Hidden | None:
        """Buffers of the shapes of `like`, or None when the budget or the device has no room."""
        buffers = self._budget.buffers(like, dtype, copies)
        self.bytes += 0 if buffers is None else bytes_of(buffers, None)
        return buffers

    def _predict(self, after: Hidden, fingerprint: Tensor | None) -> int:
        """Bytes of this row when every span is stored, with the total of a run and the fingerprints."""
        spans = len(self.cells)
        residuals = (spans + (spans > 1)) * bytes_of(after, self._dtype)
        return residuals + (0 if fingerprint is None else spans * fingerprint.nbytes)


def subtract(out: Hidden, after: Hidden, before: Hidden) -> None:
    """Write `after - before` into `out`, in its dtype."""
    for r, a, b in zip(out, after, before, strict=True):
        if r.dtype == a.dtype:
            torch.sub(a, b, out=r)
        else:  # a subtraction that converts on the way is several times slower
            r.copy_(a - b)


def finite(tensors: Hidden, reduce: Reduce | None) -> bool:
    """Whether everything is finite, on every rank."""
    total = torch.stack([t.sum(dtype=torch.float32) for t in tensors]).sum()
    if reduce is None:
        return bool(torch.isfinite(total))
    return not bool(reduce((~torch.isfinite(total)).float()))


def bytes_of(tensors: Hidden, dtype: torch.dtype | None) -> int:
    """Bytes of tensors like these, in `dtype` or their own."""
    return sum(t.numel() * (dtype or t.dtype).itemsize for t in tensors)
