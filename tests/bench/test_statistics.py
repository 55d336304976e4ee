"""Verdicts: claimed where the samples show it, and not where they do not."""

import numpy as np
import pandas as pd
import pytest

from labkit.bench.statistics import (
    RESAMPLES,
    compare,
    compare_groups,
    resampled_medians,
    slowest_rank,
    summarize,
    summarize_groups,
    with_verdicts,
)


def _noisy(median, n=30, spread=0.1, seed=0):
    return median * np.exp(np.random.default_rng(seed).normal(0, spread, n))


def test_summary_of_known_samples():
    summary = summarize(range(1, 102))
    assert (summary.n, summary.median, summary.mean) == (101, 51, 51)
    assert (summary.p90, summary.p95, summary.p99) == (91, 96, 100)
    assert summary.std == pytest.approx(np.sqrt(101 * 102 / 12))  # of a sample, not of a population
    assert summary.low < 51 < summary.high


def test_too_few_samples_have_no_interval_and_no_verdict():
    assert np.isnan(summarize([1.0] * 5).low)
    assert compare([1.0] * 5, [2.0] * 5, interleaved=False).verdict == "no difference shown"
    assert "too few" in str(compare([1.0], [2.0], interleaved=False))


def test_a_clear_difference_is_shown_in_its_direction():
    assert compare(_noisy(1.0), _noisy(2.0, seed=1), interleaved=False).verdict == "faster"
    assert compare(_noisy(2.0), _noisy(1.0, seed=1), interleaved=False).verdict == "slower"


@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_resampled_medians_are_medians_of_resamples(n):
    values = _noisy(1.0, n=n).round(1)  # rounded: with equal ones among them
    rows = np.random.default_rng(3).integers(0, n, (RESAMPLES, n))
    np.testing.assert_allclose(resampled_medians(values, seed=3), np.median(values[rows], axis=1), rtol=1e-15)


def test_a_difference_too_small_to_matter_is_not_claimed():
    assert compare([1.01] * 20, [1.0] * 20, interleaved=False).verdict == "no difference shown"


def test_pairing_removes_drift_that_hits_both():
    drift = np.linspace(1, 3, 30)
    assert compare(0.9 * drift, drift, interleaved=True).verdict == "faster"
    assert compare(0.9 * drift, drift, interleaved=False).verdict == "no difference shown"  # the drift hides it


def test_what_took_turns_has_as_many_samples():
    with pytest.raises(ValueError, match="3 and 2"):
        compare([1.0] * 3, [1.0] * 2, interleaved=True)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_bad_samples_are_refused(samples):
    with pytest.raises(ValueError, match="finite"):
        summarize(samples)


def test_slowest_rank_counts():
    frame = pd.DataFrame({"size": 1, "rank": [0, 1, 0, 1], "repeat": [0, 0, 1, 1], "seconds": [1.0, 3.0, 4.0, 2.0]})
    assert slowest_rank(frame, "seconds", ["size"])["seconds"].tolist() == [3.0, 4.0]
    assert summarize_groups(frame, "seconds", ["rank"])["median"].tolist() == [2.5, 2.5]


def test_of_many_comparisons_only_what_survives_all_of_them_is_claimed():
    p = np.array([0.02, 0.3, 0.5, 0.9, np.nan])
    table = pd.DataFrame({"ratio": [0.8, 0.8, 1.2, 1.0, 0.5], "p": p})
    assert set(with_verdicts(table)["verdict"]) == {"no difference shown"}
    assert with_verdicts(table.iloc[:1])["verdict"].tolist() == ["faster"]
    everywhere = table.assign(p=0.02)
    assert with_verdicts(everywhere)["verdict"].tolist() == [
        "faster",
        "faster",
        "slower",
        "no difference shown",
        "faster",
    ]


@pytest.mark.parametrize("n", [6, 12, 20, 25, 30, 50])
@pytest.mark.parametrize("seconds", [1.0, 0.0012])
def test_a_ratio_without_any_noise_is_certain(n, seconds):
    assert compare([seconds] * n, [2 * seconds] * n, interleaved=True).verdict == "faster"
    equal = compare([seconds] * n, [seconds] * n, interleaved=True)
    assert (equal.verdict, equal.p) == ("no difference shown", pytest.approx(1.0))
    assert compare([seconds] * n, [2 * seconds] * n, interleaved=False).verdict == "faster"


def test_a_comparison_and_its_inverse_agree_at_the_edge_of_what_matters():
    a, b = [0.9705] * 20, [1.0] * 20
    verdicts = {compare(a, b, interleaved=True).verdict, compare(b, a, interleaved=True).verdict}
    assert verdicts in ({"no difference shown"}, {"faster", "slower"})


def test_samples_that_are_not_above_zero_have_a_ratio_and_no_interval():
    found = compare([1.0, -1.0, *[2.0] * 10], [1.0] * 12, interleaved=True)
    assert found.ratio == 2.0
    assert np.isnan([found.low, found.high, found.p]).all()
    assert found.verdict == "no difference shown"


def test_any_alternative_can_be_the_baseline():
    seconds = {"a": 1.0, "b": 2.0, "c": 4.0}
    rows = [{"n": 1, "name": name, "s": median + i / 1000} for name, median in seconds.items() for i in range(8)]
    ratios = compare_groups(pd.DataFrame(rows), "s", ["n"], "name", "b").set_index("name")["ratio"]
    assert ratios.to_dict() == pytest.approx({"a": 0.5, "c": 2.0}, rel=0.01)
