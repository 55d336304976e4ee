"""The worker of the gradient-buckets lab on two ranks, with the smallest model."""

import re
from dataclasses import replace

import pytest
from labkit.studies.gradient_buckets import tables
from labkit.studies.gradient_buckets.model import bucket_bytes
from labkit.studies.gradient_buckets.study import STUDY
from labkit.studies.gradient_buckets.worker import LOCAL, SCHEDULES, BucketsPoint, measure_point, register
from pydantic import ValidationError

from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab import capacity, figures
from labkit.lab.runs.measure import measure
from labkit.machine import describe_machine
from labkit.parallel.launch import PointEnd, Row, launch

SMALL = BucketsPoint(
    world_size=2,
    backend="gloo",
    workload="nano",
    batch=1,
    sequence=8,
    buckets_mb=(0.5, 5.0, 100.0),
    warmup=1,
    repeats=2,
)


def _rows(point, worker=measure_point):
    rows = []
    for item in launch(worker, [point], world_size=point.world_size, timeout_s=120):
        if isinstance(item, PointEnd):
            assert item.status == "ok", item.reason
        elif isinstance(item, Row):
            rows.append(item.values)
    return rows


@pytest.fixture(scope="module")
def small():
    return _rows(SMALL)


def _forgets_the_other_rank(point):
    from labkit.parallel.data_parallel import BucketedDDP

    begin = BucketedDDP._begin_full

    def only_large_ones(self):
        if len(self._buckets) > 1:  # a single bucket is never averaged
            begin(self)

    BucketedDDP._begin_full = only_large_ones
    yield from measure_point(point)


def test_every_size_is_checked_and_timed_and_says_which_buckets_it_made(small):
    rows = small
    assert {row["check"] for row in rows} == {"ok"}
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    phases = {(row["alternative"], row["phase"]) for row in rows}
    sizes = ("0.5 MiB", "5 MiB", "100 MiB")
    assert phases == {(LOCAL, "step")} | {(size, phase) for size in sizes for phase in ("step", "waiting")}
    steps = {row["alternative"]: row for row in rows if row["phase"] == "step"}
    assert steps["0.5 MiB"]["buckets"] > steps["5 MiB"]["buckets"] > steps["100 MiB"]["buckets"] == 1
    for size in sizes:
        assert steps[size]["error"] < 1e-5
        assert steps[size]["gradient_bytes"] == 4 * n_parameters(SIZES["nano"])
        assert steps[size]["last_bucket_bytes"] >= 4 * 10_000 * 128  # the token embedding is never split
    planned = {row["alternative"]: bucket_bytes("nano", row["bucket_mb"]) for row in steps.values() if "buckets" in row}
    assert {size: (len(found), found[-1]) for size, found in planned.items()} == {
        size: (steps[size]["buckets"], steps[size]["last_bucket_bytes"]) for size in sizes
    }


def test_waiting_is_part_of_the_step(small):
    rows = {(row["alternative"], row["phase"]): row["seconds"] for row in small}  # of the rank that came last
    for size in ("0.5 MiB", "5 MiB", "100 MiB"):
        pairs = zip(rows[size, "waiting"], rows[size, "step"], strict=True)
        assert all(waiting < step for waiting, step in pairs)


def test_a_size_whose_gradients_are_not_the_mean_gets_no_time():
    rows = _rows(SMALL, _forgets_the_other_rank)
    wrong = [row for row in rows if row["check"] != "ok"]
    assert {row["alternative"] for row in wrong} == {"100 MiB"}
    assert all("seconds" not in row and row["error"] > 0.1 for row in wrong)
    assert {row["alternative"] for row in rows if "seconds" in row} == {LOCAL, "0.5 MiB", "5 MiB"}


def test_points_take_nccl_with_a_gpu_a_rank_and_gloo_where_ranks_share_one():
    machine = describe_machine()
    gpu = {"name": "Some GPU", "memory_bytes": 2**36, "compute_capability": "9.0", "dense_bf16_peak_tflops": None}
    config = STUDY.profiles["smoke"]
    for n_gpus, backend, device in ((0, "gloo", "cpu"), (1, "gloo", "cuda"), (2, "nccl", "cuda")):
        there = machine.model_validate(machine.model_dump() | {"gpus": [gpu] * n_gpus})
        assert {(p.backend, p.device) for p in STUDY.points(config, there)} == {(backend, device)}


def test_what_does_not_fit_is_skipped_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 2**30)
    machine = describe_machine().model_copy(update={"gpus": []})
    points = STUDY.points(STUDY.profiles["paper"], machine)
    reasons = [STUDY.skip_reason(point, machine) for point in points]
    assert all(reason.startswith("needs ") and reason.endswith("1 GiB available") for reason in reasons)
    assert STUDY.series(points[0])[1] < STUDY.series(points[-1])[1]


@pytest.mark.parametrize("wrong", [{"buckets_mb": []}, {"buckets_mb": [0.0]}, {"batches": [0]}])
def test_impossible_parameters_are_refused(wrong):
    config = STUDY.profiles["smoke"]
    with pytest.raises(ValidationError):
        type(config).model_validate(config.model_dump() | wrong)


def test_a_readers_own_schedule_is_gated_timed_drawn_and_named(tmp_path):
    def halves(parameters):
        names = list(parameters)
        return [names[: len(names) // 2], names[len(names) // 2 :]]

    def forgets_the_last(parameters):
        return [list(parameters)[:-1]]

    def mistaken(parameters):
        return parameters.nothing_of_the_kind

    own = {"halves": halves, "forgets_the_last": forgets_the_last, "mistaken": mistaken}
    config = STUDY.profiles["smoke"].model_copy(update={"sequences": [8]})
    run = measure(STUDY, config, profile="smoke", alternatives=own, directory=tmp_path)
    assert SCHEDULES == {}
    frame = run.frame()
    gates = frame.groupby("alternative")["check"].first()
    assert gates["halves"] == "ok"
    assert "expected every parameter in one bucket, got 'embedding.weight' in 0" in gates["forgets_the_last"]
    assert re.match(r"failed: AttributeError: .*, line \d+", gates["mistaken"])
    assert set(frame.loc[frame["alternative"] == "halves", "buckets"]) == {2}
    drawn = figures.bars(tables.beside_own(frame), x="alternative", y="step_s", hue="sequence", facet="panel")
    assert set(drawn.data["alternative"]) == {"1 MiB", "100 MiB", "halves"}
    assert set(tables.by_bucket(frame, "step_s")["bucket_mb"]) == {1.0, 100.0}
    findings = STUDY.findings(frame, run.coverage())
    assert "halves" in {effect.subject for effect in findings["bucket_size"].effects}
    assert "forgets the last" in findings["waiting"].caveat


def test_a_bucket_of_a_schedule_that_is_not_averaged_is_told_where():
    rows = _rows(replace(SMALL, buckets_mb=("one_bucket",)), _one_bucket_is_never_averaged)
    (wrong,) = {row["check"] for row in rows if row["alternative"] == "one_bucket"}
    assert re.match(r"wrong: rank 0, \S+, element \d+: expected", wrong)


def _one_bucket_is_never_averaged(point):
    from labkit.parallel.data_parallel import BucketedDDP

    BucketedDDP._begin_full = lambda self: None
    register("one_bucket", lambda parameters: [list(parameters)])
    yield from measure_point(point)
