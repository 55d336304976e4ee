"""The published rows beside what was predicted of each without having seen it: nearest ones, families to choose in."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.model import Numbers, parameters
from labkit.scaling.prediction import predict_runs
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.search import PROPOSED, distinct, preference_s
from labkit.scaling.table import read_rows

FEWEST_LAYOUTS = 4
"""Of a family in which a choice can be judged."""
NEAREST = 5


@dataclass(frozen=True, eq=False)
class Published:
    """Rows of `training_runs.csv` and of `cross_validated.csv` as columns; seconds are nan where there are none."""

    runs: Runs
    line: NDArray[np.intp]
    """Of `training_runs.csv`."""
    source: NDArray[np.str_]
    group: NDArray[np.str_]
    model: NDArray[np.str_]
    gpu: NDArray[np.str_]
    is_ok: Flags
    step_s: Numbers
    mfu: Numbers
    """As printed, 0 to 1: conventions differ."""
    model_left_out_s: Numbers
    """Predicted by constants that saw no row of this model."""
    framework_left_out_s: Numbers
    """Predicted by constants that saw no row of this framework."""


@dataclass(frozen=True)
class PublishedRow:
    """A published run, and how far off it was predicted by constants that had not seen its like."""

    group: str
    model: str
    gpu: str
    gpus: int
    seq_len: int
    arrangement: str
    step_s: float
    mfu: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.step_s - 1


def load_published(directory: Path) -> Published:
    """What `directory` holds, `data/reference/scaling`."""
    rows = [row for row in read_rows(directory / "training_runs.csv") if row.run is not None]
    with (directory / "cross_validated.csv").open() as file:
        predicted = {int(row["line"]): row for row in csv.DictReader(file)}

    def column(name: str) -> Numbers:
        return np.array([float(row.cells.get(name) or "nan") for row in rows])

    def held_out(name: str) -> Numbers:
        return np.array([float(predicted[row.line][name]) if row.line in predicted else np.nan for row in rows])

    return Published(
        runs=Runs.of([row.run for row in rows if row.run is not None]),
        line=np.array([row.line for row in rows]),
        source=np.array([row.cells["source"] for row in rows]),
        group=np.array([row.cells["group"] for row in rows]),
        model=np.array([row.cells["model"] for row in rows]),
        gpu=np.array([row.cells["gpu"] for row in rows]),
        is_ok=np.array([row.cells["status"] == "ok" for row in rows]),
        step_s=column("step_s"),
        mfu=column("mfu_percent") / 100,
        model_left_out_s=held_out("model_left_out_s"),
        framework_left_out_s=held_out("framework_left_out_s"),
    )


def nearest(published: Published, run: Run, count: int = NEAREST) -> list[PublishedRow]:
    """The timed rows most like `run`, at most one of a model on as many GPUs.

    Their errors are those of a framework never seen, unless `run` names one that is published.
    """
    rows, one = published.runs, Runs.of([run])
    is_known = run.framework in set(rows.framework.tolist())
    predicted = published.model_left_out_s if is_known else published.framework_left_out_s

    def apart(values: Numbers, value: Numbers, weight: float) -> Numbers:
        return weight * np.abs(np.log2(values / value))

    distance = apart(parameters(rows), parameters(one), 1.0) + apart(rows.gpus, one.gpus, 0.5)
    distance += apart(rows.seq_len, one.seq_len, 0.5) + apart(rows.tp, one.tp, 0.3) + apart(rows.pp, one.pp, 0.3)
    distance += 2.0 * (rows.architecture != one.architecture) + 1.0 * (rows.shard != one.shard)
    distance += 1.0 * (rows.precision != one.precision) + 0.5 * (rows.recompute != one.recompute)
    distance += 2.0 * is_known * (rows.framework != one.framework)
    distance = np.where(np.isfinite(published.step_s) & np.isfinite(predicted), distance, np.inf)
    order = [int(row) for row in np.argsort(distance, kind="stable") if np.isfinite(distance[row])]
    chosen = distinct(order, lambda row: (published.group[row], published.model[row], rows.gpus[row]), count)
    return [_row(published, row, float(predicted[row])) for row in chosen]


def arrangement(runs: Runs, row: int) -> str:
    """How the ranks of a run are arranged, "tp 2 pp 4 cp 1 dp 8 zero1"."""
    degrees = [f"{name} {int(getattr(runs, name)[row])}" for name in ("tp", "pp", "cp", "dp")]
    return " ".join([*degrees, str(runs.shard[row])])


def _row(published: Published, row: int, predicted_s: float) -> PublishedRow:
    runs = published.runs
    return PublishedRow(
        group=str(published.group[row]),
        model=str(published.model[row]),
        gpu=str(published.gpu[row]),
        gpus=int(runs.gpus[row]),
        seq_len=int(runs.seq_len[row]),
        arrangement=arrangement(runs, row),
        step_s=float(published.step_s[row]),
        mfu=float(published.mfu[row]),
        predicted_s=predicted_s,
    )


@dataclass(frozen=True)
class Choice:
    """What was chosen in a family of layouts, against the best that was measured."""

    group: str
    name: str
    layouts: int
    behind: tuple[float, ...]
    """Of each layout proposed: measured over the best, less one; infinite where it ran out of memory."""
    behind_simple: float
    """The same of the smallest tp x pp that is predicted to fit with the largest micro-batch."""
    best: str
    """How the best measured arranges its ranks."""
    first: str
    """How the first that is proposed does."""

    @property
    def best_behind(self) -> float:
        return min(self.behind)


def choices(published: Published, constants: Constants | None = None) -> Iterator[Choice]:
    """Every family with enough timed layouts: a model on a number of GPUs with one batch, sequence and precision.

    Times are those predicted by constants that never saw the model.
    """
    runs, found = published.runs, predict_runs(published.runs, constants or load_constants())
    known = np.isfinite(published.model_left_out_s)
    found = replace(found, step_s=np.where(known, published.model_left_out_s, found.step_s))
    preference = preference_s(runs, found)
    measured = np.where(published.is_ok, published.step_s, np.inf)
    names = (published.group, published.model, runs.gpus, runs.global_batch, runs.seq_len, runs.precision)
    family = np.array(
        [
            " ".join(value if isinstance(value, str) else f"{value:g}" for value in row)
            for row in zip(*names, strict=True)
        ]
    )
    for name in np.unique(family):
        own = np.flatnonzero(family == name)
        if np.isfinite(measured[own]).sum() < FEWEST_LAYOUTS:
            continue
        winner = int(own[np.nanargmin(measured[own])])
        best = measured[winner]
        order = [int(row) for row in own[np.argsort(preference[own], kind="stable")] if found.fits[row]]
        chosen = distinct(order, lambda row: (runs.tp[row], runs.pp[row], runs.cp[row], runs.shard[row]), PROPOSED)
        simple = own[np.lexsort((-runs.micro_batch[own], runs.tp[own] * runs.pp[own], ~found.fits[own]))[0]]
        yield Choice(
            group=str(published.group[own[0]]),
            name=str(name),
            layouts=len(own),
            behind=tuple(float(measured[row] / best - 1) for row in chosen),
            behind_simple=float(measured[simple] / best - 1),
            best=arrangement(runs, winner),
            first=arrangement(runs, chosen[0]),
        )
