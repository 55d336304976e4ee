"""Profiles from a few runs."""

import numpy as np
import pytest

from labkit.scaling.calibration import calibrate
from labkit.scaling.constants import Profile, load_constants
from labkit.scaling.prediction import predict_runs
from labkit.scaling.runs import Runs
from tests.scaling.conftest import LLAMA_8B, LLAMA_70B, run

LAYOUTS = [
    {"dp": 8, "global_batch": 64, "shard": "zero3"},
    {"tp": 8, "global_batch": 16, "sequence_parallel": True},
    {"tp": 2, "dp": 4, "global_batch": 32, "micro_batch": 2, "sequence_parallel": True},
    {"tp": 4, "pp": 2, "global_batch": 32, "sequence_parallel": True},
]


def _runs(framework, models=(LLAMA_8B, LLAMA_70B)):
    return [run(model, framework=framework, **layout) for model in models for layout in LAYOUTS]


def test_three_runs_of_a_site_tell_how_much_slower_it_is():
    truth = Profile("theirs", "generic", {"slowdown": 1.5, "tp_exposed": 0.6})
    constants = load_constants()
    theirs = constants.with_profile(truth)
    measured = predict_runs(Runs.of(_runs("theirs")), theirs).step_s
    chosen = [0, 1, 2]
    profile = calibrate([_runs("generic")[row] for row in chosen], measured[chosen].tolist(), name="mine")
    mine = predict_runs(Runs.of(_runs("mine")), constants.with_profile(profile))
    before = predict_runs(Runs.of(_runs("generic")))
    errors, blind = (np.abs(one.step_s / measured - 1) for one in (mine, before))
    assert np.median(errors) < np.median(blind) / 3
    assert (errors < blind).all()
    assert ((mine.high_90 / mine.low_90) < (before.high_90 / before.low_90)).all()


def test_exact_runs_leave_the_base_as_it_is():
    runs = _runs("mosaic")[:4]
    profile = calibrate(runs, predict_runs(Runs.of(runs)).step_s.tolist(), base="mosaic")
    assert profile.values["slowdown"] == pytest.approx(load_constants().table["slowdown"]["mosaic"], rel=1e-3)
    assert profile.values["unfused_attention"] == 0


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0, 2.0, -3.0], [1.0, 2.0, float("nan")], [1.0]])
def test_too_few_runs_or_times_that_are_none(times):
    with pytest.raises(ValueError, match="3 runs or more"):
        calibrate(_runs("generic")[: max(len(times), 2)], times)
