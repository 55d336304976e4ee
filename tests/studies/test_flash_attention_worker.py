"""What is measured at one point of the FlashAttention lab, sweep by sweep, and the plan."""

from dataclasses import replace

import pytest
import torch

from labkit.lab.point import by_ranks
from labkit.machine import describe_machine
from labkit.studies.flash_attention import worker
from labkit.studies.flash_attention.study import STUDY
from labkit.studies.flash_attention.worker import FlashPoint, measure_point

SMALL = FlashPoint(
    sweep="lengths",
    sequence=64,
    head_dim=32,
    implementations=("explicit", "tiled", "sdpa", "sdpa_flash"),
    warmup=0,
    repeats=2,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_implementation_that_runs_here_is_timed(dtype):
    rows = list(measure_point(replace(SMALL, dtype=dtype)))
    timed = {(row["implementation"], row["phase"]) for row in rows if "seconds" in row}
    assert timed == {(name, phase) for name in SMALL.implementations for phase in ("forward", "backward")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_what_needs_a_gpu_is_a_row_with_its_reason():
    rows = list(measure_point(replace(SMALL, implementations=("flash", "sdpa_cudnn", "tiled"))))
    gates = {row["implementation"]: row["check"] for row in rows if row["phase"] == "both"}
    assert "CUDA GPU" in gates["flash"] or "Triton is not installed" in gates["flash"]
    assert gates["sdpa_cudnn"] != "ok"
    assert gates["tiled"] == "ok"


def test_tiled_attention_is_timed_with_and_without_hidden_tiles():
    rows = {row["implementation"]: row for row in measure_point(replace(SMALL, sweep="hidden"))}
    assert set(rows) == {worker.FULL, worker.CAUSAL}
    assert all(row["check"] == "ok" and len(row["seconds"]) == 2 for row in rows.values())
    assert all(row["tiles"] >= 1 for row in rows.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_techniques_without_a_gpu_are_one_row_with_the_reason():
    (row,) = measure_point(replace(SMALL, sweep="techniques", implementations=("flash",)))
    assert row["check"] != "ok"
    assert "seconds" not in row


@pytest.mark.gpu
def test_each_technique_is_left_out_on_a_gpu():
    point = replace(
        SMALL, sweep="techniques", sequence=512, dtype="bfloat16", device="cuda", implementations=("flash",)
    )
    rows = list(measure_point(point))
    assert len(rows) == 1 + len(worker.TECHNIQUES)
    assert all(row["check"] == "ok" and len(row["seconds"]) == 2 for row in rows)


@pytest.mark.parametrize("profile", ["smoke", "quick", "standard", "paper"])
def test_no_point_is_planned_twice(profile):
    points = STUDY.points(STUDY.profiles[profile], describe_machine())
    assert len({point.id for point in points}) == len(points)


def test_what_does_not_fit_at_all_is_skipped_with_both_sizes():
    point = replace(SMALL, sequence=2**30, implementations=("tiled",))
    reason = STUDY.skip_reason(point, describe_machine())
    assert "needs" in reason
    assert "available" in reason


def test_each_length_is_timed_once_more_by_another_process():
    points = [point for point in STUDY.points(STUDY.profiles["quick"], describe_machine()) if point.sweep == "lengths"]
    first, second = ([point for point in points if point.session == turn] for turn in (1, 2))
    assert points == [*first, *second]
    assert [point.next_session() for point in reversed(first)] == second
    assert len(by_ranks([first[-1], second[0]])) == 2


def test_memory_is_measured_the_first_time_only():
    rows = list(measure_point(replace(SMALL, session=2)))
    assert {row["implementation"] for row in rows if "seconds" in row} == set(SMALL.implementations)
    assert not any(row["phase"] == "saved" or row.get("peak_bytes") is not None for row in rows)
