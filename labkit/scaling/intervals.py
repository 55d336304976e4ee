"""How wrong a prediction may be: 90% intervals that widen with the distance from measured runs.

ln(measured / predicted) of runs that a fit had left out (`labkit.scaling.folds`) gives two linear quantile regressions,
at 5 and 95%, on the features of `labkit.scaling.ground`. None of these may narrow an interval, and distances widen it
by `FLOORS` at least (Koenker and Bassett 1978, "Regression quantiles"). `intervals.csv` has the coefficients.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np

from labkit.scaling.ground import FEATURES
from labkit.scaling.model import Numbers
from labkit.scaling.tables import read_table

FLOORS: Mapping[str, float] = {
    **{name: 0.05 for name in FEATURES if name.startswith("on_")},
    **{"gpus": 0.1, "size": 0.08, "length": 0.1, "framework": 0.1, "engine": 0.1, "architecture": 0.15, "kind": 0.1},
}
"""Least widening in log units, declared since folds are few: per doubling, per kind without a measured run, and 5% for
a run that is repeated elsewhere."""


@cache
def load_widths() -> Mapping[str, Numbers]:
    """The coefficients of both ends, in the order of `FEATURES`; log units per unit of a feature."""
    rows = {row["feature"]: row for row in read_table("intervals")}
    return {end: np.array([float(rows[name][end]) for name in FEATURES]) for end in ("low", "high")}


def factors(columns: Numbers, widths: Mapping[str, Numbers]) -> tuple[Numbers, Numbers]:
    """Both ends over the prediction, (n,), from the columns of `ground.features`."""
    return np.exp(-columns @ widths["low"]), np.exp(columns @ widths["high"])
