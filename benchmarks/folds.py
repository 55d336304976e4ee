"""Folds of the published runs for `fit_scaling.py`: what predictions are fitted to, and the runs they are judged on."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.published import Published
from labkit.scaling.runs import Flags, Runs

MODEL_PARTS = 6
FAMILIES = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks left out together, since they share code and constants."""


Parts = Iterator[tuple[Flags, Flags]]
"""Rows to judge, and rows that the fit has not seen; the latter contain the former."""


@dataclass(frozen=True)
class Fold:
    """A way to leave runs out, in one part or more."""

    name: str
    parts: Callable[[Published], Parts]
    hidden: Mapping[str, str] = field(default_factory=dict)
    """Fields of the judged runs that are predicted with another value."""

    def hide(self, runs: Runs) -> Runs:
        """The runs as the fold predicts them."""
        return Runs([replace(run, **self.hidden) for run in runs.origin])


def model_parts(published: Published) -> NDArray[np.intp]:
    """The part of every run, (n,): every sixth architecture has the same, whatever its names, in all tables."""
    runs = published.runs
    shape = list(zip(runs.layers, runs.hidden, runs.heads, runs.ffn, strict=True))
    order = {one: index for index, one in enumerate(dict.fromkeys(shape))}
    return np.array([order[one] % MODEL_PARTS for one in shape], dtype=np.intp)


def _by_model(published: Published) -> Parts:
    part = model_parts(published)
    return _each(part == one for one in range(MODEL_PARTS))


def _by_run(published: Published) -> Parts:
    """A third of all runs is left out at random, so that their like is known."""
    part = np.random.default_rng(0).integers(0, 3, len(published.runs))
    return _each(part == one for one in range(3))


def _by_framework(published: Published) -> Parts:
    family = np.array([FAMILIES.get(name, name) for name in published.runs.framework.tolist()])
    return _each(family == name for name in np.unique(family) if name != "generic")


def _by_source(published: Published) -> Parts:
    """Each table is left out; vTrain's single nodes are none, but put together from profiled kernels."""
    return _each(published.group == name for name in np.unique(published.group) if name != "vtrain_singlenode")


def _by_source_and_scale(published: Published) -> Parts:
    """Each table's rows on more than 64 GPUs, predicted without the table and without such rows of any."""
    is_large = published.runs.gpus > 64
    for name in np.unique(published.group[is_large]):
        rows = published.group == name
        yield rows & is_large, rows | is_large


def _by_generation(published: Published) -> Parts:
    architecture = published.runs.architecture
    return _each(architecture == name for name in np.unique(architecture))


def _by_card(published: Published) -> Parts:
    """Each GPU is left out, if others of its generation stay."""
    cards, architecture = published.runs.card, published.runs.architecture
    masks = [cards == name for name in np.unique(cards)]
    return _each(mask for mask in masks if np.isin(architecture[~mask], architecture[mask]).any())


def _by_kind(published: Published) -> Parts:
    """Each way of sharding is left out, and fp8; not whole copies, without which little is left to fit."""
    kinds = [published.runs.shard == name for name in ("zero1", "zero3", "hsdp")]
    return _each((*kinds, published.runs.precision == "fp8"))


def _largest(column: str) -> Callable[[Published], Parts]:
    """Of each table with several values of a column, the rows with the largest are left out, of all tables at once."""

    def parts(published: Published) -> Parts:
        values = np.round(getattr(published.runs, column))
        judged = np.zeros(len(values), dtype=bool)
        for name in np.unique(published.group):
            rows = (published.group == name) & published.is_timed
            if len(np.unique(values[rows])) > 1:
                judged |= rows & (values == values[rows].max())
        return _each([judged])

    return parts


def _above(limit: float) -> Callable[[Published], Parts]:
    return lambda published: _each([published.runs.gpus > limit])


def _long(published: Published) -> Parts:
    return _each([(published.runs.seq_len > 8192) | (published.runs.cp > 1)])


def _each(judged: Iterable[Flags]) -> Parts:
    """Every mask is judged, and all other rows are fitted."""
    return ((mask, mask) for mask in judged)


FOLDS = (
    Fold("beyond 64 GPUs", _above(64)),
    Fold("beyond 32 GPUs", _above(32)),
    Fold("beyond 512 GPUs", _above(512)),
    Fold("without the largest scale", _largest("gpus")),
    Fold("without the largest models", _largest("parameters")),
    Fold("beyond 8192 tokens", _long),
    Fold("without the source", _by_source, {"table": ""}),
    Fold("without the source, beyond 64 GPUs", _by_source_and_scale, {"table": ""}),
    Fold("without the framework", _by_framework, {"table": "", "framework": "generic"}),
    Fold("without the GPU generation", _by_generation),
    Fold("without the GPU", _by_card),
    Fold("without the sharding", _by_kind),
    Fold("without the model", _by_model),
    Fold("without the run", _by_run),
)
