"""`predict`: step time with intervals, a breakdown that adds up, and memory by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.scaling import intervals, memory
from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.hardware import Hardware
from labkit.scaling.layout import Layout, impossible_reason
from labkit.scaling.model import Model, Numbers, step_flops
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.step_time import PARTS, breakdown, step_s

FITS_SHARE = 0.94
"""Share of a GPU's memory that PyTorch can reserve; the runtime and NCCL have the rest. Published: up to 77.4 of 80."""
UNSTABLE_SHARE = 0.88
"""From here up runs are often 1.5 to 8 times slow: the allocator frees and allocates again inside the step."""
OUT_OF_MEMORY_SPREAD = 0.07
"""Standard deviation of ln(measured / predicted) of reserved memory."""


@dataclass(frozen=True)
class Predictions:
    """Columns of n predictions; times in seconds, memory in GiB of the fullest stage."""

    step_s: Numbers
    low_90: Numbers
    low_80: Numbers
    high_80: Numbers
    high_90: Numbers
    parts_s: Mapping[str, Numbers]
    """Parts that add up to `step_s`; names that begin with `hidden_` are hidden communication, not in the sum."""
    mfu: Numbers
    peak_gib: Numbers
    out_of_memory: Numbers
    """Probability."""
    is_unstable: Flags
    """So near the memory's limit that steps become slow."""
    stages: memory.Stages

    @property
    def fits(self) -> Flags:
        return self.out_of_memory < 0.5


@dataclass(frozen=True)
class Prediction:
    """One step of one training."""

    step_s: float
    interval_80: tuple[float, float]
    interval_90: tuple[float, float]
    parts_s: Mapping[str, float]
    """Parts that add up to `step_s`; of collectives, only the exposed time."""
    hidden_s: Mapping[str, float]
    """Communication that compute hides; not in the sum."""
    mfu: float
    """Model FLOPs of 6 per parameter and token plus 12 L q S^2 per sequence (all scores), over the bf16 or fp8 peak."""
    tokens_per_s: float
    memory_gib: Sequence[Mapping[str, float]]
    """By pipeline stage and part; each stage's parts add up to its reserved memory."""
    peak_gib: float
    out_of_memory: float
    """Probability that it runs out of memory."""
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.out_of_memory < 0.5


def predict(
    model: Model,
    hardware: Hardware,
    layout: Layout,
    *,
    seq_len: int,
    framework: str = "generic",
    constants: Constants | None = None,
) -> Prediction:
    """One training step. ValueError where the layout cannot run the model, with the first reason."""
    if reason := impossible_reason(layout, model, seq_len):
        raise ValueError(reason)
    runs = Runs.from_runs([Run(model, hardware, layout, seq_len, framework)])
    found = predict_runs(runs, constants)
    hidden = {name.removeprefix("hidden_"): values for name, values in found.parts_s.items() if name not in PARTS}
    parts = found.stages.parts
    return Prediction(
        step_s=float(found.step_s[0]),
        interval_80=(float(found.low_80[0]), float(found.high_80[0])),
        interval_90=(float(found.low_90[0]), float(found.high_90[0])),
        parts_s={name: float(found.parts_s[name][0]) for name in PARTS},
        hidden_s={name: float(values[0]) for name, values in hidden.items()},
        mfu=float(found.mfu[0]),
        tokens_per_s=layout.global_batch * seq_len / float(found.step_s[0]),
        memory_gib=[
            {name: float(parts[name][0, stage]) / memory.GIB for name in memory.PARTS} for stage in range(layout.pp)
        ],
        peak_gib=float(found.peak_gib[0]),
        out_of_memory=float(found.out_of_memory[0]),
        warnings=tuple(list_warnings(runs, found, constants or load_constants())[0]),
    )


def predict_runs(runs: Runs, constants: Constants | None = None) -> Predictions:
    """All runs at once. Layouts must be possible (`impossible_reason`)."""
    constants = constants or load_constants()
    rows = constants.rows(runs)
    parts = breakdown(runs, rows)
    seconds = step_s(parts)
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    peak = runs.gpus * runs.peak_tflops * 1e12 * np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    stages = memory.stages(runs, rows)
    margin = np.log(stages.peak_gib / (FITS_SHARE * runs.memory_gib)) / OUT_OF_MEMORY_SPREAD
    is_unstable = stages.peak_gib > UNSTABLE_SHARE * runs.memory_gib
    low_90, low_80, high_80, high_90 = intervals.factors(runs, constants, unstable=is_unstable)
    return Predictions(
        step_s=seconds,
        low_90=seconds * low_90,
        low_80=seconds * low_80,
        high_80=seconds * high_80,
        high_90=seconds * high_90,
        parts_s=parts,
        mfu=flops / (seconds * peak),
        peak_gib=stages.peak_gib,
        out_of_memory=1 / (1 + np.exp(-1.702 * np.clip(margin, -20, 20))),  # the normal distribution, to 0.01
        is_unstable=is_unstable,
        stages=stages,
    )


def list_warnings(runs: Runs, predictions: Predictions, constants: Constants) -> list[list[str]]:
    """Warnings of each run: where the prediction extrapolates, and where memory makes it unstable."""
    found: list[list[str]] = [[] for _ in range(len(runs))]
    for row, warnings in enumerate(found):
        if runs.framework[row] not in intervals.names("framework") | constants.calibrated:
            warnings.append("framework without published rows: calibrate with three runs of it")
        for column, what in (("architecture", "GPUs"), ("shard", "sharding")):
            name = str(getattr(runs, column)[row])
            if name not in intervals.names(column):
                warnings.append(f"extrapolated: no published row of {name} {what}")
        for column, what in (("gpus", "GPUs"), ("seq_len", "tokens per sequence"), ("cp", "context-parallel ranks")):
            value, most = float(getattr(runs, column)[row]), intervals.largest(column)
            if value > most:
                warnings.append(f"extrapolated: {value:.0f} {what}, published up to {most:.0f}")
        if predictions.out_of_memory[row] >= 0.5:
            warnings.append("expected to run out of memory")
        elif predictions.is_unstable[row]:
            warnings.append("unstable: so near the memory's limit that steps are often 1.5 to 8 times slow")
    return found
