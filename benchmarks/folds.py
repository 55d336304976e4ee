"""Folds of the published runs for `fit_scaling.py`: what predictions are fitted to, and the runs they are judged on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.models import Numbers
from labkit.scaling.published import is_timed
from labkit.scaling.runs import Flags, Runs

N_PARTS = 6
FAMILIES = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks left out together, since they share code and constants."""
UNKNOWN_TABLE, UNKNOWN_FRAMEWORK = {"table": ""}, {"table": "", "framework": "generic"}


@dataclass(frozen=True, eq=False)
class Fold:
    """Parts of the published runs, each of which is left out of a fit and judged."""

    name: str
    parts: Sequence[Flags]
    changes: Mapping[str, str] = field(default_factory=dict)
    """Fields of the judged runs that are predicted with another value."""
    focus: Flags | None = None
    """The only runs to judge, all of which are left out with each part."""

    def split(self) -> Iterator[tuple[Flags, Flags]]:
        """Yield the runs that each part judges, and those that it leaves out."""
        for rows in self.parts:
            yield (rows, rows) if self.focus is None else (rows & self.focus, rows | self.focus)

    def as_predicted(self, runs: Runs) -> Runs:
        return Runs([replace(run, **self.changes) for run in runs.origin])


def model_parts(published: Runs) -> NDArray[np.intp]:
    """The part of every run, (n,): every sixth architecture has the same, whatever its names, in all tables."""
    runs = published
    shapes = np.stack([runs.layers, runs.hidden, runs.heads, runs.ffn])
    _, first, codes = np.unique(shapes, axis=1, return_index=True, return_inverse=True)
    return np.asarray(first.argsort().argsort()[codes.ravel()] % N_PARTS)


def make_folds(published: Runs) -> Iterator[Fold]:
    """Yield the folds that extrapolate first."""
    runs, table = published, published.table
    is_large = runs.gpus > 64
    yield Fold("beyond 64 GPUs", [is_large])
    yield Fold("beyond 32 GPUs", [runs.gpus > 32])
    yield Fold("beyond 512 GPUs", [runs.gpus > 512])
    yield Fold("without the largest scale", [_largest(published, runs.gpus)])
    yield Fold("without the largest models", [_largest(published, np.round(runs.parameters))])
    yield Fold("beyond 8192 tokens", [(runs.seq_len > 8192) | (runs.cp > 1)])
    measured = [rows for rows in _each(table) if "vtrain_singlenode" not in table[rows]]  # from profiled kernels
    yield Fold("without the source", measured, UNKNOWN_TABLE)
    large = [rows for rows in _each(table) if (rows & is_large).any()]
    yield Fold("without the source, beyond 64 GPUs", large, UNKNOWN_TABLE, is_large)
    families = np.array([FAMILIES.get(name, name) for name in runs.framework.tolist()])
    named = [rows for rows in _each(families) if "generic" not in families[rows]]
    yield Fold("without the framework", named, UNKNOWN_FRAMEWORK)
    yield Fold("without the GPU generation", _each(runs.architecture))
    cards = [rows for rows in _each(runs.card) if np.isin(runs.architecture[~rows], runs.architecture[rows]).any()]
    yield Fold("without the GPU", cards)
    shards = [runs.shard == name for name in ("zero1", "zero3", "hsdp")]  # without whole copies little is left to fit
    yield Fold("without the sharding", [*shards, runs.precision == "fp8"])
    yield Fold("without the model", _each(model_parts(published)))
    yield Fold("without the run", _each(np.random.default_rng(0).integers(0, 3, len(runs))))


def _each(column: NDArray[np.generic]) -> list[Flags]:
    """The rows of every value."""
    return [column == value for value in np.unique(column)]


def _largest(published: Runs, values: Numbers) -> Flags:
    """The rows with the largest value in each table with several."""
    judged = np.zeros(len(values), dtype=bool)
    for rows in _each(published.table):
        timed = rows & is_timed(published)
        if len(np.unique(values[timed])) > 1:
            judged |= timed & (values == values[timed].max())
    return judged
