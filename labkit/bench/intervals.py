"""Intervals and p-values from samples alone: of a median, of a ratio within rounds, of a ratio between two groups.

Nothing here assumes a normal distribution from twelve samples on; below, ranks are too coarse to decide anything after
a correction for many comparisons (six pairs give p = 0.03 at the least, eight 0.008), and Student's t is used.
All intervals are deterministic: a page drawn twice from one run says the same.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import bdtr, ndtr, ndtri, stdtr, stdtrit

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
MIN_SAMPLES = 6
"""Below six samples no order statistics bound the median with 95 %: 2 * 0.5**5 > 0.05."""
MIN_FOR_RANKS = 12
MIN_FOR_CORRELATION = 20
"""Rounds from which on the correlation of one with the next can be estimated at all."""
MOST_EXACT = 50
"""Pairs up to which the distribution of the signed-rank statistic is counted out; beyond, it is normal to 3 digits."""
MOST_RANKED = 500
"""Samples are thinned to as many order statistics: what more of them would narrow is below what pages show."""


@dataclass(frozen=True)
class Estimate:
    """A difference of logarithms with its 95 % interval, and the p-value of its being zero; NaN: too few samples."""

    value: float
    low: float = float("nan")
    high: float = float("nan")
    p: float = float("nan")


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """Bounds of the median of `values`, (n,): interpolated order statistics (Hettmansperger & Sheather 1986).

    NaN, NaN below `MIN_SAMPLES`.
    """
    n = len(values)
    if n < MIN_SAMPLES:
        return float("nan"), float("nan")
    ordered, (depth, weight) = np.sort(values), _median_depth(n)
    low = (1 - weight) * ordered[depth - 1] + weight * ordered[depth]
    high = (1 - weight) * ordered[n - depth] + weight * ordered[n - depth - 1]
    return float(low), float(high)


@lru_cache(maxsize=256)
def _median_depth(n: int) -> tuple[int, float]:
    """The order statistic that bounds the median of n samples with at least 95 %, and how far to go to the next."""
    inside = 1 - 2 * bdtr(np.arange(n // 2), n, 0.5)  # coverage between the k-th smallest and largest, k = 1, 2, ...
    depth = int(np.flatnonzero(inside >= CONFIDENCE)[-1]) + 1
    here, next_ = inside[depth - 1], inside[depth] if depth < len(inside) else 0.0
    excess = (here - CONFIDENCE) / (here - next_)
    return depth, float((n - depth) * excess / (depth + (n - 2 * depth) * excess))


def estimate_paired(differences: np.ndarray) -> Estimate:
    """Location of `differences`, (rounds,), around which they are symmetric if a round's two samples differ by chance.

    The Hodges-Lehmann estimate with the interval and p-value of Wilcoxon's signed-rank test (Hollander, Wolfe &
    Chicken 2014, chapter 3). Where a round resembles the one before it, the interval is widened by as much as that
    correlation takes from the rounds' worth, sqrt((1 + r) / (1 - r)).
    """
    n = len(differences)
    if n < MIN_SAMPLES:
        return Estimate(float(np.median(differences)))
    if n < MIN_FOR_RANKS:
        return _student(float(differences.mean()), float(differences.std(ddof=1)) / np.sqrt(n), n - 1)
    widening = _widening(differences)
    kept = _thinned(differences)
    first, second = np.triu_indices(len(kept))
    averages = np.sort((kept[first] + kept[second]) / 2)  # Walsh averages
    depth, p = _signed_rank(len(kept), float((averages > 0).sum() + (averages == 0).sum() / 2))
    value, low, high = float(np.median(averages)), float(averages[depth]), float(averages[-1 - depth])
    if widening > 1:
        p = 2 * float(ndtr(ndtri(p / 2) / widening))
    return Estimate(value, value - widening * (value - low), value + widening * (high - value), p)


def estimate_unpaired(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Shift between two groups of samples, a - b: Hodges-Lehmann with the interval and p-value of Mann and Whitney.

    For groups measured one after the other: their drift is in the shift.
    """
    if min(len(a), len(b)) < MIN_SAMPLES:
        return Estimate(float(np.median(a) - np.median(b)))
    if min(len(a), len(b)) < MIN_FOR_RANKS:
        parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
        squares = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
        freedom = sum(parts) ** 2 / squares if squares else len(a) + len(b) - 2  # Welch-Satterthwaite
        return _student(float(a.mean() - b.mean()), float(np.sqrt(sum(parts))), freedom)
    a, b = _thinned(a), _thinned(b)
    shifts = np.sort((a[:, None] - b).ravel())
    n, deviation = len(shifts), np.sqrt(len(a) * len(b) * (len(a) + len(b) + 1) / 12)
    depth = max(0, int(n / 2 + ndtri(TAIL) * deviation - 0.5))
    above = float((shifts > 0).sum() + (shifts == 0).sum() / 2)
    p = min(1.0, 2 * float(ndtr((min(above, n - above) + 0.5 - n / 2) / deviation)))
    return Estimate(float(np.median(shifts)), float(shifts[depth]), float(shifts[-1 - depth]), p)


def adjusted(p: np.ndarray) -> np.ndarray:
    """Smallest false-discovery rates at which each of many comparisons is a discovery (Benjamini & Hochberg 1995).

    It holds for comparisons that share a baseline, too (positive dependence: Benjamini & Yekutieli 2001). NaN stays.
    """
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    scaled = p[order] * len(order) / np.arange(1, len(order) + 1)
    found = np.full(len(p), np.nan)
    found[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return found


def _student(value: float, error: float, freedom: float) -> Estimate:
    if error == 0:
        return Estimate(value, value, value, float(value == 0))
    reach = float(stdtrit(freedom, 1 - TAIL)) * error
    return Estimate(value, value - reach, value + reach, 2 * float(stdtr(freedom, -abs(value) / error)))


def _signed_rank(n: int, above: float) -> tuple[int, float]:
    """How many Walsh averages lie outside the interval on each side, and the p-value of `above` positive ones."""
    most = n * (n + 1) // 2
    fewer = min(above, most - above)
    if n <= MOST_EXACT:
        at_most = _signed_rank_cdf(n)
        return int(np.searchsorted(at_most, TAIL, side="right")) - 1, min(1.0, 2 * float(at_most[int(fewer)]))
    deviation = np.sqrt(most * (2 * n + 1) / 12)
    p = min(1.0, 2 * float(ndtr((fewer + 0.5 - most / 2) / deviation)))
    return int(most / 2 + ndtri(TAIL) * deviation - 0.5), p


@lru_cache(maxsize=MOST_EXACT)
def _signed_rank_cdf(n: int) -> np.ndarray:
    """P(T <= t) for t = 0, 1, ...: every rank counts or does not, so the counts are a product of (1 + x**rank)."""
    counts = np.ones(1)
    for rank in range(1, n + 1):
        counts = np.pad(counts, (0, rank)) + np.pad(counts, (rank, 0))
    return np.cumsum(counts) / 2.0**n


def _widening(values: np.ndarray) -> float:
    """sqrt((1 + r) / (1 - r)) for the correlation r of one value with the next, where it is positive."""
    centered = values - values.mean()
    power = float(centered @ centered)
    rounding = len(values) * (4 * np.finfo(float).eps * float(np.abs(values).max())) ** 2
    if len(values) < MIN_FOR_CORRELATION or power <= rounding:
        return 1.0
    correlation = min(0.9, max(0.0, float(centered[1:] @ centered[:-1]) / power))
    return float(np.sqrt((1 + correlation) / (1 - correlation)))


def _thinned(values: np.ndarray) -> np.ndarray:
    if len(values) <= MOST_RANKED:
        return values
    return np.quantile(values, (np.arange(MOST_RANKED) + 0.5) / MOST_RANKED)
