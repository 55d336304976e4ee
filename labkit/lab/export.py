"""An executed notebook as one HTML file that opens anywhere, offline, and makes no request.

The page has its own template and style sheet; formulas become MathML, images are embedded, no script is needed.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as latex_to_mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

from labkit.lab.notebook import PAGE_MIME

TEMPLATES = Path(__file__).parent / "templates"
_HEADING = re.compile(r'<h2 id="([^"]*)">(.*?)<', re.DOTALL)


class _Renderer(IPythonRenderer):
    """Markdown with anchors at its headings and formulas as MathML, which browsers draw without a script."""

    def heading(self, text: str, level: int, **_: Any) -> str:
        return f'<h{level} id="{_anchor(text)}">{text}</h{level}>\n'

    def block_math(self, body: str) -> str:
        return latex_to_mathml(body, display="block")

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


def export_page(notebook: Path, page: Path, *, title: str) -> None:
    """Write the HTML page of an executed notebook."""
    body, _ = PageExporter().from_filename(
        str(notebook), resources={"labkit": {"title": title, "style": style_sheet(), "code_style": code_style()}}
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(body.replace("<!-- contents -->", _contents(body)), encoding="utf-8")


def page_record(notebook: Path) -> dict[str, Any] | None:
    """What the notebook left for the index page when it closed its lab; None if it did not get there."""
    for cell in reversed(nbformat.read(notebook, as_version=4).cells):
        for output in cell.get("outputs", []):
            record = output.get("data", {}).get(PAGE_MIME)
            if record is not None:
                return dict(record)
    return None


def style_sheet() -> str:
    return (TEMPLATES / "style.css").read_text()


def code_style() -> str:
    """Pygments' colors for a light and for a dark page."""
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"


def _anchor(heading: str) -> str:
    """ "1. Size and ranks" -> "1-size-and-ranks"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"<[^>]*>", "", heading).lower()).strip("-")


def _contents(body: str) -> str:
    entries = [f'<li><a href="#{anchor}">{text}</a></li>' for anchor, text in _HEADING.findall(body)]
    return f'<nav aria-label="Contents"><ul>{"".join(entries)}</ul></nav>' if entries else ""
