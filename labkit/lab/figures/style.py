"""Looks that all figures share, with colors close to Okabe and Ito's, which are safe for
color-blind readers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullFormatter,
)
from matplotlib.ticker import NullLocator as NoTicks

from labkit.lab.figures.names import in_order, looks
from labkit.lab.units import better, column, label

PALETTE = (
    "#0072B2",
    "#D55E00",
    "#008F68",
    "#B0579A",
    "#A67C00",
    "#5E3FBE",
    "#5B5B5B",
    "#8C564B",
    "#3A86C8",
    "#2A8C95",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
TEXT = "#000000"
SOFT = "#56606B"
GRID = "#DFE3E7"
PAGE = "#FFFFFF"
FONT = 9  # points
WIDTH = 7.6
WIDE = 9.6
PANEL_HEIGHT = 2.9  # inches: a figure of one panel, of several, and the height of a panel
REFERENCE: dict[str, Any] = {"color": TEXT, "linestyle": "--", "linewidth": 1.2, "zorder": 2}
"""Look of what a formula says."""
ALL = "all"
"""Column of colors of a figure in one color."""
MAX_PANELS_IN_ROW = 3
LONGEST_LINE = 34  # characters next to a panel
LEGEND_ROW_INCHES = 0.2
LONGEST_BESIDE = 26  # names of more characters put a legend below the panels
LONGEST_UPRIGHT = 9  # characters of a name below an axis; longer ones are slanted
BOLD_INCHES = 0.085
PANELS_SHARE = 0.8  # width of a character of a panel's title; share of the panels in a figure
LABEL_INCHES = 0.075
MARGIN_INCHES = 0.8  # width of a character, and of the y axis
STEEP_INCHES = 0.5  # names closer to one another are slanted more
MIN_PLACES = 3  # a panel is as wide as these, so that a single bar is no wall
MIN_TICKS = 3
MAX_TICKS = 10  # of a logarithmic axis: fewer do not show its scale, more have no room
MIN_SPAN = 0.04  # of an axis, relative to its values: three digits tell its ticks apart


def colors(values: Iterable[Any]) -> dict[Any, str]:
    """Return the color of each distinct value, in natural order (`figures.names`)."""
    return looks(values, PALETTE)


def markers(values: Iterable[Any]) -> dict[Any, str]:
    """Return the marker of each distinct value, in natural order (`figures.names`)."""
    return looks(values, MARKERS)


def patches(colors: Mapping[Any, str]) -> dict[str, Patch]:
    """Return legend entries by name."""
    return {str(name): Patch(color=color) for name, color in colors.items()}


def name_text(name: Any) -> str:
    """Format a name for a reader: "one_shot" becomes "one shot", and 2.0 becomes "2"."""
    return f"{name:g}" if isinstance(name, float) else str(name).replace("_", " ")


def draw_intervals(
    axis: Axes, at: Sequence[float], rows: pd.DataFrame, colors: Sequence[str]
) -> None:
    """Draw vertical lines from `low` to `high`, for rows that have them."""
    table = rows.reindex(columns=["low", "high"]).assign(at=at, color=colors).dropna()
    if len(table):
        axis.vlines(
            table["at"], table["low"], table["high"], colors=table["color"], linewidth=1.2, zorder=3
        )


def panel_grid(panels: int, height: float = PANEL_HEIGHT) -> tuple[Figure, list[Axes]]:
    """Make panels of `height` inches with one y axis: up to three in a row, four in two rows."""
    columns = 2 if panels == 4 else min(panels, MAX_PANELS_IN_ROW)
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH if panels == 1 else WIDE, height * rows))
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for empty in axes[panels:]:
        empty.remove()
    return figure, axes[:panels]


def finish_axes(
    axis: Axes, title: str | None = None, *, x: str = "", y: str = "", grid: str = "y"
) -> None:
    """Draw a light grid behind the data, a frame at the bottom alone, and the titles of the panel
    and its axes."""
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
        columns = 1 if place is None else place.get_gridspec().ncols
        inches = axis.get_figure(root=True).get_figwidth() * PANELS_SHARE / columns  # type: ignore[union-attr]
        axis.set_title(
            "\n".join(wrap(title, int(inches / BOLD_INCHES))),
            fontsize=FONT,
            fontweight="bold",
            loc="left",
        )


def value_title(name: str) -> str:
    """Return the title of an axis with the direction that is better: "time (lower is faster)"."""
    title = column(name).axis
    direction = better(name)
    if direction is None:
        return title
    return f"{title}{' ' if len(title) + len(direction) < LONGEST_LINE else chr(10)}({direction})"


def place_names(axis: Axes, names: Sequence[str], inches: float) -> None:
    """Write the names of categories below an axis of `inches`, slanted if they would touch one
    another."""
    middle = (len(names) - 1) / 2
    half = max(len(names) / 2 + 0.1, MIN_PLACES / 2)
    longest = max(map(len, names))
    is_slanted = longest > LONGEST_UPRIGHT and len(names) > 3
    is_slanted |= len(names) > 1 and longest * LABEL_INCHES > inches / (2 * half)
    slant: dict[str, Any] = {"ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    if is_slanted:
        slant["rotation"] = 25 if inches / (2 * half) > STEEP_INCHES else 50
    axis.set_xticks(range(len(names)), names, **slant)
    axis.set_xlim(middle - half, middle + half)


def split_panels(data: pd.DataFrame, panel: str | None) -> list[tuple[str | None, pd.DataFrame]]:
    """Return title and rows of each panel, in natural order; (None, data) for one panel."""
    if panel is None:
        return [(None, data)]
    return [(label(panel, value), data[data[panel] == value]) for value in in_order(data[panel])]


def add_legend(figure: Figure, hue: str, handles: Mapping[str, Any]) -> None:
    """Add one legend for all panels: at their right, or below them if its names are long."""
    if not handles or (hue == ALL and len(handles) == 1):
        return
    widest = max(map(len, handles))
    is_beside = widest <= LONGEST_BESIDE
    columns = (
        1
        if is_beside
        else max(1, min(len(handles), int(figure.get_figwidth() * 14 / (widest + 8))))
    )
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


def format_axis(axis: Any, name: str, *, is_log: bool = False) -> None:
    """Set round ticks for the present range of an axis, with the units of a column."""
    low, high = axis.get_view_interval()
    if (missing := MIN_SPAN * max(abs(low), abs(high)) - (high - low)) > 0:
        low = low - missing / 2
        high = high + missing / 2
        axis.set_view_interval(low, high, ignore=True)
    axis.set_major_locator(log_ticks(name, low, high) if is_log else _linear_ticks(name, low, high))
    axis.set_minor_locator(NoTicks())
    axis.set_major_formatter(FuncFormatter(lambda value, _: column(name).form(value)))
    axis.set_minor_formatter(NullFormatter())


def log_ticks(name: str, low: float, high: float) -> Locator:
    """Ticks at powers of two for sizes and counts; else at 1, 2 and 5 of each power of ten, or as
    many as have room."""
    if name.endswith("bytes"):
        return LogLocator(base=32 if name == "n_bytes" else 2, numticks=8)
    if column(name).doubles:
        return LogLocator(base=2)
    for locator in (LogLocator(subs=(1, 2, 5), numticks=12), LogLocator(numticks=MAX_TICKS)):
        number = sum(low <= tick <= high for tick in locator.tick_values(low, high))
        if MIN_TICKS <= number <= MAX_TICKS:
            return locator
    return _linear_ticks(name, low, high)


def _linear_ticks(name: str, low: float, high: float) -> Locator:
    """About five ticks at equal distances of 1, 2 or 5; for bytes, of a power of two."""
    if name.endswith("bytes"):
        return MultipleLocator(2.0 ** math.ceil(math.log2(max(high - low, 1e-9) / 6)))
    return MaxNLocator(nbins=6, steps=[1, 2, 5, 10])
