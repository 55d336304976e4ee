"""Intervals of predictions: in their order, and no narrower than few rows allow."""

import numpy as np

from labkit.scaling.intervals import ENOUGH, alike, conformal, quantiles_by_group
from labkit.scaling.prediction import predict
from tests.scaling.conftest import run


def test_the_ends_of_both_intervals_lie_around_the_prediction_in_their_order():
    one = run(dp=8, global_batch=64, micro_batch=1)
    found = predict(one.model, one.hardware, one.layout, seq_len=one.seq_len)
    (low_80, high_80), (low_90, high_90) = found.interval_80, found.interval_90
    assert low_90 <= low_80 < found.step_s < high_80 <= high_90


def test_no_framework_has_quantiles_narrower_than_those_of_all():
    """However many rows it has: they are of few models, and err together."""
    rng = np.random.default_rng(0)
    wide, narrow = rng.normal(0, 0.2, ENOUGH), rng.normal(0, 0.01, 10 * ENOUGH)
    framework = np.array(["wide"] * len(wide) + ["narrow"] * len(narrow) + ["few"] * 3)
    residuals = np.concatenate([wide, narrow, narrow[:3]])
    found = quantiles_by_group(framework, np.full(len(framework), "flat"), residuals)
    pooled, own = conformal(alike(framework, residuals)), conformal(narrow)
    assert found["narrow"] == found["narrow/flat"] == [*np.minimum(own, pooled)[:2], *np.maximum(own, pooled)[2:]]
    assert found["narrow"] != own
    assert found["wide"][0] <= conformal(wide)[0]
    assert "few/flat" not in found


def test_quantiles_of_many_rows_are_outermost_by_rank():
    """Of 40 residuals, ranks 0.05 * 41 and 0.1 * 41 rounded down, 0.9 * 41 and 0.95 * 41 rounded up."""
    assert conformal(np.arange(1.0, 41.0)) == [2.0, 4.0, 37.0, 39.0]
