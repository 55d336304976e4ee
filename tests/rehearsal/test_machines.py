"""What is planned on machines that are not here, and the pages of runs that came from there."""

import json
from functools import cache
from itertools import product

import pytest

from labkit.lab.config import PROFILES
from labkit.lab.point import planned_s
from labkit.lab.recommended import CHOICES, recommend
from labkit.machine.description import GIB
from labkit.studies import LABS, load_lab
from tests.cases import thinned
from tests.pages.cells import recorded
from tests.rehearsal.machines import ALL_MACHINES, MACHINES, NO_GPU_REASONS

# Labs whose points run on the CPU, or on a device of the reader's choice, wherever they run.
ON_THE_CPU = {"all_reduce", "your_training"}


@pytest.fixture(autouse=True)
def _this_machine_has_no_say(monkeypatch):
    """A plan depends on its machine alone, not on the compiler or memory of the one that plans."""
    worker = "labkit.studies.training_step.worker"
    tuned = "labkit.studies.tuned_step.lab"
    monkeypatch.setattr("labkit.lab.point.available_memory_bytes", lambda: 32 * GIB)
    monkeypatch.setattr(f"{worker}.no_compiler_reason", lambda device: None)
    monkeypatch.setattr(f"{tuned}.runs_here", lambda machine: {})
    monkeypatch.setattr(f"{tuned}.recommend", lambda *where: _recommendations(*where[:2]))


@cache
def _recommendations(model, context_length):
    return recommend(
        model, context_length, {choice.lab: recorded(choice.lab) for choice in CHOICES}
    )


def _plan(lab, machine, profile):
    """Points that can be measured there, and the reasons of the others."""
    study = load_lab(lab)
    points = study.plan(study.profiles_on(machine)[profile], machine)
    assert len({point.id for point in points}) == len(points)
    reasons = {point.id: point.skip_reason(machine) for point in points}
    planned = [point for point in points if reasons[point.id] is None]
    reasons = [reason for reason in reasons.values() if reason is not None]
    assert all(reason.strip() and "\n" not in reason for reason in reasons)
    return planned, reasons


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize(
    "machines", thinned([MACHINES, ALL_MACHINES], lambda machines: machines is MACHINES), ids=len
)
def test_a_plan_has_sizes_and_a_time_and_uses_the_gpus_or_the_cpu(lab, machines):
    for (name, machine), profile in product(machines.items(), PROFILES):
        planned, reasons = _plan(lab, machine, profile)
        json.dumps([point.describe() for point in planned])
        assert planned_s(planned) > 0 or not planned, (name, profile)
        on_gpu = [point for point in planned if point.device_type == "cuda"]
        if machine.gpus:
            is_too_large = not planned and all("needs" in reason for reason in reasons)
            assert on_gpu or is_too_large or (planned and lab in ON_THE_CPU), (name, profile)
        else:
            assert planned, (name, profile)
            assert not on_gpu, (name, profile)
        for point in on_gpu:
            has_gpu_each = point.world_size <= len(machine.gpus)
            assert has_gpu_each or (point.backend != "nccl" and lab != "tuned_step"), name
            # Zigzag halves every rank's part of a sequence.
            assert getattr(point, "sequence", 0) % (2 * point.world_size) == 0, name


@pytest.mark.parametrize(("lab", "name"), [*product(LABS, ["1 H100", "8 H100"])])
def test_the_sizes_of_an_h100_are_planned_within_its_time(lab, name, monkeypatch):
    machine = MACHINES[name].model_copy(update={"cores": 64})
    monkeypatch.setattr("labkit.lab.point.available_memory_bytes", lambda: 900 * GIB)
    for profile, most_s in {"quick": 120, "paper": 45 * 60}.items():
        planned, _ = _plan(lab, machine, profile)
        assert 0 < planned_s(planned) <= most_s, profile
        largest = max(point.world_size for point in planned)
        assert profile == "paper" or name == "1 H100" or largest in (1, len(machine.gpus))


def _what(point):
    """What a point measures; older runs have another rule in the place of `gain`."""
    return str({k: v for k, v in sorted(point.items()) if k not in ("gain", "ratio_within")})


@pytest.mark.parametrize("lab", LABS)
def test_a_recorded_run_took_about_its_planned_time(lab):
    study = load_lab(lab)
    run = recorded(lab)
    config = {k: v for k, v in run.header.config.items() if k in study.config.model_fields}
    points = study.plan(study.config.model_validate(config), run.header.machine)
    elapsed_s = {_what(run.header.planned[id]): end.elapsed_s for id, end in run.ends.items()}
    points = [point for point in points if _what(point.describe()) in elapsed_s]
    took_s = sum(elapsed_s[_what(point.describe())] for point in points)
    assert took_s <= 2 * planned_s(points)


@pytest.mark.parametrize(
    ("name", "profile", "expected"),
    [
        ("1 H100", "quick", [(2, "gloo")]),
        ("1 H100", "paper", [(1, "nccl"), (2, "gloo")]),
        ("8 H100", "quick", [(1, "nccl"), (2, "nccl"), (4, "nccl"), (8, "nccl")]),
    ],
)
def test_throughput_is_measured_from_one_gpu_to_all(name, profile, expected):
    points, _ = _plan("data_parallel", MACHINES[name], profile)
    assert sorted({(point.world_size, point.backend) for point in points}) == expected


def test_nccl_comes_first_and_no_cpu_size_stays_on_gpus():
    machine = MACHINES["8 H100"]
    points, _ = _plan("all_reduce", machine, "quick")
    assert points[0].backend == "nccl"
    assert max(point.n_bytes for point in points if point.backend == "nccl") >= 2**28
    limits = load_lab("limits")
    assert max(limits.profiles_on(machine)["quick"].matmul_sizes) >= 8192
    assert limits.profiles_on(machine, "cpu") == limits.profiles


@pytest.mark.parametrize("name", NO_GPU_REASONS)
def test_a_lab_says_why_there_are_no_usable_gpus(name):
    study = load_lab("memory")
    points = study.plan(study.configure("smoke", {"device": "cuda"}), MACHINES[name])
    assert any(NO_GPU_REASONS[name] in (p.skip_reason(MACHINES[name]) or "") for p in points)
