"""Ratios of a lab's runs, those of each `Compare`, and how they changed between sets of runs."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import ndtri

from labkit.bench.changes import compare_levels
from labkit.bench.intervals import CONFIDENCE
from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.answers import Compare
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.units import labels

KEYS = ["question", "configuration"]
# A run on GPUs and one on a CPU share no point unless these fields are left out.
PLACEMENT = {"device", "backend"}
# Standard deviation of a ratio from run to run on one quiet machine: two runs differ by up to 5%.
DRIFT = 0.018
# So a smaller factor between the ratios of two runs is no difference, however narrow its interval.
USUAL_VARIATION = 1.05


def ratio_tables(lab: Lab, runs: Sequence[Mapping[str, Answer]]) -> list[pd.DataFrame]:
    """Return ratios with intervals by question and configuration, named alike in all runs."""
    tables = [list[pd.DataFrame]() for _ in runs]
    for question in lab.questions:
        if not isinstance(question, Compare):
            continue
        answers = [run[question.id].table for run in runs]
        measured = [table for table in answers if table is not None]
        # A device that is the only one of each run names no configuration.
        columns = [
            key
            for key in question.metric.columns
            if key not in PLACEMENT or any(table[key].nunique() > 1 for table in measured)
        ]
        for table, rows in zip(answers, tables, strict=True):
            if table is not None:
                ratios = table[["ratio", "low", "high"]].astype(float)
                rows.append(
                    ratios.assign(question=question.id, configuration=labels(table, columns))
                )
    empty = pd.DataFrame(columns=[*KEYS, "ratio", "low", "high"])
    # An empty table has no type of its own, and would take that of the others away.
    named = [pd.concat(rows or [empty]).set_index(KEYS).astype(float) for rows in tables]
    # Rows that are named alike cannot be told apart in another run.
    return [table[~table.index.duplicated(keep=False)] for table in named]


def compare_ratios(before: Sequence[pd.DataFrame], after: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return how ratios changed from one set of runs to another, for those that both have.

    Columns: `change`, a ratio of ratios, with `change_low` and `change_high`, which hold for all
    rows together; `difference`, "higher", "lower" or `NO_DIFFERENCE_SHOWN`.
    """
    # Counts may be 0.
    with np.errstate(divide="ignore", invalid="ignore"):
        earlier = pd.concat([np.log(table["ratio"]) for table in before], axis="columns")
        later = pd.concat([np.log(table["ratio"]) for table in after], axis="columns")
        errors = pd.concat([_squared_error(table) for table in (*before, *after)], axis="columns")
    shared = earlier.index.intersection(later.index)
    table = compare_levels(
        earlier.loc[shared],
        later.loc[shared],
        errors.loc[shared].mean(axis="columns"),
        drift=DRIFT,
        n_compared=max(len(shared), 1),
    )
    change = table["change"]
    # A difference must be outside of its interval, and of what runs of one machine differ by.
    least = np.maximum(table["reach"], math.log(USUAL_VARIATION))
    difference = np.select(
        [change > least, change < -least], ["higher", "lower"], NO_DIFFERENCE_SHOWN
    )
    logs = {
        "change": change,
        "change_low": change - table["reach"],
        "change_high": change + table["reach"],
    }
    return np.exp(pd.DataFrame(logs)).assign(difference=difference)


def _squared_error(table: pd.DataFrame) -> pd.Series:
    """Return the variance of a ratio's logarithm by its interval; infinite without one."""
    # A count has no noise: its interval is the ratio itself.
    width = (np.log(table["high"]) - np.log(table["low"])) / (2 * ndtri((1 + CONFIDENCE) / 2))
    return (width**2).fillna(math.inf).mask(table["high"] == table["low"], 0.0)
