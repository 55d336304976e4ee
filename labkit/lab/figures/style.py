"""What all figures share: palette, axis titles with units, panels, the legend, and how a figure is saved.

Colors are close to Okabe and Ito's, which are safe for color-blind readers, but all stand out from white; each has a
marker of its own. Files are saved bit by bit the same.
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

from labkit.lab.columns import better, column, label
from labkit.lab.config import ParameterError
from labkit.lab.units import counted

PALETTE = ("#0072B2", "#D55E00", "#008F68", "#B0579A", "#A67C00", "#5E3FBE", "#5B5B5B", "#8C564B", "#3A86C8", "#2A8C95")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
TEXT, SOFT, GRID, PAGE = "#000000", "#56606B", "#DFE3E7", "#FFFFFF"
FONT = 9  # points
WIDTH, WIDE, PANEL_HEIGHT = 7.6, 9.6, 2.9  # inches: a figure of one panel, of several, and how high a panel is
DPI = 130
CHARACTERS_PER_INCH = 10  # of a title
CSS_INCH = 96  # pixels of a browser
MEASURED = "measured here"
PUBLISHED = "published"
ALL = "all"  # the column that tells one line or bar from another where the caller names none
AT = "at"  # the column that says where on the x axis a point stands
FEW_PLACES = 4  # on the x axis: each gets a tick of its own
MOST_IN_A_ROW = 3  # panels; more are cut off or too small to read on a page
NEW_LINE = "\n"
LONGEST_LINE = 34  # characters beside a panel
LEGEND_ROW_INCHES = 0.2
TITLE_LINE_INCHES = 0.22
LONGEST_BESIDE = 26  # characters of a name in a legend that stands beside the panels


class Mark(NamedTuple):
    """What a reader can point at: a point, bar or box in the coordinates of its axes, and what it says."""

    axis: Axes
    left: float
    bottom: float
    right: float
    top: float
    text: str


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure and the frame of exactly what it shows. As the last expression of a notebook's cell it draws itself.

    `with_published` is the same figure with what was published beside it, where there is any: of other hardware, it
    stretches the axes, so that a page shows it on demand only.
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
        """The same, whose points' file says that they come from `source`: not everything is measured here."""
        return replace(self, data=self.data.assign(source=source))

    @cached_property
    def laid_out(self) -> Figure:
        """The figure, its panels placed so that no text overlaps. Once: it takes as long as to draw them."""
        ConstrainedLayoutEngine().execute(self.figure)
        return self.figure

    def png(self, title: str | None = None) -> bytes:
        """The figure as a picture, below `title`."""
        pixels = _pixels(self.laid_out)
        if title:
            lines = wrap(title, int(self.figure.get_figwidth() * CHARACTERS_PER_INCH))
            above = Figure(figsize=(self.figure.get_figwidth(), TITLE_LINE_INCHES * len(lines)))
            above.text(0.01, 0.5, NEW_LINE.join(lines), va="center", fontsize=FONT + 2)
            pixels = np.concatenate([_pixels(above), pixels])
        buffer = io.BytesIO()
        imsave(buffer, pixels, format="png", dpi=DPI, metadata={"Software": "labkit"})
        return buffer.getvalue()

    def save(self, stem: Path, title: str | None = None) -> bytes:
        """Write `<stem>.png` and, beside it, `<stem>.csv` with the plotted points; returns the PNG: drawing is slow.

        The stem may have a dot, as in the name of a model's size.
        """
        stem.parent.mkdir(parents=True, exist_ok=True)
        png = self.png(title)
        stem.with_name(stem.name + ".png").write_bytes(png)
        stem.with_name(stem.name + ".csv").write_text(self.csv())
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


def finish_axes(axis: Axes, *, grid: str = "both") -> None:
    """A light grid behind the data, a frame at the bottom alone, numbers softer than names."""
    axis.grid(visible=True, axis=grid, which="major", color=GRID, linewidth=0.7)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(SOFT)
    axis.tick_params(which="both", length=0, labelsize=FONT, labelcolor=SOFT, pad=5)


def name_axis(axis: Any, text: str) -> None:
    """What is along an axis (`axes.xaxis`, `axes.yaxis`)."""
    axis.set_label_text(text, fontsize=FONT, color=TEXT)


def name_panel(axis: Axes, text: str) -> None:
    axis.set_title(text, fontsize=FONT, fontweight="bold", loc="left")


def value_title(name: str, title: str | None = None) -> str:
    """What is measured, and which way is better: "time (lower is faster)"."""
    title, way = title or column(name).axis, better(name)
    if way is None:
        return title
    return f"{title}{' ' if len(title) + len(way) < LONGEST_LINE else NEW_LINE}({way})"


def told(names: Iterable[str], y: str, row: pd.Series) -> str:
    """What a point says when a reader points at it: "ring · 64 KiB · 366 µs [299 µs, 436 µs]"."""
    shown = column(y).form
    value = shown(row[y])
    if "low" in row and row["low"] == row["low"]:
        value += f" [{shown(row['low'])}, {shown(row['high'])}]"
    return " · ".join([*filter(None, dict.fromkeys(names)), value])


def drawn_columns(frame: pd.DataFrame, *columns: str | None) -> list[str]:
    """The columns that a figure draws, each once. ValueError if the frame lacks one."""
    named = list(dict.fromkeys(column for column in columns if column is not None))
    if missing := [name for name in named if name not in frame]:
        raise ParameterError(f"no column {', '.join(missing)}; the frame has {', '.join(map(str, frame.columns))}")
    return named


def with_hue(frame: pd.DataFrame, hue: str | None) -> tuple[pd.DataFrame, str]:
    """The frame and the column of its colors; where none is named, all rows are of one color."""
    return (frame, hue) if hue is not None else (frame.assign(**{ALL: ""}), ALL)


def with_interval(columns: Sequence[str], frame: pd.DataFrame, y: str) -> list[str]:
    """The columns and, behind `y`, its interval: `low` and `high` if they stand right behind it in the frame too.

    A frame holds other quantities as well (a bandwidth beside a time), and an interval is of one of them alone.
    """
    names = list(frame.columns)
    start = names.index(y)
    interval = ["low", "high"] if names[start + 1 : start + 3] == ["low", "high"] else []
    return [name for column in columns for name in ([column, *interval] if column == y else [column])]


def with_reference(
    draw: Callable[[pd.DataFrame], Plot], own: pd.DataFrame, reference: pd.DataFrame, reference_label: str
) -> Plot:
    """Both in one figure; what was published, by its label, on demand only where there is anything of one's own."""
    both = draw(pd.concat([own, reference], ignore_index=True))
    if own.empty or reference.empty or not reference_label.startswith(PUBLISHED):
        return both
    return replace(draw(own), with_published=both)


def spoken(name: Any) -> str:
    """A name as a reader sees it: "one_shot" is "one shot"."""
    return str(name).replace("_", " ")


def present(values: Iterable[Any], order: Iterable[Any] | None) -> list[Any]:
    """Each value once, in an order that may name others, too; None: as they come."""
    found = dict.fromkeys(values)
    return [value for value in (order or found) if value in found]


def colors_of(values: Iterable[Any]) -> Mapping[Any, str]:
    """A color for each value, by its place."""
    return {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(values)}


def panel_grid(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels of one y axis, so many inches high, up to three side by side and four as two rows."""
    columns = 2 if panels == 4 else min(panels, MOST_IN_A_ROW)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH if panels == 1 else WIDE, height * rows))
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for empty in axes[panels:]:
        empty.remove()
    return figure, axes[:panels]


def begins_row(axis: Axes) -> bool:
    """Whether a panel is the first of its row, which has the title of the y axis."""
    place = axis.get_subplotspec()
    return place is not None and place.is_first_col()


def plotted(figure: Figure, data: pd.DataFrame, marks: Sequence[Mark] = ()) -> Plot:
    """The plot of what was drawn, without the columns that only drawing needed."""
    return Plot(figure, data.drop(columns=[ALL, AT], errors="ignore"), marks)


def nothing_to_draw(data: pd.DataFrame) -> Plot:
    figure = Figure(figsize=(WIDTH, 1.0))
    figure.text(0.5, 0.5, "nothing was measured to draw here", ha="center", va="center", fontsize=FONT)
    return plotted(figure, data)


def error_bars(series: pd.DataFrame, y: str) -> Any:
    if not {"low", "high"} <= set(series.columns) or series["low"].isna().all():
        return None
    below = (series[y] - series["low"]).clip(lower=0).fillna(0)
    above = (series["high"] - series[y]).clip(lower=0).fillna(0)
    return [below, above]


def facet_title(facet: str, value: Any) -> str:
    return f"{value[0]}, {value[1]} ranks" if isinstance(value, tuple) else label(facet, value)


def legend(figure: Figure, axes: Sequence[Axes], hue: str, order: Sequence[str] = ()) -> None:
    """One legend for all panels: beside them, or below where its names are long. `order` names what comes first."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    if hue == ALL and len(entries) <= 1:
        return
    entries = {name: entries[name] for name in [*(n for n in order if n in entries), *entries]}
    widest = max(map(len, entries), default=1)
    is_beside = widest <= LONGEST_BESIDE
    most = max(1, min(len(entries), int(figure.get_figwidth() * 14 / (widest + 8))))
    columns = math.ceil(len(entries) / math.ceil(len(entries) / most)) if entries else 1  # rows of about equal length
    if not is_beside:  # panels stay as high as they are
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW_INCHES * (1 + math.ceil(len(entries) / columns)))
    figure.legend(
        entries.values(),
        entries.keys(),
        title=None if hue == ALL else column(hue).axis,
        loc="outside right upper" if is_beside else "outside lower center",
        ncols=1 if is_beside else columns,
        frameon=False,
        fontsize=FONT,
        title_fontsize=FONT,
        alignment="left",
    )
