"""`predict`: step time with intervals, a breakdown that adds up, and memory by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.scaling import memory
from labkit.scaling.constants import Constants, Rows, load_constants
from labkit.scaling.ground import MAX_DISTANCE, Ground, distance, extrapolations, features, load_ground
from labkit.scaling.hardware import Hardware
from labkit.scaling.intervals import factors, load_widths
from labkit.scaling.layout import Layout, impossible_reason
from labkit.scaling.model import Model, Numbers, step_flops
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.step_time import PARTS, breakdown, slow_engine_s, step_s

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
    high_90: Numbers
    distance: Numbers
    """From measured ground; beyond `MAX_DISTANCE` the numbers have no known error."""
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
    interval_90: tuple[float, float]
    distance: float
    """From measured ground, in doublings and kinds without a measured run."""
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
    """One training step. ValueError if the layout cannot run the model, or for a run too far from measured ground."""
    if reason := impossible_reason(layout, model, seq_len):
        raise ValueError(reason)
    runs = Runs.from_runs([Run(model, hardware, layout, seq_len, framework)])
    found = predict_runs(runs, constants)
    if reason := refusal_reason(runs, 0, found, constants or load_constants()):
        raise ValueError(reason)
    hidden = {name.removeprefix("hidden_"): values for name, values in found.parts_s.items() if name not in PARTS}
    parts = found.stages.parts
    return Prediction(
        step_s=float(found.step_s[0]),
        interval_90=(float(found.low_90[0]), float(found.high_90[0])),
        distance=float(found.distance[0]),
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
    """All runs at once. Layouts must be possible (`impossible_reason`), and not too far away (`refusal_reason`)."""
    constants = constants or load_constants()
    rows = constants.rows(runs)
    parts = breakdown(runs, rows)
    stages = memory.stages(runs, rows)
    is_unstable = stages.peak_gib > UNSTABLE_SHARE * runs.memory_gib
    columns = features(runs, _ground(constants), is_unstable)
    predicted = step_s(parts)
    low, high = (factor * predicted for factor in factors(columns, load_widths()))
    seconds, low, high = apply_bounds(runs, rows, predicted, low, high)
    parts["gemm_s"] = parts["gemm_s"] + seconds - predicted
    margin = np.log(stages.peak_gib / (FITS_SHARE * runs.memory_gib)) / OUT_OF_MEMORY_SPREAD
    return Predictions(
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


def apply_bounds(
    runs: Runs, constants: Rows, seconds: Numbers, low: Numbers, high: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds and both ends, none faster than the best published matmuls of the GPU.

    A framework with a slow engine ends at that one, unless the run says which engine it has.
    """
    fastest = _peak_s(runs) / constants["matmul_ceiling"]
    is_open = (
        (constants["engine_unknown"] > 0) & (runs.nodes > 1) & ~runs.has("old_pipeline") & ~runs.has("new_pipeline")
    )
    slowest = np.where(is_open, high + slow_engine_s(runs, constants), high)
    return np.maximum(seconds, fastest), np.maximum(low, fastest), np.maximum(slowest, fastest)


def _peak_s(runs: Runs) -> Numbers:
    """Seconds of the model's FLOPs at the peak of all GPUs."""
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    fp8 = np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    return np.asarray(flops / (runs.gpus * runs.peak_tflops * 1e12 * fp8))


def _ground(constants: Constants) -> Ground:
    """Measured ground, on which a user's calibrated profiles stand, too."""
    ground = load_ground()
    return replace(ground, aliases={name: constants.parents[name] for name in constants.calibrated})


def refusal_reason(runs: Runs, row: int, predictions: Predictions, constants: Constants) -> str | None:
    """Why a run is too far from measured ground for a number, with the measurement that would help; None if not."""
    if predictions.distance[row] <= MAX_DISTANCE:
        return None
    reasons = "; ".join(extrapolations(runs, row, _ground(constants)))
    return f"too far from every published run for a number ({reasons}): measure one run of this kind and calibrate"


def list_warnings(runs: Runs, predictions: Predictions, constants: Constants) -> list[list[str]]:
    """Warnings of each run: where the prediction extrapolates, and where memory makes it unstable."""
    found: list[list[str]] = []
    for row in range(len(runs)):
        warnings = list(extrapolations(runs, row, _ground(constants)))
        if predictions.out_of_memory[row] >= 0.5:
            warnings.append("expected to run out of memory")
        elif predictions.is_unstable[row]:
            warnings.append("unstable: so near the memory's limit that steps are often 1.5 to 8 times slow")
        found.append(warnings)
    return found
