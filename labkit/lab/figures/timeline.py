"""What ran when: one lane per kind, one box per interval of time."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.lab.columns import format_value
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
) -> style.Plot:
    """Boxes from `start` over `duration` (both in the unit that `duration` names), from the first start on.

    One row per box. Lanes run from top to bottom in the order of the rows. ParameterError for a missing column.
    """
    data, hue = style.tidy(frame, duration, start, lane, hue=hue)
    data = data.dropna(subset=[start])
    if data.empty:
        return style.nothing_to_draw(data)
    data = data.assign(**{start: data[start] - data[start].min()})
    lanes, kinds = list(dict.fromkeys(data[lane])), list(dict.fromkeys(data[hue]))
    colors = style.looks(kinds, style.PALETTE)
    figure = Figure(figsize=(style.WIDE, LANE_HEIGHT * len(lanes) + 0.9))
    axis = figure.subplots()
    places = data[lane].map(lanes.index)
    axis.barh(places, data[duration], 0.8, data[start], color=data[hue].map(colors), linewidth=0)
    marks = []
    for place, row in zip(places, data.to_dict("records"), strict=True):
        at, length = row[start], row[duration]
        name = style.name_text(row[hue] or row[lane])
        text = f"{name} · {format_value(duration, length)} from {format_value(duration, at)} on"
        marks.append(style.Mark(axis, at, place + 0.4, at + length, place - 0.4, text))
    axis.set_yticks(range(len(lanes)), [style.name_text(value) for value in lanes])
    axis.invert_yaxis()
    style.finish_axes(axis, x="time since the first event", grid="x")
    format_axis(axis.xaxis, duration, False)
    style.legend(figure, hue, {str(kind): Patch(color=colors[kind]) for kind in kinds})
    return style.plotted(figure, data, marks)
