"""Frames for `notebooks/12_scaling.ipynb`: errors on held-out runs."""

import pandas as pd

from labkit.scaling import DATA


def held_out() -> pd.DataFrame:
    """Return every timed published run that a fold leaves out, with its prediction."""
    return judge(pd.read_csv(DATA / "cross_validated.csv"))


def judge(rows: pd.DataFrame) -> pd.DataFrame:
    """Add errors in percent to rows of `cross_validated.csv`, and whether the 90% interval holds.

    `distance` is from measured runs; `high_over_low` is the interval's width; `situation` is what a
    fold's fit knows of a run: its framework, only other frameworks, or no run on its GPU.
    """
    ratio = rows["predicted_s"] / rows["measured_s"]
    return rows.assign(
        predicted_over_measured=ratio,
        error_percent=100 * (ratio - 1).abs(),
        is_covered=rows["measured_s"].between(rows["low_s"], rows["high_s"]),
        high_over_low=rows["high_s"] / rows["low_s"],
    )


def summarize(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return errors and coverage in percent, widths and distances of judged rows, by columns."""
    return rows.groupby(list(by), sort=False).agg(
        rows=("error_percent", "size"),
        median_error=("error_percent", "median"),
        error_of_nine_in_ten=("error_percent", lambda errors: errors.quantile(0.9)),
        covered=("is_covered", lambda covered: 100 * covered.mean()),
        mean_width=("high_over_low", "mean"),
        median_width=("high_over_low", "median"),
        distance=("distance", "median"),
    )


def chosen_layouts() -> pd.DataFrame:
    """Return percent by which proposed layouts are behind the best measured one, by table."""
    return pd.read_csv(DATA / "chosen_layouts.csv")
