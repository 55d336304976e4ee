"""How wrong a prediction may be: quantiles of cross-validated residuals, by group of similarity.

A residual is ln(measured / predicted) of a published run whose whole model was left out of the fit (conformal
prediction with whole models as the unit, so that the interval holds for a model nobody fitted to). A run gets the
quantiles of the most similar group that has enough rows: its framework in its regime, its framework, or, for a
framework never seen, the residuals of frameworks left out as a whole.
"""

import numpy as np
from numpy.typing import NDArray

from labkit.scaling.constants import Constants
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Flags, Runs

LEVELS = (0.05, 0.10, 0.90, 0.95)
ENOUGH = 40
"""Rows from which a group has quantiles of its own: a 5 % tail is two rows."""
BEYOND = 1.5
"""By this factor both ends move out beyond the published rows: another architecture, more ranks, longer sequences."""


def regimes(runs: Runs, unstable: Flags) -> NDArray[np.str_]:
    """The group of similarity of each run beyond its framework: what was seen to make errors larger."""
    across = runs.tp > runs.gpus_per_node
    names = np.where(runs.pp > 1, "pipeline", "flat")
    names = np.where(across, np.char.add(names, "+wide"), names)
    return np.where(unstable, "unstable", names)


def factors(runs: Runs, constants: Constants, *, unstable: Flags) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """The ends of the 90 and 80 % intervals over the prediction: (low 90, low 80, high 80, high 90)."""
    keys = np.char.add(np.char.add(runs.framework.astype(str), "/"), regimes(runs, unstable))
    logs = np.empty((len(runs), len(LEVELS)))
    for key in np.unique(keys):
        logs[keys == key] = of_key(key, constants)
    seen = constants.seen
    beyond = (runs.gpus > seen["gpus"]) | (runs.seq_len > seen["seq_len"]) | is_untried(runs, constants)
    beyond |= ~np.isin(runs.architecture, seen["architectures"])
    logs = np.where(beyond[:, None], BEYOND * logs, logs)
    low_90, low_80, high_80, high_90 = np.exp(logs).T
    return np.minimum(low_90, 1.0), np.minimum(low_80, 1.0), np.maximum(high_80, 1.0), np.maximum(high_90, 1.0)


def is_untried(runs: Runs, constants: Constants) -> Flags:
    """Layouts of a kind that no published row has."""
    return (runs.cp > constants.seen["cp"]) | ~np.isin(runs.shard, constants.seen["shards"])


def of_key(key: str, constants: Constants) -> Numbers:
    """Quantiles at `LEVELS` of ln(measured / predicted) for "framework/regime"."""
    framework, _, _ = key.partition("/")
    for name in (key, framework, "never seen"):
        if name in constants.residuals:
            return np.asarray(constants.residuals[name])
    raise AssertionError("the fit writes residuals of frameworks never seen")


def quantiles_by_group(
    framework: NDArray[np.str_], regime: NDArray[np.str_], residuals: Numbers
) -> dict[str, list[float]]:
    """Quantiles at `LEVELS` of every framework, and of each of its regimes with `ENOUGH` rows.

    None is narrower than those of all frameworks alike: rows of one model err together, so that however many rows
    there are of a framework, they are those of few models (three to twelve), and say little about the next one.
    """
    pooled = conformal(alike(framework, residuals))
    found: dict[str, list[float]] = {}
    for name in np.unique(framework):
        own = framework == name
        found[str(name)] = _wider(conformal(residuals[own]), pooled)
        for kind in np.unique(regime[own]):
            rows = own & (regime == kind)
            if rows.sum() >= ENOUGH:
                found[f"{name}/{kind}"] = _wider(conformal(residuals[rows]), pooled)
    return found


def _wider(quantiles: list[float], pooled: list[float]) -> list[float]:
    """Lower ends are the lower of both, upper ends the higher."""
    lower, upper = np.minimum(quantiles[:2], pooled[:2]), np.maximum(quantiles[2:], pooled[2:])
    return [*lower.tolist(), *upper.tolist()]


def alike(group: NDArray[np.str_], residuals: Numbers) -> Numbers:
    """Residuals in which every group weighs as much, whatever its rows: the next one may be like any of them."""
    quantiles = np.linspace(0, 1, 201)
    return np.concatenate([np.quantile(residuals[group == name], quantiles) for name in np.unique(group)])


def conformal(residuals: Numbers) -> list[float]:
    """Quantiles at `LEVELS` with the finite-sample correction: of n residuals, rank q (n + 1), outwards."""
    count = len(residuals)
    ordered = np.sort(residuals)
    low = [ordered[max(int(np.floor(level * (count + 1))) - 1, 0)] for level in LEVELS[:2]]
    high = [ordered[min(int(np.ceil(level * (count + 1))) - 1, count - 1)] for level in LEVELS[2:]]
    return [float(value) for value in (*low, *high)]
