"""Many runs as columns, so that a table of thousands is one evaluation of every formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.hardware import Hardware
from labkit.scaling.layout import Layout
from labkit.scaling.model import Model, Numbers, embedding_parameters, kv_width, layer_parameters, query_width

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """One training to be predicted. `framework` names a profile of constants; "generic" for an unknown one."""

    model: Model
    hardware: Hardware
    layout: Layout
    seq_len: int
    framework: str = "generic"


@dataclass(frozen=True, eq=False)
class Runs:
    """Columns of n runs, each of shape (n,), float64 unless they are names. Units as in `Run`'s parts."""

    layers: Numbers
    hidden: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    ffn: Numbers
    vocab: Numbers
    ffn_gated: Numbers
    tied: Numbers
    seq_len: Numbers
    tp: Numbers
    sequence_parallel: Numbers
    pp: Numbers
    vp: Numbers
    cp: Numbers
    dp: Numbers
    micro_batch: Numbers
    global_batch: Numbers
    compiled: Numbers
    peak_tflops: Numbers
    memory_gib: Numbers
    memory_gb_s: Numbers
    link_gb_s: Numbers
    network_gbps: Numbers
    fp8_ratio: Numbers
    multiprocessors: Numbers
    gpus_per_node: Numbers
    link_gpus: Numbers
    clock_share: Numbers
    shard: NDArray[np.str_]
    recompute: NDArray[np.str_]
    precision: NDArray[np.str_]
    architecture: NDArray[np.str_]
    framework: NDArray[np.str_]
    origin: NDArray[np.object_]
    """The `Run` of each row."""

    @classmethod
    def from_runs(cls, runs: Sequence[Run]) -> "Runs":
        """Columns of these runs. ValueError for none."""
        if not runs:
            raise ValueError("expected one run or more")
        columns: dict[str, Any] = {}
        for column in fields(cls):
            values = [_look_up(run, column.name) for run in runs]
            columns[column.name] = np.array(values, dtype=np.float64 if column.type is Numbers else None)
        columns["origin"] = np.empty(len(runs), dtype=object)
        columns["origin"][:] = runs
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, rows: Any) -> "Runs":
        """The rows that a mask or indices select."""
        return Runs(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def has(self, option: str) -> Flags:
        """Whether each run's layout has this option."""
        if option not in self._flags:
            self._flags[option] = np.array([option in run.layout.options for run in self.origin], dtype=bool)
        return self._flags[option]

    @cached_property
    def _flags(self) -> dict[str, Flags]:
        return {}

    def cached(self, function: Callable[["Runs"], Numbers]) -> Numbers:
        """`function` of these runs, computed once. Pass a module's function: a new lambda each time is a new key."""
        if function not in self._cache:
            self._cache[function] = function(self)
        return self._cache[function]

    @cached_property
    def _cache(self) -> dict[Callable[["Runs"], Numbers], Numbers]:
        return {}

    @cached_property
    def codes(self) -> dict[str, tuple[NDArray[np.str_], NDArray[np.intp]]]:
        """For the two columns that constants depend on: distinct names, and each row's index among them."""
        return {
            column: np.unique(getattr(self, column), return_inverse=True) for column in ("architecture", "framework")
        }

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

    @cached_property
    def layer_parameters(self) -> Numbers:
        return np.asarray(layer_parameters(self))

    @cached_property
    def embedding_parameters(self) -> Numbers:
        return np.asarray(embedding_parameters(self))

    @cached_property
    def query_width(self) -> Numbers:
        return np.asarray(query_width(self))

    @cached_property
    def kv_width(self) -> Numbers:
        return np.asarray(kv_width(self))


def _look_up(run: Run, name: str) -> Any:
    """A run's value by the name of a column; `origin` is None here."""
    parts = (run.layout, run.model, run.hardware, run)
    return next((getattr(part, name) for part in parts if hasattr(part, name)), None)
