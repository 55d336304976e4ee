"""A frame as a table: aligned, sortable, and each value in the unit that its column's name says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.lab.columns import INTERVAL, column

MAX_NAME_WORDS = 4
"""Longer texts are sentences, in which an underscore is meant."""
MAX_COLUMNS = 9
"""A table with more is set smaller, without columns whose cells are all the same."""
SEPARATED_FROM = 100_000
"""From here up a whole number has separators."""


@dataclass(frozen=True)
class Cell:
    """The text of a cell and the number it is sorted by."""

    text: str
    sort: str | None = None
    number: bool = False


@dataclass(frozen=True)
class TableColumn:
    """A heading and its cells; numbers are aligned on the right."""

    text: str
    number: bool
    cells: list[Cell]


def table_columns(frame: pd.DataFrame) -> Iterator[TableColumn]:
    """What a reader sees of a frame, column by column.

    `low` and `high` next to one another are one interval of the column before them. Internal columns are left out.
    """
    names = [str(name) for name in frame.columns]
    places = [place for place, name in enumerate(names) if not column(name).is_internal]
    for before, place, after in zip([None, *places], places, [*places[1:], None], strict=False):
        values = frame.iloc[:, place]
        if before is not None and after is not None and (names[place], names[after]) == ("low", "high"):
            heading = f"{frame.attrs.get(INTERVAL, '95%')} interval"
            yield TableColumn(heading, True, _intervals(names[before], values, frame.iloc[:, after]))
        elif not (before is not None and (names[before], names[place]) == ("low", "high")):
            # next to a mean, a time that is a median says so
            heading = "median" if names[place] == "seconds" and "mean_s" in names else column(names[place]).title
            is_number = _has_numbers(values)
            yield TableColumn(heading, is_number, [_cell(names[place], value, is_number) for value in values])


def split_constant(columns: list[TableColumn]) -> tuple[list[TableColumn], str]:
    """Of a wide table, the columns whose cells differ, and a sentence on the others."""
    if len(columns) <= MAX_COLUMNS or len(columns[0].cells) < 2:
        return columns, ""
    same = {one.text: one.cells[0].text for one in columns if len({cell.text for cell in one.cells}) == 1}
    others = ", ".join(f"{name} {value}" for name, value in same.items() if value != "–")
    return [one for one in columns if one.text not in same], f"The same in all rows: {others}." if others else ""


def _intervals(name: str, lows: pd.Series, highs: pd.Series) -> list[Cell]:
    """Intervals of the column before them, sorted by their lower ends."""
    return [
        Cell("–", None, True)
        if _is_missing(low)
        else Cell(_interval(_text(name, low), _text(name, high)), f"{low:.12g}", True)
        for low, high in zip(lows, highs, strict=True)
    ]


def _interval(low: str, high: str) -> str:
    """ "[48.4, 62.8] ms", and "[0.9 ms, 1.1 s]" if the units differ."""
    (_, _, unit), (number, _, other) = low.partition(" "), high.partition(" ")
    return f"[{low.removesuffix(f' {unit}')}, {number}] {unit}" if unit and unit == other else f"[{low}, {high}]"


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_numbers(values: pd.Series) -> bool:
    present = [value for value in values if not _is_missing(value)]
    return bool(present) and all(map(_is_number, present))


def _cell(name: str, value: Any, is_number: bool) -> Cell:
    has_value = _is_number(value) and not _is_missing(value)
    return Cell(_text(name, value), f"{value:.12g}" if has_value else None, is_number)


def _text(name: str, value: Any) -> str:
    if _is_missing(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not _is_number(value):
        text = str(value)
        # operators, paths and reasons are spelled out
        is_name = "::" not in text and "/" not in text and len(text.split()) <= MAX_NAME_WORDS
        return text.replace("_", " ") if is_name else text
    if isinstance(value, int) and not name.endswith(("bytes", "flops")):  # a count keeps all its digits
        return f"{value:,}" if abs(value) >= SEPARATED_FROM else str(value)
    return column(name).form(value)
