"""The report: every asked-for lab executed and exported, and an index page over all pages of the folder."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from labkit.lab import cards
from labkit.lab.execute import NotebookFailed, execute_notebook, notebook_parameters
from labkit.lab.export import TEMPLATES, export_page, page_record, style_sheet
from labkit.lab.measure import Progress
from labkit.lab.notebook import check_parameters
from labkit.lab.project import notebook_path
from labkit.lab.study import Study
from labkit.lab.units import format_seconds
from labkit.machine import describe_machine


@dataclass(frozen=True)
class LabResult:
    """How one lab of a report went."""

    study: Study
    page: Path
    elapsed_s: float
    error: str | None
    """None if it ran to its end; otherwise the cause in one line, and the page shows how far it came."""


def check_report(studies: Iterable[Study], parameters: Mapping[str, Any]) -> None:
    """Validate the parameters for every lab before the first one runs. ParameterError names the lab."""
    for study in studies:
        check_parameters(study, notebook_parameters(notebook_path(study.name)) | dict(parameters))


def report_lab(
    study: Study,
    parameters: Mapping[str, Any],
    output: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> LabResult:
    """Execute one lab's notebook and write `<output>/<lab>.html`; a failure is in the result and on the page."""
    start = time.monotonic()
    notebook, page = _executed(output, study.name), output / f"{study.name}.html"
    error = None
    try:
        execute_notebook(study, notebook_path(study.name), notebook, parameters, on_progress=on_progress)
    except NotebookFailed as failure:
        error = str(failure)
    _remember(notebook, error)
    export_page(notebook, page, title=study.title)
    return LabResult(study, page, time.monotonic() - start, error)


def write_index(studies: Iterable[Study], output: Path) -> Path:
    """Write `<output>/index.html` over the pages that are in `output`, in the order of `studies`."""
    labs = [_index_entry(study, output) for study in studies if _executed(output, study.name).is_file()]
    recommendations = [
        {"text": answer["recommendation"], "href": f"{lab['page']}#answer-{answer['question']['id']}"}
        for lab in labs
        if lab["record"] and not lab["record"]["recorded"]
        for answer in lab["record"]["answers"]
        if answer["recommendation"]
    ]
    page = output / "index.html"
    templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    html = templates.get_template("index_page.html.j2").render(
        style=style_sheet(),
        machine_card=cards.machine_card(describe_machine(), elsewhere=False).data,
        recommendations=recommendations,
        labs=labs,
    )
    page.write_text(html, encoding="utf-8")
    return page


def _executed(output: Path, lab: str) -> Path:
    return output / "notebooks" / f"{lab}.ipynb"


def _failure_file(notebook: Path) -> Path:
    return notebook.with_suffix(".failure.json")


def _remember(notebook: Path, error: str | None) -> None:
    """Keep a failure beside the notebook: a later report of other labs still shows it on the index."""
    if error is None:
        _failure_file(notebook).unlink(missing_ok=True)
    else:
        _failure_file(notebook).write_text(json.dumps({"error": error}))


def _index_entry(study: Study, output: Path) -> dict[str, Any]:
    notebook = _executed(output, study.name)
    failure = _failure_file(notebook)
    record = page_record(notebook)
    counts = record["coverage"] if record else {}
    measured = f"{counts.get('ok', 0)} of {sum(counts.values())} points measured"
    others = "".join(f", {count} {status}" for status, count in counts.items() if status != "ok")
    return {
        "title": study.title,
        "summary": study.summary,
        "page": f"{study.name}.html",
        "record": record,
        "error": json.loads(failure.read_text())["error"] if failure.is_file() else None,
        "coverage": measured + others,
        "duration": format_seconds(record["duration_s"]) if record else "",
    }
