"""The ground that constants were fitted on, and how far a run lies outside of it.

Distances are doublings (log2 of a ratio), or 1 for a kind without a measured run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from labkit.scaling.model import Numbers, parameters
from labkit.scaling.published import Published, load_published
from labkit.scaling.runs import Flags, Runs

OUTSIDE = ("gpus", "size", "length", "framework", "engine", "architecture", "kind")
"""Features whose sum is the distance from measured runs."""
INSIDE = ("nodes", "pipeline", "tensor_over_nodes", "unstable")
"""Features that make errors larger on measured ground, too."""
FRAMEWORKS = ("nanotron", "vtrain", "vtrain_node", "mosaic", "nemo")
"""Frameworks with enough rows for a width of their own; the others share one."""
FEATURES = (*(f"on_{name}" for name in (*FRAMEWORKS, "others")), *INSIDE, *OUTSIDE)
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
    """Limits of all fitted runs, and by framework."""

    everything: Limits
    by_framework: dict[str, Limits]
    aliases: dict[str, str]
    """A user's profile -> the framework it starts from."""

    def limits(self, framework: str) -> Limits:
        return self.by_framework.get(self.aliases.get(framework, framework), self.everything)

    def is_known(self, framework: str) -> bool:
        return framework in self.by_framework or framework in self.aliases


def measure_ground(published: Published, rows: Flags) -> Ground:
    """The ground of the timed rows in a mask."""
    rows = rows & published.is_timed
    framework = published.runs.framework
    names = sorted(set(framework[rows].tolist()) - {"generic"})
    return Ground(
        _limits(published.runs.take(rows)),
        {name: _limits(published.runs.take(rows & (framework == name))) for name in names},
        {},
    )


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
        log_sizes=np.unique(np.log2(np.asarray(parameters(runs)))),
        architectures=frozenset(runs.architecture.tolist()),
        kinds=frozenset(kind for row in range(len(runs)) for kind in _kinds(runs, row)),
    )


def features(runs: Runs, ground: Ground, unstable: Flags) -> Numbers:
    """Columns of `FEATURES`, (n, k), none negative."""
    columns = {name: np.zeros(len(runs)) for name in FEATURES}
    columns["nodes"] = np.log2(runs.nodes)
    columns["pipeline"] = np.where(runs.nodes > 1, np.log2(runs.pp), 0.0)
    columns["tensor_over_nodes"] = np.maximum(np.log2(runs.tp / np.maximum(runs.gpus_per_node, runs.link_gpus)), 0.0)
    columns["unstable"] = unstable.astype(float)
    sizes = np.log2(np.asarray(parameters(runs)))
    everything = ground.everything
    is_wide = (runs.pp > 1) & (runs.tp > 1) & (runs.nodes > 1)  # an engine may do work per layer that none predicts
    for name in np.unique(runs.framework).tolist():
        rows, limits = runs.framework == name, ground.limits(name)
        columns[f"on_{name}" if name in FRAMEWORKS else "on_others"][rows] = 1.0
        columns["framework"][rows] = float(not ground.is_known(name))
        columns["engine"][rows] = columns["framework"][rows] * is_wide[rows]
        columns["gpus"][rows] = np.maximum(np.log2(runs.gpus[rows] / limits.gpus), 0.0)
        columns["size"][rows] = np.abs(sizes[rows][:, None] - limits.log_sizes[None, :]).min(axis=1)
        columns["kind"][rows] = [len(_kinds(runs, int(row)) - limits.kinds) for row in np.flatnonzero(rows)]
    longer = np.maximum(np.log2(runs.seq_len / everything.seq_len), 0.0)
    columns["length"] = longer + np.maximum(np.log2(runs.cp / everything.cp), 0.0)
    columns["architecture"] = (~np.isin(runs.architecture, sorted(everything.architectures))).astype(float)
    return np.stack([columns[name] for name in FEATURES], axis=1)


def _kinds(runs: Runs, row: int) -> frozenset[str]:
    """Sharding, and fp8; all 16-bit formats are one kind."""
    return frozenset((str(runs.shard[row]), "fp8" if runs.precision[row] == "fp8" else "16 bits"))


def distance(columns: Numbers) -> Numbers:
    """How far outside of measured ground each run lies, (n,), from the columns of `features`."""
    return np.asarray(columns[:, [FEATURES.index(name) for name in OUTSIDE]].sum(axis=1))


def extrapolations(runs: Runs, row: int, ground: Ground) -> Iterator[str]:
    """In which respects a run lies outside of measured ground, in words."""
    framework = str(runs.framework[row])
    limits, everything = ground.limits(framework), ground.everything
    where = f" with {framework}" if ground.is_known(framework) else ""
    if not ground.is_known(framework):
        yield "framework without published runs: calibrate with three runs of it"
    if runs.gpus[row] > limits.gpus:
        yield f"extrapolated: {runs.gpus[row]:.0f} GPUs, fitted up to {limits.gpus:.0f}{where}"
    size = float(np.log2(np.asarray(parameters(runs))[row]))
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
    for kind in sorted(_kinds(runs, row) - limits.kinds):
        yield f"extrapolated: no published run{where} in {kind}"
