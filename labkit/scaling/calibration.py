"""Fits a profile of constants to a few runs of a user's site or framework."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from labkit.scaling.constants import CALIBRATED, GENERIC, Constants, load_constants
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import predict_step_s

MIN_RUNS = 3
# Standard deviation of ln(seconds): of one run around a calibrated model, and of a site around the
# published ones.
NOISE = 0.08
SPREAD = 0.2


def calibrate(
    runs: Sequence[Run], measured_s: Sequence[float], *, base: str = GENERIC
) -> Constants:
    """Return constants with the most likely profile: a published framework, times one factor.

    Runs to predict have `CALIBRATED` as their framework. `base` is the framework, if it is known.
    ValueError for fewer than three runs, or times that are not positive.
    """
    times = np.asarray(measured_s, dtype=np.float64)
    are_times = len(times) == len(runs) and (np.isfinite(times) & (times > 0)).all()
    if len(runs) < MIN_RUNS or not are_times:
        raise ValueError(
            f"expected {MIN_RUNS} runs or more, each with a positive time; got {len(runs)} runs"
        )
    constants = load_constants()
    profiles = [base]
    if base == GENERIC:
        profiles += sorted(constants.table["slowdown"].keys() - {"default"})
    # Not each constant on its own: three runs do not determine them, and fitted to runs of a
    # published table they predicted its others no better.
    fits = []
    for profile in profiles:
        columns = Runs([replace(run, framework=profile, table="") for run in runs])
        errors = np.log(times / predict_step_s(columns))
        log_factor = errors.sum() / (len(runs) + (NOISE / SPREAD) ** 2)
        cost = np.abs(errors - log_factor).sum() / NOISE + (log_factor / SPREAD) ** 2 / 2
        fits.append((cost, profile, log_factor))
    _, profile, log_factor = min(fits)
    return constants.with_profile(CALIBRATED, profile, {"site_factor": float(np.exp(log_factor))})


def as_calibrated(runs: Sequence[Run], constants: Constants | None = None) -> Runs:
    """Return a user's runs, of no published table, under the profile that `calibrate` fits."""
    return Runs([replace(run, framework=CALIBRATED, table="") for run in runs], constants)
