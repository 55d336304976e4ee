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
from functools import cached_property

import numpy as np
import pandas as pd
from folds import FOLDS, MODEL_PARTS, Fold, model_parts
from scipy.optimize import least_squares

from labkit.scaling import DATA, memory
from labkit.scaling.constants import Constant, Rows, from_values, read_constants
from labkit.scaling.intervals import (
    DISTANCES,
    OTHERS,
    SLOWER,
    Widths,
    find_ends,
    has_open_engine,
    is_elsewhere,
    measure_distances,
    measure_ground,
    sum_distances,
    sum_widths,
)
from labkit.scaling.prediction import FITS_SHARE, UNSTABLE_SHARE, predict_runs, soft_l1
from labkit.scaling.published import (
    WITHOUT_FRAMEWORK,
    WITHOUT_MODEL,
    Published,
    arrangement,
    distinct,
    held_out_s,
    load_published,
)
from labkit.scaling.runs import Runs
from labkit.scaling.scores import judge, summarize
from labkit.scaling.search import PROPOSED, preference_s
from labkit.scaling.step_time import predict_step_s, slow_engine_s

NOISE = 0.08
"""Errors below this count as squares, above as absolute values."""
EVALUATIONS = 12
MARGIN = 0.01
COVERED, LEAST = 0.9, 0.85
"""Shares of left-out rows that intervals are to hold: of all, and of each table."""
LEVELS = [level / 200 for level in range(180, 198)]
"""Shares of the rows that a width is fitted to, to choose from: it holds fewer of those that it has not seen."""
MIN_ROWS = 30
"""Rows of a table with widths of its own, that judge a distance alone, or to be scored apart."""
NONE = (0.0, 0.0)
TABLES = "tables"
"""What the level of all tables' widths is called."""
JUDGES: Mapping[str, tuple[str, ...]] = {
    "tensor_over_nodes": (WITHOUT_MODEL, "without the run"),
    "unstable": (WITHOUT_MODEL, "without the run"),
    "gpus": (
        *("beyond 64 GPUs", "beyond 32 GPUs", "beyond 512 GPUs", "without the largest scale"),
        "without the source, beyond 64 GPUs",
    ),
    "outside": ("without the largest models", "beyond 8192 tokens", "without the sharding"),
    "hardware": ("without the GPU", "without the GPU generation"),
    "framework": (WITHOUT_FRAMEWORK,),
}
"""Distances in the order in which their widths are fitted, with the folds that judge them."""
LARGE = 1000
"""GPUs from which on runs are scored apart."""
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
    """Rows that folds left out, (n,): fold, table and part of each, its prediction, and where it lies."""

    row: np.ndarray
    fold: np.ndarray
    table: np.ndarray
    home: np.ndarray
    """Table with the widths of a row; `OTHERS` if the fold had left it out."""
    is_elsewhere: np.ndarray
    """Whether the fold had left the table out, and not its framework: too few frameworks to leave one out twice."""
    parts: np.ndarray
    """By model and by table, (2, n): rows of a part are judged by widths that saw none of it."""
    predicted_s: np.ndarray
    low: np.ndarray
    """ln(predicted / measured); nan for a run that a slow engine may explain."""
    high: np.ndarray
    """ln(measured / predicted), without the slow engine's time; nan for a run of two engines that had the fast one."""
    distances: Mapping[str, np.ndarray]
    runs: Runs
    """As the folds predict them."""

    @cached_property
    def weight(self) -> np.ndarray:
        """Weights of the rows: each table counts with the square root of its rows in a fold."""
        _, codes, counts = np.unique(np.char.add(self.fold, self.table), return_inverse=True, return_counts=True)
        return counts[codes] ** -0.5


def cross_validate(published: Published, fold: Fold, is_unstable: np.ndarray) -> dict[str, np.ndarray]:
    """Every timed row that a part of the fold leaves out, predicted by constants fitted to the others; by column."""
    parts = []
    for is_judged, is_hidden in fold.parts(published):
        judged = is_judged & published.is_timed
        if judged.any():
            runs, ground = fold.hide(published.runs.take(judged)), measure_ground(published, ~is_hidden)
            columns = {
                "row": np.flatnonzero(judged),
                "predicted_s": seconds(runs, fit_time(published, ~is_hidden)),
                "is_elsewhere": is_elsewhere(runs, ground),
            }
            parts.append(columns | measure_distances(runs, ground, is_unstable[judged]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def home_tables(published: Published) -> list[str]:
    """Tables with enough rows, of several models, for widths of their own."""
    rows = pd.DataFrame({"table": published.group, "part": model_parts(published)})[published.is_timed]
    counts = rows.groupby("table")["part"].agg(["size", "nunique"])
    return counts.index[(counts["size"] >= MIN_ROWS) & (counts["nunique"] > 1)].tolist()


def collect_errors(published: Published, values: Mapping[str, float]) -> Errors:
    """The errors of all folds; `values` are the constants fitted to all rows."""
    stages = memory.stages(published.runs, constant_rows(published.runs, values))
    is_unstable = stages.peak_gib > UNSTABLE_SHARE * published.runs.memory_gib
    judged = [(fold, cross_validate(published, fold, is_unstable)) for fold in FOLDS]
    columns = {name: np.concatenate([some[name] for _, some in judged]) for name in judged[0][1]}
    row, predicted, measured = columns["row"], columns["predicted_s"], published.step_s[columns["row"]]
    hidden = [fold.hide(published.runs.take(some["row"])).origin for fold, some in judged]
    runs = Runs([run for some in hidden for run in some])
    rows = constant_rows(runs, values)
    slower, is_open = slow_engine_s(runs, rows), has_open_engine(runs, rows)
    is_slow = is_open & (measured - predicted > 0.5 * slower)
    faster = np.maximum(measured - np.where(is_slow, slower, 0.0), 1e-9)
    tables = np.unique(published.group, return_inverse=True)[1]
    return Errors(
        row=row,
        fold=np.concatenate([np.full(len(some["row"]), fold.name) for fold, some in judged]),
        table=published.group[row],
        home=np.where(columns["is_elsewhere"] | ~np.isin(runs.table, home_tables(published)), OTHERS, runs.table),
        is_elsewhere=columns["is_elsewhere"] & (columns["framework"] == 0),
        parts=np.stack([model_parts(published), tables % MODEL_PARTS])[:, row],
        predicted_s=predicted,
        low=np.where(is_slow, np.nan, np.log(predicted / measured)),
        high=np.where(is_open & ~is_slow, np.nan, np.log(faster / predicted)),
        distances={name: columns[name] for name in DISTANCES},
        runs=runs,
    )


def fit_widths(errors: Errors, chosen: np.ndarray, levels: Mapping[str, float]) -> Widths:
    """Widths of what has a level, from a mask of rows, one by one: each holds what those before leave out."""
    widths = dict.fromkeys((OTHERS, *DISTANCES), NONE)
    for name, level in levels.items():
        rows = chosen & is_judged(errors, name)
        if name != TABLES:
            widths[name] = fit_width(errors, rows, widths, name, level)
            continue
        for table in np.unique(errors.home[rows]).tolist():
            ends = [end[rows & (errors.home == table) & np.isfinite(end)] for end in (errors.low, errors.high)]
            widths[table] = tuple(quantile(end, np.ones(len(end)), (1 + level) / 2) for end in ends)
    return widths


def fit_width(errors: Errors, rows: np.ndarray, widths: Widths, name: str, level: float) -> tuple[float, float]:
    """The least width per unit of a distance that holds this share of its folds; a quantile regression through zero."""
    if not rows.any():
        return NONE
    amount = errors.distances[name][rows]
    inside = sum_widths(errors.home, errors.distances, widths)
    low, high = ((error - end)[rows] / amount for error, end in zip((errors.low, errors.high), inside, strict=True))
    excess, level = (high, (1 + level) / 2) if name in SLOWER else (np.fmax(low, high), level)
    width = max(quantile(np.nan_to_num(excess, nan=-np.inf), errors.weight[rows] * amount, level), 0.0)
    return (0.0 if name in SLOWER else width, width)


def is_judged(errors: Errors, name: str) -> np.ndarray:
    """Rows that judge a width: the table's, or its folds' at this distance, and at no later one if enough are."""
    if name == TABLES:
        is_far = sum(errors.distances[one] for one in (*SLOWER, "framework")) > 0
        return (errors.fold == WITHOUT_MODEL) & ~errors.is_elsewhere & ~is_far
    rows = np.isin(errors.fold, JUDGES[name]) & (errors.distances[name] > 0)
    names = list(JUDGES)
    later = sum((errors.distances[one] for one in names[names.index(name) + 1 :]), np.zeros(len(rows)))
    return rows & (later == 0) if (rows & (later == 0)).sum() >= MIN_ROWS else rows


def quantile(values: np.ndarray, weights: np.ndarray, level: float) -> float:
    """The least value that has this share of the weights at or below it."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, level)), len(values) - 1)])


def fit_without(errors: Errors, levels: Mapping[str, float]) -> Iterator[tuple[np.ndarray, Widths]]:
    """Yield every part's rows, (n,), with widths that saw none of them.

    Parts are models, or tables for the rows of folds that leave tables out.
    """
    for part, rows in zip(errors.parts, (~errors.is_elsewhere, errors.is_elsewhere), strict=True):
        for one in range(MODEL_PARTS):
            yield rows & (part == one), fit_widths(errors, part != one, levels)


def unseen_exponents(errors: Errors, levels: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Both ends' exponents by widths that saw no row of the same part."""
    low, high = np.empty(len(errors.row)), np.empty(len(errors.row))
    for unseen, widths in fit_without(errors, levels):
        ends = sum_widths(errors.home, errors.distances, widths)
        low[unseen], high[unseen] = ends[0][unseen], ends[1][unseen]
    return low, high


def find_widest(errors: Errors, levels: Mapping[str, float]) -> Widths:
    """Each width as the largest of the fits that leave a part out: answers are no narrower than what is scored."""
    widths = [some for _, some in fit_without(errors, levels)]
    names = (*np.unique(errors.home).tolist(), *DISTANCES)
    return {name: tuple(np.max([some.get(name, NONE) for some in widths], axis=0).tolist()) for name in names}


def find_levels(errors: Errors) -> dict[str, float]:
    """For tables and each distance the least level at which widths hold `COVERED` of unseen rows that judge them.

    Rows of a distance count alike, and as `Errors.weight` says: both shares must reach it. A distance also has to hold
    `LEAST` of each fold, table and number of GPUs with `MIN_ROWS`, where a level reaches that.
    """
    levels: dict[str, float] = {}
    for name in (TABLES, *JUDGES):
        rows = is_judged(errors, name)
        cells, weights = [some[rows] for some in (errors.fold, errors.table, errors.runs.gpus)], errors.weight[rows]
        shares: dict[float, tuple[float, float]] = {}
        for level in LEVELS:
            low, high = unseen_exponents(errors, levels | {name: level})
            is_inside = ~((errors.low > low) | (errors.high > high))[rows]
            by_cell = pd.Series(is_inside).groupby(cells).agg(["size", "mean"])
            least = by_cell[by_cell["size"] >= MIN_ROWS]["mean"].min()
            share = (
                is_inside.mean() if name == TABLES else min(is_inside.mean(), np.average(is_inside, weights=weights))
            )
            shares[level] = share, least
            if share >= COVERED and (least >= LEAST or name == TABLES):
                break
        enough = [level for level, (share, _) in shares.items() if share >= COVERED]
        in_each = [level for level in enough if shares[level][1] >= LEAST]
        levels[name] = (in_each or enough or [LEVELS[-1]])[0]
        share, least = shares[levels[name]]
        print(f"  {name:18} level {levels[name]:.3f}: {share:.1%} of {rows.sum()} rows, {least:.1%} in the least cell")
    return levels


def make_scores(published: Published, errors: Errors, ends: Sequence[np.ndarray]) -> pd.DataFrame:
    """The rows of cross_validated.csv."""
    where = {"fold": errors.fold, "key": published.key[errors.row], "table": errors.table}
    gpus, measured = published.runs.gpus[errors.row].astype(int), published.step_s[errors.row]
    times = {"measured_s": measured, "predicted_s": errors.predicted_s, "low_s": ends[0], "high_s": ends[1]}
    return pd.DataFrame({**where, "gpus": gpus, **times, "distance": sum_distances(errors.distances)})


def print_scores(rows: pd.DataFrame) -> None:
    """By fold; by fold and table; of folds by scale by GPUs as well; and of all runs on 1,000 GPUs or more."""
    by_scale, large = rows[rows["fold"].str.startswith("beyond")], rows[rows["gpus"] >= LARGE]
    for some, *by in ((rows, "fold"), (rows, "fold", "table"), (by_scale, "fold", "table", "gpus"), (large, "fold")):
        scores = summarize(some, *by)
        print(f"\n{scores[scores['rows'] >= (MIN_ROWS if len(by) > 2 else 1)].round(1).to_string()}")


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


def write(published: Published, values: Mapping[str, float], widths: Widths, scores: pd.DataFrame) -> None:
    """Write constants.csv, intervals.csv, cross_validated.csv and chosen_layouts.csv."""
    constants = pd.read_csv(DATA / "constants.csv", dtype=str, keep_default_na=False)
    names = constants["quantity"] + "." + constants["key"]
    new = [
        f"{values[name]:.5g}" if name in values else value
        for name, value in zip(names, constants["value"], strict=True)
    ]
    constants.assign(value=new).to_csv(DATA / "constants.csv", index=False)
    rows = [(name, *ends) for name, ends in widths.items()]
    intervals = pd.DataFrame(rows, columns=["width", "low", "high"])
    intervals.to_csv(DATA / "intervals.csv", index=False, float_format="%.4f")
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
    errors = collect_errors(published, values)
    levels = find_levels(errors)
    exponents = unseen_exponents(errors, levels)
    ends = find_ends(errors.runs, constant_rows(errors.runs, values), errors.predicted_s, exponents)
    scores = make_scores(published, errors, ends[1:])
    print_scores(judge(scores))
    if is_writing:
        write(published, values, find_widest(errors, levels), scores)
    print(f"\npercent behind the best measured layout\n{summarize_families(published).to_string()}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
