"""The predictor's constants, read from `constants.csv`, and profiles that change them.

A constant has a quantity and a key: the architecture of the GPU (the quantities in
`BY_ARCHITECTURE`), or the framework; "default" is for every other name. A constant with a spread
was fitted to published runs by `benchmarks/fit_scaling.py`: `value` is the result, `prior` the
likely value, `spread` the standard deviation of ln(value) around it, within `low` and `high`. Other
constants are declared, with a source.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from labkit.scaling import read_table

# Framework of runs that do not name a published one.
GENERIC = "generic"
# Framework of runs that are predicted by a user's own profile.
CALIBRATED = "calibrated"
# Quantities that depend on the GPU's architecture; the others depend on the framework.
BY_ARCHITECTURE = frozenset({"gemm_efficiency", "link_efficiency", "memory_efficiency"})


def _read_frameworks(relation: str) -> dict[str, str]:
    """Return framework by name, of one relation in `frameworks.csv`, in the file's order."""
    rows = read_table("frameworks")
    return {row["name"]: row["framework"] for row in rows if row["relation"] == relation}


# Published table -> its framework.
TABLES = _read_frameworks("table")
# Part of a framework's name -> the published framework whose code is nearest; the first one counts.
NEAREST = _read_frameworks("part of a name")
# Framework -> the one whose constants it has, where it has none.
PARENTS = _read_frameworks("constants")


def find_framework(name: str) -> str:
    """Return the published framework that a name means or is near. ValueError for another."""
    words = re.sub("[ _]", "-", name.strip().lower())
    frameworks = sorted({GENERIC, *TABLES.values()})
    if words in frameworks:
        return words
    near = [framework for part, framework in NEAREST.items() if part in words]
    if not near:
        raise ValueError(
            f"expected framework to be one of {', '.join(frameworks)}, got {name[:40]!r}: leave it"
            " out, or name the one whose code is nearest"
        )
    return near[0]


@dataclass(frozen=True)
class Constants:
    """Quantity -> key -> value."""

    table: Mapping[str, Mapping[str, float]]
    parents: Mapping[str, str]

    def value(self, quantity: str, name: str) -> float:
        """Return a name's value, else its nearest ancestor's, else the default."""
        values = self.table[quantity]
        while name not in values and name in self.parents:
            name = self.parents[name]
        return values.get(name, values["default"])

    def with_profile(self, name: str, base: str, values: Mapping[str, float]) -> "Constants":
        """Return these constants with a user's profile `name`: `base` with other `values`."""
        changed = {
            quantity: {**self.table[quantity], name: value} for quantity, value in values.items()
        }
        return Constants({**self.table, **changed}, {**self.parents, name: base})


@cache
def load_constants() -> Constants:
    """Return the constants in use."""
    table: dict[str, dict[str, float]] = {}
    for row in read_table("constants"):
        table.setdefault(row["quantity"], {})[row["key"]] = float(row["value"])
    return Constants(table, PARENTS)
