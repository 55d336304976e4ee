"""What samples say and what they do not: medians with intervals, and a verdict between two alternatives.

Intervals are percentile bootstrap intervals (Efron 1979) of the median, from a fixed seed, so that a page
drawn twice from one run says the same. They cover what varied *within* the run.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import comb
from typing import Literal

import numpy as np
import pandas as pd

Verdict = Literal["faster", "slower", "no difference shown"]

CONFIDENCE = 0.95
RESAMPLES = 2000
MOST_KEPT = 500  # samples whose resamples are kept, of which there are RESAMPLES times as many
# Below six samples no interval of order statistics covers the median with 95 %: 2 * 0.5**5 > 0.05.
FEWEST_SAMPLES = 6
# Repeats that follow one another resemble one another more than repeats of another run do, so a within-run
# interval is too narrow; a difference smaller than this is not claimed even where it excludes 1.
LEAST_RELEVANT_DIFFERENCE = 0.03


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
    """Ratio of two medians, a over b, with its interval. For times, below 1 means that a is faster."""

    ratio: float
    low: float
    high: float
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
    low, high = _median_interval(values)
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

    `interleaved` means that repeat i of both was measured in the same round: then whole rounds are resampled, so
    that a slow moment that hit both does not widen the interval. ValueError if their numbers differ all the same.
    """
    first, second = _finite(a), _finite(b)
    if interleaved and len(first) != len(second):
        raise ValueError(f"expected as many samples of both, since they took turns: {len(first)} and {len(second)}")
    return _comparison(first.tobytes(), second.tobytes(), interleaved)


@lru_cache(maxsize=8192)
def _comparison(a: bytes, b: bytes, interleaved: bool) -> Comparison:
    """`compare` of float64s."""
    first, second = np.frombuffer(a), np.frombuffer(b)
    ratio = float(np.median(first) / np.median(second))
    if min(len(first), len(second)) < FEWEST_SAMPLES:
        return Comparison(ratio, float("nan"), float("nan"), "no difference shown")
    seed = 0 if interleaved else 1  # of samples taken in turns, the same rounds are drawn
    low, high = _percentiles(resampled_medians(first) / resampled_medians(second, seed))
    return Comparison(ratio, low, high, _verdict(low, high))


def beyond_chance(shown: int, settings: int, *, tries: int = 1) -> bool:
    """Whether a verdict in one direction in `shown` of `settings` is more than chance would give.

    Where nothing differs, a 95 % interval still lies wholly on one given side of 1 in 2.5 % of comparisons, and
    at least one of `tries` alternatives that are compared in one setting does in at most 1 - 0.975**tries. True
    if that gives `shown` or more settings with a probability below 5 % (binomial tail).
    """
    chance = 1 - (1 - (1 - CONFIDENCE) / 2) ** tries
    fewer = sum(comb(settings, k) * chance**k * (1 - chance) ** (settings - k) for k in range(shown))
    return 1 - fewer < 1 - CONFIDENCE


def summarize_groups(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """One row a group of `by`, with the fields of `Summary` over the column `value`."""
    rows = []
    for key, group in frame.groupby(list(by), sort=True, dropna=False):
        rows.append(dict(zip(by, key, strict=True)) | asdict(summarize(group[value])))
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

    One row a (setting, alternative) with `ratio`, its interval `low`, `high`, and `verdict`. Settings without the
    baseline are left out. `interleaved` as in `compare`: the rows of a setting and alternative are in the order
    of their repeats.
    """
    rows = []
    for key, group in frame.groupby(list(setting), sort=True, dropna=False):
        base = group.loc[group[column] == baseline, value]
        if base.empty:
            continue
        for name, samples in group[group[column] != baseline].groupby(column)[value]:
            ratio = asdict(compare(samples, base, interleaved=interleaved))
            rows.append(dict(zip(setting, key, strict=True)) | {column: name} | ratio)
    return pd.DataFrame(rows, columns=[*setting, column, *Comparison.__dataclass_fields__])


def slowest_rank(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """The largest `value` among the ranks of each repeat: a collective is over when its last rank is."""
    return frame.groupby([*by, "repeat"], dropna=False)[value].max().reset_index()


def _verdict(low: float, high: float) -> Verdict:
    if high < 1 - LEAST_RELEVANT_DIFFERENCE:
        return "faster"
    if low > 1 + LEAST_RELEVANT_DIFFERENCE:
        return "slower"
    return "no difference shown"


def resampled_medians(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Medians, (RESAMPLES,), of as many resamples of `values`, (n,). With one seed, resamples of one n are alike."""
    # A median is known by its rank, and small integers sort 8 to 30 times as fast as np.median selects.
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), np.int16 if len(values) <= np.iinfo(np.int16).max else np.int64)
    rank[order] = np.arange(len(values))
    drawn = np.sort(rank[_resamples(len(values), seed)], axis=1)
    ordered = values[order]
    lower, upper = drawn[:, (len(values) - 1) // 2], drawn[:, len(values) // 2]
    return (ordered[lower] + ordered[upper]) / 2


def _resamples(n: int, seed: int) -> np.ndarray:
    return _kept_resamples(n, seed) if n <= MOST_KEPT else _draw(n, seed)


def _draw(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


_kept_resamples = lru_cache(maxsize=16)(_draw)


def _median_interval(values: np.ndarray) -> tuple[float, float]:
    if len(values) < FEWEST_SAMPLES:
        return float("nan"), float("nan")
    return _percentiles(resampled_medians(values))


def _percentiles(resampled: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return float(low), float(high)


def _finite(samples: Iterable[float]) -> np.ndarray:
    values = np.array(list(samples), dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected a non-empty sequence of finite numbers, got {samples!r}")
    return values
