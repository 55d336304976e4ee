"""How wrong a prediction may be: 90% intervals that widen with the distance from measured runs.

An interval is the predicted time times exp(-low) to exp(high). Each exponent is a sum: the width of
the run's source, and a width per unit of each of `SLOPES`. The source is a published table, another
source of a framework with published runs, or an unknown framework.

`benchmarks/fit_scaling.py` fits the widths to errors on runs that folds had left out of the
constants, and writes `intervals.csv` (split conformal prediction: Lei et al. 2018). It chooses each
width by the share that it holds of runs that neither the constants nor the width had seen.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from labkit.scaling import read_table
from labkit.scaling.models import Numbers, step_flops
from labkit.scaling.published import GENERIC, Ground, layout_kinds
from labkit.scaling.runs import Flags, Runs, Texts

OTHERS = "other sources"
"""Sources of known frameworks without widths of their own."""
UNKNOWN = "unknown framework"
PIPELINES = "unknown framework, pipelines over nodes"
WIDE_TENSORS = "unknown framework, tensor parallelism over nodes"
"""Frameworks differ most where they split a model over the network."""
SLOWER = "unstable"
"""Memory so full that steps become slow, which widens the upper end alone."""
SLOPES = (SLOWER, "scale", "outside", "hardware")
"""Roots of the distances in GPUs, in models, sequences and layouts, and in the kind of GPU."""
MEMORY = "memory, "
"""What the widths of memory begin with."""
MEASURED_MEMORY = ("nanotron", "simumax")
"""Tables with enough published peaks for a width of their own."""
MAX_DISTANCE = 10.0
"""Folds judge few predictions further away, so their error is unknown."""
Widths = Mapping[str, tuple[float, float]]
"""Source or slope -> its width at the low and at the high end, in log units."""


def measure_distances(runs: Runs, ground: Ground) -> dict[str, Numbers]:
    """Distances by what lies outside of measured runs, (n,), none negative.

    GPUs, tokens and context-parallel ranks: 1 and the doublings beyond the largest; of GPUs, the
    largest number on which the framework ran each of the layout's kinds. Parameters: 1 and the root
    of the doublings, half of them beyond four. 1 per new kind of layout; 1 for a new GPU, 2 if its
    architecture is new as well.
    """
    names, codes = runs.codes["framework"]
    limits = [ground.find_limits(str(name)) for name in names]
    everything = ground.limits[GENERIC]
    largest = {name: np.array([one[name] for one in limits])[codes] for name in everything}
    doublings = np.log2(
        np.maximum(runs.parameters / largest["parameters"], largest["smallest"] / runs.parameters)
    )
    kinds = layout_kinds(runs)
    new_kinds = [is_used & (largest[name] == 0) for name, is_used in kinds.items()]
    measured_gpus = largest["gpus"]
    for name, is_used in kinds.items():
        is_limit = is_used & (largest[name] > 0)
        measured_gpus = np.where(is_limit, np.minimum(measured_gpus, largest[name]), measured_gpus)
    return {
        "gpus": _beyond(np.log2(runs.gpus / measured_gpus)),
        "parameters": _beyond(np.maximum(np.sqrt(np.maximum(doublings, 0.0)), doublings / 2)),
        "tokens": _beyond(np.log2(runs.seq_len / everything["seq_len"])),
        "contexts": _beyond(np.log2(runs.cp / everything["cp"])),
        "kinds": np.sum(new_kinds, axis=0, dtype=np.float64),
        "card": (~np.isin(runs.card, ground.runs.card)).astype(np.float64),
        "architecture": (~np.isin(runs.architecture, ground.runs.architecture)).astype(np.float64),
    }


def _beyond(doublings: Numbers) -> Numbers:
    """Return 1 and the doublings above a limit, 0 below.

    A fit that has to extrapolate is worse at once.
    """
    return np.where(doublings > 1e-6, 1 + doublings, 0.0)


def measure_slopes(distances: Mapping[str, Numbers], is_unstable: Flags) -> dict[str, Numbers]:
    """Amounts by name in `SLOPES`, (n,); errors grow as the roots of distances."""
    outside = [distances[name] for name in ("parameters", "tokens", "contexts", "kinds")]
    return {
        SLOWER: is_unstable.astype(np.float64),
        "scale": np.sqrt(distances["gpus"]),
        "outside": np.sqrt(np.sum(outside, axis=0)),
        "hardware": np.sqrt(distances["card"] + distances["architecture"]),
    }


def find_sources(runs: Runs, ground: Ground) -> Texts:
    """Return the names of the widths that runs have, (n,).

    The table that a run is of, if it is measured; else whether its framework is.
    """
    is_known = np.isin(runs.framework, list(ground.frameworks))
    has_pipelines = (runs.pp > 1) & (runs.nodes > 1)
    has_wide_tensors = runs.tp > np.maximum(runs.link_gpus, runs.gpus_per_node)
    elsewhere = np.select(
        [is_known, has_wide_tensors, has_pipelines], [OTHERS, WIDE_TENSORS, PIPELINES], UNKNOWN
    )
    return np.where(np.isin(runs.table, ground.runs.table), runs.table, elsewhere)


def sum_widths(
    sources: Texts, slopes: Mapping[str, Numbers], widths: Widths
) -> tuple[Numbers, Numbers]:
    """Both ends' exponents, (n,). Tables without widths of their own have those of `OTHERS`."""
    names, codes = np.unique(sources, return_inverse=True)
    bases = np.array([widths.get(str(name), widths[OTHERS]) for name in names])[codes]
    low, high = (
        bases[:, end] + sum(slopes[name] * widths[name][end] for name in SLOPES) for end in (0, 1)
    )
    return low, high


def memory_ends(runs: Runs, peak_gib: Numbers, widths: Widths) -> tuple[Numbers, Numbers]:
    """Return both ends of the 90% interval of peak memory in GiB, (n,).

    Widths are of the table or the framework whose memory was published, or of all others.
    """
    low = np.empty(len(runs))
    high = np.empty(len(runs))
    names = np.where(np.isin(runs.table, MEASURED_MEMORY), runs.table, runs.framework)
    for name in np.unique(names):
        source = str(name) if name in MEASURED_MEMORY else OTHERS
        low[names == name], high[names == name] = widths[MEMORY + source]
    return peak_gib * np.exp(-low), peak_gib * np.exp(high)


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
    """
    fastest = fastest_s(runs)
    low = seconds * np.exp(-exponents[0])
    high = seconds * np.exp(exponents[1])
    return np.maximum(seconds, fastest), np.maximum(low, fastest), np.maximum(high, fastest)


def peak_s(runs: Runs) -> Numbers:
    """Seconds of the model's FLOPs at the peak of all GPUs."""
    fp8 = np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    return _seconds_at(runs, runs.peak_tflops * fp8)


def fastest_s(runs: Runs) -> Numbers:
    """Seconds of the model's FLOPs at the highest matmul rate that was published for the GPU."""
    is_fp8 = (runs.precision == "fp8") & (runs.fp8_matmul_tflops > 0)
    return _seconds_at(runs, np.where(is_fp8, runs.fp8_matmul_tflops, runs.matmul_tflops))


def _seconds_at(runs: Runs, tflops: Numbers) -> Numbers:
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    return np.asarray(flops / (runs.gpus * tflops * 1e12))


def extrapolations(
    runs: Runs, row: int, ground: Ground, distances: Mapping[str, Numbers]
) -> Iterator[str]:
    """Yield in words where a run lies outside of measured runs."""
    run = runs.origin[row]
    framework = str(runs.framework[row])
    if framework not in ground.frameworks:
        yield "framework without published runs: calibrate with three runs of it"
    if not any(away[row] for away in distances.values()):
        return
    everything = ground.limits[GENERIC]
    limits = ground.find_limits(framework)
    where = f" with {framework}" if framework in ground.frameworks else ""
    used = [name for name, is_used in layout_kinds(runs.take([row])).items() if is_used[0]]
    new_kinds = [name for name in used if not limits[name]]
    measured_gpus = min([limits["gpus"], *(limits[name] for name in used if limits[name])])
    size, smallest, largest = (
        count / 1e9 for count in (runs.parameters[row], limits["smallest"], limits["parameters"])
    )
    words = {
        "gpus": f"{run.layout.gpus} GPUs, such layouts fitted up to {measured_gpus:.0f}{where}",
        "parameters": (
            f"{size:.3g} B parameters, fitted from {smallest:.3g} to {largest:.3g} B{where}"
        ),
        "tokens": f"{run.seq_len} tokens per sequence, fitted up to {everything['seq_len']:.0f}",
        "contexts": f"{run.layout.cp} context-parallel ranks, fitted up to {everything['cp']:.0f}",
        "card": f"no published run on {runs.card[row]}",
        "architecture": f"no published run on {runs.architecture[row]} GPUs",
        "kinds": f"no published run{where} in {' and '.join(new_kinds)}",
    }
    yield from (f"extrapolated: {text}" for name, text in words.items() if distances[name][row])
