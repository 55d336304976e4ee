"""The clock's order of events, not durations."""

import time
from collections import Counter
from functools import partial
from itertools import count, pairwise, permutations

import pytest
import torch
import torch.distributed as dist

from labkit.bench import clock
from labkit.bench.clock import (
    Stopwatch,
    time_interleaved,
    time_once,
    time_parts_interleaved,
    turn_order,
)
from labkit.parallel.messages import gather_json
from tests.parallel.shared_ranks import on_ranks


def _noting(notes, *names):
    return {name: partial(notes.append, name) for name in names}


def test_every_order_is_about_equally_likely_and_follows_from_seed_and_round_alone():
    rounds = 6000
    orders = ["".join(turn_order("abc", number, seed="a point")) for number in range(rounds)]
    counts = Counter(orders)
    after = Counter(pairwise(orders))
    # a rotation would have 6
    assert (counts.keys(), len(after)) == (set(map("".join, permutations("abc"))), 36)
    assert all(
        abs(count - rounds / 6) < 4 * (rounds / 6 * 5 / 6) ** 0.5 for count in counts.values()
    )
    assert all(abs(count - rounds / 36) < 4 * (rounds / 36) ** 0.5 for count in after.values())
    assert (
        len({str([turn_order("abcd", n, seed=seed) for n in range(20)]) for seed in (0, 1, "f00d")})
        == 3
    )
    assert turn_order("abcd", 7, seed="f00d") == turn_order("dbca", 7, seed="f00d")


@pytest.mark.parametrize("timed", [time_interleaved, time_parts_interleaved])
def test_samples_belong_to_their_name_in_the_order_of_rounds_without_warm_up(timed, monkeypatch):
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
    parts = {
        name: values["part"] if isinstance(values, dict) else values
        for name, values in samples.items()
    }
    assert list(parts.items()) == [("a", [103, 104, 105]), ("b", [203, 204, 205])]


def test_parts_stay_together_behind_what_is_prepared_for_their_turn():
    notes = []
    samples = time_parts_interleaved(
        {name: _noting(notes, f"forward {name}", f"backward {name}") for name in "xyz"},
        warmup=1,
        repeats=49,
        prepare=lambda name: notes.append(f"prepare {name}"),
        before=lambda: notes.append("|"),
        calls=2,
    )
    turns = [notes[i : i + 7] for i in range(0, len(notes), 7)]
    names = [turn[0].removeprefix("prepare ") for turn in turns]
    parts = [["|", *[f"{part} {name}"] * 2] for name in names for part in ("forward", "backward")]
    assert [note for turn in turns for note in turn[1:]] == [
        note for part in parts for note in part
    ]
    assert {"".join(names[i : i + 3]) for i in range(0, len(names), 3)} == set(
        map("".join, permutations("xyz"))
    )
    assert all([*of] == [f"forward {name}", f"backward {name}"] for name, of in samples.items())
    assert all(
        len(seconds) == 49 and min(seconds) >= 0
        for of in samples.values()
        for seconds in of.values()
    )


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
    samples = time_interleaved(
        _noting(stream, "a"), warmup=0, repeats=1, device="cuda", calls=calls
    )
    assert " ".join(stream) == queued
    assert samples == {"a": [pytest.approx(0.006 / calls)]}


def test_a_single_call_waits_for_a_cuda_device_however_it_is_named(monkeypatch):
    waits = []
    monkeypatch.setattr(clock.torch.cuda, "synchronize", lambda: waits.append(None))
    results = [
        time_once(lambda: 5, device)[0]
        for device in ("cpu", "cuda", "cuda:1", torch.device("cuda"))
    ]
    assert (results, len(waits)) == ([5] * 4, 3)


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"repeats": 0}, {"calls": 0}])
def test_impossible_counts_and_limits_are_refused_before_anything_runs(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        time_interleaved({"a": pytest.fail}, **{"warmup": 0, "repeats": 1} | wrong)
    assert time_interleaved({}, warmup=0, repeats=1, before=pytest.fail) == {}


def test_a_stopwatch_keeps_its_laps():
    watch = Stopwatch()
    for _ in range(3):
        with watch.lap():
            time.sleep(0.002)
    assert [lap >= 0.002 for lap in watch.seconds] == [True] * 3


@on_ranks(2)
def test_ranks_have_the_same_turns():
    turns = []
    names = "abcd" if dist.get_rank() == 0 else "dbac"
    time_interleaved(
        _noting(turns, *names), warmup=1, repeats=10, before=dist.barrier, seed="a point"
    )
    assert len(turns) == 44
    assert gather_json(turns) == [turns, turns]
