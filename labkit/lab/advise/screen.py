"""An advice on one screen of a terminal."""

from collections.abc import Iterator

from labkit.lab.advise.report import Report, Section


def lines(report: Report) -> Iterator[str]:
    """The report as lines of text."""
    yield from (report.verdict, report.headline, f"  {report.about}")
    for section in report.sections:
        yield from ("", f"{section.title} ({section.mark})", *_table(section))
    if report.notes:
        yield from ("", *report.notes)


def _table(section: Section) -> Iterator[str]:
    """The headings and the rows that a screen has room for."""
    rows = [section.headings, *section.rows[: section.max_rows]]
    widths = [max(len(row[at]) for row in rows) for at in range(len(section.headings))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
