"""What all figures share: palette, panels, axis titles with units, the legend, and how a figure is saved.

Colors are close to Okabe and Ito's, which are safe for color-blind readers, and each has a marker. Files are saved the
same to the byte.
"""

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.layout_engine import ConstrainedLayoutEngine

from labkit.lab.columns import better, column, format_value, label
from labkit.lab.config import ParameterError
from labkit.lab.project import write_file
from labkit.lab.units import counted

PALETTE = ("#0072B2", "#D55E00", "#008F68", "#B0579A", "#A67C00", "#5E3FBE", "#5B5B5B", "#8C564B", "#3A86C8", "#2A8C95")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
TEXT, SOFT, GRID, PAGE = "#000000", "#56606B", "#DFE3E7", "#FFFFFF"
FONT = 9  # points
WIDTH, WIDE, PANEL_HEIGHT = 7.6, 9.6, 2.9  # inches: a figure of one panel, of several, and the height of a panel
DPI, CSS_INCH = 130, 96  # pixels per inch: of a picture, and of a browser
TITLE_CHARACTERS, TITLE_LINE_INCHES = 10, 0.22  # per inch of width; per line
MEASURED, PUBLISHED, ALL = "measured here", "published", "all"
MAX_PANELS_IN_ROW = 3
LONGEST_LINE = 34  # characters next to a panel
LEGEND_ROW_INCHES, LONGEST_BESIDE = 0.2, 26  # names of more characters make a legend stand below the panels


class Mark(NamedTuple):
    """What a reader can point at: a point, bar or box in the coordinates of its axes, and its text."""

    axis: Axes
    left: float
    bottom: float
    right: float
    top: float
    text: str


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure and the frame of exactly what it shows. As the last expression of a notebook's cell it draws itself.

    `with_published` is the same figure with published values, if there are any: they come from other hardware and
    stretch the axes, so a page shows them on demand only.
    """

    figure: Figure
    data: pd.DataFrame
    marks: Sequence[Mark] = ()
    with_published: "Plot | None" = None

    def __repr__(self) -> str:
        return f"figure of {counted(len(self.data), 'row')}: {', '.join(map(str, self.data.columns))}"

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:  # IPython asks for it
        return self.png(), {"alt": repr(self), "width": round(self.figure.get_figwidth() * CSS_INCH)}

    def of_source(self, source: str) -> "Plot":
        """The same figure, whose file of points says that they come from `source`."""
        return replace(self, data=self.data.assign(source=source))

    @cached_property
    def laid_out(self) -> Figure:
        """The figure, its panels placed so that no text overlaps."""
        ConstrainedLayoutEngine().execute(self.figure)
        return self.figure

    def png(self, title: str | None = None) -> bytes:
        """The figure as a picture, below `title`."""
        pixels = _pixels(self.laid_out)
        if title:
            lines = wrap(title, int(self.figure.get_figwidth() * TITLE_CHARACTERS))
            above = Figure(figsize=(self.figure.get_figwidth(), TITLE_LINE_INCHES * len(lines)))
            above.text(0.01, 0.5, "\n".join(lines), va="center", fontsize=FONT + 2)
            pixels = np.concatenate([_pixels(above), pixels])
        buffer = io.BytesIO()
        imsave(buffer, pixels, format="png", dpi=DPI, metadata={"Software": "labkit"})
        return buffer.getvalue()

    def save(self, stem: Path, title: str | None = None) -> bytes:
        """Write `<stem>.png` and `<stem>.csv` with the plotted points; returns the PNG, which takes long to draw."""
        png = self.png(title)
        write_file(stem.with_name(stem.name + ".png"), png)  # a stem may have a dot, as in a model's size
        write_file(stem.with_name(stem.name + ".csv"), self.csv())
        return png

    def csv(self) -> str:
        """The plotted points as comma-separated values."""
        return (self.with_published or self).data.to_csv(index=False)


def _pixels(figure: Figure) -> Any:
    """The figure drawn: (height, width, 4) bytes."""
    figure.dpi = DPI
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def tidy(frame: pd.DataFrame, y: str, *columns: str | None, hue: str | None = None) -> tuple[pd.DataFrame, str]:
    """The rows that have a value, with the columns of a figure, and the column of colors.

    `low` and `high` right behind `y` are its interval. Without a hue, all rows get one color. ParameterError for a
    missing column.
    """
    names = [name for name in dict.fromkeys((*columns, y, hue)) if name is not None]
    frame = frame if len(frame.columns) else pd.DataFrame(columns=names)
    if missing := [name for name in names if name not in frame]:
        raise ParameterError(f"no column {', '.join(missing)}; the frame has {', '.join(map(str, frame.columns))}")
    place = list(frame.columns).index(y)
    if list(frame.columns[place + 1 : place + 3]) == ["low", "high"]:  # a frame has intervals of one column only
        names[names.index(y) + 1 : names.index(y) + 1] = ["low", "high"]
    extra = {} if hue else {ALL: ""}
    return frame[list(dict.fromkeys(names))].dropna(subset=[y]).assign(**extra), hue or ALL


def check_unique(data: pd.DataFrame, *keys: str | None) -> None:
    """ParameterError for two rows that would be the same point or bar."""
    names = [name for name in dict.fromkeys((*keys, "source")) if name is not None and name in data]
    twice = data[data.duplicated(names)]
    if not twice.empty:
        raise ParameterError(f"expected one row per point, got several for {twice[names].iloc[0].to_dict()}")


def with_reference(draw: Callable[[pd.DataFrame], Plot], rows: pd.DataFrame, reference: pd.DataFrame | None) -> Plot:
    """The figure of `rows`; with published rows on demand, if there are any, and at once if there is nothing else."""
    if reference is None or reference.empty:
        return draw(rows)
    both = draw(pd.concat([rows, reference], ignore_index=True))
    return replace(draw(rows), with_published=both) if len(rows) else both


def plotted(figure: Figure, data: pd.DataFrame, marks: Sequence[Mark] = ()) -> Plot:
    return Plot(figure, data.drop(columns=[ALL], errors="ignore"), marks)


def nothing_to_draw(data: pd.DataFrame) -> Plot:
    figure = Figure(figsize=(WIDTH, 1.0))
    figure.text(0.5, 0.5, "nothing was measured to draw here", ha="center", va="center", fontsize=FONT)
    return plotted(figure, data)


def name_text(name: Any) -> str:
    """A name as a reader sees it: "one_shot" is "one shot"."""
    return str(name).replace("_", " ")


def present(values: Iterable[Any], order: Iterable[Any] | None) -> list[Any]:
    """Each value once: those of `order` first, then as they come."""
    values = list(dict.fromkeys(values))
    first = [value for value in order or () if value in values]
    return [*first, *(value for value in values if value not in first)]


def looks(values: Iterable[Any], looks: Sequence[str]) -> dict[Any, str]:
    """A color or marker for each value, by its place."""
    return {value: looks[index % len(looks)] for index, value in enumerate(dict.fromkeys(values))}


def mark_text(names: Iterable[str], y: str, row: Mapping[str, Any]) -> str:
    """What a point says: "ring · 64 KiB · 366 µs [299 µs, 436 µs]"."""
    value = format_value(y, row[y])
    if "low" in row and row["low"] == row["low"]:
        value += f" [{format_value(y, row['low'])}, {format_value(y, row['high'])}]"
    return " · ".join([*filter(None, dict.fromkeys(names)), value])


def draw_intervals(axis: Axes, at: Sequence[float], rows: pd.DataFrame, colors: Sequence[str]) -> None:
    """Vertical lines from `low` to `high`, where rows have them."""
    table = rows.reindex(columns=["low", "high"]).assign(at=at, color=colors).dropna()
    if len(table):
        axis.vlines(table["at"], table["low"], table["high"], colors=table["color"], linewidth=1.2, zorder=3)


def panel_grid(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels of one y axis, so many inches high, up to three in a row and four as two rows."""
    columns = 2 if panels == 4 else min(panels, MAX_PANELS_IN_ROW)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH if panels == 1 else WIDE, height * rows))
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for empty in axes[panels:]:
        empty.remove()
    return figure, axes[:panels]


def finish_axes(axis: Axes, title: str | None = None, *, x: str = "", y: str = "", grid: str = "y") -> None:
    """A light grid behind the data, a frame at the bottom alone, the titles of the panel and its axes."""
    axis.grid(visible=False)
    axis.grid(visible=True, axis=grid, which="major", color=GRID, linewidth=0.7)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(SOFT)
    axis.tick_params(which="both", length=0, labelsize=FONT, labelcolor=SOFT, pad=5)
    axis.set_xlabel(x, fontsize=FONT, color=TEXT)
    place = axis.get_subplotspec()
    axis.set_ylabel(y if place is None or place.is_first_col() else "", fontsize=FONT, color=TEXT)
    if title is not None:
        axis.set_title(title, fontsize=FONT, fontweight="bold", loc="left")


def value_title(name: str, title: str | None = None) -> str:
    """What is measured, and which way is better: "time (lower is faster)"."""
    title, direction = title or column(name).axis, better(name)
    if direction is None:
        return title
    return f"{title}{' ' if len(title) + len(direction) < LONGEST_LINE else chr(10)}({direction})"


def panel_title(panel: str, value: Any) -> str:
    return f"{value[0]}, {value[1]} ranks" if isinstance(value, tuple) else label(panel, value)


def legend(figure: Figure, hue: str, handles: Mapping[str, Any]) -> None:
    """One legend for all panels: at their right, or below them if its names are long."""
    if not handles or (hue == ALL and len(handles) == 1):
        return
    widest = max(map(len, handles))
    is_beside = widest <= LONGEST_BESIDE
    columns = 1 if is_beside else max(1, min(len(handles), int(figure.get_figwidth() * 14 / (widest + 8))))
    if not is_beside:  # panels stay as high as they are
        rows = 1 + math.ceil(len(handles) / columns)
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW_INCHES * rows)
    figure.legend(
        handles.values(),
        [name_text(name) for name in handles],
        title=None if hue == ALL else column(hue).axis,
        loc="outside right upper" if is_beside else "outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=FONT,
        title_fontsize=FONT,
        alignment="left",
    )
