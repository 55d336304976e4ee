"""Tables that several labs make: published ones, and rows in a declared order."""

from collections.abc import Iterable
from typing import Literal

import pandas as pd

from labkit.lab.metric import Results
from labkit.lab.project import reference_directory

FIT_SHARE = 0.9
"""Share of the memory that a training may take; the rest is for other programs."""


def read_published(name: str) -> pd.DataFrame:
    """Return the table `data/reference/<name>.csv`.

    The README there has the source and hardware of each.
    """
    table = pd.read_csv(reference_directory() / f"{name}.csv")
    for column in table.select_dtypes(exclude="number"):  # numbers in a column that also has "OOM"
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
    calibration = results.calibration
    rows = table[["device", "calls", "sent_bytes", "world_size"]].itertuples(index=False)
    seconds = [
        calibration.messages_s(*row) if calibration and device == "cpu" else None
        for device, *row in rows
    ]
    return pd.Series(seconds, index=table.index, dtype=float)


def in_order(table: pd.DataFrame, column: str, names: Iterable[str]) -> pd.DataFrame:
    """Return rows in the order in which `names` has the column's values; others last."""
    place = {name: index for index, name in enumerate(names)}
    return table.sort_values(
        column, key=lambda values: values.map(place), kind="stable", ignore_index=True
    )
