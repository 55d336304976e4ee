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
    """For the macro `table`: a column is set as numbers if all of it begins with a digit or a sign."""
    numbers = [all(row[at][:1] in "0123456789+-" for row in section.rows) for at in range(len(section.headings))]
    return {
        "title": section.title,
        "mark": section.mark,
        "note": section.note,
        "headings": [{"text": text, "number": number} for text, number in zip(section.headings, numbers, strict=True)],
        "rows": [
            [
                {"text": text, "number": number, "sort": None, "href": None}
                for text, number in zip(row, numbers, strict=True)
            ]
            for row in section.rows
        ],
    }
