"""How wrong a prediction may be: 90% intervals that widen with the distance from measured runs.

Errors on runs that a fit had left out (`benchmarks/fit_scaling.py`) give two linear quantile regressions of
ln(measured / predicted) on `FEATURES`, whose coefficients are in `intervals.csv` (Koenker and Bassett 1978, "Regression
quantiles"). Distances are doublings (log2 of a ratio), or 1 for a kind without a measured run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from labkit.scaling import read_table
from labkit.scaling.model import Numbers
from labkit.scaling.published import Published, load_published
from labkit.scaling.runs import Flags, Runs

FLOORS: Mapping[str, float] = {
    **dict.fromkeys(("on_nanotron", "on_vtrain", "on_vtrain_node", "on_mosaic", "on_nemo"), 0.1),
    **{"on_others": 0.2, "framework": 0.3, "engine": 0.05, "unknown_nodes": 0.04},
    **{"tensor_over_nodes": 0.0, "unstable": 0.0, "larger": 0.1},
    **{"gpus": 0.03, "size": 0.02, "length": 0.1, "architecture": 0.1, "kind": 0.04},
}
"""Features, and the least widening by each in log units, declared since folds are few.

At home that much is what sites differ by, and for a framework without runs, what the published ones differ by.
"""
FEATURES = tuple(FLOORS)
OUTSIDE = ("gpus", "size", "length", "framework", "engine", "architecture", "kind")
"""Features whose sum is the distance from measured runs."""
MAX_DISTANCE = 7.0
"""Folds judge few predictions further away, so that their error is not known."""


@dataclass(frozen=True)
class Limits:
    """The measured runs of one framework, or of all."""

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
    """Limits of all measured runs, and by framework."""

    everything: Limits
    by_framework: Mapping[str, Limits]

    def limits(self, framework: str) -> Limits:
        return self.by_framework.get(framework, self.everything)


def measure_ground(published: Published, rows: Flags) -> Ground:
    """The ground of the timed rows in a mask."""
    rows = rows & published.is_timed
    framework = published.runs.framework
    names = sorted(set(framework[rows].tolist()) - {"generic"})
    by_framework = {name: _limits(published.runs.take(rows & (framework == name))) for name in names}
    return Ground(_limits(published.runs.take(rows)), by_framework)


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


def features(runs: Runs, ground: Ground, unstable: Flags) -> Numbers:
    """Columns of `FEATURES`, (n, k), none negative. An error grows with the square root of the doublings of a model."""
    columns = {name: np.zeros(len(runs)) for name in FEATURES}
    columns["tensor_over_nodes"] = np.maximum(np.log2(runs.tp / np.maximum(runs.gpus_per_node, runs.link_gpus)), 0.0)
    columns["unstable"] = unstable.astype(float)
    sizes, kinds, everything = np.log2(runs.parameters), _kinds(runs), ground.everything
    is_wide = (runs.pp > 1) & (runs.tp > 1) & (runs.nodes > 1)  # an engine may do work per layer that none predicts
    for name in np.unique(runs.framework).tolist():
        rows, limits = runs.framework == name, ground.limits(name)
        columns[f"on_{name}" if f"on_{name}" in FEATURES else "on_others"][rows] = 1.0
        columns["framework"][rows] = float(name not in ground.by_framework)
        columns["engine"][rows] = columns["framework"][rows] * is_wide[rows]
        columns["gpus"][rows] = np.maximum(np.log2(runs.gpus[rows] / limits.gpus), 0.0)
        columns["size"][rows] = np.abs(sizes[rows][:, None] - limits.log_sizes[None, :]).min(axis=1)
        columns["larger"][rows] = np.sqrt(np.maximum(sizes[rows] - limits.log_sizes[-1], 0.0))
        columns["kind"][rows] = [len(kinds[row] - limits.kinds) for row in np.flatnonzero(rows)]
    columns["unknown_nodes"] = (columns["framework"] + columns["kind"]) * np.log2(runs.nodes)
    longer = np.maximum(np.log2(runs.seq_len / everything.seq_len), 0.0)
    columns["length"] = longer + np.maximum(np.log2(runs.cp / everything.cp), 0.0)
    columns["architecture"] = (~np.isin(runs.architecture, sorted(everything.architectures))).astype(float)
    return np.stack([columns[name] for name in FEATURES], axis=1)


def distance(columns: Numbers) -> Numbers:
    """How far outside of measured ground each run lies, (n,), from the columns of `features`."""
    return np.asarray(columns[:, [FEATURES.index(name) for name in OUTSIDE]].sum(axis=1))


def extrapolations(runs: Runs, row: int, ground: Ground) -> Iterator[str]:
    """In which respects a run lies outside of measured ground, in words."""
    framework = str(runs.framework[row])
    limits, everything = ground.limits(framework), ground.everything
    is_measured = framework in ground.by_framework
    where = f" with {framework}" if is_measured else ""
    if not is_measured:
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
    for kind in sorted(_kinds(runs)[row] - limits.kinds):
        yield f"extrapolated: no published run{where} in {kind}"


@cache
def load_widths() -> Mapping[str, Numbers]:
    """The coefficients of both ends, "low" and "high", in the order of `FEATURES`; log units per unit of a feature."""
    rows = {row["feature"]: row for row in read_table("intervals")}
    return {end: np.array([float(rows[name][end]) for name in FEATURES]) for end in ("low", "high")}
