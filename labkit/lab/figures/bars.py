"""Bars by category, side by side with intervals or stacked; published bars in panels of their own."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.lab.figures.style import (
    ALL,
    MEASURED,
    PALETTE,
    PANEL_HEIGHT,
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

GROUP_WIDTH = 0.8  # of the distance between two categories
UPRIGHT_LABEL = 9  # characters; longer names of categories are slanted
LABEL_INCHES = 0.083  # a character of a label takes; where two categories are closer than their names, they are slanted
WIDEST = 10.5
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

    `frame` is tidy: one row a bar; `low` and `high` right behind `y` are its interval (drawn unless stacked). `x_order`
    and `hue_order` name all values that may occur, in their order; otherwise it is that of the rows. `reference`
    has the same columns and gets panels of its own, hatched, titled `reference_label`: its categories may be
    others. Panels share the y axis if `log`, and otherwise only if there is no reference: published absolute
    values are rarely of the same size. ValueError if a column is missing, two rows are the same bar, or an order
    lacks a value.
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
    _require_one_row_a_bar(data, [name for name in columns if name != y], {x: x_order, hue: hue_order})
    panels = list(_panels(data, facet))
    if not panels:
        return nothing_to_draw(data)
    figure, axes = _subplots(panels, x, share=log or len(pieces) == 1)
    width = float(figure.get_size_inches()[0]) - MARGIN_INCHES
    hues = [value for value in hue_order or dict.fromkeys(data[hue]) if value in set(data[hue])]
    colors = {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(hue_order or hues)}
    for axis, (title, panel) in zip(axes, panels, strict=True):
        places = [value for value in x_order or dict.fromkeys(panel[x]) if value in set(panel[x])]
        hatched = title == reference_label or source != MEASURED
        _draw(axis, panel.set_index(x, drop=False), y, hue, places, hues, colors, stacked=stacked, hatched=hatched)
        inches = width * max(2, len(places)) / sum(max(2, rows[x].nunique()) for _, rows in panels)
        _finish(axis, x, y, places, title, facet, log, level, inches)
    axes[0].set_ylabel(y_title or axis_title(y))
    legend(figure, axes, hue)
    return plotted(figure, data)


def _require_one_row_a_bar(data: pd.DataFrame, keys: list[str], orders: dict[str, Sequence[Any] | None]) -> None:
    """ValueError for what would be drawn over one another, or left out without a word."""
    twice = data[data.duplicated(keys)]
    if not twice.empty:
        raise ValueError(f"expected one row a bar, got several for {twice[keys].iloc[0].to_dict()}: name a facet")
    for column, order in orders.items():
        if order is not None and (unknown := set(data[column]) - set(order)):
            raise ValueError(f"expected values of {column} among {list(order)}, got {sorted(map(str, unknown))}")


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
    width = min(WIDEST, max(SINGLE_PANEL_WIDTH, 0.9 * sum(ratios) + MARGIN_INCHES))
    figure = Figure(figsize=(width, PANEL_HEIGHT + 0.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=share, squeeze=False, width_ratios=ratios)[0]
    return figure, axes


def _draw(
    axis: Axes,
    panel: pd.DataFrame,
    y: str,
    hue: str,
    places: Sequence[Any],
    hues: Sequence[Any],
    colors: dict[Any, str],
    *,
    stacked: bool,
    hatched: bool,
) -> None:
    hues = [value for value in hues if value in set(panel[hue])]  # no room for bars of other panels
    alone = stacked or hue == panel.index.name  # one bar a place
    width = GROUP_WIDTH if alone else GROUP_WIDTH / len(hues)
    bottoms = dict.fromkeys(places, 0.0)
    for index, value in enumerate(hues):
        rows = panel[panel[hue] == value]
        here = [place for place in places if place in rows.index]
        if not here:
            continue
        rows = rows.loc[here]
        shift = 0.0 if alone else (index - (len(hues) - 1) / 2) * width
        axis.bar(
            [places.index(place) + shift for place in here],
            rows[y],
            width=width,
            bottom=[bottoms[place] for place in here] if stacked else 0.0,
            color=colors[value],
            edgecolor="white",
            linewidth=0.5,
            hatch="//" if hatched else None,
            yerr=None if stacked else error_bars(rows, y),
            error_kw={"elinewidth": 1.0, "capsize": 2},
            label=str(value).replace("_", " "),
        )
        if stacked:
            for place, height in zip(here, rows[y], strict=True):
                bottoms[place] += height


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
        axis.axhline(level, color="#444444", linewidth=1.0, linestyle=":")
    finish_axes(axis, grid="y")
    names = [str(place).replace("_", " ") for place in places]
    middle, half = (len(places) - 1) / 2, max(len(places) / 2 + 0.1, FEWEST_PLACES / 2)
    longest = max(map(len, names))
    slanted = longest > UPRIGHT_LABEL and len(names) > 3
    slanted |= len(names) > 1 and longest * LABEL_INCHES > inches / (2 * half)
    axis.set_xticks(range(len(places)), names, rotation=25 if slanted else 0, ha="right" if slanted else "center")
    axis.set_xlim(middle - half, middle + half)
    axis.set_xlabel(axis_title(x))
    format_axis(axis.yaxis, y, log)
    if title != MEASURED:
        axis.set_title(facet_title(facet or "", title), fontsize=10)
