"""Many runs as columns, so that a table of thousands is one evaluation of every formula."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.hardware import Hardware
from labkit.scaling.layout import Layout
from labkit.scaling.model import (
    Model,
    Numbers,
    embedding_parameters,
    kv_width,
    layer_parameters,
    parameters,
    query_width,
)

Flags = NDArray[np.bool_]
Texts = NDArray[np.str_]
_OWNERS = {
    field.name: part
    for part, owner in (("hardware", Hardware), ("model", Model), ("layout", Layout))
    for field in fields(owner)
} | {"seq_len": None, "framework": None}
"""Column -> the part of a run that has it; None is the run itself."""
_DERIVED: Mapping[str, Callable[[Any], Any]] = {
    "parameters": parameters,
    "layer_parameters": layer_parameters,
    "embedding_parameters": embedding_parameters,
    "query_width": query_width,
    "kv_width": kv_width,
}
"""Columns that are functions of a model."""


@dataclass(frozen=True)
class Run:
    """One training to be predicted. `framework` names a profile of constants; "generic" for an unknown one."""

    model: Model
    hardware: Hardware
    layout: Layout
    seq_len: int
    framework: str = "generic"


class Runs:
    """Columns of n runs: every field and size of their models, hardware and layouts, float64 or texts of shape (n,)."""

    shard: Texts
    recompute: Texts
    precision: Texts
    architecture: Texts
    framework: Texts

    def __init__(self, runs: Sequence[Run]) -> None:
        """ValueError for no runs."""
        if not runs:
            raise ValueError("expected one run or more")
        self.origin = list(runs)
        self._cache: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Numbers:
        """A column, on first use."""
        if name in _DERIVED:
            column = np.asarray(_DERIVED[name](self))
        elif name in _OWNERS:
            owner = _OWNERS[name]
            values = np.array([getattr(getattr(run, owner) if owner else run, name) for run in self.origin])
            column = values if values.dtype.kind == "U" else values.astype(np.float64)
        else:
            raise AttributeError(name)
        self.__dict__[name] = column
        return column

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, rows: Any) -> "Runs":
        """The rows that a mask or indices select."""
        return Runs([self.origin[row] for row in np.arange(len(self))[rows]])

    def has(self, option: str) -> Flags:
        """Whether each run's layout has this option."""
        if option not in self._cache:
            self._cache[option] = np.array([option in run.layout.options for run in self.origin], dtype=bool)
        return np.asarray(self._cache[option])

    def cached(self, function: Callable[["Runs"], Numbers]) -> Numbers:
        """`function` of these runs, computed once. Pass a module's function: a new lambda each time is a new key."""
        if function not in self._cache:
            self._cache[function] = function(self)
        return np.asarray(self._cache[function])

    @cached_property
    def codes(self) -> dict[str, tuple[Texts, NDArray[np.intp]]]:
        """For the two columns that constants depend on: distinct names, and each row's index among them."""
        columns = {"architecture": self.architecture, "framework": self.framework}
        return {name: np.unique(column, return_inverse=True) for name, column in columns.items()}

    @cached_property
    def micro_batches(self) -> Numbers:
        return self.global_batch / (self.dp * self.micro_batch)

    @cached_property
    def tokens(self) -> Numbers:
        """Tokens per micro-batch and rank: b S / cp."""
        return self.micro_batch * self.seq_len / self.cp

    @cached_property
    def gpus(self) -> Numbers:
        return self.tp * self.pp * self.cp * self.dp

    @cached_property
    def nodes(self) -> Numbers:
        return np.ceil(self.gpus / self.gpus_per_node)

    @cached_property
    def sequence_share(self) -> Numbers:
        """Share of norms, dropouts and residuals on a rank: 1/tp with sequence parallelism, 1 without."""
        return np.where(self.sequence_parallel > 0, 1 / self.tp, 1.0)
