"""The clock's order of events; how long they take is nobody's test."""

import os
import time

import pytest
import torch.distributed as dist

from labkit.bench.clock import Stopwatch, start_together, time_interleaved
from labkit.parallel.launch import run_ranks


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


def _leave_together(cores):
    """Of a rank: the earliest moment that it can have proposed, and when it went on."""
    os.cpu_count = lambda: cores  # ranks beyond the cores wait asleep, the others awake
    margin_s = 0.05 * dist.get_rank()
    earliest = time.perf_counter() + margin_s
    start_together(margin_s)
    return earliest, time.perf_counter()


@pytest.mark.parametrize("cores", [1, 64], ids=["asleep", "awake"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_starts_before_the_latest_moment_that_any_has_proposed(world_size, cores):
    told = run_ranks(_leave_together, cores, world_size=world_size, timeout_s=60)
    latest = max(earliest for earliest, _ in told)
    assert all(left >= latest for _, left in told)
