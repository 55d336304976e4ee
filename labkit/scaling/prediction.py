"""Predictions of a run, of many, and of a table: step time with a 90% interval, a breakdown, memory by stage."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

import numpy as np

from labkit.scaling import memory
from labkit.scaling.constants import Constants, Rows, load_constants
from labkit.scaling.intervals import (
    FEATURES,
    MAX_DISTANCE,
    Ground,
    distance,
    extrapolations,
    features,
    load_ground,
    load_widths,
)
from labkit.scaling.layout import Layout, impossible_reason
from labkit.scaling.model import Numbers, step_flops
from labkit.scaling.published import nearest_keys
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.step_time import PARTS, breakdown, slow_engine_s, step_s
from labkit.scaling.table import Row

FITS_SHARE = 0.94
"""Share of a GPU's memory that PyTorch can reserve; the runtime and NCCL have the rest. Published: up to 77.4 of 80."""
UNSTABLE_SHARE = 0.88
"""From here up runs are often 1.5 to 8 times slow: the allocator frees and allocates again inside the step."""
OUT_OF_MEMORY_SPREAD = 0.07
"""Standard deviation of ln(measured / predicted) of reserved memory."""
FITS_RISK = 0.5
"""Probability of running out of memory below which a run is expected to fit."""
HALF_SHARE = 0.78
"""Of an end's width, if one of two engines ran: each end leaves out 10% of its half, so 1.28 / 1.64 of the width."""

COLUMNS = ("step_s", "step_low", "step_high", "mfu_percent", "peak_gib", "fits", "unstable", "nearest", "note")
MEASURED = {"step_s": "measured_step_s", "mfu_percent": "measured_mfu_percent", "note": "published_note"}
"""Columns of the input that have a prediction's name, and their names in the output."""


@dataclass(frozen=True)
class Prediction:
    """One step of one layout."""

    layout: Layout
    step_s: float
    interval_90: tuple[float, float]
    distance: float
    """From measured ground, in doublings and kinds without a measured run."""
    parts_s: Mapping[str, float]
    """Parts that add up to `step_s`; of collectives, only the exposed time."""
    mfu: float
    """Model FLOPs of 6 per parameter and token plus 12 L q S^2 per sequence (all scores), over the bf16 or fp8 peak."""
    memory_gib: Sequence[Mapping[str, float]]
    """By pipeline stage and part; each stage's parts add up to its reserved memory."""
    peak_gib: float
    out_of_memory: float
    """Probability that it runs out of memory."""
    is_unstable: bool
    """So near the memory's limit that steps become slow."""
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.out_of_memory < FITS_RISK


@dataclass(frozen=True)
class Predictions:
    """Columns of n predictions; times in seconds, memory in GiB of the fullest stage."""

    runs: Runs
    ground: Ground
    step_s: Numbers
    low_90: Numbers
    high_90: Numbers
    distance: Numbers
    """From measured ground; beyond `MAX_DISTANCE` the numbers have no known error."""
    parts_s: Mapping[str, Numbers]
    """Parts that add up to `step_s`; names that begin with `hidden_` are hidden communication, not in the sum."""
    mfu: Numbers
    peak_gib: Numbers
    out_of_memory: Numbers
    is_unstable: Flags
    stages: memory.Stages

    @property
    def fits(self) -> Flags:
        return self.out_of_memory < FITS_RISK

    def prediction(self, row: int) -> Prediction:
        """One of them, whether it is too far from measured ground or not."""
        layout = self.runs.origin[row].layout
        stages = [
            {name: float(values[row, stage]) / memory.GIB for name, values in self.stages.parts.items()}
            for stage in range(layout.pp)
        ]
        return Prediction(
            layout=layout,
            step_s=float(self.step_s[row]),
            interval_90=(float(self.low_90[row]), float(self.high_90[row])),
            distance=float(self.distance[row]),
            parts_s={name: float(self.parts_s[name][row]) for name in PARTS},
            mfu=float(self.mfu[row]),
            memory_gib=stages,
            peak_gib=float(self.peak_gib[row]),
            out_of_memory=float(self.out_of_memory[row]),
            is_unstable=bool(self.is_unstable[row]),
            warnings=tuple(self.warnings(row)),
        )

    def warnings(self, row: int) -> Iterator[str]:
        """Where the prediction of a run extrapolates, and where memory makes it unstable."""
        yield from extrapolations(self.runs, row, self.ground)
        if self.out_of_memory[row] >= FITS_RISK:
            yield "expected to run out of memory"
        elif self.is_unstable[row]:
            yield "unstable: so near the memory's limit that steps are often 1.5 to 8 times slow"

    def refusal_reason(self, row: int) -> str | None:
        """Why a run is too far from measured ground for a number, with the measurement that would help; None if not."""
        if self.distance[row] <= MAX_DISTANCE:
            return None
        reasons = "; ".join(extrapolations(self.runs, row, self.ground))
        return f"too far from every published run for a number ({reasons}): measure one run of this kind and calibrate"


def predict(run: Run, constants: Constants | None = None) -> Prediction:
    """One training step. ValueError if the layout cannot run the model, or for a run too far from measured ground."""
    if reason := impossible_reason(run.layout, run.model, run.seq_len):
        raise ValueError(reason)
    predictions = predict_runs(Runs([run]), constants)
    if reason := predictions.refusal_reason(0):
        raise ValueError(reason)
    return predictions.prediction(0)


def predict_runs(runs: Runs, constants: Constants | None = None) -> Predictions:
    """All runs at once. Layouts must be possible (`impossible_reason`)."""
    constants = constants or load_constants()
    ground = load_ground()
    calibrated = {name: ground.limits(constants.parents[name]) for name in constants.calibrated}
    ground = replace(ground, by_framework={**ground.by_framework, **calibrated})
    rows = constants.rows(runs)
    parts, stages = breakdown(runs, rows), memory.stages(runs, rows)
    is_unstable = stages.peak_gib > UNSTABLE_SHARE * runs.memory_gib
    columns = features(runs, ground, is_unstable)
    predicted = step_s(parts)
    seconds, low, high = find_ends(runs, rows, predicted, columns, load_widths())
    parts["gemm_s"] = parts["gemm_s"] + seconds - predicted
    margin = np.log(stages.peak_gib / (FITS_SHARE * runs.memory_gib)) / OUT_OF_MEMORY_SPREAD
    return Predictions(
        runs=runs,
        ground=ground,
        step_s=seconds,
        low_90=low,
        high_90=high,
        distance=distance(columns),
        parts_s=parts,
        mfu=_peak_s(runs) / seconds,
        peak_gib=stages.peak_gib,
        out_of_memory=1 / (1 + np.exp(-1.702 * np.clip(margin, -20, 20))),  # the normal distribution, to 0.01
        is_unstable=is_unstable,
        stages=stages,
    )


def find_ends(
    runs: Runs, constants: Rows, seconds: Numbers, columns: Numbers, widths: Mapping[str, Numbers]
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds and both ends of the 90% interval, none faster than the best published matmuls of the GPU.

    `columns` are `intervals.features`, and `widths` their coefficients. If a framework's engine may be a slow one, the
    upper end is that one's.
    """
    fastest = _peak_s(runs) / constants["matmul_ceiling"]
    is_open = has_open_engine(runs, constants)
    is_measured = columns[:, FEATURES.index("framework")] == 0
    share = np.where(is_open & is_measured, HALF_SHARE, 1.0)
    low = seconds * np.exp(-share * (columns @ widths["low"]))
    high = seconds * np.exp(share * (columns @ widths["high"]))
    high = high + np.where(is_open, slow_engine_s(runs, constants), 0.0)
    return np.maximum(seconds, fastest), np.maximum(low, fastest), np.maximum(high, fastest)


def has_open_engine(runs: Runs, constants: Rows) -> Flags:
    """Whether a run does not say which of a framework's two pipeline engines it used."""
    is_stated = runs.has("old_pipeline") | runs.has("new_pipeline")
    return np.asarray((constants["engine_unknown"] > 0) & (runs.pp > 1) & (runs.nodes > 1) & ~is_stated)


def _peak_s(runs: Runs) -> Numbers:
    """Seconds of the model's FLOPs at the peak of all GPUs."""
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    fp8 = np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    return np.asarray(flops / (runs.gpus * runs.peak_tflops * 1e12 * fp8))


def predict_rows(rows: Sequence[Row], constants: Constants | None = None) -> list[dict[str, str]]:
    """The cells of every row with `COLUMNS`; for a refused row these are empty except for the note."""
    possible = {row.line: row.run for row in rows if row.run is not None}
    predicted: dict[int, dict[str, str]] = {}
    if possible:
        predictions = predict_runs(Runs(list(possible.values())), constants)
        predicted = dict(zip(possible, _cells(predictions), strict=True))
    return [_merge(row, predicted.get(row.line, {"note": f"refused: {row.refusal}"})) for row in rows]


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
            "fits": str(int(predictions.fits[at])),
            "unstable": str(int(predictions.is_unstable[at])),
            "nearest": f"{key}, {away:.2g} away",
            "note": "; ".join(predictions.warnings(at)),
        }


def _merge(row: Row, predicted: Mapping[str, str]) -> dict[str, str]:
    """A row's cells, its prediction, and what was assumed about empty cells."""
    cells = {MEASURED.get(name, name): value for name, value in row.cells.items()}
    notes = [note for note in (predicted["note"], *(f"assumed: {name}" for name in row.assumptions)) if note]
    cells = {name: value for name, value in cells.items() if name not in COLUMNS}
    return cells | dict.fromkeys(COLUMNS, "") | dict(predicted) | {"note": "; ".join(notes)}


def write_rows(rows: Sequence[Mapping[str, str]], out: TextIO) -> None:
    """A CSV with every column that any row has; characters that `out` cannot encode are replaced."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    encoding = getattr(out, "encoding", None) or "utf-8"
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    for row in [dict(zip(names, names, strict=True)), *rows]:
        writer.writerow({name: text.encode(encoding, "replace").decode(encoding) for name, text in row.items()})
