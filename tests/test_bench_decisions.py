from __future__ import annotations

import pytest

from rollcache.bench.decisions import Decisions, Window
from rollcache.measure import PassTimes
from rollcache.street.protocol import Protocol

RECEDING = Protocol()


@pytest.mark.parametrize(
    ("chunks", "first", "stop", "commits", "whole"),
    [(33, 4, 32, 7, True), (8, 4, 8, 1, True), (7, 1, 7, 1, False), (2, 1, 2, 0, False), (36, 4, 36, 8, True)],
)
def test_whole_cycles_after_the_first_count(chunks: int, first: int, stop: int, commits: int, whole: bool) -> None:
    assert Window.of(chunks, RECEDING) == Window(first, stop, commits, whole)


def test_every_chunk_is_a_cycle_when_each_commits() -> None:
    assert Window.of(5, Protocol.named("chunked")) == Window(1, 5, 4, True)


def test_shared_commits_at_the_start_of_a_cycle() -> None:
    assert Window.of(6, Protocol.named("shared")) == Window(1, 6, 1, False)


def test_one_chunk_is_only_warm_up() -> None:
    with pytest.raises(ValueError, match="the first is warm-up"):
        Window.of(1, RECEDING)


def _decisions(words: list[tuple[str, ...]]) -> Decisions:
    return Decisions(tuple(words), steps=2, depth=4, reasons={})


FULL, REUSED, EMPTY = ("CCCC", "CCCC"), ("CRRR", "CRRR"), ()


def test_structural_skip_is_reached_when_three_of_four_chunks_are_reused() -> None:
    decisions = _decisions([FULL, REUSED, REUSED, REUSED] * 3)
    window = Window.of(12, RECEDING)
    times = PassTimes(blocks=(1.0,) * 4, outside=1.0, commit=5.0)
    reached = decisions.ceiling(times, window)
    assert reached.skip_rate == pytest.approx(0.75 * 0.75)
    # A cycle costs 4 chunks * 2 passes * 5 + commit 5 = 45; it saves 3 * 2 * 3 blocks = 18.
    assert reached.speedup == pytest.approx(45 / 27)
    assert decisions.by_step_block(window) == [[0.0, 0.75, 0.75, 0.75]] * 2
    assert decisions.by_phase(window, 4) == [0.0, 0.75, 0.75, 0.75]


def test_a_chunk_without_passes_counts_as_skipped_and_saves_whole_passes() -> None:
    decisions = _decisions([FULL, EMPTY, EMPTY, EMPTY] * 2)
    window = Window.of(8, RECEDING)
    reached = decisions.ceiling(PassTimes(blocks=(1.0,) * 4, outside=1.0, commit=5.0), window)
    assert reached.skip_rate == pytest.approx(0.75)
    assert reached.speedup == pytest.approx(45 / 15)
    assert decisions.by_phase(window, 4) == [0.0, 1.0, 1.0, 1.0]


def test_warm_up_does_not_count() -> None:
    decisions = _decisions([REUSED] * 4 + [FULL] * 4)
    assert decisions.skipped(Window.of(8, RECEDING)) == []
