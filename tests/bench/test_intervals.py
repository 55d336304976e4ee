"""Intervals cover what they say, and claims are as rare and as frequent as they should be, by simulation."""

from dataclasses import asdict
from itertools import product

import numpy as np
import pandas as pd
import pytest

from labkit.bench.intervals import adjusted, estimate_paired, estimate_unpaired, median_interval
from labkit.bench.statistics import compare, compare_groups, with_verdicts
from tests.cases import thinned

NOISE = {
    "log-normal": lambda rng, n: rng.normal(0, 0.1, n),
    "t2": lambda rng, n: 0.07 * rng.standard_t(2, n),
    "outliers": lambda rng, n: rng.normal(0, 0.1, n) + (rng.random(n) < 0.1) * rng.exponential(0.5, n),
}


def _correlated(rng, n, rho, spread=0.1):
    noise, values = rng.normal(0, spread, n), np.empty(n)
    values[0] = noise[0]
    for i in range(1, n):
        values[i] = rho * values[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return values


@pytest.mark.parametrize(("kind", "n"), list(product(NOISE, (6, 8, 11, 12, 15, 50))))
def test_intervals_cover_93_to_97_percent(kind, n):
    rng, tries = np.random.default_rng(n), 800
    of_median = np.median(NOISE[kind](np.random.default_rng(1), 400_000))
    covered = dict.fromkeys(("median", "paired", "unpaired"), 0)
    for _ in range(tries):
        a, b = NOISE[kind](rng, n), NOISE[kind](rng, n)
        low, high = median_interval(a)
        covered["median"] += low <= of_median <= high
        for name, found in (("paired", estimate_paired(a - b)), ("unpaired", estimate_unpaired(a, b))):
            covered[name] += found.low <= 0 <= found.high
            assert found.low <= found.value <= found.high
            assert (found.p < 0.05) == (not found.low <= 0 <= found.high) or abs(found.p - 0.05) < 0.02
    slack = 2 * np.sqrt(0.95 * 0.05 / tries)  # of the simulation itself
    for name, count in covered.items():
        assert 0.93 - slack <= count / tries <= 0.97 + slack, (name, count / tries)


def _claims(settings, rounds, effect, noise, tries, seed=0):
    """Per try: how many settings are claimed to differ, in which one alternative takes `effect` of the other's time."""
    rng, counts = np.random.default_rng(seed), []
    for _ in range(tries):
        turns = [(effect * np.exp(noise(rng, rounds)), np.exp(noise(rng, rounds))) for _ in range(settings)]
        table = pd.DataFrame([asdict(compare(a, b, interleaved=True)) for a, b in turns])
        counts.append((with_verdicts(table)["verdict"] != "no difference shown").sum())
    return np.array(counts)


@pytest.mark.parametrize(
    ("spread", "rounds", "settings"),
    thinned(
        product([0.1, 0.4, "AR(1) of 0.1"], [6, 20, 50], [1, 12]),
        lambda spread, rounds, settings: (rounds, settings) != (50, 12) or spread == 0.4,
    ),
)
def test_at_most_5_percent_of_tables_without_a_difference_claim_any(settings, rounds, spread):
    def noise(rng, n):
        return _correlated(rng, n, 0.1) if spread == "AR(1) of 0.1" else rng.normal(0, spread, n)

    claims = _claims(settings, rounds, 1.0, noise, tries=300)
    assert (claims > 0).mean() <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(claims))


@pytest.mark.parametrize(("effect", "least"), [(0.9, 0.6), (0.8, 0.85)])
@pytest.mark.parametrize("settings", [1, 12])
def test_a_difference_of_10_or_20_percent_is_found(effect, least, settings):
    claims = _claims(settings, 20, effect, lambda rng, n: rng.normal(0, 0.1, n), tries=60)
    assert claims.mean() / settings >= least


def test_alternatives_that_share_a_baseline_do_not_claim_more_often():
    rng, claimed, tries = np.random.default_rng(0), 0, 150
    for _ in range(tries):
        rows = [
            {"setting": 0, "name": name, "repeat": i, "seconds": value}
            for name in range(8)
            for i, value in enumerate(np.exp(rng.normal(0, 0.1, 20)))
        ]
        table = compare_groups(pd.DataFrame(rows), "seconds", ["setting"], "name", 0)
        claimed += (table["verdict"] != "no difference shown").any()
    assert claimed / tries <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tries)


def test_rounds_that_resemble_the_one_before_are_worth_less():
    rng = np.random.default_rng(5)
    noise = _correlated(rng, 200, 0.8) - 0.05
    shuffled = rng.permutation(noise)
    related, independent = estimate_paired(noise), estimate_paired(shuffled)
    assert related.high - related.low > 2 * (independent.high - independent.low)
    assert related.p > independent.p


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("n", [6, 8, 30, 3000])
def test_a_ratio_and_its_inverse_say_the_same(n, interleaved):
    rng = np.random.default_rng(n)
    a, b = np.exp(rng.normal(0.3, 0.1, n)), np.exp(rng.normal(0, 0.1, n))
    there, back = compare(a, b, interleaved=interleaved), compare(b, a, interleaved=interleaved)
    np.testing.assert_allclose([there.ratio, there.low, there.high], [1 / back.ratio, 1 / back.high, 1 / back.low])
    assert there.p == pytest.approx(back.p)
    assert (there.verdict, back.verdict) == ("slower", "faster")


def test_adjusted_p_values_of_a_worked_example():
    # Benjamini & Hochberg 1995, section 3: of fifteen comparisons four are discoveries at 5 %
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528]
    p = np.array([*p, 0.7590, 1.0, np.nan])
    found = adjusted(p)
    assert (found <= 0.05).sum() == 4
    assert np.isnan(found[-1])
    assert found[0] == pytest.approx(0.0015)
    assert (np.diff(found[:-1]) >= 0).all()
