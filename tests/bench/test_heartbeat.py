"""The heartbeat beats between rounds and nowhere else, seldom, and changes nothing of what is measured."""

from types import SimpleNamespace

import pytest
import torch

from labkit.bench import heartbeat
from labkit.bench.clock import time_interleaved, time_parts_interleaved
from labkit.bench.heartbeat import Heartbeat, heartbeat_heard, listening
from labkit.lab.runs.heard import heard

PARTS = ("forward", "backward")


@pytest.fixture
def notes(monkeypatch):
    """What happened in order; every beat that is asked for is taken."""
    found = []
    monkeypatch.setattr(heartbeat, "MOST_OF_TIME", float("inf"))
    monkeypatch.setattr(Heartbeat, "_work", lambda self: found.append("beat"))
    return found


def _turns(notes):
    return {name: {part: lambda note=f"{name} {part}": notes.append(note) for part in PARTS} for name in "ab"}


def test_it_beats_before_a_round_and_never_within_a_turn(notes):
    with listening() as heart:
        notes.clear()
        time_parts_interleaved(_turns(notes), warmup=1, repeats=2, before=lambda: notes.append("|"))
    assert [place for place, note in enumerate(notes) if note == "beat"] == [
        0,
        9,
        18,
    ]  # 2 turns of 2 parts, each after |
    assert [beat[:2] for beat in heart.beats] == [(0, 0), (1, -1), (1, 0), (1, 1)]


def test_where_nobody_listens_nothing_beats(notes):
    time_parts_interleaved(_turns(notes), warmup=0, repeats=3)
    assert "beat" not in notes
    with listening():
        assert heartbeat_heard() is not None
    assert heartbeat_heard() is None


def test_a_worker_of_new_ranks_starts_its_process_itself(notes):
    def worker(point):
        notes.append("starts")
        yield {"seconds": time_interleaved({"a": lambda: None}, warmup=0, repeats=2)["a"]}

    for is_new, expected in ((True, ["starts"]), (False, ["beat", "beat", "starts", "beat", "beat", "beat"])):
        notes.clear()
        list(heard(worker, SimpleNamespace(fresh_ranks=is_new)))
        assert notes == expected


def test_a_beat_after_the_last_round_is_near_its_last_sample(notes):
    with listening() as heart:
        time_interleaved({"a": lambda: None}, warmup=0, repeats=3)
        heart.beat()
    assert heart.beats[-1][:2] == (1, 3)


def test_beats_take_a_fiftieth_of_the_time_at_most(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(heartbeat.time, "perf_counter", lambda: now[0])

    def work(self):
        now[0] += 0.001

    monkeypatch.setattr(Heartbeat, "_work", work)
    heart = Heartbeat()
    begun = now[0]
    for number in range(10_000):
        now[0] += 0.0005
        heart.beat(number)
    after_the_first = heart.beats[1:]
    assert sum(seconds for *_, seconds in after_the_first) <= heartbeat.MOST_OF_TIME * (now[0] - begun)
    assert len(after_the_first) >= 0.8 * heartbeat.MOST_OF_TIME * (now[0] - begun) / 0.001


def test_random_numbers_threads_and_gradients_are_the_measurements_own():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    heart = Heartbeat()
    assert torch.equal(torch.get_rng_state(), state)
    assert not heart._products.requires_grad
    heart._next, beats = 0.0, len(heart.beats)
    try:
        torch.set_num_threads(threads + 1)
        heart.beat()
        assert len(heart.beats) == beats  # of other threads it would not be comparable
    finally:
        torch.set_num_threads(threads)
    heart.beat()
    assert len(heart.beats) == beats + 1


def test_a_row_is_of_the_last_call_if_it_has_as_many_samples():
    with listening() as heart:
        assert heart.call_of({"seconds": [1.0, 1.0]}) is None
        time_interleaved({"a": lambda: None}, warmup=0, repeats=1)
        samples = time_interleaved({"a": lambda: None}, warmup=0, repeats=3)
        assert heart.call_of({"name": "a", "seconds": samples["a"]}) == 2
        assert heart.call_of({"peak_bytes": 3}) is None
        assert heart.call_of({"passes": [1.0, 2.0]}) is None
