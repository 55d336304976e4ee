"""Fits the widths of intervals to the errors on runs that a fit had left out; `fit_scaling.py` calls it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, hstack, identity

from labkit.scaling.ground import FEATURES
from labkit.scaling.intervals import FLOORS

LEVEL = 0.95
MARGIN = 1.2
"""By this factor both ends are wider than the regression: models in a fold are few, and their rows err together."""
ROUNDS = 8
"""Of weighing tables up whose rows lie outside too often, so that every table is covered."""
MAX_ROWS = 100
"""Per fold and table, chosen at random."""
GAIN = 4.0


@dataclass(frozen=True, eq=False)
class Errors:
    """ln(measured / predicted) of held-out rows, their features, and the fold and table of each."""

    row: np.ndarray
    fold: np.ndarray
    table: np.ndarray
    log_ratio: np.ndarray
    features: np.ndarray

    def take(self, rows: np.ndarray) -> "Errors":
        return Errors(self.row[rows], self.fold[rows], self.table[rows], self.log_ratio[rows], self.features[rows])


def fit_widths(errors: Errors) -> Mapping[str, np.ndarray]:
    """Coefficients of both ends in the order of `FEATURES`."""
    key = np.char.add(np.char.add(errors.fold, "/"), errors.table)
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(key == name))[:MAX_ROWS] for name in np.unique(key)]
    chosen = errors.take(np.concatenate(rows))
    names = np.repeat(np.arange(len(rows)), [len(some) for some in rows])
    return {
        "low": MARGIN * _fit_end(chosen.features, -chosen.log_ratio, names),
        "high": MARGIN * _fit_end(chosen.features, chosen.log_ratio, names),
    }


def _fit_end(features: np.ndarray, distance: np.ndarray, table: np.ndarray) -> np.ndarray:
    """A quantile regression in which every table has its share of rows inside, as far as weights can give it."""
    count = np.bincount(table)
    weight = np.minimum(count, 30) / count
    for _ in range(ROUNDS):
        widths = _regress(features, distance, weight[table])
        covered = np.bincount(table, distance <= features @ widths + 1e-9) / count
        weight = weight * np.exp(GAIN * np.clip(LEVEL - covered, 0, 0.5))
    return widths


def _regress(features: np.ndarray, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The coefficients, none below its floor, that minimize the weighted pinball loss, as a linear program."""
    n, k = features.shape
    equations = hstack([csr_matrix(features), identity(n), -identity(n)]).tocsr()
    costs = np.concatenate([np.full(k, 1e-6), LEVEL * weight, (1 - LEVEL) * weight])
    bounds = [(FLOORS.get(name, 0.0), None) for name in FEATURES] + [(0.0, None)] * (2 * n)
    return linprog(costs, A_eq=equations, b_eq=values, bounds=bounds, method="highs").x[:k]
