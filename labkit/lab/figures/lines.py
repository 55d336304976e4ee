"""Draw lines over a numeric axis, or dots over names, with intervals as vertical lines."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from labkit.lab.figures import style
from labkit.lab.figures.figure import ALL, Lines
from labkit.lab.figures.plot import Mark, Plot, point_text
from labkit.lab.units import column

MAX_LINES = len(style.PALETTE)  # in a panel; more cannot be told apart
MANY_POINTS = 100  # of a line; more are drawn small
SPREAD = 0.5  # of the distance between two names on the x axis: room for the dots of one
FEW_PLACES = 4  # on the x axis: each gets a tick
RATIOS = ("ratio", "measured_over_predicted")  # columns with a line at 1
AT = "at"  # column of places on the x axis


def draw_lines(figure: Lines, data: pd.DataFrame) -> Plot:
    """Draw rows that all have a value: one panel per facet."""
    has_one_x = _has_numbers(data[figure.x]) and data[figure.x].nunique() == 1
    # All lines would be single points above one number: their names say more on that axis.
    if has_one_x and figure.color not in (figure.x, ALL):
        # Also `hue`: a metric as source gives the color of another column than `x` only.
        return draw_lines(replace(figure, x=figure.color, hue=figure.color), data)
    hues = style.in_order(data[figure.color])
    at = data[figure.x]
    names: list[Any] = []
    if not _has_numbers(at):
        names = style.in_order(at)
        at = at.map(names.index)
        if figure.color != figure.x:  # dots of several colors stand side by side
            place = data[figure.color].map(hues.index) - (len(hues) - 1) / 2
            at = at + SPREAD / len(hues) * place
    rows = data.assign(**{AT: at})
    # Panels are made of the unsorted rows: unknown names keep the order in which they came.
    data = rows.sort_values(AT, kind="stable")
    colors = style.colors(hues)
    markers = style.markers(hues)
    panels = list(_split_panels(figure, rows))
    canvas, axes = style.panel_grid(len(panels))
    marks: list[Mark] = []
    for axis, (title, part) in zip(axes, panels, strict=True):
        marks += _draw_panel(figure, axis, part, colors, markers)
        style.finish_axes(axis, title, x=column(figure.x).axis, y=style.value_title(figure.value))
        if names:
            n_columns = min(len(panels), style.MAX_PANELS_IN_ROW)
            inches = float(canvas.get_figwidth()) * style.PANELS_SHARE / n_columns
            style.place_names(axis, [style.name_text(name) for name in names], inches)
        else:
            _place_ticks(figure, axis, sorted(set(data[AT])))
    # Last: seaborn draws on a logarithmic axis by its logarithms, which rounds the points.
    if "y" in figure.log:
        axes[0].set_yscale("log")
    style.format_axis(axes[0].yaxis, figure.value, is_log="y" in figure.log)
    style.add_legend(canvas, figure.color, _legend_entries(figure, data, colors, markers))
    return Plot(canvas, data.drop(columns=AT), marks)


def _split_panels(figure: Lines, data: pd.DataFrame) -> Iterator[tuple[str | None, pd.DataFrame]]:
    """Yield title and rows of each panel, in several parts if they are too many lines."""
    for title, rows in style.split_panels(data, figure.panel):
        names = style.in_order(rows[figure.color])
        # In equal parts: ten lines and one more would be a panel of one.
        n_parts = math.ceil(len(names) / MAX_LINES)
        size = math.ceil(len(names) / n_parts)
        for start in range(0, len(names), size):
            part = rows[rows[figure.color].isin(names[start : start + size])]
            yield title, part.sort_values(AT, kind="stable")


def _draw_panel(
    figure: Lines,
    axis: Axes,
    rows: pd.DataFrame,
    colors: Mapping[Any, str],
    markers: Mapping[Any, str],
) -> list[Mark]:
    seaborn.lineplot(
        rows,
        x=AT,
        y=figure.value,
        hue=figure.color,
        palette=colors,
        style=figure.color,
        markers=markers,
        dashes=False,
        # A row is a point already: nothing is averaged or sorted.
        estimator=None,
        errorbar=None,
        sort=False,
        legend=False,
        ax=axis,
        linewidth=1.8,
        linestyle=_line_style(figure, rows),
        markersize=5 if len(rows) <= MANY_POINTS else 2.2,
    )
    # seaborn draws white edges, which hide small markers.
    for line in axis.lines:
        line.set_markeredgecolor(line.get_color())
    style.draw_intervals(axis, rows[AT], rows, [colors[name] for name in rows[figure.color]])
    if figure.value in RATIOS:
        axis.axhline(1, color=style.TEXT, linewidth=1.0, zorder=1)
    if figure.reference is not None:
        # A formula has one value per place, whatever the alternative.
        line = rows.drop_duplicates(AT).sort_values(AT)
        axis.plot(line[AT], line[figure.reference], **style.REFERENCE)
    measured = rows.dropna(subset=figure.value).to_dict("records")
    places = [(row, row[AT], row[figure.value]) for row in measured]
    return [Mark(axis, x, y, x, y, point_text(figure, row)) for row, x, y in places]


def _line_style(figure: Lines, rows: pd.DataFrame) -> str:
    """Return "-" if colors have several points, and one at each number of the x axis."""
    keys = [name for name in (figure.panel, figure.x, figure.color) if name in rows]
    measured = rows.dropna(subset=figure.value)
    has_several = measured.duplicated(figure.color).any()
    is_line = has_several and not measured.duplicated(keys).any() and _has_numbers(rows[figure.x])
    return "-" if is_line else "none"


def _place_ticks(figure: Lines, axis: Axes, places: list[float]) -> None:
    if "x" in figure.log:
        axis.set_xscale("log", base=2 if column(figure.x).doubles else 10)
    style.format_axis(axis.xaxis, figure.x, is_log="x" in figure.log)
    if len(places) <= FEW_PLACES:
        axis.set_xticks(places)
        axis.margins(x=0.15)  # room for the first and the last label next to another panel


def _legend_entries(
    figure: Lines, data: pd.DataFrame, colors: Mapping[Any, str], markers: Mapping[Any, str]
) -> dict[str, Line2D]:
    look: dict[str, Any] = {"linestyle": _line_style(figure, data), "markersize": 5}
    entries = {
        str(name): Line2D([], [], color=colors[name], marker=markers[name], **look)
        for name in colors
    }
    if figure.reference is not None:
        entries[column(figure.reference).axis] = Line2D([], [], **style.REFERENCE)
    return entries


def _has_numbers(values: pd.Series) -> bool:
    return is_numeric_dtype(values) and not is_bool_dtype(values)
