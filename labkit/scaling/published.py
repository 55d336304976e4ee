"""The published runs: their limits, held-out predictions, and the nearest to a run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from labkit.scaling import DATA, read_table
from labkit.scaling.models import Numbers
from labkit.scaling.runs import SHARDS, Flags, Run, Runs
from labkit.scaling.table import read_rows

GENERIC = "generic"
"""Framework of runs that do not name a published one."""
FILES = ("training_runs", "more_training_runs")
NEAREST = 5
CHUNK = 1000
"""Runs whose distances are computed at once, so that they need 100 MB at most."""
DOUBLING = {"parameters": 1.0, "gpus": 0.5, "seq_len": 0.5, "tp": 0.3, "pp": 0.3, "cp": 0.5}
DIFFERENCE = {
    "architecture": 2.0,
    "shard": 1.0,
    "precision": 1.0,
    "recompute": 0.5,
    "framework": 1.0,
}
"""Columns -> how far a doubling or a difference is, in doublings of the parameters."""
WITHOUT_MODEL = "without the model"
WITHOUT_FRAMEWORK = "without the framework"
"""Folds in `cross_validated.csv`."""


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
    """A published run, its prediction by constants fitted without it, and its distance."""

    run: PublishedRun
    predicted_s: float
    distance: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.run.step_s - 1


@cache
def load_published() -> Runs:
    """All published runs; fields of `PublishedRun` are columns, too."""
    rows = [
        (file, row, row.run)
        for file in FILES
        for row in read_rows(DATA / f"{file}.csv")
        if row.run is not None
    ]
    return Runs(
        [
            PublishedRun(
                **vars(run),
                key=f"{file}:{row.line}",
                status="suspect" if row.cells.get("suspect") else row.cells["status"],
                step_s=row.step_s or np.nan,
                mfu=float(row.cells.get("mfu_percent") or "nan") / 100,
                reserved_gib=float(row.cells.get("peak_reserved_gib") or "nan"),
            )
            for file, row, run in rows
        ]
    )


def is_timed(published: Runs) -> Flags:
    """Return which runs state the time of a step of a job that was not broken."""
    return np.isfinite(published.step_s) & (published.status == "ok")


@dataclass(frozen=True)
class Ground:
    """Measured runs, and their limits by framework; those of `GENERIC` are of all runs.

    Limits are the largest value of some columns, the "smallest" model, and for each of
    `layout_kinds` the largest number of GPUs it ran on, 0 if it never did.
    """

    runs: Runs
    limits: Mapping[str, Mapping[str, float]]

    @property
    def frameworks(self) -> set[str]:
        """Frameworks with measured runs."""
        return set(self.limits) - {GENERIC}

    def find_limits(self, framework: str) -> Mapping[str, float]:
        """A framework's limits; those of all runs for an unknown one."""
        return self.limits.get(framework, self.limits[GENERIC])


def measure_ground(published: Runs, rows: Flags) -> Ground:
    """The ground of the timed rows in a mask."""
    runs = published.take(rows & is_timed(published))
    names = set(runs.framework.tolist())
    limits = {name: _limits(runs.take(runs.framework == name)) for name in names}
    return Ground(runs, limits | {GENERIC: _limits(runs)})


@cache
def load_ground() -> Ground:
    """The ground of all published runs."""
    return measure_ground(load_published(), np.ones(len(load_published()), dtype=bool))


def _limits(runs: Runs) -> dict[str, float]:
    largest = {
        name: float(getattr(runs, name).max()) for name in ("gpus", "seq_len", "cp", "parameters")
    }
    kinds = {
        name: float(np.max(runs.gpus, where=is_used, initial=0))
        for name, is_used in layout_kinds(runs).items()
    }
    return largest | {"smallest": float(runs.parameters.min())} | kinds


def layout_kinds(runs: Runs) -> dict[str, Flags]:
    """Shardings, fp8 or 16 bits, and ways of dividing a model: whether each run has them."""
    is_fp8 = runs.precision == "fp8"
    degrees = {
        "tensor parallelism": runs.tp > 1,
        "pipelines": runs.pp > 1,
        "context parallelism": runs.cp > 1,
    }
    return (
        {shard: runs.shard == shard for shard in SHARDS}
        | {"fp8": is_fp8, "16 bits": ~is_fp8}
        | degrees
    )


@cache
def held_out_s(fold: str) -> Numbers:
    """Return seconds of every published run as a fold predicts it, (n,).

    nan if the fold does not judge it.

    `benchmarks/fit_scaling.py --write` writes the predictions.
    """
    predicted = {
        row["key"]: float(row["predicted_s"])
        for row in read_table("cross_validated")
        if row["fold"] == fold
    }
    return np.array([predicted.get(key, np.nan) for key in load_published().key.tolist()])


def distances(runs: Runs, others: Runs) -> Numbers:
    """Distance of each run from each of `others`, (n, m); 1 is a doubling of the parameters."""
    away = np.zeros((len(runs), len(others)))
    for name, weight in DOUBLING.items():
        ours = weight * np.log2(getattr(runs, name))
        theirs = weight * np.log2(getattr(others, name))
        apart = np.subtract.outer(ours, theirs)
        away += np.abs(apart, out=apart)
    for name, weight in DIFFERENCE.items():
        both = np.concatenate([getattr(runs, name), getattr(others, name)])
        codes = np.unique(both, return_inverse=True)[1]
        away += weight * np.not_equal.outer(codes[: len(runs)], codes[len(runs) :])
    return away


def nearest(run: Run, count: int = NEAREST) -> list[Neighbor]:
    """The timed runs most like `run`, at most one per table, model and number of GPUs.

    Their predictions know the framework only if `run` names a published one.
    """
    published = load_published()
    predicted = held_out_s(
        WITHOUT_MODEL if run.framework in load_ground().frameworks else WITHOUT_FRAMEWORK
    )
    away = distances(Runs([run]), published)[0]
    away = np.where(is_timed(published) & np.isfinite(predicted), away, np.inf)
    order = np.argsort(away, kind="stable")[: np.isfinite(away).sum()].tolist()
    rows = distinct(
        order, lambda row: (published.table[row], published.name[row], published.gpus[row]), count
    )
    return [
        Neighbor(published.origin[row], float(predicted[row]), float(away[row])) for row in rows
    ]


def distinct(rows: Iterable[int], key: Callable[[int], object], count: int) -> list[int]:
    """The first `count` rows of different keys, in their order."""
    first: dict[object, int] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())[:count]


def nearest_keys(runs: Runs) -> list[tuple[str, float]]:
    """File and line of the timed published run most like each of these, and its distance."""
    timed = load_ground().runs
    keys: list[tuple[str, float]] = []
    for start in range(0, len(runs), CHUNK):
        away = distances(runs.take(slice(start, start + CHUNK)), timed)
        nearest_rows = away.argmin(axis=1)
        keys += zip(timed.key[nearest_rows].tolist(), away.min(axis=1).tolist(), strict=True)
    return keys
