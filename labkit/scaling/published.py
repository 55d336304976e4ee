"""The published runs, each with its predictions by constants that had not seen its like, and how far others are."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.model import Numbers, parameters
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.table import read_rows
from labkit.scaling.tables import DATA, read_table

FILES = ("training_runs", "more_training_runs")
NEAREST = 5


@dataclass(frozen=True, eq=False)
class Published:
    """Published runs as columns; seconds are nan where there are none."""

    runs: Runs
    key: NDArray[np.str_]
    """File and line, "training_runs:17"."""
    group: NDArray[np.str_]
    """Published table."""
    model: NDArray[np.str_]
    gpu: NDArray[np.str_]
    source: NDArray[np.str_]
    is_ok: Flags
    step_s: Numbers
    mfu: Numbers
    """As printed, 0 to 1: conventions differ."""
    allocated_gib: Numbers
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
    seq_len: int
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
        runs=Runs.from_runs([row.run for row in rows if row.run is not None]),
        key=np.array([f"{file}:{row.line}" for file, row in files]),
        group=texts("group"),
        model=texts("model"),
        gpu=texts("gpu"),
        source=texts("source"),
        is_ok=texts("status") == "ok",
        step_s=numbers("step_s"),
        mfu=numbers("mfu_percent") / 100,
        allocated_gib=numbers("peak_allocated_gib"),
        reserved_gib=numbers("peak_reserved_gib"),
    )


@cache
def frameworks() -> frozenset[str]:
    """Frameworks with timed published runs."""
    published = load_published()
    return frozenset(published.runs.framework[published.is_timed].tolist()) - {"generic"}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Predictions of every published run by constants and intervals fitted without its like, (n,); nan if none."""

    step_s: Numbers
    low_90: Numbers
    high_90: Numbers
    distance: Numbers
    """From measured ground (`labkit.scaling.ground`)."""


@cache
def load_held_out(fold: str) -> HeldOut:
    """By a name in `labkit.scaling.folds`; `benchmarks/fit_scaling.py --write` writes the predictions."""
    names = ("step_s", "low_90", "high_90", "distance")
    rows = {row["key"]: row for row in read_table("cross_validated") if row["fold"] == fold}
    keys = load_published().key.tolist()
    return HeldOut(*(np.array([float(rows[key][name]) if key in rows else np.nan for key in keys]) for name in names))


def distances(runs: Runs, row: int, others: Runs) -> Numbers:
    """How unlike run `row` is to each of `others`, (m,); 1 is a doubling of the parameters."""

    def apart(name: str, weight: float) -> Numbers:
        return weight * np.abs(np.log2(getattr(others, name) / getattr(runs, name)[row]))

    def differs(name: str, weight: float) -> Numbers:
        return weight * (getattr(others, name) != getattr(runs, name)[row])

    sizes = np.log2(np.asarray(parameters(others)) / np.asarray(parameters(runs))[row])
    found = np.abs(sizes) + apart("gpus", 0.5) + apart("seq_len", 0.5) + apart("tp", 0.3) + apart("pp", 0.3)
    found += apart("cp", 0.5) + differs("architecture", 2.0) + differs("shard", 1.0) + differs("precision", 1.0)
    return found + differs("recompute", 0.5) + differs("framework", 1.0)


def nearest(run: Run, count: int = NEAREST) -> list[PublishedRow]:
    """The timed runs most like `run`, at most one per model and number of GPUs.

    Their predictions know the framework only if `run` names a published one.
    """
    published = load_published()
    rows = published.runs
    is_known = run.framework in frameworks()
    predicted = load_held_out("without_model" if is_known else "without_framework").step_s
    distance = distances(Runs.from_runs([run]), 0, rows)
    distance = np.where(published.is_timed & np.isfinite(predicted), distance, np.inf)
    chosen: dict[tuple[object, ...], int] = {}
    for row in np.argsort(distance, kind="stable"):
        if len(chosen) == count or not np.isfinite(distance[row]):
            break
        chosen.setdefault((published.group[row], published.model[row], rows.gpus[row]), int(row))
    return [_row(published, row, float(predicted[row]), float(distance[row])) for row in chosen.values()]


def arrangement(runs: Runs, row: int) -> str:
    """Degrees and sharding of a run: "tp 2 pp 4 cp 1 dp 8 zero1"."""
    degrees = [f"{name} {int(getattr(runs, name)[row])}" for name in ("tp", "pp", "cp", "dp")]
    return " ".join([*degrees, str(runs.shard[row])])


def _row(published: Published, row: int, predicted_s: float, distance: float) -> PublishedRow:
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
        distance=distance,
    )
