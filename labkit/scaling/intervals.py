"""How wrong a prediction may be: 90% intervals of time and memory.

An interval of time is the predicted time times exp(-low) to exp(high). Each exponent has a width
that the run's source sets, and grows with the root of the distance to the nearest measured run. An
unnamed framework may be any of the published ones, so its interval also reaches from the fastest to
the slowest of their profiles.

`benchmarks/fit_scaling.py` takes the widths from errors on runs that folds had left out of the
constants, and writes `intervals.csv` (split conformal prediction: Lei et al. 2018).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from labkit.scaling import read_table
from labkit.scaling.constants import CALIBRATED, GENERIC
from labkit.scaling.models import Numbers, step_flops
from labkit.scaling.runs import Runs, Texts
from labkit.scaling.step_time import predict_step_s

# Sources of known frameworks without widths of their own.
OTHERS = "other sources"
UNKNOWN = "unknown framework"
# Log units per root of a unit of distance. Errors hardly grow with the distance, but without a
# slope models of twice the size are covered in 73%.
SLOPE = 0.08
# Beginning of the names of memory's widths in intervals.csv; the others are of time.
MEMORY = "memory, "
# Tables with enough published peaks for a width of their own.
MEASURED_MEMORY = ("nanotron", "simumax")
# Cross-validation has only 1% of its runs further away than this: their error is unknown.
MAX_DISTANCE = 10.0
# Source -> its width at the low and at the high end, in log units.
Widths = Mapping[str, tuple[float, float]]
# The low and the high end of each run's interval, (n,) each.
Ends = tuple[Numbers, Numbers]


def find_sources(runs: Runs, measured: Runs) -> Texts:
    """Return the source that sets the width of each run's interval, a key of `Widths`, (n,)."""
    # A published run has its table's interval; others one by whether their framework is known.
    frameworks = {*measured.framework.tolist()} - {GENERIC}
    elsewhere = np.select(
        [runs.framework == CALIBRATED, np.isin(runs.framework, list(frameworks))],
        [CALIBRATED, OTHERS],
        UNKNOWN,
    )
    return np.where(np.isin(runs.table, measured.table), runs.table, elsewhere)


def profile_range(runs: Runs, seconds: Numbers, sources: Texts) -> Ends:
    """Return log distances to the fastest and slowest published framework; 0 if one is named."""
    low = np.zeros(len(runs))
    high = np.zeros(len(runs))
    rows = (sources == UNKNOWN) & (runs.framework == GENERIC)
    if not rows.any():
        return low, high
    # By layout, not one width for all: nanotron's engine, for one, stalls in pipelines with tensor
    # parallelism over nodes, where others do not.
    profiles = sorted(runs.constants.table["slowdown"].keys() - {"default"})
    unnamed = runs.take(rows).origin
    every = [replace(run, framework=name) for name in profiles for run in unnamed]
    by_profile = predict_step_s(Runs(every, runs.constants))
    ratios = np.log(by_profile.reshape(len(profiles), -1) / seconds[rows])
    low[rows] = np.maximum(-ratios.min(axis=0), 0.0)
    high[rows] = np.maximum(ratios.max(axis=0), 0.0)
    return low, high


def time_ends(
    runs: Runs, seconds: Numbers, sources: Texts, distance: Numbers, ranges: Ends, widths: Widths
) -> Ends:
    """Return both ends of the 90% interval, no shorter than `fastest_s`.

    Tables without widths of their own have those of `OTHERS`.
    """
    names, codes = np.unique(sources, return_inverse=True)
    bases = np.array([widths.get(str(name), widths[OTHERS]) for name in names])[codes]
    # The root: errors grow less than in proportion.
    away = SLOPE * np.sqrt(distance)
    low = seconds * np.exp(-bases[:, 0] - away - ranges[0])
    high = seconds * np.exp(bases[:, 1] + away + ranges[1])
    # A time below what published matmuls allow would claim more than anybody has measured.
    fastest = fastest_s(runs)
    return np.maximum(low, fastest), np.maximum(high, fastest)


def memory_ends(runs: Runs, peak_gib: Numbers) -> Ends:
    """Return both ends of the 90% interval of peak memory in GiB."""
    widths = load_widths()
    # Widths are of the table or the framework whose memory was published, or of all others.
    names = np.where(np.isin(runs.table, MEASURED_MEMORY), runs.table, runs.framework)
    sources = np.where(np.isin(names, MEASURED_MEMORY), names, OTHERS)
    exponents = np.array([widths[MEMORY + source] for source in sources.tolist()])
    return peak_gib * np.exp(-exponents[:, 0]), peak_gib * np.exp(exponents[:, 1])


@cache
def load_widths() -> Widths:
    """Return the widths in use."""
    return {
        row["width"]: (float(row["low"]), float(row["high"])) for row in read_table("intervals")
    }


def fastest_s(runs: Runs) -> Numbers:
    """Return seconds of the model's FLOPs at the GPU's highest published matmul rate."""
    is_fp8 = (runs.precision == "fp8") & (runs.fp8_matmul_tflops > 0)
    return _seconds_at(runs, np.where(is_fp8, runs.fp8_matmul_tflops, runs.matmul_tflops))


def peak_s(runs: Runs) -> Numbers:
    """Return seconds of the model's FLOPs at the peak of all GPUs."""
    fp8 = np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    return _seconds_at(runs, runs.peak_tflops * fp8)


def _seconds_at(runs: Runs, tflops: Numbers) -> Numbers:
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    return np.asarray(flops / (runs.gpus * tflops * 1e12))
