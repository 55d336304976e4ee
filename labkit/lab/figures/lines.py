"""Lines over a numeric axis, one panel a facet, intervals as error bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from labkit.lab.columns import column, label
from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.style import AT, MEASURED
from labkit.lab.figures.ticks import format_axis

MOST_LINES = 6  # in a panel; more cannot be told from one another
MOST_POINTS = 100  # of a line; more are drawn small

Places = dict[Any, int] | None
"""Where names stand on the x axis; None for numbers, which stand where they are."""


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
) -> style.Plot:
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
        raise ParameterError(f"log names the logarithmic axes, 'x', 'y', 'xy' or '': got {log!r}")
    frame, hue = style.with_hue(frame, hue)
    columns = style.drawn_columns(frame, x, y, hue, facet)
    if frame.empty:
        return style.nothing_to_draw(frame[columns])
    columns = [*columns, "source"]
    own = frame.assign(source=source)
    data = own[style.with_interval(columns, own, y)].dropna(subset=[y])
    look = _Lines(x, y, hue, hue_order, facet, facet_order, log=log, linked=linked, level=level, y_title=y_title)
    if reference is None:
        return look.draw(data)
    reference = reference.assign(source=reference_label, **({style.ALL: ""} if hue == style.ALL else {}))
    reference = reference[style.drawn_columns(reference, *columns)].dropna(subset=[y])  # drawn without intervals
    return style.with_reference(look.draw, data, reference, reference_label)


@dataclass(frozen=True)
class _Lines:
    """What is drawn of a frame and how, as `lines` is told."""

    x: str
    y: str
    hue: str
    hue_order: Sequence[Any] | None
    facet: str | None
    facet_order: Sequence[Any] | None
    log: str
    linked: bool
    level: float | None
    y_title: str | None

    def draw(self, data: pd.DataFrame) -> style.Plot:
        if data.empty:
            return style.nothing_to_draw(data)
        hue, places = self.hue, _places(data[self.x])
        order = [name for name in data.columns if name not in ("low", "high")]
        at = data[self.x].map(places) if places else data[self.x]
        data = data.assign(**{AT: at}).sort_values(order, ignore_index=True)
        hues = dict.fromkeys([*(self.hue_order or ()), *sorted(set(data[hue]))])
        panels = [
            (value, part)
            for value in ([None] if self.facet is None else self._facets(data[self.facet]))
            for part in _few_lines(data if value is None else data[data[self.facet] == value], hue, list(hues))
        ]
        figure, axes = style.panel_grid(len(panels), style.PANEL_HEIGHT)
        if len(panels) > style.MOST_IN_A_ROW:
            figure.set_layout_engine("constrained", h_pad=0.12)  # inches: a title is not to touch the axis above it
        marks: list[style.Mark] = []
        measured = set(data.loc[data["source"] == MEASURED, hue])
        styles = {value: index for index, value in enumerate(hues)}
        for axis, (value, panel) in zip(axes, panels, strict=True):
            marks += self._draw_panel(axis, panel, styles, measured, linked=self.linked and not places)
            self._finish(axis, places, data[self.x])
            if value is not None:
                style.name_panel(axis, style.facet_title(self.facet or "", value))
            if style.begins_row(axis):
                style.name_axis(axis.yaxis, style.value_title(self.y, self.y_title))
        others = sorted(set(data.loc[data[hue].isin(measured), "source"]) - {MEASURED})
        looks: dict[str, Any] = {"color": style.SOFT, "linestyle": "--", "marker": "o", "markersize": 4.5}
        for source in others:  # named once, not once a line
            axes[0].plot([], [], markerfacecolor=style.PAGE, label=source, **looks)
        format_axis(axes[0].yaxis, self.y, "y" in self.log)
        style.legend(figure, axes, hue, self._from_the_top(data))
        return style.plotted(figure, data, marks)

    def _facets(self, values: pd.Series) -> list[Any]:
        return sorted(set(values)) if self.facet_order is None else style.present(values, self.facet_order)

    def _from_the_top(self, data: pd.DataFrame) -> list[str]:
        """Names in the order in which their lines end, on the right, from the top down."""
        ends = data[data["source"] == MEASURED].groupby(self.hue, sort=False)[self.y].last()
        return [_name(value) for value in ends.sort_values(ascending=False, kind="stable").index]

    def _draw_panel(
        self, axis: Axes, panel: pd.DataFrame, styles: Mapping[Any, int], measured: set[Any], linked: bool
    ) -> list[style.Mark]:
        """Lines by source; one that is not from here has the color of the one that is, and no name of its own."""
        marks = []
        for source in dict.fromkeys([MEASURED, *panel["source"]]):
            for value, index in styles.items():
                series = panel[(panel["source"] == source) & (panel[self.hue] == value)]
                if series.empty:
                    continue
                name = _name(value, source) if source == MEASURED or value not in measured else "_"
                _draw_line(axis, series, self.y, name, index, source == MEASURED, linked)
                for _, row in series.iterrows():
                    names = (label(self.hue, value), source if source != MEASURED else "", label(self.x, row[self.x]))
                    text = style.told(names, self.y, row)
                    marks.append(style.Mark(axis, row[AT], row[self.y], row[AT], row[self.y], text))
        return marks

    def _finish(self, axis: Axes, places: Places, values: pd.Series) -> None:
        if "x" in self.log and not places:
            axis.set_xscale("log", base=2 if column(self.x).doubles else 10)
        if "y" in self.log:
            axis.set_yscale("log")
        if self.level is not None:
            axis.axhline(self.level, color=style.TEXT, linewidth=1.0, zorder=1)
        style.finish_axes(axis, grid="y")
        style.name_axis(axis.xaxis, column(self.x).axis)
        if places:
            names = [style.spoken(name) for name in places]
            axis.set_xticks(list(places.values()), names, rotation=25, ha="right", rotation_mode="anchor")
            axis.margins(x=0.15)
            return
        format_axis(axis.xaxis, self.x, "x" in self.log)
        if len(few := sorted(set(values))) <= style.FEW_PLACES:
            axis.set_xticks(few)
            axis.margins(x=0.15)  # room for the labels of the first and the last, beside those of the next panel


def _few_lines(panel: pd.DataFrame, hue: str, order: Sequence[Any]) -> list[pd.DataFrame]:
    """The rows of a panel, or of several where they are too many lines."""
    found = style.present(panel[hue], order)
    size = -(-len(found) // -(-len(found) // MOST_LINES))
    return [panel[panel[hue].isin(found[at : at + size])] for at in range(0, len(found), size)]


def _name(value: Any, source: str = MEASURED) -> str:
    name = f"{value}" if source == MEASURED else f"{value}, {source}"
    return style.spoken(name if value != "" else source)


def _places(values: pd.Series) -> Places:
    """Names in the order of their rows."""
    if is_numeric_dtype(values) and not is_bool_dtype(values):
        return None
    return {name: place for place, name in enumerate(dict.fromkeys(values))}


def _draw_line(axis: Axes, series: pd.DataFrame, y: str, name: str, index: int, here: bool, linked: bool) -> None:
    axis.errorbar(
        series[AT],
        series[y],
        yerr=style.error_bars(series, y) if here else None,
        color=style.PALETTE[index % len(style.PALETTE)],
        marker=style.MARKERS[index % len(style.MARKERS)],
        markerfacecolor=None if here else style.PAGE,
        linestyle="none" if not linked else "-" if here else "--",
        linewidth=1.8 if here else 1.0,
        elinewidth=1.0,
        markersize=4.5 if len(series) <= MOST_POINTS else 2.2,
        capsize=0,
        alpha=1.0 if here else 0.8,
        label=name,
    )
