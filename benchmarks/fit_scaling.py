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
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from folds import Fold, cards_of, make_folds, model_parts
from scipy.optimize import least_squares

from labkit.scaling import DATA, intervals, memory
from labkit.scaling.calibration import soft_l1
from labkit.scaling.constants import CALIBRATED, load_constants
from labkit.scaling.intervals import OTHERS, UNKNOWN, Widths
from labkit.scaling.prediction import FITS_SHARE, predict_runs
from labkit.scaling.published import (
    WITHOUT_MODEL,
    find_nearest,
    held_out_s,
    is_timed,
    load_published,
)
from labkit.scaling.runs import Runs
from labkit.scaling.scores import judge, summarize
from labkit.scaling.search import PROPOSED, preference_s
from labkit.scaling.step_time import predict_step_s

# Errors below this count as squares, above as absolute values.
NOISE = 0.08
EVALUATIONS = 12
MARGIN = 0.01
# Shares of the rows of a source that its widths hold, at the low and the high end. Above 90%,
# since widths hold fewer of the models that they have not seen. Widths of others and of unknown
# frameworks hold this share of every table, and more of most.
LEVELS = {"table": (0.98, 0.96), OTHERS: (0.95, 0.9), UNKNOWN: (0.95, 0.9)}
# Rows of a table with widths of its own, or of a group that is judged.
MIN_ROWS = 30
# Rows of a table that judges memory of other frameworks.
MEMORY_ROWS = 20
# Columns of cross_validated.csv.
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
# GPUs from which on runs are scored apart.
LARGE = 1000
# Columns of one training on one number of GPUs, whose published runs differ in their layouts.
FAMILY = ["table", "name", "gpus", "global_batch", "seq_len", "precision"]
# Measured layouts of a family, to judge which one is proposed.
MIN_LAYOUTS = 4
CONSTANTS = pd.read_csv(DATA / "constants.csv")
CONSTANTS.index = CONSTANTS["quantity"] + "." + CONSTANTS["key"]
FITTED = CONSTANTS[CONSTANTS["spread"] > 0]
# Fitted quantities that memory depends on, and time does not.
IS_MEMORY = FITTED["quantity"].isin(["activation_scale", "held_gathers"])


def fit(
    constants: pd.DataFrame, errors: Callable[[Mapping[str, float]], np.ndarray]
) -> dict[str, float]:
    """The most likely values of these constants, by name, from their priors and from `errors` of
    values by name."""
    prior = np.log(constants["prior"].to_numpy())
    spread = constants["spread"].to_numpy()

    def values(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(constants.index, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(values(logs)), (logs - prior) / spread])

    bounds = np.log(constants[["low", "high"]].to_numpy()).T
    return values(
        least_squares(residuals, prior, bounds=bounds, max_nfev=EVALUATIONS, diff_step=1e-4).x
    )


def fit_time(published: Runs, mask: np.ndarray) -> dict[str, float]:
    """Constants of time from the timed rows of `mask`."""
    mask = mask & is_timed(published)
    runs = published.take(mask)
    measured = published.step_s[mask]
    _, codes, counts = np.unique(published.table[mask], return_inverse=True, return_counts=True)
    # Errors are squared, so each of n rows counts n^-1/2 and their table n^1/2: the largest table
    # does not decide alone, nor the smallest as much as it.
    weight = counts[codes] ** -0.25
    weight /= weight.mean()
    predict_step_s(runs)  # its columns are shared by every evaluation
    return fit(
        FITTED[~IS_MEMORY],
        lambda values: soft_l1(weight * np.log(seconds(runs, values) / measured) / NOISE),
    )


def with_values(runs: Runs, values: Mapping[str, float]) -> Runs:
    """The runs under constants with other values of some, by name."""
    constants = load_constants()
    table = {quantity: dict(by_key) for quantity, by_key in constants.table.items()}
    for name, value in values.items():
        quantity, key = name.split(".")
        table[quantity][key] = value
    return runs.with_constants(replace(constants, table=table))


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

    return fit(FITTED[IS_MEMORY], errors)


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
    """Every timed run that the fold judges, predicted by constants fitted without it.

    With its source, its distance, and the range of the profiles, of what the fold has left. `low`
    and `high` are logarithms of predicted over measured seconds and of the inverse.
    """
    values = fit_time(published, ~fold.is_hidden)
    runs = with_values(fold.judged_runs(published), values)
    measured = published.take(~fold.is_hidden & is_timed(published))
    row = np.flatnonzero(fold.is_judged & is_timed(published))
    predicted_s = predict_step_s(runs)
    sources = intervals.find_sources(runs, measured)
    range_low, range_high = intervals.profile_range(runs, predicted_s, sources)
    is_new_gpu = ~np.isin(cards_of(runs), cards_of(measured))
    return pd.DataFrame(
        {
            "fold": fold.name,
            "row": row,
            "table": published.table[row],
            "gpus": runs.gpus.astype(int),
            "measured_s": published.step_s[row],
            "predicted_s": predicted_s,
            "distance": find_nearest(runs, measured)[0],
            "range_low": range_low,
            "range_high": range_high,
            "source": sources,
            "situation": np.select(
                [is_new_gpu, sources == UNKNOWN], ["new GPU", UNKNOWN], "known framework"
            ),
            "model": model_parts(published)[row],
            "low": np.log(predicted_s / published.step_s[row]),
            "high": np.log(published.step_s[row] / predicted_s),
        }
    )


def home_tables(published: Runs) -> list[str]:
    """Tables with enough runs, of several models, for widths of their own."""
    rows = pd.DataFrame({"table": published.table, "part": model_parts(published)})[
        is_timed(published)
    ]
    counts = rows.groupby("table")["part"].agg(["size", "nunique"])
    return counts.index[(counts["size"] >= MIN_ROWS) & (counts["nunique"] > 1)].tolist()


def fit_widths(errors: pd.DataFrame) -> Widths:
    """The widths of every source: quantiles of what distance and profiles leave of its errors.

    Sources that stand for others have the largest width of any table in them: a new source may be
    as far off as any of them is.
    """
    away = intervals.SLOPE * np.sqrt(errors["distance"])
    rest = errors.assign(
        low=errors["low"] - away - errors["range_low"],
        high=errors["high"] - away - errors["range_high"],
    )
    widths = {}
    for source, rows in rest.groupby("source"):
        levels = LEVELS.get(str(source), LEVELS["table"])
        by_table = rows.groupby("table")
        is_large = by_table.size() >= MIN_ROWS / 2
        ends = [
            max(by_table[end].quantile(level)[is_large].max(), 0.0)
            for end, level in zip(("low", "high"), levels, strict=True)
        ]
        widths[str(source)] = (float(ends[0]), float(ends[1]))
    # A site with runs of its own is known as well as a published table.
    tables = [ends for source, ends in widths.items() if source not in (OTHERS, UNKNOWN)]
    low, high = np.max(tables, axis=0)
    return {**widths, CALIBRATED: (float(low), float(high))}


def fit_intervals(errors: pd.DataFrame, runs: Runs) -> tuple[intervals.Ends, Widths]:
    """Both ends of the judged runs' intervals by widths that saw no model of their part; and the
    widths of answers, from all rows.

    A part is a sixth of the models.
    """
    low = np.empty(len(errors))
    high = np.empty(len(errors))
    for part in errors["model"].unique():
        is_part = (errors["model"] == part).to_numpy()
        rows = errors[is_part]
        ranges = rows["range_low"].to_numpy(), rows["range_high"].to_numpy()
        low[is_part], high[is_part] = intervals.time_ends(
            runs.take(is_part),
            rows["predicted_s"].to_numpy(),
            rows["source"].to_numpy(str),
            rows["distance"].to_numpy(),
            ranges,
            fit_widths(errors[~is_part]),
        )
    return (low, high), fit_widths(errors)


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
        "preference": preference_s(replace(predictions, step_s=step_s)),
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
    held_out_s.cache_clear()  # it has read cross_validated.csv, which is new now
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
    for name, prior in FITTED["prior"].items():
        print(f"  {name:32} {values[name]:<10.4g} from {prior:g}")
    folds = list(make_folds(published))
    errors = pd.concat([cross_validate(published, fold) for fold in folds], ignore_index=True)
    has_widths = errors["source"].isin([*home_tables(published), UNKNOWN])
    errors["source"] = errors["source"].where(has_widths, OTHERS)
    judged = [run for fold in folds for run in fold.judged_runs(published).origin]
    (low, high), widths = fit_intervals(errors, Runs(judged))
    widths = {**widths, **fit_memory_widths(published, values)}
    scores = errors.assign(key=published.key[errors["row"]], low_s=low, high_s=high)[COLUMNS]
    print_scores(judge(scores))
    if is_writing:
        write(published, values, widths, scores)
    print(f"\npercent behind the best measured layout\n{score_layouts(published).to_string()}")
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
