"""The table of this session's faults, after its last test."""

import os

import pytest

from tests.faults import check


@pytest.fixture
def victim(tmp_path):
    victims = []

    def make(**variables):
        victims.append(check.Victim(tmp_path, **variables))
        return victims[-1]

    yield make
    for made in victims:
        made.kill()


def pytest_terminal_summary(terminalreporter):
    if not check.OUTCOMES:
        return
    terminalreporter.section("faults")
    widths = [max(len(row[column]) for row in check.OUTCOMES) for column in (0, 1)]
    for case, moment, outcome in check.OUTCOMES:
        terminalreporter.write_line(f"{case:{widths[0]}}  {moment:{widths[1]}}  {outcome}")


def pytest_collection_modifyitems(items):
    """What is marked `faults` is for `make faults` alone."""
    if os.environ.get("LABKIT_FAULTS") == "all":
        return
    for item in items:
        if item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.skip(reason="run by `make faults`"))
