"""The published runs: the constants in use are the ones that were fitted to them, and the intervals hold."""

import csv

import numpy as np
import pytest

from labkit.scaling import memory
from labkit.scaling.constants import load_constants
from labkit.scaling.declared import DECLARED, FITTED
from labkit.scaling.intervals import conformal, of_key
from labkit.scaling.prediction import predict_runs
from labkit.scaling.runs import Runs
from tests.scaling.conftest import DATA, LLAMA_8B, run

# median and 90th percentile of the error in percent that each group's rows must keep, in sample
IN_SAMPLE = {
    **{"nanotron": (8, 28), "vtrain_multinode": (5, 20), "vtrain_singlenode": (4, 15), "mosaic": (4, 10)},
    **{"dgxc": (2.5, 9), "megatron": (3.5, 7), "torchtitan": (8, 17), "fms": (5, 8)},
}


@pytest.fixture(scope="module")
def predictions(published_runs):
    return predict_runs(published_runs)


@pytest.fixture(scope="module")
def measured(published_rows):
    names = ("step_s", "peak_allocated_gib", "peak_reserved_gib")
    return {name: np.array([float(row.cells[name] or "nan") for row in published_rows]) for name in names}


@pytest.mark.parametrize("group", IN_SAMPLE)
def test_errors_of_step_time(group, published_rows, predictions, measured):
    own = np.array([row.cells["group"] == group for row in published_rows]) & np.isfinite(measured["step_s"])
    errors = 100 * np.abs(predictions.step_s / measured["step_s"] - 1)[own]
    median, ninth = IN_SAMPLE[group]
    assert np.median(errors) <= median
    assert np.percentile(errors, 90) <= ninth


def test_intervals_hold_what_they_say(predictions, measured):
    timed = np.isfinite(measured["step_s"])
    inside = (predictions.low_90 <= measured["step_s"]) & (measured["step_s"] <= predictions.high_90)
    assert 0.85 <= inside[timed].mean() <= 0.95


def test_memory(published_rows, predictions, measured):
    is_oom = np.array([row.cells["status"] == "oom" for row in published_rows])
    assert (predictions.fits == ~is_oom).mean() >= 0.97
    allocated = predictions.stages.allocated[:, 0] / memory.GIB / measured["peak_allocated_gib"]
    assert np.nanmedian(np.abs(allocated - 1)) < 0.01
    assert np.nanpercentile(np.abs(allocated - 1), 90) < 0.05
    reserved = np.abs(predictions.stages.reserved[:, 0] / memory.GIB / measured["peak_reserved_gib"] - 1)
    assert np.nanmedian(reserved) < 0.07
    assert np.nanpercentile(reserved, 90) < 0.18


def test_there_are_at_most_fifty_fitted_constants_and_all_say_where_from():
    written = load_constants().table
    assert len(FITTED) <= 50
    assert all(constant.source for constant in DECLARED)
    assert all(written[constant.quantity][constant.key] > 0 for constant in FITTED)
    assert len({constant.name for constant in DECLARED}) == len(DECLARED)


def test_intervals_widen_where_the_framework_or_the_gpu_is_unknown():
    known, framework, both = (
        predict_runs(Runs.of([run(LLAMA_8B, gpu, dp=8, global_batch=64, framework=name)]))
        for name, gpu in (("nemo", "h100"), ("generic", "h100"), ("generic", "mi300x"))
    )
    widths = [float(np.log(one.high_90 / one.low_90)[0]) for one in (known, framework, both)]
    assert widths[0] < widths[1] < widths[2]


def test_intervals_widen_beyond_the_published_rows():
    inside, more, longer = (
        predict_runs(Runs.of([run(LLAMA_8B, dp=dp, global_batch=dp, seq_len=seq_len, framework="nemo")]))
        for dp, seq_len in ((1024, 8192), (8192, 8192), (1024, 262144))
    )
    widths = [float(np.log(one.high_90 / one.low_90)[0]) for one in (inside, more, longer)]
    assert widths[1] > 1.2 * widths[0]
    assert widths[2] > 1.2 * widths[0]


def test_conformal_quantiles_cover_new_draws():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        low, _, _, high = conformal(rng.normal(size=60))
        covered.append(np.mean((low <= (new := rng.normal(size=200))) & (new <= high)))
    assert 0.89 <= np.mean(covered) <= 0.95


def test_every_framework_has_quantiles_in_order():
    constants = load_constants()
    for name in (*constants.seen["frameworks"], "someone's"):
        quantiles = of_key(f"{name}/flat", constants)
        assert list(quantiles) == sorted(quantiles)


def test_cross_validated_predictions_are_of_the_published_rows(published_rows):
    rows = list(csv.DictReader((DATA / "cross_validated.csv").open()))
    of_line = {row.line: row for row in published_rows}
    assert len(rows) == 2460
    assert all(row["step_s"] == repr(float(of_line[int(row["line"])].cells["step_s"])) for row in rows)
