"""A profile from a few runs of one's own: the constants of a framework and a site, drawn towards what was measured."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from labkit.scaling.constants import Constants, Profile, load_constants
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import breakdown, step_s

FEWEST_RUNS = 3
SPREADS: Mapping[str, float] = {
    "slowdown": 0.2,
    "attention_slowdown": 0.4,
    "elementwise_traffic": 0.4,
    "launch_s": 0.25,
    "tp_exposed": 0.4,
    "network_efficiency": 0.3,
}
"""What differs between frameworks and sites, and how much: the standard deviation of ln(value) of those fitted."""
NOISE = 0.08
"""Of one run around a calibrated model, as a standard deviation of ln(seconds)."""
ATTENTION = (0.0, 1.0)
"""Tiled or unfused: whichever explains the runs better, since a table of runs does not say."""
ITERATIONS = 12
STEP = 1e-3


def calibrate(
    runs: Sequence[Run],
    measured_s: Sequence[float],
    *,
    name: str = "calibrated",
    base: str = "generic",
    constants: Constants | None = None,
) -> Profile:
    """The profile that explains these steps best without leaving what is likely (maximum a posteriori).

    Use it as `load_constants().with_profile(profile)`, with `name` as the framework of the runs to predict. `base` is
    the framework it starts from. ValueError for fewer than three runs, or times that are not positive.
    """
    times = np.asarray(measured_s, dtype=np.float64)
    if len(runs) < FEWEST_RUNS or len(times) != len(runs) or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"expected {FEWEST_RUNS} runs or more, each with a positive time; got {len(runs)} runs")
    constants = constants or load_constants()
    columns = Runs.of([Run(run.model, run.hardware, run.layout, run.seq_len, name) for run in runs])
    start = _start(columns, base, constants)
    spreads = np.array(list(SPREADS.values()))

    def profile(shift: Numbers, unfused: float) -> Profile:
        values = dict(zip(SPREADS, (start * np.exp(shift)).tolist(), strict=True))
        return Profile(name, base, values | {"unfused_attention": unfused})

    def errors(shift: Numbers, unfused: float) -> Numbers:
        adapted = constants.with_profile(profile(shift, unfused))
        predicted = step_s(breakdown(columns, adapted.rows(columns)))
        return np.concatenate([_soft(np.log(predicted / times) / NOISE), shift / spreads])

    found = []
    for unfused in ATTENTION:
        shift, cost = _least_squares(partial(errors, unfused=unfused), np.zeros(len(SPREADS)))
        found.append((cost, unfused, shift))
    _, unfused, shift = min(found, key=lambda one: one[0])
    return profile(shift, unfused)


def _soft(errors: Numbers) -> Numbers:
    """What, squared, is twice the soft L1 loss: a run that was disturbed does not bend the others."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def _start(columns: Runs, base: str, constants: Constants) -> Numbers:
    """The values that the base has."""
    as_base = constants.with_profile(Profile(str(columns.framework[0]), base, {})).rows(columns)
    return np.array([float(as_base[quantity][0]) for quantity in SPREADS])


def _least_squares(errors: Callable[[Numbers], Numbers], start: Numbers) -> tuple[Numbers, float]:
    """Levenberg's method with numerical derivatives, and the sum of squares it ends at."""
    at, damping = start, 1e-2
    residuals = errors(at)
    for _ in range(ITERATIONS):
        slopes = np.stack([(errors(at + STEP * unit) - residuals) / STEP for unit in np.eye(len(at))], axis=1)
        normal = slopes.T @ slopes
        for _ in range(6):
            step = np.linalg.solve(normal + damping * np.diag(normal.diagonal()), -slopes.T @ residuals)
            moved = errors(at + step)
            if moved @ moved < residuals @ residuals:
                at, residuals, damping = at + step, moved, damping / 10
                break
            damping *= 10
        else:
            break
        if np.abs(step).max() < 1e-4:
            break
    return at, float(residuals @ residuals)
