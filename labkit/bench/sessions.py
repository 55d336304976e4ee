"""One ratio from several sessions: the same comparison measured by other processes, at another time.

Results vary between processes beyond what their rounds show: memory layout, the cores they run on. Two all-reduces of
64 KB differed by 14% one way in one group of ranks and by 16% the other way in the next, each within 8% by its rounds.
So the variance between sessions is measured, and a ratio is as uncertain as sessions differ.

The variance differs from setting to setting. Each setting has its own estimate with few degrees of freedom, shrunk
towards the typical one of the other settings: moderated t-statistics (Smyth 2004, "Linear models and empirical Bayes
methods for assessing differential expression in microarray experiments", section 3). The typical variance is a median,
so that one setting with large differences counts against itself and not against all.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import fdtri, ndtri, stdtr, stdtrit

from labkit.bench.intervals import CONFIDENCE, TAIL

Z = float(ndtri((1 + CONFIDENCE) / 2))
PRIOR_FREEDOM = 3.0
"""How alike variances of settings are assumed to be: a scaled inverse chi-squared distribution with this freedom.

With more, frames without a difference claim one in over 5% of simulations in which every fifth setting varies ten
times as much as the others; with less, small frames claim nothing (`tests/bench/test_sessions.py`).
"""
MEDIAN_EFFICIENCY = 2 / np.pi
SHARED = 0.5
"""Correlation of two alternatives' ratios, half of whose variance is their baseline's."""


def combine_sessions(ratios: pd.DataFrame, setting: Sequence[str], alternative: str) -> pd.DataFrame:
    """Return one row per (setting, alternative), from rows with the same columns per session.

    Columns: `ratio` (the geometric mean of the sessions'), `low`, `high`, `p`, `rounds`. A ratio with one session in a
    setting where others have several is as uncertain as those; a setting with one session keeps its intervals.
    """
    keys = [*setting, alternative]
    if not ratios.duplicated(keys).any():
        return ratios[[*keys, "ratio", "low", "high", "p", "rounds"]]
    within = ((np.log(ratios["high"]) - np.log(ratios["low"])) / (2 * Z)) ** 2
    table = (
        ratios.assign(log=np.log(ratios["ratio"]), within=within.fillna(np.inf))
        .groupby(keys, dropna=False, sort=False)
        .agg(
            sessions=("log", "size"),
            log=("log", "mean"),
            between=("log", "var"),
            within=("within", "mean"),
            rounds=("rounds", "sum"),
            low=("low", "first"),
            high=("high", "first"),
            p=("p", "first"),
        )
        .reset_index()
    )
    group = table.groupby(list(setting), dropna=False, sort=False).ngroup()
    variance, freedom = _moderate(table, group.to_numpy())
    variance = np.maximum(variance, table["within"]).where(np.isfinite(table["within"]))
    error, is_alone = np.sqrt(variance / table["sessions"]), np.isnan(freedom)
    reach = stdtrit(freedom, 1 - TAIL) * error
    return table[keys].assign(
        ratio=np.exp(table["log"]),
        low=np.exp(table["log"] - reach).mask(is_alone, table["low"]),
        high=np.exp(table["log"] + reach).mask(is_alone, table["high"]),
        p=(2 * stdtr(freedom, -np.abs(table["log"]) / error)).mask(is_alone, table["p"]),
        rounds=table["rounds"],
    )


def _moderate(table: pd.DataFrame, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variance of one session's logarithm and its degrees of freedom, per row; NaN in a setting with one session."""
    repeated = table["between"].notna()
    n = repeated.groupby(group).sum().to_numpy(dtype=float)  # alternatives with several sessions, per setting
    extra = (table["sessions"] - 1).groupby(group).sum().to_numpy(dtype=float)
    own = table["between"].groupby(group).mean().to_numpy()
    freedom = np.where(n > 0, extra / (1 + np.maximum(n - 1, 0) * SHARED**2), np.nan)
    scaled = own / fdtri(freedom, PRIOR_FREEDOM, 0.5)  # its median is the typical variance
    variance, total = own.copy(), freedom.copy()
    for index in np.flatnonzero(n):
        others = np.delete(np.arange(len(n)), index)[np.delete(n, index) > 0]
        if len(others):
            prior = 1 / (1 / PRIOR_FREEDOM + 1 / (MEDIAN_EFFICIENCY * freedom[others].sum()))
            total[index] = freedom[index] + prior
            variance[index] = (prior * np.median(scaled[others]) + freedom[index] * own[index]) / total[index]
    return variance[group], total[group]
