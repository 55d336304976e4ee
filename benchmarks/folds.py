"""Folds of the published runs for `fit_scaling.py`: what predictions are fitted to, and the runs they are judged on."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.published import Published
from labkit.scaling.runs import Flags, Runs

MODEL_PARTS = 6
FAMILIES = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks left out together, since they share code and constants."""


@dataclass(frozen=True)
class Fold:
    """A way to leave runs out; `parts` yields masks of the rows to judge, and all other rows are fitted."""

    name: str
    parts: Callable[[Published], Iterator[Flags]]
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


def _by_model(published: Published) -> Iterator[Flags]:
    part = model_parts(published)
    return (part == one for one in range(MODEL_PARTS))


def _by_run(published: Published) -> Iterator[Flags]:
    """A third of all runs is left out at random, so that their like is known."""
    part = np.random.default_rng(0).integers(0, 3, len(published.runs))
    return (part == one for one in range(3))


def _by_framework(published: Published) -> Iterator[Flags]:
    family = np.array([FAMILIES.get(name, name) for name in published.runs.framework.tolist()])
    return (family == name for name in np.unique(family) if name != "generic")


def _by_source(published: Published) -> Iterator[Flags]:
    """Each table is left out; vTrain's single nodes are none, but put together from profiled kernels."""
    return (published.group == name for name in np.unique(published.group) if name != "vtrain_singlenode")


def _by_generation(published: Published) -> Iterator[Flags]:
    architecture = published.runs.architecture
    return (architecture == name for name in np.unique(architecture))


def _by_kind(published: Published) -> Iterator[Flags]:
    """Each way of sharding is left out, and fp8; not whole copies, without which little is left to fit."""
    yield from (published.runs.shard == name for name in ("zero1", "zero3", "hsdp"))
    yield published.runs.precision == "fp8"


def _largest(published: Published) -> Iterator[Flags]:
    """Of each table with several models, the largest one is left out."""
    size = np.round(published.runs.parameters)
    judged = np.zeros(len(size), dtype=bool)
    for name in np.unique(published.group):
        rows = (published.group == name) & published.is_timed
        if len(np.unique(size[rows])) > 1:
            judged |= rows & (size == size[rows].max())
    yield judged


FOLDS = (
    Fold("beyond 64 GPUs", lambda published: iter([published.runs.gpus > 64])),
    Fold("beyond 32 GPUs", lambda published: iter([published.runs.gpus > 32])),
    Fold("beyond 8192 tokens", lambda published: iter([(published.runs.seq_len > 8192) | (published.runs.cp > 1)])),
    Fold("without the largest models", _largest),
    Fold("without the framework", _by_framework, {"table": "", "framework": "generic"}),
    Fold("without the source", _by_source, {"table": ""}),
    Fold("without the GPU generation", _by_generation),
    Fold("without the sharding", _by_kind),
    Fold("without the model", _by_model),
    Fold("without the run", _by_run),
)
