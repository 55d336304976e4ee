"""Pieces of a page as HTML: machine card, coverage line, table, answer, provenance.

The same snippets serve JupyterLab and the exported page: a small style sheet travels with the machine card and
uses the colors of whatever surrounds it. All text is escaped here, and only here.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

import pandas as pd
from IPython.display import HTML

from labkit.lab.answers import Answer
from labkit.lab.measure import Progress, describe_hosts
from labkit.lab.project import relative_to_project
from labkit.lab.store import Run
from labkit.lab.study import Study
from labkit.lab.units import format_bytes, format_seconds, formatter_of
from labkit.machine import Machine

STYLE = """<style>
.labkit-card { border: 1px solid #8885; border-radius: 6px; padding: .6em .9em; margin: .6em 0;
  overflow-x: auto; }
.labkit-card td { overflow-wrap: anywhere; }
.labkit-card table, .labkit-table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.labkit-card th, .labkit-card td { text-align: left; padding: .1em 1.2em .1em 0; border: 0; vertical-align: top; }
.labkit-scroll { overflow-x: auto; margin: .8em 0; }
.labkit-table caption { text-align: left; padding: .2em 0; font-style: italic; }
.labkit-table th, .labkit-table td { text-align: right; padding: .15em .7em; border: 0;
  border-bottom: 1px solid #8883; white-space: nowrap; }
.labkit-answer { border-left: 4px solid #0072b2; padding: .3em .9em; margin: .8em 0; }
.labkit-answer p { margin: .35em 0; }
.labkit-verdict { font-size: .8em; font-weight: 600; padding: .1em .5em; border: 1px solid #8888;
  border-radius: 1em; margin-left: .5em; white-space: nowrap; }
.labkit-recommendation::before { content: "On this machine: "; font-weight: 600; }
.labkit-caption { font-size: .92em; opacity: .85; margin: .1em 0 .8em; }
.labkit-progress { font-variant-numeric: tabular-nums; }
</style>"""


def machine_card(machine: Machine, *, elsewhere: bool, hosts: dict[str, list[int]] | None = None) -> HTML:
    """What was measured on; says so when that is not the reader's machine, and when it was several hosts."""
    gpus = [
        f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {gpu.compute_capability}"
        for gpu in machine.gpus
    ]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    rows = {
        "Machine": machine.label + (" (a recorded run, not measured here)" if elsewhere else ""),
        "Processor": f"{machine.cpu}, {machine.cores} cores available, {format_bytes(machine.memory_bytes)}",
        "GPU": "; ".join(gpus) or "none",
        "System": f"{machine.system}, Python {machine.python}",
        "Versions": versions,
        "Source": f"commit {machine.git}" if machine.git else "not a git checkout",
    }
    if hosts is not None and len(hosts) > 1:
        rows["Hosts"] = f"{len(hosts)}, of which the first is described here: {describe_hosts(hosts)}"
    return HTML(f'{STYLE}<div class="labkit-card">{_definition_table(rows)}</div>')


def progress(state: Progress) -> str:
    filled = round(20 * state.done / max(1, state.total))
    bar = "█" * filled + "░" * (20 - filled)
    text = escape(f"{bar} {state.done} of {state.total} points   {state.text}")
    return f'<div class="labkit-progress"><code>{text}</code></div>'


def coverage(run: Run) -> str:
    """One line: planned, measured, and what was not and why."""
    table = run.coverage()
    counts = table["status"].value_counts().to_dict()
    line = f"{len(table)} points planned, {counts.pop('ok', 0)} measured"
    line += "".join(f", {count} {status}" for status, count in counts.items())
    line += f", in {format_seconds(table['elapsed_s'].sum())}."
    others = table[table["status"] != "ok"]
    reasons = others.groupby(["status", "reason"], dropna=False).size().sort_values(ascending=False)
    items = "".join(
        f"<li>{count} {escape(str(status))}: {escape(str(reason))}</li>" for (status, reason), count in reasons.items()
    )
    details = f"<details><summary>What was not measured, and why</summary><ul>{items}</ul></details>"
    return f'<div class="labkit-card">{escape(line)}{details if items else ""}</div>'


def table(frame: pd.DataFrame, caption: str = "") -> HTML:
    """A frame as an aligned table; a column's name decides the unit its values are shown in."""
    shown = pd.DataFrame({_heading(name): [_cell(name, v) for v in frame[name]] for name in frame.columns})
    body = shown.to_html(index=False, border=0, classes="labkit-table", escape=True)
    if caption:
        body = body.replace("<thead>", f"<caption>{escape(caption)}</caption><thead>", 1)
    return HTML(f'<div class="labkit-scroll">{body}</div>')


def caption(text: str) -> HTML:
    return HTML(f'<p class="labkit-caption">{escape(text)}</p>')


def answer(given: Answer) -> HTML:
    recommendation = (
        f'<p class="labkit-recommendation">{escape(given.recommendation)}</p>' if given.recommendation else ""
    )
    return HTML(
        f'<div class="labkit-answer" id="answer-{escape(given.question.id)}">'
        f"<p><strong>{escape(given.question.text)}</strong>"
        f'<span class="labkit-verdict">{escape(given.verdict)}</span></p>'
        f"<p>{escape(given.text)}</p>{recommendation}</div>"
    )


def answer_record(given: Answer) -> dict[str, Any]:
    """An answer as JSON, for the index page."""
    return asdict(given)


def provenance(study: Study, run: Run) -> str:
    """Where the page's numbers are, and the commands that draw or measure it again."""
    path = relative_to_project(run.path)
    rows = {
        "Run": path,
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        "Draw again": f"labkit report {study.name} --run {path}",
        "Measure again": f"labkit report {study.name} --profile {run.header.profile}" + _changed(study, run),
        "Ranks": _ranks(run),
    }
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    return f'<div class="labkit-card">{_definition_table(rows)}</div>'


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
        f"{fact['world_size']} ranks: {fact['backend'] or 'no process group'}, {fact['start_method']}, "
        f"scheduling {fact['scheduling']}, {fact['threads']} threads each"
        for fact in sorted(facts, key=lambda fact: fact["world_size"])
    }
    return "; ".join(sorted(described, key=lambda text: int(text.split()[0]))) or "none"


def _definition_table(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _heading(column: str) -> str:
    """Headings without the unit where the cells carry it, and with it where they do not."""
    for suffix, shown in (("_bytes", ""), ("_s", ""), ("_percent", " (%)"), ("_ns_per_byte", " (ns/byte)")):
        if column.endswith(suffix) and column != "n_bytes" and not column.endswith("_per_s"):
            column = column.removesuffix(suffix) + shown
    return {"n_bytes": "size", "world_size": "ranks"}.get(column, column.replace("_", " "))


def _cell(column: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return "–"
    if not isinstance(value, int | float):
        text = str(value)
        return text if "::" in text or "/" in text else text.replace("_", " ")  # operators and paths are spelled out
    if isinstance(value, int) and not column.endswith("bytes"):  # a count keeps all its digits
        return str(value)
    return formatter_of(column)(value)
