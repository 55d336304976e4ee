"""Lines over a numeric axis, one panel a facet, intervals as error bars."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from labkit.lab.columns import column, label
from labkit.lab.figures.style import (
    ALL,
    AT,
    FEW_PLACES,
    MARKERS,
    MEASURED,
    PAGE,
    PALETTE,
    PANEL_HEIGHT,
    PUBLISHED,
    SOFT,
    TEXT,
    WIDE,
    WIDTH,
    Mark,
    Plot,
    drawn_columns,
    error_bars,
    facet_title,
    finish_axes,
    format_axis,
    legend,
    name_axis,
    name_panel,
    nothing_to_draw,
    plotted,
    told,
    value_title,
    with_hue,
    with_interval,
)

MOST_IN_A_ROW = 3  # panels; more are cut off or too small to read on a page
MOST_LINES = 6  # in a panel; more cannot be told from one another
MOST_POINTS = 100  # of a line; more are drawn small


def lines(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    facet_order: Sequence[Any] | None = None,
    log: str | None = "xy",
    linked: bool = True,
    level: float | None = None,
    y_title: str | None = None,
    reference: pd.DataFrame | None = None,
    reference_label: str = "published",
    source: str = MEASURED,
) -> Plot:
    """One line per value of `hue`, one panel per value of `facet`, the interval as error bars.

    `frame` is tidy and aggregated: one row per plotted point; `low` and `high` right behind `y` are its interval.
    An `x` of names gets points without lines; so does any if not `linked`. `log` names the logarithmic axes: "x", "y",
    "xy", or none.
    `hue_order` names all values that may occur, so that each keeps its color from figure to figure.
    `facet_order` does the same for the panels, which are otherwise sorted; what has more than `MOST_LINES` lines
    becomes several. `level` draws a horizontal line (1 for a ratio). `reference` holds the same columns and is drawn
    dashed and hollow under `reference_label`: on demand only (`Plot.with_published`) if that begins with "published".
    `frame` itself is dashed if `source` says that it is not from here. A frame without values gives an empty plot that
    says so. ValueError if a column is missing, or `log` names anything else.
    """
    log = log or ""
    if not set(log) <= set("xy"):
        raise ValueError(f"log names the logarithmic axes, 'x', 'y', 'xy' or '': got {log!r}")
    frame, hue = with_hue(frame, hue)
    columns = drawn_columns(frame, x, y, hue, facet)
    if frame.empty:
        return nothing_to_draw(frame[columns])
    columns = [*columns, "source"]
    own = frame.assign(source=source)
    data = own[with_interval(columns, own, y)].dropna(subset=[y])
    draw = partial(
        _draw,
        x=x,
        y=y,
        hue=hue,
        hue_order=hue_order,
        facet=facet,
        facet_order=facet_order,
        log=log,
        linked=linked,
        level=level,
        y_title=y_title,
    )
    if reference is None:
        return draw(data)
    reference = reference.assign(source=reference_label, **({ALL: ""} if hue == ALL else {}))
    reference = reference[drawn_columns(reference, *columns)].dropna(subset=[y])  # drawn without intervals
    both = pd.concat([data, reference], ignore_index=True)
    if data.empty or reference.empty or not reference_label.startswith(PUBLISHED):
        return draw(both)
    return draw(data, with_published=draw(both))


def _draw(
    data: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str,
    hue_order: Sequence[Any] | None,
    facet: str | None,
    facet_order: Sequence[Any] | None,
    log: str,
    linked: bool,
    level: float | None,
    y_title: str | None,
    with_published: Plot | None = None,
) -> Plot:
    if data.empty:
        return nothing_to_draw(data)
    places = _places(data[x])
    order = [name for name in data.columns if name not in ("low", "high")]
    data = data.assign(**{AT: data[x].map(places) if places else data[x]}).sort_values(order, ignore_index=True)
    styles = {value: index for index, value in enumerate(dict.fromkeys([*(hue_order or ()), *sorted(set(data[hue]))]))}
    panels = [
        (value, part)
        for value in ([None] if facet is None else _in_order(data[facet], facet_order))
        for part in _few_lines(data if value is None else data[data[facet] == value], hue, list(styles))
    ]
    figure, axes, first_of_row = _subplots(len(panels))
    marks: list[Mark] = []
    measured = set(data.loc[data["source"] == MEASURED, hue])
    for axis, (value, panel) in zip(axes, panels, strict=True):
        marks += _draw_panel(axis, panel, x, y, hue, styles, measured, linked=linked and not places)
        _finish_panel(axis, x, places or sorted(set(data[x])), log, level)
        if value is not None:
            name_panel(axis, facet_title(facet or "", value))
    for axis in first_of_row:
        name_axis(axis.yaxis, value_title(y, y_title))
    for source in sorted(set(data.loc[data[hue].isin(measured), "source"]) - {MEASURED}):  # named once, not once a line
        axes[0].plot([], [], color=SOFT, linestyle="--", marker="o", markerfacecolor=PAGE, markersize=4.5, label=source)
    format_axis(axes[0].yaxis, y, "y" in log)
    legend(figure, axes, hue, _from_the_top(data, y, hue))
    return plotted(figure, data, marks, with_published)


def _few_lines(panel: pd.DataFrame, hue: str, order: Sequence[Any]) -> list[pd.DataFrame]:
    """The rows of a panel, or of several where they are too many lines."""
    found = [value for value in order if value in set(panel[hue])]
    size = -(-len(found) // -(-len(found) // MOST_LINES))
    return [panel[panel[hue].isin(found[at : at + size])] for at in range(0, len(found), size)]


def _from_the_top(data: pd.DataFrame, y: str, hue: str) -> list[str]:
    """Names in the order in which their lines end, on the right, from the top down."""
    ends = data[data["source"] == MEASURED].groupby(hue, sort=False)[y].last()
    return [_name(value) for value in ends.sort_values(ascending=False, kind="stable").index]


def _name(value: Any, source: str = MEASURED) -> str:
    name = f"{value}" if source == MEASURED else f"{value}, {source}"
    return (name if value != "" else source).replace("_", " ")


def _places(values: pd.Series) -> dict[Any, int] | None:
    """Where names stand, in the order of their rows; None for numbers, which stand where they are."""
    if is_numeric_dtype(values) and not is_bool_dtype(values):
        return None
    return {name: place for place, name in enumerate(dict.fromkeys(values))}


def _subplots(panels: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """Panels that share the y axis, up to three side by side and four as two rows; those that begin a row."""
    columns = panels if panels <= MOST_IN_A_ROW else 2 if panels == 4 else MOST_IN_A_ROW
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH if panels == 1 else WIDE, PANEL_HEIGHT * rows), layout="constrained")
    if rows > 1:
        figure.set_layout_engine("constrained", h_pad=0.12)  # inches: a title is not to touch the axis above it
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for empty in axes[panels:]:
        empty.remove()
    return figure, axes[:panels], list(grid[:, 0])


def _in_order(values: pd.Series, order: Sequence[Any] | None) -> list[Any]:
    found = set(values)
    return sorted(found) if order is None else [value for value in order if value in found]


def _draw_panel(
    axis: Axes, panel: pd.DataFrame, x: str, y: str, hue: str, styles: dict[Any, int], measured: set[Any], linked: bool
) -> list[Mark]:
    """Lines by source; one that is not from here has the color of the one that is, and no name of its own."""
    marks = []
    for source in dict.fromkeys([MEASURED, *panel["source"]]):
        for value, index in styles.items():
            series = panel[(panel["source"] == source) & (panel[hue] == value)]
            if series.empty:
                continue
            name = _name(value, source) if source == MEASURED or value not in measured else "_"
            _draw_line(axis, series, y, name, index, source == MEASURED, linked)
            for _, row in series.iterrows():
                names = (label(hue, value), source if source != MEASURED else "", label(x, row[x]))
                marks.append(Mark(axis, row[AT], row[y], row[AT], row[y], told(names, y, row)))
    return marks


def _draw_line(axis: Axes, series: pd.DataFrame, y: str, name: str, index: int, here: bool, linked: bool) -> None:
    axis.errorbar(
        series[AT],
        series[y],
        yerr=error_bars(series, y) if here else None,
        color=PALETTE[index % len(PALETTE)],
        marker=MARKERS[index % len(MARKERS)],
        markerfacecolor=None if here else PAGE,
        linestyle="none" if not linked else "-" if here else "--",
        linewidth=1.8 if here else 1.0,
        elinewidth=1.0,
        markersize=4.5 if len(series) <= MOST_POINTS else 2.2,
        capsize=0,
        alpha=1.0 if here else 0.8,
        label=name,
    )


def _finish_panel(axis: Axes, x: str, places: Sequence[Any] | dict[Any, int], log: str, level: float | None) -> None:
    if "x" in log and not isinstance(places, dict):
        axis.set_xscale("log", base=2 if column(x).doubles else 10)
    if "y" in log:
        axis.set_yscale("log")
    if level is not None:
        axis.axhline(level, color=TEXT, linewidth=1.0, zorder=1)
    finish_axes(axis, grid="y")
    name_axis(axis.xaxis, column(x).axis)
    if isinstance(places, dict):
        names = [str(name).replace("_", " ") for name in places]
        axis.set_xticks(list(places.values()), names, rotation=25, ha="right", rotation_mode="anchor")
        axis.margins(x=0.15)
        return
    format_axis(axis.xaxis, x, "x" in log)
    if len(places) <= FEW_PLACES:
        axis.set_xticks(places)
        axis.margins(x=0.15)  # room for the labels of the first and the last, beside those of the next panel
