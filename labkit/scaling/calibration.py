"""A profile from a user's runs: the constants of a framework and a site, drawn towards what was measured."""

from collections.abc import Mapping, Sequence

import numpy as np

from labkit.scaling.constants import Constants, Profile, load_constants
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import predict_step_s

MIN_RUNS = 3
SPREADS: Mapping[str, float] = {
    "slowdown": 0.2,
    "attention_slowdown": 0.4,
    "elementwise_traffic": 0.4,
    "launch_s": 0.25,
    "tp_exposed": 0.4,
    "network_efficiency": 0.3,
}
"""Quantities that differ between frameworks and sites, with the standard deviation of ln(value) between them."""
NOISE = 0.08
"""Standard deviation of ln(seconds) of one run around a calibrated model."""


def calibrate(
    runs: Sequence[Run],
    measured_s: Sequence[float],
    *,
    name: str = "calibrated",
    base: str = "generic",
    constants: Constants | None = None,
) -> Profile:
    """The most likely profile given these steps and the spread between frameworks (maximum a posteriori).

    Use it as `load_constants().with_profile(profile)`, with `name` as the framework of the runs to predict. `base` is
    the framework it starts from. ValueError for fewer than three runs, or times that are not positive.
    """
    from scipy.optimize import least_squares  # half a second to import

    times = np.asarray(measured_s, dtype=np.float64)
    if len(runs) < MIN_RUNS or len(times) != len(runs) or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(f"expected {MIN_RUNS} runs or more, each with a positive time; got {len(runs)} runs")
    constants = constants or load_constants()
    columns = Runs([Run(run.model, run.hardware, run.layout, run.seq_len, name) for run in runs])
    start = constants.with_profile(Profile(name, base, {})).rows(columns)
    values = {quantity: float(start[quantity][0]) for quantity in SPREADS}

    def profile(shift: Numbers, unfused: float) -> Profile:
        moved = {
            quantity: value * float(np.exp(by)) for (quantity, value), by in zip(values.items(), shift, strict=True)
        }
        return Profile(name, base, moved | {"unfused_attention": unfused})

    def residuals(shift: Numbers, unfused: float) -> Numbers:
        predicted = predict_step_s(columns, constants.with_profile(profile(shift, unfused)).rows(columns))
        return np.concatenate([soft_l1(np.log(predicted / times) / NOISE), shift / list(SPREADS.values())])

    # A table of runs does not say whether attention is tiled: the better fit decides.
    fits = [(least_squares(residuals, np.zeros(len(SPREADS)), args=(unfused,)), unfused) for unfused in (0.0, 1.0)]
    best, unfused = min(fits, key=lambda fit: fit[0].cost)
    return profile(best.x, unfused)


def soft_l1(errors: Numbers) -> Numbers:
    """Residuals whose squares are twice the soft L1 loss, so that an outlier does not bend the others."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
