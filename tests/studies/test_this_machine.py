"""The lab of this machine: what its runs recommend, the step that is measured, and what is said of it."""

import re
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

from labkit.lab.advise import local as here
from labkit.lab.advise.machine import (
    DEFAULT,
    Configuration,
    Recommendation,
    compute_share,
    configuration,
    expected_ratio,
    newest_runs,
    recommendations,
)
from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run
from labkit.machine import describe_machine
from labkit.parallel.data_parallel.reducer import TorchReducer
from labkit.parallel.launch import run_ranks
from labkit.studies.data_parallel import findings as data_parallel
from labkit.studies.data_parallel.findings import _name as wrapper_name
from labkit.studies.this_machine.study import NOTHING, STUDY, _joined
from labkit.studies.this_machine.worker import DEFAULT as DEFAULT_NAME
from labkit.studies.this_machine.worker import JOINED, ThisMachinePoint, Training, measure_point


@pytest.fixture(autouse=True)
def one_thread():
    """Many short operators: threads would mostly wait for one another, and for other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Run:
    """A run with these rows."""

    def __init__(self, **rows):
        self._frame = pd.DataFrame(rows)

    def frame(self):
        return self._frame


def _samples(**alternatives):
    """Twenty rounds of every alternative, by its factor over a second, with the same noise in a round."""
    rng = np.random.default_rng(0)
    noise = np.exp(0.02 * rng.standard_normal(20))
    names = [name for name in alternatives for _ in noise]
    own = np.exp(0.005 * rng.standard_normal(len(names)))
    seconds = np.concatenate([factor * noise for factor in alternatives.values()]) * own
    return {"name": names, "seconds": seconds, "repeat": list(range(20)) * len(alternatives), "rank": 0}


def _precision(model="mini", **alternatives):
    samples = _samples(**alternatives)
    return _Run(alternative=samples.pop("name"), part="speed", mode="forward and backward", model=model, **samples)


def _compiled(**alternatives):
    samples = _samples(**alternatives)
    return _Run(implementation=samples.pop("name"), sweep="compile", phase="step", size="nano", **samples)


def test_what_is_significantly_faster_is_recommended_with_its_interval():
    runs = {"precision": _precision(float32=1.0, bfloat16=0.5), "end_to_end": _compiled(eager=1.0, compiled=0.8)}
    found = recommendations("small", 64, runs)
    assert configuration(found) == Configuration(precision="bfloat16", compiled=True)
    precision, _, compiled, *others = found
    assert precision.low <= precision.ratio <= precision.high
    assert precision.ratio == pytest.approx(0.5, rel=0.02)
    assert expected_ratio(found) == pytest.approx(precision.ratio * compiled.ratio)
    assert all("not measured here" in one.why for one in others)


@pytest.mark.parametrize("bfloat16", [1.0, 1.5])
def test_what_is_not_faster_is_not_recommended(bfloat16):
    found = recommendations("mini", 64, {"precision": _precision(float32=1.0, bfloat16=bfloat16)})
    assert configuration(found) == DEFAULT
    assert expected_ratio(found) == 1.0


def _steps(**workloads):
    """Steps of one phase each, by workload and wrapper, by their factor over torch's."""
    frames = []
    for workload, wrappers in workloads.items():
        samples = _samples(torch=1.0, **wrappers)
        names = {"implementation": samples.pop("name"), "workload": workload}
        frames += [pd.DataFrame(names | samples | {"phase": phase}) for phase in ("forward", "backward", "optimizer")]
    return _Run(**pd.concat(frames).assign(sweep="implementations", world_size=2, device="cpu").to_dict("list"))


@pytest.mark.parametrize(
    ("naive_on_mini", "naive_on_small", "taken", "told"),
    [
        (0.798, 1.1, "bucketed_shared", "naive_shared is as fast"),
        (0.5, 1.1, "naive_shared", "but not there"),
        (0.7, 0.7, "naive_shared", "measured on mini"),
    ],
)
def test_what_wins_over_all_settings_is_taken_unless_it_is_slower_in_the_nearest(
    naive_on_mini, naive_on_small, taken, told
):
    of_mini = {"bucketed_shared": 0.8, "naive_shared": naive_on_mini}
    runs = {"data_parallel": _steps(mini=of_mini, large={"bucketed_shared": 0.8, "naive_shared": naive_on_small})}
    wrapper = next(one for one in recommendations("mini", 64, runs) if one.topic == "wrapper")
    assert wrapper.value == taken
    assert told in wrapper.why


def test_the_lab_and_the_joined_configuration_recommend_the_same_wrapper():
    runs = {path.parent.name: Run.load(path) for path in recorded_directory().glob("*/*.jsonl")}
    wrapper = next(one for one in recommendations("small", 128, runs) if one.topic == "wrapper")
    answer = data_parallel.fastest(runs["data_parallel"].frame())
    assert wrapper.value == DEFAULT.wrapper or wrapper_name(wrapper.value) in answer.advice or "slower" in wrapper.why


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.5 * 0.4 + 0.3), (0.9, 0.9 * 0.4)])
def test_a_wrapper_saves_communication_and_precision_compute(share, expected):
    found = [
        Recommendation("precision", "precision", "bfloat16", "measured", 0.25, 0.2, 0.3, share=0.8),
        Recommendation("wrapper", "data_parallel", "bucketed", "measured", 0.8, 0.7, 0.9),
    ]
    assert expected_ratio(found, compute_share=share) == pytest.approx(expected)


def test_recorded_runs_recommend_for_every_topic():
    runs = {path.parent.name: Run.load(path) for path in recorded_directory().glob("*/*.jsonl")}
    found = recommendations("small", 256, runs)
    assert [one.topic for one in found] == list(Configuration.__dataclass_fields__)
    assert not any("not measured here" in one.why for one in found)
    assert all(one.low <= one.ratio <= one.high for one in found)
    assert 0 < compute_share("small", runs) < 1
    assert 0 < expected_ratio(found, compute_share=compute_share("small", runs)) < 1


def test_only_runs_of_this_machine_count():
    machine = Run.load(next(recorded_directory().glob("limits/*.jsonl"))).header.machine
    assert newest_runs(machine)
    for other in ({"host": "somewhere else"}, {"cores": 3}, {"instructions": "AVX1024"}):
        assert not newest_runs(machine.model_copy(update=other))


def test_nothing_is_measured_where_nothing_is_recommended(monkeypatch):
    monkeypatch.setattr("labkit.studies.this_machine.study.newest_runs", lambda machine: {})
    machine = describe_machine()
    points = STUDY.points(STUDY.profiles["quick"], machine)
    assert points
    assert {_joined(point) for point in points} == {DEFAULT}
    assert {STUDY.skip_reason(point, machine) for point in points} == {NOTHING}


def _point(**changes):
    settings = {"precision": "float32", "attention": "tiled", "compiled": False, "wrapper": "flat", "bucket_mb": None}
    settings |= {"model": "nano", "expected_ratio": 0.9, "batch": 1, "context_length": 16, "warmup": 0, "repeats": 2}
    return ThisMachinePoint(**(settings | changes))


def test_both_are_timed_in_turns_and_their_gradients_agree():
    rows = list(measure_point(_point()))
    assert [row["implementation"] for row in rows] == [DEFAULT_NAME, JOINED]
    assert all(len(row["seconds"]) == 2 and row["check"] == "ok" for row in rows)
    assert rows[0]["error"] < 1e-3


def test_other_gradients_get_no_time(monkeypatch):
    from labkit.studies.this_machine import worker

    monkeypatch.setattr(worker, "FLOAT32_TOLERANCE", -1.0)
    (row,) = measure_point(_point())
    assert row["check"].startswith("wrong")
    assert "seconds" not in row


def test_an_attention_that_is_none_is_a_reason():
    (row,) = measure_point(_point(attention="none such"))
    assert row["check"].startswith("failed: ValueError")


def _on_a_rank():
    point = _point(world_size=2, precision="bfloat16")
    return [[row["implementation"], row["check"], len(row["seconds"])] for row in measure_point(point)]


def test_two_ranks_train_under_a_wrapper():
    assert run_ranks(_on_a_rank, world_size=2) == [[[DEFAULT_NAME, "ok", 2], [JOINED, "ok", 2]]] * 2


def _one_element_a_little_off():
    """By less than 16 bits may be off: what one of fifty ranks adds."""

    def passes(self):
        right(self)
        gradient = next(iter(self.model.parameters())).grad.view(-1)
        gradient[0] += 0.02 * gradient.abs().max()

    right, Training.passes = Training.passes, passes
    return [row["check"] for row in measure_point(_point(world_size=2, precision="bfloat16"))]


def test_a_part_of_a_mean_that_rounding_would_hide_is_seen():
    for (gate,) in run_ranks(_one_element_a_little_off, world_size=2):
        assert gate.startswith("wrong: rank 0, ")
        assert "element 0: expected" in gate


def _without_each_rank():
    """Gates of a point without what a rank adds to the means of the joined configuration, each rank in turn."""
    start, found = TorchReducer.start, {}
    for precision in ("float32", "bfloat16"):
        for left_out in range(dist.get_world_size()):

            def lossy(self, vector, op, left_out=left_out):
                return start(self, vector.zero_() if dist.get_rank() == left_out else vector, op)

            TorchReducer.start = lossy
            try:
                point = _point(world_size=dist.get_world_size(), precision=precision)
                found[f"{precision} {left_out}"] = [row["check"] for row in measure_point(point)]
            finally:
                TorchReducer.start = start
    return found


def test_each_rank_left_out_is_seen_in_both_precisions():
    for found in run_ranks(_without_each_rank, world_size=3):
        assert len(found) == 6
        assert all(gate.startswith("wrong") for gates in found.values() for gate in gates)


def _frame(ratio):
    samples = _samples(default=1.0, joined=ratio)
    about = {"model": "mini", "world_size": 2, "expected_ratio": 0.5, "precision": "bfloat16", "attention": "explicit"}
    about |= {"compiled": True, "wrapper": "torch", "bucket_mb": None}
    return pd.DataFrame({"implementation": samples.pop("name"), **samples, **about})


@pytest.mark.parametrize(
    ("ratio", "verdict", "advises", "agrees"),
    [(0.5, "yes", True, "yes"), (1.0, "no clear difference", False, "no"), (1.3, "no", True, "no")],
)
def test_findings(ratio, verdict, advises, agrees):
    found = STUDY.findings(_frame(ratio), pd.DataFrame())
    assert found["gain"].verdict == verdict
    assert (found["gain"].advice is not None) == advises  # what each part gains alone is not undone by noise
    assert found["ingredients"].headline == "Other than the default: bfloat16 and torch.compile."
    assert found["predicted"].verdict == agrees
    assert (found["predicted"].why is None) == (agrees == "yes")


def test_what_is_joined_is_told_by_model_where_models_differ():
    small = _frame(0.5).assign(model="small", attention="sdpa", precision="float32")
    alone = _frame(0.5).assign(world_size=1, wrapper="naive_shared")
    told = STUDY.findings(pd.concat([_frame(0.5), small, alone], ignore_index=True), pd.DataFrame())["ingredients"]
    assert told.headline == (
        "Other than the default: bfloat16 and torch.compile for mini, 2 ranks and mini, 1 rank; "
        "sdpa attention and torch.compile for small, 2 ranks."
    )


def test_what_is_recommended_stands_beside_what_it_gained_together(monkeypatch):
    runs = {"precision": _precision(float32=1.0, bfloat16=0.5)}
    monkeypatch.setattr(here, "newest_runs", lambda: runs)
    assert "together" not in here.by_size()[0]
    runs["this_machine"] = _Run(**_frame(1.0).to_dict("list"))
    told = here.by_size()[0]
    assert "faster alone" in told
    assert re.search(r"together: .* with mini \(no difference shown", told)
    runs["this_machine"] = _Run(**_frame(1.5).to_dict("list"))
    told = here.by_size()[0]
    assert told.startswith("Keep the defaults")
    assert "with mini (slower" in told
    both = pd.concat([_frame(1.5), _frame(0.5).assign(model="nano")])
    runs["this_machine"] = _Run(**both.to_dict("list"))
    told = here.by_size()[0]
    assert not told.startswith("Keep the defaults")
    assert "Keep the defaults with mini:" in told
    assert "with nano (faster" in told


@pytest.mark.parametrize(
    "chosen", [DEFAULT, Configuration("bfloat16", "tiled", False, "bucketed", 10.0)], ids=["default", "joined"]
)
def test_the_python_to_paste_trains(chosen):
    names = {}
    exec(compile(here.code(chosen, "nano", 16), "pasted", "exec"), names)
    tokens = torch.randint(100, (2, 17))
    losses = [float(names["train_step"](tokens[:, :-1], tokens[:, 1:])) for _ in range(5)]
    assert all(later < earlier for earlier, later in pairwise(losses))
