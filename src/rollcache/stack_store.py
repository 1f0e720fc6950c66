"""What is kept of whole passes: the last few residuals of the stack, and the K/V of the window for token repair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollcache.adapters.spec import Slots
from rollcache.conditions import Snapshot
from rollcache.fingerprint import Hidden
from rollcache.passes import Cell, Pass
from rollcache.policies.base import Stored
from rollcache.store import Budget, Entry, Reduce, bytes_of, finite, subtract


class Past(Entry):
    """A residual of the whole stack; `step` and `time` are those of the pass that computed it."""

    def __init__(self, residual: Hidden, dtypes: tuple[torch.dtype, ...], where: Pass, snapshot: Snapshot) -> None:
        """What one computed pass leaves."""
        super().__init__(residual, dtypes, where.chunk, snapshot)
        self.step, self.time, self.checked = where.step, where.time, False

    def seen(self) -> Stored:
        """As a policy sees it."""
        return Stored(self.chunk, self.step, self.time, self.residual[0])


class StackRow:
    """Everything stored for the whole stack: of one branch across steps, or of one step of one branch across chunks.

    Attributes:
        cells: the one address.
        entries: the newest residual, or None; a list of one, as a `Row` has one a span.
        slots: K/V of the window.
        complete: whether the slots hold a whole window.
        time: the noise level that the entries belong to, across chunks.
        bytes: what is held.
        predicted: what will be held when everything is stored.
    """

    def __init__(self, cell: Cell, budget: Budget, dtype: torch.dtype | None, history: int) -> None:
        """Start empty."""
        self.cells = (cell,)
        self.past: list[Past] = []
        self.slots: Slots = {}
        self.complete = False
        self.time: float | None = None
        self.bytes = self.predicted = 0
        self._budget = budget
        self._dtype = dtype
        self._history = history
        self._free: list[Hidden] = []
        self._kv_bytes = 0
        self._wanted: set[Any] = set()  # keys of a whole window

    @property
    def entries(self) -> list[Past | None]:
        """See the class."""
        return [self.past[0] if self.past else None]

    def keep(self, before: Hidden, after: Hidden, where: Pass, snapshot: Snapshot) -> bool:
        """Store the residual of a computed pass, and drop the oldest; False when the budget has room for none.

        Where it has room for fewer than the method would like, the newest are kept.
        """
        if not self.predicted:
            self.predicted = self._history * bytes_of(after, self._dtype) + self._kv_bytes
        if len(self.past) == self._history:
            self._free.append(self.past.pop().residual)
        residual = self._free.pop() if self._free else self._reserve(after)
        if residual is None and self.past:
            residual = self.past.pop().residual
        if residual is None:
            return False
        subtract(residual, after, before)
        self.past.insert(0, Past(residual, tuple(a.dtype for a in after), where, snapshot))
        return True

    def keep_slots(self, slots: Slots) -> None:
        """Keep the K/V of a computed pass; without room there will be no repairs.

        Blocks that another method replayed inside the pass left none: theirs stays what it was.
        """
        self._wanted |= slots.keys()
        slots = {**self.slots, **slots} if slots.keys() < self._wanted else slots
        held = sum(t.nbytes for kv in slots.values() for t in kv)
        if held != self._kv_bytes:
            self._give_back(self._kv_bytes)
            self.predicted -= self._kv_bytes
            self._kv_bytes = 0
            if not self._budget.admit(held):
                self.slots, self.complete = {}, False
                return
            self.bytes += held
            self.predicted += held
            self._kv_bytes = held
        self.slots, self.complete = slots, bool(slots) and slots.keys() == self._wanted

    def total(self, hidden: Hidden, weights: tuple[float, ...]) -> Hidden:
        """`hidden` plus the weighted sum of the stored residuals, the newest first."""
        out = []
        for i, (h, dtype) in enumerate(zip(hidden, self.past[0].dtypes, strict=True)):
            if weights == (1.0,):
                out.append(torch.add(h, self.past[0].residual[i]).to(dtype))
                continue
            total = h.float()
            for w, past in zip(weights, self.past, strict=False):
                total = torch.add(total, past.residual[i].float(), alpha=w)
            out.append(total.to(dtype))
        return tuple(out)

    def put_rows(self, rows: Tensor, residual: Tensor) -> None:
        """Overwrite the residual of some tokens [B, k, C] of the newest residual."""
        target = self.past[0].residual[0]
        target.index_copy_(1, rows, residual.to(target.dtype))
        self.past[0].checked = False

    def sound(self, start: int, stop: int, reduce: Reduce | None, count: int = 1) -> Hidden | None:
        """The newest residual, or None if one of the `count` newest is not finite on some rank. As `Row.sound`."""
        for past in self.past[:count]:
            if not past.checked:
                past.checked, past.finite = True, finite(past.residual, reduce)
            if not past.finite:
                return None
        return self.past[0].residual

    def forget(self) -> None:
        """Forget what was stored; the buffers stay for what comes."""
        self._free += [p.residual for p in self.past]
        self.past, self.slots, self.complete = [], {}, False

    def drop(self) -> None:
        """Forget everything and give the bytes back."""
        self._give_back(self.bytes)
        self.past, self._free, self.slots, self.complete, self._kv_bytes = [], [], {}, False, 0

    def _give_back(self, count: int) -> None:
        self._budget.used -= count
        self.bytes -= count

    def _reserve(self, like: Hidden) -> Hidden | None:
        buffers = self._budget.buffers(like, self._dtype)
        self.bytes += 0 if buffers is None else bytes_of(buffers, None)
        return buffers
