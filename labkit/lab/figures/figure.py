"""Declarations of figures: which table of a run's results is drawn, and along which columns.

A lab declares one with a question; a notebook draws its own: `lab.show(Lines(source=TIME, x="n_bytes"), "my_figure")`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from matplotlib.patches import Patch

from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.plot import Plot
from labkit.lab.metric import Metric, Results

RATIO: Literal["ratio"] = "ratio"
"""Draws the ratios in the answer's own table."""
Source = Metric | Callable[[Results], pd.DataFrame] | Literal["ratio"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the medians of a metric, of a table of the lab, or of the ratios of an answer (`RATIO`)."""

    source: Source = RATIO
    panel: str | None = None
    """The column that makes panels."""
    hue: str | None = None
    """The column of colors; by default the alternatives of the metric."""

    @property
    def color(self) -> str:
        """The column of colors, or `ALL` for a figure of one color."""
        return self.hue or (self.source.compare if isinstance(self.source, Metric) else style.ALL)

    def draw(self, results: Results, answer_table: pd.DataFrame | None = None) -> Plot:
        """The figure of these results; one without rows says so. ParameterError for a missing column."""
        if isinstance(self.source, Metric):
            return self.plot(self.source.medians(results.frame))
        if callable(self.source):
            return self.plot(self.source(results))
        return self.plot(pd.DataFrame() if answer_table is None else answer_table)

    def plot(self, frame: pd.DataFrame) -> Plot:
        """The figure of a tidy frame, one row per point, bar or box. ParameterError for a missing column."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ValueFigure(Figure):
    """A figure of a value `y` along `x`; by default the value of the metric, or a ratio."""

    x: str
    y: str | None = None

    @property
    def value(self) -> str:
        """The column of the y axis."""
        return self.y or (self.source.value if isinstance(self.source, Metric) else "ratio")


def tidy(frame: pd.DataFrame, y: str, *columns: str | None, hue: str) -> pd.DataFrame:
    """The rows that have a value, with the columns of a figure; for the hue `ALL`, one of empty texts.

    `low` and `high` right behind `y` are its interval. ParameterError for a missing column.
    """
    names = [name for name in dict.fromkeys((*columns, y, hue)) if name not in (None, style.ALL)]
    frame = frame if len(frame.columns) else pd.DataFrame(columns=names)
    if missing := [str(name) for name in names if name not in frame]:
        raise ParameterError(f"no column {', '.join(missing)}; the frame has {', '.join(map(str, frame.columns))}")
    place = list(frame.columns).index(y)
    if list(frame.columns[place + 1 : place + 3]) == ["low", "high"]:  # a frame has intervals of one column only
        names[names.index(y) + 1 : names.index(y) + 1] = ["low", "high"]
    extra = {style.ALL: ""} if hue == style.ALL else {}
    return frame[list(dict.fromkeys(names))].dropna(subset=[y]).assign(**extra)


def patches(colors: Mapping[Any, str]) -> dict[str, Patch]:
    """Entries of a legend by their names."""
    return {str(name): Patch(color=color) for name, color in colors.items()}
