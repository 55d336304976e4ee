"""Lines over a numeric axis, or dots over names: one panel per facet, intervals as vertical
lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.figure import Figure, Mark, Plot
from labkit.lab.figures.names import in_order
from labkit.lab.units import column

MAX_LINES = len(style.PALETTE)  # in a panel; more cannot be told apart
MANY_POINTS = 100  # of a line; more are drawn small
SPREAD = 0.5  # of the distance between two names on the x axis: room for the dots of one
FEW_PLACES = 4  # on the x axis: each gets a tick
RATIOS = ("ratio", "measured_over_predicted")  # columns with a line at 1
AT = "at"  # column of places on the x axis


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

    def draw_rows(self, data: pd.DataFrame) -> Plot:
        if self.color not in (self.x, style.ALL) and _has_one_number(data[self.x]):
            # with `hue`: a metric as source gives the color of another column than `x` only
            return replace(self, x=self.color, hue=self.color).draw_rows(data)
        names = None if _has_numbers(data[self.x]) else in_order(data[self.x])
        hues = in_order(data[self.color])
        at = data[self.x]
        if names:  # dots of several colors stand side by side
            step = 0.0 if self.color == self.x else SPREAD / len(hues)
            at = at.map(names.index) + step * (
                data[self.color].map(hues.index) - (len(hues) - 1) / 2
            )
        rows = data.assign(**{AT: at})
        data = rows.sort_values(AT, kind="stable")
        colors = style.colors(hues)
        markers = style.markers(hues)
        panels = list(self._panels(rows))
        figure, axes = style.panel_grid(len(panels))
        marks: list[Mark] = []
        for axis, (title, part) in zip(axes, panels, strict=True):
            marks += self._draw_panel(axis, part, colors, markers)
            style.finish_axes(axis, title, x=column(self.x).axis, y=style.value_title(self.value))
            if names:
                inches = (
                    float(figure.get_figwidth()) * 0.8 / min(len(panels), style.MAX_PANELS_IN_ROW)
                )
                style.place_names(axis, [style.name_text(name) for name in names], inches)
            else:
                self._place_ticks(axis, sorted(set(data[AT])))
        # last: seaborn draws on a logarithmic axis by its logarithms, which rounds
        if "y" in self.log:
            axes[0].set_yscale("log")
        style.format_axis(axes[0].yaxis, self.value, is_log="y" in self.log)
        style.add_legend(figure, self.color, self._handles(data, colors, markers))
        return Plot(figure, data.drop(columns=AT), marks)

    def _panels(self, data: pd.DataFrame) -> Iterator[tuple[str | None, pd.DataFrame]]:
        """Yield title and rows of each panel, in several parts if they are too many lines."""
        for title, rows in style.split_panels(data, self.panel):
            names = in_order(rows[self.color])
            size = -(-len(names) // -(-len(names) // MAX_LINES))
            for start in range(0, len(names), size):
                part = rows[rows[self.color].isin(names[start : start + size])]
                yield title, part.sort_values(AT, kind="stable")

    def _draw_panel(
        self, axis: Axes, rows: pd.DataFrame, colors: Mapping[Any, str], markers: Mapping[Any, str]
    ) -> list[Mark]:
        import seaborn  # a second, with scipy.stats: a program that only measures is spared it

        seaborn.lineplot(
            rows, x=AT, y=self.value, hue=self.color, style=self.color, palette=colors,
            markers=markers,
            dashes=False, estimator=None, errorbar=None, sort=False, legend=False, ax=axis,
            linewidth=1.8,
            linestyle="-" if self._has_lines(rows) else "none",
            markersize=5 if len(rows) <= MANY_POINTS else 2.2,
        )  # fmt: skip
        for line in axis.lines:
            line.set_markeredgecolor(line.get_color())
        style.draw_intervals(axis, rows[AT], rows, [colors[name] for name in rows[self.color]])
        if self.value in RATIOS:
            axis.axhline(1, color=style.TEXT, linewidth=1.0, zorder=1)
        if self.reference is not None:
            line = rows.drop_duplicates(AT).sort_values(AT)
            axis.plot(line[AT], line[self.reference], **style.REFERENCE)
        measured = rows.dropna(subset=self.value)
        places = [(row, row[AT], row[self.value]) for row in measured.to_dict("records")]
        return [Mark(axis, x, y, x, y, self._text(row)) for row, x, y in places]

    def _has_lines(self, rows: pd.DataFrame) -> bool:
        """Return whether colors have several points, and one at each number of the x axis."""
        keys = [name for name in (self.panel, self.x, self.color) if name in rows]
        measured = rows.dropna(subset=self.value)
        is_single = not measured.duplicated(self.color).any()
        return _has_numbers(rows[self.x]) and not is_single and not measured.duplicated(keys).any()

    def _place_ticks(self, axis: Axes, places: list[float]) -> None:
        if "x" in self.log:
            axis.set_xscale("log", base=2 if column(self.x).doubles else 10)
        style.format_axis(axis.xaxis, self.x, is_log="x" in self.log)
        if len(places) <= FEW_PLACES:
            axis.set_xticks(places)
            axis.margins(x=0.15)  # room for the first and the last label next to another panel

    def _handles(
        self, data: pd.DataFrame, colors: Mapping[Any, str], markers: Mapping[Any, str]
    ) -> dict[str, Line2D]:
        """Return legend entries."""
        look: dict[str, Any] = {
            "linestyle": "-" if self._has_lines(data) else "none",
            "markersize": 5,
        }
        handles = {
            str(name): Line2D([], [], color=colors[name], marker=markers[name], **look)
            for name in colors
        }
        if self.reference is not None:
            handles[column(self.reference).axis] = Line2D([], [], **style.REFERENCE)
        return handles


def _has_numbers(values: pd.Series) -> bool:
    return is_numeric_dtype(values) and not is_bool_dtype(values)


def _has_one_number(values: pd.Series) -> bool:
    return _has_numbers(values) and values.nunique() == 1
