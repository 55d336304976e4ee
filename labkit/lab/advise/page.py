"""An advice as a page that can be sent: one file, no request to anywhere, no script but for tables and figures."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from labkit.lab.advise.report import Report, Section, Step
from labkit.lab.pages.html import piece, render, script, style_sheet


def write_page(report: Report, command: str, page: Path) -> None:
    """Write the page, with all rows that a screen has no room for, and the steps drawn."""
    html = render(
        "advice_page.html.j2",
        style=style_sheet(),
        script=script(),
        command=command,
        report=report,
        sections=[table(section) for section in report.sections],
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")


def _figure(steps: Sequence[Step]) -> str:
    from labkit.lab.advise.drawn import waterfalls
    from labkit.lab.figures.vector import drawing

    plot = waterfalls(steps)
    svg, places = drawing(plot, "steps")
    alt = "Where the time of a step goes, part by part."
    image = piece("drawing", svg=svg, places=places, inches=plot.figure.get_figwidth(), alt=alt, kind="plain")
    csv = base64.b64encode(plot.csv().encode()).decode()
    return piece("figure", images=Markup(image), drawn="", csv=csv, file="steps", has_switch=False)


def table(section: Section) -> dict[str, Any]:
    """For the macro `table`: a column is set as numbers if all of it begins with a digit or a sign."""
    numbers = [all(row[at][:1] in "0123456789+-" for row in section.rows) for at in range(len(section.headings))]
    return {
        "title": section.title,
        "mark": section.mark,
        "note": section.note,
        "figure": _figure(section.steps) if section.steps else "",
        "headings": [{"text": text, "number": number} for text, number in zip(section.headings, numbers, strict=True)],
        "rows": [
            [
                {"text": text, "number": number, "sort": None, "href": None}
                for text, number in zip(row, numbers, strict=True)
            ]
            for row in section.rows
        ],
    }
