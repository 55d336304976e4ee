"""How wrong a prediction may be: 90% intervals that widen with the distance from measured runs.

An interval is the predicted time times exp(-low) to exp(high). Each exponent is a sum: the width of the published table
that a run belongs to, or that of all other tables, and a width per unit of every distance from measured runs.

`benchmarks/fit_scaling.py` fits the widths to errors on runs that folds had left out of the constants, and writes
`intervals.csv` (split conformal prediction: Lei et al. 2018). It chooses each width by the share that it holds of runs
that neither the constants nor the width had seen.
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

OTHERS = "other tables"
"""Published tables without widths of their own."""
SLOWER = ("tensor_over_nodes", "unstable")
"""Distances that only ever make a step slower, and so widen the upper end alone."""
DISTANCES = (*SLOWER, "gpus", "outside", "hardware", "framework")
MAX_DISTANCE = 10.0
"""Folds judge few predictions further away, so their error is unknown."""
Widths = Mapping[str, tuple[float, float]]
"""Published table or distance -> its width at the low and at the high end, in log units."""


@dataclass(frozen=True)
class Limits:
    """What the measured runs of one framework, or of all, cover: largest values, and the sets of what occurs."""

    gpus: float
    seq_len: float
    cp: float
    log_sizes: Numbers
    """log2 of the models' parameters, sorted."""
    architectures: frozenset[str]
    cards: frozenset[str]
    kinds: frozenset[str]
    """Shardings, fp8 or 16 bits, ways of dividing a model."""


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
        cards=frozenset(runs.card.tolist()),
        kinds=frozenset().union(*_kinds(runs)),
    )


def _kinds(runs: Runs) -> list[frozenset[str]]:
    """Each run's sharding, fp8 (all 16-bit formats are one kind), and ways of dividing a model."""
    precisions = np.where(runs.precision == "fp8", "fp8", "16 bits").tolist()
    degrees = {"tensor parallelism": runs.tp, "pipelines": runs.pp, "context parallelism": runs.cp}
    divisions = [np.where(degree > 1, name, "").tolist() for name, degree in degrees.items()]
    return [frozenset(kinds) - {""} for kinds in zip(runs.shard.tolist(), precisions, *divisions, strict=True)]


def measure_distances(runs: Runs, ground: Ground, unstable: Flags) -> dict[str, Numbers]:
    """Distances by name, (n,), none negative.

    `gpus`: beyond the largest measured number 1 and the doublings.
    `outside`: the same for tokens and context-parallel ranks; 1 and the root of the doublings for parameters, half of
    them beyond four; 1 per new kind of layout.
    `hardware`: 1 for a new GPU, 2 if its architecture is new as well. `framework`: 1 without published runs.
    `tensor_over_nodes`: doublings of a tensor-parallel group over its domain of fast links.
    """
    sizes, kinds, everything = np.log2(runs.parameters), _kinds(runs), ground.everything
    gpus = np.zeros(len(runs))
    outside = _beyond(np.log2(runs.seq_len / everything.seq_len)) + _beyond(np.log2(runs.cp / everything.cp))
    for name in np.unique(runs.framework).tolist():
        rows, limits = runs.framework == name, ground.limits(name)
        gpus[rows] = _beyond(np.log2(runs.gpus[rows] / limits.gpus))
        doublings = np.maximum(sizes[rows] - limits.log_sizes[-1], limits.log_sizes[0] - sizes[rows])
        new_kinds = [len(kinds[row] - limits.kinds) for row in np.flatnonzero(rows)]
        outside[rows] += _beyond(np.maximum(np.sqrt(np.maximum(doublings, 0.0)), doublings / 2)) + new_kinds
    is_new_card = ~np.isin(runs.card, sorted(everything.cards))
    is_new_architecture = ~np.isin(runs.architecture, sorted(everything.architectures))
    is_unknown = is_elsewhere(runs, ground) & ~np.isin(runs.framework, sorted(ground.by_framework))
    return {
        "tensor_over_nodes": np.maximum(np.log2(runs.tp / np.maximum(runs.gpus_per_node, runs.link_gpus)), 0.0),
        "unstable": unstable.astype(float),
        "gpus": gpus,
        "outside": outside,
        "hardware": is_new_card.astype(float) + is_new_architecture,
        "framework": is_unknown.astype(float),
    }


def is_elsewhere(runs: Runs, ground: Ground) -> Flags:
    """Return whether a run is of no measured table."""
    return ~np.isin(runs.table, sorted(ground.tables))


def _beyond(doublings: Numbers) -> Numbers:
    """1 and the doublings above a limit, 0 below: a fit that has to extrapolate is worse at once."""
    return np.where(doublings > 1e-6, 1 + doublings, 0.0)


def sum_distances(columns: Mapping[str, Numbers]) -> Numbers:
    """Each run's total distance from measured runs, (n,)."""
    return np.asarray(sum(columns[name] for name in DISTANCES if name not in SLOWER))


def sum_widths(tables: Texts, columns: Mapping[str, Numbers], widths: Widths) -> tuple[Numbers, Numbers]:
    """Both ends' exponents, (n,)."""
    names, codes = np.unique(tables, return_inverse=True)
    homes = np.array([widths.get(str(name), widths[OTHERS]) for name in names])[codes]
    low, high = (homes[:, end] + sum(columns[name] * widths[name][end] for name in DISTANCES) for end in (0, 1))
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
    framework, everything = str(runs.framework[row]), ground.everything
    limits, is_measured = ground.limits(framework), framework in ground.by_framework
    where = f" with {framework}" if is_measured else ""
    if not is_measured and runs.table[row] not in ground.tables:
        yield "framework without published runs: calibrate with three runs of it"
    if runs.gpus[row] > limits.gpus:
        yield f"extrapolated: {runs.gpus[row]:.0f} GPUs, fitted up to {limits.gpus:.0f}{where}"
    size, smallest, largest = (2**log / 1e9 for log in (np.log2(runs.parameters[row]), *limits.log_sizes[[0, -1]]))
    if not smallest * (1 - 1e-6) <= size <= largest * (1 + 1e-6):
        yield f"extrapolated: {size:.3g} B parameters, fitted from {smallest:.3g} to {largest:.3g} B{where}"
    if runs.seq_len[row] > everything.seq_len:
        yield f"extrapolated: {runs.seq_len[row]:.0f} tokens per sequence, fitted up to {everything.seq_len:.0f}"
    if runs.cp[row] > everything.cp:
        yield f"extrapolated: {runs.cp[row]:.0f} context-parallel ranks, fitted up to {everything.cp:.0f}"
    if runs.architecture[row] not in everything.architectures:
        yield f"extrapolated: no published run on {runs.architecture[row]} GPUs"
    elif runs.card[row] not in everything.cards:
        yield f"extrapolated: no published run on {runs.card[row]}"
    for kind in sorted(_kinds(runs.take([row]))[0] - limits.kinds):
        yield f"extrapolated: no published run{where} in {kind}"
