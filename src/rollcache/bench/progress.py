"""What a person sees while a benchmark runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rollcache.bench.lanes import Lane


class Narrator:
    """Tells what is being done; a context manager.

    Args:
        console: where to, default standard error, so that tables on standard output stay clean.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live = self.console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._progress.add_task("", total=None, note="")
        self._name, self._began = "", time.monotonic()

    def __enter__(self) -> Narrator:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, total: int) -> None:
        """Start a piece of work of `total` units."""
        self._name, self._began = name, time.monotonic()
        self._progress.reset(self._task, total=total, description=name, note="")

    def stage(self, what: str) -> None:
        """Name what is being done now."""
        if self._live:
            self._progress.update(self._task, description=f"{self._name}: {what}")
        else:
            self.say(f"{self._name}: {what} ({time.monotonic() - self._began:.0f} s)")

    def chunk(self, n: int, lanes: Sequence[Lane]) -> None:
        """Chunk `n` is finished on all lanes."""
        note = ""
        if n and len(lanes) > 1:
            full, cached = (sum(lane.seconds[1:]) / n for lane in lanes[:2])
            note = f"{full:.2f} s full, {cached:.2f} s {lanes[1].plan.label}"
        self._progress.update(self._task, completed=n + 1, note=note)

    def units(self, done: int, note: str = "") -> None:
        """`done` units are finished."""
        self._progress.update(self._task, completed=done, note=note)

    def done(self, what: str) -> None:
        """A piece of work is finished; leaves a line."""
        self.say(f"{self._name}: {what} ({time.monotonic() - self._began:.0f} s)")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
