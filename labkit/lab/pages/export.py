"""An executed notebook as one HTML file that opens anywhere, offline, and makes no request.

The page has its own template and style sheet; formulas become MathML, images are embedded, and without its script
only the sorting of tables is missing. It carries its record (answers, coverage, provenance) as JSON, so that an index
can be made of nothing but pages.
"""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from jinja2.utils import htmlsafe_json_dumps
from latex2mathml.converter import convert as latex_to_mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from labkit.lab.notebook import PAGE_MIME
from labkit.lab.pages.cards import PIECE_MIME, TOLD_AT_THE_TOP, machine_line
from labkit.lab.pages.html import TEMPLATES, code_style, render, script, style_sheet, unbroken
from labkit.lab.pages.importance import by_importance

PAGE_FORMAT = 5
"""Of the record in a page: raised whenever what an index reads from it changes its name or meaning."""
OTHER_FORMAT = "the page is older or newer than this labkit: draw it again"
RECORD_KEYS = (
    *("run", "started", "duration_s", "profile", "identity", "machine"),
    *("coverage", "not_measured", "figures", "answers"),
)

_HEADING = re.compile(r'(?<!<section class="prose code">)<h2 id="([^"]*)">(.*?)</h2>', re.DOTALL)
_CONTENTS = "<!-- contents -->"
_RECORD = re.compile(r'<script [^>]*id="labkit-record"[^>]*>(.*?)</script>', re.DOTALL)


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


def export_page(notebook: Path, page: Path, *, lab: str, title: str, error: str | None = None) -> None:
    """Write the HTML page of an executed notebook; `error` is why it did not run to its end."""
    record = page_record(notebook)
    rows = record["machine_rows"] if record else []
    machine = machine_line(dict(rows))
    rest = [[name, value] for name, value in rows if name not in TOLD_AT_THE_TOP]
    about = {
        "title": title,
        "head": render("head.html.j2"),
        "style": style_sheet(),
        "code_style": code_style(),
        "script": script(),
        "summary": render(
            "page_summary.html.j2",
            record=record,
            machine=machine,
            answers=by_importance(record["answers"]) if record else [],
            error=error,
        ),
        "footer": render("page_footer.html.j2", record=record, rest=rest, error=error),
        "record": htmlsafe_json_dumps(
            {"format_version": PAGE_FORMAT, "lab": lab, "title": title, "error": error, "record": record}
        ),
        "hidden_mime": PAGE_MIME,
        "piece_mime": PIECE_MIME,
    }
    document = nbformat.read(notebook, as_version=4)
    _mark_silent(document.cells)
    body, _ = PageExporter().from_notebook_node(document, resources={"labkit": about})
    body = body.replace("<pre>", '<pre tabindex="0">')  # whoever has no mouse scrolls by keys
    entries = [{"anchor": anchor, "html": text} for anchor, text in _HEADING.findall(body)]
    page.parent.mkdir(parents=True, exist_ok=True)
    body = body.replace(_CONTENTS, render("page_contents.html.j2", entries=entries), 1)
    page.write_text(unbroken(body), encoding="utf-8")


def _mark_silent(cells: list[Any]) -> None:
    """Headings of sections that say nothing on a page: they appear with the code."""
    heading = None
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = cell if re.fullmatch(r"#+ .*", cell.source.strip()) else None
            if heading is not None:
                cell.metadata["labkit_silent"] = True
        elif heading is not None and any(map(_is_seen, cell.get("outputs", []))):
            heading.metadata["labkit_silent"] = False


def _is_seen(output: Any) -> bool:
    """Whether a page shows anything of an output."""
    data = output.get("data", {})
    return PAGE_MIME not in data and data.get(PIECE_MIME, {"html": "other"})["html"] != ""


def page_record(notebook: Path) -> dict[str, Any] | None:
    """What the notebook left for the index page when it closed its lab; None if it did not get there."""
    for cell in reversed(nbformat.read(notebook, as_version=4).cells):
        for output in cell.get("outputs", []):
            record = output.get("data", {}).get(PAGE_MIME)
            if record is not None:
                return dict(record)
    return None


def read_page(page: Path) -> dict[str, Any] | None:
    """What a page says of itself: `lab`, `title`, `error` and `record`; None for a file that is no page of a lab.

    A page of another format has no record that could be read: it is None, and the error is `OTHER_FORMAT`.
    """
    match = _RECORD.search(page.read_text(encoding="utf-8", errors="replace"))
    if match is None:
        return None
    try:
        found = json.loads(match.group(1))
    except ValueError:
        return None
    if not isinstance(found, dict) or not {"lab", "title", "error", "record"} <= set(found):
        return None
    record = found["record"]
    is_whole = isinstance(record, dict) and record.keys() >= set(RECORD_KEYS) and isinstance(record["run"], str)
    if found.get("format_version") != PAGE_FORMAT or not (record is None or is_whole):
        return found | {"error": OTHER_FORMAT, "record": None}
    return dict(found)


def _anchor(heading: str) -> str:
    """ "1. Size and ranks" -> "1-size-and-ranks"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"<[^>]*>", "", heading).lower()).strip("-")
