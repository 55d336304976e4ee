"""How steady the machine was: slow points and freak moments are found, flagged and told; a steady run is silent."""

from contextlib import closing
from functools import partial

import pytest

from labkit.bench.clock import time_interleaved
from labkit.lab.pages.steadiness import (
    pulse_record,
    slowdown_by_lab,
    steadiness_notes,
    steadiness_row,
    steadiness_sentence,
)
from labkit.lab.runs.heard import heard, split
from labkit.lab.runs.measure import measure
from labkit.lab.runs.steadiness import steadiness_of
from labkit.lab.runs.store import Run
from labkit.lab.runs.writer import RunWriter
from labkit.machine.load import Load, LoadMeter
from labkit.parallel.launch import Row, launch
from tests.lab.fake_study import FAKE, FakeConfig
from tests.lab.test_store import POINTS, _header

CORES = 2
QUIET = {"average": 0.0, "other_measurements": 0, "busy_cores": 0.0, "stolen_cores": 0.0}


def _end(*by_rank, world_size=1, threads=1, **load):
    """An end record with beats of these milliseconds, before the rounds 0, 1, ... of the clock's first call."""
    beats = [[(1, number, ms / 1000) for number, ms in enumerate(of_rank)] for of_rank in by_rank]
    facts = {"world_size": world_size, "threads": threads}
    return {"status": "ok", "facts": facts, "beats": beats, "load": QUIET | load}


def test_a_point_is_compared_with_those_of_as_many_ranks_and_threads():
    ends = {
        "fast": _end([1.0, 1.0, 1.0]),
        "slow": _end([1.7, 1.7, 5.0]),
        "two ranks": _end([2.5] * 3, [2.4] * 3, world_size=2),
        "two slow ranks": _end([2.5] * 3, [5.0] * 3, world_size=2),  # the slowest rank counts
        "one freak moment": _end([9.0, 1.0]),
    }
    found = steadiness_of(ends, CORES)
    assert found.slow == {"slow": pytest.approx(1.7), "two slow ranks": pytest.approx(2.0)}


def test_ranks_that_share_cores_say_nothing_of_the_machine():
    found = steadiness_of({"a": _end(*[[1.0] * 3] * 4, world_size=4), "b": _end(*[[9.0] * 3] * 4, world_size=4)}, CORES)
    assert (found.pulse_s, found.freak) == ({}, {})


def test_a_point_beside_which_others_took_cores_is_flagged():
    ends = {"alone": _end([1.0]), "other": _end([1.0], busy_cores=0.6), "stolen": _end([1.0], stolen_cores=0.7)}
    assert steadiness_of(ends, CORES).flagged == {"other", "stolen"}


@pytest.fixture
def run(tmp_path):
    with RunWriter.create(tmp_path, _header()) as writer:
        for point, (first, second) in zip(POINTS[:2], [(1.0, 4.0), (2.0, 2.0)], strict=True):
            writer.add_row(point, 0, {"kind": "a", "seconds": [1.0] * 5}, 1)
            writer.add_row(point, 0, {"kind": "of no clock", "bytes": 3})
            beats = [[(0, 0, 1e-3), (1, 0, first / 1e3), (1, 1, first / 1e3), (1, 3, second / 1e3)]]
            facts = {"world_size": 1, "threads": 1}
            writer.end_point(point, "ok", load=Load(**QUIET), beats=beats, facts=facts)
    return Run.load(writer.path)


def test_samples_of_a_freak_moment_are_marked_in_the_frame(run):
    frame = run.frame()
    of_first = frame[(frame["size"] == 1) & (frame["kind"] == "a")].sort_values("repeat")
    assert of_first["is_freak"].tolist() == [False, False, True, True, False]  # around the beat before round 3
    assert frame.loc[frame["kind"] == "of no clock", "is_freak"].isna().all()


def test_the_page_names_slow_points_and_a_steady_run_is_silent(run):
    (note,) = steadiness_notes(run)
    assert "2.0 times slower during 1 of 3 points" in note
    assert "2" in steadiness_row(run)
    quiet = dict(run._ends)
    quiet[POINTS[1].id] = quiet[POINTS[0].id]
    steady = Run(run.path, run.header, [], quiet)
    assert steadiness_notes(steady) == []


def test_slow_points_are_told_apart_by_what_was_measured_and_not_by_how(run):
    slow_one = {"size": "nano", "backend": "nccl", "keep_trace": True, "warmup": 2}
    settings = [slow_one, slow_one | {"backend": "gloo", "keep_trace": False, "warmup": 1}]
    planned = run.header.planned
    told = dict(zip(planned, settings, strict=False))
    header = run.header.model_copy(update={"planned": planned | told})
    slow = dict(run._ends)
    slow[POINTS[0].id], slow[POINTS[1].id] = slow[POINTS[1].id], slow[POINTS[0].id]  # the one with a trace
    (note,) = steadiness_notes(Run(run.path, header, [], slow))
    assert "with a trace" in note
    assert "nccl" in note
    assert "True" not in note
    assert "warm-up" not in note


def test_labs_are_compared_by_their_pulse_and_an_older_page_is_left_out(run):
    (record,) = pulse_record(run)
    assert (record["ranks"], record["threads"], record["best_s"]) == (1, 1, 1e-3)
    fast = [{"ranks": 1, "threads": 1, "best_s": 1e-3, "median_s": 1e-3}]
    slow = [{"ranks": 1, "threads": 1, "best_s": 1.7e-3, "median_s": 1.7e-3}]
    slowdown = slowdown_by_lab({"A": fast, "B": slow, "older": []})
    assert slowdown == {"A": 1.0, "B": pytest.approx(1.7)}
    assert "1.7 times during B" in steadiness_sentence(slowdown)
    assert "steady" in steadiness_sentence({"A": 1.0, "B": 1.04})
    assert steadiness_sentence({}) is None


def test_every_rank_sends_its_beats_and_its_rows_say_their_call():
    def worker(point):
        for repeats in point:
            yield {"seconds": time_interleaved({"a": lambda: None}, warmup=0, repeats=repeats)["a"]}
        yield {"half": 1}

    with closing(launch(partial(heard, worker), [(2, 3)], world_size=2)) as items:
        rows = [(item.rank, *split(item.values)) for item in items if isinstance(item, Row)]
    for rank in (0, 1):
        *own, last = ([call, beats, len(values)] for of, values, call, beats in rows if of == rank)
        assert own == [[1, None, 1], [2, None, 1], [None, None, 1]]
        assert last[1][0][:2] == [0, 0]
        assert last[1][0][2] > 0
        assert last[2] == 0


def test_a_run_records_beats_and_load_of_every_point(tmp_path):
    run = measure(FAKE, FakeConfig(actions=["fine", "raise"], world_size=1), profile="smoke", directory=tmp_path)
    fine, failed = (run._ends[point] for point in run.header.planned)
    assert fine["beats"][0][0][2] > 0
    assert "beats" not in failed
    assert fine["load"]["average"] >= 0
    assert "busy_cores" in LoadMeter().load(at_least_s=0.0).model_dump(exclude_none=True)
