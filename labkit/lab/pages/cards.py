"""Pieces of a page as HTML: machine, coverage, table, figure, source, answer, stepper.

The same pieces serve JupyterLab and the exported page. A small style sheet travels with the machine
card and uses the colors of its surroundings. The templates escape all text.
"""

import base64
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pandas as pd
from IPython.display import HTML
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from labkit.lab.answers import Question
from labkit.lab.config import ParameterError
from labkit.lab.facts import Answer, Comparison
from labkit.lab.pages.html import (
    code_style,
    piece,
    piece_style,
    script,
    split_constant,
    table_columns,
)
from labkit.lab.pages.schedule import record_schedule, record_user_schedule
from labkit.lab.phrases import phrasing
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, format_bytes, format_seconds
from labkit.machine.description import Machine, describe_machine
from labkit.machine.load import busy_reason
from labkit.parallel.collectives import ALGORITHMS

if TYPE_CHECKING:  # it imports matplotlib
    from labkit.lab.figures.plot import Plot

# Replaces a notebook's output on the page.
PIECE_MIME = "application/vnd.labkit.piece+json"
# Embedded in a page; larger tables stay next to the figure's file.
MAX_CSV_BYTES = 2**18
MAX_REASONS = 3  # why a machine was busy
SOURCE_SCOPE = ".labkit-source"  # class of the pieces that show source
# A first number means nothing without these facts; the others stand at the end of a page.
SUMMARY_FACTS = {"Machine": "{}", "Processor": "{}", "Memory": "{} of memory", "GPU": "GPU: {}"}


class Piece(HTML):
    """A piece of a page, `on_page` in another form; `records` travel with it, not displayed."""

    def __init__(
        self, html: str, *, on_page: str | None = None, records: Mapping[str, Any] | None = None
    ):
        super().__init__(html)
        self.on_page = html
        self._records = dict(records or {})
        if on_page is not None:
            self.on_page = on_page
            self._records[PIECE_MIME] = {"html": on_page}

    def __repr__(self) -> str:
        text = re.sub(r"<(style|script)\b.*?</\1>", "", self.data, flags=re.DOTALL)
        text = re.sub(r"</t[dh]>", "  ", re.sub(r"</(?:p|tr|li|caption|summary)>", "\n", text))
        lines = unescape(re.sub(r"<[^>]*>", "", text)).splitlines()
        return "\n".join(line.rstrip() for line in lines if line.strip())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # IPython calls it
        return self._records


def machine_card(machine: Machine) -> Piece:
    """Return the card of the measured machine, which says if it is not the reader's."""
    html = piece("machine", style=piece_style(), rows=machine_rows(machine).items())
    # Not on a page, which has the facts at its top and its end.
    return Piece(html, on_page="")


def machine_rows(machine: Machine) -> dict[str, str]:
    """Return facts about a machine by name."""
    gpus = []
    for count, gpu in machine.gpu_counts:
        name = f"{count}x {gpu.name}" if count > 1 else gpu.name
        memory = format_bytes(gpu.memory_bytes)
        gpus.append(f"{name}, {memory}, compute capability {gpu.compute_capability}")
    is_here = machine.identity == describe_machine().identity
    rows = {"Machine": machine.label + ("" if is_here else " (a recorded run, not measured here)")}
    # The label of a machine without GPUs and quota has processor and cores.
    if machine.gpus or machine.cpu_quota:
        rows["Processor"] = f"{machine.cpu}, {machine.cores_text}"
    rows["Memory"] = format_bytes(machine.memory_bytes)
    rows["Instructions"] = machine.instructions or ""
    rows["GPU"] = "; ".join(gpus) or "none"
    if machine.no_gpu_reason and not gpus:
        rows["GPU"] = f"not used: {machine.no_gpu_reason}"
    rows["GPU links"] = machine.gpu_links or ""
    rows["System"] = f"{machine.system}, Python {machine.python}"
    rows["Versions"] = ", ".join(
        f"{name} {version}" for name, version in machine.versions.items() if version
    )
    rows["Source"] = str(machine.source or "not a git checkout")
    return {name: value for name, value in rows.items() if value}


def machine_summary(rows: Mapping[str, str]) -> list[str]:
    """Return facts that a reader needs with the first number of a page."""
    return [form.format(rows[name]) for name, form in SUMMARY_FACTS.items() if name in rows]


def note(text: str) -> Piece:
    """Return one line of text."""
    return Piece(piece("coverage", line=text, notes=[], reasons=[]))


def coverage(run: Run) -> Piece:
    """Return one line: points planned and measured, and why others are missing or uncertain."""
    load = run.header.load
    points = run.coverage()
    n_points = counted(len(points), "point")
    counts = points["status"].value_counts().to_dict()
    parts = [f"{n_points} planned", f"{counts.pop('ok', 0)} measured"]
    parts += [f"{count} {status}" for status, count in counts.items()]
    # Without the start of ranks, which belongs to no point.
    took = format_seconds(points["elapsed_s"].sum())
    line = f"{', '.join(parts)}; measuring took {took}."
    notes = []
    reason = busy_reason(load, run.header.machine.cores) if load else ""
    if reason:
        notes.append(f"At the start: busy machine: {reason}; times may be too long.")
    if run.busy:
        reasons = list(dict.fromkeys(run.busy.values()))
        named = "; ".join(reasons[:MAX_REASONS])
        if len(reasons) > MAX_REASONS:
            named += f"; and {len(reasons) - MAX_REASONS} more"
        notes.append(
            f"Busy machine during {len(run.busy)} of {n_points}: {named}. Times are too long, and"
            " ratios less certain than their intervals."
        )
    return Piece(piece("coverage", line=line, notes=notes, reasons=run.missing_points()))


def table(frame: pd.DataFrame, caption: str = "") -> Piece:
    """Return a frame as an aligned table, folded on a page, values in the unit of their column."""
    # Headings alone look like a mistake.
    if frame.empty:
        return note(f"{caption or 'The numbers.'} (This run has none.)")
    columns, same = split_constant(list(table_columns(frame)))
    rows = list(zip(*(table_column.cells for table_column in columns), strict=True))
    content = {"headings": columns, "rows": rows, "same": same}
    on_page = piece(
        "folded", summary=caption or "The numbers", content=Markup(piece("table", **content))
    )
    return Piece(piece("table", **content, caption=caption), on_page=on_page)


def render_source(studied: Any) -> Piece:
    """Return the source of a function, method, class or module. ParameterError if it has none."""
    # Of what a `partial` or a decorator wraps: their own source says nothing.
    function = inspect.unwrap(getattr(studied, "func", studied))
    try:
        lines, first = inspect.getsourcelines(function)
        file = Path(inspect.getsourcefile(function) or "")
    except (TypeError, OSError):
        raise ParameterError(
            f"expected a function or class of a module, got {studied!r:.80}"
        ) from None
    about = {
        # Modules and callable objects have no qualified name.
        "function": getattr(function, "__qualname__", getattr(function, "__name__", "source")),
        "place": f"{file.name}, line {max(first, 1)}" if file.is_file() else "this notebook",
        "code": Markup(
            highlight(dedent("".join(lines)).rstrip(), PythonLexer(), HtmlFormatter(wrapcode=True))
        ),
    }
    on_page = piece("source", **about, style=None)  # a page has the style
    return Piece(piece("source", **about, style=Markup(code_style(SOURCE_SCOPE))), on_page=on_page)


def figure(plot: "Plot", alt: str, file: str, caption: str = "") -> Piece:
    """Return a figure: a picture in a notebook, a drawing with values on hover on a page.

    `alt` describes it to readers who do not see it, `file` names the file of its numbers.
    """
    points = plot.csv().encode()
    inches = plot.figure.get_figwidth()
    # Inside the page, which makes no request and may be sent alone.
    csv = base64.b64encode(points).decode() if len(points) <= MAX_CSV_BYTES else None
    image = base64.b64encode(plot.svg.encode()).decode()
    picture = piece("picture", image=image, inches=inches, alt=alt)
    drawing = piece("drawing", svg=plot.page_svg(), places=plot.places(), inches=inches, alt=alt)
    about = {"file": file, "caption": caption, "csv": csv}
    return Piece(
        piece("figure", image=Markup(picture), **about),
        on_page=piece("figure", image=Markup(drawing), **about),
    )


def answer(question: Question, answer: Answer, figures: Sequence[Piece] = ()) -> Piece:
    """Return the answer to a question, with its figures, folded numbers, notes and advice."""
    has_table = answer.table is not None and len(answer.table) > 0
    about = {
        "question": question,
        "answer": answer,
        "table": table(_with_words(answer)).on_page if has_table else None,
    }
    return Piece(
        piece("answer", **about, figures=[Markup(picture.data) for picture in figures]),
        on_page=piece("answer", **about, figures=[Markup(picture.on_page) for picture in figures]),
    )


def _with_words(answer: Answer) -> pd.DataFrame:
    """Return the table of an answer; a comparison's verdicts in the words of its quantity."""
    assert answer.table is not None
    if not isinstance(answer, Comparison):
        return answer.table
    # Ratios are judged as times are, whatever they are of: memory is lighter, not faster.
    words = phrasing(answer.quantity)
    verdicts = answer.table["verdict"].replace({"faster": words.better, "slower": words.worse})
    return answer.table.assign(verdict=verdicts)


def stepper(
    mine: Callable[[Any], Any] | None = None, *, world_sizes: Sequence[int] | None = None
) -> Piece:
    """Show the messages of all-reduces, for a reader to step through.

    They are recorded from labkit's functions and from `mine`, a function of a tensor that leaves
    the sum over ranks in it by torch's sends and receives. `world_sizes` are 2 to 8 by default,
    and 2 to 4 with `mine`, which runs on processes.

    Raises:
        ValueError: for numbers of ranks that `record_schedule` refuses.
        RankError: if `mine` raises on a rank, or calls one of torch's collectives.
    """
    # Ranks of labkit's functions are threads; those of `mine` are processes, which start slower.
    world_sizes = world_sizes or tuple(range(2, 9 if mine is None else 5))
    schedules: dict[str, dict[int, Any]] = {}
    if mine is not None:  # first: it is what the reader wants to see
        name = f"your {getattr(mine, '__name__', 'function')}"
        schedules[name] = {p: record_user_schedule(mine, p)._asdict() for p in world_sizes}
    for name, all_reduce in ALGORITHMS.items():
        schedules[name] = {p: record_schedule(all_reduce, p)._asdict() for p in world_sizes}
    names = {name: name.replace("_", " ") for name in schedules}
    about: dict[str, Any] = {
        "names": names,
        "world_sizes": world_sizes,
        "schedules": htmlsafe_json_dumps(schedules),
    }
    # A page has style and script once, for all of it; an output in a notebook brings its own.
    in_notebook = {"style": Markup(piece_style()), "script": Markup(script())}
    return Piece(
        piece("stepper", **about, inline=in_notebook),
        on_page=piece("stepper", **about, inline=None),
    )
