"""Paired clocks: turns are taken, warm-up is thrown away, medians and intervals are those of the samples."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcache.measure import Paired, Spread, Stopwatch, paired


def test_variants_take_turns_and_change_who_goes_first():
    order = []
    result = paired(lambda: order.append("f"), lambda: order.append("c"), rounds=3, warmup=1)
    assert "".join(order) == "fccffccf"
    assert len(result.samples) == 3


def test_warmup_does_not_count():
    seconds = iter([100.0, 3.0, 3.0, 3.0])
    result = paired(lambda: next(seconds), lambda: 1.0, rounds=3, warmup=1, self_timed=True)
    assert (result.full.median, result.cached.median, result.speedup) == (3.0, 1.0, 3.0)


def test_a_disturbed_round_does_not_move_the_speedup():
    result = Paired.of([2.0, 2.0, 2.0, 2.0, 60.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert result.speedup == 2.0
    assert result.low == 2.0 <= result.high


def test_chunks_of_a_cycle_are_summed_before_the_median():
    full = [4.0, 4.0, 4.0, 4.0] * 3
    cached = [4.0, 1.0, 1.0, 1.0] * 3  # the exact first chunk, then replays
    assert Paired.of(full, cached).speedup == 4.0
    grouped = Paired.of([*full, 9.0], [*cached, 9.0], group=4)
    assert grouped.speedup == pytest.approx(16 / 7)
    assert grouped.samples == ((16.0, 7.0),) * 3


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=20))
@settings(deadline=None)
def test_interval_holds_the_estimate_and_repeats(pairs):
    full, cached = zip(*pairs, strict=True)
    first, again = Paired.of(full, cached), Paired.of(full, cached)
    assert first == again
    assert first.low <= first.high
    assert min(full) / max(cached) * (1 - 1e-9) <= first.low
    assert first.high <= max(full) / min(cached) * (1 + 1e-9)
    assert set(first.to_dict()) == {"speedup", "speedup_95", "full_s", "cached_s", "pairs"}


def test_speedup_is_printed_with_its_interval():
    assert str(Paired.of([3.0], [1.5])) == "2.00x [2.00, 2.00]"


def test_spread_is_the_quartiles():
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (spread.median, spread.q1, spread.q3, spread.smallest, spread.count, spread.iqr) == (3, 2, 4, 1, 5, 2)


def test_wall_clock_is_used_when_callables_do_not_time_themselves():
    result = paired(lambda: time.sleep(0.02), lambda: time.sleep(0.002), rounds=1, warmup=0)
    assert result.full.median >= 0.02
    assert result.cached.median >= 0.002


def test_stopwatch_drops_a_lap_that_failed():
    watch = Stopwatch()
    with pytest.raises(ZeroDivisionError), watch.lap():
        _ = 1 / 0
    with watch.lap():
        pass
    assert len(watch.laps()) == 1
    assert watch.total() == watch.laps()[0] >= 0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="on cpu or cuda, not on meta"):
        Stopwatch("meta")
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])
    with pytest.raises(ValueError, match="must be finite"):
        Spread.of([1.0, float("nan")])
    with pytest.raises(ValueError, match="pairs needed: 2 times of full compute, 1 of the variant"):
        Paired.of([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="at least one group of 4 rounds, got 3"):
        Paired.of([1.0] * 3, [1.0] * 3, group=4)
    with pytest.raises(ValueError, match="times must be positive"):
        Paired.of([1.0], [0.0])
    with pytest.raises(ValueError, match="rounds must be 1 or more"):
        paired(lambda: 1.0, lambda: 1.0, rounds=0)
    with pytest.raises(TypeError, match="cached must return its seconds when self_timed, got NoneType"):
        paired(lambda: 1.0, lambda: None, self_timed=True)


def test_on_cuda_laps_are_events_read_only_at_the_end(monkeypatch):
    """With stand-ins for CUDA: no wait inside the timed loop, milliseconds become seconds."""
    log = []

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing
            Event.made += 1
            self.number = Event.made

        def record(self):
            log.append(f"record {self.number}")

        def synchronize(self):
            log.append(f"wait {self.number}")

        def elapsed_time(self, other):
            return 1000.0 * (other.number - self.number)

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.device", lambda _: contextlib.nullcontext())
    watch = Stopwatch("cuda:0")
    for _ in range(2):
        with watch.lap():
            log.append("work")
    assert log == ["record 1", "work", "record 2", "record 3", "work", "record 4"]
    assert watch.laps() == watch.laps() == [1.0, 1.0]
    assert log[6:] == ["wait 2", "wait 4"]
