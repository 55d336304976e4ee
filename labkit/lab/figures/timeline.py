"""What ran when: one lane a kind, one box an interval of time."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labkit.lab.columns import column
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis

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
) -> style.Plot:
    """Boxes from `start` over `duration` (both in the unit that `duration` names), from the first start on.

    One row per box. Lanes run from top to bottom in `lane_order`. ValueError if a column is missing.
    """
    frame, hue = style.with_hue(frame, hue)
    data = frame[style.drawn_columns(frame, start, duration, lane, hue)].dropna(subset=[start, duration])
    if data.empty:
        return style.nothing_to_draw(data)
    data = data.assign(**{start: data[start] - data[start].min()})
    lanes, kinds = style.present(data[lane], lane_order), style.present(data[hue], hue_order)
    colors = style.colors_of(hue_order or kinds)
    figure = Figure(figsize=(style.WIDE, LANE_HEIGHT * len(lanes) + 0.9))
    axis = figure.subplots()
    marks: list[style.Mark] = []
    shown = column(duration).form
    for kind in kinds:
        label: str | None = style.spoken(kind)
        for value, boxes in data[data[hue] == kind].groupby(lane, sort=False):
            spans = list(zip(boxes[start], boxes[duration], strict=True))
            place = lanes.index(value)
            for at, length in spans:
                text = f"{style.spoken(kind or value)} · {shown(length)} from {shown(at)} on"
                marks.append(style.Mark(axis, at, place + 0.4, at + length, place - 0.4, text))
            axis.broken_barh(spans, (place - 0.4, 0.8), facecolors=colors[kind], label=label, linewidth=0)
            label = None
    axis.set_yticks(range(len(lanes)), [style.spoken(value) for value in lanes])
    axis.invert_yaxis()
    style.finish_axes(axis, grid="x")
    style.name_axis(axis.xaxis, "time since the first event")
    format_axis(axis.xaxis, duration, False)
    style.legend(figure, [axis], hue)
    return style.plotted(figure, data, marks)
