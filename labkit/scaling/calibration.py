"""Fits a profile of constants to a few runs of a user's site or framework."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from labkit.scaling.constants import CALIBRATED, Constants, load_constants
from labkit.scaling.models import Numbers
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import predict_step_s

MIN_RUNS = 3
# Quantities that differ between frameworks and sites, and how much: the standard deviation of
# ln(value).
SPREADS: Mapping[str, float] = {
    "slowdown": 0.2,
    "attention_slowdown": 0.4,
    "elementwise_traffic": 0.4,
    "launch_s": 0.25,
    "tp_exposed": 0.4,
    "network_efficiency": 0.3,
}
# Standard deviation of ln(seconds) of one run around a calibrated model.
NOISE = 0.08


def calibrate(
    runs: Sequence[Run], measured_s: Sequence[float], *, base: str = "generic"
) -> Constants:
    """Return constants with the most likely profile, by these times and the `SPREADS`.

    Maximum a posteriori. Runs to predict have `CALIBRATED` as their framework. `base` is the
    framework that the profile starts from. ValueError for fewer than three runs, or times that are
    not positive.
    """
    from scipy.optimize import least_squares  # half a second to import

    times = np.asarray(measured_s, dtype=np.float64)
    are_times = len(times) == len(runs) and (np.isfinite(times) & (times > 0)).all()
    if len(runs) < MIN_RUNS or not are_times:
        raise ValueError(
            f"expected {MIN_RUNS} runs or more, each with a positive time; got {len(runs)} runs"
        )
    constants = load_constants()
    columns = as_calibrated(runs)

    def shifted(shift: Numbers) -> Constants:
        values = {
            quantity: constants.value(quantity, base) * float(factor)
            for quantity, factor in zip(SPREADS, np.exp(shift), strict=True)
        }
        return constants.with_profile(CALIBRATED, base, values)

    def residuals(shift: Numbers) -> Numbers:
        predicted = predict_step_s(columns.with_constants(shifted(shift)))
        errors = soft_l1(np.log(predicted / times) / NOISE)
        # Three runs do not determine six numbers: what they leave open stays near `base`.
        return np.concatenate([errors, shift / list(SPREADS.values())])

    return shifted(least_squares(residuals, np.zeros(len(SPREADS))).x)


def as_calibrated(runs: Sequence[Run], constants: Constants | None = None) -> Runs:
    """Return a user's runs, of no published table, under the profile that `calibrate` fits."""
    return Runs([replace(run, framework=CALIBRATED, table="") for run in runs], constants)


def soft_l1(errors: Numbers) -> Numbers:
    """Return residuals whose squares are twice the soft L1 loss: outliers bend little."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
