"""Figures that a lab declares beside a question: what is drawn of a run's results, and along which columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from labkit.lab.figures.areas import areas
from labkit.lab.figures.bars import bars
from labkit.lab.figures.lines import lines
from labkit.lab.figures.style import Plot
from labkit.lab.figures.timeline import timeline
from labkit.lab.metric import Metric, Results

RATIO: Literal["ratio"] = "ratio"
"""Draws the ratios in the answer's own table."""
Source = Metric | Callable[[Results], pd.DataFrame] | Literal["ratio"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What is drawn: the medians of a metric, a table of the lab, or the ratios of the answer (`RATIO`)."""

    source: Source
    panel: str | None = None
    """The column that makes panels."""
    caption: str = ""

    def draw(self, results: Results, answer_table: pd.DataFrame | None) -> Plot:
        """The figure of these results; one without rows says so."""
        raise NotImplementedError

    def _frame(self, results: Results, answer_table: pd.DataFrame | None) -> pd.DataFrame:
        if isinstance(self.source, Metric):
            return self.source.medians(results.frame)
        if callable(self.source):
            return self.source(results)
        return pd.DataFrame() if answer_table is None else answer_table

    def _value(self, y: str | None) -> str:
        if y is not None:
            return y
        return self.source.value if isinstance(self.source, Metric) else "ratio"

    def _hue(self, hue: str | None) -> str | None:
        return self.source.compare if hue is None and isinstance(self.source, Metric) else hue


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """A value over a numeric axis, one line per `hue`, intervals as error bars."""

    x: str
    y: str | None = None
    hue: str | None = None
    log: str = "xy"
    """The logarithmic axes: "x", "y", "xy" or ""."""
    level: float | None = None
    """A horizontal line, such as 1 for a ratio."""
    published: Callable[[], pd.DataFrame] | None = None
    """Published rows with the same columns, drawn on demand."""

    def draw(self, results: Results, answer_table: pd.DataFrame | None) -> Plot:
        y, hue = self._value(self.y), self._hue(self.hue)
        table = self._frame(results, answer_table)
        reference = self.published() if self.published else None
        return lines(
            table, x=self.x, y=y, hue=hue, facet=self.panel, log=self.log, level=self.level, reference=reference
        )


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A value by category, one bar per `hue`, side by side or stacked."""

    x: str
    y: str | None = None
    hue: str | None = None
    stacked: bool = False
    log: bool = False
    level: float | None = None
    published: Callable[[], pd.DataFrame] | None = None

    def draw(self, results: Results, answer_table: pd.DataFrame | None) -> Plot:
        y, hue = self._value(self.y), self._hue(self.hue)
        look: dict[str, Any] = {"stacked": self.stacked, "log": self.log, "level": self.level}
        reference = self.published() if self.published else None
        table = self._frame(results, answer_table)
        return bars(table, x=self.x, y=y, hue=hue, facet=self.panel, reference=reference, **look)


@dataclass(frozen=True, kw_only=True)
class Areas(Figure):
    """Parts of a whole over a numeric axis, stacked."""

    x: str
    y: str
    hue: str
    order: Sequence[str] | None = None

    def draw(self, results: Results, answer_table: pd.DataFrame | None) -> Plot:
        table = self._frame(results, answer_table)
        return areas(table, x=self.x, y=self.y, hue=self.hue, hue_order=self.order, facet=self.panel)


@dataclass(frozen=True, kw_only=True)
class Timeline(Figure):
    """What ran when: one lane per kind, one box per event."""

    start: str
    duration: str
    lane: str
    hue: str | None = None

    def draw(self, results: Results, answer_table: pd.DataFrame | None) -> Plot:
        table = self._frame(results, answer_table)
        return timeline(table, start=self.start, duration=self.duration, lane=self.lane, hue=self.hue)
