"""Figures as a lab declares them. Only drawing one imports matplotlib.

A lab declares a figure with a question. A notebook draws others:
`lab.show(Lines(source=TIME, x="n_bytes"), "name")`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from labkit.lab.config import ParameterError
from labkit.lab.metric import Metric, Results
from labkit.lab.units import label

# Stands for the column of colors in a figure of one color, so that drawing needs no other case.
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Declares a figure of a value `y` along `x`.

    Its rows are those of the answer's table, of a metric's medians, or of another table. By default
    `y` is the value of the metric, or the ratio. `low` and `high` directly after it are its
    interval.
    """

    x: str
    y: str | None = None
    source: Metric | Callable[[Results], pd.DataFrame] | None = None
    panel: str | None = None
    """Column of panels."""
    hue: str | None = None
    """Column of colors; by default the alternatives of the metric."""
    reference: str | None = None
    """Column of what a formula says: a dashed line, or one across each bar."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Column -> value of the rows to plot; if no row has it, the largest number or last name."""

    @property
    def color(self) -> str:
        """Column of colors, or `ALL` for a figure of one color."""
        if self.hue is not None:
            return self.hue
        if isinstance(self.source, Metric) and self.source.compare != self.x:
            return self.source.compare
        return ALL

    @property
    def value(self) -> str:
        """Column of the y axis."""
        if self.y is not None:
            return self.y
        return self.source.value if isinstance(self.source, Metric) else "ratio"

    @property
    def keys(self) -> list[str]:
        """Columns that a frame must have."""
        keys = dict.fromkeys((self.x, self.panel, self.value, self.color, self.reference))
        return [name for name in keys if name is not None and name != ALL]

    def frame(self, results: Results, answer_table: pd.DataFrame | None = None) -> pd.DataFrame:
        """Return the rows of the results to plot; empty if there is no table."""
        return self._select(self._table(results, answer_table))

    def caption(self, results: Results, answer_table: pd.DataFrame | None = None) -> str:
        """Say which of several values are plotted: "Plotted: float32, batch 64.", or ""."""
        table = self._table(results, answer_table)
        rows = self._select(table)
        alone = [
            name
            for name in self.at
            if name in table and table[name].nunique() > 1 and rows[name].nunique() == 1
        ]
        names = ", ".join(label(name, rows[name].iloc[0]) for name in alone)
        return f"Plotted: {names}." if names else ""

    def _table(self, results: Results, answer_table: pd.DataFrame | None) -> pd.DataFrame:
        source = self.source
        table = answer_table
        if isinstance(source, Metric):
            # Counts have no noise: their answer rests on the largest, and so does the figure.
            table = source.largest(results.frame) if source.exact else source.medians(results.frame)
        elif source is not None:
            table = source(results)
        return pd.DataFrame() if table is None else table

    def _select(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows at `at`."""
        # Columns that the table lacks, or that make panels or colors, select nothing.
        for name, wanted in self.at.items():
            if name in table and name not in (self.panel, self.color) and len(table):
                values = table[name]
                # Profiles measure different sizes: a figure of one size takes the largest there is.
                if not (values == wanted).any():
                    wanted = values.max() if is_numeric_dtype(values) else values.iloc[-1]
                table = table[values == wanted]
        return table

    def tidy(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the columns of the figure, of the rows that can be drawn.

        `ALL` becomes a column of empty texts. ParameterError for a missing column.
        """
        # A table of no rows may lack its columns, too.
        if not len(frame.columns):
            frame = pd.DataFrame(columns=self.keys)
        missing = [name for name in self.keys if name not in frame]
        if missing:
            raise ParameterError(
                f"no column {', '.join(missing)}; the frame has"
                f" {', '.join(map(str, frame.columns))}"
            )
        # A row that only has the reference continues its line.
        needed = [self.x, self.value if self.reference is None else self.reference]
        rows = frame[self._columns_with_interval(frame)].dropna(subset=needed)
        return rows.assign(**{ALL: ""}) if self.color == ALL else rows

    def _columns_with_interval(self, frame: pd.DataFrame) -> list[str]:
        columns = list(frame.columns)
        after_value = columns.index(self.value) + 1
        # A frame may have intervals of another column: those of the value directly follow it.
        if columns[after_value : after_value + 2] != ["low", "high"]:
            return self.keys
        position = self.keys.index(self.value) + 1
        with_interval = [*self.keys[:position], "low", "high", *self.keys[position:]]
        return list(dict.fromkeys(with_interval))


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """One line per `hue`, one panel per `panel`; with more lines than colors, several.

    An `x` of names gets dots instead of lines, and so do several points at one `x`. If all points
    have the same number as `x`, names of `hue` stand there.
    """

    log: str = "xy"
    """Logarithmic axes: "x", "y", "xy" or ""."""

    def __post_init__(self) -> None:
        if not set(self.log) <= set("xy"):
            raise ParameterError(
                f"log names the logarithmic axes, 'x', 'y', 'xy' or '': got {self.log!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """One group of bars per category of `x`, from zero.

    A group has one bar per value of `hue`, or one layer if `stacked`. ParameterError for two rows
    of the same bar.
    """

    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class Areas(Figure):
    """Parts of a whole over a numeric axis, stacked from the bottom up in `order`.

    A value holds until the next `x` (steps, not slopes: memory jumps). A part without a row at some
    `x` is 0 there.
    """

    order: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline(Figure):
    """Boxes that start at `start_s` and last `duration_s`; the first starts at 0.

    One lane per name, from the top down. If each lane has one box, its duration is written next to
    it.
    """

    x: str = "start_s"
    y: str = "duration_s"
    lane: str

    @property
    def keys(self) -> list[str]:
        return [self.lane, *super().keys]
