"""The clock's order of events; how long they take is nobody's test."""

import time

import pytest

from labkit.bench.clock import Stopwatch, time_interleaved


def test_alternatives_take_turns_and_warm_up_is_thrown_away():
    calls = []
    samples = time_interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        warmup=1,
        repeats=3,
        before=lambda: calls.append("|"),
    )
    assert "".join(calls) == "|a|b" * 4
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert all(value >= 0 for values in samples.values() for value in values)


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 1), (0, 0)])
def test_impossible_counts_are_refused(warmup, repeats):
    with pytest.raises(ValueError, match="repeats >= 1"):
        time_interleaved({"a": int}, warmup=warmup, repeats=repeats)


def test_nothing_to_time_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        time_interleaved({}, warmup=0, repeats=1)


def test_a_stopwatch_keeps_its_laps_and_wants_a_start():
    watch = Stopwatch()
    for _ in range(3):
        watch.start()
        time.sleep(0.002)
        watch.stop()
    assert len(watch.seconds) == 3
    assert all(lap >= 0.002 for lap in watch.seconds)
    with pytest.raises(ValueError, match="start the stopwatch first"):
        watch.stop()
