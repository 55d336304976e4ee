"""A whole from its parts: each box begins where the one above it ends, and the last is the whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from labkit.lab.columns import column
from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis

BOX_HEIGHT, TITLES_HEIGHT = 0.24, 0.75  # inches: of a box, and of what stands around a panel
ROOM = 1.28  # of the x axis relative to the whole: for the values beside the boxes
LEAST = 1e-3  # share of the whole below which a box says no more than that
TURN = 0.62  # of the x axis: a box that ends further to the right has its value on its left


def waterfall(
    frame: pd.DataFrame,
    *,
    part: str,
    y: str,
    part_order: Sequence[Any] | None = None,
    total: str = "total",
    hue: str | None = None,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    facet_order: Sequence[Any] | None = None,
    share: bool = True,
    y_title: str | None = None,
) -> style.Plot:
    """One box per value of `part`, from the top down in `part_order`, each from where the last one ended.

    `frame` has one row per (facet, part): `y` is how long the box is, zero or more, in the unit that its name says;
    `low` and `high` right behind `y` are the interval of that length. The last box is the whole, from zero on: the
    row whose part is `total` where there is one, with its own interval (so a part that is missing is seen as a gap),
    and the sum of the parts otherwise. `hue` colors boxes by kind. One panel per value of `facet`, all on the same x
    axis if `share`; a part that a panel lacks is left empty. ValueError if a column is missing, a length is negative,
    a part is there twice, or an order lacks a value.
    """
    frame, hue = style.with_hue(frame, hue)
    columns = style.drawn_columns(frame, part, y, hue, facet)
    data = frame[style.with_interval(columns, frame, y)].dropna(subset=[y])
    if data.empty:
        return style.nothing_to_draw(data)
    _check(data, part, y, facet, {part: part_order, facet or "": facet_order, hue: hue_order}, total)
    names = [value for value in style.present(data[part], part_order) if value != total]
    kinds = list(hue_order or dict.fromkeys(data.loc[data[part] != total, hue]))
    shown = [None] if facet is None else style.present(data[facet], facet_order)
    panels = [(data if value is None else data[data[facet] == value]).set_index(part, drop=False) for value in shown]
    reach = [_reach(rows, total, y) for rows in panels]
    figure, axes = style.panel_grid(len(panels), BOX_HEIGHT * (len(names) + 1) + TITLES_HEIGHT)
    marks: list[style.Mark] = []
    for axis, value, rows, own in zip(axes, shown, panels, reach, strict=True):
        axis.set_xlim(0, ROOM * (max(reach) if share else own) or 1.0)
        marks += _draw_panel(axis, rows, names, total, y, hue, style.colors_of(kinds))
        style.finish_axes(axis, grid="x")
        axis.set_yticks(range(len(names) + 1), [style.spoken(name) for name in [*names, total]])
        if value is not None:
            style.name_panel(axis, style.facet_title(facet or "", value))
    axes[0].set_ylim(len(names) + 0.6, -0.6)
    for axis in axes:
        format_axis(axis.xaxis, y, False)
    title = style.value_title(y, y_title).replace("\n", " ")
    if len(axes) == 1:
        style.name_axis(axes[0].xaxis, title)
    else:  # once for all panels: side by side, long titles would run into one another
        figure.supxlabel(title, fontsize=style.FONT, color=style.TEXT)
    style.legend(figure, axes, hue, [style.spoken(kind) for kind in kinds])
    return style.plotted(figure, data, marks)


def _check(
    data: pd.DataFrame, part: str, y: str, facet: str | None, orders: dict[str, Sequence[Any] | None], total: str
) -> None:
    if (data[y] < 0).any():
        raise ParameterError(f"expected lengths of zero or more in {y}, got {data[y].min():g}")
    keys = [part] if facet is None else [facet, part]
    if (twice := data[data.duplicated(keys)]).size:
        raise ParameterError(f"expected one row per box, got several for {twice[keys].iloc[0].to_dict()}")
    for name, order in orders.items():
        if order is not None and (unknown := set(data.loc[data[part] != total, name]) - {*order}):
            raise ParameterError(f"expected values of {name} among {list(order)}, got {sorted(map(str, unknown))}")


def _reach(rows: pd.DataFrame, total: str, y: str) -> float:
    """How far the boxes of a panel and their intervals reach to the right."""
    parts, ends = rows[rows.index != total], [float(rows[y].get(total, 0.0))]
    starts = parts[y].cumsum() - parts[y]
    ends += [float((starts + parts[name]).max()) for name in (y, "high") if name in parts and len(parts)]
    ends += [float(rows.loc[total, "high"])] if total in rows.index and "high" in rows else []
    return max(end for end in ends if end == end)


def _draw_panel(
    axis: Axes,
    rows: pd.DataFrame,
    names: Sequence[Any],
    total: str,
    y: str,
    hue: str,
    colors: Mapping[Any, str],
) -> list[style.Mark]:
    parts = rows[rows.index != total]
    whole = float(rows[y].get(total, parts[y].sum()))
    marks, at = [], 0.0
    for place, name in enumerate([*names, total]):
        if name == total:
            row = rows.loc[total] if total in rows.index else pd.Series({y: whole})
            start, color, kind = 0.0, style.SOFT, None
        elif name in parts.index:
            row = parts.loc[name]
            start, color, kind = at, colors[row[hue]], style.spoken(row[hue])
        else:
            continue
        end = start + float(row[y])
        axis.barh(place, row[y], left=start, height=0.72, color=color, linewidth=0, label=kind)
        left, right = _draw_interval(axis, place, start, end, row)
        text = "< 0.1 %" if 0 < row[y] < LEAST * whole else column(y).form(row[y])
        _write(axis, place, min(start, left), right, text)
        if name != total:
            axis.plot([end, end], [place - 0.36, place + 1.36], color=style.SOFT, linewidth=0.6)
        marks.append(style.Mark(axis, start, place + 0.4, end, place - 0.4, style.told([style.spoken(name)], y, row)))
        at = at if name == total else end
    return marks


def _draw_interval(axis: Axes, place: int, start: float, end: float, row: pd.Series) -> tuple[float, float]:
    """The interval around the end of a box, if it has one; how far both reach."""
    if "low" not in row or row["low"] != row["low"]:
        return end, end
    low, high = start + float(row["low"]), start + float(row["high"])
    axis.plot([low, high], [place, place], color=style.TEXT, linewidth=1.2)
    return low, max(end, high)


def _write(axis: Axes, place: int, left: float, right: float, text: str) -> None:
    """A value beside its box, where there is room."""
    width = axis.get_xlim()[1]
    is_left = right > TURN * width and left > (1 - TURN) * width
    axis.annotate(
        text,
        (left if is_left else right, place),
        xytext=(-3 if is_left else 3, 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        fontsize=style.FONT,
        color=style.TEXT,
    )
