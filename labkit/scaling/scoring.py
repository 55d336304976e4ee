"""How wrong predictions of published runs are, by constants and quantiles that saw no row of their architecture."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from labkit.scaling import intervals
from labkit.scaling.constants import Constants
from labkit.scaling.model import Numbers, step_flops
from labkit.scaling.runs import Runs

FOLDS = 6

OTHERS: Mapping[str, tuple[str, float, str]] = {
    "Calculon, as shipped": ("megatron", 10.3, "its own validation rows were tuned to: 3.65 % claimed"),
    "Calculon, as shipped, several nodes": ("vtrain_multinode", 15.4, "vTrain's rows"),
    "Calculon, as shipped, one node": ("vtrain_singlenode", 38.9, "vTrain's rows"),
    "vTrain, several nodes": ("vtrain_multinode", 14.73, "its own claim (arXiv:2312.12391)"),
    "vTrain, one node": ("vtrain_singlenode", 8.37, "its own claim (arXiv:2312.12391)"),
    "RAPID-LLM": ("nanotron", 10.4, "its own claim, on chosen rows of several groups"),
}
"""Published predictors: the group they are compared on, their mean error in percent of the step, and on what.

None states an interval, or a score on rows that were kept back.
"""
ON_OTHER_ROWS = ("Calculon, as shipped", "RAPID-LLM")
"""Calculon's are the 10 of Megatron's Table 1 alone, and RAPID-LLM's are chosen ones of several tables."""


def folds(runs: Runs) -> NDArray[np.intp]:
    """The fold of every row, (n,): every sixth architecture is left out, whatever its names, in all groups together.

    An architecture is its layers, width, heads and width of the feed-forward part: GPT-3 18.4B of one table is the
    18B of another.
    """
    shape = list(zip(runs.layers, runs.hidden, runs.heads, runs.ffn, strict=True))
    order = {one: index for index, one in enumerate(dict.fromkeys(shape))}
    return np.array([order[one] % FOLDS for one in shape], dtype=np.intp)


def interval_90(
    runs: Runs, fold: NDArray[np.intp], residuals: Numbers, unstable: NDArray[np.bool_], constants: Constants
) -> tuple[Numbers, Numbers]:
    """Both ends of ln(measured / predicted), (n,): quantiles of rows of other models; nan where a residual is."""
    timed, regime = np.isfinite(residuals), intervals.regimes(runs, unstable)
    keys = np.char.add(np.char.add(runs.framework.astype(str), "/"), regime)
    low, high = (np.full(len(residuals), np.nan) for _ in range(2))
    for one in range(FOLDS):
        seen = timed & (fold != one)
        groups = intervals.quantiles_by_group(runs.framework[seen], regime[seen], residuals[seen])
        groups["never seen"] = intervals.conformal(residuals[seen])
        known = replace(constants, residuals=groups)
        for key in np.unique(keys[timed & (fold == one)]):
            rows = timed & (fold == one) & (keys == key)
            ends = intervals.of_key(str(key), known)
            low[rows], high[rows] = min(ends[0], 0.0), max(ends[3], 0.0)
    return low, high


def one_constant_s(runs: Runs, group: NDArray[np.str_], fold: NDArray[np.intp], measured_s: Numbers) -> Numbers:
    """Seconds at one share of the peak for a whole group, the median of its other models, (n,); what most people do."""
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    at_peak = flops / (runs.gpus * runs.peak_tflops * 1e12 * np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0))
    found = np.full(len(measured_s), np.nan)
    timed = np.isfinite(measured_s)
    for name in np.unique(group):
        for one in range(FOLDS):
            own, others = timed & (group == name) & (fold == one), timed & (group == name) & (fold != one)
            if own.any() and others.any():
                found[own] = at_peak[own] * np.median(measured_s[others] / at_peak[others])
    return found
