"""Figures as a lab declares them, and as drawn: an SVG for files and notebooks, and one with values
on hover for pages.

A lab declares a figure with a question; a notebook draws others: `lab.show(Lines(source=TIME,
x="n_bytes"), "name")`. A drawing is the same to the byte for the same points. On a page its colors
are variables of the style sheet (`pieces.css`), so that it is light or dark with the page.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from pandas.api.types import is_numeric_dtype

from labkit.lab.config import ParameterError
from labkit.lab.figures.style import ALL, FONT, GRID, PAGE, PALETTE, SOFT, TEXT, WIDTH
from labkit.lab.metric import Metric, Results
from labkit.lab.project import write_file
from labkit.lab.units import counted, format_value, label

_VARIABLES = {color.lower(): f"var(--labkit-{index})" for index, color in enumerate(PALETTE)} | {
    TEXT.lower(): "currentColor",
    SOFT.lower(): "var(--labkit-soft)",
    GRID.lower(): "var(--labkit-grid)",
    PAGE.lower(): "var(--labkit-page)",
}
FONT_FAMILY = "'DejaVu Sans', sans-serif"
_NAMESPACE = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


class Mark(NamedTuple):
    """An area that a reader can point at, in the coordinates of its axes: a point, bar or box, and
    its text."""

    axis: Axes
    left: float
    bottom: float
    right: float
    top: float
    text: str


@dataclass(frozen=True, repr=False)
class Plot:
    """A drawn figure and the frame of exactly its points. As the last expression of a cell it
    displays itself."""

    figure: Canvas
    data: pd.DataFrame
    marks: Sequence[Mark] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", self.data.drop(columns=[ALL], errors="ignore"))

    def __repr__(self) -> str:
        return (
            f"figure of {counted(len(self.data), 'row')}: {', '.join(map(str, self.data.columns))}"
        )

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
                "font.sans-serif": ["DejaVu Sans"],  # alone, not with all that may stand in for it
                "svg.hashsalt": self.data.to_csv(),
            }
        ):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def page_svg(self) -> str:
        """Return the figure as an element of a page: without a size, in the page's font and
        colors."""
        root = ElementTree.fromstring(self.svg)
        root.attrib = {"viewBox": root.attrib["viewBox"]}
        # the page has a style sheet, and metadata of its own
        for unwanted in ("metadata", "defs/{*}style/.."):
            for child in root.findall(f"{{*}}{unwanted}"):
                root.remove(child)
        targets = set()
        for element in root.iter():
            element.tag = element.tag.removeprefix(_NAMESPACE)
            if _HREF in element.attrib:
                element.set("href", element.attrib.pop(_HREF))
            element.attrib = {name: _page_value(value) for name, value in element.items()}
            if element.get("transform", "").startswith("rotate(-0 "):
                del element.attrib["transform"]
            targets.add(element.get("href", "").removeprefix("#"))
            targets.add(element.get("clip-path", "").removeprefix("url(#").removesuffix(")"))
        for element in root.iter():
            if element.get("id") not in targets:
                element.attrib.pop("id", None)
            # a text and its end stay together; white space between elements means nothing
            element.text = (element.text or "").strip()
            element.tail = (element.tail or "").strip()
        return ElementTree.tostring(root, encoding="unicode")

    def places(self) -> str:
        """Marks as JSON, once the figure is drawn: left, top, right, bottom in percent of its size,
        and the text."""
        width = self.figure.bbox.width
        height = self.figure.bbox.height
        places: list[list[Any]] = []
        for axis, left, bottom, right, top, text in self.marks:
            (x0, y0), (x1, y1) = axis.transData.transform([(left, bottom), (right, top)])
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
        # a stem may have a dot, as in a model's size
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
    if "low" in row and row["low"] == row["low"]:
        value += f" [{format_value(y, row['low'])}, {format_value(y, row['high'])}]"
    return " · ".join([*filter(None, dict.fromkeys(names)), value])


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Declares a figure of a value `y` along `x`: of the answer's table, of a metric's medians, or
    of another table.

    By default `y` is the value of the metric, or the ratio. `low` and `high` directly after it are
    its interval.
    """

    x: str
    y: str | None = None
    source: Metric | Callable[[Results], pd.DataFrame] | None = None
    panel: str | None = None
    """Column of panels."""
    hue: str | None = None
    """Column of colors; by default the alternatives of the metric."""
    reference: str | None = None
    """Column of what a formula says: a dashed line, or one across each bar."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Column -> value of the rows to plot. If no row has it: the largest number, or the last
    name."""

    @property
    def color(self) -> str:
        """Column of colors, or `ALL` for a figure of one color."""
        hue = (
            self.source.compare
            if isinstance(self.source, Metric) and self.source.compare != self.x
            else ALL
        )
        return self.hue or hue

    @property
    def value(self) -> str:
        """Column of the y axis."""
        return self.y or (self.source.value if isinstance(self.source, Metric) else "ratio")

    @property
    def keys(self) -> list[str]:
        """Columns that a frame must have."""
        keys = dict.fromkeys((self.x, self.panel, self.value, self.color, self.reference))
        return [name for name in keys if name is not None and name != ALL]

    def draw(self, results: Results, answer_table: pd.DataFrame | None = None) -> Plot:
        """Draw these results; a figure without rows says so. ParameterError for a missing
        column."""
        source = self.source
        table = answer_table
        if isinstance(source, Metric):
            table = source.largest(results.frame) if source.exact else source.medians(results.frame)
        elif source is not None:
            table = source(results)
        return self.plot(pd.DataFrame() if table is None else self.select(table))

    def select(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows at `at`; columns that the table lacks, or that make panels or colors,
        select nothing."""
        for name, wanted in self.at.items():
            if name in table and name not in (self.panel, self.color) and len(table):
                values = table[name]
                if not (values == wanted).any():
                    wanted = values.max() if is_numeric_dtype(values) else values.iloc[-1]
                table = table[values == wanted]
        return table

    def plot(self, frame: pd.DataFrame) -> Plot:
        """Draw a frame of one row per point, bar or box; without rows, say so. ParameterError for a
        missing column."""
        if (rows := self._tidy(frame)).empty:
            figure = Canvas(figsize=(WIDTH, 1.0))
            figure.text(
                0.5,
                0.5,
                "nothing was measured to draw here",
                ha="center",
                va="center",
                fontsize=FONT,
            )
            return Plot(figure, rows)
        return self.draw_rows(rows)

    def draw_rows(self, data: pd.DataFrame) -> Plot:
        """Draw rows that all have a value."""
        raise NotImplementedError

    def _text(self, row: Mapping[str, Any], *, has_interval: bool = True) -> str:
        """Return the text of a point or bar: its color, its place, its value."""
        names = label(self.color, row[self.color]), label(self.x, row[self.x])
        return mark_text(names, self.value, row if has_interval else {self.value: row[self.value]})

    def _tidy(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Select the rows that can be drawn and the columns of the figure; `ALL` becomes a column
        of empty texts."""
        names = self.keys
        frame = frame if len(frame.columns) else pd.DataFrame(columns=names)
        if missing := [name for name in names if name not in frame]:
            raise ParameterError(
                f"no column {', '.join(missing)}; the frame has"
                f" {', '.join(map(str, frame.columns))}"
            )
        place = list(frame.columns).index(self.value)
        at = names.index(self.value)
        # a frame has intervals of one column only
        if list(frame.columns[place + 1 : place + 3]) == ["low", "high"]:
            names[at + 1 : at + 1] = ["low", "high"]
        # a row of the reference alone continues its line
        needed = [self.x, self.value if self.reference is None else self.reference]
        rows = frame[list(dict.fromkeys(names))].dropna(subset=needed)
        return rows.assign(**{ALL: ""}) if self.color == ALL else rows
