"""The clock's order of events; how long they take is nobody's test."""

import os
import time
from collections import Counter
from functools import partial
from itertools import count, pairwise, permutations

import pytest
import torch.distributed as dist

from labkit.bench import clock
from labkit.bench.clock import (
    Stopwatch,
    start_together,
    time_interleaved,
    time_parts_interleaved,
    turn_order,
)
from labkit.parallel.launch import run_ranks


def _noting(notes, *names):
    return {name: partial(notes.append, name) for name in names}


def test_alternatives_take_turns_and_warm_up_is_thrown_away():
    notes = []
    samples = time_interleaved(_noting(notes, "a", "b"), warmup=1, repeats=3, before=lambda: notes.append("|"), calls=2)
    rounds = ["".join(notes[i : i + 6]) for i in range(0, len(notes), 6)]
    assert len(rounds) == 4
    assert set(rounds) <= {"|aa|bb", "|bb|aa"}
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert all(value >= 0 for values in samples.values() for value in values)


def test_every_order_is_about_equally_likely_and_none_follows_from_the_one_before():
    rounds = 6000
    orders = ["".join(turn_order("abc", number, seed="a point")) for number in range(rounds)]
    counts = Counter(orders)
    assert counts.keys() == set(map("".join, permutations("abc")))
    deviation = (rounds * 1 / 6 * 5 / 6) ** 0.5
    assert all(abs(count - rounds / 6) < 4 * deviation for count in counts.values())
    after = Counter(pairwise(orders))
    assert len(after) == 36  # a rotation would have 6
    assert all(abs(count - rounds / 36) < 4 * (rounds / 36) ** 0.5 for count in after.values())


def test_the_order_is_that_of_the_seed_and_the_round_and_not_of_the_mapping():
    orders = {seed: [turn_order("abcd", number, seed=seed) for number in range(20)] for seed in (0, 1, "f00d")}
    assert len({str(order) for order in orders.values()}) == 3
    assert orders["f00d"] == [turn_order("dbca", number, seed="f00d") for number in range(20)]


@pytest.mark.parametrize("timed", [time_interleaved, time_parts_interleaved])
def test_samples_are_those_of_their_own_name_in_the_order_of_the_rounds(timed, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))

    def wait(name, duration):
        """So long by the clock, and longer each round."""
        for _ in range(next(durations[name]) + duration):
            next(now)

    durations = {name: count() for name in "ab"}
    actions = {name: partial(wait, name, duration) for name, duration in (("a", 100), ("b", 200))}
    if timed is time_parts_interleaved:
        actions = {name: {"part": action} for name, action in actions.items()}
    samples = timed(actions, warmup=2, repeats=3)
    assert list(samples) == ["a", "b"]
    parts = [values["part"] if isinstance(values, dict) else values for values in samples.values()]
    assert parts == [[103, 104, 105], [203, 204, 205]]


def test_parts_stay_together_behind_what_is_prepared_for_their_own_turn():
    notes = []
    samples = time_parts_interleaved(
        {name: _noting(notes, f"forward {name}", f"backward {name}") for name in "xyz"},
        warmup=0,
        repeats=50,
        prepare=lambda name: notes.append(f"prepare {name}"),
        before=lambda: notes.append("|"),
    )
    turns = [notes[i : i + 5] for i in range(0, len(notes), 5)]
    names = [turn[0].removeprefix("prepare ") for turn in turns]
    assert turns == [[f"prepare {name}", "|", f"forward {name}", "|", f"backward {name}"] for name in names]
    rounds = ["".join(names[i : i + 3]) for i in range(0, len(names), 3)]
    assert set(rounds) == set(map("".join, permutations("xyz")))
    assert samples.keys() == set("xyz")
    assert all([*parts] == [f"forward {name}", f"backward {name}"] for name, parts in samples.items())
    assert all(len(seconds) == 50 for parts in samples.values() for seconds in parts.values())


@pytest.mark.parametrize(("calls", "queued"), [(1, "wait | a |"), (3, "wait a | a a a |")])
def test_on_cuda_a_call_goes_ahead_of_several_while_the_device_is_busy(monkeypatch, calls, queued):
    """Events and calls in the order in which a stream gets them."""
    stream = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            stream.append("|")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 6.0

    monkeypatch.setattr(clock.torch.cuda, "Event", Event)
    monkeypatch.setattr(clock.torch.cuda, "synchronize", lambda: stream.append("wait"))
    samples = time_interleaved(_noting(stream, "a"), warmup=0, repeats=1, device="cuda", calls=calls)
    assert " ".join(stream) == queued
    assert samples == {"a": [pytest.approx(0.006 / calls)]}


@pytest.mark.parametrize(("warmup", "repeats", "calls"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_counts_are_refused(warmup, repeats, calls):
    with pytest.raises(ValueError, match="repeats >= 1"):
        time_interleaved({"a": int}, warmup=warmup, repeats=repeats, calls=calls)


def test_nothing_to_time_takes_no_time():
    assert time_interleaved({}, warmup=0, repeats=1, before=pytest.fail) == {}


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


def _meet(cores):
    """Of a rank: the earliest moment that it can have proposed, when it went on, and whose turns it saw."""
    os.cpu_count = lambda: cores  # ranks beyond the cores wait asleep, the others awake
    margin_s = 0.05 * dist.get_rank()
    earliest = time.perf_counter() + margin_s
    start_together(margin_s)
    left = time.perf_counter()
    turns = []
    names = "abcd" if dist.get_rank() == 0 else "dbac"
    time_interleaved(_noting(turns, *names), warmup=1, repeats=10, before=dist.barrier, seed="a point")
    return earliest, left, turns


@pytest.fixture(scope="module", params=[(cores, world_size) for cores in (1, 64) for world_size in (2, 3)], ids=str)
def met(request):
    cores, world_size = request.param
    return run_ranks(_meet, cores, world_size=world_size, timeout_s=60)


def test_no_rank_starts_before_the_latest_moment_that_any_has_proposed(met):
    latest = max(earliest for earliest, _, _ in met)
    assert all(left >= latest for _, left, _ in met)


def test_all_ranks_have_the_same_turns(met):
    first, *others = [turns for _, _, turns in met]
    assert len(first) == 44
    assert all(turns == first for turns in others)
