"""How wrong a prediction may be: quantiles of cross-validated residuals ln(measured / predicted), by kind of run."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.constants import Constants
from labkit.scaling.model import Numbers
from labkit.scaling.published import load_published
from labkit.scaling.runs import Flags, Runs
from labkit.scaling.tables import read_table

LEVELS = ("low_90", "low_80", "high_80", "high_90")
BEYOND = 1.5
"""By this factor both ends move out beyond the published rows."""


@cache
def _quantiles() -> dict[str, Numbers]:
    return {row["group"]: np.array([float(row[level]) for level in LEVELS]) for row in read_table("intervals")}


@cache
def largest(name: str) -> float:
    """The largest value of a column of `Runs` among the timed published rows."""
    published = load_published()
    return float(getattr(published.runs, name)[published.is_timed].max())


@cache
def names(column: str) -> frozenset[str]:
    """The names in a column of `Runs` among the timed published rows."""
    published = load_published()
    return frozenset(getattr(published.runs, column)[published.is_timed].tolist())


def regimes(runs: Runs, unstable: Flags) -> NDArray[np.str_]:
    """The kind of each run beyond its framework."""
    found = np.where(runs.pp > 1, "pipeline", "flat")
    found = np.where(runs.tp > runs.gpus_per_node, np.char.add(found, "+wide"), found)
    return np.where(unstable, "unstable", found)


def factors(runs: Runs, constants: Constants, *, unstable: Flags) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """The ends of the 90 and 80% intervals over the prediction: (low 90, low 80, high 80, high 90)."""
    keys = np.char.add(np.char.add(runs.framework.astype(str), "/"), regimes(runs, unstable))
    logs = np.empty((len(runs), len(LEVELS)))
    for key in np.unique(keys):
        logs[keys == key] = _find(str(key), constants)
    logs = np.where(is_beyond(runs)[:, None], BEYOND * logs, logs)
    low_90, low_80, high_80, high_90 = np.exp(logs).T
    return np.minimum(low_90, 1.0), np.minimum(low_80, 1.0), np.maximum(high_80, 1.0), np.maximum(high_90, 1.0)


def is_beyond(runs: Runs) -> Flags:
    """Runs with more ranks, longer sequences or another GPU than any published row."""
    beyond = (runs.gpus > largest("gpus")) | (runs.seq_len > largest("seq_len")) | is_untried(runs)
    return beyond | ~np.isin(runs.architecture, sorted(names("architecture")))


def is_untried(runs: Runs) -> Flags:
    """Kinds of layout without a published row."""
    return (runs.cp > largest("cp")) | ~np.isin(runs.shard, sorted(names("shard")))


def _find(key: str, constants: Constants) -> Numbers:
    framework, _, _ = key.partition("/")
    if framework in constants.calibrated:
        return _quantiles()["calibrated"]
    return next(_quantiles()[name] for name in (key, framework, "never seen") if name in _quantiles())
