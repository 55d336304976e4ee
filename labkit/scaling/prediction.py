"""Predicts runs and tables: step time, its parts, memory."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from labkit.scaling import intervals, memory
from labkit.scaling.constants import Constants
from labkit.scaling.models import Numbers
from labkit.scaling.published import Ground, load_ground, nearest_keys
from labkit.scaling.runs import Layout, Run, Runs, impossible_reason
from labkit.scaling.step_time import breakdown
from labkit.scaling.table import Row

FITS_SHARE = 0.94
"""Share of a GPU's memory that PyTorch can reserve; the runtime and NCCL have the rest. Published:
up to 77.4 of 80."""
UNSTABLE_SHARE = 0.88
"""Share from which runs are often 1.5 to 8 times slow.

The allocator frees and allocates again inside the step.
"""
FITS_RISK = 0.05
MAY_FIT_RISK = 0.5
"""Risks of running out of memory below which a run fits, or may."""
SIGMAS = 1.645
"""Standard deviations from the middle of a normal distribution to an end of its 90%."""
COLUMNS = (
    "step_s",
    "step_low",
    "step_high",
    "mfu_percent",
    "peak_gib",
    "peak_low",
    "peak_high",
    "fits",
    "unstable",
    "nearest",
    "note",
)
MEASURED = {
    "step_s": "measured_step_s",
    "mfu_percent": "measured_mfu_percent",
    "note": "published_note",
}
"""Columns of the input that have a prediction's name, and their names in the output."""


@dataclass(frozen=True)
class Prediction:
    """One step of one layout."""

    layout: Layout
    step_s: float
    interval_90: tuple[float, float]
    distance: float
    """Distance from measured runs, in doublings and kinds without a measured run."""
    parts_s: Mapping[str, float]
    """Parts that add up to `step_s`; of collectives, only the exposed time."""
    mfu: float
    """Model FLOPs over the bf16 or fp8 peak.

    6 FLOPs per parameter and token plus 12 L q S^2 per sequence (all scores).
    """
    memory_gib: Sequence[Mapping[str, float]]
    """By pipeline stage and part; each stage's parts add up to its reserved memory."""
    peak_gib: float
    peak_90: tuple[float, float]
    """The 90% interval of the peak."""
    out_of_memory: float
    """Probability of running out of memory."""
    is_unstable: bool
    """Memory is so full that steps become slow."""
    fits: bool
    """Also the upper end of the peak fits."""
    may_fit: bool
    has_room: bool
    """It fits, and steps are stable: memory needs no change."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Predictions:
    """Columns of n predictions, (n,) each.

    Attributes are the numbers of `Prediction`, and `low_90` and `high_90`.
    """

    runs: Runs
    ground: Ground
    columns: Mapping[str, NDArray[Any]]
    distances: Mapping[str, Numbers]
    """Distances from measured runs, by what lies outside of them.

    Beyond `MAX_DISTANCE` in all the error is unknown.
    """
    parts_s: Mapping[str, Numbers]
    """Parts that add up to `step_s`."""
    stages: Mapping[str, Numbers]
    """Reserved bytes by part and stage, (n, stages)."""

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name not in vars(self).get("columns", ()):  # a copy has none yet
            raise AttributeError(name)
        return self.columns[name]

    def prediction(self, row: int) -> Prediction:
        """Return one prediction, even of a run that is too far from measured runs."""
        layout = self.runs.origin[row].layout
        parts = self.stages.items()
        return Prediction(
            layout=layout,
            interval_90=(float(self.low_90[row]), float(self.high_90[row])),
            peak_90=(float(self.peak_low[row]), float(self.peak_high[row])),
            parts_s={name: float(values[row]) for name, values in self.parts_s.items()},
            memory_gib=[
                {name: values[row, at].item() / memory.GIB for name, values in parts}
                for at in range(layout.pp)
            ],
            warnings=tuple(self.warnings(row)),
            **{
                one.name: self.columns[one.name][row].item()
                for one in fields(Prediction)
                if one.name in self.columns
            },
        )

    def warnings(self, row: int) -> Iterator[str]:
        """Yield where the prediction extrapolates, and whether memory is short."""
        yield from intervals.extrapolations(self.runs, row, self.ground, self.distances)
        if not self.may_fit[row]:
            yield "expected to run out of memory"
        elif not self.fits[row]:
            yield f"may run out of memory: the peak may be {self.peak_high[row]:.0f} GiB"
        elif self.is_unstable[row]:
            yield "unstable: memory is so full that steps often take 1.5 to 8 times as long"

    def refusal_reason(self, row: int) -> str | None:
        """Return why a run is too far from measured runs, and what would help; None if near."""
        if self.distance[row] <= intervals.MAX_DISTANCE:
            return None
        reasons = "; ".join(intervals.extrapolations(self.runs, row, self.ground, self.distances))
        return (
            f"too far from every published run for a number ({reasons}): measure one run of this"
            " kind and calibrate"
        )


def predict(run: Run, constants: Constants | None = None) -> Prediction:
    """Predict one step.

    ValueError if the layout cannot run the model, or the run is too far from measured runs.
    """
    if reason := impossible_reason(run.layout, run.model, run.seq_len):
        raise ValueError(reason)
    predictions = predict_runs(Runs([run], constants))
    if reason := predictions.refusal_reason(0):
        raise ValueError(reason)
    return predictions.prediction(0)


def predict_runs(runs: Runs) -> Predictions:
    """Predict all runs at once. Layouts must be possible (`impossible_reason`)."""
    ground = load_ground()
    profiles = {name: ground.find_limits(parent) for name, parent in runs.constants.parents.items()}
    ground = Ground(ground.runs, {**profiles, **ground.limits})
    parts = breakdown(runs)
    stages = memory.stage_bytes(runs)
    peak_gib = memory.peak_gib(stages)
    is_unstable = peak_gib > UNSTABLE_SHARE * runs.memory_gib
    distances = intervals.measure_distances(runs, ground)
    slopes = intervals.measure_slopes(distances, is_unstable)
    widths = intervals.load_widths()
    sources = intervals.find_sources(runs, ground)
    exponents = intervals.sum_widths(sources, slopes, widths)
    predicted = np.sum(list(parts.values()), axis=0)
    seconds, low, high = intervals.find_ends(runs, predicted, exponents)
    parts["gemm_s"] = parts["gemm_s"] + seconds - predicted
    peak_low, peak_high = intervals.memory_ends(runs, peak_gib, widths)
    risk = _overflow_risk(peak_gib, peak_low, peak_high, FITS_SHARE * runs.memory_gib)
    columns = {
        "step_s": seconds,
        "low_90": low,
        "high_90": high,
        "distance": np.sum(list(distances.values()), axis=0),
        "mfu": intervals.peak_s(runs) / seconds,
        "peak_gib": peak_gib,
        "peak_low": peak_low,
        "peak_high": peak_high,
        "out_of_memory": risk,
        "is_unstable": is_unstable,
        "fits": risk <= FITS_RISK,
        "may_fit": risk < MAY_FIT_RISK,
        "has_room": (risk <= FITS_RISK) & ~is_unstable,
    }
    return Predictions(runs, ground, columns, distances, parts, stages)


def _overflow_risk(peak: Numbers, low: Numbers, high: Numbers, limit: Numbers) -> Numbers:
    """Return the probability that a peak with these ends of 90% is above the limit.

    ln(peak) is taken as normal on either side of its middle.
    """
    above = np.log(limit / peak) / np.maximum(np.log(high / peak), 1e-6)
    below = np.log(limit / peak) / np.maximum(np.log(peak / low), 1e-6)
    sigmas = SIGMAS * np.where(limit > peak, above, below)
    return 1 / (1 + np.exp(1.79 * np.clip(sigmas, -20, 20)))  # exact at 0 and at 1.645


def predict_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells of every row with `COLUMNS`.

    For a refused row these are empty, except for the note.
    """
    possible = [row.run for row in rows if row.run is not None]
    predicted = _cells(predict_runs(Runs(possible))) if possible else iter(())
    return [
        _merge(row, next(predicted) if row.run else {"note": f"refused: {row.refusal}"})
        for row in rows
    ]


def _cells(predictions: Predictions) -> Iterator[dict[str, str]]:
    for at, (key, away) in enumerate(nearest_keys(predictions.runs)):
        if reason := predictions.refusal_reason(at):
            yield {"note": f"refused: {reason}"}
            continue
        yield {
            "step_s": f"{predictions.step_s[at]:.6g}",
            "step_low": f"{predictions.low_90[at]:.6g}",
            "step_high": f"{predictions.high_90[at]:.6g}",
            "mfu_percent": f"{100 * predictions.mfu[at]:.2f}",
            "peak_gib": f"{predictions.peak_gib[at]:.2f}",
            "peak_low": f"{predictions.peak_low[at]:.2f}",
            "peak_high": f"{predictions.peak_high[at]:.2f}",
            "fits": _fits_cell(predictions, at),
            "unstable": str(int(predictions.is_unstable[at])),
            "nearest": f"{key}, {away:.2g} away",
            "note": "; ".join(predictions.warnings(at)),
        }


def _fits_cell(predictions: Predictions, at: int) -> str:
    """1 if the upper end of memory fits, 0 if the lower end does not, else empty."""
    if predictions.fits[at]:
        return "1"
    limit_gib = FITS_SHARE * predictions.runs.memory_gib[at]
    return "0" if predictions.peak_low[at] > limit_gib else ""


def _merge(row: Row, predicted: Mapping[str, str]) -> dict[str, str]:
    """A row's cells, its prediction, and the assumptions about empty cells."""
    cells = {MEASURED.get(name, name): value for name, value in row.cells.items()}
    notes = [
        note
        for note in (predicted["note"], *(f"assumed: {name}" for name in row.assumptions))
        if note
    ]
    cells = {name: value for name, value in cells.items() if name not in COLUMNS}
    return cells | dict.fromkeys(COLUMNS, "") | dict(predicted) | {"note": "; ".join(notes)}


def write_rows(rows: Sequence[Mapping[str, str]], out: TextIO) -> None:
    """Write a CSV with every column that any row has.

    Characters that `out` cannot encode are replaced.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    encoding = getattr(out, "encoding", None) or "utf-8"
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    for row in [dict(zip(names, names, strict=True)), *rows]:
        writer.writerow(
            {name: text.encode(encoding, "replace").decode(encoding) for name, text in row.items()}
        )
