"""Fits the constants of `labkit.scaling` to the published runs, and prints how wrong its predictions are.

    python benchmarks/fit_scaling.py            the scoreboard
    python benchmarks/fit_scaling.py --write    also constants.csv and cross_validated.csv in data/reference/scaling/

Folds leave out whole models, whole frameworks, all runs on more than 64 or 32 GPUs, a GPU generation, or the largest
models. The objective is ln(predicted / measured) with a soft L1 loss, so that an outlier does not bend the constants;
each published table counts with the square root of its rows.
"""

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from labkit.scaling import memory
from labkit.scaling.calibration import soft_l1
from labkit.scaling.constants import Constant, from_values, read_constants
from labkit.scaling.folds import FOLDS, Fold
from labkit.scaling.prediction import FITS_SHARE
from labkit.scaling.published import Published, load_published
from labkit.scaling.runs import Runs
from labkit.scaling.step_time import predict_step_s
from labkit.scaling.tables import DATA

NOISE = 0.08
"""Errors below this count as squares, above as absolute values."""
EVALUATIONS = 12
MARGIN = 0.01
MEMORY = {"activation_scale", "fused_operators", "logit_bytes", "transient_ffn", "held_gathers", "fragmentation"}
MEMORY |= {"stream_fragmentation", "runtime_bytes"}
"""Quantities that memory depends on."""
FITTED = [constant for constant in read_constants() if constant.is_fitted]
TIME_CONSTANTS = [constant for constant in FITTED if constant.quantity not in MEMORY]
MEMORY_CONSTANTS = [constant for constant in FITTED if constant.quantity in MEMORY]


def fit(constants: Sequence[Constant], errors: Callable[[Mapping[str, float]], np.ndarray]) -> dict[str, float]:
    """The most likely values of these constants, by name, from their priors and from `errors` of values by name."""
    prior = np.log([constant.prior for constant in constants])
    spread = np.array([constant.spread for constant in constants])

    def values(logs: np.ndarray) -> dict[str, float]:
        return {constant.name: float(value) for constant, value in zip(constants, np.exp(logs), strict=True)}

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(values(logs)), (logs - prior) / spread])

    bounds = np.log([[constant.low, constant.high] for constant in constants]).T
    return values(least_squares(residuals, prior, bounds=bounds, max_nfev=EVALUATIONS, diff_step=1e-4).x)


def fit_time(published: Published, mask: np.ndarray) -> dict[str, float]:
    """Constants of time from the timed rows of `mask`."""
    mask = mask & published.is_timed
    runs, measured = published.runs.take(mask), published.step_s[mask]
    _, codes, counts = np.unique(published.group[mask], return_inverse=True, return_counts=True)
    weight = counts[codes] ** -0.25
    weight /= weight.mean()
    return fit(TIME_CONSTANTS, lambda values: soft_l1(weight * np.log(seconds(runs, values) / measured) / NOISE))


def seconds(runs: Runs, values: Mapping[str, float]) -> np.ndarray:
    return predict_step_s(runs, from_values(read_constants(), values).rows(runs))


def fit_memory(published: Published, mask: np.ndarray) -> dict[str, float]:
    """Constants of memory: reserved memory of the first stage; what ran must fit, and what ran out must not."""
    runs, is_ok, reserved = published.runs.take(mask), published.is_ok[mask], published.reserved_gib[mask]
    is_measured = is_ok & np.isfinite(reserved)

    def errors(values: Mapping[str, float]) -> np.ndarray:
        stages = memory.stages(runs, from_values(read_constants(), values).rows(runs))
        first = stages.reserved[:, 0] / memory.GIB
        over = np.log(stages.peak_gib / (FITS_SHARE * runs.memory_gib))
        return np.concatenate(
            [
                soft_l1(np.log(first / reserved)[is_measured] / NOISE),
                soft_l1(np.maximum(0, over + MARGIN)[is_ok] / NOISE),
                0.7 * soft_l1(np.maximum(0, MARGIN - over)[~is_ok] / NOISE),
            ]
        )

    return fit(MEMORY_CONSTANTS, errors)


def cross_validate(published: Published, fold: Fold) -> np.ndarray:
    """Seconds of every timed row that a part of the fold leaves out, by constants fitted to the others; else nan."""
    found = np.full(len(published.runs), np.nan)
    for trained, tested in fold.parts(published):
        tested = tested & published.is_timed
        runs = published.runs.take(tested)
        found[tested] = seconds(fold.hide(runs), fit_time(published, trained))
    return found


def print_scores(published: Published, held_out: Mapping[str, np.ndarray]) -> None:
    """Errors in percent, median / 90th percentile, by fold and published table."""
    for name, predicted in held_out.items():
        print(f"\n{name}")
        for group in np.unique(published.group):
            rows = (published.group == group) & np.isfinite(predicted)
            for gpus in np.unique(published.runs.gpus[rows]) if name.startswith("beyond") else (None,):
                own = rows if gpus is None else rows & (published.runs.gpus == gpus)
                if own.any():
                    ratio = predicted[own] / published.step_s[own]
                    errors = 100 * np.abs(ratio - 1)
                    where = "" if gpus is None else f"{gpus:.0f} GPUs"
                    median, ninety = np.median(errors), np.percentile(errors, 90)
                    line = f"{median:6.1f} {ninety:7.1f}   predicted/measured {np.median(ratio):.2f}"
                    print(f"  {group:18} {where:10} {own.sum():5} {line}")


def write(published: Published, values: Mapping[str, float], held_out: Mapping[str, np.ndarray]) -> None:
    with (DATA / "constants.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["quantity", "key", "value", "prior", "spread", "low", "high", "source"])
        for one in read_constants():
            value = values.get(one.name, one.value)
            fitted = [f"{x:g}" for x in (one.prior, one.spread, one.low, one.high)] if one.is_fitted else [""] * 4
            out.writerow([one.quantity, one.key, f"{value:.5g}", *fitted, one.source])
    with (DATA / "cross_validated.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["key", *(f"{name}_s" for name in held_out)])
        for row in np.flatnonzero(published.is_timed):
            cells = [f"{predicted[row]:.5g}" if np.isfinite(predicted[row]) else "" for predicted in held_out.values()]
            out.writerow([published.key[row], *cells])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--write", action="store_true", help="write constants.csv and cross_validated.csv")
    published, begun = load_published(), time.perf_counter()
    everything = np.ones(len(published.runs), dtype=bool)
    is_writing = arguments.parse_args().write
    values = fit_time(published, everything) | fit_memory(published, everything)
    print(f"{len(published.runs)} rows, {len(values)} fitted constants, {time.perf_counter() - begun:.0f} s to fit")
    for constant in FITTED:
        print(f"  {constant.name:32} {values[constant.name]:<10.4g} from {constant.prior:g}")
    held_out = {fold.name: cross_validate(published, fold) for fold in FOLDS}
    print_scores(published, held_out)
    print(f"{time.perf_counter() - begun:.0f} s")
    if is_writing:
        write(published, values, held_out)


if __name__ == "__main__":
    main()
