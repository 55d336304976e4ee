"""Victims of a test, which do not survive it."""

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
