"""An advice on one screen of a terminal."""

from collections.abc import Iterator, Sequence

from labkit.lab.advise.report import Report, Section

GAP = "  "


def lines(report: Report) -> Iterator[str]:
    """The report as lines of text."""
    yield report.verdict
    yield report.headline
    yield f"  {report.about}"
    for section in report.sections:
        yield ""
        yield f"{section.title} ({section.mark})"
        yield from _table(section)
    if report.notes:
        yield ""
        yield from report.notes


def _table(section: Section) -> Iterator[str]:
    rows = [section.headings, *_shown(section)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(section.headings))]
    for row in rows:
        yield "  " + GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _shown(section: Section) -> Sequence[Sequence[str]]:
    """All rows, or the first ones and the last if a screen has no room for them."""
    if section.shown is None or len(section.rows) <= section.shown:
        return section.rows
    return section.rows[: section.shown]
