"""Medians with intervals, and which differences count.

One significance rule (`with_verdicts`): the false-discovery rate over all comparisons that answer a question stays at
most `FALSE_DISCOVERY_RATE`, and no difference below `MIN_RELEVANT_DIFFERENCE` is claimed. Intervals cover what varied
*within* the run.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from labkit.bench.intervals import (
    CONFIDENCE,
    MIN_SAMPLES,
    Estimate,
    estimate_paired,
    estimate_unpaired,
    median_interval,
)

__all__ = ["CONFIDENCE", "MIN_SAMPLES"]

Verdict = Literal["faster", "slower", "no difference shown"]

FALSE_DISCOVERY_RATE = 0.025
"""Half of the usual 5%: successive rounds resemble one another, and intervals do not cover all of that."""
MIN_RELEVANT_DIFFERENCE = 0.03
"""Runs differ by more than repeats within one do."""


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
    """The ratio of a to b with its interval. For times, below 1 means that a is faster.

    `p` is the probability of such a ratio, or one further from 1, without a difference. `rounds` are those that both
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


@lru_cache(maxsize=8192)  # tables, figures and answers of a page summarize the same samples
def _summary(samples: bytes) -> Summary:
    values = np.frombuffer(samples)
    low, high = median_interval(values)
    std = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
    p90, p95, p99 = map(float, np.percentile(values, [90, 95, 99]))
    return Summary(len(values), float(np.median(values)), low, high, float(values.mean()), std, p90, p95, p99)


def compare(a: Iterable[float], b: Iterable[float], *, interleaved: bool) -> Comparison:
    """Compare two sets of times.

    `interleaved`: repeat i of both was measured in the same round, so the rounds' ratios are compared and a slow moment
    that hit both does not count. ValueError if their numbers differ all the same. Samples that are not all above zero
    get a ratio of medians and no interval.
    """
    first, second = _finite(a), _finite(b)
    if interleaved and len(first) != len(second):
        raise ValueError(f"expected as many samples of both, since they took turns: {len(first)} and {len(second)}")
    return _comparison(first.tobytes(), second.tobytes(), interleaved)


@lru_cache(maxsize=8192)
def _comparison(a: bytes, b: bytes, interleaved: bool) -> Comparison:
    first, second = np.frombuffer(a), np.frombuffer(b)
    rounds = min(len(first), len(second))
    if min(first.min(), second.min()) <= 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = float(np.median(first) / np.median(second))
        return Comparison(ratio, float("nan"), float("nan"), float("nan"), rounds, "no difference shown")
    logs = np.log(first), np.log(second)
    estimate: Estimate = estimate_paired(logs[0] - logs[1]) if interleaved else estimate_unpaired(*logs)
    ratio, low, high = (float(np.exp(value)) for value in (estimate.value, estimate.low, estimate.high))
    return Comparison(ratio, low, high, estimate.p, rounds, _verdict(ratio, estimate.p))


def _verdict(ratio: float, p: float) -> Verdict:
    """The verdict on a p-value that is adjusted for the other comparisons."""
    if p <= FALSE_DISCOVERY_RATE and ratio <= 1 / (1 + MIN_RELEVANT_DIFFERENCE):
        return "faster"
    if p <= FALSE_DISCOVERY_RATE and ratio >= 1 + MIN_RELEVANT_DIFFERENCE:
        return "slower"
    return "no difference shown"


def with_verdicts(ratios: pd.DataFrame) -> pd.DataFrame:
    """Add `verdict` to a table whose rows answer one question together; a part of it is another question.

    Needs the columns `ratio` and `p` of `Comparison`. Rows without a p-value show no difference.
    """
    p = adjust_p(ratios["p"].to_numpy(dtype=float))
    verdicts = [_verdict(*row) for row in zip(ratios["ratio"], p, strict=True)]
    return ratios.assign(verdict=pd.Series(verdicts, index=ratios.index, dtype=object))


def adjust_p(p: np.ndarray) -> np.ndarray:
    """False-discovery rates by Benjamini & Hochberg (1995) of p-values, (n,); NaN stays.

    They hold for comparisons that share a baseline, too (positive dependence: Benjamini & Yekutieli 2001).
    """
    rates, has_p = np.full(len(p), np.nan), ~np.isnan(p)
    if has_p.any():
        rates[has_p] = false_discovery_control(p[has_p])
    return rates


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
    """Compare, within each setting, `value` (a time) of every alternative in `column` with that of `baseline`.

    One row per (setting, alternative) with the fields of `Comparison`; `verdict` is that of all rows together. Settings
    without the baseline are left out. Rows of a setting and alternative are in the order of their repeats.
    """
    rows = []
    for key, group in frame.groupby(list(setting), sort=True, dropna=False):
        by_name = dict(iter(group.groupby(column)[value]))
        base = by_name.pop(baseline, None)
        for name, samples in by_name.items() if base is not None else ():
            ratio = vars(compare(samples, base, interleaved=interleaved))
            rows.append(dict(zip(setting, key, strict=True)) | {column: name} | ratio)
    return with_verdicts(pd.DataFrame(rows, columns=[*setting, column, *Comparison.__dataclass_fields__]))


def slowest_rank(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """The largest `value` among the ranks of each repeat: a collective ends with its last rank."""
    return frame.groupby([*by, "repeat"], dropna=False)[value].max().reset_index()


def _finite(samples: Iterable[float]) -> np.ndarray:
    values = np.array(list(samples), dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected a non-empty sequence of finite numbers, got {samples!r}")
    return values
