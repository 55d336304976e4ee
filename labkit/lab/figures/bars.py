"""Bars by category, side by side with intervals or stacked, and dots on a logarithmic axis; published ones apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.lab.columns import column, label
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis

GROUP_WIDTH = 0.76  # of the distance between two categories
LONGEST_UPRIGHT = 9  # characters of a name; longer ones are slanted
LABEL_INCHES, MARGIN_INCHES = 0.075, 0.8  # the width of a character, and of the y axis
MIN_PLACES = 3  # a panel is as wide as these, so that a single bar is no wall


@dataclass(frozen=True)
class _Look:
    x: str
    y: str
    hue: str
    facet: str | None
    colors: Mapping[Any, str]
    markers: Mapping[Any, str]
    stacked: bool
    log: bool
    level: float | None
    y_title: str | None
    source: str


def bars(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    stacked: bool = False,
    log: bool = False,
    level: float | None = None,
    y_title: str | None = None,
    reference: pd.DataFrame | None = None,
    source: str = style.MEASURED,
) -> style.Plot:
    """One group of bars per category of `x`, one bar (or layer, if `stacked`) per value of `hue`.

    Bars begin at zero, so on a logarithmic axis (`log`) there are dots instead. `frame` has one row per bar; `low` and
    `high` right behind `y` are its interval. `reference` has published rows with the same columns: a hatched panel, on
    demand only. `source` says where `frame` is from. ParameterError for a missing column or two rows of the same bar.
    """
    rows, color = style.tidy(frame, y, x, facet, hue=hue)
    rows = rows.assign(source=source)
    if reference is not None:
        reference, _ = style.tidy(reference, y, x, facet, hue=hue)
        reference = reference.assign(source=style.PUBLISHED)
    data = rows if reference is None else pd.concat([rows, reference])
    style.check_unique(data, x, facet, color)
    names = style.present(data[color], hue_order)
    colors, markers = style.looks(names, style.PALETTE), style.looks(names, style.MARKERS)
    look = _Look(x, y, color, facet, colors, markers, stacked, log, level, y_title, source)
    return style.with_reference(partial(_draw, look=look), rows, reference)


def _draw(data: pd.DataFrame, look: _Look) -> style.Plot:
    if data.empty:
        return style.nothing_to_draw(data)
    panels = list(_panels(data, look))
    figure, axes = _panel_row(panels, look.x, share=look.log or data["source"].nunique() == 1)
    n_places = [max(2, rows[look.x].nunique()) for _, rows in panels]
    inches = (float(figure.get_size_inches()[0]) - MARGIN_INCHES) / sum(n_places)
    marks: list[style.Mark] = []
    for axis, (title, rows) in zip(axes, panels, strict=True):
        places = list(dict.fromkeys(rows[look.x]))
        marks += _draw_panel(axis, rows, places, look)
        if look.log:
            axis.set_yscale("log")
        if look.level is not None:
            axis.axhline(look.level, color=style.TEXT, linewidth=1.0)
        name = None if title == style.MEASURED else style.panel_title(look.facet or "", title)
        style.finish_axes(axis, name, x=column(look.x).axis, y=style.value_title(look.y, look.y_title))
        _place_names(axis, [style.name_text(place) for place in places], inches * max(2, len(places)))
        format_axis(axis.yaxis, look.y, look.log)
    names = style.present(data[look.hue], look.colors)
    style.legend(figure, look.hue, _handles(names[::-1] if look.stacked else names, look))
    return style.plotted(figure, data, marks)


def _panels(data: pd.DataFrame, look: _Look) -> list[tuple[Any, pd.DataFrame]]:
    """Title and rows: one panel per facet of the first source, one per other source."""
    first = data["source"].iloc[0]
    rows = data[data["source"] == first]
    panels = [(first, rows)] if look.facet is None else list(rows.groupby(look.facet, sort=False))
    return [*panels, *data[data["source"] != first].groupby("source", sort=False)]


def _panel_row(panels: Sequence[tuple[Any, pd.DataFrame]], x: str, share: bool) -> tuple[Figure, Sequence[Axes]]:
    """Panels as wide as they have categories."""
    ratios = [max(2, rows[x].nunique()) for _, rows in panels]
    width = min(style.WIDE, max(style.WIDTH, 0.9 * sum(ratios) + MARGIN_INCHES))
    figure = Figure(figsize=(width, style.PANEL_HEIGHT))
    return figure, figure.subplots(1, len(panels), sharey=share, squeeze=False, width_ratios=ratios)[0]


def _draw_panel(axis: Axes, rows: pd.DataFrame, places: Sequence[Any], look: _Look) -> list[style.Mark]:
    """Values that are not from here are hollow: hatched bars, empty dots."""
    is_hollow = look.source != style.MEASURED or (rows["source"] != look.source).any()
    hues = style.present(rows[look.hue], look.colors)  # no room for bars of other panels
    is_alone = look.stacked or look.hue == look.x
    width = GROUP_WIDTH / (1 if is_alone else len(hues))
    shifts = {name: 0.0 if is_alone else (number - (len(hues) - 1) / 2) * width for number, name in enumerate(hues)}
    rows = rows.sort_values(look.hue, key=lambda names: names.map(hues.index), kind="stable")
    at = [places.index(place) + shifts[name] for place, name in zip(rows[look.x], rows[look.hue], strict=True)]
    tops = rows.groupby(look.x, sort=False)[look.y].cumsum() if look.stacked else rows[look.y]
    bottoms = tops - rows[look.y]
    about: dict[str, Any] = {"x": look.x, "y": look.y, "hue": look.hue, "order": places, "hue_order": hues, "ax": axis}
    about |= {"palette": dict(look.colors), "errorbar": None, "legend": False}
    edge: dict[str, Any] = {"edgecolor": style.PAGE, "linewidth": 0.8, "hatch": "//" if is_hollow else None}
    if look.log:
        dots = {"markers": [look.markers[name] for name in hues], "linestyle": "none", "markersize": 6}
        before = len(axis.lines)
        seaborn.pointplot(rows, dodge=0.0 if is_alone else GROUP_WIDTH * (1 - 1 / len(hues)), **dots, **about)
        for line in axis.lines[before:]:
            line.set_markerfacecolor(style.PAGE if is_hollow else line.get_color())
    elif look.stacked:
        axis.bar(at, rows[look.y], width, bottoms, color=[look.colors[name] for name in rows[look.hue]], **edge)
    else:
        seaborn.barplot(rows, width=GROUP_WIDTH, saturation=1, dodge=not is_alone, **edge, **about)
    if not look.stacked:
        colors = [look.colors[name] if look.log else style.TEXT for name in rows[look.hue]]
        style.draw_intervals(axis, at, rows, colors)
    return [
        style.Mark(axis, middle - width / 2, top if look.log else bottom, middle + width / 2, top, _text(row, look))
        for middle, bottom, top, row in zip(at, bottoms, tops, rows.to_dict("records"), strict=True)
    ]


def _text(row: Mapping[str, Any], look: _Look) -> str:
    names = label(look.hue, row[look.hue]), label(look.x, row[look.x])
    return style.mark_text(names, look.y, {look.y: row[look.y]} if look.stacked else row)


def _place_names(axis: Axes, names: Sequence[str], inches: float) -> None:
    """Names of categories below their bars, slanted if they would touch one another."""
    middle, half = (len(names) - 1) / 2, max(len(names) / 2 + 0.1, MIN_PLACES / 2)
    longest = max(map(len, names))
    is_slanted = longest > LONGEST_UPRIGHT and len(names) > 3
    is_slanted |= len(names) > 1 and longest * LABEL_INCHES > inches / (2 * half)
    looks: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axis.set_xticks(range(len(names)), names, **looks)
    axis.set_xlim(middle - half, middle + half)


def _handles(names: Sequence[Any], look: _Look) -> dict[str, Any]:
    if look.log:
        return {
            str(name): Line2D([], [], color=look.colors[name], marker=look.markers[name], linestyle="none")
            for name in names
        }
    return {str(name): Patch(color=look.colors[name]) for name in names}
