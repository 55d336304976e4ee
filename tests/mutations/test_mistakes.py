"""The mistakes of `make mutants` fit the code as it is."""

import ast
from pathlib import Path

import pytest

from tests.mutations.check import main
from tests.mutations.mistakes import MISTAKES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_replaces_one_piece_of_a_file_and_leaves_python(mistake):
    text = (ROOT / "labkit" / mistake.file).read_text()
    assert text.count(mistake.old) == 1
    assert mistake.new != mistake.old
    if mistake.file.endswith(".py"):
        ast.parse(text.replace(mistake.old, mistake.new))
    assert all((ROOT / test).exists() for test in mistake.tests if test.startswith("tests/"))


@pytest.mark.slow
def test_ranks_make_the_mistake_too():
    """They start from a server that has loaded labkit before it knows of the copy of the tree."""
    assert main(["phases", "ring never divides"]) == 0
