"""`predict`: what a training step takes, with intervals, a breakdown that adds up, and memory stage by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.scaling import intervals, memory
from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.hardware import Hardware
from labkit.scaling.layout import Layout, why_impossible
from labkit.scaling.model import Model, Numbers, step_flops
from labkit.scaling.runs import Flags, Run, Runs
from labkit.scaling.step_time import PARTS, breakdown, step_s

FITS_SHARE = 0.94
"""Share of a GPU's memory that PyTorch can reserve; the runtime and NCCL have the rest. Published: up to 77.4 of 80."""
UNSTABLE_SHARE = 0.88
"""From here on runs are often 1.5 to 8 times slow: the allocator frees and asks again inside the step."""
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
    """What adds up to `step_s`; names that begin with `hidden_` are communication behind compute, not in the sum."""
    mfu: Numbers
    peak_gib: Numbers
    out_of_memory: Numbers
    """Probability."""
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
    """What adds up to `step_s`; collectives are what of them is exposed."""
    hidden_s: Mapping[str, float]
    """Communication that compute hides; not in the sum."""
    mfu: float
    """Model FLOPs of 6 a parameter and token plus 12 L h S^2 a sequence (all scores), over the bf16 or fp8 peak."""
    tokens_per_s: float
    memory_gib: Sequence[Mapping[str, float]]
    """By pipeline stage and part; each stage's parts add up to what it reserves."""
    peak_gib: float
    out_of_memory: float
    """Probability that it runs out of memory."""
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.out_of_memory < 0.5

    @property
    def is_unstable(self) -> bool:
        return any("unstable" in warning for warning in self.warnings)


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
    if reason := why_impossible(layout, model, seq_len):
        raise ValueError(reason)
    run = Run(model, hardware, layout, seq_len, framework)
    several = predict_runs(Runs.of([run]), constants)
    exists = range(layout.pp)
    return Prediction(
        step_s=float(several.step_s[0]),
        interval_80=(float(several.low_80[0]), float(several.high_80[0])),
        interval_90=(float(several.low_90[0]), float(several.high_90[0])),
        parts_s={name: float(several.parts_s[name][0]) for name in PARTS},
        hidden_s={
            name.removeprefix("hidden_"): float(values[0])
            for name, values in several.parts_s.items()
            if name.startswith("hidden_")
        },
        mfu=float(several.mfu[0]),
        tokens_per_s=layout.global_batch * seq_len / float(several.step_s[0]),
        memory_gib=[
            {name: float(several.stages.parts[name][0, stage]) / memory.GIB for name in memory.PARTS}
            for stage in exists
        ],
        peak_gib=float(several.peak_gib[0]),
        out_of_memory=float(several.out_of_memory[0]),
        warnings=tuple(warnings_of(Runs.of([run]), several, constants or load_constants())[0]),
    )


def predict_runs(runs: Runs, constants: Constants | None = None) -> Predictions:
    """All runs at once. Layouts are taken as possible: `why_impossible` says so beforehand."""
    constants = constants or load_constants()
    rows = constants.rows(runs)
    parts = breakdown(runs, rows)
    seconds = step_s(parts)
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    peak = runs.gpus * runs.peak_tflops * 1e12 * np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    stages = memory.stages(runs, rows)
    margin = np.log(stages.peak_gib / (FITS_SHARE * runs.memory_gib)) / OUT_OF_MEMORY_SPREAD
    low_90, low_80, high_80, high_90 = intervals.factors(runs, constants, unstable=_is_unstable(runs, stages))
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
        stages=stages,
    )


def warnings_of(runs: Runs, predictions: Predictions, constants: Constants) -> list[list[str]]:
    """Of each run, what a reader should know: where the prediction extrapolates, and where memory makes it unstable."""
    found: list[list[str]] = [[] for _ in range(len(runs))]
    unstable = _is_unstable(runs, predictions.stages)
    limits = constants.seen
    for row, said in enumerate(found):
        if runs.framework[row] not in constants.seen["frameworks"]:
            said.append("framework never seen: calibrate with three runs of it")
        if runs.architecture[row] not in limits["architectures"]:
            said.append(f"no published row of {runs.architecture[row]} GPUs")
        if runs.gpus[row] > limits["gpus"]:
            said.append(f"more GPUs than any published row ({limits['gpus']:.0f})")
        if runs.seq_len[row] > limits["seq_len"]:
            said.append(f"longer sequences than any published row ({limits['seq_len']:.0f})")
        if runs.cp[row] > limits["cp"]:
            said.append(f"more context-parallel ranks than any published row ({limits['cp']:.0f})")
        if runs.shard[row] not in limits["shards"]:
            said.append(f"no published row of {runs.shard[row]}")
        if predictions.out_of_memory[row] >= 0.5:
            said.append("expected to run out of memory")
        elif unstable[row]:
            said.append("unstable: so near the memory's limit that steps are often 1.5 to 8 times slow")
    return found


def is_unstable(runs: Runs, predictions: Predictions) -> Flags:
    return _is_unstable(runs, predictions.stages)


def _is_unstable(runs: Runs, stages: memory.Stages) -> Flags:
    return stages.peak_gib > UNSTABLE_SHARE * runs.memory_gib
