"""Predicts runs, or the rows of a table: step time, its parts, memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.scaling import intervals, memory, validate
from labkit.scaling.constants import GENERIC, Constants
from labkit.scaling.models import Model, Numbers
from labkit.scaling.published import DIFFERENCE, DOUBLING, find_nearest, load_measured
from labkit.scaling.runs import Flags, Layout, Run, Runs, impossible_reason
from labkit.scaling.step_time import breakdown
from labkit.scaling.table import Row

# Share of a GPU's memory that PyTorch can reserve; the runtime and NCCL have the rest. Published:
# up to 77.4 of 80 GB.
FITS_SHARE = 0.94
# Distance to the nearest measured run from which on the answer says that it extrapolates.
FAR = 4.0
# Standard deviations from the middle of a normal distribution to an end of its 90%.
SIGMAS = 1.645
_normal_cdf = np.vectorize(NormalDist().cdf, otypes=[float])
# Columns of a predicted table, behind those of the input.
COLUMNS = ["step_s", "step_low", "step_high", "mfu_percent", "peak_gib", "peak_low", "peak_high"]
COLUMNS += ["fits", "nearest", "note"]
# Columns of the input that have a prediction's name, and their names in the output.
MEASURED = {
    "step_s": "measured_step_s",
    "mfu_percent": "measured_mfu_percent",
    "note": "published_note",
}


@dataclass(frozen=True)
class Prediction:
    """One step of one layout."""

    layout: Layout
    step_s: float
    interval_90: tuple[float, float]
    mfu: float
    parts_s: Mapping[str, float]
    """Parts that add up to `step_s`, without those that take no time."""
    memory_gib: Sequence[Mapping[str, float]]
    """By pipeline stage and part; each stage's parts add up to its reserved memory."""
    peak_gib: float
    peak_90: tuple[float, float]
    out_of_memory: float
    """Probability."""
    fits: bool
    """Also the upper end of the peak fits."""
    may_fit: bool
    distance: float
    warnings: Sequence[str]


@dataclass(frozen=True)
class Predictions:
    """Columns of n predictions, (n,) each."""

    runs: Runs
    predicted_s: Numbers
    """Seconds by the formulas alone."""
    step_s: Numbers
    """No shorter than published matmuls allow."""
    parts_s: Mapping[str, Numbers]
    """Parts that add up to `step_s`; of collectives, only the exposed time."""
    stages: Mapping[str, Numbers]
    """Reserved bytes by part and pipeline stage, (n, stages)."""
    peak_gib: Numbers
    """The fullest stage, and both ends of its 90% interval."""
    peak_low: Numbers
    peak_high: Numbers
    distance: Numbers
    """Distance to the nearest measured run, in doublings of the GPUs."""
    nearest: NDArray[np.intp]
    """Row of the nearest measured run in `load_measured`."""

    @cached_property
    def mfu(self) -> Numbers:
        """Model FLOPs (`step_flops`, with all scores) over the bf16 or fp8 peak."""
        return intervals.peak_s(self.runs) / self.step_s

    @cached_property
    def out_of_memory(self) -> Numbers:
        """Probability of a peak above what can be reserved, normal in ln(peak) on either side."""
        end = np.where(self.may_fit, self.peak_high, self.peak_low)
        width = np.maximum(np.abs(np.log(end / self.peak_gib)), 1e-6)
        sigmas = SIGMAS * np.log(self.peak_gib / self.limit_gib) / width
        return _normal_cdf(sigmas)

    @cached_property
    def limit_gib(self) -> Numbers:
        return FITS_SHARE * self.runs.memory_gib

    @cached_property
    def fits(self) -> Flags:
        """Also the upper end of the peak fits."""
        return self.peak_high <= self.limit_gib

    @cached_property
    def may_fit(self) -> Flags:
        return self.peak_gib < self.limit_gib

    def select(self, rows: Sequence[int]) -> list[Prediction]:
        """Return the predictions of these rows; a search has thousands, and answers need a few."""
        if not rows:
            return []
        low, high = self.interval_90(rows)
        ends = zip(low.tolist(), high.tolist(), strict=True)
        return [self._prediction(row, end) for row, end in zip(rows, ends, strict=True)]

    def _prediction(self, row: int, interval_90: tuple[float, float]) -> Prediction:
        layout = self.runs.origin[row].layout
        return Prediction(
            layout=layout,
            step_s=float(self.step_s[row]),
            interval_90=interval_90,
            mfu=float(self.mfu[row]),
            parts_s={name: float(part[row]) for name, part in self.parts_s.items() if part[row]},
            memory_gib=[
                {part: float(held[row, stage]) / memory.GIB for part, held in self.stages.items()}
                for stage in range(layout.pp)
            ],
            peak_gib=float(self.peak_gib[row]),
            peak_90=(float(self.peak_low[row]), float(self.peak_high[row])),
            out_of_memory=float(self.out_of_memory[row]),
            fits=bool(self.fits[row]),
            may_fit=bool(self.may_fit[row]),
            distance=float(self.distance[row]),
            warnings=list(self.warnings(row)),
        )

    def interval_90(self, rows: Any = slice(None)) -> intervals.Ends:
        """Return both ends of the 90% intervals of these rows, in seconds."""
        runs = self.runs.take(rows)
        seconds = self.predicted_s[rows]
        sources = intervals.find_sources(runs, load_measured())
        ranges = intervals.profile_range(runs, seconds, sources)
        widths = intervals.load_widths()
        return intervals.time_ends(runs, seconds, sources, self.distance[rows], ranges, widths)

    def warnings(self, row: int) -> Iterator[str]:
        """Yield where the prediction extrapolates, and whether memory is short."""
        if self.runs.framework[row] == GENERIC:
            yield (
                "unknown framework: --framework with one like yours, or --calibrate with three"
                " runs, narrows the interval"
            )
        if self.distance[row] > FAR:
            yield f"extrapolated: {self._describe_nearest(row)}"
        if not self.may_fit[row]:
            yield "expected to run out of memory"
        elif not self.fits[row]:
            # Published steps with full memory took 1.5 to 8 times as long: the allocator frees and
            # allocates again inside the step.
            yield f"may run out of memory or be slow: up to {self.peak_high[row]:.0f} GiB"

    def refusal_reason(self, row: int) -> str | None:
        """Return why a run is too far from measured runs, and what would help; None if near."""
        if self.distance[row] <= intervals.MAX_DISTANCE:
            return None
        return (
            "too far from every published run for a number: measure one run of this kind and"
            f" calibrate; {self._describe_nearest(row)}"
        )

    def _describe_nearest(self, row: int) -> str:
        """Return the nearest measured run, and in what it differs."""
        measured = load_measured()
        near = self.nearest[row]
        columns = [
            name
            for name in (*DOUBLING, *DIFFERENCE)
            if getattr(self.runs, name)[row] != getattr(measured, name)[near]
        ]
        return (
            f"the nearest published run, {measured.key[near]}, is {self.distance[row]:.2g} away:"
            f" other {', '.join(columns)}"
        )


def predict(run: Run, constants: Constants | None = None) -> Prediction:
    """Predict one step. ValueError for an impossible layout, or too far from measured runs."""
    # Only here: a search makes thousands of layouts, all of valid fields.
    validate(Layout, vars(run.layout))
    validate(Model, vars(run.model))
    if run.seq_len < 1:
        raise ValueError(f"expected seq_len of 1 or more, got {run.seq_len}")
    reason = impossible_reason(run.layout, run.model, run.seq_len)
    if reason is not None:
        raise ValueError(reason)
    predictions = predict_runs(Runs([run], constants))
    reason = predictions.refusal_reason(0)
    if reason is not None:
        raise ValueError(reason)
    return predictions.select([0])[0]


def predict_runs(runs: Runs) -> Predictions:
    """Predict all runs at once. Layouts must be possible (`impossible_reason`)."""
    parts = breakdown(runs)
    predicted = np.sum(list(parts.values()), axis=0)
    # No step is faster than the highest published rate of matmuls; parts still add up to it.
    seconds = np.maximum(predicted, intervals.fastest_s(runs))
    parts["matmuls"] = parts["matmuls"] + seconds - predicted
    stages = memory.stage_bytes(runs)
    peak_gib = memory.peak_gib(stages)
    peak_low, peak_high = intervals.memory_ends(runs, peak_gib)
    distance, nearest = find_nearest(runs, load_measured())
    return Predictions(
        runs=runs,
        predicted_s=predicted,
        step_s=seconds,
        parts_s=parts,
        stages=stages,
        peak_gib=peak_gib,
        peak_low=peak_low,
        peak_high=peak_high,
        distance=distance,
        nearest=nearest,
    )


def predict_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells of every row with `COLUMNS`; a refused row has only the note."""
    # All at once: a formula on columns takes as long for one run as for hundreds.
    possible = [row.run for row in rows if row.run is not None]
    predicted: Iterator[dict[str, str]] = iter(())
    if possible:
        predicted = _cells(predict_runs(Runs(possible)))
    merged = []
    for row in rows:
        new = {"note": f"refused: {row.refusal}"} if row.run is None else next(predicted)
        notes = [new["note"], *(f"assumed: {words}" for words in row.assumptions)]
        new["note"] = "; ".join(note for note in notes if note)
        cells = {MEASURED.get(name, name): value for name, value in row.cells.items()}
        # The input may have columns of an output of `labkit predict`.
        cells = {name: value for name, value in cells.items() if name not in COLUMNS}
        merged.append(cells | dict.fromkeys(COLUMNS, "") | new)
    return merged


def _cells(predictions: Predictions) -> Iterator[dict[str, str]]:
    """Yield the cells of each prediction."""
    measured = load_measured()
    low, high = predictions.interval_90()
    # 1 if the upper end of memory fits, 0 if the lower end does not, else nothing.
    is_too_large = predictions.peak_low > predictions.limit_gib
    fits = np.select([predictions.fits, is_too_large], ["1", "0"], "")
    for at in range(len(predictions.runs)):
        reason = predictions.refusal_reason(at)
        if reason is not None:
            yield {"note": f"refused: {reason}"}
            continue
        near = measured.key[predictions.nearest[at]]
        yield {
            "step_s": f"{predictions.step_s[at]:.6g}",
            "step_low": f"{low[at]:.6g}",
            "step_high": f"{high[at]:.6g}",
            "mfu_percent": f"{100 * predictions.mfu[at]:.2f}",
            "peak_gib": f"{predictions.peak_gib[at]:.2f}",
            "peak_low": f"{predictions.peak_low[at]:.2f}",
            "peak_high": f"{predictions.peak_high[at]:.2f}",
            "fits": str(fits[at]),
            "nearest": f"{near}, {predictions.distance[at]:.2g} away",
            "note": "; ".join(predictions.warnings(at)),
        }
