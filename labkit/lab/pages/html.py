"""Templates of everything displayed, and frames as tables. Jinja escapes every value of a run."""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from pygments.formatters import HtmlFormatter

from labkit.lab import wording
from labkit.lab.units import column, is_missing, spell_name

TEMPLATES = Path(__file__).parent / "templates"
# Longer texts are sentences, which keep their underscores.
MAX_NAME_WORDS = 4
# A wider table is set smaller, without columns whose cells are all the same.
MAX_COLUMNS = 9
SEPARATED_FROM = 100_000  # larger whole numbers have separators
# A number and its unit must not be torn apart at the end of a line, but in code and figures.
_UNITS = r"(?:%|[nµm]?s|min|(?:[KMGT]i|[kMGTP])?B(?:/s)?|[kMGTP]?FLOP(?:/s)?)(?!\w)"
_NOT_TEXT = r"<(script|style|svg|pre|code)\b.*?</\2>|<[^>]*>"
_BREAKS = re.compile(rf"({_NOT_TEXT})|(?<=[\d\]]) (?={_UNITS})", re.DOTALL)


def render(template: str, **values: Any) -> str:
    """Fill a whole page."""
    return with_nonbreaking_units(_environment().get_template(template).render(**values))


def with_nonbreaking_units(page: str) -> str:
    """Keep every number of a page on one line with its unit."""
    return _BREAKS.sub(lambda match: match[1] or "\N{NO-BREAK SPACE}", page)


def piece(name: str, **values: Any) -> str:
    """Fill one macro of `pieces.html.j2`, which notebooks and pages share."""
    macro = getattr(_environment().get_template("pieces.html.j2").module, name)
    return str(macro(**values))


@cache
def style_sheet() -> str:
    """Return the style of a page and its pieces."""
    # The pieces' print rules come last, so that they win.
    return (TEMPLATES / "style.css").read_text() + piece_style()


@cache
def piece_style() -> str:
    """Return the style of the pieces alone, which take the colors of their surroundings."""
    return (TEMPLATES / "pieces.css").read_text()


@cache
def script() -> str:
    """Return the script that sorts tables, opens them for printing and shows figures' values."""
    return "".join(path.read_text() for path in sorted(TEMPLATES.glob("*.js")))


def script_hash() -> str:
    """Return the script's hash for a page's Content-Security-Policy: no other script runs."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()}"


@cache
def code_style(scope: str = "") -> str:
    """Pygments' colors for light and dark pages, limited to the elements inside `scope`."""
    selector = f"{scope} .highlight".strip()
    light = HtmlFormatter(style="default").get_style_defs(selector)
    dark = HtmlFormatter(style="github-dark").get_style_defs(selector)
    # Paper is white, whatever the screen prefers.
    in_dark = f"@media screen and (prefers-color-scheme: dark) {{ {dark} }}"
    return f"{selector} {{ color: #1c2024 }}\n{light}\n{in_dark}"


def mark_code(text: str) -> Markup:
    """Escape a sentence and set words in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,  # a misspelled name is an error, not a gap on the page
        trim_blocks=True,
        lstrip_blocks=True,
        cache_size=20,
    )
    environment.filters |= {"mark_code": mark_code, "plain": lambda text: text.replace("`", "")}
    environment.globals |= {
        "words": wording,
        "script_hash": script_hash,
        "script": script,
        "style_sheet": style_sheet,
    }
    return environment


class Cell(NamedTuple):
    """Text of a cell and the number it is sorted by."""

    text: str
    sort: str | None = None


@dataclass(frozen=True)
class TableColumn:
    """A heading and its cells; numbers are aligned on the right."""

    text: str
    number: bool
    cells: list[Cell]


def table_columns(frame: pd.DataFrame) -> Iterator[TableColumn]:
    """Yield the columns of a frame for a reader, without internal ones."""
    visible = frame.loc[:, [not column(str(name)).is_internal for name in frame.columns]]
    names = [str(name) for name in visible.columns]
    for place, name in enumerate(names):
        values = list(visible.iloc[:, place])
        # `low` and `high` next to one another are the interval of the column before them.
        if place and names[place : place + 2] == ["low", "high"]:
            ends = zip(values, visible.iloc[:, place + 1], strict=True)
            cells = [_interval(names[place - 1], low, high) for low, high in ends]
            yield TableColumn("95% interval", True, cells)
        # `high` behind `low` is part of the interval that `low` has become.
        elif place < 2 or names[place - 1 : place + 1] != ["low", "high"]:
            present = [value for value in values if not is_missing(value)]
            is_number = bool(present) and all(map(_is_number, present))
            yield TableColumn(
                column(name).title, is_number, [_cell(name, value) for value in values]
            )


def split_constant(columns: list[TableColumn]) -> tuple[list[TableColumn], str]:
    """Split a wide table into the columns whose cells differ, and a sentence on the others."""
    # In one row all cells are "the same", and a narrow table has room for them.
    if len(columns) <= MAX_COLUMNS or len(columns[0].cells) < 2:
        return columns, ""
    same = {
        table_column.text: table_column.cells[0].text
        for table_column in columns
        if len({cell.text for cell in table_column.cells}) == 1
    }
    others = ", ".join(f"{name} {value}" for name, value in same.items() if value != "–")
    different = [table_column for table_column in columns if table_column.text not in same]
    return different, f"The same in all rows: {others}." if others else ""


def _interval(name: str, low: float, high: float) -> Cell:
    """ "[48.4, 62.8] ms", or "[0.9 ms, 1.1 s]" if the units differ; sorted by the lower end."""
    if is_missing(low):
        return Cell("–")
    start = _text(name, low)
    end = _text(name, high)
    low_number, _, low_unit = start.partition(" ")
    high_number, _, high_unit = end.partition(" ")
    text = f"[{start}, {end}]"
    if low_unit and low_unit == high_unit:
        text = f"[{low_number}, {high_number}] {low_unit}"
    return Cell(text, f"{low:.12g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(name: str, value: Any) -> Cell:
    has_number = _is_number(value) and not is_missing(value)
    return Cell(_text(name, value), f"{value:.12g}" if has_number else None)


def _text(name: str, value: Any) -> str:
    if is_missing(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not _is_number(value):
        text = str(value)
        # A reason may quote what a reader looks for.
        return spell_name(text) if len(text.split()) <= MAX_NAME_WORDS else text
    # A count keeps all its digits.
    if isinstance(value, int) and not name.endswith(("bytes", "flops")):
        return f"{value:,}" if abs(value) >= SEPARATED_FROM else str(value)
    return column(name).form(value)
