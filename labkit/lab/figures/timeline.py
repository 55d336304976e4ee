"""What ran when: one lane a kind, one box an interval of time."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.lab.figures.style import (
    PALETTE,
    SINGLE_PANEL_WIDTH,
    Plot,
    drawn_columns,
    finish_axes,
    format_axis,
    legend,
    nothing_to_draw,
    plotted,
    with_hue,
)

LANE_HEIGHT = 0.42  # inches


def timeline(
    frame: pd.DataFrame,
    *,
    start: str,
    duration: str,
    lane: str,
    hue: str | None = None,
    lane_order: Sequence[Any] | None = None,
    hue_order: Sequence[Any] | None = None,
) -> Plot:
    """Boxes from `start` over `duration` (both in the unit that `duration` names), from the first start on.

    One row a box. Lanes run from top to bottom in `lane_order`. ValueError if a column is missing.
    """
    frame, hue = with_hue(frame, hue)
    data = frame[drawn_columns(frame, start, duration, lane, hue)].dropna(subset=[start, duration])
    if data.empty:
        return nothing_to_draw(data)
    data = data.assign(**{start: data[start] - data[start].min()})
    lanes = [value for value in lane_order or dict.fromkeys(data[lane]) if value in set(data[lane])]
    kinds = [value for value in hue_order or dict.fromkeys(data[hue]) if value in set(data[hue])]
    colors = {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(hue_order or kinds)}
    figure = Figure(figsize=(SINGLE_PANEL_WIDTH * 1.2, LANE_HEIGHT * len(lanes) + 1.4), layout="constrained")
    axis = figure.subplots()
    for kind in kinds:
        of_kind = data[data[hue] == kind]
        label: str | None = str(kind).replace("_", " ")
        for value, boxes in of_kind.groupby(lane, sort=False):
            spans = list(zip(boxes[start], boxes[duration], strict=True))
            axis.broken_barh(spans, (lanes.index(value) - 0.4, 0.8), facecolors=colors[kind], label=label, linewidth=0)
            label = None
    axis.set_yticks(range(len(lanes)), [str(value).replace("_", " ") for value in lanes])
    axis.invert_yaxis()
    finish_axes(axis, grid="x")
    axis.set_xlabel("time since the first event")
    format_axis(axis.xaxis, duration, False)
    legend(figure, [axis], hue)
    return plotted(figure, data)
