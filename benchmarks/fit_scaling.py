"""Fits the constants of `labkit.scaling` to the published runs, and prints how wrong its predictions are.

    python benchmarks/fit_scaling.py            the scoreboard
    python benchmarks/fit_scaling.py --write    also constants, intervals and predictions in data/reference/scaling/

Folds leave out all runs on more than 64 or 32 GPUs, each table's largest model, whole frameworks, GPU generations, ways
of sharding, or models (`folds.py`). Intervals are judged on models that their widths had not seen.
The objective is ln(predicted / measured) with a soft L1 loss, so that an outlier does not bend the constants; each
published table counts with the square root of its rows.
"""

import argparse
import csv
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from fit_intervals import Errors, fit_widths
from folds import FOLDS, MODEL_PARTS, Fold, model_parts
from scipy.optimize import least_squares

from labkit.scaling import memory
from labkit.scaling.calibration import soft_l1
from labkit.scaling.constants import Constant, from_values, read_constants
from labkit.scaling.ground import FEATURES, distance, features, measure_ground
from labkit.scaling.intervals import factors
from labkit.scaling.prediction import FITS_SHARE, UNSTABLE_SHARE, apply_bounds
from labkit.scaling.published import Published, load_published
from labkit.scaling.runs import Runs
from labkit.scaling.step_time import predict_step_s, slow_engine_s
from labkit.scaling.tables import DATA

NOISE = 0.08
"""Errors below this count as squares, above as absolute values."""
EVALUATIONS = 12
MARGIN = 0.01
MIN_ROWS = 8
"""Per number of GPUs, to print a line."""
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


def cross_validate(published: Published, fold: Fold, unstable: np.ndarray) -> Errors:
    """Every timed row that a part of the fold leaves out, with its error by constants fitted to the others."""
    parts = []
    for trained, tested in fold.parts(published):
        tested = tested & published.is_timed
        if tested.any():
            runs = fold.hide(published.runs.take(tested))
            log_ratio = np.log(published.step_s[tested] / seconds(runs, fit_time(published, trained)))
            columns = features(runs, measure_ground(published, trained), unstable[tested])
            parts.append((np.flatnonzero(tested), published.group[tested], log_ratio, columns))
    row, table, log_ratio, columns = (np.concatenate(list(some)) for some in zip(*parts, strict=True))
    return Errors(row, np.full(len(row), fold.name), table, log_ratio, columns)


def find_unstable(published: Published, values: Mapping[str, float]) -> np.ndarray:
    stages = memory.stages(published.runs, from_values(read_constants(), values).rows(published.runs))
    return stages.peak_gib > UNSTABLE_SHARE * published.runs.memory_gib


def without_slow_engine(published: Published, errors: Errors, values: Mapping[str, float]) -> Errors:
    """The errors that an unstated slow engine does not explain: `apply_bounds` covers the others."""
    runs, measured = published.runs.take(errors.row), published.step_s[errors.row]
    slower = slow_engine_s(runs, from_values(read_constants(), values).rows(runs))
    is_open = (runs.framework == "nanotron") & (runs.pp > 1) & (runs.nodes > 1) & ~runs.has("old_pipeline")
    is_slow = is_open & (measured - measured / np.exp(errors.log_ratio) > 0.5 * slower)
    return errors.take(np.flatnonzero(~is_slow))


def unseen_ends(published: Published, errors: Errors, values: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of every error's interval over the prediction, by widths that saw no row of its model."""
    part = model_parts(published)[errors.row]
    low, high = np.empty(len(part)), np.empty(len(part))
    for one in range(MODEL_PARTS):
        others = errors.take(np.flatnonzero(part != one))
        widths = fit_widths(without_slow_engine(published, others, values))
        low[part == one], high[part == one] = factors(errors.features[part == one], widths)
    runs = published.runs.take(errors.row)
    predicted = published.step_s[errors.row] / np.exp(errors.log_ratio)
    rows = from_values(read_constants(), values).rows(runs)
    _, low_s, high_s = apply_bounds(runs, rows, predicted, predicted * low, predicted * high)
    return low_s / predicted, high_s / predicted


def print_scores(published: Published, errors: Errors, low: np.ndarray, high: np.ndarray) -> None:
    """By fold, table and (for folds by scale) GPUs: rows, error, coverage and width of the intervals."""
    gpus, ratio = published.runs.gpus[errors.row], np.exp(errors.log_ratio)
    print("\nerrors in percent: median, 90th percentile; predicted/measured; 90% intervals: covered, high/low")
    for fold in FOLDS:
        print(f"{fold.name}")
        for table in np.unique(errors.table[errors.fold == fold.name]):
            rows = (errors.fold == fold.name) & (errors.table == table)
            by_gpus = [rows & (gpus == one) for one in np.unique(gpus[rows])] if fold.name.startswith("beyond") else []
            for some in [rows, *(one for one in by_gpus if one.sum() >= MIN_ROWS)]:
                error = 100 * np.abs(1 / ratio[some] - 1)
                covered = np.mean((low[some] <= ratio[some]) & (ratio[some] <= high[some]))
                where = table if some is rows else f"  {gpus[some][0]:.0f} GPUs"
                print(
                    f"  {where:20} {some.sum():5} {np.median(error):6.1f} {np.percentile(error, 90):6.1f} "
                    f"{np.median(1 / ratio[some]):6.2f} {100 * covered:6.0f} {np.median(high[some] / low[some]):6.2f}"
                )


def write(
    published: Published,
    values: Mapping[str, float],
    errors: Errors,
    ends: tuple[np.ndarray, np.ndarray],
) -> None:
    """Write constants.csv, intervals.csv and cross_validated.csv."""
    rows = []
    for one in read_constants():
        fitted = [f"{x:g}" for x in (one.prior, one.spread, one.low, one.high)] if one.is_fitted else [""] * 4
        rows.append([one.quantity, one.key, f"{values.get(one.name, one.value):.5g}", *fitted, one.source])
    _write_table("constants", ["quantity", "key", "value", "prior", "spread", "low", "high", "source"], rows)
    widths = fit_widths(without_slow_engine(published, errors, values))
    pairs = zip(FEATURES, widths["low"], widths["high"], strict=True)
    _write_table("intervals", ["feature", "low", "high"], [[name, f"{a:.4f}", f"{b:.4f}"] for name, a, b in pairs])
    away, low, high = distance(errors.features), *ends
    rows = []
    for at, row in enumerate(errors.row):
        measured = published.step_s[row]
        predicted = measured / np.exp(errors.log_ratio[at])
        times = (measured, predicted, predicted * low[at], predicted * high[at])
        where = [errors.fold[at], published.key[row], published.group[row], f"{published.runs.gpus[row]:.0f}"]
        rows.append([*where, *(f"{value:.5g}" for value in times), f"{away[at]:.3g}"])
    columns = ["fold", "key", "table", "gpus", "measured_s", "predicted_s", "low_s", "high_s", "distance"]
    _write_table("cross_validated", columns, rows)


def _write_table(name: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with (DATA / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header)
        out.writerows(rows)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--write", action="store_true", help="write constants, intervals and predictions")
    is_writing = arguments.parse_args().write
    published, begun = load_published(), time.perf_counter()
    everything = np.ones(len(published.runs), dtype=bool)
    values = fit_time(published, everything) | fit_memory(published, everything)
    print(f"{len(published.runs)} rows, {len(values)} fitted constants, {time.perf_counter() - begun:.0f} s to fit")
    for constant in FITTED:
        print(f"  {constant.name:32} {values[constant.name]:<10.4g} from {constant.prior:g}")
    unstable = find_unstable(published, values)
    by_fold = [cross_validate(published, fold, unstable) for fold in FOLDS]
    names = ("row", "fold", "table", "log_ratio", "features")
    errors = Errors(*(np.concatenate([getattr(one, name) for one in by_fold]) for name in names))
    ends = unseen_ends(published, errors, values)
    print_scores(published, errors, *ends)
    print(f"{time.perf_counter() - begun:.0f} s")
    if is_writing:
        write(published, values, errors, ends)


if __name__ == "__main__":
    main()
