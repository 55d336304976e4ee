"""A whole from its parts: each box begins where the one above it ends, and the last is the whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.lab.columns import format_value
from labkit.lab.config import ParameterError
from labkit.lab.figures import style
from labkit.lab.figures.ticks import format_axis

BOX_HEIGHT, TITLES_HEIGHT = 0.24, 0.75  # inches: of a box, and of what stands around a panel
ROOM = 1.28  # of the x axis relative to the whole: for the values next to the boxes
MIN_SHARE = 1e-3  # of the whole: a smaller box says no more than that
TURN = 0.62  # of the x axis: a box that ends further to the right has its value on its left


def waterfall(
    frame: pd.DataFrame,
    *,
    part: str,
    y: str,
    part_order: Sequence[Any] | None = None,
    total: str = "total",
    hue: str | None = None,
    facet: str | None = None,
) -> style.Plot:
    """One box per value of `part`, from the top down in `part_order`, each from where the last one ended.

    `frame` has one row per (facet, part): `y` is the length of the box, zero or more; `low` and `high` right behind `y`
    are the interval of that length. The last box is the row whose part is `total`, if there is one (so a missing part
    is seen as a gap), and the sum of the parts otherwise. One panel per value of `facet`. ParameterError if a column is
    missing, a length is negative, a part is there twice, or `part_order` lacks one.
    """
    data, hue = style.tidy(frame, y, part, facet, hue=hue)
    if data.empty:
        return style.nothing_to_draw(data)
    _check(data, part, y, facet, part_order, total)
    names = [name for name in style.present(data[part], part_order) if name != total]
    colors = style.looks(data.loc[data[part] != total, hue], style.PALETTE)
    groups = [(None, data)] if facet is None else list(data.groupby(facet, sort=False))
    panels = [(value, rows.set_index(part, drop=False)) for value, rows in groups]
    figure, axes = style.panel_grid(len(panels), BOX_HEIGHT * (len(names) + 1) + TITLES_HEIGHT)
    reach = max(_reach(rows, total, y) for _, rows in panels)
    marks: list[style.Mark] = []
    for axis, (value, rows) in zip(axes, panels, strict=True):
        axis.set_xlim(0, ROOM * reach or 1.0)
        marks += _draw_panel(axis, rows, [*names, total], y, hue, colors)
        title = None if value is None else style.panel_title(facet or "", value)
        style.finish_axes(axis, title, grid="x")
        axis.set_yticks(range(len(names) + 1), [style.name_text(name) for name in [*names, total]])
        format_axis(axis.xaxis, y, False)
    axes[0].set_ylim(len(names) + 0.6, -0.6)
    # once for all panels: side by side, long titles would run into one another
    figure.supxlabel(style.value_title(y).replace("\n", " "), fontsize=style.FONT, color=style.TEXT)
    style.legend(figure, hue, {str(kind): Patch(color=color) for kind, color in colors.items()})
    return style.plotted(figure, data, marks)


def _check(data: pd.DataFrame, part: str, y: str, facet: str | None, order: Sequence[Any] | None, total: str) -> None:
    if (data[y] < 0).any():
        raise ParameterError(f"expected lengths of zero or more in {y}, got {data[y].min():g}")
    style.check_unique(data, facet, part)
    if order is not None and (unknown := set(data[part]) - {*order, total}):
        raise ParameterError(f"expected values of {part} among {list(order)}, got {sorted(map(str, unknown))}")


def _reach(rows: pd.DataFrame, total: str, y: str) -> float:
    """How far the boxes of a panel and their intervals reach to the right."""
    ends = rows[["high" if "high" in rows else y, y]].max(axis=1)
    starts = (rows[y].cumsum() - rows[y]).where(rows.index != total, 0.0)
    return float((starts + ends).max())


def _draw_panel(
    axis: Axes, rows: pd.DataFrame, names: Sequence[Any], y: str, hue: str, colors: Mapping[Any, str]
) -> list[style.Mark]:
    """The boxes of one panel; the last name is that of the whole."""
    total = names[-1]
    whole = rows[y].get(total, rows[y].sum())
    marks, start = [], 0.0
    for place, name in enumerate(names):
        if name in rows.index:
            row = rows.loc[name].to_dict()
        elif name == total:
            row = {y: whole}
        else:
            continue
        begin = 0.0 if name == total else start
        end = begin + row[y]
        axis.barh(place, row[y], 0.72, begin, color=style.SOFT if name == total else colors[row[hue]], linewidth=0)
        edges = [begin, end]
        if row.get("low", float("nan")) == row.get("low"):
            edges += [begin + row["low"], begin + row["high"]]
            axis.hlines(place, edges[2], edges[3], colors=style.TEXT, linewidth=1.2)
        _write(axis, place, min(edges), max(edges), "< 0.1%" if 0 < row[y] < MIN_SHARE * whole else row[y], y)
        if name != total:
            axis.vlines(end, place - 0.36, place + 1.36, colors=style.SOFT, linewidth=0.6)
            start = end
        text = style.mark_text([style.name_text(name)], y, row)
        marks.append(style.Mark(axis, begin, place + 0.4, end, place - 0.4, text))
    return marks


def _write(axis: Axes, place: int, left: float, right: float, value: Any, y: str) -> None:
    """A value next to its box, where there is room."""
    width = axis.get_xlim()[1]
    is_left = right > TURN * width and left > (1 - TURN) * width
    axis.annotate(
        format_value(y, value),
        (left if is_left else right, place),
        xytext=(-3 if is_left else 3, 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        fontsize=style.FONT,
        color=style.TEXT,
    )
