"""Pieces of a page as HTML: machine card, coverage line, table, figure, answer, provenance.

The same pieces serve JupyterLab and the exported page: a small style sheet travels with the machine card and uses
the colors of whatever surrounds it. All text passes the templates, which escape it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import HTML

from labkit.lab.findings import Finding, Question
from labkit.lab.pages.html import piece, piece_style
from labkit.lab.project import relative_to_project
from labkit.lab.runs.progress import Progress
from labkit.lab.runs.records import Resumption
from labkit.lab.runs.store import Run
from labkit.lab.study import Study
from labkit.lab.units import counted, format_bytes, format_seconds, formatter_of
from labkit.machine import Machine
from labkit.machine.load import Load, disturbances
from labkit.parallel.ranks.hosts import describe_hosts

# Headings of columns that are not their names, and endings that say a unit which the cells carry, or the heading does.
HEADINGS = {
    "n_bytes": "size",
    "world_size": "ranks",
    "seconds": "time",
    "warmup": "warm-up steps",
    "bucket_mb": "bucket (MiB)",
    "mfu_percent": "MFU (%)",
    "tflop_per_s": "TFLOP/s",
    "gflop": "GFLOP",
}
UNIT_ENDINGS = (
    *(("_flops_per_s", ""), ("_bytes_per_s", ""), ("_gb_per_s", " (GB/s)"), ("_per_s", "_per_s")),
    *(("_bytes", ""), ("_s", ""), ("_percent", " (%)"), ("_ns_per_byte", " (ns/byte)")),
)
MOST_WORDS_OF_A_NAME = 4  # what is longer is a sentence, and an underscore in it is meant
MANY = 100_000  # from here on a whole number is shown with separators


class Shown(HTML):
    """A piece of a page, and what stands for it in a console, which shows no HTML; `records` travel with it, unseen."""

    def __init__(self, html: str, text: str, records: Mapping[str, Any] | None = None):
        super().__init__(html)
        self._text = text
        self._records = dict(records or {})

    def __repr__(self) -> str:
        return self._text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:  # IPython asks for it
        return self._records


def machine_card(machine: Machine, *, elsewhere: bool, hosts: dict[str, list[int]] | None = None) -> Shown:
    """What was measured on; says so when that is not the reader's machine, and when it was several hosts."""
    rows = machine_rows(machine, elsewhere=elsewhere)
    if hosts is not None and len(hosts) > 1:
        rows["Hosts"] = f"{len(hosts)}, of which the first is described here: {describe_hosts(hosts)}"
    return Shown(piece("machine", style=piece_style(), rows=rows.items()), definitions_text(rows))


def definitions_text(rows: Mapping[str, str]) -> str:
    """A line per fact, the facts below one another."""
    widest = max(map(len, rows))
    return "\n".join(f"{name:{widest}}  {value}" for name, value in rows.items())


def machine_rows(machine: Machine, *, elsewhere: bool) -> dict[str, str]:
    """The facts of a machine card by their names."""
    gpus = [
        f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {gpu.compute_capability}"
        for gpu in machine.gpus
    ]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    products = machine.float32_products if machine.gpus else None
    float32 = ", ".join(f"{name} {how.upper()}" for name, how in products.items()) if products else None
    return {
        "Machine": machine.label + (" (a recorded run, not measured here)" if elsewhere else ""),
        "Processor": f"{machine.cpu}, {machine.cores} cores available, {format_bytes(machine.memory_bytes)}",
        "GPU": "; ".join(gpus) or (f"not used: {machine.why_no_gpus}" if machine.why_no_gpus else "none"),
        **({"float32 on the GPU": float32} if float32 else {}),
        "System": f"{machine.system}, Python {machine.python}",
        "Versions": versions,
        "Source": str(machine.source or "not a git checkout"),
    }


def progress(state: Progress) -> str:
    filled = round(20 * state.done / max(1, state.total))
    bar = "█" * filled + "░" * (20 - filled)
    parts = (f"{bar} {state.done} of {state.total} points", state.times(), state.text)
    return piece("progress", text="   ".join(filter(None, parts)))


def coverage(run: Run) -> str:
    """One line: planned, measured, and what was not and why."""
    return piece("coverage", line=coverage_line(run), notes=_notes(run), reasons=not_measured(run))


def _notes(run: Run) -> list[str]:
    """What else the machine did while it measured, where that may show in the numbers."""
    load, cores = run.header.load, run.header.machine.cores
    notes = [f"At the start: {text[:1].lower()}{text[1:]}" for text in disturbances(load, cores)] if load else []
    if run.disturbed:
        notes.append(f"During {counted(len(run.disturbed), 'point')} another labkit measurement ran on this machine.")
    return notes


def coverage_line(run: Run) -> str:
    """ "12 points planned, 10 measured, 2 skipped, in 8.1 s." """
    table = run.coverage()
    counts = table["status"].value_counts().to_dict()
    line = f"{len(table)} points planned, {counts.pop('ok', 0)} measured"
    line += "".join(f", {count} {status}" for status, count in counts.items())
    return f"{line}, in {format_seconds(table['elapsed_s'].sum())}."


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
    """A frame as an aligned table; a column's name decides the unit its values are shown in."""
    numbers = [_is_number(frame[name]) for name in frame.columns]
    headings = [
        # beside a mean, the time that is a median says so
        {"text": "median" if name == "seconds" and "mean_s" in frame else _heading(str(name)), "number": number}
        for name, number in zip(frame.columns, numbers, strict=True)
    ]
    columns = [[_cell(str(name), value) for value in frame[name]] for name in frame.columns]
    for column, number in zip(columns, numbers, strict=True):
        for cell in column:
            cell["number"] = number
    html = piece("table", headings=headings, rows=list(zip(*columns, strict=True)), caption=caption)
    texts = [
        [heading["text"], *(cell["text"] for cell in column)] for heading, column in zip(headings, columns, strict=True)
    ]
    return Shown(html, "\n".join(filter(None, [caption, *_aligned(texts, numbers)])))


def _aligned(columns: list[list[str]], numbers: list[bool]) -> list[str]:
    """The rows of a table of texts, numbers at their right."""
    padded = []
    for column, is_number in zip(columns, numbers, strict=True):
        width = max(map(len, column))
        padded.append([text.rjust(width) if is_number else text.ljust(width) for text in column])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def figure(png: str, inches: float, drawn: str, csv: str | None, file: str) -> tuple[str, str]:
    """A figure with its caption, and its alternative text; `png` and `csv` are base64."""
    alt = drawn or file
    return piece("figure", image=png, inches=inches, alt=alt, drawn=drawn, csv=csv, file=file), alt


def answer(question: Question, finding: Finding, figures: Sequence[str] = (), texts: Sequence[str] = ()) -> Shown:
    """What a run says of a question; figures as HTML, and what stands for them in a console."""
    numbers = None if finding.table is None else table(finding.table).data
    parts = [
        f"{question.text} [{finding.verdict}]",
        finding.headline,
        finding.caveat,
        *texts,
        finding.why,
        finding.advice,
    ]
    html = piece("answer", question=question, finding=finding, figures=figures, table=numbers)
    return Shown(html, "\n".join(filter(None, parts)))


def provenance(study: Study, run: Run) -> str:
    """Where the page's numbers are, and the commands that draw or measure it again."""
    return piece("provenance", rows=provenance_rows(study, run).items())


def provenance_rows(study: Study, run: Run) -> dict[str, str]:
    """The facts of the provenance card by their names."""
    path = relative_to_project(run.path)
    rows = {
        "Run": path,
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        **({"Resumed at": "; ".join(map(_resumed, run.resumptions))} if run.resumptions else {}),
        "Draw again": f"labkit report {study.name} --run {shlex.quote(path)}",
        "Measure again": f"labkit report {study.name} --profile {run.header.profile}" + _changed(study, run),
        "Ranks": _ranks(run),
        **({"Load": _load(run.header.load, run.header.machine.cores)} if run.header.load else {}),
    }
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    return rows


def _resumed(again: Resumption) -> str:
    """When, at which commit and by which command a run was taken up again."""
    when = f"{again.at:%Y-%m-%d %H:%M:%S} UTC" if again.at else "a time that was not recorded"
    unknown = "not a git checkout" if "source" in again.model_fields_set else "commit not recorded"
    return f"{when}, {again.source or unknown}" + (f", by {again.command}" if again.command else "")


def _load(load: Load, cores: int) -> str:
    busy = "" if load.busy_cores is None else f", {load.busy_cores:.1f} of {cores} cores busy"
    return f"at the start a load average of {load.average:.1f}{busy}"


def _changed(study: Study, run: Run) -> str:
    """The --set options that lead from the profile to the config of the run."""
    known = study.profiles.get(run.header.profile)  # a run may be of a version with other ones
    profile = known.model_dump(mode="json") if known else {}
    changed = {name: value for name, value in run.header.config.items() if profile.get(name) != value}
    return "".join(f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items())


def _ranks(run: Run) -> str:
    """How the ranks ran, as they reported it: start method, scheduling policy, threads."""
    needed = {"world_size", "backend", "start_method", "scheduling", "threads"}  # known once ranks are ready
    facts = [fact for fact in run.facts().values() if needed <= fact.keys() and isinstance(fact["world_size"], int)]
    described = {
        f"{counted(fact['world_size'], 'rank')}: {fact['backend'] or 'no process group'}, {fact['start_method']}, "
        f"scheduling {fact['scheduling']}, {counted(fact['threads'], 'thread')} each"
        for fact in sorted(facts, key=lambda fact: fact["world_size"])
    }
    return "; ".join(sorted(described, key=lambda text: int(text.split()[0]))) or "none"


def _heading(column: str) -> str:
    """Headings without the unit where the cells carry it, and with it where they do not."""
    if column in HEADINGS:
        return HEADINGS[column]
    for suffix, shown in UNIT_ENDINGS:
        if column.endswith(suffix):
            column = column.removesuffix(suffix) + shown
            break
    return column.replace("_", " ")


def _is_number(values: pd.Series) -> bool:
    """Whether a column holds numbers, which are aligned at their right."""
    known = [value for value in values if not _is_missing(value)]
    return bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _cell(column: str, value: Any) -> dict[str, Any]:
    """What a cell shows, and the number it is sorted by."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not _is_missing(value)
    return {"text": _text(column, value), "sort": f"{value:.12g}" if is_number else None, "href": None}


def _text(column: str, value: Any) -> str:
    if _is_missing(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        text = str(value)
        # Operators, paths and reasons are spelled out.
        is_name = "::" not in text and "/" not in text and len(text.split()) <= MOST_WORDS_OF_A_NAME
        return text.replace("_", " ") if is_name else text
    if isinstance(value, int) and not column.endswith(("bytes", "flops")):  # a count keeps all its digits
        return f"{value:,}" if abs(value) >= MANY else str(value)
    return formatter_of(column)(value)
