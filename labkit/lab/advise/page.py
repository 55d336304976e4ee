"""An advice as a page that can be sent: one file, no request to anywhere, no script but the sorting of tables."""

from pathlib import Path
from typing import Any

from labkit.lab.advise.report import Report, Section
from labkit.lab.pages.html import render, script, style_sheet


def write_page(report: Report, command: str, page: Path) -> None:
    """Write the page, with all rows that a screen has no room for."""
    step_s = sum(seconds for _, seconds in report.parts_s)
    html = render(
        "advice_page.html.j2",
        style=style_sheet(),
        script=script(),
        command=command,
        report=report,
        parts=[{"name": name, "seconds": f"{value:.3g}", "share": value / step_s} for name, value in report.parts_s],
        sections=[_table(section) for section in report.sections],
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")


def _table(section: Section) -> dict[str, Any]:
    def cell(text: str) -> dict[str, Any]:
        return {"text": text, "number": text[:1].isdigit(), "sort": None, "href": None}

    return {
        "title": section.title,
        "mark": section.mark,
        "note": section.note,
        "headings": [{"text": text, "number": False} for text in section.headings],
        "rows": [[cell(text) for text in row] for row in section.rows],
    }
