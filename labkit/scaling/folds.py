"""Folds of the published runs: what a prediction is fitted to, and the runs that it is judged on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from labkit.scaling.model import parameters
from labkit.scaling.published import Published
from labkit.scaling.runs import Flags, Runs

MODEL_FOLDS = 6
FAMILIES = {"vtrain_node": "vtrain", "megatron": "vtrain", "maxtext": "nemo"}
"""Frameworks left out together, since they share code and constants."""
LARGEST_SHARE = 0.25
"""Share of the distinct model sizes that "largest" leaves out."""

Parts = Iterator[tuple[Flags, Flags]]


@dataclass(frozen=True)
class Fold:
    """A way to leave runs out; `parts` yields (rows to fit to, rows to judge on)."""

    name: str
    title: str
    parts: Callable[[Published], Parts]
    hides_framework: bool = False
    """Predict the judged rows as rows of an unknown framework."""

    def hide(self, runs: Runs) -> Runs:
        """The runs as the fold predicts them."""
        if not self.hides_framework:
            return runs
        return replace(runs, framework=np.full(len(runs), "generic"))


def _by_model(published: Published) -> Parts:
    """Every sixth architecture is left out, whatever its names, in all tables together."""
    runs = published.runs
    shape = list(zip(runs.layers, runs.hidden, runs.heads, runs.ffn, strict=True))
    order = {one: index for index, one in enumerate(dict.fromkeys(shape))}
    fold = np.array([order[one] % MODEL_FOLDS for one in shape])
    return ((fold != part, fold == part) for part in range(MODEL_FOLDS))


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


def _largest(published: Published) -> Parts:
    size = np.asarray(parameters(published.runs))
    sizes = np.unique(size)
    limit = sizes[int((1 - LARGEST_SHARE) * len(sizes))]
    yield size < limit, size >= limit


FOLDS = (
    Fold("beyond_64", "fitted on at most 64 GPUs", _beyond(64)),
    Fold("beyond_32", "fitted on at most 32 GPUs", _beyond(32)),
    Fold("without_largest", "fitted without the largest models", _largest),
    Fold("without_framework", "fitted without the framework", _by_framework, hides_framework=True),
    Fold("without_generation", "fitted without the GPU generation", _by_generation),
    Fold("without_model", "fitted without the model", _by_model),
)
