"""Draw bars by category, stacked areas over a numeric axis, and boxes in lanes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.figure import Areas, Bars, Timeline
from labkit.lab.figures.plot import Mark, Plot, mark_text, point_text
from labkit.lab.units import column, format_value

GROUP_WIDTH = 0.76  # of the distance between two categories
LANE_INCHES = 0.3  # height of a lane
TITLES_INCHES = 1.0  # height of the titles around a panel of lanes
VALUES_SHARE = 0.28  # room for the values next to boxes, relative to the boxes
MIN_TOP = 0.2  # of the highest panel's top: bars of a lower one could not be read on its axis
FLIP = 0.62  # of the x axis: a box that ends farther right has its value on its left


def draw_bars(figure: Bars, data: pd.DataFrame) -> Plot:
    """Draw rows that all have a value. ParameterError for two rows of the same bar."""
    keys = dict.fromkeys((figure.x, figure.panel, figure.color))
    names = [name for name in keys if name is not None]
    # Drawn one over the other, two rows would look like the larger one.
    is_repeated = data.duplicated(names)
    if is_repeated.any():
        bar = data[is_repeated][names].iloc[0].to_dict()
        raise ParameterError(f"expected one row per bar, got several for {bar}")
    colors = style.colors(data[figure.color])
    panels = style.split_panels(data, figure.panel)
    # Two names need the width of two bars, however few bars there are.
    n_places = [max(2, rows[figure.x].nunique()) for _, rows in panels]
    width = min(style.WIDE, max(style.WIDTH, 0.9 * sum(n_places) + style.MARGIN_INCHES))
    canvas = Canvas(figsize=(width, style.PANEL_HEIGHT))
    tops = []
    for _, rows in panels:
        heights = rows[figure.value].abs()
        if figure.stacked:
            heights = heights.groupby(rows[figure.x]).sum()
        tops.append(heights.max())
    is_shared = min(tops) >= MIN_TOP * max(tops)
    grid = canvas.subplots(1, len(panels), sharey=is_shared, squeeze=False, width_ratios=n_places)
    axes = list(grid[0])
    marks: list[Mark] = []
    for axis, (title, rows), places in zip(axes, panels, n_places, strict=True):
        marks += _draw_bar_panel(figure, axis, rows, colors)
        style.finish_axes(axis, title, x=column(figure.x).axis, y=style.value_title(figure.value))
        categories = [style.name_text(name) for name in style.in_order(rows[figure.x])]
        inches = (width - style.MARGIN_INCHES) * places / sum(n_places)
        style.place_names(axis, categories, inches)
    labeled = axes
    if is_shared:
        labeled = axes[:1]
    for axis in labeled:
        style.format_axis(axis.yaxis, figure.value)
    entries: dict[str, Any] = dict(style.patches(colors))
    if figure.stacked:  # the legend reads from the top down, as the layers do
        entries = dict(reversed(entries.items()))
    if figure.reference is not None:
        entries[column(figure.reference).axis] = Line2D([], [], **style.REFERENCE)
    style.add_legend(canvas, figure.color, entries)
    return Plot(canvas, data, marks)


def _draw_bar_panel(
    figure: Bars, axis: Axes, rows: pd.DataFrame, colors: Mapping[Any, str]
) -> list[Mark]:
    categories = style.in_order(rows[figure.x])
    # Only the names of this panel: bars of other panels need no room here.
    hues = [name for name in colors if (rows[figure.color] == name).any()]
    rows = rows.assign(
        at=rows[figure.x].map(categories.index), layer=rows[figure.color].map(hues.index)
    )
    rows = rows.sort_values(["layer", "at"])
    width = GROUP_WIDTH
    bottom: float | pd.Series = 0.0
    if figure.stacked:
        bottom = rows.groupby("at")[figure.value].cumsum() - rows[figure.value]
    elif figure.color != figure.x:
        width = GROUP_WIDTH / len(hues)
        rows = rows.assign(at=rows["at"] + (rows["layer"] - (len(hues) - 1) / 2) * width)
    bars = axis.bar(
        rows["at"],
        rows[figure.value],
        width,
        bottom,
        color=rows[figure.color].map(colors),
        edgecolor=style.PAGE,
        linewidth=0.8,
    )
    boxes = [patch.get_bbox() for patch in bars.patches]
    if figure.reference is not None:
        left = [box.x0 for box in boxes]
        right = [box.x1 for box in boxes]
        axis.hlines(rows[figure.reference], left, right, **style.REFERENCE)
    if figure.stacked:
        # An interval is that of a layer alone, and would stand at its height from zero.
        rows = rows.drop(columns=["low", "high"], errors="ignore")
    style.draw_intervals(axis, rows["at"], rows, [style.TEXT] * len(rows))
    pairs = zip(boxes, rows.to_dict("records"), strict=True)
    return [Mark(axis, *box.extents, point_text(figure, row)) for box, row in pairs]


def draw_areas(figure: Areas, data: pd.DataFrame) -> Plot:
    """Draw rows that all have a value."""
    panels = style.split_panels(data, figure.panel)
    canvas, axes = style.panel_grid(len(panels))
    colors = style.colors(data[figure.color])
    layers = [name for name in figure.order if name in colors] or list(colors)
    for axis, (title, rows) in zip(axes, panels, strict=True):
        table = rows.pivot_table(
            index=figure.x, columns=figure.color, values=figure.value, aggfunc="sum", fill_value=0.0
        )
        heights = table.reindex(columns=layers, fill_value=0.0).to_numpy().T
        shades = [colors[name] for name in layers]
        # In steps: memory jumps at an allocation, and slopes would show bytes that nobody held.
        axis.stackplot(table.index, heights, colors=shades, step="post", linewidth=0)
        y = style.value_title(figure.value)
        style.finish_axes(axis, title, x=column(figure.x).axis, y=y, grid="both")
        axis.set_xlim(table.index.min(), table.index.max())
        style.format_axis(axis.xaxis, figure.x)
    style.format_axis(axes[0].yaxis, figure.value)
    entries = style.patches({name: colors[name] for name in reversed(layers)})
    style.add_legend(canvas, figure.color, entries)
    return Plot(canvas, data)


def draw_timeline(figure: Timeline, data: pd.DataFrame) -> Plot:
    """Draw rows that all have a value."""
    data = data.assign(**{figure.x: data[figure.x] - data[figure.x].min()})
    lanes = list(dict.fromkeys(data[figure.lane]))
    colors = style.colors(data[figure.color])
    panels = style.split_panels(data, figure.panel)
    canvas, axes = style.panel_grid(len(panels), LANE_INCHES * len(lanes) + TITLES_INCHES)
    canvas.set_figwidth(style.WIDE)
    # Values of several boxes in a lane would touch.
    keys = [name for name in (figure.panel, figure.lane) if name is not None]
    has_values = not data.duplicated(keys).any()
    # An interval may reach farther than its box.
    longest = data.reindex(columns=["high", figure.value]).max(axis=1)
    end = (data[figure.x] + longest).max()
    if has_values:
        end *= 1 + VALUES_SHARE
    marks: list[Mark] = []
    for axis, (title, rows) in zip(axes, panels, strict=True):
        axis.set_xlim(0, end)
        at = rows[figure.lane].map(lanes.index)
        shades = rows[figure.color].map(colors)
        axis.barh(at, rows[figure.value], 0.76, rows[figure.x], color=shades, linewidth=0)
        marks += _finish_boxes(figure, axis, at, rows, has_values)
        style.finish_axes(axis, title, grid="x")
        axis.set_yticks(range(len(lanes)), [style.name_text(name) for name in lanes])
        style.format_axis(axis.xaxis, figure.value)
    # From the top down, as a program is read.
    axes[0].set_ylim(len(lanes) - 0.4, -0.6)
    title = column(figure.x).axis
    if has_values:
        title = column(figure.value).axis
    elif figure.x == "start_s":
        title = "time since the first event"
    # Once for all panels: side by side, their titles would touch.
    canvas.supxlabel(title, fontsize=style.FONT, color=style.TEXT)
    style.add_legend(canvas, figure.color, style.patches(colors))
    return Plot(canvas, data, marks)


def _finish_boxes(
    figure: Timeline, axis: Axes, at: Iterable[int], rows: pd.DataFrame, has_values: bool
) -> Iterator[Mark]:
    """Draw intervals and values; yield the area and text of each box."""
    for place, row in zip(at, rows.to_dict("records"), strict=True):
        begin = row[figure.x]
        length = row[figure.value]
        end = begin + length
        text = mark_text([style.name_text(row[figure.lane])], figure.value, row)
        if pd.notna(row.get("low")):
            high = begin + row["high"]
            axis.hlines(place, begin + row["low"], high, colors=style.TEXT, linewidth=1.2)
            end = max(end, high)
        if has_values:
            _write_value(axis, place, begin, end, format_value(figure.value, length))
        else:
            text = f"{text} from {format_value(figure.value, begin)} on"
        yield Mark(axis, begin, place + 0.4, begin + length, place - 0.4, text)


def _write_value(axis: Axes, place: float, left: float, right: float, text: str) -> None:
    """Write a value on the side of a box that has room."""
    width = axis.get_xlim()[1]
    at = right
    points = 3
    align = "left"
    # To the left only of a box that leaves room there.
    if right > FLIP * width and left > (1 - FLIP) * width:
        at = left
        points = -3
        align = "right"
    axis.annotate(
        text,
        (at, place),
        xytext=(points, 0),
        textcoords="offset points",
        ha=align,
        va="center",
        fontsize=style.FONT,
        color=style.TEXT,
    )
