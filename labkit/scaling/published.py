"""The published runs: held-out predictions, and the nearest to a run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from labkit.scaling import DATA, read_table
from labkit.scaling.constants import CALIBRATED, GENERIC
from labkit.scaling.models import Numbers
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.table import read_rows

FILES = ("training_runs", "more_training_runs")
NEAREST = 5
# Runs whose distances are computed at once: in a sweep of 20,000, 30 MB instead of a gigabyte.
CHUNK = 1000
# Columns -> how far a doubling or a difference is, in doublings of the GPUs. Declared, not fitted.
# Parameters weigh most: with half as much, models of twice the size are covered in 70%.
DOUBLING = {"parameters": 2.0, "gpus": 1.0, "seq_len": 1.0, "tp": 0.3, "pp": 0.3, "cp": 1.0}
DIFFERENCE = {
    "architecture": 2.0,
    "shard": 1.0,
    "precision": 1.0,
    "recompute": 0.5,
    "framework": 1.0,
}
# Folds in `cross_validated.csv`.
WITHOUT_MODEL = "without the model"
WITHOUT_FRAMEWORK = "without the framework"


@dataclass(frozen=True, kw_only=True)
class PublishedRun(Run):
    """A run with its measurement; numbers are nan where none was published."""

    key: str
    """File and line, "training_runs:17"."""
    status: str
    """ok; oom: out of memory; suspect: the job's network was broken."""
    step_s: float
    mfu: float
    """As printed, 0 to 1: conventions differ."""
    reserved_gib: float


@dataclass(frozen=True)
class Neighbor:
    """A published run, and its distance."""

    run: PublishedRun
    error: float
    """Predicted over measured, less one, by constants fitted without it."""
    distance: float


@cache
def load_published() -> Runs:
    """Return all published runs; fields of `PublishedRun` are columns, too."""
    published = []
    for file in FILES:
        for row in read_rows(DATA / f"{file}.csv"):
            # A few rows are in fp32, which is not predicted.
            if row.run is None:
                continue
            cells = row.cells
            published.append(
                PublishedRun(
                    **vars(row.run),
                    key=f"{file}:{row.line}",
                    status="suspect" if cells.get("suspect") else cells["status"],
                    step_s=row.step_s or np.nan,
                    mfu=float(cells.get("mfu_percent") or "nan") / 100,
                    reserved_gib=float(cells.get("peak_reserved_gib") or "nan"),
                )
            )
    return Runs(published)


def is_timed(published: Runs) -> Flags:
    """Return which runs state the time of a step of a job that was not broken."""
    return np.isfinite(published.step_s) & (published.status == "ok")


@cache
def load_measured() -> Runs:
    """Return the timed published runs."""
    return load_published().take(is_timed(load_published()))


@cache
def held_out_s(fold: str) -> Numbers:
    """Return seconds of every published run as a fold predicts it, (n,); nan if it does not."""
    rows = read_table("cross_validated", beginning=fold)
    predicted = {row["key"]: float(row["predicted_s"]) for row in rows if row["fold"] == fold}
    return np.array([predicted.get(key, np.nan) for key in load_published().key.tolist()])


def distances(runs: Runs, others: Runs) -> Numbers:
    """Return the distance of each run from each of `others`, (n, m), in doublings of the GPUs."""
    away = np.zeros((len(runs), len(others)))
    for name, weight in (DOUBLING | DIFFERENCE).items():
        # Many runs have few values of each column.
        values, codes = np.unique(getattr(runs, name), return_inverse=True)
        theirs = getattr(others, name)
        if name in DOUBLING:
            apart = np.abs(np.subtract.outer(np.log2(values), np.log2(theirs)))
        else:
            apart = values[:, None] != theirs
        away += (weight * apart)[codes]
    # A user's own runs say what their framework takes: it is no further away than a published one.
    away[runs.framework == CALIBRATED] -= DIFFERENCE["framework"]
    return away


def find_nearest(runs: Runs, measured: Runs) -> tuple[Numbers, NDArray[np.intp]]:
    """Return each run's distance to the nearest measured one, and that one's row, (n,) each."""
    columns = [
        np.unique(getattr(runs, name), return_inverse=True)[1] for name in (*DOUBLING, *DIFFERENCE)
    ]
    # Layouts of a search differ in few of these columns.
    _, first, same = np.unique(
        np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True
    )
    away = np.empty(len(first))
    rows = np.empty(len(first), dtype=np.intp)
    for start in range(0, len(first), CHUNK):
        chunk = slice(start, start + CHUNK)
        table = distances(runs.take(first[chunk]), measured)
        away[chunk] = table.min(axis=1)
        rows[chunk] = table.argmin(axis=1)
    return away[same.ravel()], rows[same.ravel()]


def nearest(run: Run, count: int = NEAREST) -> list[Neighbor]:
    """Return the timed runs most like `run`, at most one per table, model and number of GPUs.

    Their predictions know the framework only if `run` names a published one.
    """
    published = load_published()
    is_named = run.framework != GENERIC and run.framework in published.framework
    predicted = held_out_s(WITHOUT_MODEL if is_named else WITHOUT_FRAMEWORK)
    away = distances(Runs([run]), published)[0]
    away = np.where(is_timed(published) & np.isfinite(predicted), away, np.inf)
    order = np.argsort(away, kind="stable")[: np.isfinite(away).sum()].tolist()
    rows = distinct(
        order, lambda row: (published.table[row], published.name[row], published.gpus[row]), count
    )
    errors = predicted / published.step_s - 1
    return [Neighbor(published.origin[row], float(errors[row]), float(away[row])) for row in rows]


def distinct(
    rows: Iterable[int], key: Callable[[int], object], count: int | None = None
) -> list[int]:
    """Return the first row of each key, in their order; the first `count` of them."""
    first: dict[object, int] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())[:count]
