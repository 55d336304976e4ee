"""A frame as a table: aligned, sortable, and each value in the unit that its column's name says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from labkit.lab.columns import INTERVAL, column

MAX_NAME_WORDS = 4
"""Longer texts are sentences, in which an underscore is meant."""
MAX_COLUMNS = 9
"""A table with more is set smaller, without columns whose cells are all the same."""
SEPARATED_FROM = 100_000
"""From here up a whole number has separators."""


class Cell(NamedTuple):
    """The text of a cell and the number it is sorted by."""

    text: str
    sort: str | None = None


@dataclass(frozen=True)
class TableColumn:
    """A heading and its cells; numbers are aligned on the right."""

    text: str
    number: bool
    cells: list[Cell]


def table_columns(frame: pd.DataFrame) -> Iterator[TableColumn]:
    """The columns of a frame as a reader sees them.

    `low` and `high` next to one another are one interval of the column before them. Internal columns are left out.
    """
    visible = frame.loc[:, [not column(str(name)).is_internal for name in frame.columns]]
    names = [str(name) for name in visible.columns]
    for place, name in enumerate(names):
        values = list(visible.iloc[:, place])
        if place and names[place : place + 2] == ["low", "high"]:
            ends = zip(values, visible.iloc[:, place + 1], strict=True)
            cells = [_interval(names[place - 1], low, high) for low, high in ends]
            yield TableColumn(f"{frame.attrs.get(INTERVAL, '95%')} interval", True, cells)
        elif place < 2 or names[place - 1 : place + 1] != ["low", "high"]:
            # next to a mean, a time that is a median says so
            heading = "median" if name == "seconds" and "mean_s" in names else column(name).title
            present = [value for value in values if not _is_missing(value)]
            is_number = bool(present) and all(map(_is_number, present))
            yield TableColumn(heading, is_number, [_cell(name, value) for value in values])


def split_constant(columns: list[TableColumn]) -> tuple[list[TableColumn], str]:
    """Of a wide table, the columns whose cells differ, and a sentence on the others."""
    if len(columns) <= MAX_COLUMNS or len(columns[0].cells) < 2:
        return columns, ""
    same = {one.text: one.cells[0].text for one in columns if len({cell.text for cell in one.cells}) == 1}
    others = ", ".join(f"{name} {value}" for name, value in same.items() if value != "–")
    return [one for one in columns if one.text not in same], f"The same in all rows: {others}." if others else ""


def _interval(name: str, low: float, high: float) -> Cell:
    """ "[48.4, 62.8] ms", and "[0.9 ms, 1.1 s]" if the units differ; sorted by the lower end."""
    if _is_missing(low):
        return Cell("–")
    start, end = _text(name, low), _text(name, high)
    (_, _, unit), (number, _, other) = start.partition(" "), end.partition(" ")
    is_same = unit and unit == other
    text = f"[{start.removesuffix(f' {unit}')}, {number}] {unit}" if is_same else f"[{start}, {end}]"
    return Cell(text, f"{low:.12g}")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(name: str, value: Any) -> Cell:
    has_number = _is_number(value) and not _is_missing(value)
    return Cell(_text(name, value), f"{value:.12g}" if has_number else None)


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
