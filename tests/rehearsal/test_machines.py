"""What is planned on machines that are not here, and the pages of runs that came from there."""

import json
from functools import cache
from itertools import product

import pytest

from labkit.lab.config import PROFILES
from labkit.lab.point import planned_s
from labkit.lab.recommended import TOPICS, recommend
from labkit.lab.runs.store import Run
from labkit.machine.description import GIB
from labkit.studies import LABS, load_lab
from tests.cases import thinned
from tests.rehearsal.machines import KINDS, MACHINES, with_gpus
from tests.rehearsal.pages import carry_out, kind_of_point, recorded

# Labs whose points run on the CPU, or on a device of the reader's choice, wherever they run.
ON_THE_CPU = {"all_reduce", "your_training"}


def _plan(study, machine, profile):
    """Points that can be measured there, and the reasons of the others."""
    points = study.plan(study.profiles_on(machine)[profile], machine)
    assert len({point.id for point in points}) == len(points)
    reasons = {point.id: point.skip_reason(machine) for point in points}
    assert all(
        reason is None or (reason.strip() and "\n" not in reason) for reason in reasons.values()
    )
    return [point for point in points if reasons[point.id] is None], list(
        filter(None, reasons.values())
    )


@pytest.fixture(autouse=True)
def _this_machine_has_no_say(monkeypatch):
    """A plan depends on its machine alone: not on the compiler or the free memory of the machine
    that plans.

    The tuned step joins what the recorded runs recommend, as if they were from the made-up machine.
    """
    monkeypatch.setattr("labkit.lab.point.available_memory_bytes", lambda: 32 * GIB)
    monkeypatch.setattr(
        "labkit.studies.training_step.worker.no_compiler_reason", lambda device: None
    )
    monkeypatch.setattr("labkit.studies.tuned_step.lab.runs_here", lambda machine: {})
    monkeypatch.setattr(
        "labkit.studies.tuned_step.lab.recommend", lambda *where: _recommendations(*where[:2])
    )


@cache
def _recommendations(model, context_length):
    return recommend(model, context_length, {topic.lab: recorded(topic.lab) for topic in TOPICS})


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_uses_the_gpus_that_are_there_or_the_cpu(lab):
    for (name, machine), profile in product(MACHINES.items(), PROFILES):
        _check_plan(lab, machine, profile, name)


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_planned_on_one_to_eight_gpus_of_ten_kinds(lab):
    for count, kind, profile in product(range(1, 9), KINDS, PROFILES):
        _check_plan(lab, with_gpus(count, kind), profile, f"{count} {kind}")


def _check_plan(lab, machine, profile, name):
    """A plan has sizes and a time, and uses the GPUs; what cannot be measured has a reason."""
    planned, reasons = _plan(load_lab(lab), machine, profile)
    json.dumps([point.describe() for point in planned])
    assert planned_s(planned) > 0 or not planned, (name, profile)
    on_gpu = [point for point in planned if point.device_type == "cuda"]
    is_too_large = not planned and all("needs" in reason for reason in reasons)
    if machine.gpus:
        assert on_gpu or is_too_large or (planned and lab in ON_THE_CPU), (name, profile)
    else:
        assert planned, (name, profile)
        assert not on_gpu, (name, profile)
    for point in on_gpu:
        assert (point.backend == "nccl") <= (point.world_size <= len(machine.gpus)), name
        assert lab != "tuned_step" or point.world_size <= len(machine.gpus), name


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize("count", ["one", "eight"])
def test_the_sizes_of_an_h100_are_planned_within_its_time(lab, count, monkeypatch):
    machine = MACHINES[f"{count} H100"].model_copy(update={"cores": 64})
    monkeypatch.setattr("labkit.lab.point.available_memory_bytes", lambda: 900 * GIB)
    for profile, most_s in {"quick": 120, "paper": 45 * 60}.items():
        planned, _ = _plan(load_lab(lab), machine, profile)
        assert 0 < planned_s(planned) <= most_s, profile
        largest = max((point.world_size for point in planned), default=8)
        assert profile == "paper" or count == "one" or largest in (1, len(machine.gpus))


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


@pytest.mark.parametrize("profile", ["quick", "paper"])
def test_throughput_is_measured_from_one_gpu_to_all(profile):
    study = load_lab("data_parallel")
    curves = {}
    for name in ("one H100", "two A4000", "eight H100"):
        points, _ = _plan(study, MACHINES[name], profile)
        curves[name] = sorted({(point.world_size, point.backend) for point in points})
    nccl = [(ranks, "nccl") for ranks in (1, 2, 4, 8)]
    both = [(2, "gloo")]
    one = both if profile == "quick" else [*nccl[:1], *both]
    assert curves == {"one H100": one, "two A4000": nccl[:2], "eight H100": nccl}


def test_nccl_comes_first_and_no_cpu_size_stays_on_gpus():
    study = load_lab("all_reduce")
    machine = MACHINES["eight H100"]
    points, _ = _plan(study, machine, "quick")
    assert points[0].backend == "nccl"
    assert max(point.n_bytes for point in points if point.backend == "nccl") >= 2**28
    for lab, name, at_least in (("limits", "matmul_sizes", 8192), ("attention", "batch", 16)):
        value = getattr(load_lab(lab).profiles_on(machine)["quick"], name)
        assert (max(value) if isinstance(value, list) else value) >= at_least
        assert load_lab(lab).profiles_on(machine, "cpu") == load_lab(lab).profiles


@pytest.mark.parametrize("lab", sorted(set(LABS) - ON_THE_CPU))
def test_a_lab_says_why_there_are_no_usable_gpus(lab):
    study = load_lab(lab)
    wanted = study.profiles["smoke"].model_copy(update={"device": "cuda"})
    for name in ("driver too old", "V100", "container"):
        reasons = [
            point.skip_reason(MACHINES[name]) for point in study.plan(wanted, MACHINES[name])
        ]
        assert any(MACHINES[name].no_gpu_reason in reason for reason in reasons if reason), name


@pytest.mark.parametrize(
    ("lab", "count", "profile"),
    thinned(
        product(LABS, ("one", "eight"), ("quick", "paper")),
        lambda lab, *where: where == ("eight", "quick") and lab in LABS[2::3],
    ),
)
def test_the_page_of_a_run_from_gpus(lab, count, profile):
    """Every point that is planned there, with recorded rows of its kind."""
    study = load_lab(lab)
    run = recorded(lab)
    machine = MACHINES[f"{count} H100"]
    points, _ = _plan(study, machine, profile)
    planned = {point.id: point.describe() for point in points}
    kinds = {kind_of_point(point): id for id, point in run.header.planned.items()}
    sources = {
        id: kinds[kind] for id, point in planned.items() if (kind := kind_of_point(point)) in kinds
    }
    pairs = product(sources.items(), run.rows)
    rows = [
        row.model_copy(update={"point": id}) for (id, source), row in pairs if row.point == source
    ]
    ends = {id: run.ends[source] for id, source in sources.items()}
    header = run.header.model_copy(
        update={"machine": machine, "planned": planned, "profile": profile}
    )
    carry_out(study, Run(run.path, header, rows, ends))
