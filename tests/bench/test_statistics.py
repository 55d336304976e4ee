"""Intervals cover what they say, and differences are claimed where the samples show them: simulated
and worked out."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from labkit.bench.intervals import estimate_paired, median_interval
from labkit.bench.statistics import NO_DIFFERENCE_SHOWN as NONE
from labkit.bench.statistics import (
    compare,
    compare_groups,
    median_groups,
    pool_configurations,
    slowest_rank,
    with_verdicts,
)
from tests.cases import thinned

NOISE = {
    "log-normal": lambda rng, n: rng.normal(0, 0.1, n),
    "t2": lambda rng, n: 0.07 * rng.standard_t(2, n),
    "outliers": (
        lambda rng, n: rng.normal(0, 0.1, n) + (rng.random(n) < 0.1) * rng.exponential(0.5, n)
    ),
}


def _samples(n, median=1.0, seed=0, spread=0.1):
    return median * np.exp(np.random.default_rng(seed).normal(0, spread, n))


def _verdict(*comparisons):
    """Of a single one; of several, together."""
    table = pd.DataFrame([{"ratio": one.value, "p": one.p} for one in comparisons])
    verdicts = with_verdicts(table)["verdict"].tolist()
    return verdicts if len(comparisons) > 1 else verdicts[0]


@pytest.mark.parametrize(
    ("n", "expected", "verdict"),
    [
        (5, (0.953356, np.nan, np.nan, np.nan), NONE),
        (6, (1.020461, 0.862524, 1.207318, 0.769318), NONE),
        (9, (0.938702, 0.880732, 1.000486, 0.051392), NONE),
        (30, (0.959885, 0.909929, 1.010322, 0.140283), NONE),
        (60, (0.952513, 0.922315, 0.983650, 0.004547), "faster"),
        (700, (0.936357, 0.924979, 0.948062, 0.0), "faster"),
    ],
)
def test_comparisons_give_the_numbers_they_always_gave(n, expected, verdict):
    result = compare(_samples(n, seed=n), _samples(n, np.exp(0.06), seed=n + 1))
    assert (result.value, result.low, result.high, result.p) == pytest.approx(
        expected, abs=2e-6, nan_ok=True
    )
    assert _verdict(result) == verdict


def test_medians_of_known_samples():
    frame = pd.DataFrame({"name": "a", "s": range(1, 102)})
    (row,) = median_groups(frame, "s", ["name"]).to_dict("records")
    assert (row["name"], row["n"], row["median"]) == ("a", 101, 51)
    assert row["low"] < 51 < row["high"]
    for samples in ([1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="finite"):
            median_groups(pd.DataFrame({"name": "a", "s": samples}), "s", ["name"])


DRIFT = np.linspace(1, 3, 30)
CERTAIN = [
    ([seconds] * n, [2 * seconds] * n, "faster")
    for n in (6, 12, 20, 50)
    for seconds in (1.0, 0.0012)
]
CERTAIN += [([1.01] * n, [1.0] * n, NONE) for n in (6, 12, 20, 50)]  # too small to matter
UNKNOWN = [*(([1.0] * n, [9.0] * n) for n in (1, 3, 5)), ([1.0, -1.0, *[2.0] * 10], [1.0] * 12)]


@pytest.mark.parametrize(
    ("samples", "others", "verdict"), [*CERTAIN, (0.9 * DRIFT, DRIFT, "faster")]
)
def test_ratios_without_noise_but_drift_that_hits_both_are_certain(samples, others, verdict):
    assert _verdict(compare(samples, others)) == verdict
    assert compare(others, others).p == pytest.approx(1.0)


@pytest.mark.parametrize(("samples", "others"), UNKNOWN)
def test_too_few_samples_and_such_that_are_not_above_zero_have_no_interval_and_no_verdict(
    samples, others
):
    result = compare(samples, others)
    assert _verdict(result) == NONE
    assert np.isnan([result.low, result.high, result.p]).all()
    assert result.value == pytest.approx(np.median(np.divide(samples, others)))
    assert len(samples) > 5 or np.isnan(median_interval(np.array(samples))).all()
    with pytest.raises(ValueError, match=f"{len(samples)} and {len(samples) + 1}"):
        compare(samples, [*others, 1.0])


def test_slowest_rank_counts():
    frame = pd.DataFrame(
        {"size": 1, "rank": [0, 1, 0, 1], "repeat": [0, 0, 1, 1], "seconds": [1.0, 3.0, 4.0, 2.0]}
    )
    assert slowest_rank(frame, "seconds", ["size"])["seconds"].tolist() == [3.0, 4.0]
    assert median_groups(frame, "seconds", ["rank"])["median"].tolist() == [2.5, 2.5]


def test_many_comparisons_are_corrected_together():
    table = pd.DataFrame({"ratio": [0.8, 0.8, 1.2, 1.0, 0.5], "p": [0.02, 0.3, 0.5, 0.9, np.nan]})
    assert set(with_verdicts(table)["verdict"]) == {NONE}
    assert with_verdicts(table.iloc[:1])["verdict"].tolist() == ["faster"]
    verdicts = ["faster", "faster", "slower", NONE, "faster"]
    for labels in (range(5), [0] * 5):
        assert with_verdicts(table.assign(p=0.02).set_axis(labels))["verdict"].tolist() == verdicts
    # Benjamini & Hochberg 1995, section 3: four of fifteen at 5%, three at 2.5%
    p = [
        0.0001,
        0.0004,
        0.0019,
        0.0095,
        0.0201,
        0.0278,
        0.0298,
        0.0344,
        0.0459,
        0.3240,
        0.4262,
        0.5719,
        0.6528,
    ]
    discoveries = with_verdicts(pd.DataFrame({"ratio": 0.5, "p": [*p, 0.7590, 1.0, np.nan]}))[
        "verdict"
    ]
    assert discoveries.tolist() == ["faster"] * 3 + [NONE] * 13


@pytest.mark.parametrize("n", [6, 8, 30, 3000])
def test_a_ratio_and_its_inverse_agree(n):
    a = _samples(n, np.exp(0.3), seed=n)
    b = _samples(n, seed=n + 1)
    there = compare(a, b)
    back = compare(b, a)
    np.testing.assert_allclose(
        [there.value, there.low, there.high], [1 / back.value, 1 / back.high, 1 / back.low]
    )
    assert there.p == pytest.approx(back.p)
    assert (_verdict(there), _verdict(back)) == ("slower", "faster")


@pytest.mark.parametrize(
    ("kind", "n"), thinned(product(NOISE, (6, 8, 11, 12, 15, 50)), lambda kind, n: n in (6, 15))
)
def test_intervals_cover_93_to_97_percent(kind, n):
    rng = np.random.default_rng(n)
    tries = 800
    true_median = np.median(NOISE[kind](np.random.default_rng(1), 400_000))
    covered = dict.fromkeys(("median", "paired"), 0)
    for _ in range(tries):
        a = NOISE[kind](rng, n)
        b = NOISE[kind](rng, n)
        low, high = median_interval(a)
        covered["median"] += low <= true_median <= high
        ratio = estimate_paired(a - b)
        covered["paired"] += ratio.low <= 0 <= ratio.high
        assert ratio.low <= ratio.value <= ratio.high
        assert (ratio.p < 0.05) == (not ratio.low <= 0 <= ratio.high) or abs(ratio.p - 0.05) < 0.02
    slack = 2 * np.sqrt(0.95 * 0.05 / tries)  # of the simulation itself
    for name, count in covered.items():
        assert 0.93 - slack <= count / tries <= 0.97 + slack, (name, count / tries)


def _correlated(rng, n, rho, spread=0.1):
    values = rng.normal(0, spread, n)
    for i in range(1, n):
        values[i] = rho * values[i - 1] + np.sqrt(1 - rho**2) * values[i]
    return values


def _claims(settings, rounds, effect, noise, tries):
    """Share of settings, per try, with a claim where one alternative takes `effect` of the other's
    time."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(tries):
        pairs = [
            (effect * np.exp(noise(rng, rounds)), np.exp(noise(rng, rounds)))
            for _ in range(settings)
        ]
        verdicts = _verdict(*(compare(a, b) for a, b in pairs))
        shares.append(np.mean(np.atleast_1d(verdicts) != NONE))
    return np.array(shares)


@pytest.mark.parametrize(
    ("spread", "rounds", "settings"),
    thinned(
        product([0.1, 0.4, "AR(1) of 0.1"], [6, 20, 50], [1, 12]),
        lambda *case: case[1:] == (6, 1) or case == ("AR(1) of 0.1", 20, 12),
    ),
)
def test_at_most_5_percent_of_tables_without_a_difference_claim_any(settings, rounds, spread):
    def noise(rng, n):
        return _correlated(rng, n, 0.1) if spread == "AR(1) of 0.1" else rng.normal(0, spread, n)

    claims = _claims(settings, rounds, 1.0, noise, tries=300)
    assert (claims > 0).mean() <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(claims))


@pytest.mark.parametrize(
    ("effect", "least", "settings"), [(0.9, 0.6, 1), (0.8, 0.85, 1), (0.9, 0.6, 12)]
)
def test_a_difference_of_10_or_20_percent_is_found(effect, least, settings):
    assert (
        _claims(settings, 20, effect, lambda rng, n: rng.normal(0, 0.1, n), tries=60).mean()
        >= least
    )


def test_alternatives_that_share_a_baseline_do_not_claim_more_often():
    rng = np.random.default_rng(0)
    claimed = 0
    tries = 150
    for _ in range(tries):
        frame = pd.DataFrame(
            {"setting": 0, "name": np.repeat(range(8), 20), "s": np.exp(rng.normal(0, 0.1, 160))}
        )
        claimed += (compare_groups(frame, "s", ["setting"], "name", 0)["verdict"] != NONE).any()
    assert claimed / tries <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tries)


def test_correlated_rounds_are_worth_less():
    rng = np.random.default_rng(5)
    noise = _correlated(rng, 200, 0.8) - 0.05
    related = estimate_paired(noise)
    independent = estimate_paired(rng.permutation(noise))
    assert related.high - related.low > 2 * (independent.high - independent.low)
    assert related.p > independent.p


def _pooled(*rows):
    names = ["ratio", "low", "high", "p"]
    table = pd.DataFrame(rows, columns=names).assign(name="mine")
    (pooled,) = pool_configurations(table, "name").to_dict("records")
    return pooled


def test_over_all_configurations_each_counts_alike():
    """Weighted by precision it was 6.2 [6.1, 6.2], and the rows' mean is 6.7."""
    pooled = _pooled((6.1, 6.0, 6.2, 1e-9), (7.4, 6.9, 8.0, 1e-9))
    assert pooled["ratio"] == pytest.approx(np.sqrt(6.1 * 7.4))
    assert pooled["low"] < 6.5 < 6.7 < pooled["high"]


def test_one_row_without_noise_does_not_speak_for_the_others():
    pooled = _pooled((1.05, 1.05, 1.05, 0.0), (0.5, 0.2, 1.25, 0.2))
    assert pooled["low"] < 1 < pooled["high"]
    assert pooled["p"] > 0.05


def test_the_interval_and_the_p_value_over_all_configurations_agree():
    rows = [(0.9, 0.89, 0.91, 1e-9)] * 3
    assert _pooled(*rows)["high"] < 1
    assert _pooled(*rows)["p"] < 0.001
    with_noise = _pooled(*rows, (0.9, 0.3, 2.7, 0.9))
    assert with_noise["high"] > 1
    assert with_noise["p"] > 0.05
