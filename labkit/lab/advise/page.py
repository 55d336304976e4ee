"""An advice as one HTML file that loads nothing from the network."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from labkit.lab.advise.report import Report, Section, Step
from labkit.lab.pages.html import piece, render
from labkit.lab.project import write_file


def write_page(report: Report, command: str, page: Path) -> None:
    """Write the page, with all rows of every table and the steps as figures."""
    html = render(
        "advice_page.html.j2",
        command=command,
        report=report,
        sections=[table(section) for section in report.sections],
    )
    write_file(page, html)


def _figure(steps: Sequence[Step]) -> str:
    from labkit.lab.advise.figures import waterfalls
    from labkit.lab.figures.vector import drawing

    plot = waterfalls(steps)
    svg, places = drawing(plot, "steps")
    alt = "The parts of a step in seconds."
    image = piece("drawing", svg=svg, places=places, inches=plot.figure.get_figwidth(), alt=alt, kind="plain")
    csv = base64.b64encode(plot.csv().encode()).decode()
    return piece("figure", images=Markup(image), caption="", csv=csv, file="steps", has_switch=False)


def table(section: Section) -> dict[str, Any]:
    """Values for the macro `table`; a column is numeric if every cell begins with a digit or a sign."""
    numeric = [all(row[at][:1] in "0123456789+-" for row in section.rows) for at in range(len(section.headings))]

    def cells(texts: Sequence[str], **more: None) -> list[dict[str, Any]]:
        return [{"text": text, "number": number, **more} for text, number in zip(texts, numeric, strict=True)]

    return {
        "title": section.title,
        "mark": section.mark,
        "note": section.note,
        "figure": _figure(section.steps) if section.steps else "",
        "headings": cells(section.headings),
        "rows": [cells(row, sort=None, href=None) for row in section.rows],
    }
