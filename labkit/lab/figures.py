"""A few general plots over tidy frames. Each returns the figure and exactly the points it drew.

Colors are Okabe and Ito's, safe for color-blind readers, with a marker each; the background is opaque white, so
that a figure reads well on a dark page. Saved files are bit-reproducible.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.lab.units import format_bytes, formatter_of

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PANEL_WIDTH, PANEL_HEIGHT, DPI = 3.4, 3.3, 130
SINGLE_PANEL_WIDTH = 7.0
MEASURED = "measured here"
FEW_PLACES = 4  # on the x axis: each gets a tick of its own

# Column names as axis titles; a name that is not listed is shown with blanks for underscores.
AXIS_TITLES = {
    "n_bytes": "size of the tensor",
    "world_size": "ranks",
    "seconds": "time, slowest rank",
    "busbw_gb_per_s": "bus bandwidth (GB/s)",
    "algbw_gb_per_s": "algorithm bandwidth (GB/s)",
    "elements": "elements",
    "ratio": "ratio of times",
}

_LOG_TICKS = {"n_bytes": LogLocator(base=32, numticks=8), "world_size": LogLocator(base=2)}


@dataclass(frozen=True)
class Plot:
    """A figure and the frame of exactly what it shows."""

    figure: Figure
    data: pd.DataFrame

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        return buffer.getvalue()

    def save(self, stem: Path) -> None:
        """Write `<stem>.png` and, beside it, `<stem>.csv` with the plotted points."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".png").write_bytes(self.png())
        self.data.to_csv(stem.with_suffix(".csv"), index=False)


def lines(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    hue: str,
    hue_order: Sequence[Any] | None = None,
    facet: str | None = None,
    log: str = "xy",
    level: float | None = None,
    y_title: str | None = None,
    reference: pd.DataFrame | None = None,
    reference_label: str = "published",
    source: str = MEASURED,
) -> Plot:
    """One line a value of `hue`, one panel a value of `facet`, the interval as error bars.

    `frame` is tidy and aggregated: one row a plotted point, with `low` and `high` where there is an interval.
    `hue_order` names all values that may occur, so that each keeps its color from figure to figure.
    `level` draws a horizontal line (1 for a ratio). `reference` holds the same columns and is drawn dashed and
    hollow under `reference_label`; so is `frame` itself if `source` says that it is not from here. A frame
    without rows gives an empty plot that says so. ValueError if a column is missing.
    """
    columns = [column for column in (x, y, hue, facet) if column is not None]
    _require(frame, columns)
    if frame.empty:
        return _nothing_to_draw(frame[columns])
    own = frame.assign(source=source)
    pieces = [own] if reference is None else [own, reference.assign(source=reference_label)]
    intervals = [column for column in ("low", "high") if column in frame]
    data = pd.concat(pieces, ignore_index=True)[[*columns, *intervals, "source"]]
    data = data.dropna(subset=[y]).sort_values([*columns, "source"], ignore_index=True)
    panels: Sequence[Any] = [None] if facet is None else sorted(set(data[facet]))
    width = SINGLE_PANEL_WIDTH if len(panels) == 1 else PANEL_WIDTH * len(panels)
    figure = Figure(figsize=(width, PANEL_HEIGHT + 0.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    styles = {value: index for index, value in enumerate(hue_order or sorted(set(data[hue])))}
    for axis, value in zip(axes, panels, strict=True):
        panel = data if facet is None else data[data[facet] == value]
        _draw_panel(axis, panel, x, y, hue, styles)
        _finish_panel(axis, x, sorted(set(data[x])), log, level)
        if facet is not None:
            axis.set_title(_facet_title(facet, value), fontsize=10)
    axes[0].set_ylabel(y_title or axis_title(y))
    _format_axis(axes[0].yaxis, y, "y" in log)
    _legend(figure, axes, hue)
    return Plot(figure, data)


def axis_title(column: str) -> str:
    return AXIS_TITLES.get(column, column.replace("_", " "))


def _require(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}; the frame has {', '.join(map(str, frame.columns))}")


def _nothing_to_draw(data: pd.DataFrame) -> Plot:
    figure = Figure(figsize=(PANEL_WIDTH * 1.6, 1.0), layout="constrained")
    figure.text(0.5, 0.5, "nothing was measured to draw here", ha="center", va="center", fontsize=10)
    return Plot(figure, data)


def _draw_panel(axis: Axes, panel: pd.DataFrame, x: str, y: str, hue: str, styles: dict[Any, int]) -> None:
    for source in dict.fromkeys([MEASURED, *panel["source"]]):
        for value, index in styles.items():
            series = panel[(panel["source"] == source) & (panel[hue] == value)]
            if not series.empty:
                _draw_line(axis, series, x, y, value, index, source)


def _draw_line(axis: Axes, series: pd.DataFrame, x: str, y: str, value: Any, index: int, source: str) -> None:
    here = source == MEASURED
    axis.errorbar(
        series[x],
        series[y],
        yerr=_error_bars(series, y) if here else None,
        color=PALETTE[index % len(PALETTE)],
        marker=MARKERS[index % len(MARKERS)],
        markerfacecolor=None if here else "white",
        linestyle="-" if here else "--",
        linewidth=1.5 if here else 1.0,
        markersize=5,
        capsize=2,
        alpha=1.0 if here else 0.7,
        label=str(value).replace("_", " ") if here else f"{value}, {source}".replace("_", " "),
    )


def _error_bars(series: pd.DataFrame, y: str) -> Any:
    if not {"low", "high"} <= set(series.columns) or series["low"].isna().all():
        return None
    below = (series[y] - series["low"]).clip(lower=0).fillna(0)
    above = (series["high"] - series[y]).clip(lower=0).fillna(0)
    return [below, above]


def _finish_panel(axis: Axes, x: str, places: Sequence[Any], log: str, level: float | None) -> None:
    if "x" in log:
        axis.set_xscale("log", base=2 if x in ("n_bytes", "world_size") else 10)
    if "y" in log:
        axis.set_yscale("log")
    if level is not None:
        axis.axhline(level, color="#444444", linewidth=1.0, linestyle=":")
    axis.grid(visible=True, which="major", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(axis_title(x))
    _format_axis(axis.xaxis, x, "x" in log)
    if len(places) <= FEW_PLACES:
        axis.set_xticks(places)


def _format_axis(axis: Any, column: str, is_log: bool) -> None:
    """Ticks with units where the column's name says what it is."""
    formatter = formatter_of(column)
    if is_log:
        axis.set_major_locator(_LOG_TICKS.get(column, LogLocator(subs=(1, 2, 5), numticks=12)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatter(value)))
    axis.set_minor_formatter(NullFormatter())


def _facet_title(facet: str, value: Any) -> str:
    if isinstance(value, tuple):  # (backend, world size)
        return f"{value[0]}, {value[1]} ranks"
    if facet.endswith("bytes"):
        return format_bytes(value)
    return f"{value} ranks" if facet == "world_size" else f"{value}"


def _legend(figure: Figure, axes: Sequence[Axes], hue: str) -> None:
    """One legend for all panels, below them, so that it never covers a line."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    widest = max((len(label) for label in entries), default=1)
    columns = min(len(entries), int(figure.get_figwidth() * 14 / (widest + 8)))
    figure.legend(
        entries.values(),
        entries.keys(),
        title=axis_title(hue),
        loc="outside lower center",
        ncols=max(1, columns),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
