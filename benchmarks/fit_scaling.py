"""Fits the constants of `labkit.scaling` to the published runs, and prints how wrong its
predictions are.

    python benchmarks/fit_scaling.py            the scoreboard
    python benchmarks/fit_scaling.py --write    # also writes to data/reference/scaling/

Folds leave runs out by scale, size, source, framework, GPU, sharding and model (`folds.py`).
Intervals are judged on models that their widths had not seen. The objective is ln(predicted /
measured) with a soft L1 loss, so that an outlier does not bend the constants; each published table
counts with the square root of its rows.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from folds import Fold, make_folds, model_parts
from scipy.optimize import least_squares

from labkit.scaling import DATA, intervals, memory
from labkit.scaling.communication import old_pipeline_s
from labkit.scaling.constants import Constant, from_values, read_constants
from labkit.scaling.intervals import OTHERS, SLOPES, SLOWER, Widths
from labkit.scaling.prediction import FITS_SHARE, UNSTABLE_SHARE, predict_runs, soft_l1
from labkit.scaling.published import (
    WITHOUT_FRAMEWORK,
    WITHOUT_MODEL,
    held_out_s,
    is_timed,
    load_published,
    measure_ground,
)
from labkit.scaling.runs import Runs
from labkit.scaling.scores import judge, summarize
from labkit.scaling.search import PROPOSED, preference_s
from labkit.scaling.step_time import predict_step_s

NOISE = 0.08
"""Errors below this count as squares, above as absolute values."""
EVALUATIONS = 12
MARGIN = 0.01
COVERED = 0.9
LEAST = 0.88
LEAST_OF_FRAMEWORK = 0.82
"""Shares of left-out rows that intervals must hold: of each fold, and of its tables at each number
of GPUs. The last is for frameworks without published runs: with 0.88 nanotron alone would widen
them by another half."""
LEVELS = [level / 200 for level in range(180, 198)]
"""Shares of rows that a width may be fitted to: it holds fewer of those that it has not seen."""
MIN_ROWS = 30
"""Rows of a table with widths of its own, or of a group that is judged."""
TABLES = "tables"
"""Name of the level of all tables' widths."""
JUDGES: Mapping[str, tuple[str, ...]] = {
    TABLES: (WITHOUT_MODEL,),
    "unstable": (WITHOUT_MODEL, "without the run"),
    "scale": (
        *("beyond 64 GPUs", "beyond 32 GPUs", "beyond 512 GPUs", "without the largest scale"),
        "without the source, beyond 64 GPUs",
    ),
    "outside": (
        *("without the largest models", "beyond 8192 tokens", "without the sharding"),
        *("without the GPU", "without the GPU generation", WITHOUT_MODEL),
    ),
    "framework": (WITHOUT_FRAMEWORK,),
}
"""Folds that judge each slope."""
COLUMNS = [
    "fold",
    "key",
    "table",
    "gpus",
    "measured_s",
    "predicted_s",
    "low_s",
    "high_s",
    "distance",
]
"""Columns of cross_validated.csv."""
LARGE = 1000
"""GPUs from which on runs are scored apart."""
FAMILY = ["table", "name", "gpus", "global_batch", "seq_len", "precision"]
"""Columns of one training on one number of GPUs, whose published runs differ in their layouts."""
MIN_LAYOUTS = 4
"""Measured layouts of a family, to judge which one is proposed."""
MEMORY = {"activation_scale", "held_gathers"}
"""Fitted quantities that memory depends on, and time does not."""
FITTED = [constant for constant in read_constants() if constant.is_fitted]
TIME_CONSTANTS = [constant for constant in FITTED if constant.quantity not in MEMORY]
MEMORY_CONSTANTS = [constant for constant in FITTED if constant.quantity in MEMORY]


def fit(
    constants: Sequence[Constant], errors: Callable[[Mapping[str, float]], np.ndarray]
) -> dict[str, float]:
    """The most likely values of these constants, by name, from their priors and from `errors` of
    values by name."""
    prior = np.log([constant.prior for constant in constants])
    spread = np.array([constant.spread for constant in constants])

    def values(logs: np.ndarray) -> dict[str, float]:
        return {
            constant.name: float(value)
            for constant, value in zip(constants, np.exp(logs), strict=True)
        }

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(values(logs)), (logs - prior) / spread])

    bounds = np.log([[constant.low, constant.high] for constant in constants]).T
    return values(
        least_squares(residuals, prior, bounds=bounds, max_nfev=EVALUATIONS, diff_step=1e-4).x
    )


def fit_time(published: Runs, mask: np.ndarray) -> dict[str, float]:
    """Constants of time from the timed rows of `mask`."""
    mask = mask & is_timed(published)
    runs = published.take(mask)
    measured = published.step_s[mask]
    _, codes, counts = np.unique(published.table[mask], return_inverse=True, return_counts=True)
    weight = counts[codes] ** -0.25
    weight /= weight.mean()
    predict_step_s(runs)  # its columns are shared by every evaluation
    return fit(
        TIME_CONSTANTS,
        lambda values: soft_l1(weight * np.log(seconds(runs, values) / measured) / NOISE),
    )


def with_values(runs: Runs, values: Mapping[str, float]) -> Runs:
    return runs.with_constants(from_values(read_constants(), values))


def seconds(runs: Runs, values: Mapping[str, float]) -> np.ndarray:
    return predict_step_s(with_values(runs, values))


def fit_memory(runs: Runs) -> dict[str, float]:
    """Constants of memory: reserved memory of the first stage; what ran must fit, and what ran out
    must not."""
    is_ok = runs.status == "ok"
    reserved = runs.reserved_gib
    is_measured = is_ok & np.isfinite(reserved)
    memory.stage_bytes(runs)  # its columns are shared by every evaluation

    def errors(values: Mapping[str, float]) -> np.ndarray:
        stages = memory.stage_bytes(with_values(runs, values))
        first = sum(part[:, 0] for part in stages.values()) / memory.GIB
        over = np.log(memory.peak_gib(stages) / (FITS_SHARE * runs.memory_gib))
        return np.concatenate(
            [
                soft_l1(np.log(first / reserved)[is_measured] / NOISE),
                soft_l1(np.maximum(0, over + MARGIN)[is_ok] / NOISE),
                0.7 * soft_l1(np.maximum(0, MARGIN - over)[~is_ok] / NOISE),
            ]
        )

    return fit(MEMORY_CONSTANTS, errors)


def cross_validate(published: Runs, fold: Fold, is_unstable: np.ndarray) -> pd.DataFrame:
    """Every timed run that the fold judges, predicted by constants fitted without it, and its
    slopes."""
    runs = fold.judged_runs(published)
    rows = np.flatnonzero(fold.is_judged & is_timed(published))
    ground = measure_ground(published, ~fold.is_hidden)
    distances = intervals.measure_distances(runs, ground)
    return pd.DataFrame(intervals.measure_slopes(distances, is_unstable[rows])).assign(
        fold=fold.name,
        row=rows,
        predicted_s=seconds(runs, fit_time(published, ~fold.is_hidden)),
        is_elsewhere=ground.is_elsewhere(runs),
        distance=np.sum(list(distances.values()), axis=0),
    )


def collect_errors(published: Runs, values: Mapping[str, float]) -> tuple[pd.DataFrame, Runs]:
    """The errors of all folds, and their runs as the folds predict them; `values` are constants
    fitted to all runs.

    `home`: the table whose widths a row has. `low`, `high`: logarithms of predicted over measured
    seconds and of the inverse, without the time of a slow engine that may explain it; nan at the
    end that says nothing of the fast engine. `kind`: whether widths that judge a row have not seen
    its model, or its table. `weight`: each table counts with the square root of its rows in a fold.
    """
    peak_gib = memory.peak_gib(memory.stage_bytes(with_values(published, values)))
    is_unstable = peak_gib > UNSTABLE_SHARE * published.memory_gib
    folds = list(make_folds(published))
    errors = pd.concat(
        [cross_validate(published, fold, is_unstable) for fold in folds], ignore_index=True
    )
    runs = with_values(
        Runs([run for fold in folds for run in fold.judged_runs(published).origin]), values
    )
    row = errors["row"].to_numpy()
    predicted = errors["predicted_s"].to_numpy()
    measured = published.step_s[row]
    table = published.table[row]
    slower = old_pipeline_s(runs)
    is_open = intervals.has_open_engine(runs)
    is_slow = is_open & (measured - predicted > 0.5 * slower)
    faster = np.maximum(measured - np.where(is_slow, slower, 0.0), 1e-9)
    errors = errors.assign(
        table=table,
        gpus=runs.gpus.astype(int),
        measured_s=measured,
        home=np.where(
            errors["is_elsewhere"] | ~np.isin(table, home_tables(published)), OTHERS, table
        ),
        model=model_parts(published)[row],
        # there are too few frameworks to leave one out twice
        kind=np.where(errors["is_elsewhere"] & (errors["framework"] == 0), "table", "model"),
        low=np.where(is_slow, np.nan, np.log(predicted / measured)),
        high=np.where(is_open & ~is_slow, np.nan, np.log(faster / predicted)),
    )
    return (
        errors.assign(weight=errors.groupby(["fold", "table"])["row"].transform("size") ** -0.5),
        runs,
    )


def home_tables(published: Runs) -> list[str]:
    """Tables with enough runs, of several models, for widths of their own."""
    rows = pd.DataFrame({"table": published.table, "part": model_parts(published)})[
        is_timed(published)
    ]
    counts = rows.groupby("table")["part"].agg(["size", "nunique"])
    return counts.index[(counts["size"] >= MIN_ROWS) & (counts["nunique"] > 1)].tolist()


def fit_width(rows: pd.DataFrame, widths: Widths, name: str, level: float) -> Widths:
    """The least width per unit of a slope that holds this share of what other widths leave out, or
    those of tables.

    A quantile regression through zero.
    """
    if name == TABLES:
        quantile = (1 + level) / 2
        return {
            table: tuple(some[["low", "high"]].quantile(quantile))
            for table, some in rows.groupby("home")
        }
    if not len(rows):
        return {}
    low, high = intervals.sum_widths(rows["home"].to_numpy(), rows, widths)
    excess = (
        rows["high"] - high if name == SLOWER else np.fmax(rows["low"] - low, rows["high"] - high)
    )
    excess = (excess / rows[name]).dropna().sort_values()
    weight = (rows["weight"] * rows[name])[excess.index].cumsum()
    width = max(float(excess[weight >= level * weight.iloc[-1]].iloc[0]), 0.0)
    return {name: (0.0 if name == SLOWER else width, width)}


def is_judged(errors: pd.DataFrame, name: str) -> pd.Series:
    """Rows of the folds that judge a width, at this distance and at none that is fitted later."""
    later = list(JUDGES)[list(JUDGES).index(name) + 1 :]
    rows = errors["fold"].isin(JUDGES[name]) & (errors[later] == 0).all(axis=1)
    return rows if name == TABLES else rows & (errors[name] > 0)


def fit_intervals(errors: pd.DataFrame) -> tuple[np.ndarray, Widths]:
    """Both ends' exponents of every row by widths that saw none of its part; and the largest of all
    these widths.

    A part is a sixth of the models, or a table in folds that leave tables out. Answers have the
    largest widths, so that they are no narrower than the scored ones. Tables and slopes have, in
    turn, the least level at which widths hold `COVERED` of the unseen rows of each fold, and
    `LEAST` of each fold, table and number of GPUs; of those folds and cells that have `MIN_ROWS`.
    """
    parts = [(kind, part) for kind, some in errors.groupby("kind") for part in some[kind].unique()]
    widths: list[Widths] = [dict.fromkeys((OTHERS, *SLOPES), (0.0, 0.0)) for _ in parts]
    exponents = np.empty((2, len(errors)))
    for name in JUDGES:
        rows = is_judged(errors, name)
        least = {TABLES: 0.0, "framework": LEAST_OF_FRAMEWORK}.get(name, LEAST)
        before = widths
        for level in LEVELS:
            widths = []
            for (kind, part), width in zip(parts, before, strict=True):
                is_part = errors[kind] == part
                is_seen = rows & (errors[kind] != part)
                widths.append({**width, **fit_width(errors[is_seen], width, name, level)})
                some = errors[is_part & (errors["kind"] == kind)]
                exponents[:, some.index] = intervals.sum_widths(
                    some["home"].to_numpy(), some, widths[-1]
                )
            is_inside = (~((errors["low"] > exponents[0]) | (errors["high"] > exponents[1])))[rows]
            groups = (["fold"], ["fold", "table", "gpus"])
            by_fold, by_cell = (find_least(is_inside, errors.loc[rows, by]) for by in groups)
            if by_fold >= COVERED and by_cell >= least:
                break
        print(
            f"  {name:10} level {level:.3f}: {by_fold:.1%} in the least fold, {by_cell:.1%} in the"
            " least cell"
        )
    names = dict.fromkeys(name for width in widths for name in width)
    ends = {
        name: np.max([width[name] for width in widths if name in width], axis=0) for name in names
    }
    return exponents, {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def find_least(is_inside: pd.Series, by: pd.DataFrame) -> float:
    """The least share inside of all groups with enough rows."""
    groups = is_inside.groupby(list(by.to_numpy().T)).agg(["size", "mean"])
    return float(groups[groups["size"] >= MIN_ROWS]["mean"].min())


def print_scores(rows: pd.DataFrame) -> None:
    """By fold; by fold and table; of folds by scale by GPUs as well; and of all runs on 1,000 GPUs
    or more."""
    by_scale = summarize(rows[rows["fold"].str.startswith("beyond")], "fold", "table", "gpus")
    tables = [
        summarize(rows, "fold"),
        summarize(rows, "fold", "table"),
        by_scale[by_scale["rows"] >= MIN_ROWS],
    ]
    for table in (*tables, summarize(rows[rows["gpus"] >= LARGE], "fold")):
        print(f"\n{table.round(1).to_string()}")


def score_layouts(published: Runs) -> pd.DataFrame:
    """Percent that proposed layouts are behind the best measured one: means over families by table.

    Times are predicted by constants fitted without the model. Those that ran out of memory are
    counted apart.
    """
    predictions = predict_runs(published)
    without_model = held_out_s(WITHOUT_MODEL)
    step_s = np.where(np.isfinite(without_model), without_model, predictions.step_s)
    columns = {
        "arrangement": [run.layout.arrangement for run in published.origin],
        "measured": np.where(published.status == "ok", published.step_s, np.inf),
        "preference": preference_s(
            replace(predictions, columns={**predictions.columns, "step_s": step_s})
        ),
        "is_too_large": ~predictions.fits,
        "model_ranks": published.tp * published.pp,
        "batches": -published.micro_batch,
    }
    families = []
    runs = pd.DataFrame(columns | {name: getattr(published, name) for name in FAMILY})
    for (table, *_), rows in runs.groupby(FAMILY):
        order = (
            rows[~rows["is_too_large"]]
            .sort_values("preference", kind="stable")
            .drop_duplicates("arrangement")
        )
        if np.isfinite(rows["measured"]).sum() >= MIN_LAYOUTS and len(order):
            smallest = rows.sort_values(["is_too_large", "model_ranks", "batches"])[
                "measured"
            ].iloc[0]
            proposed = order["measured"].head(PROPOSED)
            chosen = {
                "first": proposed.iloc[0],
                "best_of_three": proposed.min(),
                "smallest_that_fits": smallest,
            }
            families.append(100 * (pd.Series(chosen, name=table) / rows["measured"].min() - 1))
    by_table = pd.DataFrame(families).rename_axis("table").groupby("table")
    means = by_table.agg(lambda behind: behind[np.isfinite(behind)].mean()).round(1)
    out_of_memory = by_table["best_of_three"].agg(lambda behind: int(np.isinf(behind).sum()))
    return means.assign(families=by_table.size(), ran_out_of_memory=out_of_memory)


def write(
    published: Runs, values: Mapping[str, float], widths: Widths, scores: pd.DataFrame
) -> None:
    """Write constants.csv, intervals.csv, cross_validated.csv and chosen_layouts.csv."""
    constants = pd.read_csv(DATA / "constants.csv", dtype=str, keep_default_na=False)
    new = {name: f"{value:.5g}" for name, value in values.items()}
    names = constants["quantity"] + "." + constants["key"]
    constants.assign(value=names.map(new).fillna(constants["value"])).to_csv(
        DATA / "constants.csv", index=False
    )
    table = pd.DataFrame.from_dict(widths, orient="index", columns=["low", "high"])
    table.to_csv(DATA / "intervals.csv", index_label="width", float_format="%.4f")
    scores.to_csv(DATA / "cross_validated.csv", index=False, float_format="%.5g")
    held_out_s.cache_clear()
    score_layouts(published).to_csv(DATA / "chosen_layouts.csv")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--write", action="store_true", help="write constants, intervals and predictions"
    )
    is_writing = arguments.parse_args().write
    published = load_published()
    begun = time.perf_counter()
    values = fit_time(published, np.ones(len(published), dtype=bool)) | fit_memory(published)
    print(
        f"{len(published)} rows, {len(values)} fitted constants, {time.perf_counter() - begun:.0f}"
        " s to fit"
    )
    for constant in FITTED:
        print(f"  {constant.name:32} {values[constant.name]:<10.4g} from {constant.prior:g}")
    errors, runs = collect_errors(published, values)
    exponents, widths = fit_intervals(errors)
    _, low, high = intervals.find_ends(runs, errors["predicted_s"].to_numpy(), exponents)
    scores = errors.assign(key=published.key[errors["row"]], low_s=low, high_s=high)[COLUMNS]
    print_scores(judge(scores))
    if is_writing:
        write(published, values, widths, scores)
    print(f"\npercent behind the best measured layout\n{score_layouts(published).to_string()}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
