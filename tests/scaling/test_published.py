"""The published runs: predictions of those that a fit had left out, memory, and how intervals
widen."""

import sys
import tracemalloc
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit.scaling import DATA, memory
from labkit.scaling.hardware import HARDWARE
from labkit.scaling.prediction import FITS_SHARE, predict, predict_runs
from labkit.scaling.published import (
    distances,
    find_nearest,
    held_out_s,
    is_timed,
    load_measured,
    nearest,
)
from labkit.scaling.runs import Runs
from labkit.scaling.scores import held_out
from tests.scaling.conftest import LLAMA_8B, run

# by fold: largest median error in percent, least share of rows inside the intervals
BOUNDS = {
    "beyond 64 GPUs": (8, 0.9),
    "beyond 32 GPUs": (9.5, 0.88),
    "beyond 512 GPUs": (6, 0.9),
    "without the largest scale": (8, 0.88),
    "without the largest models": (11, 0.9),
    "beyond 8192 tokens": (10, 0.9),
    "without the sharding": (10, 0.9),
    "without the framework": (15, 0.9),
    "without the source": (11, 0.9),
    "without the source, beyond 64 GPUs": (11, 0.9),
    "without the GPU": (12, 0.9),
    "without the GPU generation": (12, 0.9),
    "without the model": (6.9, 0.88),
    "without the run": (6.9, 0.86),
}
# by what a fold's fit knows: largest mean of high over low
WIDTHS = {"known framework": 2, "unknown framework": 4.5, "new GPU": 5}
MIN_ROWS = 30


@pytest.fixture(scope="module")
def predictions(published):
    return predict_runs(published)


@pytest.mark.parametrize("fold", BOUNDS)
def test_runs_that_a_fit_had_left_out_are_predicted_and_covered(fold):
    rows = held_out().query("fold == @fold")
    median, least = BOUNDS[fold]
    assert rows["error_percent"].median() <= median
    assert rows["is_covered"].mean() >= least
    for cell in (["table"], ["table", "gpus"]):
        shares = rows.groupby(cell)["is_covered"].agg(["size", "mean"])
        assert (shares[shares["size"] >= MIN_ROWS]["mean"] >= 0.8).all()


def test_intervals_are_as_narrow_as_what_is_known_allows():
    rows = held_out()
    assert 0.85 <= rows["is_covered"].mean() <= 0.95
    assert 0.85 <= rows.groupby("fold")["is_covered"].mean().mean() <= 0.95
    unnamed = rows.query("fold == 'without the framework'")["high_over_low"]
    assert unnamed.mean() <= WIDTHS["unknown framework"]
    widths = rows.groupby("situation")["high_over_low"].mean()
    assert set(widths.index) == set(WIDTHS)
    assert all(widths[situation] <= most for situation, most in WIDTHS.items())


def test_nothing_is_predicted_to_be_faster_than_published_matmuls(published, predictions):
    for tflops, is_fp8 in (("matmul_tflops", False), ("fp8_matmul_tflops", True)):
        rows = (published.precision == "fp8") == is_fp8
        peak = published.peak_tflops * np.where(is_fp8, published.fp8_ratio, 1)
        ceiling = getattr(published, tflops) / peak
        fastest = predictions.mfu * predictions.step_s / predictions.interval_90()[0]
        assert (fastest <= ceiling * (1 + 1e-9))[rows].all()


def test_every_gpu_and_its_matmul_rate_have_a_source():
    cards = pd.read_csv(DATA / "hardware.csv")
    assert cards[["source", "matmul_source"]].notna().all(axis=None)


@pytest.mark.parametrize("card", HARDWARE.values(), ids=lambda card: card.name)
def test_no_gpu_has_a_matmul_rate_above_its_peak(card):
    assert 0.5 * card.peak_tflops < card.matmul_tflops <= card.peak_tflops
    assert card.fp8_matmul_tflops <= card.peak_tflops * card.fp8_ratio
    assert (card.fp8_matmul_tflops > 0) == (card.fp8_ratio > 1)


def test_a_gb300_is_a_fifth_faster_than_a_gb200():
    layout = {"dp": 8, "global_batch": 512, "shard": "zero1", "framework": "nemo"}
    slow, fast = (predict(run(LLAMA_8B, gpu, **layout)).step_s for gpu in ("gb200", "gb300"))
    assert 1.1 <= slow / fast <= 1.25


def test_broken_jobs_are_neither_fitted_nor_judged_nor_shown(published):
    suspect = published.status == "suspect"
    assert suspect.sum() == 63
    assert not (suspect & is_timed(published)).any()
    keys = set(published.key[suspect])
    assert not keys & set(held_out()["key"])
    near = nearest(published.origin[int(np.flatnonzero(suspect)[0])])
    assert not keys & {row.run.key for row in near}


def test_a_measured_bandwidth_slows_what_crosses_nodes_alone():
    wide = run(dp=64, global_batch=64)
    inside = run(dp=8, global_batch=8)

    def slower(one, bus_gb_s):
        measured = one.hardware.with_network(bus_gb_s=bus_gb_s)
        return predict(replace(one, hardware=measured)).step_s / predict(one).step_s

    assert slower(wide, 20) > 1.5
    assert slower(wide, 340) == pytest.approx(1, abs=0.1)
    assert slower(inside, 20) == 1


def test_memory(published, predictions):
    is_oom = published.status == "oom"
    too_large = predictions.peak_low > FITS_SHARE * published.memory_gib
    answered = predictions.fits | too_large
    for table, least in (("nanotron", 0.85), ("bigscience", 0.3)):
        rows = (published.table == table) & answered
        assert rows.sum() >= least * (published.table == table).sum()
        assert (too_large == is_oom)[rows].mean() >= 0.95
    first_stage = sum(part[:, 0] for part in predictions.stages.values()) / memory.GIB
    is_first = published.table == "nanotron"
    scale = published.reserved_gib / np.where(is_first, first_stage, predictions.peak_gib)
    peak = scale * predictions.peak_gib
    is_covered = (predictions.peak_low <= peak) & (peak <= predictions.peak_high)
    for table in ("nanotron", "simumax"):
        rows = (published.table == table) & np.isfinite(peak)
        assert 0.85 <= is_covered[rows].mean() <= 0.97
    assert is_covered[np.isfinite(peak)].mean() >= 0.85
    assert np.nanmedian(np.abs(1 / scale - 1)[is_first]) < 0.07


def test_the_risk_of_running_out_of_memory_is_that_of_a_normal_peak(published, predictions):
    limit = FITS_SHARE * published.memory_gib
    is_below = predictions.peak_gib < limit
    # The limit is midway, in the logarithm, between the middle and the end of the interval.
    midway = replace(predictions, peak_high=limit**2 / predictions.peak_gib)
    assert midway.out_of_memory[is_below] == pytest.approx(0.2054, abs=1e-3)


def test_every_constant_has_a_source():
    constants = pd.read_csv(DATA / "constants.csv")
    assert not constants.duplicated(["quantity", "key"]).any()
    assert constants["source"].notna().all()
    assert (constants["value"] >= 0).all()
    fitted = constants[constants["spread"] > 0]
    assert len(fitted) <= 24
    assert fitted["value"].between(fitted["low"], fitted["high"]).all()


def _predict(gpu="h100", seq_len=8192, framework="nemo", **layout):
    return predict(run(LLAMA_8B, gpu, seq_len=seq_len, framework=framework, **layout))


WIDER = {
    "more GPUs": ({"dp": 16384, "global_batch": 16384}, "gpus"),
    "another framework": ({"framework": "generic"}, "unknown framework: --framework"),
    "another GPU": ({"gpu": "mi300x"}, "architecture"),
    "another sharding": ({"shard": "hsdp"}, "shard"),
    "longer sequences": ({"seq_len": 2**18}, "seq_len"),
}


@pytest.mark.parametrize("case", WIDER)
def test_intervals_widen_with_the_distance_and_the_answer_says_so(case):
    changes, words = WIDER[case]
    usual = {"dp": 1024, "global_batch": 1024, "shard": "zero1", "recompute": "full"}
    near = _predict(**usual)
    far = _predict(**usual | changes)
    assert any(words in warning for warning in far.warnings)
    assert far.distance > near.distance
    # the ends themselves are cut off at the ceiling
    widths = [one.interval_90[1] / one.step_s for one in (near, far)]
    assert widths[1] > 1.01 * widths[0]


def test_a_sweep_of_thousands_of_runs_takes_little_memory(published):
    one = published.origin[0]
    sweep = Runs([replace(one, seq_len=length) for length in range(2000, 12000)])
    tracemalloc.start()
    away, nearest = find_nearest(sweep, load_measured())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e8
    rows = [0, 4321, 9999]
    apart = distances(sweep.take(rows), load_measured())
    assert (away[rows] == apart.min(axis=1)).all()
    assert (nearest[rows] == apart.argmin(axis=1)).all()


def test_a_run_like_a_published_one_is_no_extrapolation(published, predictions):
    away = predictions.distance
    assert (away[is_timed(published)] == 0).all()
    assert not any("extrapolated" in text for text in predictions.warnings(0))


def test_intervals_widen_from_a_published_table_to_another_source_and_an_unknown_framework():
    layout = {"dp": 8, "global_batch": 64, "shard": "zero1", "recompute": "full"}
    known = run(LLAMA_8B, seq_len=8192, framework="nemo", **layout)
    kinds = [replace(known, table="dgxc"), known, replace(known, framework="generic")]
    low, high = (
        np.array(ends) for ends in zip(*(predict(one).interval_90 for one in kinds), strict=True)
    )
    assert (np.diff(high / low) > 0.1).all()


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
    columns = fit_scaling.cross_validate(published, fold)
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
    away, row = find_nearest(published.take([0]), load_measured())
    assert (away[0], load_measured().key[row[0]]) == (0, published.key[0])
    named, unknown = (
        nearest(run(LLAMA_8B, framework=name, **layout))[0] for name in ("mosaic", "generic")
    )
    assert named.error != unknown.error
