"""The predictor's constants, read from `constants.csv`, and profiles that change them.

A constant has a quantity and a key: "all", the architecture of the GPU (the quantities in `BY_ARCHITECTURE`), or the
framework; "default" is for every other name. A constant with a spread was fitted to published runs by
`benchmarks/fit_scaling.py`: `value` is the result, `prior` the likely value, `spread` the standard deviation of
ln(value) around it, within `low` and `high`. Other constants are declared, with a source.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from labkit.scaling import read_table
from labkit.scaling.models import Numbers
from labkit.scaling.runs import Runs

BY_ARCHITECTURE = frozenset(
    {"gemm_efficiency", "matmul_ceiling", "attention_efficiency", "link_efficiency", "memory_efficiency"}
)

PARENTS: Mapping[str, str] = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks that share code: a framework without a constant of a quantity uses its parent's.

megatron and vtrain run Megatron-LM of 2021 (unfused attention, no overlap); MaxText uses NeMo's cuDNN attention.
vtrain_node is vTrain's single-node table, put together from profiled kernels.
"""


@dataclass(frozen=True)
class Constant:
    """One row of `constants.csv`; prior, spread and bounds are 0 for a declared constant."""

    quantity: str
    key: str
    source: str
    value: float
    prior: float
    spread: float
    low: float
    high: float

    @property
    def is_fitted(self) -> bool:
        return self.spread > 0

    @property
    def name(self) -> str:
        return f"{self.quantity}.{self.key}"


@dataclass(frozen=True)
class Constants:
    """Quantity -> key -> value."""

    table: Mapping[str, Mapping[str, float]]
    parents: Mapping[str, str]
    calibrated: frozenset[str] = frozenset()
    """Frameworks that are a user's profiles."""

    def rows(self, runs: Runs) -> "Rows":
        return Rows(self, runs)

    def value(self, quantity: str, name: str) -> float:
        """A name's value, else its nearest ancestor's, else the default."""
        values = self.table[quantity]
        while name not in values and name in self.parents:
            name = self.parents[name]
        return values[next(key for key in (name, "default", "all") if key in values)]

    def with_profile(self, name: str, base: str, values: Mapping[str, float]) -> "Constants":
        """Add a user's profile, which runs name as their framework: some quantities differ from those of `base`."""
        new = {quantity: {**self.table[quantity], name: value} for quantity, value in values.items()}
        return Constants({**self.table, **new}, {**self.parents, name: base}, self.calibrated | {name})


class Rows(dict[str, Numbers]):
    """The constants of every row of some runs: `rows["launch_s"]` has shape (n,)."""

    def __init__(self, constants: Constants, runs: Runs) -> None:
        super().__init__()
        self._constants, self._runs = constants, runs

    def __missing__(self, quantity: str) -> Numbers:
        """A quantity's values, on first use."""
        names, codes = self._runs.codes["architecture" if quantity in BY_ARCHITECTURE else "framework"]
        self[quantity] = np.array([self._constants.value(quantity, str(name)) for name in names])[codes]
        return self[quantity]

    @property
    def shard_ranks(self) -> Numbers:
        """Ranks that divide what `shard` says, (n,): all replicas, with hsdp those of a node; 1 for whole copies."""
        runs = self._runs
        inside = np.maximum(runs.gpus_per_node / (runs.tp * runs.cp), 1)
        replicas = np.where(runs.shard == "hsdp", np.minimum(runs.dp, inside), runs.dp)
        return np.where(runs.shard == "none", 1.0, np.minimum(replicas * runs.cp, self["largest_shard_group"]))


@cache
def read_constants() -> tuple[Constant, ...]:
    """The rows of `constants.csv`."""
    numbers = ("value", "prior", "spread", "low", "high")
    return tuple(
        Constant(row["quantity"], row["key"], row["source"], *(float(row[name] or 0) for name in numbers))
        for row in read_table("constants")
    )


def from_values(constants: Iterable[Constant], values: Mapping[str, float]) -> Constants:
    """Constants with other values of some, by `Constant.name`."""
    table: dict[str, dict[str, float]] = {}
    for constant in constants:
        table.setdefault(constant.quantity, {})[constant.key] = values.get(constant.name, constant.value)
    return Constants(table, PARENTS)


@cache
def load_constants() -> Constants:
    """The constants in use."""
    return from_values(read_constants(), {})
