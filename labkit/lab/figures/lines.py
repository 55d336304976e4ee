"""Lines over a numeric axis, one panel a facet, intervals as error bars."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from labkit.lab.figures.style import (
    ALL,
    AT,
    DOUBLING,
    FEW_PLACES,
    MARKERS,
    MEASURED,
    PALETTE,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    SINGLE_PANEL_WIDTH,
    Plot,
    axis_title,
    drawn_columns,
    error_bars,
    facet_title,
    finish_axes,
    format_axis,
    legend,
    nothing_to_draw,
    plotted,
    with_hue,
    with_interval,
)

MOST_IN_A_ROW = 3  # panels; more are cut off or too small to read on a page


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
    level: float | None = None,
    y_title: str | None = None,
    reference: pd.DataFrame | None = None,
    reference_label: str = "published",
    source: str = MEASURED,
) -> Plot:
    """One line per value of `hue`, one panel per value of `facet`, the interval as error bars.

    `frame` is tidy and aggregated: one row per plotted point; `low` and `high` right behind `y` are its interval.
    An `x` of names gets points without lines. `log` names the logarithmic axes: "x", "y", "xy", or none.
    `hue_order` names all values that may occur, so that each keeps its color from figure to figure.
    `facet_order` does the same for the panels, which are otherwise sorted. `level` draws a horizontal line (1 for
    a ratio). `reference` holds the same columns and is drawn dashed and hollow under `reference_label`; so is `frame`
    itself if `source` says that it is not from here. A frame without values gives an empty plot that says so.
    ValueError if a column is missing, or `log` names anything else.
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
    pieces = [own[with_interval(columns, own, y)]]
    if reference is not None:  # drawn without intervals
        reference = reference.assign(source=reference_label, **({ALL: ""} if hue == ALL else {}))
        pieces.append(reference[drawn_columns(reference, *columns)])
    data = pd.concat(pieces, ignore_index=True).dropna(subset=[y])
    if data.empty:
        return nothing_to_draw(data)
    places = _places(data[x])
    data = data.assign(**{AT: data[x].map(places) if places else data[x]})
    data = data.sort_values(columns, ignore_index=True)
    panels: Sequence[Any] = [None] if facet is None else _in_order(data[facet], facet_order)
    figure, axes, first_of_row = _subplots(len(panels))
    styles = {value: index for index, value in enumerate(dict.fromkeys([*(hue_order or ()), *sorted(set(data[hue]))]))}
    for axis, value in zip(axes, panels, strict=True):
        panel = data if facet is None else data[data[facet] == value]
        _draw_panel(axis, panel, y, hue, styles, linked=not places)
        _finish_panel(axis, x, places or sorted(set(data[x])), log, level)
        if facet is not None:
            axis.set_title(facet_title(facet, value), fontsize=10)
    for axis in first_of_row:
        axis.set_ylabel(y_title or axis_title(y))
    format_axis(axes[0].yaxis, y, "y" in log)
    legend(figure, axes, hue)
    return plotted(figure, data)


def _places(values: pd.Series) -> dict[Any, int] | None:
    """Where names stand on the x axis, in the order of their rows; None for numbers, which stand where they are."""
    if is_numeric_dtype(values) and not is_bool_dtype(values):
        return None
    return {name: place for place, name in enumerate(dict.fromkeys(values))}


def _subplots(panels: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """Panels that share the y axis, up to three side by side and four as two rows; those that begin a row."""
    columns = panels if panels <= MOST_IN_A_ROW else 2 if panels == 4 else MOST_IN_A_ROW
    rows = -(-panels // columns)
    width = SINGLE_PANEL_WIDTH if panels == 1 else PANEL_WIDTH * columns
    figure = Figure(figsize=(width, PANEL_HEIGHT * rows + 0.6), layout="constrained")
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


def _draw_panel(axis: Axes, panel: pd.DataFrame, y: str, hue: str, styles: dict[Any, int], linked: bool) -> None:
    for source in dict.fromkeys([MEASURED, *panel["source"]]):
        for value, index in styles.items():
            series = panel[(panel["source"] == source) & (panel[hue] == value)]
            if not series.empty:
                _draw_line(axis, series, y, value, index, source, linked)


def _draw_line(axis: Axes, series: pd.DataFrame, y: str, value: Any, index: int, source: str, linked: bool) -> None:
    here = source == MEASURED
    name = (f"{value}" if here else f"{value}, {source}") if value != "" else source
    axis.errorbar(
        series[AT],
        series[y],
        yerr=error_bars(series, y) if here else None,
        color=PALETTE[index % len(PALETTE)],
        marker=MARKERS[index % len(MARKERS)],
        markerfacecolor=None if here else "white",
        linestyle="none" if not linked else "-" if here else "--",
        linewidth=1.5 if here else 1.0,
        markersize=5,
        capsize=2,
        alpha=1.0 if here else 0.7,
        label=name.replace("_", " "),
    )


def _finish_panel(axis: Axes, x: str, places: Sequence[Any] | dict[Any, int], log: str, level: float | None) -> None:
    if "x" in log and not isinstance(places, dict):
        axis.set_xscale("log", base=2 if x in DOUBLING else 10)
    if "y" in log:
        axis.set_yscale("log")
    if level is not None:
        axis.axhline(level, color="#444444", linewidth=1.0, linestyle=":")
    finish_axes(axis)
    axis.set_xlabel(axis_title(x))
    if isinstance(places, dict):
        names = [str(name).replace("_", " ") for name in places]
        axis.set_xticks(list(places.values()), names, rotation=25, ha="right")
        axis.margins(x=0.15)
        return
    format_axis(axis.xaxis, x, "x" in log)
    if len(places) <= FEW_PLACES:
        axis.set_xticks(places)
        axis.margins(x=0.15)  # room for the labels of the first and the last, beside those of the next panel
