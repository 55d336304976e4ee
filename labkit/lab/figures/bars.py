"""Bars by category, side by side with intervals or stacked, and dots on a logarithmic axis; published ones apart."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.lab.columns import column, label
from labkit.lab.figures.style import (
    ALL,
    MARKERS,
    MEASURED,
    PAGE,
    PALETTE,
    PANEL_HEIGHT,
    PUBLISHED,
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
    source: str = MEASURED,
) -> Plot:
    """One group of bars per category of `x`, one bar (or layer, if `stacked`) per value of `hue`.

    Bars begin at zero, so on a logarithmic axis (`log`) there are dots instead.
    `frame`: one row per bar; `low` and `high` right behind `y` are its interval (drawn unless stacked). `x_order`
    and `hue_order` give values an order, what else there is comes last; otherwise it is that of the rows. `reference`
    has the same columns and gets panels of its own, hatched, titled `reference_label`: its categories may be
    others; if that begins with "published", on demand only (`Plot.with_published`). Panels share the y axis if `log`,
    and otherwise only if there is no reference: published absolute values are rarely of the same size. ValueError if a
    column is missing or two rows are the same bar.
    """
    frame, hue = with_hue(frame, hue)
    columns = drawn_columns(frame, x, y, hue, facet)
    if frame.empty:
        return nothing_to_draw(frame[columns])
    pieces = [frame.assign(source=source)]
    if reference is not None and not reference.empty:
        pieces.append(reference.assign(source=reference_label, **({ALL: ""} if hue == ALL else {})))
    columns = [*columns, "source"]
    kept = [columns if stacked else with_interval(columns, piece, y) for piece in pieces]
    data = pd.concat([piece.reindex(columns=names) for piece, names in zip(pieces, kept, strict=True)])
    data = data.dropna(subset=[y]).reset_index(drop=True)
    _require_one_row_a_bar(data, [name for name in columns if name != y])
    draw = partial(
        _draw,
        x=x,
        y=y,
        hue=hue,
        x_order=_with_others(x_order, data[x]),
        hue_order=_with_others(hue_order, data[hue]),
        facet=facet,
        stacked=stacked,
        log=log,
        level=level,
        y_title=y_title,
        source=source,
    )
    own = data[data["source"] == source]
    if own.empty or len(own) == len(data) or not reference_label.startswith(PUBLISHED):
        return draw(data)
    return draw(own, with_published=draw(data))


def _draw(
    data: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str,
    x_order: Sequence[Any] | None,
    hue_order: Sequence[Any] | None,
    facet: str | None,
    stacked: bool,
    log: bool,
    level: float | None,
    y_title: str | None,
    source: str,
    with_published: Plot | None = None,
) -> Plot:
    panels = list(_panels(data, facet))
    if not panels:
        return nothing_to_draw(data)
    figure, axes = _subplots(panels, x, share=log or data["source"].nunique() == 1)
    width = float(figure.get_size_inches()[0]) - MARGIN_INCHES
    hues = [value for value in hue_order or dict.fromkeys(data[hue]) if value in set(data[hue])]
    styles = {value: index for index, value in enumerate(hue_order or hues)}
    marks: list[Mark] = []
    for axis, (title, panel) in zip(axes, panels, strict=True):
        places = [value for value in x_order or dict.fromkeys(panel[x]) if value in set(panel[x])]
        hollow = source != MEASURED or (panel["source"] != source).all()
        rows = panel.set_index(x, drop=False)
        marks += _draw_panel(axis, rows, y, hue, places, hues, styles, stacked=stacked, log=log, hollow=bool(hollow))
        inches = width * max(2, len(places)) / sum(max(2, rows[x].nunique()) for _, rows in panels)
        _finish(axis, x, y, places, title, facet, log, level, inches)
    name_axis(axes[0].yaxis, value_title(y, y_title))
    names = [str(value).replace("_", " ") for value in hues]
    legend(figure, axes, hue, names[::-1] if stacked else names)
    return plotted(figure, data, marks, with_published)


def _with_others(order: Sequence[Any] | None, values: pd.Series) -> list[Any] | None:
    """The order that was asked for, and after it what else there is, such as a reader's own alternative."""
    return None if order is None else list(dict.fromkeys([*order, *values]))


def _require_one_row_a_bar(data: pd.DataFrame, keys: list[str]) -> None:
    """ValueError for what would be drawn over one another."""
    twice = data[data.duplicated(keys)]
    if not twice.empty:
        raise ValueError(f"expected one row per bar, got several for {twice[keys].iloc[0].to_dict()}: name a facet")


def _panels(data: pd.DataFrame, facet: str | None) -> list[tuple[Any, pd.DataFrame]]:
    """(title, rows): one a facet for what is measured here, one for each other source."""
    panels: list[tuple[Any, pd.DataFrame]] = []
    for source, rows in data.groupby("source", sort=False):
        if facet is None or source != data["source"].iloc[0]:
            panels.append((source, rows))
        else:
            panels += [(value, of_facet) for value, of_facet in rows.groupby(facet, sort=False)]
    return panels


def _subplots(panels: Sequence[tuple[Any, pd.DataFrame]], x: str, share: bool) -> tuple[Figure, Sequence[Axes]]:
    """Panels as wide as they have categories."""
    ratios = [max(2, panel[x].nunique()) for _, panel in panels]
    width = min(WIDE, max(WIDTH, 0.9 * sum(ratios) + MARGIN_INCHES))
    figure = Figure(figsize=(width, PANEL_HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=share, squeeze=False, width_ratios=ratios)[0]
    return figure, axes


def _draw_panel(
    axis: Axes,
    panel: pd.DataFrame,
    y: str,
    hue: str,
    places: Sequence[Any],
    hues: Sequence[Any],
    styles: dict[Any, int],
    *,
    stacked: bool,
    log: bool,
    hollow: bool,
) -> list[Mark]:
    """What is hollow is not from here: hatched bars, empty dots."""
    hues = [value for value in hues if value in set(panel[hue])]  # no room for bars of other panels
    x = str(panel.index.name)
    alone = stacked or hue == x  # one bar a place
    width = GROUP_WIDTH if alone else GROUP_WIDTH / len(hues)
    bottoms = dict.fromkeys(places, 0.0)
    marks = []
    for number, value in enumerate(hues):
        rows = panel[panel[hue] == value]
        here = [place for place in places if place in rows.index]
        if not here:
            continue
        rows = rows.loc[here]
        shift = 0.0 if alone else (number - (len(hues) - 1) / 2) * width
        at = [places.index(place) + shift for place in here]
        name = str(value).replace("_", " ")
        color, marker = PALETTE[styles[value] % len(PALETTE)], MARKERS[styles[value] % len(MARKERS)]
        intervals = None if stacked else error_bars(rows, y)
        if log:
            face = PAGE if hollow else color
            axis.errorbar(
                at, rows[y], intervals, color=color, linestyle="none", elinewidth=1.2,
                marker=marker, markersize=6, markerfacecolor=face, label=name,
            )  # fmt: skip
        else:
            below = [bottoms[place] for place in here] if stacked else 0.0
            axis.bar(
                at, rows[y], width, below, color=color, edgecolor=PAGE, linewidth=0.8, hatch="//" if hollow else None,
                yerr=intervals, error_kw={"elinewidth": 1.0, "ecolor": TEXT}, label=name,
            )  # fmt: skip
        for place, middle, (_, row) in zip(here, at, rows.iterrows(), strict=True):
            low = row[y] if log else bottoms[place]
            top = row[y] + (bottoms[place] if stacked else 0.0)
            text = told((label(hue, value), label(x, place)), y, row)
            marks.append(Mark(axis, middle - width / 2, min(low, top), middle + width / 2, max(low, top), text))
            bottoms[place] += row[y] if stacked else 0.0
    return marks


def _finish(
    axis: Axes,
    x: str,
    y: str,
    places: Sequence[Any],
    title: Any,
    facet: str | None,
    log: bool,
    level: float | None,
    inches: float,
) -> None:
    if log:
        axis.set_yscale("log")
    if level is not None:
        axis.axhline(level, color=TEXT, linewidth=1.0)
    finish_axes(axis, grid="y")
    names = [str(place).replace("_", " ") for place in places]
    middle, half = (len(places) - 1) / 2, max(len(places) / 2 + 0.1, FEWEST_PLACES / 2)
    longest = max(map(len, names))
    slanted = longest > UPRIGHT_LABEL and len(names) > 3
    slanted |= len(names) > 1 and longest * LABEL_INCHES > inches / (2 * half)
    looks: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axis.set_xticks(range(len(places)), names, **looks)
    axis.set_xlim(middle - half, middle + half)
    name_axis(axis.xaxis, column(x).axis)
    format_axis(axis.yaxis, y, log)
    if title != MEASURED:
        name_panel(axis, facet_title(facet or "", title))
