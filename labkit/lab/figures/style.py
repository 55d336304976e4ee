"""Looks that all figures share: colors, sizes, ticks, and the natural order of names.

Colors are close to Okabe and Ito's, which are safe for color-blind readers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
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

from labkit.lab.figures.figure import ALL
from labkit.lab.units import better, column, label, spell_name

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
# What a formula says is dashed and black, so that it is no alternative's line.
REFERENCE: dict[str, Any] = {"color": TEXT, "linestyle": "--", "linewidth": 1.2, "zorder": 2}

FONT = 9  # points
WIDTH = 7.6  # inches: a figure of one panel
WIDE = 9.6  # inches: a figure of several panels
PANEL_HEIGHT = 2.9  # inches
MARGIN_INCHES = 0.8  # width of the y axis
PANELS_SHARE = 0.9  # of the width of a figure; the y axis takes the rest
LABEL_INCHES = 0.075  # width of a character
BOLD_INCHES = 0.085  # width of a character of a panel's title
LEGEND_INCHES = 4.6  # what a phone shows of a figure that it scrolls
LEGEND_KEY_INCHES = 0.5  # line and marker before a name
LEGEND_ROW_INCHES = 0.2
STEEP_INCHES = 0.5  # names closer to one another are slanted more

MAX_PANELS_IN_ROW = 3
MIN_PLACES = 3  # a panel is as wide as these, so that a single bar is no wall
LONGEST_LINE = 34  # characters next to a panel
LONGEST_UPRIGHT = 9  # characters of a name below an axis; longer ones are slanted
MIN_TICKS = 3  # of a logarithmic axis: fewer do not show its scale
MAX_TICKS = 10  # more have no room
MIN_SPAN = 0.04  # of an axis, relative to its values: three digits tell its ticks apart

# The place in its group is the color and marker of a name. A name in two groups has the same place
# in both, so `torch` is first wherever it occurs.
_TABLE = """
torch | ring | butterfly | halving_doubling | recursive_doubling | auto | one_shot
torch | point_to_point | shared | registered | floor
gloo | nccl | shared memory
torch | naive | flat | overlapped | bucketed | bucketed_sync | local
  | naive_shared | bucketed_shared
explicit | compiled | tiled | flash | sdpa | sdpa_math | sdpa_flash | sdpa_efficient | sdpa_cudnn
ddp | torch_ddp | zero1 | torch_zero1 | zero2 | zero3 | torch_zero3
torch | labkit | plain_local_batch | plain_whole_batch | collectives_alone
torch | own
torch + BatchNorm | own + BatchNorm | torch + SyncBatchNorm | own + SyncBatchNorm
BatchNorm | SyncBatchNorm
torch | torch, sequence parallel | shared | shared, sequence parallel | one rank
ring, zigzag | ring, contiguous | gathered, zigzag | gathered, contiguous | one rank
data parallel | sharded | tensor parallel | pipeline | context parallel
all_reduce | reduce_scatter | all_gather
input | forward | backward | optimizer
inference | forward | backward | optimizer | forward and backward | step | waiting | all-reduce
parameters | gradients | activations | optimizer | temporaries | inputs
inference, float32 | inference, bfloat16 | forward, float32 | forward, bfloat16
  | full step, float32 | full step, bfloat16
float64 | float32 | bfloat16 | float16
fp32 | fp16 | bf16 | fp16_into_fp32 | fp16_cast_to_fp32 | bf16_into_fp32
matmul | softmax | loss | elementwise | reduction | embedding | copy | dispatch
memory | arithmetic | the call
add | new
nano | mini | small | medium | large | xl | 2.7B | 10B
"""
_LINES = _TABLE.replace("\n  |", " |").strip().splitlines()
GROUPS = tuple(tuple(line.split(" | ")) for line in _LINES)
_PLACES = {name: place for group in GROUPS for place, name in enumerate(group)}
BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def in_order(values: Iterable[Any]) -> list[Any]:
    """Return distinct values in natural order: numbers ascending, then names as in `GROUPS`.

    Names such as "mini, 128 tokens" go by their parts. Others, such as a reader's own, come last,
    in the order in which they are given.
    """
    distinct = list(dict.fromkeys(values))
    numbers = sorted(value for value in distinct if not isinstance(value, str))
    names = [value for value in distinct if isinstance(value, str)]
    # A name may be in several groups: the group that has most of these names has their order.
    parts = {part for name in names for part in (name, *name.split(", "))}
    groups = sorted(GROUPS, key=lambda group: -len(parts.intersection(group)))
    order = {name: place for place, name in enumerate(dict.fromkeys(chain(*groups)))}
    return numbers + sorted(names, key=lambda name: _sort_key(name, order))


def _sort_key(name: str, order: Mapping[str, int]) -> list[float]:
    """Return the places of a name's parts; a number, as in "128 tokens", is its own place."""
    if name in order:
        return [order[name]]
    key: list[float] = []
    for part in name.split(", "):
        value, _, unit = part.partition(" ")
        if part in order:
            key.append(order[part])
        elif value.isdecimal():
            key.append(int(value) * BYTES.get(unit, 1))
        else:
            return [len(order)]  # last
    return key


def _assign(values: Iterable[Any], choices: Sequence[str]) -> dict[Any, str]:
    """Assign one of `choices`, colors or markers, to each value.

    A name of `GROUPS` gets that of its place. Others get those that are left, so that a reader's
    own alternative changes no other.
    """
    ordered = in_order(values)
    result: dict[Any, str] = {}
    for name in ordered:
        place = _PLACES.get(name, len(choices))
        # Two names of one place may meet in a figure: the first one keeps it.
        if place < len(choices) and choices[place] not in result.values():
            result[name] = choices[place]
    free = cycle([choice for choice in choices if choice not in result.values()] or choices)
    return {name: result.get(name) or next(free) for name in ordered}


def colors(values: Iterable[Any]) -> dict[Any, str]:
    """Return the color of each distinct value, in natural order (`GROUPS`)."""
    return _assign(values, PALETTE)


def markers(values: Iterable[Any]) -> dict[Any, str]:
    """Return the marker of each distinct value, in natural order (`GROUPS`)."""
    return _assign(values, MARKERS)


def patches(colors: Mapping[Any, str]) -> dict[str, Patch]:
    """Return legend entries by name."""
    return {str(name): Patch(color=color) for name, color in colors.items()}


def name_text(name: Any) -> str:
    """Format a name for a reader: "one_shot" becomes "one shot", and 2.0 becomes "2"."""
    return f"{name:g}" if isinstance(name, float) else spell_name(str(name))


def draw_intervals(
    axis: Axes, at: Sequence[float], rows: pd.DataFrame, colors: Sequence[str]
) -> None:
    """Draw vertical lines from `low` to `high`, for rows that have them."""
    table = rows.reindex(columns=["low", "high"]).assign(at=at, color=colors).dropna()
    if len(table):
        axis.vlines(
            table["at"], table["low"], table["high"], colors=table["color"], linewidth=1.2, zorder=3
        )


def panel_grid(panels: int, height: float = PANEL_HEIGHT) -> tuple[Canvas, list[Axes]]:
    """Make panels of `height` inches with one y axis: up to three in a row, four in two rows."""
    # Four in a square leave no row with a single panel.
    columns = 2 if panels == 4 else min(panels, MAX_PANELS_IN_ROW)
    rows = math.ceil(panels / columns)
    figure = Canvas(figsize=(WIDTH if panels == 1 else WIDE, height * rows))
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for empty in axes[panels:]:  # an empty frame would look like missing data
        empty.remove()
    return figure, axes[:panels]


def finish_axes(
    axis: Axes, title: str | None = None, *, x: str = "", y: str = "", grid: str = "y"
) -> None:
    """Draw a light grid, a frame at the bottom alone, and the titles of the panel and its axes."""
    axis.grid(visible=False)
    axis.grid(visible=True, axis=grid, which="major", color=GRID, linewidth=0.7)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(SOFT)
    axis.tick_params(which="both", length=0, labelsize=FONT, labelcolor=SOFT, pad=5)
    axis.set_xlabel(x, fontsize=FONT, color=TEXT)
    place = axis.get_subplotspec()
    assert place is not None, "panels are made by `subplots`"
    # Empty, too: seaborn has written the name of the column.
    axis.set_ylabel(y if place.is_first_col() else "", fontsize=FONT, color=TEXT)
    if title is not None:
        canvas = axis.get_figure(root=True)
        assert canvas is not None
        inches = canvas.get_figwidth() * PANELS_SHARE / place.get_gridspec().ncols
        lines = wrap(title, int(inches / BOLD_INCHES))
        axis.set_title("\n".join(lines), fontsize=FONT, fontweight="bold", loc="left")


def value_title(name: str) -> str:
    """Return the title of an axis with the direction that is better: "time (lower is faster)"."""
    title = column(name).axis
    direction = better(name)
    if direction is None:
        return title
    separator = " " if len(title) + len(direction) < LONGEST_LINE else "\n"
    return f"{title}{separator}({direction})"


def place_names(axis: Axes, names: Sequence[str], inches: float) -> None:
    """Write the names of categories below an axis of `inches`, slanted if they would touch."""
    # Bars and dots of category i stand around i on the axis.
    middle = (len(names) - 1) / 2
    half = max(len(names) / 2 + 0.1, MIN_PLACES / 2)
    longest = max(map(len, names))
    name_inches = inches / (2 * half)
    slant: dict[str, Any] = {}
    touches = len(names) > 1 and longest * LABEL_INCHES > name_inches
    if touches or (longest > LONGEST_UPRIGHT and len(names) > 3):
        degrees = 25 if name_inches > STEEP_INCHES else 50
        slant = {"ha": "right", "rotation_mode": "anchor", "rotation": degrees}
    axis.set_xticks(range(len(names)), names, **slant)
    axis.set_xlim(middle - half, middle + half)


def split_panels(data: pd.DataFrame, panel: str | None) -> list[tuple[str | None, pd.DataFrame]]:
    """Return title and rows of each panel, in natural order; (None, data) for one panel."""
    if panel is None:
        return [(None, data)]
    return [(label(panel, value), data[data[panel] == value]) for value in in_order(data[panel])]


def add_legend(canvas: Canvas, hue: str, handles: Mapping[str, Any]) -> None:
    """Add one legend for all panels, above their left end: a phone shows that end first."""
    if not handles or (hue == ALL and len(handles) == 1):
        return
    title = None
    n_rows = 0
    if hue != ALL:
        title = column(hue).axis
        n_rows = 1
    entry_inches = max(map(len, handles)) * LABEL_INCHES + LEGEND_KEY_INCHES
    n_columns = min(len(handles), max(1, int(LEGEND_INCHES / entry_inches)))
    n_rows += math.ceil(len(handles) / n_columns)
    # The legend gets room of its own: panels stay as high as they are.
    canvas.set_figheight(canvas.get_figheight() + LEGEND_ROW_INCHES * n_rows)
    canvas.legend(
        handles.values(),
        [name_text(name) for name in handles],
        title=title,
        loc="outside upper left",
        ncols=n_columns,
        frameon=False,
        fontsize=FONT,
        title_fontsize=FONT,
        alignment="left",
    )


def format_axis(axis: Any, name: str, *, is_log: bool = False) -> None:
    """Set round ticks for the present range of an axis, with the units of a column."""
    # Values that hardly differ would fill the axis, as if they did, under ticks that read alike.
    low, high = axis.get_view_interval()
    missing = MIN_SPAN * max(abs(low), abs(high)) - (high - low)
    if missing > 0:
        low -= missing / 2
        high += missing / 2
        axis.set_view_interval(low, high, ignore=True)
    make_ticks = log_ticks if is_log else _linear_ticks
    axis.set_major_locator(make_ticks(name, low, high))
    axis.set_minor_locator(NoTicks())
    axis.set_major_formatter(FuncFormatter(lambda value, _: column(name).form(value)))
    axis.set_minor_formatter(NullFormatter())


def log_ticks(name: str, low: float, high: float) -> Locator:
    """Ticks at powers of two for sizes and counts; else at round numbers, as many as have room."""
    # n_bytes runs from KiB to GiB, and 32 leads from 1 KiB to 1 MiB in two steps.
    if name.endswith("bytes"):
        return LogLocator(base=32 if name == "n_bytes" else 2, numticks=8)
    if column(name).doubles:
        return LogLocator(base=2)
    # 1, 2, 5 where an axis is short; powers of ten alone where it is long.
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
