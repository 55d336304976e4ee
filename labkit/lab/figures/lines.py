"""Lines over a numeric axis, or dots over names: one panel per facet, intervals as vertical lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from labkit.lab.columns import column, label
from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis

MAX_LINES = 6  # in a panel; more cannot be told apart
MANY_POINTS = 100  # of a line; more are drawn small
FEW_PLACES = 4  # on the x axis: each gets a tick
AT = "at"  # the column of places on the x axis


@dataclass(frozen=True)
class _Look:
    x: str
    y: str
    hue: str
    facet: str | None
    colors: Mapping[Any, str]
    markers: Mapping[Any, str]
    log: str
    level: float | None


def lines(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    facet: str | None = None,
    log: str = "xy",
    level: float | None = None,
    reference: pd.DataFrame | None = None,
) -> style.Plot:
    """One line per value of `hue`, one panel per value of `facet`; a panel with more than six lines becomes several.

    `frame` has one row per point; `low` and `high` right behind `y` are its interval. An `x` of names gets dots, and so
    do lines that would have several points at one `x`. `log` names the logarithmic axes: "x", "y", "xy" or "". `level`
    is a horizontal line, such as 1 for a ratio. `reference` has published rows with the same columns; they are dashed
    and hollow, and appear on demand only. ParameterError for a missing column.
    """
    if not set(log) <= set("xy"):
        raise ParameterError(f"log names the logarithmic axes, 'x', 'y', 'xy' or '': got {log!r}")
    rows, color = style.tidy(frame, y, x, facet, hue=hue)
    rows = rows.assign(source=style.MEASURED)
    if reference is not None:  # drawn without intervals
        reference, _ = style.tidy(reference.drop(columns=["low", "high"], errors="ignore"), y, x, facet, hue=hue)
        reference = reference.assign(source=style.PUBLISHED)
    names = sorted({*rows[color], *(() if reference is None else reference[color])})
    colors, markers = style.looks(names, style.PALETTE), style.looks(names, style.MARKERS)
    look = _Look(x, y, color, facet, colors, markers, log, level)
    return style.with_reference(partial(_draw, look=look), rows, reference)


def _draw(data: pd.DataFrame, look: _Look) -> style.Plot:
    if data.empty:
        return style.nothing_to_draw(data)
    names = None if _has_numbers(data[look.x]) else list(dict.fromkeys(data[look.x]))
    at = data[look.x].map(names.index) if names else data[look.x]
    data = data.assign(**{AT: at}).sort_values([AT, look.hue], kind="stable")
    facets = [None] if look.facet is None else sorted(set(data[look.facet]))
    panels = [(value, part) for value in facets for part in _split(data, look, value)]
    figure, axes = style.panel_grid(len(panels), style.PANEL_HEIGHT)
    marks: list[style.Mark] = []
    for axis, (value, rows) in zip(axes, panels, strict=True):
        marks += _draw_panel(axis, rows, look)
        name = None if value is None else style.panel_title(look.facet or "", value)
        style.finish_axes(axis, name, x=column(look.x).axis, y=style.value_title(look.y))
        _place_ticks(axis, look, names, sorted(set(data[AT])))
    if "y" in look.log:  # last: seaborn draws on a logarithmic axis by its logarithms, which rounds
        axes[0].set_yscale("log")
    format_axis(axes[0].yaxis, look.y, "y" in look.log)
    style.legend(figure, look.hue, _handles(data, look))
    return style.plotted(figure, data.drop(columns=AT), marks)


def _split(data: pd.DataFrame, look: _Look, value: Any) -> list[pd.DataFrame]:
    """The rows of a facet, or several parts of them if they are too many lines."""
    rows = data if value is None else data[data[look.facet] == value]
    names = style.present(rows[look.hue], look.colors)
    size = -(-len(names) // -(-len(names) // MAX_LINES))
    return [rows[rows[look.hue].isin(names[start : start + size])] for start in range(0, len(names), size)]


def _draw_panel(axis: Axes, rows: pd.DataFrame, look: _Look) -> list[style.Mark]:
    is_line = _has_numbers(rows[look.x]) and not rows.duplicated([look.x, look.hue, "source"]).any()
    for source, group in rows.groupby("source", sort=False):
        is_here = source == style.MEASURED
        before = len(axis.lines)
        seaborn.lineplot(
            group, x=AT, y=look.y, hue=look.hue, style=look.hue, palette=dict(look.colors), markers=dict(look.markers),
            dashes=False, estimator=None, errorbar=None, sort=False, legend=False, ax=axis, markeredgewidth=1.0,
            linestyle=("-" if is_here else "--") if is_line else "none",
            linewidth=1.8 if is_here else 1.0, markersize=5 if len(group) <= MANY_POINTS else 2.2,
        )  # fmt: skip
        for line in axis.lines[before:]:
            line.set_markeredgecolor(line.get_color())
            line.set_markerfacecolor(line.get_color() if is_here else style.PAGE)
        if is_here:
            style.draw_intervals(axis, group[AT], group, [look.colors[name] for name in group[look.hue]])
    if look.level is not None:
        axis.axhline(look.level, color=style.TEXT, linewidth=1.0, zorder=1)
    return [
        style.Mark(axis, row[AT], row[look.y], row[AT], row[look.y], style.mark_text(_names(row, look), look.y, row))
        for row in rows.to_dict("records")
    ]


def _has_numbers(values: pd.Series) -> bool:
    return is_numeric_dtype(values) and not is_bool_dtype(values)


def _names(row: Mapping[str, Any], look: _Look) -> tuple[str, str, str]:
    source = row["source"] if row["source"] != style.MEASURED else ""
    return label(look.hue, row[look.hue]), source, label(look.x, row[look.x])


def _place_ticks(axis: Axes, look: _Look, names: list[Any] | None, places: Sequence[float]) -> None:
    if names is not None:
        texts = [style.name_text(name) for name in names]
        axis.set_xticks(range(len(names)), texts, rotation=25, ha="right", rotation_mode="anchor")
        axis.margins(x=0.15)
        return
    if "x" in look.log:
        axis.set_xscale("log", base=2 if column(look.x).doubles else 10)
    format_axis(axis.xaxis, look.x, "x" in look.log)
    if len(places) <= FEW_PLACES:
        axis.set_xticks(places)
        axis.margins(x=0.15)  # room for the first and the last label next to another panel


def _handles(data: pd.DataFrame, look: _Look) -> dict[str, Line2D]:
    """Lines in the order in which they end, from the top down; then each other source, once."""
    here = data[data["source"] == style.MEASURED]
    measured = here if len(here) else data
    ends = measured.groupby(look.hue, sort=False)[look.y].last().sort_values(ascending=False, kind="stable")
    names = {name: f"{name}" or style.MEASURED for name in [*ends.index, *(set(data[look.hue]) - set(ends.index))]}
    handles = {
        text: Line2D([], [], color=look.colors[name], marker=look.markers[name], markersize=5)
        for name, text in names.items()
    }
    for source in sorted(set(data["source"]) - {style.MEASURED} if len(here) else ()):
        hollow: dict[str, Any] = {"markerfacecolor": style.PAGE, "linestyle": "--", "marker": "o"}
        handles[source] = Line2D([], [], color=style.SOFT, markersize=4.5, **hollow)
    return handles
