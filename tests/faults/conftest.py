"""The table of faults, after the last test."""

import pytest

from tests.faults import check


@pytest.fixture
def victim(tmp_path):
    victims = []

    def make(folder="", **options):
        victims.append(check.Victim(tmp_path / folder, **options))
        return victims[-1]

    yield make
    for made in victims:
        made.kill()


def pytest_terminal_summary(terminalreporter):
    if not check.OUTCOMES:
        return
    terminalreporter.section("faults")
    widths = [max(len(row[column]) for row in check.OUTCOMES) for column in (0, 1)]
    for case, moment, outcome in check.table():
        terminalreporter.write_line(f"{case:{widths[0]}}  {moment:{widths[1]}}  {outcome}")
