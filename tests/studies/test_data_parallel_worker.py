"""The worker of the data-parallel lab on two ranks, with the smallest model."""

import pytest

from labkit.machine import describe_machine
from labkit.parallel.data_parallel.implementations import IMPLEMENTATIONS
from labkit.parallel.launch import PointEnd, Row, launch
from labkit.studies.data_parallel import study as study_module
from labkit.studies.data_parallel.study import STUDY
from labkit.studies.data_parallel.worker import LOCAL, DataParallelPoint, measure_point


def _point(sweep, alternatives, **options):
    fields = {"workload": "nano", "batch": 1, "context_length": 8, "warmup": 1, "repeats": 2, "world_size": 2}
    return DataParallelPoint(sweep=sweep, alternatives=tuple(alternatives), backend="gloo", **(fields | options))


def _wrong_wrapper(point):
    """A wrapper that averages nothing must not be timed."""
    from labkit.parallel.data_parallel import NaiveDDP

    NaiveDDP._finish = lambda self, missing: None
    yield from measure_point(point)


def _measure(point, worker=measure_point):
    rows = []
    for item in launch(worker, [point], world_size=2, timeout_s=120):
        if isinstance(item, PointEnd):
            assert item.status == "ok", item.failure
        elif isinstance(item, Row) and item.rank == 0:
            rows.append(item.values)
    return rows


def test_every_implementation_is_gated_and_timed_in_phases():
    rows = _measure(_point("implementations", [LOCAL, *IMPLEMENTATIONS]))
    assert {row["gate"] for row in rows} == {"ok"}
    assert all(len(row["seconds"]) == 2 for row in rows)
    by_name = {
        name: [row["phase"] for row in rows if row["implementation"] == name] for name in (LOCAL, *IMPLEMENTATIONS)
    }
    for name, phases in by_name.items():
        waiting = [] if name in (LOCAL, "torch") else ["waiting"]
        assert phases == ["forward", "backward", "optimizer", *waiting]


def test_a_wrapper_whose_gradients_are_not_the_mean_gets_no_time():
    rows = _measure(_point("implementations", [LOCAL, "naive", "flat"]), _wrong_wrapper)
    (wrong,) = [row for row in rows if row["implementation"] == "naive"]
    assert wrong["gate"].startswith("wrong: error")
    assert "seconds" not in wrong
    assert any(row["implementation"] == "flat" and row["gate"] == "ok" for row in rows)


def test_alternatives_carry_their_bucket_size():
    rows = _measure(_point("buckets", ["torch@25", "torch@0.5", "bucketed@0.5"], bucket_mb=0.5))
    sizes = {(row["implementation"], row["of_bucket_mb"]) for row in rows}
    assert sizes == {("torch", 25.0), ("torch", 0.5), ("bucketed", 0.5)}


def test_collectives_run_during_backward_for_overlapping_wrappers_and_not_for_the_others():
    """By the profiler's trace, as the page shows it."""
    rows = _measure(_point("timeline", ["naive", "flat", "overlapped", "bucketed@0.5"]))
    during = {}
    for row in rows:
        if row["lane"] == "all-reduce":
            during.setdefault(row["implementation"], []).append(row["during_s"] > 0)
    assert {name: any(some) for name, some in during.items()} == {
        "naive": False,
        "flat": False,
        "overlapped": True,
        "bucketed": True,
    }
    assert {name: len(some) for name, some in during.items() if name != "bucketed"} == {
        "naive": 39,
        "flat": 1,
        "overlapped": 39,
    }
    lanes = [row["lane"] for row in rows if row["implementation"] == "naive"]
    assert set(lanes) == {"forward", "backward", "all-reduce", "optimizer"}


def test_bucketed_needs_no_more_memory_than_torchs_gradient_views():
    rows = _measure(_point("memory", ["torch", "flat", "bucketed"]))
    peak = {row["implementation"]: row["peak_bytes"] for row in rows}
    assert peak["bucketed"] <= 1.01 * peak["torch"]
    assert peak["flat"] > peak["bucketed"]


def test_accumulation_compares_every_with_last():
    rows = _measure(_point("accumulation", ["torch", "bucketed"], micro_batches=2))
    assert [(row["implementation"], row["synchronized"]) for row in rows] == [
        (name, kind) for name in ("torch", "bucketed") for kind in ("every", "last")
    ]


def test_points_take_nccl_with_a_gpu_a_rank_and_gloo_where_ranks_share_one():
    machine = describe_machine()
    gpu = {"name": "Some GPU", "memory_bytes": 2**36, "compute_capability": "9.0", "dense_bf16_peak_tflops": None}
    config = STUDY.profiles["smoke"]
    for n_gpus, backend, device in ((0, "gloo", "cpu"), (1, "gloo", "cuda"), (2, "nccl", "cuda")):
        there = machine.model_validate(machine.model_dump() | {"gpus": [gpu] * n_gpus})
        assert {(p.backend, p.device) for p in STUDY.points(config, there)} == {(backend, device)}


def test_copies_that_do_not_fit_are_skipped_with_what_they_need(monkeypatch):
    monkeypatch.setattr(study_module, "available_memory_bytes", lambda: 2**30)
    machine = describe_machine().model_copy(update={"gpus": []})
    points = STUDY.points(STUDY.profiles["quick"], machine)
    reasons = [STUDY.skip_reason(point, machine) for point in points]
    assert reasons[0] == "7 copies need 4.96 GiB, 1 GiB available"


def test_a_point_refuses_a_device_that_is_not_there():
    machine = describe_machine().model_copy(update={"gpus": []})
    assert STUDY.skip_reason(_point("memory", ["torch"], device="cuda"), machine) == (
        "needs a CUDA device, and there is none"
    )


@pytest.mark.parametrize(("text", "name", "size"), [("torch@5", "torch", 5.0), ("naive", "naive", 25.0)])
def test_names_of_alternatives(text, name, size):
    from labkit.studies.data_parallel.worker import split_name

    assert split_name(text) == (name, size)
