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
# Share from which published runs are often 1.5 to 8 times slow: the allocator frees and allocates
# again inside the step.
UNSTABLE_SHARE = 0.88
# Risks of running out of memory below which a run fits, or may.
FITS_RISK = 0.05
MAY_FIT_RISK = 0.5
# Distance to the nearest measured run from which on the answer says that it extrapolates.
FAR = 4.0
# Standard deviations from the middle of a normal distribution to an end of its 90%.
SIGMAS = 1.645
_normal_cdf = np.vectorize(NormalDist().cdf, otypes=[float])
# Groups of parts that add up to the step.
SUMS = {
    "compute": ("gemm_s", "attention_s", "elementwise_s", "head_s"),
    "CPU launches": ("launch_s",),
    "tensor-parallel collectives": ("tensor_parallel_s",),
    "keys and values around the ring": ("context_parallel_s",),
    "gathering parameters": ("gather_s",),
    "pipeline bubble and transfers": ("bubble_s", "pipeline_transfer_s", "engine_s"),
    "gradient reduction": ("data_parallel_s",),
    "optimizer": ("optimizer_s",),
}
# Columns of a predicted table, behind those of the input.
COLUMNS = ["step_s", "step_low", "step_high", "mfu_percent", "peak_gib", "peak_low", "peak_high"]
COLUMNS += ["fits", "unstable", "nearest", "note"]
# Columns of the input that have a prediction's name, and their names in the output.
MEASURED = {
    "step_s": "measured_step_s",
    "mfu_percent": "measured_mfu_percent",
    "note": "published_note",
}


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
        """Probability that the peak is above what can be reserved.

        ln(peak) is taken as normal on either side of its middle.
        """
        limit = FITS_SHARE * self.runs.memory_gib
        end = np.where(limit > self.peak_gib, self.peak_high, self.peak_low)
        width = np.maximum(np.abs(np.log(end / self.peak_gib)), 1e-6)
        sigmas = SIGMAS * np.log(self.peak_gib / limit) / width
        return _normal_cdf(sigmas)

    @cached_property
    def fits(self) -> Flags:
        """Also the upper end of the peak fits."""
        return self.out_of_memory <= FITS_RISK

    @cached_property
    def may_fit(self) -> Flags:
        return self.out_of_memory < MAY_FIT_RISK

    @cached_property
    def is_unstable(self) -> Flags:
        """Memory is so full that steps become slow."""
        return self.peak_gib > UNSTABLE_SHARE * self.runs.memory_gib

    @cached_property
    def has_room(self) -> Flags:
        """It fits, and steps are stable: memory needs no change."""
        return self.fits & ~self.is_unstable

    def prediction(self, row: int) -> "Prediction":
        """Return one prediction, even of a run that is too far from measured runs."""
        return self.some([row])[0]

    def some(self, rows: Sequence[int]) -> list["Prediction"]:
        """Return the predictions of these rows; a search has thousands, and answers need a few."""
        if not rows:
            return []
        low, high = self.interval_90(rows)
        ends = zip(low.tolist(), high.tolist(), strict=True)
        return [Prediction(self, row, end) for row, end in zip(rows, ends, strict=True)]

    def interval_90(self, rows: Any = slice(None)) -> intervals.Ends:
        """Return both ends of the 90% intervals of these rows, in seconds."""
        runs = self.runs.take(rows)
        predicted = self.predicted_s[rows]
        sources = intervals.find_sources(runs, load_measured())
        ranges = intervals.profile_range(runs, predicted, sources)
        widths = intervals.load_widths()
        exponents = intervals.sum_exponents(sources, self.distance[rows], ranges, widths)
        return intervals.find_ends(runs, predicted, exponents)

    def warnings(self, row: int) -> Iterator[str]:
        """Yield where the prediction extrapolates, and whether memory is short."""
        if self.runs.framework[row] == GENERIC:
            yield "framework without published runs: calibrate with three runs of it"
        if self.distance[row] > FAR:
            yield f"extrapolated: {self._describe_nearest(row)}"
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


@dataclass(frozen=True)
class Prediction:
    """One step of one layout. Other attributes are the numbers of `Predictions`' columns."""

    columns: Predictions
    row: int
    interval_90: tuple[float, float]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy has no columns yet
            raise AttributeError(name)
        return getattr(self.columns, name)[self.row].item()

    @property
    def layout(self) -> Layout:
        return self.columns.runs.origin[self.row].layout

    @property
    def parts_s(self) -> dict[str, float]:
        """Parts that add up to `step_s`."""
        return {name: values[self.row].item() for name, values in self.columns.parts_s.items()}

    @property
    def sums_s(self) -> dict[str, float]:
        """Seconds of the parts in groups, by name in `SUMS`."""
        parts = self.parts_s
        return {name: sum(parts[part] for part in group) for name, group in SUMS.items()}

    @property
    def memory_gib(self) -> list[dict[str, float]]:
        """By pipeline stage and part; each stage's parts add up to its reserved memory."""
        stages = self.columns.stages.items()
        return [
            {part: values[self.row, stage].item() / memory.GIB for part, values in stages}
            for stage in range(self.layout.pp)
        ]

    @property
    def warnings(self) -> list[str]:
        return list(self.columns.warnings(self.row))


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
    return predictions.prediction(0)


def predict_runs(runs: Runs) -> Predictions:
    """Predict all runs at once. Layouts must be possible (`impossible_reason`)."""
    parts = breakdown(runs)
    predicted = np.sum(list(parts.values()), axis=0)
    # No step is faster than the highest published rate of matmuls; parts still add up to it.
    seconds = np.maximum(predicted, intervals.fastest_s(runs))
    parts["gemm_s"] = parts["gemm_s"] + seconds - predicted
    stages = memory.stage_bytes(runs)
    peak_gib = memory.peak_gib(stages)
    peak_low, peak_high = intervals.memory_ends(runs, peak_gib, intervals.load_widths())
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
        cells = {MEASURED.get(name, name): value for name, value in row.cells.items()}
        # The input may have columns of an output of `labkit predict`.
        cells = {name: value for name, value in cells.items() if name not in COLUMNS}
        new["note"] = "; ".join(note for note in notes if note)
        merged.append(cells | dict.fromkeys(COLUMNS, "") | new)
    return merged


def _cells(predictions: Predictions) -> Iterator[dict[str, str]]:
    """Yield the cells of each prediction."""
    measured = load_measured()
    low, high = predictions.interval_90()
    # 1 if the upper end of memory fits, 0 if the lower end does not, else nothing.
    is_too_large = predictions.peak_low > FITS_SHARE * predictions.runs.memory_gib
    fits = np.select([predictions.fits, is_too_large], ["1", "0"], "")
    for at in range(len(predictions.runs)):
        reason = predictions.refusal_reason(at)
        if reason is not None:
            yield {"note": f"refused: {reason}"}
            continue
        yield {
            "step_s": f"{predictions.step_s[at]:.6g}",
            "step_low": f"{low[at]:.6g}",
            "step_high": f"{high[at]:.6g}",
            "mfu_percent": f"{100 * predictions.mfu[at]:.2f}",
            "peak_gib": f"{predictions.peak_gib[at]:.2f}",
            "peak_low": f"{predictions.peak_low[at]:.2f}",
            "peak_high": f"{predictions.peak_high[at]:.2f}",
            "fits": str(fits[at]),
            "unstable": str(int(predictions.is_unstable[at])),
            "nearest": (
                f"{measured.key[predictions.nearest[at]]}, {predictions.distance[at]:.2g} away"
            ),
            "note": "; ".join(predictions.warnings(at)),
        }
