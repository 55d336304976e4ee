"""A lab's page: its executed notebook as one HTML file that opens offline.

The page has labkit's template and style sheet. Formulas become MathML, images are embedded, and
only sorting, hovering and switches need its script. The lab's record stands next to it.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as latex_to_mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from labkit.lab.config import LabConfig
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.pages.cards import PIECE_MIME, SUMMARY_FACTS, machine_rows, machine_summary
from labkit.lab.pages.execute import Kernel, NotebookFailed, execute_notebook
from labkit.lab.pages.html import (
    TEMPLATES,
    code_style,
    render,
    script,
    style_sheet,
    with_nonbreaking_units,
)
from labkit.lab.pages.record import RULE, PageRecord, answered_run, notebook_run, provenance_rows
from labkit.lab.parameters import notebook_parameters, report_parameters
from labkit.lab.project import (
    check_writable,
    committed_notebook,
    figures_directory,
    from_project,
    relative_to_project,
    runs_directory,
    write_file,
)
from labkit.lab.runs.progress import Progress
from labkit.lab.runs.store import Run
from labkit.machine.description import describe_machine

# Sections of the contents, but for those that a page shows only with its code.
_HEADING = re.compile(r'(?<!<section class="prose code">)<h2 id="([^"]*)">(.*?)</h2>', re.DOTALL)


@dataclass(frozen=True)
class LabResult:
    """Outcome of one lab of a report."""

    study: Lab
    page: Path
    elapsed_s: float
    error: str | None
    """Cause of a failure in one line, or None; the page shows how far the lab came."""
    left_out: Sequence[str] = ()
    """Titles of points for which there was no time."""


@dataclass(frozen=True)
class PlannedPage:
    """One lab of a report: its notebook, and the parameters that are set in it."""

    study: Lab
    notebook: str
    """Text of the notebook as committed."""
    is_edited: bool
    """Whether the file differs from `notebook`."""
    parameters: Mapping[str, Any]
    config: LabConfig

    def with_config(self, values: Mapping[str, Any]) -> "PlannedPage":
        """Return the same page with these parameters of its lab."""
        # The cell's `config` is replaced as a whole, so what it has goes along.
        config = self.parameters.get("config")
        if config is None:
            config = notebook_parameters(self.notebook, self.study.name)["config"]
        return replace(self, parameters={**self.parameters, "config": {**config, **values}})


def plan_report(
    studies: Iterable[Lab], parameters: Mapping[str, Any], output: Path
) -> list[PlannedPage]:
    """Plan the pages of a report.

    ParameterError, before the first lab runs, for a wrong parameter in any of them, and for a
    folder that cannot be written.
    """
    pages = []
    folders = [output / "notebooks"]
    for study in studies:
        text, is_edited = committed_notebook(study.name)
        values, config = report_parameters(study, text, parameters)
        pages.append(PlannedPage(study, text, is_edited, values, config))
        folders.append(figures_directory() / study.name)
        if parameters.get("run") is None:
            folders.append(runs_directory() / study.name)
    check_writable(*folders)
    return pages


def report_lab(
    planned: PlannedPage,
    output: Path,
    kernel: Kernel,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> LabResult:
    """Execute a lab's notebook and write page and record, which tell of a failure, too."""
    start = time.monotonic()
    study = planned.study
    notebook = output / "notebooks" / f"{study.name}.ipynb"
    page = output / f"{study.name}.html"
    error = None
    try:
        execute_notebook(planned.notebook, notebook, planned.parameters, kernel, on_progress)
    except NotebookFailed as failure:
        error = str(failure)
    # After a failure, too: the page shows how far the lab came.
    record = export_page(notebook, page, study, error=error)
    left_out: list[str] = []
    if record.run is not None and "budget_s" in (planned.parameters.get("config") or {}):
        left_out = _left_out(planned, Run.load(from_project(record.run)))
    return LabResult(study, page, time.monotonic() - start, error, left_out)


def _left_out(planned: PlannedPage, run: Run) -> list[str]:
    """Return short titles of points that this machine can measure and the run has skipped."""
    machine = describe_machine()
    points = planned.study.plan(planned.config, machine)
    skipped = {id for id, end in run.ends.items() if end.status == "skipped"}
    return [
        point.title_among(points)
        for point in points
        if point.id in skipped and point.skip_reason(machine) is None
    ]


class _Renderer(IPythonRenderer):
    """Markdown with anchors at headings, and formulas as MathML, which need no script."""

    def heading(self, text: str, level: int, **_: Any) -> str:
        # "1-size-and-ranks"
        anchor = re.sub(r"[^a-z0-9]+", "-", re.sub(r"<[^>]*>", "", text).lower()).strip("-")
        return f'<h{level} id="{anchor}">{text}</h{level}>\n'

    # Wide tables and formulas scroll by themselves; by keys only if they can be focused.
    def table(self, text: str) -> str:
        return (
            '<div class="scroll" role="region" tabindex="0"'
            f' aria-label="table"><table>{text}</table></div>\n'
        )

    def block_math(self, body: str) -> str:
        formula = latex_to_mathml(body, display="block")
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="formula">{formula}</div>\n'
        )

    def inline_math(self, body: str) -> str:
        return latex_to_mathml(body)


class _PageExporter(HTMLExporter):
    """nbconvert's exporter with labkit's template."""

    def __init__(self, **options: Any):
        super().__init__(
            template_name="labkit",
            extra_template_basedirs=[str(TEMPLATES)],
            embed_images=True,
            **options,
        )

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        cell = context.get("cell", {})
        renderer = _Renderer(
            escape=False, attachments=cell.get("attachments", {}), exclude_anchor_links=True
        )
        return MarkdownWithMath(renderer=renderer).render(source)


# One for all pages of a report: it takes a second to make.
_exporter = cache(_PageExporter)


def export_page(notebook: Path, page: Path, lab: Lab, *, error: str | None = None) -> PageRecord:
    """Write a notebook's page and record; `error` is why it did not run to its end."""
    record = PageRecord(lab=lab.name, error=error)
    run = None
    answers: Mapping[str, Answer] = {}
    machine: dict[str, str] = {}
    provenance: dict[str, str] = {}
    example = None
    file = notebook_run(notebook)
    if file is not None:
        run, answers = answered_run(lab, file)
        record = PageRecord(lab=lab.name, run=relative_to_project(file), error=error)
        machine = machine_rows(run.header.machine)
        provenance = provenance_rows(lab, run)
        example = lab.example(run.results())
    rest = {name: value for name, value in machine.items() if name not in SUMMARY_FACTS}
    document = nbformat.read(notebook, as_version=4)
    _hide_empty_sections(document.cells)
    parts = {
        "title": lab.title,
        "head": render("head.html.j2"),
        "style": style_sheet(),
        "code_style": code_style(),
        "script": script(),
        "summary": render(
            "page_summary.html.j2",
            run=run,
            example=example,
            error=error,
            rule=RULE,
            machine=machine_summary(machine),
            answers=[(lab.question(name), answer) for name, answer in answers.items()],
        ),
        "footer": render(
            "page_footer.html.j2", error=error, provenance=[*(provenance | rest).items()]
        ),
        "piece_mime": PIECE_MIME,
    }
    body, _ = _exporter().from_notebook_node(document, resources={"labkit": parts})
    # Readers without a mouse scroll by keys.
    body = body.replace("<pre>", '<pre tabindex="0">')
    entries = [{"anchor": anchor, "html": text} for anchor, text in _HEADING.findall(body)]
    body = body.replace("<!-- contents -->", render("page_contents.html.j2", entries=entries), 1)
    write_file(page, with_nonbreaking_units(body))
    write_file(page.with_suffix(".json"), record.model_dump_json(indent=1))
    return record


def _hide_empty_sections(cells: list[Any]) -> None:
    """Mark headings of sections that are empty on a page: they appear with the code."""
    # A page folds code, and a heading above nothing else would promise what does not come.
    heading = None
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = cell if re.fullmatch(r"#+ .*", cell.source.strip()) else None
            if heading is not None:
                cell.metadata["labkit_silent"] = True
        elif heading is not None:
            pieces = [
                output.get("data", {}).get(PIECE_MIME, {"html": "other"})
                for output in cell.get("outputs", [])
            ]
            heading.metadata["labkit_silent"] &= all(piece["html"] == "" for piece in pieces)
