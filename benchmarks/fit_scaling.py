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
from labkit.scaling.calibration import soft_l1
from labkit.scaling.constants import Constant, from_values, read_constants
from labkit.scaling.intervals import (
    OTHERS,
    PIPELINES,
    SLOPES,
    SLOWER,
    UNKNOWN,
    WIDE_TENSORS,
    Widths,
)
from labkit.scaling.prediction import FITS_SHARE, UNSTABLE_SHARE, predict_runs
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
COVERED = 0.88
LEAST = 0.8
LEAST_OF_UNKNOWN = 0.785
"""Shares of left-out rows that intervals must hold: of each fold, and of its tables at each number
of GPUs. The last is for an unknown framework: with 0.8 nanotron alone would widen all of them by
a third."""
ABOVE_LOW = 0.97
"""Share of rows above a source's low end, which is near: nothing is much faster than predicted."""
LEVELS = [level / 100 for level in range(70, 100)]
"""Shares of rows that a width may be fitted to: it holds fewer of those that it has not seen."""
MIN_ROWS = 30
"""Rows of a table with widths of its own, or of a group that is judged."""
MEMORY_ROWS = 20
"""Rows of a table that judges memory of other frameworks."""
UNKNOWN_SOURCES = (UNKNOWN, PIPELINES, WIDE_TENSORS)
OF_SOURCE = (WITHOUT_MODEL, "without the run", "without the source")
"""Folds that judge the width of a known source."""
JUDGES: Mapping[str, tuple[str, ...]] = {
    "unstable": (WITHOUT_MODEL, "without the run"),
    "scale": (
        *("beyond 64 GPUs", "beyond 32 GPUs", "beyond 512 GPUs", "without the largest scale"),
        "without the source, beyond 64 GPUs",
    ),
    "outside": (
        *("without the largest models", "beyond 8192 tokens", "without the sharding"),
        WITHOUT_MODEL,
    ),
    "hardware": ("without the GPU", "without the GPU generation"),
    UNKNOWN: (WITHOUT_FRAMEWORK,),
}
"""Folds that judge slopes, and the widths of unknown frameworks."""
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
    "situation",
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
    is_ok = runs.status != "oom"
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


def fit_memory_widths(published: Runs, values: Mapping[str, float]) -> Widths:
    """Widths of peak memory: 90% of each table with published peaks.

    Those of other frameworks hold this share of each table when it is predicted without its
    framework. A run that ended well fitted into its GPU, which bounds the low end.
    """
    others = with_values(
        Runs([replace(run, framework="generic") for run in published.origin]), values
    )
    named = with_values(published, values)
    errors = {}
    for name, runs in (("named", named), ("others", others)):
        stages = memory.stage_bytes(runs)
        first = sum(part[:, 0] for part in stages.values()) / memory.GIB
        peak = np.where(runs.table == "nanotron", first, memory.peak_gib(stages))
        errors[name] = np.log(published.reserved_gib / peak)
    limit = np.log(FITS_SHARE * published.memory_gib / memory.peak_gib(memory.stage_bytes(others)))
    errors["others"] = np.where(
        np.isnan(errors["others"]) & (published.status == "ok"),
        np.minimum(limit, 0.0),
        errors["others"],
    )
    rows = pd.DataFrame(errors).assign(table=published.table)
    by_table = rows.groupby("table")
    quantiles = by_table.quantile(0.05), by_table.quantile(0.95)
    widths = {
        intervals.MEMORY + table: (
            max(-quantiles[0]["named"][table], 0.0),
            quantiles[1]["named"][table],
        )
        for table in intervals.MEASURED_MEMORY
    }
    is_large = by_table.size() >= MEMORY_ROWS
    low, high = (ends["others"][is_large] for ends in quantiles)
    return {**widths, intervals.MEMORY + OTHERS: (-low.min(), high.max())}


def cross_validate(published: Runs, fold: Fold) -> pd.DataFrame:
    """Every timed run that the fold judges, predicted by constants fitted without it."""
    runs = fold.judged_runs(published)
    return pd.DataFrame(
        {
            "fold": fold.name,
            "row": np.flatnonzero(fold.is_judged & is_timed(published)),
            "predicted_s": seconds(runs, fit_time(published, ~fold.is_hidden)),
        }
    )


def describe_rows(published: Runs, fold: Fold, is_unstable: np.ndarray) -> pd.DataFrame:
    """Source and slopes of every timed run that the fold judges, from what the fold has left."""
    runs = fold.judged_runs(published)
    ground = measure_ground(published, ~fold.is_hidden)
    distances = intervals.measure_distances(runs, ground)
    rows = fold.is_judged & is_timed(published)
    return pd.DataFrame(intervals.measure_slopes(distances, is_unstable[rows])).assign(
        source=intervals.find_sources(runs, ground),
        distance=np.sum(list(distances.values()), axis=0),
    )


def collect_errors(
    published: Runs, predicted: pd.DataFrame, values: Mapping[str, float]
) -> tuple[pd.DataFrame, Runs]:
    """The errors of all folds, and their runs as the folds predict them; `values` are constants
    fitted to all runs.

    `low`, `high`: logarithms of predicted over measured seconds and of the inverse. `weight`: each
    table counts with the square root of its rows in a fold.
    """
    peak_gib = memory.peak_gib(memory.stage_bytes(with_values(published, values)))
    is_unstable = peak_gib > UNSTABLE_SHARE * published.memory_gib
    folds = list(make_folds(published))
    described = pd.concat(
        [describe_rows(published, fold, is_unstable) for fold in folds], ignore_index=True
    )
    errors = pd.concat([predicted.reset_index(drop=True), described], axis=1)
    runs = with_values(
        Runs([run for fold in folds for run in fold.judged_runs(published).origin]), values
    )
    row = errors["row"].to_numpy()
    predicted_s = errors["predicted_s"].to_numpy()
    measured = published.step_s[row]
    table = published.table[row]
    has_widths = errors["source"].isin([*home_tables(published), *UNKNOWN_SOURCES])
    situations = np.select(
        [errors["hardware"] > 0, errors["source"].isin(UNKNOWN_SOURCES)],
        ["new GPU", "unknown framework"],
        "known framework",
    )
    errors = errors.assign(
        situation=situations,
        table=table,
        gpus=runs.gpus.astype(int),
        measured_s=measured,
        source=errors["source"].where(has_widths, OTHERS),
        model=model_parts(published)[row],
        low=np.log(predicted_s / measured),
        high=np.log(measured / predicted_s),
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
    """The least widths that hold this share of what other widths leave out.

    A known source has a width at each end, and so has an unknown framework, whose widths hold this
    share of every table: it may be as far from known ones as any of them is from the rest. A slope
    has one width per unit, by a quantile regression through zero.
    """
    if not len(rows):
        return {}
    if name not in SLOPES:
        # what slopes leave of the errors
        bare = {**widths, **dict.fromkeys(rows["source"].unique(), (0.0, 0.0))}
        low, high = intervals.sum_widths(rows["source"].to_numpy(), rows, bare)
        by_table = rows.assign(low=rows["low"] - low, high=rows["high"] - high).groupby(
            ["source", "table"] if name == UNKNOWN else ["source"]
        )
        ends = pd.DataFrame(
            {"low": by_table["low"].quantile(ABOVE_LOW), "high": by_table["high"].quantile(level)}
        )
        ends = ends[by_table.size() >= MIN_ROWS / 2].clip(lower=0.0).groupby("source").max()
        return {str(source): (low, high) for source, low, high in ends.itertuples()}
    low, high = intervals.sum_widths(rows["source"].to_numpy(), rows, widths)
    excess = rows["high"] - high
    if name != SLOWER:
        excess = np.fmax(rows["low"] - low, excess)
    excess = (excess / rows[name]).sort_values()
    weight = (rows["weight"] * rows[name])[excess.index].cumsum()
    width = max(float(excess[weight >= level * weight.iloc[-1]].iloc[0]), 0.0)
    return {name: (0.0 if name == SLOWER else width, width)}


def is_judged(errors: pd.DataFrame, name: str) -> pd.Series:
    """Rows of the folds that judge a width, at this distance and at none that is fitted later."""
    rows = errors["fold"].isin(JUDGES.get(name, OF_SOURCE))
    is_unknown = errors["source"].isin(UNKNOWN_SOURCES)
    if name == UNKNOWN:
        return rows & is_unknown
    if name in SLOPES:
        later = SLOPES[SLOPES.index(name) + 1 :]
        rows &= (errors[name] > 0) & ~is_unknown
    else:
        later = SLOPES
        rows &= errors["source"] == name
    return rows & (errors[list(later)] == 0).all(axis=1)


def fit_intervals(errors: pd.DataFrame) -> tuple[np.ndarray, Widths]:
    """Both ends' exponents of every row by widths that saw no model of its part; and the largest of
    all these widths.

    A part is a sixth of the models. Answers have the largest widths, so that they are no narrower
    than the scored ones. Each width has the least level at which widths hold `COVERED` of the
    unseen rows of each fold, and `LEAST` of each fold, table and number of GPUs; of those folds and
    cells that have `MIN_ROWS`.
    """
    parts = errors["model"].unique()
    names = (OTHERS, *UNKNOWN_SOURCES, *SLOPES)
    widths: dict[int, Widths] = {part: dict.fromkeys(names, (0.0, 0.0)) for part in parts}
    known = sorted(set(errors["source"]) - set(UNKNOWN_SOURCES))
    for name in (*known, *JUDGES):
        rows = errors[is_judged(errors, name)]
        least = LEAST_OF_UNKNOWN if name == UNKNOWN else LEAST
        before = widths
        for level in LEVELS:
            widths = {
                part: {**width, **fit_width(rows[rows["model"] != part], width, name, level)}
                for part, width in before.items()
            }
            low, high = exponents_of_unseen(rows, widths)
            is_inside = (rows["low"] <= low) & (rows["high"] <= high)
            by_fold = find_least(is_inside, rows[["fold"]])
            cells = (["fold", "table"], ["fold", "table", "gpus"])
            by_cell = min(find_least(is_inside, rows[by]) for by in cells)
            if by_fold >= COVERED and by_cell >= least:
                break
        print(
            f"  {name:17} level {level:.2f}: {by_fold:.1%} in the least fold, {by_cell:.1%} in the"
            f" least cell of {len(rows)} rows"
        )
    ends = {
        name: np.max([width[name] for width in widths.values() if name in width], axis=0)
        for name in dict.fromkeys(name for width in widths.values() for name in width)
    }
    return (
        exponents_of_unseen(errors, widths),
        {name: (float(low), float(high)) for name, (low, high) in ends.items()},
    )


def exponents_of_unseen(rows: pd.DataFrame, widths: Mapping[int, Widths]) -> np.ndarray:
    """Both ends' exponents of every row, by the widths that did not see its part."""
    exponents = pd.DataFrame(0.0, rows.index, [0, 1])
    for part, some in rows.groupby("model"):
        ends = intervals.sum_widths(some["source"].to_numpy(), some, widths[part])
        exponents.loc[some.index] = np.transpose(ends)
    return exponents.to_numpy().T


def find_least(is_inside: pd.Series, by: pd.DataFrame) -> float:
    """The least share inside of all groups with enough rows; 1 if there is none."""
    groups = is_inside.groupby(list(by.to_numpy().T)).agg(["size", "mean"])
    return min(groups[groups["size"] >= MIN_ROWS]["mean"], default=1.0)


def print_scores(rows: pd.DataFrame) -> None:
    """By situation; by fold; by fold and table; of folds by scale by GPUs as well; and of all runs
    on 1,000 GPUs or more."""
    by_scale = summarize(rows[rows["fold"].str.startswith("beyond")], "fold", "table", "gpus")
    tables = [
        summarize(rows, "situation"),
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
        "is_too_large": ~predictions.may_fit,
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
    predicted = pd.concat([cross_validate(published, fold) for fold in make_folds(published)])
    errors, runs = collect_errors(published, predicted, values)
    exponents, widths = fit_intervals(errors)
    widths = {**widths, **fit_memory_widths(published, values)}
    _, low, high = intervals.find_ends(runs, errors["predicted_s"].to_numpy(), exponents)
    scores = errors.assign(key=published.key[errors["row"]], low_s=low, high_s=high)[COLUMNS]
    print_scores(judge(scores))
    if is_writing:
        write(published, values, widths, scores)
    print(f"\npercent behind the best measured layout\n{score_layouts(published).to_string()}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
