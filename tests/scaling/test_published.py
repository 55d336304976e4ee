"""The published runs: predictions of those that a fit had left out, memory, and how intervals
widen."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from labkit.scaling import memory
from labkit.scaling.constants import read_constants
from labkit.scaling.prediction import predict, predict_runs
from labkit.scaling.published import held_out_s, is_timed, nearest, nearest_keys
from labkit.scaling.scores import held_out
from tests.scaling.conftest import LLAMA_8B, run

# by fold: largest median error in percent, least share of rows inside the intervals, largest median
# of high over low
BOUNDS = {
    **{
        "beyond 64 GPUs": (9, 0.9, 2),
        "beyond 32 GPUs": (10, 0.9, 2.2),
        "beyond 512 GPUs": (6, 0.9, 1.5),
    },
    **{"without the largest scale": (11, 0.88, 1.8), "without the largest models": (11, 0.85, 2)},
    **{"beyond 8192 tokens": (12, 0.9, 2.2), "without the sharding": (10, 0.9, 3.5)},
    # these leave whole frameworks out, and nanotron is slower than any other
    **{"without the framework": (20, 0.9, 7.5), "without the source": (11, 0.9, 6)},
    **{"without the source, beyond 64 GPUs": (11, 0.9, 6)},
    **{"without the GPU": (12, 0.9, 6.5), "without the GPU generation": (12, 0.9, 6.5)},
    **{"without the model": (7, 0.85, 1.8), "without the run": (7, 0.9, 1.8)},
}
MOST = {
    "beyond 64 GPUs": 0.97,
    "beyond 32 GPUs": 0.97,
    "without the framework": 0.97,
    "without the model": 0.95,
}
MIN_ROWS = 30


@pytest.fixture(scope="module")
def predictions(published):
    return predict_runs(published)


@pytest.mark.parametrize("fold", BOUNDS)
def test_runs_that_a_fit_had_left_out_are_predicted_and_covered(fold):
    rows = held_out().query("fold == @fold")
    median, least, width = BOUNDS[fold]
    assert rows["error_percent"].median() <= median
    assert rows["is_covered"].mean() >= least
    assert rows["high_over_low"].median() <= width
    assert rows[rows["gpus"] >= 1000]["is_covered"].mean() >= 0.8
    by_gpus = rows.groupby(["table", "gpus"])["is_covered"].agg(["size", "mean"])
    by_gpus = by_gpus[by_gpus["size"] >= MIN_ROWS]["mean"]
    assert rows["is_covered"].mean() <= MOST.get(fold, 1)
    if fold in ("beyond 64 GPUs", "beyond 32 GPUs"):
        assert by_gpus.between(0.82, 0.97).all()
    if fold == "without the model":
        assert rows[rows["table"] == "nanotron"]["error_percent"].median() <= 8
    if fold in ("without the model", "without the framework"):
        assert (by_gpus >= 0.82).all()


def test_nothing_is_predicted_to_be_faster_than_published_matmuls(published, predictions):
    ceiling = published["matmul_ceiling"]
    fastest = predictions.mfu * predictions.step_s / predictions.low_90
    assert (fastest <= ceiling * (1 + 1e-9)).all()
    assert (published.mfu[is_timed(published) & (published.table == "mosaic")] < 0.83).all()


def test_memory(published, predictions):
    rows = np.char.startswith(published.key, "training_runs")
    assert (predictions.fits == (published.status == "ok"))[rows].mean() >= 0.97
    nanotron = published.table == "nanotron"
    first_stage = sum(part[:, 0] for part in predictions.stages.values())
    reserved = np.abs(first_stage / memory.GIB / published.reserved_gib - 1)
    assert np.nanmedian(reserved[nanotron]) < 0.07
    assert np.nanpercentile(reserved[nanotron], 90) < 0.18


def test_every_constant_has_a_source():
    constants = read_constants()
    assert len({constant.name for constant in constants}) == len(constants)
    assert all(constant.source and constant.value >= 0 for constant in constants)
    fitted = [constant for constant in constants if constant.is_fitted]
    assert len(fitted) <= 29
    assert all(constant.low <= constant.value <= constant.high for constant in fitted)


def _predict(gpu="h100", seq_len=8192, framework="nemo", **layout):
    return predict(run(LLAMA_8B, gpu, seq_len=seq_len, framework=framework, **layout))


WIDER = {
    "more GPUs": (
        {"dp": 16384, "global_batch": 16384},
        "extrapolated: 16384 GPUs, fitted up to 2304 with nemo",
    ),
    "another framework": ({"framework": "generic"}, "framework without published runs"),
    "another GPU": ({"gpu": "mi300x"}, "no published run on cdna3 GPUs"),
    "another sharding": ({"shard": "hsdp"}, "no published run with nemo in hsdp"),
    "longer sequences": ({"seq_len": 2**24}, "16777216 tokens per sequence, fitted up to 4194304"),
}


@pytest.mark.parametrize("case", WIDER)
def test_intervals_widen_with_the_distance_and_the_answer_says_so(case):
    changes, words = WIDER[case]
    usual = {"dp": 1024, "global_batch": 1024, "shard": "zero1", "recompute": "full"}
    near = _predict(**usual)
    far = _predict(**usual | changes)
    assert near.warnings == ()
    assert any(words in warning for warning in far.warnings)
    assert far.distance > near.distance
    widths = [one.interval_90[1] / one.interval_90[0] for one in (near, far)]
    assert widths[1] > 1.05 * widths[0] or far.mfu > 0.8  # at the ceiling there is no room below


def test_intervals_widen_from_a_published_table_to_another_source_and_an_unknown_framework():
    layout = {"dp": 8, "global_batch": 64, "shard": "zero1", "recompute": "full"}
    known = run(LLAMA_8B, seq_len=8192, framework="nemo", **layout)
    kinds = [replace(known, table="dgxc"), known, replace(known, framework="generic")]
    low, high = (
        np.array(ends) for ends in zip(*(predict(one).interval_90 for one in kinds), strict=True)
    )
    assert (np.diff(high / low) > 0.1).all()


def test_an_unknown_pipeline_engine_is_in_the_interval():
    """nanotron's pipelines on several nodes ran one of two engines; the upper end is the slow
    one's."""
    layout = {"framework": "nanotron", "pp": 8, "dp": 8, "global_batch": 256, "shard": "zero1"}
    unknown, slow, fast = (
        _predict(**layout, options=frozenset(options))
        for options in ([], ["old_pipeline"], ["new_pipeline"])
    )
    assert unknown.step_s == fast.step_s < slow.step_s < unknown.interval_90[1]
    assert fast.interval_90[1] < slow.step_s


@pytest.fixture
def fit_scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield import_module("fit_scaling")
    for name in ("fit_scaling", "folds"):
        del sys.modules[name]


def test_every_fold_has_bounds_judges_some_runs_and_is_fitted_to_others(published, fit_scaling):
    folds = list(fit_scaling.make_folds(published))
    assert {fold.name for fold in folds} == set(BOUNDS) == set(held_out()["fold"])
    for fold in folds:
        assert fold.is_judged.any()
        assert not fold.is_hidden.all()
        assert not (fold.is_judged & ~fold.is_hidden).any()


def test_a_fold_that_is_fitted_again_predicts_what_is_committed(published, fit_scaling):
    (fold,) = (fold for fold in fit_scaling.make_folds(published) if fold.name == "beyond 32 GPUs")
    columns = fit_scaling.cross_validate(published, fold, np.zeros(len(published), dtype=bool))
    expected = held_out_s(fold.name)[columns["row"].to_numpy()]
    assert columns["predicted_s"].to_numpy() == pytest.approx(expected, rel=0.02)


def test_the_nearest_published_runs_are_alike_and_carry_the_error_made_on_them(published):
    rows = nearest(run(LLAMA_8B, dp=8, shard="zero3", global_batch=64, framework="torchtitan"))
    assert rows[0].run.table == "torchtitan"
    assert [row.distance for row in rows] == sorted(row.distance for row in rows)
    assert all(row.run.step_s > 0 and np.isfinite(row.error) for row in rows)
    assert (
        len({(row.run.table, row.run.model.name, row.run.layout.gpus) for row in rows})
        == len(rows)
        == 5
    )
    layout = {"dp": 8, "shard": "zero3", "global_batch": 64}
    assert nearest_keys(published.take([0])) == [(published.key[0], 0)]
    named, unknown = (
        nearest(run(LLAMA_8B, framework=name, **layout))[0] for name in ("mosaic", "generic")
    )
    assert named.predicted_s != unknown.predicted_s
