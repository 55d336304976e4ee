"""Parts of a whole over a numeric axis, stacked."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.lab.columns import column
from labkit.lab.figures.style import (
    PALETTE,
    PANEL_HEIGHT,
    WIDE,
    WIDTH,
    Plot,
    drawn_columns,
    facet_title,
    finish_axes,
    format_axis,
    legend,
    name_axis,
    name_panel,
    nothing_to_draw,
    plotted,
    value_title,
    with_hue,
)


def areas(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    y_title: str | None = None,
) -> Plot:
    """One layer a value of `hue`, from the bottom up in `hue_order`, one panel a value of `facet`.

    `frame` has one row per (facet, x, hue); a part without a row at some x is 0 there. A value holds until the next
    x (steps, not slopes: memory jumps). ValueError if a column is missing.
    """
    frame, hue = with_hue(frame, hue)
    data = frame[drawn_columns(frame, x, y, hue, facet)].dropna(subset=[y])
    if data.empty:
        return nothing_to_draw(data)
    panels: Sequence[Any] = [None] if facet is None else list(dict.fromkeys(data[facet]))
    figure = Figure(figsize=(WIDTH if len(panels) == 1 else WIDE, PANEL_HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    layers = [value for value in hue_order or dict.fromkeys(data[hue]) if value in set(data[hue])]
    colors = {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(hue_order or layers)}
    for axis, value in zip(axes, panels, strict=True):
        panel = data if facet is None else data[data[facet] == value]
        table = panel.pivot_table(index=x, columns=hue, values=y, aggfunc="sum", fill_value=0.0)
        table = table.reindex(columns=layers, fill_value=0.0)
        names = [str(layer).replace("_", " ") for layer in layers]
        colored = [colors[layer] for layer in layers]
        axis.stackplot(table.index, table.to_numpy().T, labels=names, colors=colored, step="post", linewidth=0)
        finish_axes(axis)
        axis.set_xlim(table.index.min(), table.index.max())
        name_axis(axis.xaxis, column(x).axis)
        format_axis(axis.xaxis, x, False)
        if facet is not None:
            name_panel(axis, facet_title(facet, value))
    format_axis(axes[0].yaxis, y, False)
    name_axis(axes[0].yaxis, value_title(y, y_title))
    legend(figure, axes, hue, [str(layer).replace("_", " ") for layer in reversed(layers)])
    return plotted(figure, data)
