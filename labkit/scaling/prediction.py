"""Predicts runs: step time, its parts, memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.scaling import intervals, memory
from labkit.scaling.constants import GENERIC, Constants
from labkit.scaling.models import Numbers
from labkit.scaling.published import DIFFERENCE, DOUBLING, find_nearest, load_measured
from labkit.scaling.runs import Layout, Run, Runs, impossible_reason
from labkit.scaling.step_time import breakdown

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


@dataclass(frozen=True)
class Prediction:
    """One step of one layout."""

    layout: Layout
    step_s: float
    interval_90: tuple[float, float]
    distance: float
    """Distance to the nearest measured run, in doublings of the GPUs."""
    parts_s: Mapping[str, float]
    """Parts that add up to `step_s`; of collectives, only the exposed time."""
    mfu: float
    """Model FLOPs (`step_flops`, with all scores) over the bf16 or fp8 peak."""
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

    @property
    def sums_s(self) -> dict[str, float]:
        """Seconds of the parts in groups, by name in `SUMS`."""
        return {name: sum(self.parts_s[part] for part in parts) for name, parts in SUMS.items()}

    @property
    def interval_mfu(self) -> tuple[float, float]:
        """Return the 90% interval of the MFU."""
        low_s, high_s = self.interval_90
        return self.mfu * self.step_s / high_s, self.mfu * self.step_s / low_s


@dataclass(frozen=True)
class Predictions:
    """Columns of n predictions, (n,) each.

    Attributes are the numbers of `Prediction`, and the row of the `nearest` measured run.
    """

    runs: Runs
    predicted_s: Numbers
    """Seconds by the formulas alone; `step_s` is no shorter than published matmuls allow."""
    columns: Mapping[str, NDArray[Any]]
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
        return self.some([row])[0]

    def some(self, rows: Sequence[int]) -> list[Prediction]:
        """Return the predictions of these rows; a search has thousands, and answers need a few."""
        if not rows:
            return []
        low, high = self.interval_90(rows)
        return [
            self._prediction(row, (float(low[at]), float(high[at]))) for at, row in enumerate(rows)
        ]

    def _prediction(self, row: int, interval_90: tuple[float, float]) -> Prediction:
        layout = self.runs.origin[row].layout
        by_stage = [
            {part: values[row, stage].item() / memory.GIB for part, values in self.stages.items()}
            for stage in range(layout.pp)
        ]
        numbers = {
            one.name: self.columns[one.name][row].item()
            for one in fields(Prediction)
            if one.name in self.columns
        }
        return Prediction(
            layout=layout,
            interval_90=interval_90,
            peak_90=(float(self.peak_low[row]), float(self.peak_high[row])),
            parts_s={name: float(values[row]) for name, values in self.parts_s.items()},
            memory_gib=by_stage,
            warnings=tuple(self.warnings(row)),
            **numbers,
        )

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
            yield f"extrapolated: {self.describe_nearest(row)}"
        if not self.may_fit[row]:
            yield "expected to run out of memory"
        elif not self.fits[row]:
            yield f"may run out of memory: the peak may be {self.peak_high[row]:.0f} GiB"
        elif self.is_unstable[row]:
            yield "unstable: memory is so full that steps often take 1.5 to 8 times as long"

    def describe_nearest(self, row: int) -> str:
        """Return the nearest measured run, and in what it differs."""
        measured = load_measured()
        near = int(self.nearest[row])
        columns = [
            name
            for name in (*DOUBLING, *DIFFERENCE)
            if getattr(self.runs, name)[row] != getattr(measured, name)[near]
        ]
        return (
            f"the nearest published run, {measured.key[near]}, is {self.distance[row]:.2g} away:"
            f" other {', '.join(columns)}"
        )

    def refusal_reason(self, row: int) -> str | None:
        """Return why a run is too far from measured runs, and what would help; None if near."""
        if self.distance[row] <= intervals.MAX_DISTANCE:
            return None
        return (
            "too far from every published run for a number: measure one run of this kind and"
            f" calibrate; {self.describe_nearest(row)}"
        )


def predict(run: Run, constants: Constants | None = None) -> Prediction:
    """Predict one step. ValueError for an impossible layout, or too far from measured runs."""
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
    stages = memory.stage_bytes(runs)
    peak_gib = memory.peak_gib(stages)
    is_unstable = peak_gib > UNSTABLE_SHARE * runs.memory_gib
    distance, nearest = find_nearest(runs, load_measured())
    predicted = np.sum(list(parts.values()), axis=0)
    # No step is faster than the highest published rate of matmuls; parts still add up to it.
    seconds = np.maximum(predicted, intervals.fastest_s(runs))
    parts["gemm_s"] = parts["gemm_s"] + seconds - predicted
    peak_low, peak_high = intervals.memory_ends(runs, peak_gib, intervals.load_widths())
    risk = _overflow_risk(peak_gib, peak_low, peak_high, FITS_SHARE * runs.memory_gib)
    columns = {
        "step_s": seconds,
        "distance": distance,
        "nearest": nearest,
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
    return Predictions(runs, predicted, columns, parts, stages)


def _overflow_risk(peak: Numbers, low: Numbers, high: Numbers, limit: Numbers) -> Numbers:
    """Return the probability that a peak with these ends of 90% is above the limit.

    ln(peak) is taken as normal on either side of its middle.
    """
    above = np.log(limit / peak) / np.maximum(np.log(high / peak), 1e-6)
    below = np.log(limit / peak) / np.maximum(np.log(peak / low), 1e-6)
    sigmas = SIGMAS * np.where(limit > peak, above, below)
    # A logistic curve in the place of the normal one, exact at 0 and at 1.645.
    return 1 / (1 + np.exp(1.79 * np.clip(sigmas, -20, 20)))
