"""Parts of a whole over a numeric axis, stacked."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.patches import Patch

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
) -> style.Plot:
    """One layer per value of `hue`, from the bottom up in `hue_order`, one panel per value of `facet`.

    `frame` has one row per (facet, x, hue); a part without a row at some x is 0 there. A value holds until the next
    x (steps, not slopes: memory jumps). ParameterError for a missing column.
    """
    data, hue = style.tidy(frame, y, x, facet, hue=hue)
    if data.empty:
        return style.nothing_to_draw(data)
    panels: Sequence[Any] = [None] if facet is None else list(dict.fromkeys(data[facet]))
    figure, axes = style.panel_grid(len(panels), style.PANEL_HEIGHT)
    layers = style.present(data[hue], hue_order)
    colors = style.looks([*(hue_order or ()), *layers], style.PALETTE)
    for axis, value in zip(axes, panels, strict=True):
        rows = data if value is None else data[data[facet] == value]
        table = rows.pivot_table(index=x, columns=hue, values=y, aggfunc="sum", fill_value=0.0)
        heights = table.reindex(columns=layers, fill_value=0.0).to_numpy().T
        axis.stackplot(table.index, heights, colors=[colors[name] for name in layers], step="post", linewidth=0)
        title = None if value is None else style.panel_title(facet or "", value)
        style.finish_axes(axis, title, x=column(x).axis, y=style.value_title(y), grid="both")
        axis.set_xlim(table.index.min(), table.index.max())
        format_axis(axis.xaxis, x, False)
    format_axis(axes[0].yaxis, y, False)
    style.legend(figure, hue, {str(name): Patch(color=colors[name]) for name in layers[::-1]})
    return style.plotted(figure, data)
