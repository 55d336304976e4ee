"""Ratios of two runs of a lab, those of each `Compare`, side by side, and how they changed."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import ndtri

from labkit.bench.changes import compare_levels
from labkit.bench.intervals import CONFIDENCE
from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.units import labels

# A run on GPUs and one on a CPU share no point unless these fields are left out.
PLACEMENT = {"device", "backend"}
# Standard deviation of a ratio from run to run on one quiet machine: two runs differ by up to 5%.
DRIFT = 0.018
# So a smaller factor between the ratios of two runs is no difference, however narrow its interval.
USUAL_VARIATION = 1.05
RATIO = ["ratio", "low", "high"]


def compare_ratios(
    lab: Lab, first: Mapping[str, Answer], other: Mapping[str, Answer]
) -> pd.DataFrame:
    """Return the ratios that the answers of two runs share, one row each.

    Columns: `question`, `configuration`; ratio and interval of the first run (`ratio_first`, ...)
    and of the other (`ratio`, ...); `change`, a ratio of ratios, with `change_low` and
    `change_high`, which hold for all rows together; `difference`, "higher", "lower" or
    `NO_DIFFERENCE_SHOWN`.
    """
    # Columns and their type, if the runs share no ratio.
    shared = {"": pd.DataFrame(columns=[*(f"{name}_first" for name in RATIO), *RATIO], dtype=float)}
    for question in lab.comparisons:
        before = first[question.id].table
        after = other[question.id].table
        if before is not None and after is not None:
            # A device that is the only one of each run names no configuration.
            columns = [
                key
                for key in question.metric.columns
                if key not in PLACEMENT or max(before[key].nunique(), after[key].nunique()) > 1
            ]
            ratios = _named_ratios(before, columns).add_suffix("_first")
            shared[question.id] = ratios.join(_named_ratios(after, columns), how="inner")
    table = pd.concat(shared, names=["question", "configuration"])
    errors = [_squared_errors(table, suffix) for suffix in ("_first", "")]
    # Counts may be 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.log(table[["ratio_first", "ratio"]])
    changes = compare_levels(
        levels[["ratio_first"]],
        levels[["ratio"]],
        (errors[0] + errors[1]) / 2,
        drift=DRIFT,
        n_compared=max(len(table), 1),
    )
    change = changes["change"]
    reach = changes["reach"]
    # A difference must be outside of its interval, and of what runs of one machine differ by.
    least = np.maximum(reach, math.log(USUAL_VARIATION))
    difference = np.select(
        [change > least, change < -least], ["higher", "lower"], NO_DIFFERENCE_SHOWN
    )
    table = table.assign(
        change=np.exp(change),
        change_low=np.exp(change - reach),
        change_high=np.exp(change + reach),
        difference=difference,
    )
    return table.reset_index()


def _named_ratios(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return the ratios by the names of their rows; rows of one name cannot be told apart."""
    ratios = table[RATIO].astype(float).set_axis(labels(table, columns))
    return ratios[~ratios.index.duplicated(keep=False)]


def _squared_errors(table: pd.DataFrame, suffix: str) -> pd.Series:
    """Return the variance of a ratio's logarithm by its interval; infinite without one."""
    low = table[f"low{suffix}"]
    high = table[f"high{suffix}"]
    with np.errstate(divide="ignore", invalid="ignore"):
        width = (np.log(high) - np.log(low)) / (2 * ndtri((1 + CONFIDENCE) / 2))
    # A count has no noise: its interval is the ratio itself.
    return (width**2).fillna(math.inf).mask(high == low, 0.0)
