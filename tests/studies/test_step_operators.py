"""The operators of a step are the same wherever they are counted, and the optimizer is that of the
device."""

from types import SimpleNamespace

import pytest

from labkit.costs.transformer import SIZES
from labkit.studies.training_step import lab, worker
from labkit.studies.training_step.worker import (
    FIRST,
    LATER,
    OPTIMIZER,
    TrainingStepPoint,
    measure,
    predict_seconds,
)
from tests.calibrated import made_up
from tests.small_steps import SMALL, list_operators


def test_a_step_on_a_gpu_is_predicted_without_one():
    on_cpu, on_gpu = (
        list_operators(SMALL, 2, 16, "bfloat16", device)[OPTIMIZER] for device in ("cpu", "cuda")
    )
    assert any(one.name.startswith("_foreach") for one in on_gpu)
    assert not any(one.name.startswith("_foreach") for one in on_cpu)
    rates, *_ = made_up().rates
    operators = list_operators(SMALL, 2, 16, "float32", "cuda")
    assert predict_seconds(rates, operators, ["forward"]) > 0


def test_the_lab_predicts_a_row_from_the_operators_of_its_own_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "list_operators", list_operators)
    row = {
        "size": "nano",
        "batch": 2,
        "context_length": 16,
        "precision": "float32",
        "device": "cpu",
    }
    calibration = made_up()
    rates = calibration.rates_on("cpu")
    operators = list_operators(SIZES["nano"], 2, 16, "float32", "cpu")
    others = list_operators(SIZES["nano"], 16, 2)
    for phase in ("forward", "step"):
        predicted = lab._predict(row | {"phase": phase}, SimpleNamespace(calibration=calibration))
        assert predicted == predict_seconds(rates, operators, lab.PHASES[phase])
        assert predicted != predict_seconds(rates, others, lab.PHASES[phase])


def test_phases_first_steps_and_operators_of_a_step_are_timed():
    about = {"size": "nano", "batch": 1, "context_length": 8, "warmup": 0, "repeats": 1}
    phases, first, profile = (
        list(measure(TrainingStepPoint(sweep=sweep, **about)))
        for sweep in ("phases", "first", "profile")
    )
    assert {"inference", "forward", "backward", "optimizer", "step"} <= {
        row["phase"] for row in phases
    }
    assert [row["which"] for row in first] == [FIRST, LATER]
    assert all(row["status"] == "ok" and min(row["seconds"]) > 0 for row in phases + first)
    assert {row["profiled"] for row in profile} == {"inference", "step"}
    assert {"forward", "backward", "optimizer"} <= {row["phase"] for row in profile}
