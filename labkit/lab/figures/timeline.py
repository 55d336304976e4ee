"""Boxes in lanes: events by their time, or the parts of a whole as a waterfall."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from labkit.lab.columns import column, format_value
from labkit.lab.figures import style
from labkit.lab.figures.figure import Figure, patches, tidy
from labkit.lab.figures.plot import Mark, Plot, mark_text, plot_nothing

LANE_INCHES, SPARE_INCHES = 0.3, 1.0  # the height of a lane, and of the titles around a panel
ROOM = 0.28  # of the x axis: for the values next to boxes
TURN = 0.62  # of the x axis: a box that ends further to the right has its value on its left


@dataclass(frozen=True, kw_only=True)
class Timeline(Figure):
    """Boxes from `start` over `duration`, from the first start on: one lane per name, from the top down.

    `low` and `high` right behind the duration are its interval. If each lane has one box, its duration is written next
    to it.
    """

    start: str
    duration: str
    lane: str

    def plot(self, frame: pd.DataFrame) -> Plot:
        data = tidy(frame, self.duration, self.start, self.lane, self.panel, hue=self.color)
        data = data.dropna(subset=[self.start])
        if data.empty:
            return plot_nothing(data)
        data = data.assign(**{self.start: data[self.start] - data[self.start].min()})
        lanes, colors = list(dict.fromkeys(data[self.lane])), style.colors(data[self.color])
        panels = style.split_panels(data, self.panel)
        figure, axes = style.panel_grid(len(panels), LANE_INCHES * len(lanes) + SPARE_INCHES)
        figure.set_figwidth(style.WIDE)
        has_values = not data.duplicated([name for name in (self.panel, self.lane) if name]).any()
        reach = (
            data[self.start] + data[["high" if "high" in data else self.duration, self.duration]].max(axis=1)
        ).max()
        marks: list[Mark] = []
        for axis, (value, rows) in zip(axes, panels, strict=True):
            axis.set_xlim(0, (1 + ROOM * has_values) * reach)
            at = rows[self.lane].map(lanes.index)
            colored = rows[self.color].map(colors)
            axis.barh(at, rows[self.duration], 0.76, rows[self.start], color=colored, linewidth=0)
            marks += self._finish_boxes(axis, rows.assign(at=at), has_values)
            style.finish_axes(axis, style.panel_title(self.panel, value), grid="x")
            axis.set_yticks(range(len(lanes)), [style.name_text(name) for name in lanes])
            style.format_axis(axis.xaxis, self.duration)
        axes[0].set_ylim(len(lanes) - 0.4, -0.6)
        title = column(self.duration).axis if has_values else "time since the first event"
        figure.supxlabel(title, fontsize=style.FONT, color=style.TEXT)  # once: side by side, titles would touch
        style.add_legend(figure, self.color, patches(colors))
        return Plot(figure, data, marks)

    def _finish_boxes(self, axis: Axes, rows: pd.DataFrame, has_values: bool) -> Iterator[Mark]:
        """Draw intervals and values; yields the area and text of each box."""
        for row in rows.to_dict("records"):
            begin, length, place = row[self.start], row[self.duration], row["at"]
            end = begin + length
            text = mark_text([style.name_text(row[self.lane])], self.duration, row)
            if row.get("low", float("nan")) == row.get("low"):
                axis.hlines(place, begin + row["low"], begin + row["high"], colors=style.TEXT, linewidth=1.2)
                end = max(end, begin + row["high"])
            if has_values:
                _write_value(axis, place, begin, end, format_value(self.duration, length))
            else:
                text = f"{text} from {format_value(self.duration, begin)} on"
            yield Mark(axis, begin, place + 0.4, begin + length, place - 0.4, text)


def _write_value(axis: Axes, place: float, left: float, right: float, text: str) -> None:
    """Write a value next to a box, where there is room."""
    width = axis.get_xlim()[1]
    is_left = right > TURN * width and left > (1 - TURN) * width
    looks: dict[str, Any] = {"va": "center", "fontsize": style.FONT, "color": style.TEXT}
    at, shift = (left, -3) if is_left else (right, 3)
    align = "right" if is_left else "left"
    axis.annotate(text, (at, place), xytext=(shift, 0), textcoords="offset points", ha=align, **looks)
