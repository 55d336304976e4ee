"""Which differences count: comparisons by table, one rule of significance, sessions.

The rule (`with_verdicts`): the false-discovery rate over all comparisons that answer a question is
at most `FALSE_DISCOVERY_RATE`, and no difference below `MIN_RELEVANT_DIFFERENCE` is claimed. One of
these comparisons is over all configurations (`pool_configurations`): together they may show a
difference that none of them shows alone.

A session is the same comparison, measured by other processes at another time. Results vary between
processes more than their rounds show: two all-reduces of 64 KB differed by 14% one way in one group
of ranks and by 16% the other way in the next, each within 8% by its rounds. So the uncertainty of a
ratio comes from the spread of its sessions. It is shrunk towards the median spread of the other
settings: moderated t-statistics (Smyth 2004, "Linear models and empirical Bayes methods for
assessing differential expression in microarray experiments", section 3).
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import fdtri, ndtr, ndtri, stdtr, stdtrit

from labkit.bench.intervals import (
    CONFIDENCE,
    FALSE_DISCOVERY_RATE,
    TAIL,
    Estimate,
    estimate_paired,
    median_interval,
)

Verdict = Literal["faster", "slower", "no difference shown"]
NO_DIFFERENCE_SHOWN: Verdict = "no difference shown"

# Smallest relative difference that counts. Two runs differ by more than the repeats within a run.
MIN_RELEVANT_DIFFERENCE = 0.03
# Freedom of the prior for variances of settings, a scaled inverse chi-squared one. A larger value
# raises false claims above 5% if every fifth setting varies ten times as much as the others. A
# smaller one makes small tables claim nothing (`tests/bench/test_sessions.py`).
PRIOR_FREEDOM = 3.0
MEDIAN_EFFICIENCY = 2 / np.pi
# Correlation of two alternatives' ratios: half of the variance of each is their baseline's.
BASELINE_CORRELATION = 0.5


def compare(a: Iterable[float], b: Iterable[float]) -> Estimate:
    """Estimate the ratio of times a to b, of the same rounds; below 1 means that a is faster.

    The rounds' ratios are compared, so a slow moment that hit both does not count. ValueError if
    their numbers differ, or for a value that is not finite. Samples that are not all above zero get
    a ratio of medians and no interval.
    """
    first = _finite(a)
    second = _finite(b)
    if len(first) != len(second):
        raise ValueError(
            f"expected as many samples of both, since they took turns: {len(first)} and"
            f" {len(second)}"
        )
    if min(first.min(), second.min()) <= 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            return Estimate(float(np.median(first) / np.median(second)))
    # Of logarithms, so that a to b and b to a give one answer.
    log = estimate_paired(np.log(first) - np.log(second))
    ratio, low, high = np.exp([log.value, log.low, log.high]).tolist()
    return Estimate(ratio, low, high, log.p)


def with_verdicts(ratios: pd.DataFrame) -> pd.DataFrame:
    """Add `verdict` to a table with `ratio` and `p` whose rows answer one question together.

    Rows without a p-value show no difference. Rates are those of Benjamini & Hochberg (1995), which
    hold for comparisons that share a baseline (positive dependence: Benjamini & Yekutieli 2001).
    """
    # Here, as it takes a second to import, and only who answers needs it.
    from scipy.stats import false_discovery_control

    ratio = ratios["ratio"].to_numpy(dtype=float)
    p = ratios["p"].to_numpy(dtype=float, copy=True)
    has_p = ~np.isnan(p)
    # Without the others: a comparison that has no p-value is not one more test.
    if has_p.any():
        p[has_p] = false_discovery_control(p[has_p])
    is_significant = p <= FALSE_DISCOVERY_RATE
    least = 1 + MIN_RELEVANT_DIFFERENCE
    verdict = np.full(len(p), NO_DIFFERENCE_SHOWN, dtype=object)
    verdict[is_significant & (ratio <= 1 / least)] = "faster"
    verdict[is_significant & (ratio >= least)] = "slower"
    return ratios.assign(verdict=verdict)


def pool_configurations(ratios: pd.DataFrame, alternative: str) -> pd.DataFrame:
    """Return one row per alternative over all its configurations: `ratio`, `low`, `high`, `p`, `n`.

    `ratio` is the geometric mean of the rows' ratios, each row counting alike: what a configuration
    gains may differ from what the next gains, and a precise row must not speak for the others. The
    interval is that of this mean. The p-value is the larger of its own and of the rows' p-values
    together (Stouffer et al. 1949), so that interval and verdict agree. Rows without a p-value are
    left out, and alternatives with a single other row.
    """
    pooled = []
    for name, rows in ratios[ratios["p"].notna()].groupby(alternative, sort=False):
        if len(rows) > 1:
            pooled.append((name, *_pool(rows[["ratio", "low", "high", "p"]]), len(rows)))
    return pd.DataFrame(pooled, columns=[alternative, "ratio", "low", "high", "p", "n"])


def _pool(rows: pd.DataFrame) -> tuple[float, float, float, float]:
    ratio, low, high, p = rows.to_numpy(dtype=float).T
    logs = np.log(ratio)
    error = (np.log(high) - np.log(low)) / (2 * ndtri((1 + CONFIDENCE) / 2))
    if (error <= 0).all():  # counts, which have no noise
        mean = float(np.exp(logs.mean()))
        return mean, mean, mean, float(p.min())
    # p = 0, of rounds that are all alike, would outweigh all other rows.
    score = np.sign(logs) * -ndtri(np.clip(p, 1e-9, 1) / 2)
    together = 2 * float(ndtr(-abs(score.sum()) / np.sqrt(len(logs))))
    mean = logs.mean()
    error_of_mean = np.sqrt((error**2).sum()) / len(logs)
    total = max(together, 2 * float(ndtr(-abs(mean) / error_of_mean)))
    reach = ndtri((1 + CONFIDENCE) / 2) * error_of_mean
    ratio, low, high = np.exp([mean, mean - reach, mean + reach]).tolist()
    return ratio, low, high, total


def median_groups(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """Return `median`, `low`, `high` and `n` of the column `value`, by group of `by`.

    ValueError for a value that is not finite.
    """
    groups = [(key, _finite(group)) for key, group in frame.groupby(list(by), dropna=False)[value]]
    rows = [
        (*key, float(np.median(some)), *median_interval(some), len(some)) for key, some in groups
    ]
    return pd.DataFrame(rows, columns=[*by, "median", "low", "high", "n"])


def compare_groups(
    frame: pd.DataFrame, value: str, setting: Sequence[str], column: str, baseline: Hashable
) -> pd.DataFrame:
    """Compare `value`, a time, of every alternative in `column` with the baseline's.

    One row per (setting, alternative) with `ratio`, `low`, `high`, `p`, and `verdict`, adjusted for
    all rows. Settings without the baseline are left out. Rows of a setting and alternative are in
    the order of their repeats.
    """
    rows = []
    for key, group in frame.groupby(list(setting), sort=True, dropna=False):
        by_name = dict(iter(group.groupby(column)[value]))
        base = by_name.pop(baseline, None)
        if base is None:
            continue
        for name, samples in by_name.items():
            one = compare(samples, base)
            rows.append((*key, name, one.value, one.low, one.high, one.p))
    return with_verdicts(
        pd.DataFrame(rows, columns=[*setting, column, "ratio", "low", "high", "p"])
    )


def slowest_rank(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """Return the largest `value` of any rank per repeat: a collective ends with its last rank."""
    return frame.groupby([*by, "repeat"], dropna=False)[value].max().reset_index()


def _finite(samples: Iterable[float]) -> np.ndarray:
    values = np.array(list(samples), dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected a non-empty sequence of finite numbers, got {samples!r}")
    return values


def combine_sessions(
    ratios: pd.DataFrame, setting: Sequence[str], alternative: str
) -> pd.DataFrame:
    """Return one row per (setting, alternative), from rows with the same columns per session.

    `ratio` is the geometric mean of the sessions'. An alternative with a single session is as
    uncertain as those with several in its setting; a setting with one session keeps its intervals.
    """
    keys = [*setting, alternative]
    if not ratios.duplicated(keys).any():
        return ratios[[*keys, "ratio", "low", "high", "p"]]
    logs = np.log(ratios[["ratio", "low", "high"]])
    within = ((logs["high"] - logs["low"]) / (2 * ndtri((1 + CONFIDENCE) / 2))) ** 2
    groups = ratios.assign(log=logs["ratio"], within=within.fillna(np.inf)).groupby(
        keys, dropna=False, sort=False
    )
    table = groups[["low", "high", "p"]].first()
    table["sessions"] = groups["log"].size()
    table["log"] = groups["log"].mean()
    table["between"] = groups["log"].var()
    table["within"] = groups["within"].mean()
    table = table.reset_index()
    group = table.groupby(list(setting), dropna=False, sort=False).ngroup()
    variance, freedom = _session_variance(table, group.to_numpy())
    # Sessions that agree by chance cannot be surer than their own rounds.
    variance = np.maximum(variance, table["within"]).where(np.isfinite(table["within"]))
    error = np.sqrt(variance / table["sessions"])
    is_alone = np.isnan(freedom)
    reach = stdtrit(freedom, 1 - TAIL) * error
    return table[keys].assign(
        ratio=np.exp(table["log"]),
        low=np.exp(table["log"] - reach).mask(is_alone, table["low"]),
        high=np.exp(table["log"] + reach).mask(is_alone, table["high"]),
        p=(2 * stdtr(freedom, -np.abs(table["log"]) / error)).mask(is_alone, table["p"]),
    )


def moderate_variance(
    variance: Any, freedom: Any, prior: Any, prior_freedom: Any
) -> tuple[Any, Any]:
    """Shrink a variance towards a prior one, each weighted by its degrees of freedom.

    Returns variance and freedom of the result. Source: Smyth 2004, equation 7.
    """
    total = prior_freedom + freedom
    return (prior_freedom * prior + freedom * variance) / total, total


def _session_variance(table: pd.DataFrame, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the variance of one session's logarithm and its degrees of freedom, per row.

    NaN in a setting with one session.
    """
    repeated = table["between"].notna()
    # Alternatives with several sessions, per setting.
    n = repeated.groupby(group).sum().to_numpy(dtype=float)
    extra = (table["sessions"] - 1).groupby(group).sum().to_numpy(dtype=float)
    own = table["between"].groupby(group).mean().to_numpy()
    freedom = np.where(n > 0, extra / (1 + np.maximum(n - 1, 0) * BASELINE_CORRELATION**2), np.nan)
    scaled = own / fdtri(freedom, PRIOR_FREEDOM, 0.5)  # its median is the typical variance
    variance = own.copy()
    total = freedom.copy()
    for index in np.flatnonzero(n):
        others = np.delete(np.arange(len(n)), index)[np.delete(n, index) > 0]
        if len(others):
            prior = 1 / (1 / PRIOR_FREEDOM + 1 / (MEDIAN_EFFICIENCY * freedom[others].sum()))
            variance[index], total[index] = moderate_variance(
                own[index], freedom[index], np.median(scaled[others]), prior
            )
    return variance[group], total[group]
