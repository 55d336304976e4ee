"""What a rank measures of an all-reduce: gate first, and a wrong algorithm gets no time."""

import re
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from labkit.studies.all_reduce.study import STUDY, AllReduceConfig
from labkit.studies.all_reduce.transports import ROUTES, alternative

from labkit.lab import figures
from labkit.lab.config import ParameterError
from labkit.lab.point import by_ranks
from labkit.lab.runs.measure import measure
from labkit.machine import describe_machine
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.launch import Row, launch
from labkit.parallel.transport import build
from labkit.parallel.transport.base import SharedMemoryUnavailable
from labkit.parallel.transport.shared_memory import SharedTransport
from labkit.studies.all_reduce import phases, tables, transports
from labkit.studies.all_reduce.worker import AllReducePoint, measure_point
from tests.lab.fake_study import FAKE

SMALL = AllReducePoint(
    world_size=2,
    backend="gloo",
    sweep="sizes",
    n_elements=1000,
    algorithms=("torch", *transports.ALGORITHMS, "chosen"),
    warmup=1,
    repeats=3,
)


def _broken(tensor, group=None, op="mean", transport=None):
    """Leaves out the other rank's contribution."""


def _measure_with_a_broken_ring(point):
    transports.ALGORITHMS = {**transports.ALGORITHMS, "ring": _broken}
    yield from measure_point(point)


def _measure_with_half_a_phase(point):
    """A reduce-scatter that adds nothing, and an all-gather that brings nothing."""
    phases.reduce_scatter = phases.all_gather = _broken
    yield from measure_point(point)


def _rows(measure, point):
    with closing(launch(measure, [point], world_size=point.world_size, timeout_s=60)) as events:
        seen = list(events)
    assert seen[-1].status == "ok", seen[-1].reason
    return [event.values for event in seen if isinstance(event, Row)]


def test_phases_alone_are_checked_timed_and_their_bytes_counted():
    point = replace(SMALL, sweep="phases", n_elements=100_001, algorithms=())
    rows = _rows(measure_point, point)
    alone = {(phase, route) for phase in phases.PHASES for route in ("torch", "messages", "shared")}
    assert {(row["collective"], row["transport"]) for row in rows} == alone
    for row in rows:
        assert row["check"] == "ok"
        assert len(row["seconds"]) == SMALL.repeats
        assert row["formula_bytes"] == 4 * 50_000
        if row["transport"] != "torch":
            assert row["sent_bytes"] == row["formula_bytes"]
        else:  # its reduce-scatter is an all-reduce per rank, or should be half of one
            assert row["sent_bytes"] >= row["formula_bytes"]
    for row in _rows(_measure_with_half_a_phase, point):
        assert (row["check"] == "ok") == (row["transport"] == "torch") == ("seconds" in row)


def test_every_alternative_is_checked_and_timed_on_every_rank():
    rows = _rows(measure_point, SMALL)
    assert sorted(row["algorithm"] for row in rows) == sorted(2 * list(SMALL.algorithms))
    for row in rows:
        assert row["check"] == "ok"
        assert row["error"] < 1e-6
        assert len(row["seconds"]) == SMALL.repeats
        assert all(second > 0 for second in row["seconds"])
        assert row["n_bytes"] == 4000


def test_a_wrong_algorithm_gets_no_time_and_the_others_do():
    rows = _rows(_measure_with_a_broken_ring, SMALL)
    wrong = [row for row in rows if row["algorithm"] == "ring"]
    assert all("wrong: rank 0, element 0: expected" in row["check"] and "seconds" not in row for row in wrong)
    assert len(wrong) == 2
    assert all("seconds" in row for row in rows if row["algorithm"] != "ring")


def _broken_on_one_rank(tensor, group=None, op="mean", transport=None):
    transports.all_reduce(tensor, group, op)
    if dist.get_rank() == 1:
        tensor[0] += 1


def _measure_with_a_ring_that_is_wrong_on_one_rank(point):
    transports.ALGORITHMS = {**transports.ALGORITHMS, "ring": _broken_on_one_rank}
    yield from measure_point(point)


def test_ranks_agree_on_what_is_wrong():
    rows = _rows(_measure_with_a_ring_that_is_wrong_on_one_rank, SMALL)
    wrong = [row for row in rows if "wrong" in row["check"]]
    assert [row["algorithm"] for row in wrong] == ["ring", "ring"]
    assert all("seconds" in row for row in rows if row not in wrong)


@pytest.mark.parametrize("profile", ["smoke", "quick", "standard", "paper"])
def test_no_point_is_planned_twice_and_neighbors_share_ranks(profile):
    points = STUDY.points(STUDY.profiles[profile], describe_machine())
    assert len({point.id for point in points}) == len(points)
    keys = [(point.backend, point.world_size, point.scheduling, point.session) for point in points]
    changes = sum(before != after for before, after in pairwise(keys))
    assert changes <= 2 * len(set(keys))


def test_scheduling_policies_are_measured_in_both_orders_and_by_other_ranks_each_time():
    points = [
        point for point in STUDY.points(STUDY.profiles["quick"], describe_machine()) if point.sweep == "scheduling"
    ]
    settings = [(point.world_size, point.n_bytes, point.scheduling) for point in points]
    assert settings == settings[::-1]
    assert {settings.count(setting) for setting in settings} == {2}
    half = len(points) // 2
    assert {point.session for point in points[:half]} == {1}
    assert {point.session for point in points[half:]} == {2}


def test_short_all_reduces_are_measured_once_more_by_other_ranks():
    config = STUDY.profiles["quick"].model_copy(update={"twice_up_to_bytes": 64 * 1024})
    sizes = [point for point in STUDY.points(config, describe_machine()) if point.sweep in ("sizes", "transports")]
    turns = Counter(replace(point, session=1) for point in sizes)
    assert all(number == 1 + (point.n_bytes <= 64 * 1024) for point, number in turns.items())
    first, second = (next(point for point in sizes if point.session == turn) for turn in (1, 2))
    alike = [replace(first, session=turn) for turn in (1, 2)]
    assert len(by_ranks(alike)) == 2
    assert sizes.index(second) > max(index for index, point in enumerate(sizes) if point.session == 1)


def test_what_does_not_fit_is_skipped_with_both_sizes():
    machine = describe_machine()
    point = AllReducePoint(world_size=64, backend="gloo", sweep="sizes", n_elements=2**40)
    assert "needs" in STUDY.skip_reason(point, machine)
    assert "available" in STUDY.skip_reason(point, machine)
    nccl = AllReducePoint(world_size=64, backend="nccl", sweep="sizes", n_elements=1)
    assert "NCCL needs a GPU a rank" in STUDY.skip_reason(nccl, machine)


def test_half_an_element_is_not_planned():
    config = AllReduceConfig(world_sizes=[2], sizes_bytes=[1], many_world_sizes=[], many_elements=[])
    assert {point.n_elements for point in STUDY.points(config, describe_machine()) if point.sweep == "sizes"} == {1}


TRANSPORTS = AllReducePoint(
    world_size=2,
    backend="gloo",
    sweep="transports",
    n_elements=20_000,
    algorithms=("torch", *(alternative(name, route) for name in ("chosen", "ring") for route in ROUTES), "floor"),
    warmup=1,
    repeats=3,
)


def test_transports_are_checked_and_timed_beside_the_floor():
    rows = _rows(measure_point, TRANSPORTS)
    assert len(rows) == 2 * len(TRANSPORTS.algorithms)
    assert {(row["algorithm"], row["transport"]) for row in rows} == {
        ("torch", "torch"),
        ("floor", "floor"),
        *((name, route) for name in ("chosen", "ring") for route in ROUTES),
    }
    for row in rows:
        assert len(row["seconds"]) == 3
        assert row["algorithm"] == "floor" or (row["check"] == "ok" and row["error"] < 1e-6)


def _measure_with_broken_shared_memory(point):
    def add_nothing(transport, steps, depth=1):
        pass

    SharedTransport.run = add_nothing
    yield from measure_point(point)


def test_a_transport_that_loses_messages_gets_no_time_and_the_others_do():
    rows = _rows(_measure_with_broken_shared_memory, TRANSPORTS)
    wrong = [row for row in rows if "seconds" not in row]
    assert {row["transport"] for row in wrong} == {"shared"}
    assert all("wrong: rank 0, element 0: expected" in row["check"] for row in wrong)
    assert {row["transport"] for row in rows if row not in wrong} == {"torch", "messages", "floor"}


def _measure_without_shared_memory(point):
    def refuse(patience_s):
        raise SharedMemoryUnavailable("none here")

    build.load = refuse
    yield from measure_point(point)


def test_where_memory_cannot_be_shared_the_rows_say_why():
    rows = _rows(_measure_without_shared_memory, TRANSPORTS)
    refused = [row for row in rows if "seconds" not in row]
    assert {row["transport"] for row in refused} == {"shared"}
    assert all("none here" in row["not_measured"] for row in refused)


def test_a_readers_own_algorithm_is_carried_to_the_ranks_gated_timed_and_named(tmp_path):
    def slow(tensor):
        """The sum, by gathering everything twice."""
        for _ in range(2):
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor)
        tensor.copy_(torch.stack(parts).sum(0))

    def forgets_the_last(tensor):
        whole = tensor.clone()
        dist.all_reduce(whole)
        tensor[:-1] = whole[:-1]

    def mistaken(tensor):
        tensor.nothing_of_the_kind()

    calls = []

    def tires_on_one_rank(tensor):
        """While it is timed: the gate calls it twice."""
        calls.append(dist.get_rank())
        if len(calls) > 2 and calls[0] == 1:
            raise RuntimeError("enough")
        dist.all_reduce(tensor)

    own = {"slow": slow, "forgets_the_last": forgets_the_last, "mistaken": mistaken, "tires": tires_on_one_rank}
    config = STUDY.profiles["smoke"].model_copy(
        update={
            "world_sizes": [2],
            "sizes_bytes": [4096],
            "many_world_sizes": [],
            "transport_world_sizes": [],
            "scheduling_sizes_bytes": [],
            "backends": ["gloo"],
            "algorithms": ["torch", "ring"],
        }
    )
    run = measure(STUDY, config, profile="smoke", alternatives=own, directory=tmp_path)
    assert not set(own) & set(ALGORITHMS)
    frame = run.frame()
    times = tables.times(frame, "sizes")
    assert set(times["algorithm"]) == {"torch", "ring", "slow"}
    gates = frame.dropna(subset="check").drop_duplicates("algorithm").set_index("algorithm")["check"]
    assert re.match(r"wrong: rank \d, element 1023: expected \d+, got \d+", gates["forgets_the_last"])
    assert gates["mistaken"].startswith("failed: AttributeError:")
    assert "line " in gates["mistaken"]
    assert re.match(r"failed on rank 1: RuntimeError: enough, line \d+ of ", gates["tires"])
    assert set(run.coverage()["status"]) == {"ok"}
    finding = STUDY.findings(frame, run.coverage())["algorithms_against_torch"]
    assert "slow" in {effect.subject for effect in finding.effects}
    assert "forgets the last" in finding.caveat
    plot = figures.lines(times, x="n_bytes", y="seconds", hue="algorithm", hue_order=tables.ALGORITHM_ORDER)
    assert "slow" in [text.get_text() for text in plot.figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("study", "alternatives", "expected"),
    [
        (STUDY, {"ring": print}, "expected a name other than"),
        (STUDY, {"mine": 3}, "expected a function"),
        (load_lab("data_parallel"), {"local": print}, "expected a name other than"),
        (FAKE, {"mine": print}, "no place for alternatives"),
    ],
)
def test_an_alternative_that_cannot_be_is_refused_before_anything_runs(study, alternatives, expected, tmp_path):
    with pytest.raises(ParameterError, match=expected):
        measure(study, study.profiles["smoke"], profile="smoke", alternatives=alternatives, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
