"""Bars by category, side by side with intervals or stacked, and dots on a logarithmic axis; published ones apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.lab.columns import column, label
from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis

GROUP_WIDTH = 0.76  # of the distance between two categories
UPRIGHT_LABEL = 9  # characters; longer names of categories are slanted
LABEL_INCHES = 0.075  # a character of a label takes; where two categories are closer than their names, they are slanted
MARGIN_INCHES = 0.8  # of the width, for the y axis
FEWEST_PLACES = 3  # a panel is as wide as these, so that a single bar is no wall


def bars(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    x_order: Sequence[Any] | None = None,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    stacked: bool = False,
    log: bool = False,
    level: float | None = None,
    y_title: str | None = None,
    reference: pd.DataFrame | None = None,
    reference_label: str = "published",
    source: str = style.MEASURED,
) -> style.Plot:
    """One group of bars per category of `x`, one bar (or layer, if `stacked`) per value of `hue`.

    Bars begin at zero, so on a logarithmic axis (`log`) there are dots instead.
    `frame`: one row per bar; `low` and `high` right behind `y` are its interval (drawn unless stacked). `x_order`
    and `hue_order` give values an order, what else there is comes last; otherwise it is that of the rows. `reference`
    has the same columns and gets panels of its own, hatched, titled `reference_label`: its categories may be
    others; if that begins with "published", on demand only (`Plot.with_published`). Panels share the y axis if `log`,
    and otherwise only if there is no reference: published absolute values are rarely of the same size. ValueError if a
    column is missing or two rows are the same bar.
    """
    frame, hue = style.with_hue(frame, hue)
    columns = style.drawn_columns(frame, x, y, hue, facet)
    if frame.empty:
        return style.nothing_to_draw(frame[columns])
    columns = [*columns, "source"]
    pieces = [frame.assign(source=source)]
    if reference is not None and not reference.empty:
        pieces.append(reference.assign(source=reference_label, **({style.ALL: ""} if hue == style.ALL else {})))
    kept = [columns if stacked else style.with_interval(columns, piece, y) for piece in pieces]
    drawn = [piece.reindex(columns=names).dropna(subset=[y]) for piece, names in zip(pieces, kept, strict=True)]
    data = pd.concat(drawn, ignore_index=True)
    _require_one_row_a_bar(data, [name for name in columns if name != y])
    hues, places = _with_others(hue_order, data[hue]), _with_others(x_order, data[x])
    look = _Bars(x, y, hue, places, hues, facet, stacked=stacked, log=log, level=level, y_title=y_title, source=source)
    if len(drawn) == 1:
        return look.draw(data)
    return style.with_reference(look.draw, drawn[0], drawn[1], reference_label)


def _with_others(order: Sequence[Any] | None, values: pd.Series) -> list[Any] | None:
    """The order that was asked for, and after it what else there is, such as a reader's own alternative."""
    return None if order is None else list(dict.fromkeys([*order, *values]))


def _require_one_row_a_bar(data: pd.DataFrame, keys: list[str]) -> None:
    """ValueError for what would be drawn over one another."""
    twice = data[data.duplicated(keys)]
    if not twice.empty:
        raise ParameterError(f"expected one row per bar, got several for {twice[keys].iloc[0].to_dict()}: name a facet")


@dataclass(frozen=True)
class _Bars:
    """What is drawn of a frame and how, as `bars` is told."""

    x: str
    y: str
    hue: str
    x_order: Sequence[Any] | None
    hue_order: Sequence[Any] | None
    facet: str | None
    stacked: bool
    log: bool
    level: float | None
    y_title: str | None
    source: str

    def draw(self, data: pd.DataFrame) -> style.Plot:
        panels = list(self._panels(data))
        if not panels:
            return style.nothing_to_draw(data)
        figure, axes = _subplots(panels, self.x, share=self.log or data["source"].nunique() == 1)
        inches = float(figure.get_size_inches()[0]) - MARGIN_INCHES
        inches /= sum(max(2, rows[self.x].nunique()) for _, rows in panels)
        hues = style.present(data[self.hue], self.hue_order)
        styles = {value: index for index, value in enumerate(self.hue_order or hues)}
        marks: list[style.Mark] = []
        for axis, (title, rows) in zip(axes, panels, strict=True):
            places = style.present(rows[self.x], self.x_order)
            marks += self._draw_panel(axis, rows.set_index(self.x, drop=False), places, styles)
            self._finish(axis, places, title, inches * max(2, len(places)))
        style.name_axis(axes[0].yaxis, style.value_title(self.y, self.y_title))
        names = [style.spoken(value) for value in hues]
        style.legend(figure, axes, self.hue, names[::-1] if self.stacked else names)
        return style.plotted(figure, data, marks)

    def _panels(self, data: pd.DataFrame) -> list[tuple[Any, pd.DataFrame]]:
        """(title, rows): one a facet for what is measured here, one for each other source."""
        panels: list[tuple[Any, pd.DataFrame]] = []
        for source, rows in data.groupby("source", sort=False):
            if self.facet is None or source != data["source"].iloc[0]:
                panels.append((source, rows))
            else:
                panels += [(value, of_facet) for value, of_facet in rows.groupby(self.facet, sort=False)]
        return panels

    def _draw_panel(
        self, axis: Axes, panel: pd.DataFrame, places: Sequence[Any], styles: Mapping[Any, int]
    ) -> list[style.Mark]:
        """What is hollow is not from here: hatched bars, empty dots."""
        hollow = self.source != style.MEASURED or bool((panel["source"] != self.source).all())
        hues = style.present(panel[self.hue], styles)  # no room for bars of other panels
        alone = self.stacked or self.hue == self.x  # one bar a place
        width = GROUP_WIDTH if alone else GROUP_WIDTH / len(hues)
        bottoms = dict.fromkeys(places, 0.0)
        marks = []
        for number, value in enumerate(hues):
            rows = panel[panel[self.hue] == value]
            here = [place for place in places if place in rows.index]
            rows = rows.loc[here]
            shift = 0.0 if alone else (number - (len(hues) - 1) / 2) * width
            at = [places.index(place) + shift for place in here]
            color = style.PALETTE[styles[value] % len(style.PALETTE)]
            marker = style.MARKERS[styles[value] % len(style.MARKERS)]
            intervals = None if self.stacked else style.error_bars(rows, self.y)
            if self.log:
                axis.errorbar(
                    at, rows[self.y], intervals, color=color, linestyle="none", elinewidth=1.2, marker=marker,
                    markersize=6, markerfacecolor=style.PAGE if hollow else color, label=style.spoken(value),
                )  # fmt: skip
            else:
                axis.bar(
                    at, rows[self.y], width, [bottoms[place] for place in here], color=color, edgecolor=style.PAGE,
                    linewidth=0.8, hatch="//" if hollow else None, yerr=intervals,
                    error_kw={"elinewidth": 1.0, "ecolor": style.TEXT}, label=style.spoken(value),
                )  # fmt: skip
            for place, middle, (_, row) in zip(here, at, rows.iterrows(), strict=True):
                low = row[self.y] if self.log else bottoms[place]
                top = row[self.y] + bottoms[place]
                text = style.told((label(self.hue, value), label(self.x, place)), self.y, row)
                left, right = middle - width / 2, middle + width / 2
                marks.append(style.Mark(axis, left, min(low, top), right, max(low, top), text))
                bottoms[place] += row[self.y] if self.stacked else 0.0
        return marks

    def _finish(self, axis: Axes, places: Sequence[Any], title: Any, inches: float) -> None:
        if self.log:
            axis.set_yscale("log")
        if self.level is not None:
            axis.axhline(self.level, color=style.TEXT, linewidth=1.0)
        style.finish_axes(axis, grid="y")
        names = [style.spoken(place) for place in places]
        middle, half = (len(places) - 1) / 2, max(len(places) / 2 + 0.1, FEWEST_PLACES / 2)
        longest = max(map(len, names))
        slanted = longest > UPRIGHT_LABEL and len(names) > 3
        slanted |= len(names) > 1 and longest * LABEL_INCHES > inches / (2 * half)
        looks: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        axis.set_xticks(range(len(places)), names, **looks)
        axis.set_xlim(middle - half, middle + half)
        style.name_axis(axis.xaxis, column(self.x).axis)
        format_axis(axis.yaxis, self.y, self.log)
        if title != style.MEASURED:
            style.name_panel(axis, style.facet_title(self.facet or "", title))


def _subplots(panels: Sequence[tuple[Any, pd.DataFrame]], x: str, share: bool) -> tuple[Figure, Sequence[Axes]]:
    """Panels as wide as they have categories."""
    ratios = [max(2, panel[x].nunique()) for _, panel in panels]
    width = min(style.WIDE, max(style.WIDTH, 0.9 * sum(ratios) + MARGIN_INCHES))
    figure = Figure(figsize=(width, style.PANEL_HEIGHT))
    axes = figure.subplots(1, len(panels), sharey=share, squeeze=False, width_ratios=ratios)[0]
    return figure, axes
