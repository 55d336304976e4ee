"""Parts of a whole over a numeric axis, stacked."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labkit.lab.columns import column
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis


def areas(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str | None = None,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    y_title: str | None = None,
) -> style.Plot:
    """One layer a value of `hue`, from the bottom up in `hue_order`, one panel a value of `facet`.

    `frame` has one row per (facet, x, hue); a part without a row at some x is 0 there. A value holds until the next
    x (steps, not slopes: memory jumps). ValueError if a column is missing.
    """
    frame, hue = style.with_hue(frame, hue)
    data = frame[style.drawn_columns(frame, x, y, hue, facet)].dropna(subset=[y])
    if data.empty:
        return style.nothing_to_draw(data)
    panels: Sequence[Any] = [None] if facet is None else list(dict.fromkeys(data[facet]))
    figure, axes = style.panel_grid(len(panels), style.PANEL_HEIGHT)
    layers = style.present(data[hue], hue_order)
    names, colors = [style.spoken(layer) for layer in layers], style.colors_of(hue_order or layers)
    for axis, value in zip(axes, panels, strict=True):
        panel = data if facet is None else data[data[facet] == value]
        table = panel.pivot_table(index=x, columns=hue, values=y, aggfunc="sum", fill_value=0.0)
        heights = table.reindex(columns=layers, fill_value=0.0).to_numpy().T
        colored = [colors[layer] for layer in layers]
        axis.stackplot(table.index, heights, labels=names, colors=colored, step="post", linewidth=0)
        style.finish_axes(axis)
        axis.set_xlim(table.index.min(), table.index.max())
        style.name_axis(axis.xaxis, column(x).axis)
        format_axis(axis.xaxis, x, False)
        if facet is not None:
            style.name_panel(axis, style.facet_title(facet, value))
        if style.begins_row(axis):
            style.name_axis(axis.yaxis, style.value_title(y, y_title))
    format_axis(axes[0].yaxis, y, False)
    style.legend(figure, axes, hue, names[::-1])
    return style.plotted(figure, data)
