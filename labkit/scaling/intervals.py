"""How wrong a prediction may be: 90% intervals that widen with the distance from measured runs.

An interval is the predicted time times exp(-low) to exp(high). Each exponent is a sum: the width of
the published table that a run belongs to, or that of all other tables, and a width per unit of each
of `SLOPES`.

`benchmarks/fit_scaling.py` fits the widths to errors on runs that folds had left out of the
constants, and writes `intervals.csv` (split conformal prediction: Lei et al. 2018). It chooses each
width by the share that it holds of runs that neither the constants nor the width had seen.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from labkit.scaling import read_table
from labkit.scaling.communication import old_pipeline_s
from labkit.scaling.models import Numbers, step_flops
from labkit.scaling.published import GENERIC, Ground, layout_kinds
from labkit.scaling.runs import Flags, Runs, Texts

OTHERS = "other tables"
"""Published tables without widths of their own."""
SLOWER = "unstable"
"""Memory so full that steps become slow, which widens the upper end alone."""
SLOPES = (SLOWER, "scale", "outside", "framework")
"""Roots of the distances in GPUs, and in all else; and a framework without published runs."""
MAX_DISTANCE = 10.0
"""Folds judge few predictions further away, so their error is unknown."""
Widths = Mapping[str, tuple[float, float]]
"""Published table or slope -> its width at the low and at the high end, in log units."""


def measure_distances(runs: Runs, ground: Ground) -> dict[str, Numbers]:
    """Distances by what lies outside of measured runs, (n,), none negative.

    GPUs, tokens and context-parallel ranks: 1 and the doublings beyond the largest. Parameters: 1
    and the root of the doublings, half of them beyond four. 1 per new kind of layout; 1 for a new
    GPU, 2 if its architecture is new as well; 1 for a framework without published runs.
    """
    names, codes = runs.codes["framework"]
    limits, everything = [ground.find_limits(str(name)) for name in names], ground.limits[GENERIC]
    largest = {name: np.array([one[name] for one in limits])[codes] for name in everything}
    doublings = np.log2(
        np.maximum(runs.parameters / largest["parameters"], largest["smallest"] / runs.parameters)
    )
    new_kinds = [is_used & (largest[name] == 0) for name, is_used in layout_kinds(runs).items()]
    return {
        "gpus": _beyond(np.log2(runs.gpus / largest["gpus"])),
        "parameters": _beyond(np.maximum(np.sqrt(np.maximum(doublings, 0.0)), doublings / 2)),
        "tokens": _beyond(np.log2(runs.seq_len / everything["seq_len"])),
        "contexts": _beyond(np.log2(runs.cp / everything["cp"])),
        "kinds": np.sum(new_kinds, axis=0, dtype=np.float64),
        "card": (~np.isin(runs.card, ground.runs.card)).astype(np.float64),
        "architecture": (~np.isin(runs.architecture, ground.runs.architecture)).astype(np.float64),
        "framework": (
            (ground.is_elsewhere(runs) & ~np.isin(runs.framework, list(ground.frameworks))).astype(
                np.float64
            )
        ),
    }


def _beyond(doublings: Numbers) -> Numbers:
    """Return 1 and the doublings above a limit, 0 below.

    A fit that has to extrapolate is worse at once.
    """
    return np.where(doublings > 1e-6, 1 + doublings, 0.0)


def measure_slopes(distances: Mapping[str, Numbers], is_unstable: Flags) -> dict[str, Numbers]:
    """Amounts by name in `SLOPES`, (n,); errors grow as the roots of distances."""
    outside = [away for name, away in distances.items() if name not in ("gpus", "framework")]
    return {
        SLOWER: is_unstable.astype(np.float64),
        "scale": np.sqrt(distances["gpus"]),
        "outside": np.sqrt(np.sum(outside, axis=0)),
        "framework": distances["framework"],
    }


def sum_widths(
    tables: Texts, slopes: Mapping[str, Numbers], widths: Widths
) -> tuple[Numbers, Numbers]:
    """Both ends' exponents, (n,)."""
    names, codes = np.unique(tables, return_inverse=True)
    homes = np.array([widths.get(str(name), widths[OTHERS]) for name in names])[codes]
    low, high = (
        homes[:, end] + sum(slopes[name] * widths[name][end] for name in SLOPES) for end in (0, 1)
    )
    return low, high


@cache
def load_widths() -> Widths:
    """The widths in use."""
    return {
        row["width"]: (float(row["low"]), float(row["high"])) for row in read_table("intervals")
    }


def find_ends(
    runs: Runs, seconds: Numbers, exponents: tuple[Numbers, Numbers]
) -> tuple[Numbers, Numbers, Numbers]:
    """Return seconds and both ends of the 90% interval.

    None is shorter than the GPU's best published matmuls would take.

    If a run may have used its framework's slow pipeline engine, the upper end has that engine's
    extra time.
    """
    fastest = peak_s(runs) / runs["matmul_ceiling"]
    slower = np.where(has_open_engine(runs), old_pipeline_s(runs), 0.0)
    low = seconds * np.exp(-exponents[0])
    high = seconds * np.exp(exponents[1]) + slower
    return np.maximum(seconds, fastest), np.maximum(low, fastest), np.maximum(high, fastest)


def has_open_engine(runs: Runs) -> Flags:
    """Return whether a run does not say which of a framework's two pipeline engines it used."""
    is_stated = runs.has("old_pipeline") | runs.has("new_pipeline")
    return np.asarray((runs["engine_unknown"] > 0) & (runs.pp > 1) & (runs.nodes > 1) & ~is_stated)


def peak_s(runs: Runs) -> Numbers:
    """Seconds of the model's FLOPs at the peak of all GPUs."""
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    fp8 = np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    return np.asarray(flops / (runs.gpus * runs.peak_tflops * 1e12 * fp8))


def extrapolations(
    runs: Runs, row: int, ground: Ground, distances: Mapping[str, Numbers]
) -> Iterator[str]:
    """Yield in words where a run lies outside of measured runs."""
    if distances["framework"][row]:
        yield "framework without published runs: calibrate with three runs of it"
    run = runs.origin[row]
    framework = str(runs.framework[row])
    everything = ground.limits[GENERIC]
    limits = ground.find_limits(framework)
    where = f" with {framework}" if framework in ground.frameworks else ""
    kinds = [
        name
        for name, is_used in layout_kinds(runs.take([row])).items()
        if is_used[0] and not limits[name]
    ]
    size, smallest, largest = (
        count / 1e9 for count in (runs.parameters[row], limits["smallest"], limits["parameters"])
    )
    words = {
        "gpus": f"{run.layout.gpus} GPUs, fitted up to {limits['gpus']:.0f}{where}",
        "parameters": (
            f"{size:.3g} B parameters, fitted from {smallest:.3g} to {largest:.3g} B{where}"
        ),
        "tokens": f"{run.seq_len} tokens per sequence, fitted up to {everything['seq_len']:.0f}",
        "contexts": f"{run.layout.cp} context-parallel ranks, fitted up to {everything['cp']:.0f}",
        "card": f"no published run on {runs.card[row]}",
        "architecture": f"no published run on {runs.architecture[row]} GPUs",
        "kinds": f"no published run{where} in {' and '.join(kinds)}",
    }
    yield from (f"extrapolated: {text}" for name, text in words.items() if distances[name][row])
