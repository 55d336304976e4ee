"""Where something holds: what some rows of a table have in common that no other row has."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labkit.lab.columns import column, label, label_of_several
from labkit.lab.units import counted, join_words

MOST_NAMES = 4  # of strings that a scope lists


def place_of(table: pd.DataFrame, rows: pd.DataFrame, axis: Sequence[str]) -> str | None:
    """What `rows` have in common that no other has: "from 1 MiB on", "up to 64 KiB", "at 1 MiB", "for mini"."""
    for name in axis:
        values, theirs = table[name], set(rows[name])
        if (values.isin(theirs) != table.index.isin(rows.index)).any():
            continue
        ordered = sorted(set(values))
        if isinstance(ordered[0], str):
            return _named(name, theirs)
        if len(theirs) == 1 or theirs == set(ordered[-len(theirs) :]):
            return _from(name, theirs)
        if theirs == set(ordered[: len(theirs)]):
            return f"up to {label(name, max(theirs))}"
    return None


def place_of_best(table: pd.DataFrame, rows: pd.DataFrame, axis: Sequence[str]) -> str | None:
    """Where the smallest ratio of `rows` was measured, by the first of `axis` that differs in the table."""
    for name in axis:
        if table[name].nunique() > 1:
            value = rows.loc[rows["ratio"].idxmin(), name]
            return _named(name, {value}) if isinstance(value, str) else _from(name, {value})
    return None


def _named(name: str, values: set[Any]) -> str:
    return f"for {' and '.join(label(name, value) for value in sorted(values))}"


def _from(name: str, values: set[Any]) -> str:
    """Where these are all that there are, or all the larger ones."""
    if len(values) > 1:
        return f"from {label(name, min(values))} on"
    return f"{'with' if name == 'world_size' else 'at'} {label(name, min(values))}"


def reach_of(table: pd.DataFrame, rows: pd.DataFrame, axis: Sequence[str]) -> tuple[str, pd.DataFrame] | None:
    """Where there is nothing but `rows`, and more than half of them: from, up to, or for what; and which those are."""
    for name in axis:
        others = table.loc[~table.index.isin(rows.index), name]
        if others.empty:
            continue
        if isinstance(others.iloc[0], str):
            inside = rows[~rows[name].isin(others)]
            if len(rows) < 2 * len(inside):
                return _named(name, set(inside[name])), inside
            continue
        above, below = rows[rows[name] > others.max()], rows[rows[name] < others.min()]
        if len(rows) < 2 * len(above):
            return _from(name, set(above[name].tolist())), above
        if len(rows) < 2 * len(below):
            theirs = set(below[name].tolist())
            return (f"up to {label(name, max(theirs))}" if len(theirs) > 1 else _from(name, theirs)), below
    return None


def scope_of(table: pd.DataFrame, columns: Sequence[str], setting: str = "") -> str:
    """What was measured: "gloo · 2 and 4 ranks · 4 KiB to 10 MiB"; of a column with many names how many there are.

    `setting` is what no column says.
    """
    told = [_scope_along(name, table[name].dropna()) for name in columns if name in table]
    return " · ".join(filter(None, [*told, setting]))


def _scope_along(name: str, values: pd.Series) -> str:
    known = sorted(set(values))
    if known and isinstance(known[0], str | bool):
        texts = [label(name, value) for value in values.unique()]
        if len(texts) > MOST_NAMES:
            return counted(len(texts), column(name).title)
        return " / ".join(texts) if any(" and " in text or "," in text for text in texts) else join_words(texts)
    return label_of_several(name, known) if known else ""
