"""What samples say and what they do not: medians with intervals, and which differences count.

One significance rule (`with_verdicts`): the false-discovery rate over all comparisons that answer
a question stays at most `FALSE_DISCOVERY_RATE`, and a difference smaller than `MIN_RELEVANT_DIFFERENCE` is not claimed
however certain it is. Intervals cover what varied *within* the run.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from labkit.bench.intervals import (
    CONFIDENCE,
    MIN_SAMPLES,
    Estimate,
    adjusted,
    estimate_paired,
    estimate_unpaired,
    median_interval,
)

__all__ = ["CONFIDENCE", "MIN_SAMPLES"]

Bound = float | np.ndarray
Verdict = Literal["faster", "slower", "no difference shown"]

RESAMPLES = 2000
MOST_KEPT = 500  # samples whose resamples are kept, of which there are RESAMPLES times as many
# Half of the usual 5 %: rounds that follow one another resemble one another, and intervals do not know it all.
FALSE_DISCOVERY_RATE = 0.025
# Other runs differ by more than repeats within one do.
MIN_RELEVANT_DIFFERENCE = 0.03


@dataclass(frozen=True)
class Summary:
    """Order statistics of one set of samples; `low` and `high` bound the median (NaN: too few samples)."""

    n: int
    median: float
    low: float
    high: float
    mean: float
    std: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Comparison:
    """How many times b an a is, with its interval. For times, below 1 means that a is faster.

    `p` is the probability of such a ratio, or one further from 1, where nothing differs. `rounds` are those that both
    have. `verdict` is that of one comparison alone; for several that answer one question, use `with_verdicts`.
    """

    ratio: float
    low: float
    high: float
    p: float
    rounds: int
    verdict: Verdict

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.ratio:.2f}x (too few samples for an interval)"
        return f"{self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def summarize(samples: Iterable[float]) -> Summary:
    """Describe samples. ValueError when there are none or one is not finite."""
    return _summary(_finite(samples).tobytes())


# The tables, figures and answers of a page ask for the same samples several times.
@lru_cache(maxsize=8192)
def _summary(samples: bytes) -> Summary:
    """`summarize` of float64s."""
    values = np.frombuffer(samples)
    low, high = median_interval(values)
    return Summary(
        n=len(values),
        median=float(np.median(values)),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else float("nan"),
        p90=float(np.percentile(values, 90)),
        p95=float(np.percentile(values, 95)),
        p99=float(np.percentile(values, 99)),
        low=low,
        high=high,
    )


def compare(a: Iterable[float], b: Iterable[float], *, interleaved: bool) -> Comparison:
    """Is a faster than b? Both are times.

    `interleaved` means that repeat i of both was measured in the same round: then the ratios of the rounds are what is
    looked at, so that a slow moment that hit both does not count. ValueError if their numbers differ all the same.
    Samples that are not all above zero have a ratio of medians and no interval.
    """
    first, second = _finite(a), _finite(b)
    if interleaved and len(first) != len(second):
        raise ValueError(f"expected as many samples of both, since they took turns: {len(first)} and {len(second)}")
    return _comparison(first.tobytes(), second.tobytes(), interleaved)


@lru_cache(maxsize=8192)
def _comparison(a: bytes, b: bytes, interleaved: bool) -> Comparison:
    """`compare` of float64s."""
    first, second = np.frombuffer(a), np.frombuffer(b)
    rounds = min(len(first), len(second))
    if min(first.min(), second.min()) <= 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = float(np.median(first) / np.median(second))
        return Comparison(ratio, float("nan"), float("nan"), float("nan"), rounds, "no difference shown")
    logs = np.log(first), np.log(second)
    found: Estimate = estimate_paired(logs[0] - logs[1]) if interleaved else estimate_unpaired(*logs)
    ratio, low, high = (float(np.exp(value)) for value in (found.value, found.low, found.high))
    return Comparison(ratio, low, high, found.p, rounds, _verdict(ratio, found.p))


def _verdict(ratio: float, p: float) -> Verdict:
    """From a p-value that is adjusted for all comparisons beside it."""
    if p <= FALSE_DISCOVERY_RATE and ratio <= 1 / (1 + MIN_RELEVANT_DIFFERENCE):
        return "faster"
    if p <= FALSE_DISCOVERY_RATE and ratio >= 1 + MIN_RELEVANT_DIFFERENCE:
        return "slower"
    return "no difference shown"


def with_verdicts(ratios: pd.DataFrame) -> pd.DataFrame:
    """The table with `verdict` for each of its rows as comparisons that answer one question together.

    A part of a table is another question, and judged anew: true differences in the rest would let too much pass.
    Needs the columns `ratio` and `p` of `Comparison`. Rows without a p-value show no difference.
    """
    adjusted_p = adjusted(ratios["p"].to_numpy(dtype=float))
    verdicts = [_verdict(ratio, p) for ratio, p in zip(ratios["ratio"], adjusted_p, strict=True)]
    return ratios.assign(verdict=pd.Series(verdicts, index=ratios.index, dtype=object))


def is_significant(p: np.ndarray) -> np.ndarray:
    """Which comparisons that answer one question are significant, by the rule of `with_verdicts`."""
    return adjusted(p) <= FALSE_DISCOVERY_RATE


def beyond_p(value: np.ndarray, low: np.ndarray, high: np.ndarray, least: Bound, most: Bound) -> np.ndarray:
    """P-values of values' lying outside of `least` to `most` by chance; 1 inside, NaN without an interval.

    `low` and `high` bound 95 %, or are the value itself where it is exact.
    """
    error = (high - low) / (2 * ndtri((1 + CONFIDENCE) / 2))
    beyond = np.maximum(least - value, value - most)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(beyond > 0, 2 * ndtr(-beyond / error), 1.0)
    return np.where(np.isnan(error), np.nan, p)


def summarize_groups(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """One row per group of `by`, with the fields of `Summary` over the column `value`."""
    rows = []
    for key, samples in frame.groupby(list(by), sort=True, dropna=False)[value]:
        rows.append(dict(zip(by, key, strict=True)) | vars(summarize(samples)))
    return pd.DataFrame(rows, columns=[*by, *Summary.__dataclass_fields__])


def compare_groups(
    frame: pd.DataFrame,
    value: str,
    setting: Sequence[str],
    column: str,
    baseline: Hashable,
    *,
    interleaved: bool = True,
) -> pd.DataFrame:
    """Within each setting, `value` (a time) of every alternative in `column` over that of `baseline`.

    One row per (setting, alternative) with `ratio`, its interval `low`, `high`, `p`, `rounds`, and the `verdict` that
    all rows together allow (`with_verdicts`). Settings without the baseline are left out. `interleaved` as in
    `compare`: the rows of a setting and alternative are in the order of their repeats.
    """
    rows = []
    for key, group in frame.groupby(list(setting), sort=True, dropna=False):
        by_name = dict(iter(group.groupby(column)[value]))
        base = by_name.pop(baseline, None)
        if base is None:
            continue
        for name, samples in by_name.items():
            ratio = vars(compare(samples, base, interleaved=interleaved))
            rows.append(dict(zip(setting, key, strict=True)) | {column: name} | ratio)
    return with_verdicts(pd.DataFrame(rows, columns=[*setting, column, *Comparison.__dataclass_fields__]))


def slowest_rank(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """The largest `value` among the ranks of each repeat: a collective is over when its last rank is."""
    return frame.groupby([*by, "repeat"], dropna=False)[value].max().reset_index()


def resampled_medians(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Medians, (RESAMPLES,), of as many resamples of `values`, (n,). With one seed, resamples of one n are alike."""
    # A median is known by its rank, and small integers sort 8 to 30 times as fast as np.median selects.
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), np.int16 if len(values) <= np.iinfo(np.int16).max else np.int64)
    rank[order] = np.arange(len(values))
    resamples = _kept_resamples if len(values) <= MOST_KEPT else _draw
    drawn = np.sort(rank[resamples(len(values), seed)], axis=1)
    ordered = values[order]
    lower, upper = drawn[:, (len(values) - 1) // 2], drawn[:, len(values) // 2]
    return (ordered[lower] + ordered[upper]) / 2


def _draw(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


_kept_resamples = lru_cache(maxsize=16)(_draw)


def _finite(samples: Iterable[float]) -> np.ndarray:
    values = np.array(list(samples), dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected a non-empty sequence of finite numbers, got {samples!r}")
    return values
