"""Bars by category, stacked areas over a numeric axis, and boxes in lanes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.figure import Figure, Mark, Plot, mark_text
from labkit.lab.figures.names import in_order
from labkit.lab.units import column, format_value

GROUP_WIDTH = 0.76  # of the distance between two categories
LANE_INCHES = 0.3
SPARE_INCHES = 1.0  # height of a lane, and of the titles around a panel
ROOM = 0.28  # of the x axis: for the values next to boxes
FLIP = 0.62  # of the x axis: a box that ends farther right has its value on its left


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """One group of bars per category of `x`, one bar (or layer, if `stacked`) per value of `hue`,
    from zero.

    ParameterError for two rows of the same bar.
    """

    stacked: bool = False

    def draw_rows(self, data: pd.DataFrame) -> Plot:
        keys = [
            name for name in dict.fromkeys((self.x, self.panel, self.color)) if name is not None
        ]
        if (twice := data.duplicated(keys)).any():
            bar = data[twice][keys].iloc[0].to_dict()
            raise ParameterError(f"expected one row per bar, got several for {bar}")
        colors = style.colors(data[self.color])
        panels = style.split_panels(data, self.panel)
        n_places = [max(2, rows[self.x].nunique()) for _, rows in panels]
        width = min(style.WIDE, max(style.WIDTH, 0.9 * sum(n_places) + style.MARGIN_INCHES))
        figure = Canvas(figsize=(width, style.PANEL_HEIGHT))
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=n_places)[0]
        marks: list[Mark] = []
        for axis, (title, rows), places in zip(axes, panels, n_places, strict=True):
            marks += self._draw_panel(axis, rows, colors)
            style.finish_axes(axis, title, x=column(self.x).axis, y=style.value_title(self.value))
            names = [style.name_text(name) for name in in_order(rows[self.x])]
            style.place_names(axis, names, (width - style.MARGIN_INCHES) * places / sum(n_places))
        style.format_axis(axes[0].yaxis, self.value)
        entries: dict[str, Any] = dict(style.patches(colors))
        if self.stacked:
            entries = dict(reversed(entries.items()))
        if self.reference is not None:
            entries[column(self.reference).axis] = Line2D([], [], **style.REFERENCE)
        style.add_legend(figure, self.color, entries)
        return Plot(figure, data, marks)

    def _draw_panel(self, axis: Axes, rows: pd.DataFrame, colors: Mapping[Any, str]) -> list[Mark]:
        places = in_order(rows[self.x])
        # no room for bars of other panels
        hues = [name for name in colors if (rows[self.color] == name).any()]
        n_bars = 1 if self.stacked or self.color == self.x else len(hues)
        rows = rows.assign(
            place=rows[self.x].map(places.index), layer=rows[self.color].map(hues.index)
        )
        rows = rows.sort_values(["layer", "place"])
        shift = (rows["layer"] - (n_bars - 1) / 2) * GROUP_WIDTH / n_bars if n_bars > 1 else 0.0
        bottoms = (
            rows.groupby("place")[self.value].cumsum() - rows[self.value] if self.stacked else 0.0
        )
        bars = axis.bar(
            rows["place"] + shift,
            rows[self.value],
            GROUP_WIDTH / n_bars,
            bottoms,
            color=rows[self.color].map(colors),
            edgecolor=style.PAGE,
            linewidth=0.8,
        )
        boxes = [patch.get_bbox() for patch in bars.patches]
        if self.reference is not None:
            left = [box.x0 for box in boxes]
            right = [box.x1 for box in boxes]
            axis.hlines(rows[self.reference], left, right, **style.REFERENCE)
        if not self.stacked:
            style.draw_intervals(axis, rows["place"] + shift, rows, [style.TEXT] * len(rows))
        pairs = zip(boxes, rows.to_dict("records"), strict=True)
        return [
            Mark(axis, *box.extents, self._text(row, has_interval=not self.stacked))
            for box, row in pairs
        ]


@dataclass(frozen=True, kw_only=True)
class Areas(Figure):
    """Parts of a whole over a numeric axis, stacked from the bottom up in `order`.

    A value holds until the next `x` (steps, not slopes: memory jumps); a part without a row at some
    `x` is 0 there.
    """

    order: tuple[str, ...] = ()

    def draw_rows(self, data: pd.DataFrame) -> Plot:
        panels = style.split_panels(data, self.panel)
        figure, axes = style.panel_grid(len(panels))
        colors = style.colors(data[self.color])
        layers = [name for name in self.order if name in colors] or list(colors)
        for axis, (title, rows) in zip(axes, panels, strict=True):
            table = rows.pivot_table(
                index=self.x, columns=self.color, values=self.value, aggfunc="sum", fill_value=0.0
            )
            heights = table.reindex(columns=layers, fill_value=0.0).to_numpy().T
            axis.stackplot(
                table.index,
                heights,
                colors=[colors[name] for name in layers],
                step="post",
                linewidth=0,
            )
            style.finish_axes(
                axis, title, x=column(self.x).axis, y=style.value_title(self.value), grid="both"
            )
            axis.set_xlim(table.index.min(), table.index.max())
            style.format_axis(axis.xaxis, self.x)
        style.format_axis(axes[0].yaxis, self.value)
        style.add_legend(
            figure, self.color, style.patches({name: colors[name] for name in layers[::-1]})
        )
        return Plot(figure, data)


@dataclass(frozen=True, kw_only=True)
class Timeline(Figure):
    """Boxes that start at `start_s` and last `duration_s`: one lane per name, from the top down;
    the first starts at 0.

    If each lane has one box, its duration is written next to it.
    """

    x: str = "start_s"
    y: str = "duration_s"
    lane: str

    @property
    def keys(self) -> list[str]:
        return [self.lane, *super().keys]

    def draw_rows(self, data: pd.DataFrame) -> Plot:
        data = data.assign(**{self.x: data[self.x] - data[self.x].min()})
        lanes = list(dict.fromkeys(data[self.lane]))
        colors = style.colors(data[self.color])
        panels = style.split_panels(data, self.panel)
        figure, axes = style.panel_grid(len(panels), LANE_INCHES * len(lanes) + SPARE_INCHES)
        figure.set_figwidth(style.WIDE)
        has_values = not data.duplicated([name for name in (self.panel, self.lane) if name]).any()
        longest = data.reindex(columns=["high", self.value]).max(axis=1)
        reach = (data[self.x] + longest).max() * (1 + ROOM * has_values)
        marks: list[Mark] = []
        for axis, (title, rows) in zip(axes, panels, strict=True):
            axis.set_xlim(0, reach)
            at = rows[self.lane].map(lanes.index)
            colored = rows[self.color].map(colors)
            axis.barh(at, rows[self.value], 0.76, rows[self.x], color=colored, linewidth=0)
            marks += self._finish_boxes(axis, at, rows, has_values)
            style.finish_axes(axis, title, grid="x")
            axis.set_yticks(range(len(lanes)), [style.name_text(name) for name in lanes])
            style.format_axis(axis.xaxis, self.value)
        axes[0].set_ylim(len(lanes) - 0.4, -0.6)
        name = column(self.value if has_values else self.x).axis
        if self.x == "start_s" and not has_values:
            name = "time since the first event"
        # once: side by side, titles would touch
        figure.supxlabel(name, fontsize=style.FONT, color=style.TEXT)
        style.add_legend(figure, self.color, style.patches(colors))
        return Plot(figure, data, marks)

    def _finish_boxes(
        self, axis: Axes, at: Iterable[int], rows: pd.DataFrame, has_values: bool
    ) -> Iterator[Mark]:
        """Draw intervals and values; yield the area and text of each box."""
        for place, row in zip(at, rows.to_dict("records"), strict=True):
            begin = row[self.x]
            length = row[self.value]
            end = begin + length
            text = mark_text([style.name_text(row[self.lane])], self.value, row)
            if row.get("low", float("nan")) == row.get("low"):
                axis.hlines(
                    place, begin + row["low"], begin + row["high"], colors=style.TEXT, linewidth=1.2
                )
                end = max(end, begin + row["high"])
            if has_values:
                _write_value(axis, place, begin, end, format_value(self.value, length))
            else:
                text = f"{text} from {format_value(self.value, begin)} on"
            yield Mark(axis, begin, place + 0.4, begin + length, place - 0.4, text)


def _write_value(axis: Axes, place: float, left: float, right: float, text: str) -> None:
    """Write a value on the side of a box that has room."""
    width = axis.get_xlim()[1]
    is_left = right > FLIP * width and left > (1 - FLIP) * width
    looks: dict[str, Any] = {"va": "center", "fontsize": style.FONT, "color": style.TEXT}
    at, shift, align = (left, -3, "right") if is_left else (right, 3, "left")
    axis.annotate(
        text, (at, place), xytext=(shift, 0), textcoords="offset points", ha=align, **looks
    )
