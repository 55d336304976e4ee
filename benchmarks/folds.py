"""Folds of the published runs for `fit_scaling.py`: what predictions are fitted to, and the runs
they are judged on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.scaling.constants import PARENTS
from labkit.scaling.models import Numbers
from labkit.scaling.published import is_timed
from labkit.scaling.runs import Flags, Runs

N_PARTS = 6
# Fold -> fields of its judged runs that are predicted with another value.
UNKNOWNS = {
    "without the source": {"table": ""},
    "without the source, beyond 64 GPUs": {"table": ""},
    "without the framework": {"table": "", "framework": "generic"},
}


@dataclass(frozen=True, eq=False)
class Fold:
    """Published runs that are left out of a fit, and those of them that are judged; several folds
    may share a name."""

    name: str
    is_judged: Flags
    is_hidden: Flags

    def judged_runs(self, published: Runs) -> Runs:
        """The timed runs to judge, as they are predicted."""
        runs = published.take(self.is_judged & is_timed(published))
        return Runs([replace(run, **UNKNOWNS.get(self.name, {})) for run in runs.origin])


def model_parts(published: Runs) -> NDArray[np.intp]:
    """The part of every run, (n,): every sixth architecture has the same, whatever its names, in
    all tables."""
    shapes = np.stack([published.layers, published.hidden, published.heads, published.ffn])
    _, first, codes = np.unique(shapes, axis=1, return_index=True, return_inverse=True)
    # Numbered as they first appear, not by size: every part has small and large models.
    numbers = first.argsort().argsort()
    return np.asarray(numbers[codes.ravel()] % N_PARTS)


def make_folds(runs: Runs) -> Iterator[Fold]:
    """Yield the folds with timed runs to judge, those that extrapolate first."""
    is_large = runs.gpus > 64
    # vTrain's single-node table is put together from profiled kernels.
    is_measured = runs.table != "vtrain_singlenode"
    # Frameworks that share code are hidden together: the other's runs would say as much.
    families = np.array([PARENTS.get(name, name) for name in runs.framework.tolist()])
    # Only GPUs whose generation has another: one alone is the fold without its generation.
    cards = [
        rows
        for rows in _each(cards_of(runs))
        if np.isin(runs.architecture[~rows], runs.architecture[rows]).any()
    ]
    # Not "none": without DDP little is left to fit.
    shards = [runs.shard == name for name in ("zero1", "zero3", "hsdp")]
    parts = {
        "beyond 64 GPUs": [is_large],
        "beyond 32 GPUs": [runs.gpus > 32],
        "beyond 512 GPUs": [runs.gpus > 512],
        "without the largest scale": [_largest(runs, runs.gpus)],
        "without the largest models": [_largest(runs, np.round(runs.parameters))],
        "beyond 8192 tokens": [(runs.seq_len > 8192) | (runs.cp > 1)],
        "without the source": [rows for rows in _each(runs.table) if is_measured[rows].any()],
        "without the source, beyond 64 GPUs": [
            rows for rows in _each(runs.table) if is_large[rows].any()
        ],
        "without the framework": [
            rows for rows in _each(families) if "generic" not in families[rows]
        ],
        "without the GPU generation": _each(runs.architecture),
        "without the GPU": cards,
        "without the sharding": [*shards, runs.precision == "fp8"],
        "without the model": _each(model_parts(runs)),
        "without the run": _each(np.random.default_rng(0).integers(0, 3, len(runs))),
    }
    for name, each in parts.items():
        for rows in each:
            fold = Fold(name, is_judged=rows, is_hidden=rows)
            if "beyond 64" in name:
                fold = Fold(name, is_judged=rows & is_large, is_hidden=rows | is_large)
            if (fold.is_judged & is_timed(runs)).any():
                yield fold


def cards_of(runs: Runs) -> NDArray[np.str_]:
    """Name of each run's GPU; `name` is that of its model."""
    return np.array([run.hardware.name for run in runs.origin])


def _each(column: NDArray[np.generic]) -> list[Flags]:
    """The rows of every value."""
    return [column == value for value in np.unique(column)]


def _largest(published: Runs, values: Numbers) -> Flags:
    """The timed rows with the largest value in each table with several."""
    tables = pd.Series(np.where(is_timed(published), values, np.nan)).groupby(published.table)
    largest = tables.transform("max")
    several = tables.transform("nunique") > 1
    return np.asarray(is_timed(published) & several & (largest == values))
