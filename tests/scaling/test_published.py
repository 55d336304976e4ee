"""The published runs: the constants in use were fitted to them, and predictions of them are as good as stated."""

import sys
from pathlib import Path

import numpy as np
import pytest

from labkit.scaling import memory
from labkit.scaling.constants import read_constants
from labkit.scaling.folds import FOLDS
from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import held_out_s, nearest
from labkit.scaling.runs import Runs
from tests.scaling.conftest import LLAMA_8B, run

# median and 90th percentile of the error in percent that each group's rows must keep, in sample
IN_SAMPLE = {
    **{"nanotron": (8, 28), "vtrain_multinode": (5, 20), "vtrain_singlenode": (4, 15), "mosaic": (4, 10)},
    **{"dgxc": (2.5, 9), "megatron": (3.5, 7), "torchtitan": (8, 17), "fms": (5, 8)},
}


@pytest.fixture(scope="module")
def predictions(published):
    return predict_runs(published.runs)


@pytest.mark.parametrize("group", IN_SAMPLE)
def test_errors_of_step_time(group, published, predictions):
    rows = (published.group == group) & published.is_timed
    errors = 100 * np.abs(predictions.step_s / published.step_s - 1)[rows]
    median, ninth = IN_SAMPLE[group]
    assert np.median(errors) <= median
    assert np.percentile(errors, 90) <= ninth


def test_memory(published, predictions):
    rows = np.char.startswith(published.key, "training_runs")
    assert (predictions.fits == published.is_ok)[rows].mean() >= 0.97
    allocated = predictions.stages.allocated[:, 0] / memory.GIB / published.allocated_gib
    nanotron = published.group == "nanotron"
    assert np.nanmedian(np.abs(allocated - 1)[nanotron]) < 0.01
    assert np.nanpercentile(np.abs(allocated - 1)[nanotron], 90) < 0.05
    reserved = np.abs(predictions.stages.reserved[:, 0] / memory.GIB / published.reserved_gib - 1)
    assert np.nanmedian(reserved[nanotron]) < 0.07
    assert np.nanpercentile(reserved[nanotron], 90) < 0.18


def test_every_constant_has_a_source():
    constants = read_constants()
    assert len({constant.name for constant in constants}) == len(constants)
    assert all(constant.source and constant.value >= 0 for constant in constants)
    assert all(constant.low <= constant.value <= constant.high for constant in constants if constant.is_fitted)


def test_intervals_widen_where_the_framework_or_the_gpu_is_unknown():
    known, framework, both = (
        predict_runs(Runs.from_runs([run(LLAMA_8B, gpu, dp=8, global_batch=64, framework=name)]))
        for name, gpu in (("nemo", "h100"), ("generic", "h100"), ("generic", "mi300x"))
    )
    widths = [float(np.log(one.high_90 / one.low_90)[0]) for one in (known, framework, both)]
    assert widths[0] < widths[1] < widths[2]


def test_a_fold_never_judges_a_run_that_it_was_fitted_to(published):
    for fold in FOLDS:
        for trained, tested in fold.parts(published):
            assert not (trained & tested).any()
            assert tested.any()
    runs = published.runs
    shapes = list(zip(runs.layers, runs.hidden, runs.heads, runs.ffn, strict=True))
    (by_model,) = (fold for fold in FOLDS if fold.name == "without_model")
    for trained, tested in by_model.parts(published):
        assert not {shapes[row] for row in np.flatnonzero(trained)} & {shapes[row] for row in np.flatnonzero(tested)}


def test_a_fold_that_is_fitted_again_predicts_what_is_committed(published, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import fit_scaling

    (fold,) = (fold for fold in FOLDS if fold.name == "beyond_32")
    found, expected = fit_scaling.cross_validate(published, fold), held_out_s("beyond_32")
    rows = np.isfinite(found)
    assert np.median(np.abs(found / expected - 1)[rows]) < 1e-3
    assert found[rows] == pytest.approx(expected[rows], rel=0.02)
    del sys.modules["fit_scaling"]


def test_the_nearest_published_runs_are_alike_and_carry_the_error_made_on_them():
    rows = nearest(run(LLAMA_8B, dp=8, shard="zero3", global_batch=64, framework="torchtitan"))
    assert rows[0].group == "torchtitan"
    assert [row.distance for row in rows] == sorted(row.distance for row in rows)
    assert all(row.step_s > 0 and np.isfinite(row.error) for row in rows)
    assert len({(row.group, row.model, row.gpus) for row in rows}) == len(rows) == 5
    layout = {"dp": 8, "shard": "zero3", "global_batch": 64}
    known, unknown = (nearest(run(LLAMA_8B, framework=name, **layout))[0] for name in ("mosaic", "generic"))
    assert known.predicted_s != unknown.predicted_s
