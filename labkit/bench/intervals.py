"""Intervals and p-values from samples: of a median, and of a ratio within rounds.

Twelve rounds and more are compared by a signed-rank test, which assumes no normal distribution.
Fewer are compared by Student's t: signed ranks of six pairs give no p below 0.03, which a
correction for many comparisons never passes. `scipy.special` alone, since `scipy.stats` takes ten
times as long to load, in every process that measures.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, ndtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
# Half of the usual 5%. Successive rounds resemble one another, and intervals do not cover all of
# that.
FALSE_DISCOVERY_RATE = 0.025
# Probability with which as many rounds as are planned show the gain that they are planned for.
POWER = 0.8
# Five samples cannot bound the median with 95%: 2 * 0.5**5 > 0.05.
MIN_SAMPLES = 6
MIN_FOR_SIGNED_RANKS = 12
MIN_FOR_CORRELATION = 20
# More samples are reduced to this many quantiles.
MAX_VALUES = 500


@dataclass(frozen=True)
class Estimate:
    """A ratio or its logarithm, its 95% interval, and the p-value of no difference.

    NaN with too few samples.
    """

    value: float
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """Bound the median of `values`, (n,), by interpolated order statistics.

    NaN below `MIN_SAMPLES`. Source: Hettmansperger & Sheather 1986.
    """
    n = len(values)
    if n < MIN_SAMPLES:
        return float("nan"), float("nan")
    # Coverage between the k-th smallest and largest, k = 1, 2, ...: one is above the confidence,
    # the next below it, and the interval lies in between.
    inside = 1 - 2 * bdtr(np.arange(n // 2), n, 0.5)
    depth = int(np.flatnonzero(inside >= CONFIDENCE)[-1]) + 1
    coverage = inside[depth - 1]
    deeper = inside[depth]
    excess = (coverage - CONFIDENCE) / (coverage - deeper)
    weight = (n - depth) * excess / (depth + (n - 2 * depth) * excess)
    ordered = np.sort(values)
    low = (1 - weight) * ordered[depth - 1] + weight * ordered[depth]
    high = (1 - weight) * ordered[n - depth] + weight * ordered[n - depth - 1]
    return float(low), float(high)


def estimate_paired(differences: np.ndarray) -> Estimate:
    """Estimate the center of symmetry of `differences`, (rounds,), of two alternatives' logarithms.

    Hodges-Lehmann with the interval and p-value of Wilcoxon's signed-rank test (Hollander, Wolfe &
    Chicken 2014, chapter 3); scipy has no quantiles of that test. Correlation between rounds widens
    the interval.
    """
    n = len(differences)
    if n < MIN_SAMPLES:
        return Estimate(float(np.median(differences)))
    if n < MIN_FOR_SIGNED_RANKS:
        return _student(
            float(differences.mean()), float(differences.std(ddof=1)) / np.sqrt(n), n - 1
        )
    factor = autocorrelation_factor(differences)
    values = differences
    # Averages of all pairs take memory in the square of their number.
    if n > MAX_VALUES:
        values = np.quantile(values, (np.arange(MAX_VALUES) + 0.5) / MAX_VALUES)
    first, second = np.triu_indices(len(values))
    averages = np.sort((values[first] + values[second]) / 2)  # Walsh averages
    at_most = _signed_rank_cdf(len(values))
    above = float((averages > 0).sum() + (averages == 0).sum() / 2)
    p = min(1.0, 2 * float(at_most[int(min(above, len(averages) - above))]))
    # Averages outside the interval on each side.
    depth = int(np.searchsorted(at_most, TAIL, side="right")) - 1
    value = float(np.median(averages))
    low = float(averages[depth])
    high = float(averages[-1 - depth])
    if factor > 1:
        p = 2 * float(ndtr(ndtri(p / 2) / factor))
    return Estimate(value, value - factor * (value - low), value + factor * (high - value), p)


def rounds_to_show(gain: float, spread: float, level: float, freedom: float) -> float:
    """Return how many rounds show a gain of this share with `POWER`, at a two-sided level.

    `spread` is the standard deviation of the logarithm of a round's ratio. Since it is uncertain,
    quantiles are those of t with its degrees of freedom (Stein 1945, "A two-sample test for a
    linear hypothesis whose power is independent of the variance").
    """
    reach = float(stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER))
    return (reach * spread / math.log1p(-gain)) ** 2


def autocorrelation_factor(values: np.ndarray) -> float:
    """Return by which factor a lag-1 correlation r > 0 widens an interval: sqrt((1+r) / (1-r))."""
    centered = values - values.mean()
    power = float(centered @ centered)
    # Equal values differ by rounding, which is no correlation.
    rounding = len(values) * (4 * np.finfo(float).eps * float(np.abs(values).max())) ** 2
    if len(values) < MIN_FOR_CORRELATION or power <= rounding:
        return 1.0
    # At most 0.9: near 1 the factor grows without bound.
    correlation = min(0.9, max(0.0, float(centered[1:] @ centered[:-1]) / power))
    return float(np.sqrt((1 + correlation) / (1 - correlation)))


def _student(value: float, error: float, freedom: float) -> Estimate:
    if error == 0:
        return Estimate(value, value, value, float(value == 0))
    reach = float(stdtrit(freedom, 1 - TAIL)) * error
    return Estimate(
        value, value - reach, value + reach, 2 * float(stdtr(freedom, -abs(value) / error))
    )


@lru_cache(maxsize=64)
def _signed_rank_cdf(n: int) -> np.ndarray:
    """Return P(T <= t) for t = 0, 1, ..."""
    # Every rank counts or does not, so the counts are a product of (1 + x**rank).
    counts = np.ones(1)
    for rank in range(1, n + 1):
        counts = (np.pad(counts, (0, rank)) + np.pad(counts, (rank, 0))) / 2
    return np.cumsum(counts)
