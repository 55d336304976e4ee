"""Fits the constants of `labkit.scaling` to the published runs, and prints how wrong the predictor is.

    python benchmarks/fit_scaling.py            the scoreboard, some ten minutes on one core
    python benchmarks/fit_scaling.py --write    also labkit/scaling/fitted.json and the cross-validated predictions

Cross-validation leaves whole models out: the six folds hold every sixth architecture. "never seen" leaves out a
framework with all its rows and tables, "three rows" then calibrates with three of its rows, drawn ten times.
Every row counts in the scoreboard. The objective is ln(predicted / measured) with a soft L1 loss, so that a step of
45 times its time does not bend the constants, and each group counts with the square root of its rows. What layouts are
chosen by these predictions `choose_layouts.py` says.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from labkit.scaling import intervals, memory
from labkit.scaling.calibration import calibrate
from labkit.scaling.constants import FITTED_FILE, Constants, Seen, table_of
from labkit.scaling.declared import FITTED, OF_MEMORY, PARENTS, Constant
from labkit.scaling.prediction import FITS_SHARE, UNSTABLE_SHARE
from labkit.scaling.runs import Run, Runs
from labkit.scaling.scoring import FOLDS, folds, interval_90
from labkit.scaling.step_time import breakdown, step_s
from labkit.scaling.table import read_rows

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data" / "reference" / "scaling"
NOISE = 0.08
"""Errors below this count as squares, above as absolute values."""
EVALUATIONS = 40
MARGIN = 0.01
DRAWS = 10
FAMILIES = {"vtrain": ("vtrain", "vtrain_node", "megatron"), "nemo": ("nemo", "maxtext")}
"""Left out together as one framework: they share code, and some constants."""
TARGETS = {
    "nanotron": (8, 28), "vtrain_multinode": (4.5, 20), "vtrain_singlenode": (4, 14), "mosaic": (3, 9),
    "dgxc": (2.5, 9), "megatron": (3.5, 7), "torchtitan": (8, 17), "fms": (5, np.inf),
}  # fmt: skip

STEP_CONSTANTS = [constant for constant in FITTED if constant.quantity not in OF_MEMORY]
MEMORY_CONSTANTS = [constant for constant in FITTED if constant.quantity in OF_MEMORY]


class Published:
    """The published rows as columns: `runs`, and what was measured of them (nan where it was not)."""

    def __init__(self) -> None:
        rows = read_rows(DATA / "training_runs.csv")
        refused = [f"line {row.line}: {row.refusal}" for row in rows if row.run is None]
        if refused:
            raise SystemExit("\n".join(refused))
        self.runs = Runs.of([row.run for row in rows if row.run is not None])
        self.line = np.array([row.line for row in rows])
        self.group = np.array([row.cells["group"] for row in rows])
        self.model = np.array([row.cells["model"] for row in rows])
        self.is_ok = np.array([row.cells["status"] == "ok" for row in rows])
        self.step_s, self.allocated_gib, self.reserved_gib = (
            np.array([float(row.cells[name] or "nan") for row in rows])
            for name in ("step_s", "peak_allocated_gib", "peak_reserved_gib")
        )
        self.timed = np.isfinite(self.step_s)
        self.fold = folds(self.runs)


def soft(errors: np.ndarray) -> np.ndarray:
    """What, squared, is twice the soft L1 loss."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def as_constants(fitted: Mapping[str, float]) -> Constants:
    """Constants to predict times with; of intervals they know nothing."""
    seen: Seen = {"architectures": [], "frameworks": [], "gpus": np.inf, "seq_len": np.inf, "cp": np.inf, "shards": []}
    return Constants(table_of(fitted), {"never seen": [0.0] * 4, "calibrated": [0.0] * 4}, seen, PARENTS)


def fit(
    constants: Sequence[Constant],
    errors: Callable[[Mapping[str, float]], np.ndarray],
) -> dict[str, float]:
    """Maximum a posteriori of the logarithms of these constants; `errors` takes their values by name.

    It always starts at the declared values: from a fit to all rows it would not quite leave what those rows told.
    """
    prior = np.log([constant.value for constant in constants])
    spread = np.array([constant.spread for constant in constants])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(_named(constants, logs)), (logs - prior) / spread])

    found = least_squares(residuals, prior, max_nfev=EVALUATIONS, x_scale="jac", diff_step=1e-4)
    return _named(constants, found.x)


def _named(constants: Sequence[Constant], logs: np.ndarray) -> dict[str, float]:
    return {constant.name: float(value) for constant, value in zip(constants, np.exp(logs), strict=True)}


def fit_steps(published: Published, mask: np.ndarray) -> dict[str, float]:
    """Constants of time from the timed rows of `mask`."""
    mask = mask & published.timed
    runs, measured = published.runs.take(mask), published.step_s[mask]
    _, codes, counts = np.unique(published.group[mask], return_inverse=True, return_counts=True)
    weight = counts[codes] ** -0.25
    weight /= weight.mean()

    def errors(fitted: Mapping[str, float]) -> np.ndarray:
        return soft(weight * np.log(seconds(runs, fitted) / measured) / NOISE)

    return fit(STEP_CONSTANTS, errors)


def seconds(runs: Runs, fitted: Mapping[str, float]) -> np.ndarray:
    return step_s(breakdown(runs, as_constants(fitted).rows(runs)))


def fit_memory(published: Published, mask: np.ndarray) -> dict[str, float]:
    """Constants of memory: reserved of the first stage; that what ran fits, and what ran out does not."""
    runs, is_ok, reserved = published.runs.take(mask), published.is_ok[mask], published.reserved_gib[mask]
    measured = is_ok & np.isfinite(reserved)

    def errors(fitted: Mapping[str, float]) -> np.ndarray:
        stages = memory.stages(runs, as_constants(fitted).rows(runs))
        first = stages.reserved[:, 0] / memory.GIB
        over = np.log(stages.peak_gib / (FITS_SHARE * runs.memory_gib))
        return np.concatenate(
            [
                soft(np.log(first / reserved)[measured] / NOISE),
                soft(np.maximum(0, over + MARGIN)[is_ok] / NOISE),
                0.7 * soft(np.maximum(0, MARGIN - over)[~is_ok] / NOISE),
            ]
        )

    return fit(MEMORY_CONSTANTS, errors)


def cross_validated(published: Published) -> np.ndarray:
    """Seconds of every timed row, from constants that never saw its model."""
    found = np.full(len(published.runs), np.nan)
    for fold in range(FOLDS):
        out = (published.fold == fold) & published.timed
        found[out] = seconds(published.runs.take(out), fit_steps(published, published.fold != fold))
    return found


def never_seen(published: Published) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every timed row with its framework left out; and calibrated with three rows, (DRAWS, n)."""
    blind, calibrated = (np.full((draws, len(published.runs)), np.nan) for draws in (1, DRAWS))
    framework, rng = published.runs.framework, np.random.default_rng(0)
    family = np.array([next((name for name, has in FAMILIES.items() if one in has), one) for one in framework])
    rows = read_rows(DATA / "training_runs.csv")
    for name in np.unique(family):
        out = (family == name) & published.timed
        constants = as_constants(fit_steps(published, family != name))
        for group in np.unique(published.group[out]):
            own = np.flatnonzero(out & (published.group == group))
            as_unknown = [_renamed(rows[row].run, "generic") for row in own]
            columns = Runs.of(as_unknown)
            blind[0, own] = step_s(breakdown(columns, constants.rows(columns)))
            if len(own) <= 6:
                continue
            for draw in range(DRAWS):
                chosen = rng.choice(len(own), 3, replace=False)
                some = [as_unknown[at] for at in chosen]
                profile = calibrate(some, published.step_s[own[chosen]].tolist(), constants=constants)
                adapted = constants.with_profile(profile)
                mine = Runs.of([_renamed(run, profile.name) for run in as_unknown])
                rest = np.setdiff1d(np.arange(len(own)), chosen)
                calibrated[draw, own[rest]] = step_s(breakdown(mine, adapted.rows(mine)))[rest]
    return blind[0], calibrated


def _renamed(run: Run, framework: str) -> Run:
    return replace(run, framework=framework)


def percent(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return 100 * np.abs(predicted / measured - 1)


def spread_of(errors: np.ndarray) -> str:
    errors = errors[np.isfinite(errors)]
    return f"{np.median(errors):5.1f} /{np.mean(errors):5.1f} /{np.percentile(errors, 90):5.1f}" if len(errors) else "-"


def unstable_of(published: Published, fitted: Mapping[str, float]) -> np.ndarray:
    stages = memory.stages(published.runs, as_constants(fitted).rows(published.runs))
    return stages.peak_gib > UNSTABLE_SHARE * published.runs.memory_gib


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--write", action="store_true", help="write fitted.json and the cross-validated predictions")
    write = arguments.parse_args().write
    published, begun = Published(), time.perf_counter()
    everything = np.ones(len(published.runs), dtype=bool)
    steps = fit_steps(published, everything)
    fitted = steps | fit_memory(published, everything)
    print(f"{len(published.runs)} rows, {len(fitted)} fitted constants, {time.perf_counter() - begun:.0f} s to fit")
    for constant in FITTED:
        print(f"  {constant.name:32} {fitted[constant.name]:<10.4g} from {constant.value:g}")
    held_out = cross_validated(published)
    blind, three = never_seen(published)
    residuals, unstable = np.log(published.step_s / held_out), unstable_of(published, fitted)
    low, high = interval_90(published.runs, published.fold, residuals, unstable, as_constants({}))
    covered = np.where(published.timed, (low <= residuals) & (residuals <= high), np.nan)
    scoreboard(published, seconds(published.runs, steps), held_out, blind, three, covered)
    scoreboard_of_memory(published)
    timed = published.timed
    regime = intervals.regimes(published.runs, unstable)
    quantiles = intervals.quantiles_by_group(published.runs.framework[timed], regime[timed], residuals[timed])
    for name, seen in (("never seen", blind), ("calibrated", three[0])):
        rows = timed & np.isfinite(seen)
        ratios = np.log(published.step_s / seen)[rows]
        quantiles[name] = intervals.conformal(intervals.alike(published.group[rows], ratios))
    seen: Seen = {
        "architectures": sorted(set(published.runs.architecture[timed].tolist())),
        "frameworks": sorted(set(published.runs.framework[timed].tolist())),
        "gpus": float(published.runs.gpus[timed].max()),
        "seq_len": float(published.runs.seq_len[timed].max()),
        "cp": float(published.runs.cp[timed].max()),
        "shards": sorted(set(published.runs.shard[timed].tolist())),
    }
    print(f"{time.perf_counter() - begun:.0f} s")
    if write:
        rounded = {name: float(f"{value:.4g}") for name, value in fitted.items()}
        shown = {name: [round(value, 4) for value in values] for name, values in quantiles.items()}
        FITTED_FILE.write_text(json.dumps({"constants": rounded, "residuals": shown, "seen": seen}, indent=1) + "\n")
        write_cross_validated(published, held_out, blind)


def scoreboard(
    published: Published,
    inside: np.ndarray,
    held_out: np.ndarray,
    blind: np.ndarray,
    three: np.ndarray,
    covered: np.ndarray,
) -> None:
    print("\nerror of step_s in percent, median / mean / 90th percentile; coverage of 90 % intervals")
    titles = ("in sample", "model left out", "framework never seen", "three rows of it")
    print(f"{'group':18} {'rows':>5} {'target':>7} " + "".join(f"{title:24}" for title in titles) + "covered")
    for group, (median, ninth) in TARGETS.items():
        own = published.timed & (published.group == group)
        columns = (inside[own], held_out[own], blind[own], three[:, own])
        cells = [f"{spread_of(percent(column, published.step_s[own]).ravel()):24}" for column in columns]
        target = f"{median:g}/{ninth:g}"
        print(f"{group:18} {own.sum():5} {target:>7} {''.join(cells)}{np.nanmean(covered[own]):.1%}")
    print(f"{'all':18} {published.timed.sum():5} covered {np.nanmean(covered):.1%}")


def scoreboard_of_memory(published: Published) -> None:
    print("\nmemory: allocated and reserved in percent, median / mean / 90th; out of memory told right")
    nanotron = published.group == "nanotron"
    held = {name: np.full(len(published.runs), np.nan) for name in ("allocated", "first", "peak")}
    for fold in range(FOLDS):
        out = published.fold == fold
        constants = as_constants(fit_memory(published, ~out))
        runs = published.runs.take(out)
        stages = memory.stages(runs, constants.rows(runs))
        held["allocated"][out], held["first"][out] = (
            stages.allocated[:, 0] / memory.GIB,
            stages.reserved[:, 0] / memory.GIB,
        )
        held["peak"][out] = stages.peak_gib
    for title, own in (("nanotron", nanotron), ("all", np.ones(len(nanotron), dtype=bool))):
        right = (held["peak"] > FITS_SHARE * published.runs.memory_gib) == ~published.is_ok
        a = spread_of(percent(held["allocated"], published.allocated_gib)[own])
        r = spread_of(percent(held["first"], published.reserved_gib)[own])
        print(f"{title:10} allocated {a}   reserved {r}   right {right[own].mean():.1%}")


def write_cross_validated(published: Published, held_out: np.ndarray, blind: np.ndarray) -> None:
    with (DATA / "cross_validated.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["line", "step_s", "model_left_out_s", "framework_left_out_s"])
        for row in np.flatnonzero(published.timed):
            out.writerow([published.line[row], published.step_s[row], f"{held_out[row]:.5g}", f"{blind[row]:.5g}"])


if __name__ == "__main__":
    main()
