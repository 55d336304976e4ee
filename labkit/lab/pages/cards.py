"""Pieces of a page as HTML: machine card, coverage line, table, figure, answer.

The same pieces serve JupyterLab and the exported page: a small style sheet travels with the machine card and uses
the colors of whatever surrounds it. All text passes the templates, which escape it.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import HTML
from markupsafe import Markup

from labkit.bench.statistics import FALSE_DISCOVERY_RATE, MIN_RELEVANT_DIFFERENCE
from labkit.lab.answers import Answer, Question
from labkit.lab.columns import INTERVAL, column
from labkit.lab.figures import Plot
from labkit.lab.figures.vector import drawing
from labkit.lab.pages.html import piece, piece_style
from labkit.lab.runs.progress import Progress
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, format_bytes, format_seconds
from labkit.machine import Machine
from labkit.machine.load import disturbances
from labkit.parallel.ranks.hosts import describe_hosts

PIECE_MIME = "application/vnd.labkit.piece+json"  # what stands on the page for what a notebook shows
MOST_CSV_BYTES = 2**18  # embedded in a page; longer tables stay beside the figure's file
MOST_WORDS_OF_A_NAME = 4  # what is longer is a sentence, and an underscore in it is meant
RULE = (
    f"A row counts as different where p, adjusted for all that was compared together, is at most "
    f"{FALSE_DISCOVERY_RATE}, and the ratio at least {100 * MIN_RELEVANT_DIFFERENCE:.0f} % from 1. "
    "Where times took turns, a ratio is estimated from those of the rounds, and may differ from that of two medians."
)
TOLD_AT_THE_TOP = {"Machine": "{}", "Processor": "{}", "Memory": "{} of memory", "GPU": "GPU: {}"}
"""Of a page, of the machine's facts, and how; the others stand at its end."""
MAX_REASONS = 3  # why a machine was busy
MANY = 100_000  # from here on a whole number is shown with separators


class Shown(HTML):
    """A piece of a page, and what stands for it in a console, which shows no HTML; `records` travel with it, unseen."""

    def __init__(self, html: str, text: str, records: Mapping[str, Any] | None = None):
        super().__init__(html)
        self._text = text
        self._records = dict(records or {})

    def __repr__(self) -> str:
        return self._text

    @property
    def on_page(self) -> str:
        """What stands for it on a page."""
        return str(self._records.get(PIECE_MIME, {}).get("html", self.data))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # IPython asks for it
        return self._records


def machine_card(machine: Machine, *, elsewhere: bool, hosts: dict[str, list[int]] | None = None) -> Shown:
    """What was measured on; says so when that is not the reader's machine, and when it was several hosts."""
    rows = machine_rows(machine, elsewhere=elsewhere)
    if hosts is not None and len(hosts) > 1:
        rows["Hosts"] = f"{len(hosts)}, of which the first is described here: {describe_hosts(hosts)}"
    html = piece("machine", style=piece_style(), rows=rows.items())
    return Shown(html, definitions_text(rows), {PIECE_MIME: {"html": ""}})  # a page has them at its top and its end


def definitions_text(rows: Mapping[str, str]) -> str:
    """A line per fact, the facts below one another."""
    widest = max(map(len, rows))
    return "\n".join(f"{name:{widest}}  {value}" for name, value in rows.items())


def machine_rows(machine: Machine, *, elsewhere: bool) -> dict[str, str]:
    """The facts of a machine card by their names."""
    gpus = [
        f"{f'{count}x ' * (count > 1)}{gpu.name}, {format_bytes(gpu.memory_bytes)}, "
        f"compute capability {gpu.compute_capability}"
        for count, gpu in machine.gpu_counts
    ]
    links = {"GPU links": machine.gpu_links} if machine.gpu_links else {}
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    products = machine.float32_products if machine.gpus else None
    float32 = ", ".join(f"{name} {how.upper()}" for name, how in products.items()) if products else None
    processor = (
        {"Processor": f"{machine.cpu}, {machine.cores_text}"} if machine.gpus or machine.cpu_quota else {}
    )  # or the label
    return {
        "Machine": machine.label + (" (a recorded run, not measured here)" if elsewhere else ""),
        **processor,
        "Memory": format_bytes(machine.memory_bytes),
        **({"Instructions": machine.instructions} if machine.instructions else {}),
        "GPU": "; ".join(gpus) or (f"not used: {machine.no_gpu_reason}" if machine.no_gpu_reason else "none"),
        **links,
        **({"float32 on the GPU": float32} if float32 else {}),
        "System": f"{machine.system}, Python {machine.python}",
        "Versions": versions,
        "Source": str(machine.source or "not a git checkout"),
    }


def machine_line(rows: Mapping[str, str]) -> list[str]:
    """The facts that a reader needs beside a page's first number."""
    return [how.format(rows[name]) for name, how in TOLD_AT_THE_TOP.items() if name in rows]


def progress(state: Progress) -> str:
    bar = ("█" * round(20 * state.done / max(1, state.total))).ljust(20, "░")
    parts = (f"{bar} {state.done} of {state.total} points", state.times(), state.text)
    return piece("progress", text="   ".join(filter(None, parts)))


def note(text: str) -> Shown:
    """One line that says what a reader would otherwise look for."""
    return Shown(piece("coverage", line=text, notes=[], reasons=[]), text)


def coverage(run: Run) -> str:
    """One line: planned, measured, and what was not and why."""
    return piece("coverage", line=coverage_line(run), notes=_notes(run), reasons=not_measured(run))


def _notes(run: Run) -> list[str]:
    """What else the machine did while it measured, where that may show in the numbers."""
    load, cores = run.header.load, run.header.machine.cores
    notes = [f"At the start: {text[:1].lower()}{text[1:]}" for text in disturbances(load, cores)] if load else []
    return notes + ([_busy_note(run)] if run.busy else [])


def _busy_note(run: Run) -> str:
    """Names the reasons, those of most points first."""
    reasons = list(dict.fromkeys(run.busy.values()))
    more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
    points = f"{len(run.busy)} of {counted(len(run.header.planned), 'point')}"
    return f"Busy machine during {points}: {'; '.join(reasons[:MAX_REASONS])}{more}. Trust ratios, not times."


def coverage_line(run: Run) -> str:
    """ "12 points planned, 10 measured, 2 skipped; measuring took 8.1 s": without the start of ranks."""
    table = run.coverage()
    counts = table["status"].value_counts().to_dict()
    line = f"{counted(len(table), 'point')} planned, {counts.pop('ok', 0)} measured"
    line += "".join(f", {count} {status}" for status, count in counts.items())
    return f"{line}; measuring took {format_seconds(table['elapsed_s'].sum())}."


def not_measured(run: Run) -> list[dict[str, Any]]:
    """How many points ended other than `ok`, by `status` and `reason`, the most frequent first."""
    table = run.coverage()
    others = table[table["status"] != "ok"]
    others = others.assign(reason=others["reason"].mask(others["status"] == "pending", "not ended"))
    reasons = others.groupby(["status", "reason"], dropna=False).size().sort_values(ascending=False)
    return [
        {"status": str(status), "reason": str(reason), "count": int(count)}
        for (status, reason), count in reasons.items()
    ]


def table(frame: pd.DataFrame, caption: str = "") -> Shown:
    """A frame as an aligned table; a column's name decides the unit its values are shown in. It is folded on a page.

    `low` and `high` behind one another are one interval, of 95 % unless `attrs[INTERVAL]` says another. Columns that
    say nothing to a reader are left out.
    """
    if frame.empty:  # headings alone look like a mistake
        return note(f"{caption or 'The numbers.'} (This run has none.)")
    columns = list(_columns(frame))
    headings = [{"text": heading, "number": is_number} for heading, is_number, _ in columns]
    rule = RULE if {"p", "verdict"} <= set(frame.columns) else ""
    content = {"headings": headings, "rows": list(zip(*(cells for *_, cells in columns), strict=True)), "rule": rule}
    texts = [[heading, *(cell["text"] for cell in cells)] for heading, _, cells in columns]
    text = "\n".join(filter(None, [caption, *_aligned(texts, [is_number for _, is_number, _ in columns]), rule]))
    on_page = piece("folded", summary=caption or "The numbers", content=Markup(piece("table", **content)))
    return Shown(piece("table", **content, caption=caption), text, {PIECE_MIME: {"html": on_page}})


def _columns(frame: pd.DataFrame) -> Iterator[tuple[str, bool, list[dict[str, Any]]]]:
    """What a reader sees of a frame, column by column: heading, whether they are numbers, cells."""
    names = [str(name) for name in frame.columns]
    shown = [index for index, name in enumerate(names) if not column(name).is_internal]
    for before, index, after in zip([None, *shown], shown, [*shown[1:], None], strict=False):
        values, following = list(frame.iloc[:, index]), names[after] if after is not None else ""
        if before is not None and (names[index], following) == ("low", "high"):
            yield (
                f"{frame.attrs.get(INTERVAL, '95 %')} interval",
                True,
                _intervals(names[before], values, list(frame.iloc[:, index + 1])),
            )
        elif not (before is not None and (names[before], names[index]) == ("low", "high")):
            is_number = _is_number(frame.iloc[:, index])
            # beside a mean, the time that is a median says so
            heading = "median" if names[index] == "seconds" and "mean_s" in names else column(names[index]).title
            yield heading, is_number, [_cell(names[index], value, is_number) for value in values]


def _intervals(of: str, lows: list[Any], highs: list[Any]) -> list[dict[str, Any]]:
    """The intervals of the column before them, sorted by their lower ends."""
    ends = [[_text(of, end) for end in interval] for interval in zip(lows, highs, strict=True)]
    texts = ["–" if _is_missing(low) else _interval(*written) for low, written in zip(lows, ends, strict=True)]
    sorts = [None if _is_missing(low) else f"{low:.12g}" for low in lows]
    return [{"text": text, "sort": sort, "number": True} for text, sort in zip(texts, sorts, strict=True)]


def _interval(low: str, high: str) -> str:
    """ "[48.4, 62.8] ms", and "[0.9 ms, 1.1 s]" where the units differ."""
    (_, _, unit), (number, _, same) = low.partition(" "), high.partition(" ")
    return f"[{low.removesuffix(f' {unit}')}, {number}] {unit}" if unit and unit == same else f"[{low}, {high}]"


def _aligned(columns: list[list[str]], numbers: list[bool]) -> list[str]:
    """The rows of a table of texts, numbers at their right."""
    padded = []
    for texts, is_number in zip(columns, numbers, strict=True):
        width = max(map(len, texts))
        padded.append([text.rjust(width) if is_number else text.ljust(width) for text in texts])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def figure(plot: Plot, png: bytes, alt: str, file: str, drawn: str = "", saved: str = "") -> Shown:
    """A figure, as a picture in a notebook and as a drawing with values to point at on a page.

    `drawn` is its caption, `alt` stands for it where it cannot be seen, `file` is the name of its numbers' file, and
    `saved` where the picture is, for a console.
    """
    about = _about(plot, file, drawn)
    picture = piece("picture", image=base64.b64encode(png).decode(), inches=plot.figure.get_figwidth(), alt=alt)
    html = piece("figure", images=Markup(picture), has_switch=False, **about)
    on_page = _drawn_on_page(plot, alt, about)
    return Shown(html, "\n".join(filter(None, (alt, saved))), {PIECE_MIME: {"html": on_page}})


def figure_on_page(plot: Plot, alt: str, file: str, drawn: str = "") -> str:
    """The drawing alone; what was published, if the figure has any, behind a switch."""
    return _drawn_on_page(plot, alt, _about(plot, file, drawn))


def _drawn_on_page(plot: Plot, alt: str, about: Mapping[str, Any]) -> str:
    each = {"plain": plot, "published": plot.with_published}
    drawings = []
    for kind, one in each.items():
        if one is not None:
            svg, places = drawing(one, f"{about['file']}-{kind}")
            inches = one.figure.get_figwidth()
            drawings.append(piece("drawing", svg=svg, places=places, inches=inches, alt=alt, kind=kind))
    return piece("figure", images=Markup("".join(drawings)), has_switch=len(drawings) > 1, **about)


def _about(plot: Plot, file: str, drawn: str) -> dict[str, Any]:
    return {"drawn": drawn, "file": file, "csv": _embedded_csv(plot)}


def _embedded_csv(plot: Plot) -> str | None:
    """The plotted points as base64; None if they are too many to travel in a page."""
    csv = plot.csv().encode()
    return base64.b64encode(csv).decode() if len(csv) <= MOST_CSV_BYTES else None


def answer(question: Question, finding: Answer, figures: Sequence[Shown] = ()) -> Shown:
    """What a run says of a question: the verdict and a sentence, figures, the numbers folded, why, what to do."""
    about = {"question": question, "finding": finding}
    about |= {"table": None if finding.table is None else Markup(table(finding.table).data)}
    html = piece("answer", **about, figures=[Markup(shown.data) for shown in figures])
    on_page = piece("answer", **about, figures=[Markup(shown.on_page) for shown in figures])
    said = [f"{question.text} [{finding.verdict}]", finding.headline, finding.scope, *finding.notes]
    text = "\n".join(filter(None, (*said, *map(repr, figures), finding.advice)))
    return Shown(html, text, {PIECE_MIME: {"html": on_page}})


def _is_number(values: pd.Series) -> bool:
    """Whether a column holds numbers, which are aligned at their right."""
    known = [value for value in values if not _is_missing(value)]
    return bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _cell(name: str, value: Any, is_number: bool) -> dict[str, Any]:
    """What a cell shows, and the number it is sorted by."""
    has_value = isinstance(value, int | float) and not isinstance(value, bool) and not _is_missing(value)
    return {"text": _text(name, value), "sort": f"{value:.12g}" if has_value else None, "number": is_number}


def _text(name: str, value: Any) -> str:
    if _is_missing(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        text = str(value)
        # Operators, paths and reasons are spelled out.
        is_name = "::" not in text and "/" not in text and len(text.split()) <= MOST_WORDS_OF_A_NAME
        return text.replace("_", " ") if is_name else text
    if isinstance(value, int) and not name.endswith(("bytes", "flops")):  # a count keeps all its digits
        return f"{value:,}" if abs(value) >= MANY else str(value)
    return column(name).form(value)
