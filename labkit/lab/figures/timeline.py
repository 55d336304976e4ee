"""What ran when: one lane a kind, one box an interval of time."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.lab.columns import column
from labkit.lab.figures.style import (
    PALETTE,
    WIDE,
    Mark,
    Plot,
    drawn_columns,
    finish_axes,
    format_axis,
    legend,
    name_axis,
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

    One row per box. Lanes run from top to bottom in `lane_order`. ValueError if a column is missing.
    """
    frame, hue = with_hue(frame, hue)
    data = frame[drawn_columns(frame, start, duration, lane, hue)].dropna(subset=[start, duration])
    if data.empty:
        return nothing_to_draw(data)
    data = data.assign(**{start: data[start] - data[start].min()})
    lanes = [value for value in lane_order or dict.fromkeys(data[lane]) if value in set(data[lane])]
    kinds = [value for value in hue_order or dict.fromkeys(data[hue]) if value in set(data[hue])]
    colors = {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(hue_order or kinds)}
    figure = Figure(figsize=(WIDE, LANE_HEIGHT * len(lanes) + 0.9), layout="constrained")
    axis = figure.subplots()
    marks: list[Mark] = []
    shown = column(duration).form
    for kind in kinds:
        of_kind = data[data[hue] == kind]
        label: str | None = str(kind).replace("_", " ")
        for value, boxes in of_kind.groupby(lane, sort=False):
            spans = list(zip(boxes[start], boxes[duration], strict=True))
            place = lanes.index(value)
            for at, length in spans:
                text = f"{str(kind or value).replace('_', ' ')} · {shown(length)} from {shown(at)} on"
                marks.append(Mark(axis, at, place + 0.4, at + length, place - 0.4, text))
            axis.broken_barh(spans, (place - 0.4, 0.8), facecolors=colors[kind], label=label, linewidth=0)
            label = None
    axis.set_yticks(range(len(lanes)), [str(value).replace("_", " ") for value in lanes])
    axis.invert_yaxis()
    finish_axes(axis, grid="x")
    name_axis(axis.xaxis, "time since the first event")
    format_axis(axis.xaxis, duration, False)
    legend(figure, [axis], hue)
    return plotted(figure, data, marks)
