"""Fits the constants of `labkit.scaling` to the published runs, and prints how wrong its predictions are.

    python benchmarks/fit_scaling.py            the scoreboard
    python benchmarks/fit_scaling.py --write    also constants, intervals and predictions in data/reference/scaling/

Folds leave out all runs on more than 64 or 32 GPUs, each table's largest model, whole frameworks, GPU generations, ways
of sharding, or models (`folds.py`). Intervals are judged on models that their widths had not seen.
The objective is ln(predicted / measured) with a soft L1 loss, so that an outlier does not bend the constants; each
published table counts with the square root of its rows.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from folds import FOLDS, MODEL_PARTS, Fold, model_parts
from scipy.optimize import least_squares, linprog
from scipy.sparse import csr_matrix, hstack, identity

from labkit.scaling import DATA, memory
from labkit.scaling.calibration import soft_l1
from labkit.scaling.constants import Constant, Rows, from_values, read_constants
from labkit.scaling.intervals import FEATURES, FLOORS, distance, features, measure_ground
from labkit.scaling.prediction import (
    FITS_SHARE,
    UNSTABLE_SHARE,
    find_ends,
    has_open_engine,
    predict_runs,
)
from labkit.scaling.published import WITHOUT_MODEL, Published, arrangement, held_out_s, load_published
from labkit.scaling.runs import Runs
from labkit.scaling.search import PROPOSED, distinct, preference_s
from labkit.scaling.step_time import predict_step_s, slow_engine_s

NOISE = 0.08
"""Errors below this count as squares, above as absolute values."""
EVALUATIONS = 12
MARGIN = 0.01
LEVEL, COVERED = 0.965, 0.95
"""Quantile of both ends' regressions, and the least share inside each end in a table of a fold."""
MIN_ROWS, MAX_ROWS = 30, 100
"""Of a table in a fold: to demand that share, and at most in a regression."""
ROUNDS, GAIN = 7, 4.0
"""Of weighing tables up whose rows lie outside too often."""
MIN_LAYOUTS = 4
"""Measured layouts of a model on a number of GPUs, to judge which one is proposed."""
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


def constant_rows(runs: Runs, values: Mapping[str, float]) -> Rows:
    return from_values(read_constants(), values).rows(runs)


def seconds(runs: Runs, values: Mapping[str, float]) -> np.ndarray:
    return predict_step_s(runs, constant_rows(runs, values))


def fit_memory(published: Published) -> dict[str, float]:
    """Constants of memory: reserved memory of the first stage; what ran must fit, and what ran out must not."""
    runs, is_ok, reserved = published.runs, published.is_ok, published.reserved_gib
    is_measured = is_ok & np.isfinite(reserved)

    def errors(values: Mapping[str, float]) -> np.ndarray:
        stages = memory.stages(runs, constant_rows(runs, values))
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


@dataclass(frozen=True, eq=False)
class Errors:
    """Held-out rows, their predicted seconds and features, the fold and table of each, and the runs as predicted."""

    row: np.ndarray
    fold: np.ndarray
    table: np.ndarray
    predicted_s: np.ndarray
    features: np.ndarray
    is_hidden: np.ndarray
    """Whether the fold hides the framework."""


def cross_validate(published: Published, fold: Fold, is_unstable: np.ndarray) -> Errors:
    """Every timed row that a part of the fold leaves out, predicted by constants fitted to the others."""
    parts = []
    for is_judged in fold.parts(published):
        judged = is_judged & published.is_timed
        if judged.any():
            runs = fold.hide(published.runs.take(judged))
            columns = features(runs, measure_ground(published, ~is_judged), is_unstable[judged])
            names = (np.full(len(runs), fold.name), published.group[judged])
            predicted = seconds(runs, fit_time(published, ~is_judged))
            parts.append((np.flatnonzero(judged), *names, predicted, columns, np.full(len(runs), fold.hides_framework)))
    return Errors(*(np.concatenate(list(some)) for some in zip(*parts, strict=True)))


class Intervals:
    """Quantile regressions of errors on their features, so that each table of each fold has its share inside."""

    def __init__(self, published: Published, errors: Errors, values: Mapping[str, float]) -> None:
        runs = published.runs.take(errors.row)
        hidden = [replace(run, framework="generic") for run in runs.origin]
        self.runs = Runs(
            [b if is_hidden else a for a, b, is_hidden in zip(runs.origin, hidden, errors.is_hidden, strict=True)]
        )
        self.rows = constant_rows(self.runs, values)
        self.errors, self.measured = errors, published.step_s[errors.row]
        self.part = model_parts(published)[errors.row]
        _, self.cell = np.unique(np.char.add(errors.fold, errors.table), return_inverse=True)

    def fit(self, chosen: np.ndarray) -> dict[str, np.ndarray]:
        """Coefficients of both ends in the order of `FEATURES`, from a mask of rows.

        Of runs that may have had a slow engine, each end is fitted to those that had its engine.
        """
        slower, is_open = slow_engine_s(self.runs, self.rows), has_open_engine(self.runs, self.rows)
        predicted = self.errors.predicted_s
        is_slow = is_open & (self.measured - predicted > 0.5 * slower)
        above = np.log(np.maximum(self.measured - np.where(is_slow, slower, 0.0), 1e-9) / predicted)
        rng = np.random.default_rng(0)
        order = [rng.permutation(np.flatnonzero(chosen & (self.cell == one))) for one in np.unique(self.cell[chosen])]
        rows = np.concatenate([some[:MAX_ROWS] for some in order])
        weight = np.concatenate(
            [np.full(len(some[:MAX_ROWS]), len(some) ** 0.5 / len(some[:MAX_ROWS])) for some in order]
        )
        ends = {"low": (~is_slow, np.log(predicted / self.measured)), "high": (~is_open | is_slow, above)}
        return {
            end: self._fit_end(rows[mask[rows]], values, weight[mask[rows]]) for end, (mask, values) in ends.items()
        }

    def _fit_end(self, rows: np.ndarray, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
        cell, count = self.cell[rows], np.bincount(self.cell[rows])
        for _ in range(ROUNDS):
            widths = _regress(self.errors.features[rows], values[rows], weight / weight.mean())
            is_inside = values[rows] <= self.errors.features[rows] @ widths + 1e-9
            missing = COVERED - np.bincount(cell, is_inside) / np.maximum(count, 1)
            missing = np.where(count >= MIN_ROWS, np.clip(missing, 0, 0.3), 0.0)
            weight = weight * np.exp(GAIN * missing)[cell]
        return widths

    def unseen_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Both ends of every row's interval in seconds, by widths that saw no row of its model."""
        low, high = np.empty(len(self.part)), np.empty(len(self.part))
        for one in range(MODEL_PARTS):
            rows = self.part == one
            ends = find_ends(self.runs, self.rows, self.errors.predicted_s, self.errors.features, self.fit(~rows))
            low[rows], high[rows] = ends[1][rows], ends[2][rows]
        return low, high


def _regress(columns: np.ndarray, values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The coefficients, none below its floor, that minimize the weighted pinball loss, as a linear program."""
    n, k = columns.shape
    equations = hstack([csr_matrix(columns), identity(n), -identity(n)]).tocsr()
    costs = np.concatenate([np.full(k, 1e-6), LEVEL * weight, (1 - LEVEL) * weight])
    bounds = [(FLOORS[name], None) for name in FEATURES] + [(0.0, None)] * (2 * n)
    return linprog(costs, A_eq=equations, b_eq=values, bounds=bounds, method="highs").x[:k]


def make_scores(published: Published, errors: Errors, ends: tuple[np.ndarray, np.ndarray]) -> pd.DataFrame:
    """The rows of cross_validated.csv."""
    where = {"fold": errors.fold, "key": published.key[errors.row], "table": errors.table}
    gpus, measured = published.runs.gpus[errors.row].astype(int), published.step_s[errors.row]
    times = {"measured_s": measured, "predicted_s": errors.predicted_s, "low_s": ends[0], "high_s": ends[1]}
    return pd.DataFrame({**where, "gpus": gpus, **times, "distance": distance(errors.features)})


def print_scores(rows: pd.DataFrame) -> None:
    """By fold, table and (for folds by scale) GPUs: rows, error, coverage and width of the intervals."""
    rows = rows.assign(
        error=100 * (rows["predicted_s"] / rows["measured_s"] - 1).abs(),
        covered=100 * rows["measured_s"].between(rows["low_s"], rows["high_s"]),
        width=rows["high_s"] / rows["low_s"],
    )
    columns = {
        "rows": ("error", "size"),
        "median": ("error", "median"),
        "p90": ("error", lambda errors: errors.quantile(0.9)),
        "covered": ("covered", "mean"),
        "width": ("width", "median"),
    }
    by_scale = rows[rows["fold"].str.startswith("beyond")]
    for table, keys in ((rows, ["fold"]), (rows, ["fold", "table"]), (by_scale, ["fold", "table", "gpus"])):
        scores = table.groupby(keys, sort=False).agg(**columns)
        print(f"\n{scores[scores['rows'] >= (MIN_ROWS if len(keys) > 2 else 1)].round(1).to_string()}")


def judge_families(published: Published) -> Iterator[dict[str, object]]:
    """Every model on a number of GPUs: percent behind its best measured layout; infinite for one out of memory.

    Times are predicted by constants fitted without the model.
    """
    runs, predictions, without_model = published.runs, predict_runs(published.runs), held_out_s(WITHOUT_MODEL)
    times = np.where(np.isfinite(without_model), without_model, predictions.step_s)
    preference = preference_s(replace(predictions, step_s=times))
    measured = np.where(published.is_ok, published.step_s, np.inf)
    keys = (published.group, published.model, runs.gpus, runs.global_batch, runs.seq_len, runs.precision)
    for _, rows in pd.DataFrame(dict(enumerate(keys))).groupby(list(range(len(keys)))):
        members = rows.index.to_numpy()
        order = [int(row) for row in members[np.argsort(preference[members], kind="stable")] if predictions.fits[row]]
        if np.isfinite(measured[members]).sum() < MIN_LAYOUTS or not order:
            continue
        chosen = distinct(order, lambda row: arrangement(runs.origin[row].layout), PROPOSED)
        sizes = runs.tp[members] * runs.pp[members]
        smallest = members[np.lexsort((-runs.micro_batch[members], sizes, ~predictions.fits[members]))[0]]
        behind = [100 * (measured[row] / np.nanmin(measured[members]) - 1) for row in (*chosen, smallest)]
        yield {
            "table": published.group[members[0]],
            "first": behind[0],
            "best_of_three": min(behind[:-1]),
            "smallest_that_fits": behind[-1],
        }


def summarize_families(published: Published) -> pd.DataFrame:
    """Percent behind the best measured layout, a mean over families by table."""
    families = pd.DataFrame(judge_families(published)).groupby("table")
    means = families.agg(lambda behind: behind[np.isfinite(behind)].mean()).round(1)
    out_of_memory = families["best_of_three"].agg(lambda behind: int(np.isinf(behind).sum()))
    return means.assign(families=families.size(), ran_out_of_memory=out_of_memory)


def write(
    published: Published, values: Mapping[str, float], widths: Mapping[str, np.ndarray], scores: pd.DataFrame
) -> None:
    """Write constants.csv, intervals.csv, cross_validated.csv and chosen_layouts.csv."""
    constants = pd.read_csv(DATA / "constants.csv", dtype=str, keep_default_na=False)
    names = constants["quantity"] + "." + constants["key"]
    new = [
        f"{values[name]:.5g}" if name in values else value
        for name, value in zip(names, constants["value"], strict=True)
    ]
    constants.assign(value=new).to_csv(DATA / "constants.csv", index=False)
    pd.DataFrame({"feature": FEATURES, **widths}).to_csv(DATA / "intervals.csv", index=False, float_format="%.4f")
    scores.to_csv(DATA / "cross_validated.csv", index=False, float_format="%.5g")
    held_out_s.cache_clear()
    summarize_families(published).to_csv(DATA / "chosen_layouts.csv")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--write", action="store_true", help="write constants, intervals and predictions")
    is_writing = arguments.parse_args().write
    published, begun = load_published(), time.perf_counter()
    values = fit_time(published, np.ones(len(published.runs), dtype=bool)) | fit_memory(published)
    print(f"{len(published.runs)} rows, {len(values)} fitted constants, {time.perf_counter() - begun:.0f} s to fit")
    for constant in FITTED:
        print(f"  {constant.name:32} {values[constant.name]:<10.4g} from {constant.prior:g}")
    stages = memory.stages(published.runs, constant_rows(published.runs, values))
    is_unstable = stages.peak_gib > UNSTABLE_SHARE * published.runs.memory_gib
    by_fold = [vars(cross_validate(published, fold, is_unstable)).values() for fold in FOLDS]
    errors = Errors(*map(np.concatenate, zip(*by_fold, strict=True)))
    intervals = Intervals(published, errors, values)
    scores = make_scores(published, errors, intervals.unseen_ends())
    print_scores(scores)
    if is_writing:
        write(published, values, intervals.fit(np.ones(len(errors.row), dtype=bool)), scores)
    print(f"\npercent behind the best measured layout\n{summarize_families(published).to_string()}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
