"""A reader's own models in the labs of one process that time them: a row each, named, predicted where a formula can."""

import re

import pytest
import torch
from torch import nn

from labkit.costs.transformer import TransformerShape
from labkit.lab.runs.measure import measure
from labkit.studies import load_lab
from tests import calibrated


def _mine():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return model, torch.randn(4, 8), torch.randn(4, 2), nn.MSELoss()


def _wrong_shape():
    return nn.Linear(3, 2), torch.randn(4, 8), torch.randn(4, 2), nn.MSELoss()


WIDE = TransformerShape(d_model=8, d_ff=16, n_layers=1, n_heads=2, vocabulary=50)
EXPECTED = r"shapes cannot be multiplied .*line \d+ of test_own_models.py"


@pytest.mark.parametrize(
    ("lab", "more", "question"),
    [("end_to_end", {"warmup_sizes": []}, "step_times"), ("kernels", {}, "profiler_and_clock")],
)
def test_a_readers_own_models_are_timed_and_named_and_a_mistake_costs_no_other(lab, more, question, tmp_path):
    study = load_lab(lab)
    column = study.model_parameters[0].removesuffix("s")
    config = study.profiles["smoke"].model_copy(update=more)
    own = {"mine": _mine, "wide": WIDE, "wrong_shape": _wrong_shape}
    run = measure(study, config, profile="smoke", models=own, directory=tmp_path)
    ends = run.coverage().set_index(column)
    assert ends["status"].to_dict() == {"nano": "ok", "mine": "ok", "wide": "ok", "wrong_shape": "failed"}
    assert re.search(EXPECTED, ends["reason"]["wrong_shape"])
    frame, calibration = run.frame(), calibrated.made_up()
    assert set(frame[column]) == {"nano", "mine", "wide"}
    predicted = study.predicted.beside(frame, calibration)
    assert set(predicted[column]) == {"nano", "wide"}
    finding = study.findings(frame, run.coverage(), calibration)[question]
    assert {"mine", "wide"} <= set(finding.table[column])
