"""How wrong a prediction may be: 90% intervals that widen with the distance from measured runs.

An interval is the predicted time times exp(-low) to exp(high). Each exponent is a sum of widths: one for where the run
comes from (`find_origins`), and one per unit of every distance from measured runs (`measure_distances`).

`benchmarks/fit_scaling.py` measures the widths by split conformal prediction (Lei et al. 2018, "Distribution-free
predictive inference for regression") and writes `intervals.csv`. For each origin and each distance, a fold leaves such
runs out of the fit; the width is the smallest with which enough of their measured times lie inside the interval.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from labkit.scaling import read_table
from labkit.scaling.constants import Rows
from labkit.scaling.models import Numbers, step_flops
from labkit.scaling.published import Published, load_published
from labkit.scaling.runs import Flags, Runs, Texts
from labkit.scaling.step_time import slow_engine_s

OTHERS, SOURCE, FRAMEWORK = "other tables", "another source", "unknown framework"
"""Origins besides the published tables that have widths of their own."""
SLOWER = ("tensor_over_nodes", "unstable")
"""Distances that only ever make a step slower, and so widen the upper end alone."""
DISTANCES = ("tensor_over_nodes", "unstable", "gpus", "size", "kind", "architecture", "length", "nodes")
"""In the order in which their widths are measured."""
MAX_DISTANCE = 7.0
"""Folds judge few predictions further away, so their error is unknown."""
Widths = Mapping[str, tuple[float, float]]
"""Origin or distance -> its width at the low and at the high end, in log units."""


@dataclass(frozen=True)
class Limits:
    """What the measured runs of one framework, or of all, cover: largest values, and the sets of what occurs."""

    gpus: float
    seq_len: float
    cp: float
    log_sizes: Numbers
    """log2 of the models' parameters, sorted."""
    architectures: frozenset[str]
    kinds: frozenset[str]
    """Shardings, and fp8 or 16 bits."""


@dataclass(frozen=True)
class Ground:
    """What has been measured: by all runs together, by framework, and in which tables."""

    everything: Limits
    by_framework: Mapping[str, Limits]
    tables: frozenset[str]

    def limits(self, framework: str) -> Limits:
        """A framework's limits; those of all runs for an unknown one."""
        return self.by_framework.get(framework, self.everything)


def measure_ground(published: Published, rows: Flags) -> Ground:
    """The ground of the timed rows in a mask."""
    runs = published.runs.take(rows & published.is_timed)
    names = sorted(set(runs.framework.tolist()) - {"generic"})
    by_framework = {name: _limits(runs.take(runs.framework == name)) for name in names}
    return Ground(_limits(runs), by_framework, frozenset(runs.table.tolist()))


@cache
def load_ground() -> Ground:
    """The ground of all published runs."""
    published = load_published()
    return measure_ground(published, np.ones(len(published.runs), dtype=bool))


def _limits(runs: Runs) -> Limits:
    return Limits(
        gpus=float(runs.gpus.max()),
        seq_len=float(runs.seq_len.max()),
        cp=float(runs.cp.max()),
        log_sizes=np.unique(np.log2(runs.parameters)),
        architectures=frozenset(runs.architecture.tolist()),
        kinds=frozenset().union(*_kinds(runs)),
    )


def _kinds(runs: Runs) -> list[frozenset[str]]:
    """Each run's sharding, and fp8; all 16-bit formats are one kind."""
    precisions = np.where(runs.precision == "fp8", "fp8", "16 bits")
    return [frozenset(pair) for pair in zip(runs.shard.tolist(), precisions.tolist(), strict=True)]


def find_origins(runs: Runs, ground: Ground) -> Texts:
    """Each run's published table; else `SOURCE`, or `FRAMEWORK` if its framework has no published runs either."""
    is_measured = np.isin(runs.framework, sorted(ground.by_framework))
    elsewhere = np.where(is_measured, SOURCE, FRAMEWORK)
    return np.where(np.isin(runs.table, sorted(ground.tables)), runs.table, elsewhere)


def measure_distances(runs: Runs, ground: Ground, unstable: Flags, origins: Texts) -> dict[str, Numbers]:
    """Distances by name, (n,), none negative: doublings (log2 of a ratio), or 1 per kind without a measured run.

    The size's is the square root of the doublings beyond the framework's largest or smallest model.
    `origins`: see `find_origins`.
    """
    columns = {name: np.zeros(len(runs)) for name in DISTANCES}
    columns["nodes"] = (origins == FRAMEWORK) * np.log2(runs.nodes)
    columns["tensor_over_nodes"] = _doublings(runs.tp, np.maximum(runs.gpus_per_node, runs.link_gpus))
    columns["unstable"] = unstable.astype(float)
    sizes, kinds = np.log2(runs.parameters), _kinds(runs)
    for name in np.unique(runs.framework).tolist():
        rows, limits = runs.framework == name, ground.limits(name)
        columns["gpus"][rows] = _doublings(runs.gpus[rows], limits.gpus)
        beyond = np.maximum(sizes[rows] - limits.log_sizes[-1], limits.log_sizes[0] - sizes[rows])
        columns["size"][rows] = np.sqrt(np.maximum(beyond, 0.0))
        columns["kind"][rows] = [len(kinds[row] - limits.kinds) for row in np.flatnonzero(rows)]
    everything = ground.everything
    columns["length"] = _doublings(runs.seq_len, everything.seq_len) + _doublings(runs.cp, everything.cp)
    columns["architecture"] = (~np.isin(runs.architecture, sorted(everything.architectures))).astype(float)
    return columns


def _doublings(values: Numbers, limit: Numbers | float) -> Numbers:
    return np.maximum(np.log2(values / limit), 0.0)


def sum_distances(origins: Texts, columns: Mapping[str, Numbers]) -> Numbers:
    """Each run's total distance from measured runs, (n,): doublings, and 1 per kind without a measured run."""
    counted = [columns[name] for name in ("gpus", "length", "architecture", "kind")]
    return np.asarray(sum(counted) + columns["size"] ** 2 + (origins == FRAMEWORK))


def sum_widths(origins: Texts, columns: Mapping[str, Numbers], widths: Widths) -> tuple[Numbers, Numbers]:
    """Both ends' exponents, (n,); a width that is missing is 0."""
    names, codes = np.unique(origins, return_inverse=True)
    none = (0.0, 0.0)
    homes = np.array([widths.get(str(name), widths.get(OTHERS, none)) for name in names])[codes]
    low, high = (
        homes[:, end] + sum(columns[name] * widths.get(name, none)[end] for name in DISTANCES) for end in (0, 1)
    )
    return low, high


@cache
def load_widths() -> Widths:
    """The widths in use."""
    return {row["width"]: (float(row["low"]), float(row["high"])) for row in read_table("intervals")}


def find_ends(
    runs: Runs, constants: Rows, seconds: Numbers, exponents: tuple[Numbers, Numbers]
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds and both ends of the 90% interval, none shorter than the GPU's best published matmuls would take.

    If a run may have used its framework's slow pipeline engine, the upper end has that engine's extra time.
    """
    fastest = peak_s(runs) / constants["matmul_ceiling"]
    slower = np.where(has_open_engine(runs, constants), slow_engine_s(runs, constants), 0.0)
    low, high = seconds * np.exp(-exponents[0]), seconds * np.exp(exponents[1]) + slower
    return np.maximum(seconds, fastest), np.maximum(low, fastest), np.maximum(high, fastest)


def has_open_engine(runs: Runs, constants: Rows) -> Flags:
    """Return whether a run does not say which of a framework's two pipeline engines it used."""
    is_stated = runs.has("old_pipeline") | runs.has("new_pipeline")
    return np.asarray((constants["engine_unknown"] > 0) & (runs.pp > 1) & (runs.nodes > 1) & ~is_stated)


def peak_s(runs: Runs) -> Numbers:
    """Seconds of the model's FLOPs at the peak of all GPUs."""
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    fp8 = np.where(runs.precision == "fp8", runs.fp8_ratio, 1.0)
    return np.asarray(flops / (runs.gpus * runs.peak_tflops * 1e12 * fp8))


def extrapolations(runs: Runs, row: int, ground: Ground) -> Iterator[str]:
    """Yield in words where a run lies outside of measured runs."""
    framework = str(runs.framework[row])
    limits, everything = ground.limits(framework), ground.everything
    is_measured = framework in ground.by_framework
    where = f" with {framework}" if is_measured else ""
    if not is_measured and runs.table[row] not in ground.tables:
        yield "framework without published runs: calibrate with three runs of it"
    if runs.gpus[row] > limits.gpus:
        yield f"extrapolated: {runs.gpus[row]:.0f} GPUs, fitted up to {limits.gpus:.0f}{where}"
    size = float(np.log2(runs.parameters[row]))
    nearest = float(limits.log_sizes[np.abs(limits.log_sizes - size).argmin()])
    if abs(nearest - size) > 1:
        billions, nearest_billions = 2**size / 1e9, 2**nearest / 1e9
        yield f"extrapolated: {billions:.3g} B parameters, the nearest fitted{where} are {nearest_billions:.3g} B"
    if runs.seq_len[row] > everything.seq_len:
        yield f"extrapolated: {runs.seq_len[row]:.0f} tokens per sequence, fitted up to {everything.seq_len:.0f}"
    if runs.cp[row] > everything.cp:
        yield f"extrapolated: {runs.cp[row]:.0f} context-parallel ranks, fitted up to {everything.cp:.0f}"
    if runs.architecture[row] not in everything.architectures:
        yield f"extrapolated: no published run on {runs.architecture[row]} GPUs"
    for kind in sorted(_kinds(runs.take([row]))[0] - limits.kinds):
        yield f"extrapolated: no published run{where} in {kind}"
