"""Tables and names that several labs have in common."""

from collections.abc import Iterable
from typing import Literal

import pandas as pd

from labkit.lab.metric import Results
from labkit.lab.project import reference_directory
from labkit.parallel.data_parallel import TORCH

# Names of the wrappers of data parallelism in sentences.
WRAPPER_NAMES = {
    TORCH: "torch's DDP",
    "naive": "NaiveDDP",
    "flat": "FlatDDP",
    "overlapped": "OverlappedDDP",
    "bucketed": "BucketedDDP",
    "bucketed_shared": "BucketedDDP through shared memory",
    "naive_shared": "NaiveDDP through shared memory",
}


def read_published(name: str) -> pd.DataFrame:
    """Return the table `data/reference/<name>.csv`.

    The README there has the source and hardware of each.
    """
    table = pd.read_csv(reference_directory() / f"{name}.csv")
    # One "OOM" makes all numbers of its column strings.
    for column in table.select_dtypes(exclude="number"):
        numbers = pd.to_numeric(table[column], errors="coerce")
        table[column] = numbers.astype(object).where(numbers.notna(), table[column])
    return table


def join(
    table: pd.DataFrame, other: pd.DataFrame, keys: Iterable[str], how: Literal["left", "outer"]
) -> pd.DataFrame:
    """Merge rows with equal `keys`, in the order of `table`; either may be empty."""
    kinds = dict.fromkeys(keys, object)  # pandas refuses to merge an empty column of another dtype
    return table.astype(kinds).merge(other.astype(kinds), on=list(kinds), how=how)


def add_up(rows: pd.DataFrame, keys: Iterable[str]) -> pd.DataFrame:
    """Return one row per value of `keys`: the sum of the seconds of its parts."""
    groups = rows.dropna(subset="seconds").groupby(list(keys), dropna=False, sort=False)
    return groups["seconds"].sum().reset_index()


def predict_messages_s(table: pd.DataFrame, results: Results) -> pd.Series:
    """Predict the seconds of each row's `calls` that send `sent_bytes`.

    NaN on GPUs and without a calibration.
    """
    seconds = pd.Series(float("nan"), index=table.index)
    calibration = results.calibration
    if calibration is None:
        return seconds
    for row in table[table["device"] == "cpu"].itertuples():
        seconds[row.Index] = calibration.messages_s(row.calls, row.sent_bytes, row.world_size)
    return seconds


def most_sent(rows: pd.DataFrame, keys: Iterable[str]) -> pd.DataFrame:
    """Return calls and bytes per step of the rank that sends most, with the formula's bytes."""
    values = ["sent_bytes", "formula_sent_bytes", "calls"]
    # A run without such rows lacks the columns, too.
    rows = rows.reindex(columns=[*keys, *values]).dropna(subset="sent_bytes")
    return rows.groupby(list(keys), sort=False)[values].max().reset_index()


def in_order(table: pd.DataFrame, column: str, names: Iterable[str]) -> pd.DataFrame:
    """Return rows in the order in which `names` has the column's values; others last."""
    place = {name: index for index, name in enumerate(names)}
    return table.sort_values(
        column, key=lambda values: values.map(place), kind="stable", ignore_index=True
    )
