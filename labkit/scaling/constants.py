"""The constants in use: what is declared, what the fit found, what a calibration changed; and how good they are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypedDict

import numpy as np

from labkit.scaling.declared import BY_ARCHITECTURE, DECLARED, PARENTS
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs

FITTED_FILE = Path(__file__).with_name("fitted.json")

Table = Mapping[str, Mapping[str, float]]


class Seen(TypedDict):
    """What the published rows cover."""

    architectures: Sequence[str]
    frameworks: Sequence[str]
    gpus: float
    seq_len: float
    cp: float
    shards: Sequence[str]


@dataclass(frozen=True)
class Profile:
    """A framework on a site, as far as it differs from `base`: values of some quantities, by name."""

    name: str
    base: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Constants:
    """`residuals`: quantiles of ln(measured / predicted) by group of similarity, see `labkit.scaling.intervals`."""

    table: Table
    residuals: Mapping[str, Sequence[float]]
    seen: Seen
    parents: Mapping[str, str]

    def rows(self, runs: Runs) -> "Rows":
        return Rows(self, runs)

    def with_profile(self, profile: Profile) -> "Constants":
        """These constants and a profile of one's own, which runs name as their framework."""
        table = {quantity: dict(values) for quantity, values in self.table.items()}
        for quantity, value in profile.values.items():
            table[quantity][profile.name] = value
        residuals = {**self.residuals, profile.name: self.residuals["calibrated"]}
        seen: Seen = {**self.seen, "frameworks": [*self.seen["frameworks"], profile.name]}
        return replace(
            self, table=table, residuals=residuals, seen=seen, parents={**self.parents, profile.name: profile.base}
        )


class Rows:
    """The constants of every row of some runs: `rows["launch_s"]` has shape (n,)."""

    def __init__(self, constants: Constants, runs: Runs) -> None:
        self._constants = constants
        self._runs = runs
        self._known: dict[str, Numbers] = {}

    def __getitem__(self, quantity: str) -> Numbers:
        if quantity not in self._known:
            self._known[quantity] = self._look_up(quantity)
        return self._known[quantity]

    def _look_up(self, quantity: str) -> Numbers:
        values = self._constants.table[quantity]
        if "all" in values and len(values) == 1:
            return np.full(len(self._runs), values["all"])
        names, codes = self._runs.codes["architecture" if quantity in BY_ARCHITECTURE else "framework"]
        return np.array([self._of(values, str(name)) for name in names])[codes]

    def _of(self, values: Mapping[str, float], name: str) -> float:
        """A name's own value, that of its nearest ancestor, or the default."""
        at: str | None = name
        while at is not None:
            if at in values:
                return values[at]
            at = self._constants.parents.get(at)
        return values["default"] if "default" in values else values["all"]


def table_of(fitted: Mapping[str, float]) -> Table:
    """Quantity -> key -> value: the declared ones, with fitted values by their names where there are any."""
    table: dict[str, dict[str, float]] = {}
    for constant in DECLARED:
        table.setdefault(constant.quantity, {})[constant.key] = (
            fitted.get(constant.name, constant.value) if constant.is_fitted else constant.value
        )
    return table


@cache
def load_constants() -> Constants:
    """What `benchmarks/fit_scaling.py` wrote."""
    found = json.loads(FITTED_FILE.read_text())
    return Constants(table_of(found["constants"]), found["residuals"], found["seen"], PARENTS)
