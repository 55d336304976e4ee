"""The worker of the sharding lab on two ranks, with small models."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from labkit.costs.sharding import sent_bytes, state_bytes
from labkit.costs.transformer import SIZES, parameters_by_part
from labkit.parallel.launch import PointEnd, launch
from labkit.parallel.sharding.implementations import IMPLEMENTATIONS, TORCHS
from labkit.studies.sharding.gate import LARGEST_ERROR
from labkit.studies.sharding.memory import LEAST_PEAK, _seen
from labkit.studies.sharding.step_traffic import TCP
from labkit.studies.sharding.study import STUDY
from labkit.studies.sharding.training import OPTIMIZERS, ShardingPoint, Training
from labkit.studies.sharding.worker import GATHER, measure_point
from tests.cases import thinned
from tests.studies import tiny

OWN = [way for way in IMPLEMENTATIONS if way not in TORCHS]
TINY, WEIGHED = parameters_by_part(tiny.TINY), parameters_by_part(SIZES["nano"])
PARAMETERS = sum(TINY.values())
_SETTINGS = {"context_length": 8, "repeats": 2, "world_size": 2, "backend": "gloo"}
TIMES = ShardingPoint(kind="time", size=tiny.NAME, transport="shared", ways=tuple(IMPLEMENTATIONS), **_SETTINGS)
# of a size at which the system sees a peak
MEMORY = ShardingPoint(kind="memory", size="nano", transport="point_to_point", ways=tuple(IMPLEMENTATIONS), **_SETTINGS)
# What makes each way's ranks equal: without it, parameters are not those of one process.
MISSING = [
    ("ddp", "data_parallel.reducer", "all_reduce"),
    ("zero1", "data_parallel.reducer", "all_reduce"),
    ("zero1", "sharding.gathering", "all_gather"),
    ("zero2", "sharding.reduce_scatter_ddp", "reduce_scatter"),
    ("zero2", "sharding.gathering", "all_gather"),
    ("zero3", "sharding.flat", "reduce_scatter"),
    ("zero3", "sharding.flat", "all_gather"),
    ("zero3", "sharding.gradients", "all_reduce"),
]


def _without_collectives(point):
    """The same point once for each of `MISSING`, that collective left out; and its gate."""
    from importlib import import_module

    for way, module, name in MISSING:
        place = import_module(f"labkit.parallel.{module}")
        whole = getattr(place, name)

        def nothing(vector, *_, whole=whole, **__):
            if str(vector.dtype) == "torch.float64":  # ranks compare notes: nothing to be right or wrong
                whole(vector, *_, **__)

        setattr(place, name, nothing)
        try:
            for row in measure_point(replace(point, ways=(way,))):
                yield row | {"missing": f"{way} without {name}"}
        finally:
            setattr(place, name, whole)


def _without_a_rank(point):
    """The same point once for each of `MISSING` and each rank: it sends nothing, or not the last eighth of a sum."""
    from importlib import import_module

    from torch import distributed as dist

    for way, module, name in MISSING:
        place = import_module(f"labkit.parallel.{module}")
        whole = getattr(place, name)
        for left_out in range(dist.get_world_size()):

            def without(vector, *arguments, whole=whole, left_out=left_out, **options):
                if vector.dtype != torch.float64 and dist.get_rank() == left_out:
                    of_which = 1 if whole.__name__ == "all_gather" else 8  # a rank sends its own part of it, wherever
                    vector.view(-1)[-max(1, vector.numel() // of_which) :] = 0
                return whole(vector, *arguments, **options)

            setattr(place, name, without)
            try:
                for row in measure_point(replace(point, ways=(way,))):
                    yield row | {"missing": f"rank {left_out} in {name} of {way}"}
            finally:
                setattr(place, name, whole)


def _with_other_calls(point):
    """DDP with an all-reduce more, and with each of its own done twice; ZeRO-2 with an all-reduce that it has not."""
    from importlib import import_module

    from labkit.parallel.collectives import all_reduce

    averaging = import_module("labkit.parallel.data_parallel.reducer")
    scattering = import_module("labkit.parallel.sharding.reduce_scatter_ddp")

    def also(place, name, other):
        whole = getattr(place, name)

        def both(vector, *arguments, **options):
            found = whole(vector, *arguments, **options)
            other(whole, vector, *arguments, **options)
            return found

        return place, name, whole, both

    def again(whole, *arguments, **options):
        whole(*arguments, **options)

    def extra(_, vector, *__, **___):
        all_reduce(vector.clone(), op="mean")

    cases = [
        ("ddp", "doubled", also(averaging, "all_reduce", again)),
        ("zero2", "extra", also(scattering, "reduce_scatter", extra)),
    ]
    for way, case, (place, name, whole, both) in cases:
        setattr(place, name, both)
        try:
            for row in measure_point(replace(point, ways=(way,))):
                yield row | {"case": case}
        finally:
            setattr(place, name, whole)


def _by_socket(point):
    """A step of each of labkit's ways by messages: bytes by its collectives, and by the sockets that carried them."""
    import torch.distributed as dist

    from labkit.parallel.traffic import recorded_traffic, tcp_bytes_sent

    for way in point.ways:
        training = Training(way, point, "cpu")
        training.run()
        dist.barrier()
        before = tcp_bytes_sent()
        with recorded_traffic() as traffic:
            training.run()
        dist.barrier()  # behind what is still in the sockets' buffers
        yield {"way": way, "by_tcp": tcp_bytes_sent() - before, "counted": sum(call.sent_bytes for call in traffic)}


def _carry_out(task):
    yield from tiny.with_tiny(*task)


def _measure(*tasks, world_size=2):
    """Rows of rank 0 by task; one group of ranks goes through them all."""
    rows = [[] for _ in tasks]
    for item in launch(_carry_out, tasks, world_size=world_size, timeout_s=240):
        if isinstance(item, PointEnd):
            assert item.status == "ok", item.failure
        elif item.rank == 0:
            rows[item.index].append(item.values)
    return rows


@cache
def _rows():
    return _measure((measure_point, TIMES), (measure_point, MEMORY))


def test_every_way_passes_the_gate_and_is_timed_in_parts():
    times, _ = _rows()
    assert {row["check"] for row in times} == {"ok"}
    parts = {(row["way"], row["part"]) for row in times if "part" in row}
    assert parts >= {(way, part) for way in IMPLEMENTATIONS for part in ("forward", "backward", "optimizer")}
    assert {way for way, part in parts if part == "waiting for gathers"} == {"zero1", "zero2", "zero3"}
    assert (GATHER, GATHER) in parts
    assert all(len(row["seconds"]) == 2 for row in times if "seconds" in row)
    for row in times:
        if "gathers" in row:
            at_most = zip(row["in_time"], row["gathers"], row["seconds"], row["gathering_s"], strict=True)
            assert all(0 <= some <= all_ and 0 <= waited <= took for some, all_, waited, took in at_most)


def test_ranks_send_the_bytes_of_the_formulas_to_the_byte():
    times, _ = _rows()
    for way in OWN:
        rows = [row for row in times if row["way"] == way and "collective" in row and row["collective"] != "notes"]
        expected = sent_bytes(4 * PARAMETERS, way, 2, replicated_bytes=4 * TINY["norms"])
        assert sum(row["sent_bytes"] for row in rows) == expected
        assert all(row["sent_bytes"] == row["formula_bytes"] for row in rows)


def test_what_torchs_ways_send_is_counted_at_their_sockets_as_labkits_are_by_messages():
    times, _ = _rows()
    sent = {row["way"]: row["sent_bytes"] / (2 * PARAMETERS) for row in times if row.get("collective") == TCP}
    assert sent["torch_ddp"] == pytest.approx(2, rel=0.02)  # in units of (p-1)/p of the parameters' bytes
    assert sent["torch_zero1"] == pytest.approx(3, rel=0.02)
    assert sent["torch_zero3"] > 3
    (rows,) = _measure((_by_socket, replace(TIMES, ways=tuple(OWN), transport="point_to_point")))
    assert [row for row in rows if not row["counted"] <= row["by_tcp"] <= 1.02 * row["counted"]] == []
    assert len(rows) == len(OWN)


def test_every_optimizer_of_the_sweep_passes_the_gate():
    points = [replace(TIMES, ways=("ddp", "zero1"), optimizer=optimizer) for optimizer in OPTIMIZERS]
    for rows in _measure(*((measure_point, point) for point in points)):
        assert {row["check"] for row in rows} == {"ok"}
        assert max(row["error"] for row in rows if "error" in row) < LARGEST_ERROR


@pytest.mark.parametrize("size", [TIMES.size, "nano"])  # shown to all in one piece, and sent in several
def test_three_ranks_send_what_the_formulas_say_though_a_third_is_no_whole_number(size):
    point = replace(TIMES, size=size, ways=tuple(OWN), world_size=3, repeats=1)
    (rows,) = _measure((measure_point, point), world_size=3)
    assert {row["check"] for row in rows} == {"ok"}
    assert {row["way"] for row in rows if "seconds" in row} >= set(OWN)


def test_a_call_that_no_formula_has_is_seen_and_gets_no_time():
    (rows,) = _measure((_with_other_calls, replace(TIMES, repeats=1)))
    assert not any("seconds" in row for row in rows if row["way"] != GATHER)
    calls = {(row["case"], row["collective"]): row for row in rows if "collective" in row}
    doubled, extra = calls["doubled", "all_reduce"], calls["extra", "all_reduce"]
    assert doubled["sent_bytes"] == 2 * doubled["formula_bytes"]
    assert extra["sent_bytes"] > 0 == extra["formula_bytes"]
    assert all("all_reduce" in row["check"] for row in calls.values())


def test_ranks_hold_the_bytes_of_the_formulas_and_need_more_at_the_peak():
    _, memory = _rows()
    assert {row["check"] for row in memory} == {"ok"}
    for row in memory:
        held = sum(row[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer"))
        assert row["peak_bytes"] is None or row["peak_bytes"] >= LEAST_PEAK * held
    for row in (row for row in memory if row["moment"] == "after step"):
        parts = {part: row[f"{part}_bytes"] for part in ("parameters", "gradients", "optimizer")}
        stage = row["way"].removeprefix("torch_")
        whole = WEIGHED["norms"] if row["way"] == "zero3" else 0
        for part, n_bytes in state_bytes(sum(WEIGHED.values()), stage, 2, replicated=whole).items():
            steps = 4 * 39 if part == "optimizer" else 0  # one number per tensor
            assert n_bytes <= parts[part] <= n_bytes * (1.001 if row["way"] in TORCHS else 1) + steps


def test_a_missing_collective_is_seen_and_gets_no_time():
    (rows,) = _measure((_without_collectives, replace(TIMES, repeats=1)))
    for way, _, name in MISSING:
        found = [row for row in rows if row["missing"] == f"{way} without {name}" and row["way"] == way]
        assert found
        assert all(row["error"] > LARGEST_ERROR and row["check"] != "ok" for row in found), name
        assert not any("seconds" in row for row in found)


@pytest.mark.parametrize("world_size", thinned([2, 3], lambda world_size: world_size == 2))
def test_each_rank_left_out_of_a_part_is_seen_and_gets_no_time(world_size):
    point = replace(TIMES, repeats=1, world_size=world_size)
    (rows,) = _measure((_without_a_rank, point), world_size=world_size)
    gates = {}
    for row in rows:
        if row["way"] != GATHER:
            gates.setdefault(row["missing"], set()).add(row["check"] != "ok")
    assert len(gates) == world_size * len(MISSING)
    assert {missing for missing, is_wrong in gates.items() if is_wrong != {True}} == set()


def test_a_peak_that_the_system_lost_sight_of_is_left_out_and_is_no_wrong_result():
    held = {"parameters_bytes": 3 * 2**20, "optimizer_bytes": 2**20}
    assert _seen("after step", 5 * 2**20, held) == {"peak_bytes": 5 * 2**20}
    lost = _seen("after step", 2**20, held)
    assert lost["peak_bytes"] is None
    assert "after step" in lost["not_measured"]
    assert "check" not in lost


def test_what_a_cpu_cannot_do_is_skipped_by_name(cpu_machine):
    points = STUDY.points(STUDY.profiles["smoke"], cpu_machine)
    reasons = [STUDY.skip_reason(point, cpu_machine) for point in points]
    assert [point.backend for point, reason in zip(points, reasons, strict=True) if reason] == ["nccl"]
    assert "CUDA" in next(filter(None, reasons))


@pytest.fixture
def cpu_machine():
    from labkit.machine import describe_machine

    return describe_machine().model_copy(update={"gpus": []})
