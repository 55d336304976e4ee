"""How good proposed layouts are, on published families of layouts: against the best that was measured."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import arrangement, load_held_out, load_published
from labkit.scaling.search import PROPOSED, distinct, preference_s

MIN_LAYOUTS = 4
"""Timed layouts per family in which a choice can be judged."""


@dataclass(frozen=True)
class Choice:
    """The proposals in a family of layouts, against the best measured one."""

    group: str
    name: str
    layouts: int
    behind: tuple[float, ...]
    """For each proposed layout: measured over the best, less one; infinite if it ran out of memory."""
    behind_simple: float
    """The same for the smallest tp x pp that is predicted to fit with the largest micro-batch."""
    best: str
    """Arrangement of the best measured layout."""
    first: str
    """Arrangement of the first proposal."""

    @property
    def best_behind(self) -> float:
        return min(self.behind)


def choices() -> Iterator[Choice]:
    """Every family with enough timed layouts: a model on a number of GPUs with one batch, sequence and precision.

    Times are predicted by constants fitted without the model.
    """
    published = load_published()
    runs, found, without_model = published.runs, predict_runs(published.runs), load_held_out("without_model").step_s
    found = replace(found, step_s=np.where(np.isfinite(without_model), without_model, found.step_s))
    preference = preference_s(found)
    measured = np.where(published.is_ok, published.step_s, np.inf)
    names = (published.group, published.model, runs.gpus, runs.global_batch, runs.seq_len, runs.precision)
    family = np.array(
        [
            " ".join(value if isinstance(value, str) else f"{value:g}" for value in row)
            for row in zip(*names, strict=True)
        ]
    )
    for name in np.unique(family):
        members = np.flatnonzero(family == name)
        if np.isfinite(measured[members]).sum() < MIN_LAYOUTS:
            continue
        winner = int(members[np.nanargmin(measured[members])])
        order = [int(row) for row in members[np.argsort(preference[members], kind="stable")] if found.fits[row]]
        chosen = distinct(order, lambda row: (runs.tp[row], runs.pp[row], runs.cp[row], runs.shard[row]), PROPOSED)
        if not chosen:
            continue
        sizes = runs.tp[members] * runs.pp[members]
        simple = members[np.lexsort((-runs.micro_batch[members], sizes, ~found.fits[members]))[0]]
        yield Choice(
            group=str(published.group[members[0]]),
            name=str(name),
            layouts=len(members),
            behind=tuple(float(measured[row] / measured[winner] - 1) for row in chosen),
            behind_simple=float(measured[simple] / measured[winner] - 1),
            best=arrangement(runs, winner),
            first=arrangement(runs, chosen[0]),
        )
