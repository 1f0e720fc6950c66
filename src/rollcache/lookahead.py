"""Gating in fingerprint space: similarities of a whole run of blocks before any of them is touched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollcache.fingerprint import Sampler, Similarity, compare
from rollcache.policies.base import UNKNOWN
from rollcache.store import Reduce, Row


class Lookahead:
    """Similarities of the spans from `start` on, under the assumption that all before them are replayed.

    Spans are compared in batches: all at once on an accelerator, where a batch costs one synchronisation; on a CPU all
    at once at first, then in batches that double, so that a gate which fails again and again does not look far in vain.
    """

    def __init__(
        self,
        row: Row,
        sampler: Sampler,
        start: int,
        stop: int,
        fingerprint: Callable[[], Tensor],
        batch: int,
        reduce: Reduce | None,
    ) -> None:
        """Look from span `start`, whose input has the true `fingerprint`, to `stop`, first `batch` spans at once."""
        self._row = row
        self._sampler = sampler
        self._start = start
        self._stop = stop
        self._fingerprint = fingerprint
        self._batch = batch
        self._reduce = reduce
        self._results: list[Similarity] = []
        self._changes: list[tuple[int, Tensor]] = []  # per stretch stored in one pass: first span, current - stored

    def similarity(self, span: int) -> Similarity:
        """How similar the input of a span is to the stored one."""
        while span >= self._start + len(self._results):
            self._extend()
        return self._results[span - self._start]

    def at(self, span: int) -> Tensor | None:
        """Fingerprint of the input of a span, None where it was not needed so far."""
        if span == self._start:
            return self._fingerprint()
        end = self._start + len(self._results)
        if not self._changes or span > end:
            return None
        row, change = self._row, self._changes[-1][1]
        assert row.bank is not None
        if span < end or row.linked(span - 1):
            return row.bank[span] + change
        entry = row.entries[span - 1]
        assert entry is not None
        return row.bank[span - 1] + change + self._sampler(entry.residual)

    def refresh(self, stop: int, stamp: int) -> None:
        """Overwrite what is stored for the spans before `stop` with what they were replayed at."""
        bank = self._row.bank
        assert bank is not None
        ends = [first for first, _ in self._changes[1:]] + [stop]
        for (first, change), end in zip(self._changes, ends, strict=True):
            for span in range(first, min(end, stop)):
                self._row.write(span, bank[span] + change, stamp)

    def _extend(self) -> None:
        row, start = self._row, self._start + len(self._results)
        row.derive(self._sampler)
        if row.bank is None or not row.known(start):
            self._results.append(UNKNOWN)
            return
        if not self._changes or not row.linked(start - 1):
            current = self.at(start)
            assert current is not None
            self._changes.append((start, current - row.bank[start]))
        stop = start + 1
        limit = min(self._stop, start + self._batch)
        while stop < limit and row.entries[stop] is not None and row.linked(stop - 1):
            stop += 1
        sizes = row.sizes(start, stop, self._sampler)
        found = compare(row.bank[start:stop], sizes, self._changes[-1][1], self._sampler)
        self._results += found if self._reduce is None else _agree(found, self._reduce, row.bank.device)
        self._batch *= 2


def _agree(found: list[Similarity], reduce: Reduce, device: torch.device) -> list[Similarity]:
    """The least similar evidence of all ranks. Not-a-number would not survive a maximum, so it travels as infinity."""
    distances = torch.tensor([(1 - s.cosine, s.deviation) for s in found], device=device)
    worst = reduce(torch.nan_to_num(distances, nan=float("inf"), posinf=float("inf"))).tolist()
    return [Similarity(1 - turned, deviation) for turned, deviation in worst]
