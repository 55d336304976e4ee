"""The published runs, their predictions by constants fitted without them, and the ones nearest to a run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from labkit.scaling import DATA, read_table
from labkit.scaling.models import Numbers
from labkit.scaling.runs import Flags, Layout, Run, Runs
from labkit.scaling.table import read_rows

FILES = ("training_runs", "more_training_runs")
NEAREST = 5
DOUBLING = {"parameters": 1.0, "gpus": 0.5, "seq_len": 0.5, "tp": 0.3, "pp": 0.3, "cp": 0.5}
DIFFERENCE = {"architecture": 2.0, "shard": 1.0, "precision": 1.0, "recompute": 0.5, "framework": 1.0}
"""Columns -> how far a doubling or a difference is, in doublings of the parameters."""
WITHOUT_MODEL, WITHOUT_FRAMEWORK = "without the model", "without the framework"
"""Folds in `cross_validated.csv`."""


@dataclass(frozen=True, eq=False)
class Published:
    """Published runs as columns; seconds are nan where there are none."""

    runs: Runs
    key: NDArray[np.str_]
    """File and line, "training_runs:17"."""
    group: NDArray[np.str_]
    """Published table."""
    model: NDArray[np.str_]
    is_ok: Flags
    step_s: Numbers
    mfu: Numbers
    """As printed, 0 to 1: conventions differ."""
    reserved_gib: Numbers

    @property
    def is_timed(self) -> Flags:
        return np.isfinite(self.step_s)


@dataclass(frozen=True)
class PublishedRow:
    """A published run, its distance from the run asked about, and its prediction by constants fitted without it."""

    group: str
    model: str
    gpu: str
    gpus: int
    arrangement: str
    step_s: float
    mfu: float
    predicted_s: float
    distance: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.step_s - 1


@cache
def load_published() -> Published:
    """All published runs."""
    files = [(file, row) for file in FILES for row in read_rows(DATA / f"{file}.csv") if row.run is not None]
    rows = [row for _, row in files]

    def numbers(name: str) -> Numbers:
        return np.array([float(row.cells.get(name) or "nan") for row in rows])

    def texts(name: str) -> NDArray[np.str_]:
        return np.array([row.cells[name] for row in rows])

    return Published(
        runs=Runs([row.run for row in rows if row.run is not None]),
        key=np.array([f"{file}:{row.line}" for file, row in files]),
        group=texts("group"),
        model=texts("model"),
        is_ok=texts("status") == "ok",
        step_s=numbers("step_s"),
        mfu=numbers("mfu_percent") / 100,
        reserved_gib=numbers("peak_reserved_gib"),
    )


@cache
def frameworks() -> frozenset[str]:
    """Frameworks with timed published runs."""
    published = load_published()
    return frozenset(published.runs.framework[published.is_timed].tolist()) - {"generic"}


@cache
def held_out_s(fold: str) -> Numbers:
    """Seconds of every published run as a fold predicts it, (n,); nan if the fold does not judge it.

    `benchmarks/fit_scaling.py --write` writes the predictions.
    """
    predicted = {row["key"]: float(row["predicted_s"]) for row in read_table("cross_validated") if row["fold"] == fold}
    return np.array([predicted.get(key, np.nan) for key in load_published().key.tolist()])


def distances(runs: Runs, row: int, others: Runs) -> Numbers:
    """Distance of run `row` from each of `others`, (m,); 1 is a doubling of the parameters."""
    away: Numbers = np.zeros(len(others))
    for name, weight in DOUBLING.items():
        away = away + weight * np.abs(np.log2(getattr(others, name) / getattr(runs, name)[row]))
    for name, weight in DIFFERENCE.items():
        away = away + weight * (getattr(others, name) != getattr(runs, name)[row])
    return away


def nearest(run: Run, count: int = NEAREST) -> list[PublishedRow]:
    """The timed runs most like `run`, at most one per model and number of GPUs.

    Their predictions know the framework only if `run` names a published one.
    """
    published, runs = load_published(), load_published().runs
    predicted = held_out_s(WITHOUT_MODEL if run.framework in frameworks() else WITHOUT_FRAMEWORK)
    away = distances(Runs([run]), 0, runs)
    away = np.where(published.is_timed & np.isfinite(predicted), away, np.inf)
    order = np.argsort(away, kind="stable")[: np.isfinite(away).sum()].tolist()
    return [
        PublishedRow(
            **{name: getattr(published, name)[row].item() for name in ("group", "model", "step_s", "mfu")},
            gpu=runs.origin[row].hardware.name,
            gpus=runs.origin[row].layout.gpus,
            arrangement=arrangement(runs.origin[row].layout),
            predicted_s=float(predicted[row]),
            distance=float(away[row]),
        )
        for row in distinct(order, lambda row: (published.group[row], published.model[row], runs.gpus[row]), count)
    ]


def distinct(rows: Iterable[int], key: Callable[[int], object], count: int) -> list[int]:
    """The first `count` rows of different keys, in their order."""
    first: dict[object, int] = {}
    for row in rows:
        first.setdefault(key(row), row)
    return list(first.values())[:count]


def nearest_keys(runs: Runs) -> list[tuple[str, float]]:
    """File and line of the timed published run most like each of these, and its distance."""
    published = load_published()
    timed, keys = published.runs.take(published.is_timed), published.key[published.is_timed]
    away = [distances(runs, row, timed) for row in range(len(runs))]
    return [(str(keys[one.argmin()]), float(one.min())) for one in away]


def arrangement(layout: Layout) -> str:
    """Degrees and sharding, by which layouts differ most: "tp 2 pp 4 cp 1 dp 8 zero1"."""
    degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp")]
    return " ".join([*degrees, layout.shard])
