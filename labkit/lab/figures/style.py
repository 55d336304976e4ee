"""What all figures share: palette, axis titles with units, panels, the legend, and how a figure is saved.

Colors are Okabe and Ito's, safe for color-blind readers, with a marker each; the background is opaque white, so
that a figure reads well on a dark page. Saved files are bit-reproducible.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from labkit.lab.units import counted, format_bytes, formatter_of

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F", "#8C564B", "#17BECF")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
PANEL_WIDTH, PANEL_HEIGHT, DPI = 3.4, 3.3, 130
CSS_INCH = 96  # pixels of a browser
SINGLE_PANEL_WIDTH = 7.0
MEASURED = "measured here"
ALL = "all"  # the column that tells one line or bar from another where the caller names none
AT = "at"  # the column that says where on the x axis a point stands
THUMBNAIL_WIDTH = 320  # pixels, shown at half of it
FEW_PLACES = 4  # on the x axis: each gets a tick of its own
FEWEST_TICKS = 3  # on a logarithmic axis; fewer do not tell its scale

# Column names as axis titles; a name that is not listed is shown with blanks for underscores.
AXIS_TITLES = {
    "n_bytes": "size of the tensor",
    "world_size": "ranks",
    "bucket_bytes": "bucket size",
    "bucket_mb": "bucket size (MiB)",
    "buckets": "number of buckets",
    "seconds": "time",
    "sequence": "sequence length (tokens)",
    "context_length": "context length (tokens)",
    "bytes": "memory",
    "busbw_gb_per_s": "bus bandwidth (GB/s)",
    "algbw_gb_per_s": "algorithm bandwidth (GB/s)",
    "elements": "elements",
    "ratio": "ratio of times",
    "head_dim": "head dimension",
}

# Axes on which values double: ticks at powers of two.
DOUBLING = ("n_bytes", "world_size", "sequence", "context_length")


class _PowersOfTwo(Locator):
    """About six ticks, a power of two apart, as sizes in KiB and MiB are read."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None, "a locator belongs to an axis once it is asked"
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        step = 2.0 ** math.ceil(math.log2(max(vmax - vmin, 1e-9) / 6))
        return [step * index for index in range(math.ceil(vmin / step), math.floor(vmax / step) + 1)]


class _OneTwoFive(LogLocator):
    """Ticks at 1, 2 and 5 of each power of ten; on an axis so short that they are too few, at equal distances."""

    def __init__(self) -> None:
        super().__init__(subs=(1, 2, 5), numticks=12)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        ticks = super().tick_values(vmin, vmax)
        if sum(vmin <= tick <= vmax for tick in ticks) >= FEWEST_TICKS:
            return ticks
        return MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(vmin, vmax)


def _log_ticks(column: str) -> Locator:
    if column.endswith("bytes"):
        return LogLocator(base=32 if column == "n_bytes" else 2, numticks=8)
    return LogLocator(base=2) if column in DOUBLING else _OneTwoFive()


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure and the frame of exactly what it shows. As the last expression of a notebook's cell it draws itself."""

    figure: Figure
    data: pd.DataFrame

    def __repr__(self) -> str:
        return f"figure of {counted(len(self.data), 'row')}: {', '.join(map(str, self.data.columns))}"

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:  # IPython asks for it
        return self.png(), {"alt": repr(self), "width": round(self.figure.get_figwidth() * CSS_INCH)}

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        return buffer.getvalue()

    def save(self, stem: Path) -> bytes:
        """Write `<stem>.png` and, beside it, `<stem>.csv` with the plotted points; returns the PNG: drawing is slow.

        The stem may have a dot, as in the name of a model's size.
        """
        stem.parent.mkdir(parents=True, exist_ok=True)
        png = self.png()
        stem.with_name(stem.name + ".png").write_bytes(png)
        stem.with_name(stem.name + ".csv").write_text(self.csv())
        return png

    def csv(self) -> str:
        """The plotted points as comma-separated values."""
        return self.data.to_csv(index=False)


def thumbnail(png: bytes) -> bytes:
    """A figure small enough for an index: `THUMBNAIL_WIDTH` pixels, few colors, a few kilobytes."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    height = max(1, round(image.height * THUMBNAIL_WIDTH / image.width))
    small = image.resize((THUMBNAIL_WIDTH, height), Image.Resampling.LANCZOS).quantize(32)
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def finish_axes(axis: Axes, *, grid: str = "both") -> None:
    """A light grid behind the data, no frame above and to the right."""
    axis.grid(visible=True, axis=grid, which="major", color="#DDDDDD", linewidth=0.6)  # type: ignore[arg-type]
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def axis_title(column: str) -> str:
    return AXIS_TITLES.get(column, column.replace("_", " "))


def require_columns(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}; the frame has {', '.join(map(str, frame.columns))}")


def drawn_columns(frame: pd.DataFrame, *columns: str | None) -> list[str]:
    """The columns that a figure draws, each once. ValueError if the frame lacks one."""
    named = list(dict.fromkeys(column for column in columns if column is not None))
    require_columns(frame, named)
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


def plotted(figure: Figure, data: pd.DataFrame) -> Plot:
    """The plot of what was drawn, without the columns that only drawing needed."""
    return Plot(figure, data.drop(columns=[ALL, AT], errors="ignore"))


def nothing_to_draw(data: pd.DataFrame) -> Plot:
    figure = Figure(figsize=(PANEL_WIDTH * 1.6, 1.0), layout="constrained")
    figure.text(0.5, 0.5, "nothing was measured to draw here", ha="center", va="center", fontsize=10)
    return plotted(figure, data)


def error_bars(series: pd.DataFrame, y: str) -> Any:
    if not {"low", "high"} <= set(series.columns) or series["low"].isna().all():
        return None
    below = (series[y] - series["low"]).clip(lower=0).fillna(0)
    above = (series["high"] - series[y]).clip(lower=0).fillna(0)
    return [below, above]


def format_axis(axis: Any, column: str, is_log: bool) -> None:
    """Ticks with units where the column's name says what it is."""
    formatter = formatter_of(column)
    if not is_log and column.endswith("bytes"):
        axis.set_major_locator(_PowersOfTwo())
    if is_log:
        axis.set_major_locator(_log_ticks(column))
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatter(value)))
    axis.set_minor_formatter(NullFormatter())


def facet_title(facet: str, value: Any) -> str:
    if isinstance(value, tuple):  # (backend, world size)
        return f"{value[0]}, {value[1]} ranks"
    if facet.endswith("bytes"):
        return format_bytes(value)
    return f"{value} ranks" if facet == "world_size" else f"{value}"


def legend(figure: Figure, axes: Sequence[Axes], hue: str) -> None:
    """One legend for all panels, below them, so that it never covers a line."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if hue == ALL and len(entries) <= 1:
        return
    widest = max((len(label) for label in entries), default=1)
    most = max(1, min(len(entries), int(figure.get_figwidth() * 14 / (widest + 8))))
    columns = math.ceil(len(entries) / math.ceil(len(entries) / most)) if entries else 1  # rows of about equal length
    figure.legend(
        entries.values(),
        entries.keys(),
        title=None if hue == ALL else axis_title(hue),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
