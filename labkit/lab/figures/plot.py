"""Figures as drawn: an SVG for files and notebooks, and one with values on hover for pages.

A drawing is the same to the byte for the same points. On a page its colors are variables of the
style sheet (`pieces.css`), so that it is light or dark with the page.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine

from labkit.lab.figures.figure import ALL, Figure
from labkit.lab.figures.style import GRID, PAGE, PALETTE, SOFT, TEXT
from labkit.lab.project import write_file
from labkit.lab.units import counted, format_value, label

_VARIABLES = {color.lower(): f"var(--labkit-{index})" for index, color in enumerate(PALETTE)} | {
    TEXT.lower(): "currentColor",
    SOFT.lower(): "var(--labkit-soft)",
    GRID.lower(): "var(--labkit-grid)",
    PAGE.lower(): "var(--labkit-page)",
}
# As matplotlib writes it into each text; a page has its own font.
FONT_FAMILY = "'DejaVu Sans', sans-serif"
_NAMESPACE = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_GROUND = "fill: var(--labkit-page)"  # of the figure and each of its panels
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


class Mark(NamedTuple):
    """A point, bar or box with its text; edges are in the coordinates of its axes."""

    axis: Axes
    left: float
    bottom: float
    right: float
    top: float
    text: str


@dataclass(frozen=True, repr=False)
class Plot:
    """A drawn figure, which a cell displays, and the frame of exactly its points."""

    figure: Canvas
    data: pd.DataFrame
    marks: Sequence[Mark] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", self.data.drop(columns=[ALL], errors="ignore"))

    def __repr__(self) -> str:
        columns = ", ".join(map(str, self.data.columns))
        return f"figure of {counted(len(self.data), 'row')}: {columns}"

    def _repr_svg_(self) -> str:  # IPython calls it
        return self.svg

    @cached_property
    def svg(self) -> str:
        """The figure as a file; text stays text."""
        ConstrainedLayoutEngine().execute(self.figure)
        buffer = io.StringIO()
        with mpl.rc_context(
            {
                "svg.fonttype": "none",
                # One font: otherwise the file lists all that this machine could use instead.
                "font.sans-serif": ["DejaVu Sans"],
                # Ids are hashes, by default of a random number: two figures of a page would share
                # them, and two drawings of the same points would differ.
                "svg.hashsalt": self.data.to_csv(),
            }
        ):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def page_svg(self) -> str:
        """Return the figure as an element of a page: no size, the page's font and colors."""
        root = ElementTree.fromstring(self.svg)
        # Without a size it is as wide as the page, on a phone, too.
        root.attrib = {"viewBox": root.attrib["viewBox"]}
        # A page has one style sheet for all figures, and no use for metadata of each.
        for unwanted in ("metadata", "defs/{*}style/.."):
            for child in root.findall(f"{{*}}{unwanted}"):
                root.remove(child)
        targets = set()
        for element in root.iter():
            element.tag = element.tag.removeprefix(_NAMESPACE)
            if _HREF in element.attrib:
                element.set("href", element.attrib.pop(_HREF))
            element.attrib = {name: _page_value(value) for name, value in element.items()}
            # A page's ground shows through: it is shaded where a narrow screen cuts a figure off.
            if element.get("style") == _GROUND:
                element.set("style", "fill: none")
            # matplotlib writes rotate(-0 ...) on upright text.
            if element.get("transform", "").startswith("rotate(-0 "):
                del element.attrib["transform"]
            targets.add(element.get("href", "").removeprefix("#"))
            targets.add(element.get("clip-path", "").removeprefix("url(#").removesuffix(")"))
        for element in root.iter():
            # matplotlib names every group (`axes_1`), the same in each figure of a page.
            if element.get("id") not in targets:
                element.attrib.pop("id", None)
            # A text and its end stay together; white space between elements means nothing.
            element.text = (element.text or "").strip()
            element.tail = (element.tail or "").strip()
        return ElementTree.tostring(root, encoding="unicode")

    def places(self) -> str:
        """Return marks as JSON: left, top, right, bottom in percent of the figure, and text."""
        width = self.figure.bbox.width
        height = self.figure.bbox.height
        places: list[list[Any]] = []
        for axis, left, bottom, right, top, text in self.marks:
            (x0, y0), (x1, y1) = axis.transData.transform([(left, bottom), (right, top)])
            # A page counts from the top, matplotlib from the bottom.
            percent = (
                100 * x0 / width,
                100 - 100 * y1 / height,
                100 * x1 / width,
                100 - 100 * y0 / height,
            )
            places.append([*(round(float(value), 2) for value in percent), text])
        return json.dumps(places, ensure_ascii=False)

    def csv(self) -> str:
        """Return the plotted points as comma-separated values."""
        return self.data.to_csv(index=False)

    def save(self, stem: Path) -> None:
        """Write `<stem>.svg`, and `<stem>.csv` with the plotted points."""
        # Not `with_suffix`: a stem may have a dot, as in a model's size.
        write_file(stem.with_name(stem.name + ".svg"), self.svg)
        write_file(stem.with_name(stem.name + ".csv"), self.csv())


def _page_value(value: str) -> str:
    """Return the value of an attribute for a page: short numbers, and its colors and font."""
    value = _LONG_NUMBER.sub(r"\1", " ".join(value.split()))  # to a hundredth of a point
    for color, variable in _VARIABLES.items():
        value = value.replace(color, variable)
    return value.replace(FONT_FAMILY, "var(--labkit-font, sans-serif)")


def mark_text(names: Iterable[str], y: str, row: Mapping[str, Any]) -> str:
    """Return the text of a point: "ring · 64 KiB · 366 µs [299 µs, 436 µs]"."""
    value = format_value(y, row[y])
    if pd.notna(row.get("low")):
        value += f" [{format_value(y, row['low'])}, {format_value(y, row['high'])}]"
    return " · ".join([*filter(None, dict.fromkeys(names)), value])


def point_text(figure: Figure, row: Mapping[str, Any]) -> str:
    """Return the text of a point or bar of a figure: its color, its place, its value."""
    names = label(figure.color, row[figure.color]), label(figure.x, row[figure.x])
    return mark_text(names, figure.value, row)
