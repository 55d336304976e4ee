"""A drawn figure with its points: a picture for notebooks and files, a drawing with values on hover for pages.

Files and drawings are the same to the byte for the same points. A drawing belongs to the page it stands in: its text is
text, and its colors are style-sheet variables (`pieces.css` sets them), so that it is light or dark with the page.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.layout_engine import ConstrainedLayoutEngine

from labkit.lab.columns import format_value
from labkit.lab.figures.style import ALL, FONT, GRID, PAGE, PALETTE, SOFT, TEXT, WIDTH
from labkit.lab.project import write_file
from labkit.lab.units import counted

DPI, CSS_INCH = 130, 96  # pixels per inch: of a picture, and of a browser
TITLE_CHARACTERS, TITLE_LINE_INCHES = 10, 0.22  # per inch of width; per line

_VARIABLES = {color.lower(): f"var(--labkit-{index})" for index, color in enumerate(PALETTE)} | {
    TEXT.lower(): "currentColor",
    SOFT.lower(): "var(--labkit-soft)",
    GRID.lower(): "var(--labkit-grid)",
    PAGE.lower(): "var(--labkit-page)",
}
_HEAD = re.compile(r"^.*?(?=<svg )|<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


class Mark(NamedTuple):
    """An area that a reader can point at: a point, bar or box in the coordinates of its axes, and its text."""

    axis: Axes
    left: float
    bottom: float
    right: float
    top: float
    text: str


def mark_text(names: Iterable[str], y: str, row: Mapping[str, Any]) -> str:
    """Text of a point: "ring · 64 KiB · 366 µs [299 µs, 436 µs]"."""
    value = format_value(y, row[y])
    if "low" in row and row["low"] == row["low"]:
        value += f" [{format_value(y, row['low'])}, {format_value(y, row['high'])}]"
    return " · ".join([*filter(None, dict.fromkeys(names)), value])


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure and the frame of exactly its points. As the last expression of a notebook's cell it draws itself.

    `with_published` is the same figure with published values, if there are any: they come from other hardware and
    stretch the axes, so a page shows them on demand only.
    """

    figure: Figure
    data: pd.DataFrame
    marks: Sequence[Mark] = ()
    with_published: "Plot | None" = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", self.data.drop(columns=[ALL], errors="ignore"))

    def __repr__(self) -> str:
        return f"figure of {counted(len(self.data), 'row')}: {', '.join(map(str, self.data.columns))}"

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:  # IPython asks for it
        return self.png(), {"alt": repr(self), "width": round(self.figure.get_figwidth() * CSS_INCH)}

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

    def svg(self, salt: str) -> str:
        """The figure as an SVG element without a size; `salt` tells its ids from those of other figures."""
        buffer = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
            self.laid_out.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        text = _HEAD.sub("", buffer.getvalue())
        text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)
        text = text.replace("xlink:href", "href")
        text = _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag[0]), text)  # to a hundredth of a point
        text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
        text = re.sub(r"#[0-9a-f]{6}\b", lambda color: _VARIABLES.get(color[0], color[0]), text)
        referred = set(re.findall(r"(?:url\(|href=\")#([\w.]+)", text))
        text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referred else "", text)
        text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--labkit-font, sans-serif)", text)
        return re.sub(r"\s*\n\s*", " ", text).strip()

    def places(self) -> str:
        """The marks of the laid-out figure as JSON: left, top, right, bottom in percent of its size, and the text."""
        width, height = self.figure.bbox.width, self.figure.bbox.height
        places: list[list[Any]] = []
        for axis, left, bottom, right, top, text in self.marks:
            (x0, y0), (x1, y1) = axis.transData.transform([(left, bottom), (right, top)])
            percent = (100 * x0 / width, 100 - 100 * y1 / height, 100 * x1 / width, 100 - 100 * y0 / height)
            places.append([*(round(float(value), 2) for value in percent), text])
        return json.dumps(places, ensure_ascii=False)


def plot_nothing(data: pd.DataFrame) -> Plot:
    """A figure without rows, which says so."""
    figure = Figure(figsize=(WIDTH, 1.0))
    figure.text(0.5, 0.5, "nothing was measured to draw here", ha="center", va="center", fontsize=FONT)
    return Plot(figure, data)


def _pixels(figure: Figure) -> Any:
    """The figure drawn: (height, width, 4) bytes."""
    figure.dpi = DPI
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
