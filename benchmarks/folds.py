"""Folds of the published runs: what a prediction is fitted to, and the runs that it is judged on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.model import parameters
from labkit.scaling.published import Published
from labkit.scaling.runs import Flags, Runs

MODEL_PARTS = 6
FAMILIES = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks left out together, since they share code and constants."""
Parts = Iterator[tuple[Flags, Flags]]


def model_parts(published: Published) -> NDArray[np.intp]:
    """The part of every run, (n,): every sixth architecture has the same, whatever its names, in all tables."""
    runs = published.runs
    shape = list(zip(runs.layers, runs.hidden, runs.heads, runs.ffn, strict=True))
    order = {one: index for index, one in enumerate(dict.fromkeys(shape))}
    return np.array([order[one] % MODEL_PARTS for one in shape], dtype=np.intp)


@dataclass(frozen=True)
class Fold:
    """A way to leave runs out; `parts` yields (rows to fit to, rows to judge on)."""

    name: str
    parts: Callable[[Published], Parts]
    hides_framework: bool = False
    """Predict the judged rows as rows of an unknown framework."""

    def hide(self, runs: Runs) -> Runs:
        """The runs as the fold predicts them."""
        if not self.hides_framework:
            return runs
        return replace(runs, framework=np.full(len(runs), "generic"))


def _by_model(published: Published) -> Parts:
    part = model_parts(published)
    return ((part != one, part == one) for one in range(MODEL_PARTS))


def _by_run(published: Published) -> Parts:
    """A third of all runs is left out at random, so that their like is known."""
    part = np.random.default_rng(0).integers(0, 3, len(published.runs))
    return ((part != one, part == one) for one in range(3))


def _beyond(gpus: int) -> Callable[[Published], Parts]:
    def parts(published: Published) -> Parts:
        yield published.runs.gpus <= gpus, published.runs.gpus > gpus

    return parts


def _by_framework(published: Published) -> Parts:
    family = np.array([FAMILIES.get(name, name) for name in published.runs.framework.tolist()])
    return ((family != name, family == name) for name in np.unique(family) if name != "generic")


def _by_generation(published: Published) -> Parts:
    architecture = published.runs.architecture
    return ((architecture != name, architecture == name) for name in np.unique(architecture))


def _by_kind(published: Published) -> Parts:
    """Each way of sharding is left out, and fp8; not whole copies, without which little is left to fit."""
    runs = published.runs
    for column, names in ((runs.shard, ("zero1", "zero3", "hsdp")), (runs.precision, ("fp8",))):
        yield from ((column != name, column == name) for name in names)


def _largest(published: Published) -> Parts:
    """Of each table with several models, the largest one is left out."""
    size = np.round(np.asarray(parameters(published.runs)))
    tested = np.zeros(len(size), dtype=bool)
    for name in np.unique(published.group):
        rows = (published.group == name) & published.is_timed
        if len(np.unique(size[rows])) > 1:
            tested |= rows & (size == size[rows].max())
    yield ~tested, tested


FOLDS = (
    Fold("beyond 64 GPUs", _beyond(64)),
    Fold("beyond 32 GPUs", _beyond(32)),
    Fold("without the largest models", _largest),
    Fold("without the framework", _by_framework, hides_framework=True),
    Fold("without the GPU generation", _by_generation),
    Fold("without the sharding", _by_kind),
    Fold("without the model", _by_model),
    Fold("without the run", _by_run),
)
