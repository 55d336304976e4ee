"""The report: every asked-for lab executed and exported, and an index page over all pages of the folder."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.lab.advise.local import by_size
from labkit.lab.advise.page import table
from labkit.lab.commands.execute import NotebookFailed, execute_notebook, notebook_parameters
from labkit.lab.commands.warm_kernels import WarmKernels
from labkit.lab.declaration import Lab
from labkit.lab.notebook import check_parameters
from labkit.lab.pages import cards
from labkit.lab.pages.agreement import agreement_sentence, agreement_table, agreements
from labkit.lab.pages.effects import all_effects, largest, smallest_difference
from labkit.lab.pages.entries import index_entry, measured_here
from labkit.lab.pages.export import export_page
from labkit.lab.pages.html import render, script, style_sheet
from labkit.lab.pages.recommendations import further_advice, published_trends, recommendations
from labkit.lab.project import check_writable, figures_directory, notebook_path, runs_directory
from labkit.lab.runs.progress import Progress
from labkit.machine import describe_machine

NOT_OK = ("skipped", "oom", "failed", "timeout", "pending")


@dataclass(frozen=True)
class LabResult:
    """How one lab of a report went."""

    study: Lab
    page: Path
    elapsed_s: float
    error: str | None
    """None if it ran to its end; otherwise the cause in one line, and the page shows how far it came."""


def check_report(studies: Iterable[Lab], parameters: Mapping[str, Any], output: Path) -> None:
    """ParameterError before the first lab runs: parameters that a lab does not take, folders that take no files."""
    folders = [output / "notebooks"]
    for study in studies:
        checked = check_parameters(study, notebook_parameters(notebook_path(study.name)) | dict(parameters))
        folders += [figures_directory() / study.name, *([] if checked.run else [runs_directory() / study.name])]
    check_writable(*folders)


def report_lab(
    study: Lab,
    parameters: Mapping[str, Any],
    output: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    kernels: WarmKernels | None = None,
) -> LabResult:
    """Execute one lab's notebook and write `<output>/<lab>.html`; a failure is in the result and on the page."""
    start = time.monotonic()
    notebook, page = output / "notebooks" / f"{study.name}.ipynb", output / f"{study.name}.html"
    error = None
    try:
        source = notebook_path(study.name)
        execute_notebook(study, source, notebook, parameters, on_progress=on_progress, kernels=kernels)
    except NotebookFailed as failure:
        error = str(failure)
    export_page(notebook, page, lab=study.name, title=study.title, error=error)
    return LabResult(study, page, time.monotonic() - start, error)


def write_index(studies: Iterable[Lab], output: Path, to_come: Sequence[Lab] = ()) -> Path:
    """Write `<output>/index.html` over the pages that are in `output`, in the order of `studies`.

    `to_come` are labs whose pages a report that is under way still makes; an older page of theirs is listed until then.

    Pages carry all that it needs: an index can be made of pages that were measured or copied there one by one. Which
    are of another machine is judged here, where it is read, and not where they were made.
    """
    known = list(studies)
    labs = [entry for study in known if (entry := index_entry(study, output)) is not None]
    effects, ticks = all_effects(labs)
    machine = cards.machine_rows(describe_machine(), elsewhere=False)
    html = render(
        "index_page.html.j2",
        largest=largest(labs),
        effects=effects,
        ticks=ticks,
        one=next((place for place, text in ticks if text == "1"), 0),
        style=style_sheet(),
        script=script(),
        machine=machine.items(),
        machine_line=cards.machine_line(machine),
        joined=None if to_come else _joined(labs),  # of what all labs found
        topics=recommendations(known, {lab["name"]: lab for lab in labs}),
        further=further_advice(labs),
        trends=published_trends(labs),
        labs=labs,
        busy=_busy(labs),
        agreement=_agreement(labs),
        smallest=smallest_difference(labs),
        to_come=[study.title for study in to_come],
        missing=[study.name for study in known if study.name not in {lab["name"] for lab in labs}],
        coverage=cards.table(_coverage_frame(labs)).data if labs else "",
    )
    page = output / "index.html"
    page.write_text(html, encoding="utf-8")
    return page


def _joined(labs: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the runs of this machine recommend together, by model; None if no page is of this machine."""
    found = by_size() if measured_here(labs) else None
    return None if found is None else {"told": found[0], "section": table(found[1])}


def _busy(labs: Iterable[Mapping[str, Any]]) -> str | None:
    """Names the labs of this machine that measured while it was busy; None if none did."""
    named = [lab["title"] for lab in measured_here(labs) if lab["record"].get("busy")]
    return f"The machine was busy or slow during points of {', '.join(named)}: see their pages." if named else None


def _agreement(labs: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What several labs of this machine measured; None if there is nothing of the kind."""
    rows = agreements({lab["title"]: lab["record"] for lab in measured_here(labs)})
    return {"told": agreement_sentence(rows), "table": cards.table(agreement_table(rows)).data} if rows else None


def _coverage_frame(labs: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per lab: points by status, time, profile, machine. A status that nothing ended in has no column."""
    rows = []
    for lab in labs:
        record = lab["record"]
        counts = record["coverage"] if record else {}
        row = {"lab": lab["name"], "planned": sum(counts.values()), "measured": counts.get("ok", 0)}
        row |= {status: counts.get(status, 0) for status in NOT_OK}
        row["duration_s"] = record["duration_s"] if record else None
        row["profile"] = record["profile"] if record else "not read" if lab["is_other_format"] else "failed"
        row["machine"] = record["machine"] + (" (elsewhere)" if record["elsewhere"] else "") if record else ""
        row["started"] = record["started"][:16].replace("T", " ") if record else ""
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.drop(columns=[status for status in NOT_OK if status != "skipped" and not table[status].any()])
