"""An executed notebook as one HTML file that opens anywhere, offline, and makes no request; its record next to it.

The page has its own template and style sheet. Formulas become MathML, images are embedded, and only sorting, hovering
and switches need its script.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as latex_to_mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from labkit.lab.declaration import Lab
from labkit.lab.pages.cards import PIECE_MIME, SUMMARY_FACTS, machine_summary
from labkit.lab.pages.html import TEMPLATES, code_style, render, script, style_sheet, with_nonbreaking_units
from labkit.lab.pages.provenance import RULE
from labkit.lab.pages.record import PAGE_MIME, LabRecord, read_notebook_record
from labkit.lab.project import write_file

_HEADING = re.compile(r'(?<!<section class="prose code">)<h2 id="([^"]*)">(.*?)</h2>', re.DOTALL)


class _Renderer(IPythonRenderer):
    """Markdown with anchors at its headings and formulas as MathML, which browsers draw without a script."""

    def heading(self, text: str, level: int, **_: Any) -> str:
        return f'<h{level} id="{_anchor(text)}">{text}</h{level}>\n'

    def table(self, text: str) -> str:
        return f'<div class="scroll" role="region" tabindex="0" aria-label="table"><table>{text}</table></div>\n'

    def block_math(self, body: str) -> str:
        formula = latex_to_mathml(body, display="block")
        return f'<div class="scroll" role="region" tabindex="0" aria-label="formula">{formula}</div>\n'

    def inline_math(self, body: str) -> str:
        return latex_to_mathml(body)


class PageExporter(HTMLExporter):
    """nbconvert's exporter with labkit's template."""

    def __init__(self, **options: Any):
        super().__init__(template_name="labkit", extra_template_basedirs=[str(TEMPLATES)], embed_images=True, **options)

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        cell = context.get("cell", {})
        renderer = _Renderer(escape=False, attachments=cell.get("attachments", {}), exclude_anchor_links=True)
        return MarkdownWithMath(renderer=renderer).render(source)


def export_page(notebook: Path, page: Path, lab: Lab, *, error: str | None = None) -> LabRecord:
    """Write the page of an executed notebook, and its record as JSON; `error` is why it did not run to its end."""
    run = read_notebook_record(notebook)
    record = LabRecord(lab=lab.name, title=lab.title, error=error, run=run)
    rows = dict(run.machine_rows if run else ())
    document = nbformat.read(notebook, as_version=4)
    _hide_empty_sections(document.cells)
    parts = {
        "title": lab.title,
        "head": render("head.html.j2"),
        "style": style_sheet(),
        "code_style": code_style(),
        "script": script(),
        "summary": render("page_summary.html.j2", record=record, rule=RULE, machine=machine_summary(rows)),
        "footer": render(
            "page_footer.html.j2",
            record=record,
            rest=[(name, value) for name, value in rows.items() if name not in SUMMARY_FACTS],
        ),
        "hidden_mime": PAGE_MIME,
        "piece_mime": PIECE_MIME,
    }
    body, _ = PageExporter().from_notebook_node(document, resources={"labkit": parts})
    body = body.replace("<pre>", '<pre tabindex="0">')  # readers without a mouse scroll by keys
    entries = [{"anchor": anchor, "html": text} for anchor, text in _HEADING.findall(body)]
    body = body.replace("<!-- contents -->", render("page_contents.html.j2", entries=entries), 1)
    write_file(page, with_nonbreaking_units(body))
    write_file(page.with_suffix(".json"), record.model_dump_json(indent=1))
    return record


def _hide_empty_sections(cells: list[Any]) -> None:
    """Mark headings of sections that are empty on a page: they appear with the code."""
    heading = None
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = cell if re.fullmatch(r"#+ .*", cell.source.strip()) else None
            if heading is not None:
                cell.metadata["labkit_silent"] = True
        elif heading is not None and any(map(_is_visible, cell.get("outputs", []))):
            heading.metadata["labkit_silent"] = False


def _is_visible(output: Any) -> bool:
    """Whether a page displays anything of an output."""
    data = output.get("data", {})
    return PAGE_MIME not in data and data.get(PIECE_MIME, {"html": "other"})["html"] != ""


def _anchor(heading: str) -> str:
    """ "1. Size and ranks" -> "1-size-and-ranks"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"<[^>]*>", "", heading).lower()).strip("-")
