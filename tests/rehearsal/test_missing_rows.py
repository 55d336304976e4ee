"""Pages of runs in which a kind of point failed, or all its alternatives did: on a GPU some will.

From the recorded run of each lab, one kind of rows after another is taken away; whatever the
notebook's cells build of the rest must come without an exception.
"""

import random
from itertools import product

import pytest

from labkit.studies import LABS, load_lab
from tests.cases import thinned
from tests.rehearsal.pages import carry_out, kind_of_point, recorded, run_of

# Rows that may be missing by themselves, by a value that tells them: (lab, column, value).
KINDS_OF_ROWS = [
    ("data_parallel", "lane", "all-reduce"),  # a profiler that does not see the collectives
    ("data_parallel", "phase", "waiting"),
    ("training_step", "family", "elementwise"),
    ("cifar100", "phase", "memory"),
]
FAILED = {"status": "failed", "reason": "RuntimeError: rehearsed"}


def _kinds_of_points():
    for lab in LABS:
        yield from dict.fromkeys(
            (lab, kind_of_point(point)) for point in recorded(lab).header.planned.values()
        )


MAIN_KINDS = dict(reversed(list(_kinds_of_points())))  # the first of each lab
# In `make test` every lab has a page of all its points (`test_tries.py`), one without alternatives,
# and in turns one of these: without a kind of points, of few points, of GPUs (`test_machines.py`).
QUICK = {(lab, MAIN_KINDS[lab]) for lab in LABS[::3]} | {("your_training", "changes")}


@pytest.mark.parametrize(
    ("lab", "kind"),
    thinned(_kinds_of_points(), lambda *case: case in QUICK),
)
def test_a_page_whose_points_of_a_kind_failed(lab, kind):
    run = run_of(recorded(lab), lambda point, row: None if kind_of_point(point) == kind else row)
    carry_out(load_lab(lab), run)


@pytest.mark.parametrize("lab", LABS)
def test_a_page_whose_alternatives_all_failed(lab):
    def failed(_, row):
        if "status" not in row["values"]:
            return row
        names = {name: value for name, value in row["values"].items() if isinstance(value, str)}
        return row | {"values": names | FAILED}

    carry_out(load_lab(lab), run_of(recorded(lab), failed))


@pytest.mark.parametrize(
    ("lab", "column", "value"), thinned(KINDS_OF_ROWS, lambda lab, *_: lab == "data_parallel")
)
def test_a_page_without_some_rows_of_its_points(lab, column, value):
    run = run_of(recorded(lab), lambda _, row: None if row["values"].get(column) == value else row)
    carry_out(load_lab(lab), run)


@pytest.mark.parametrize(
    ("lab", "seed"),
    thinned(product(LABS, range(4)), lambda lab, seed: not seed and lab in LABS[1::3]),
)
def test_a_page_of_few_points(lab, seed):
    """As in a report that had no time for the others."""
    run = recorded(lab)
    points = list(run.header.planned.values())
    rng = random.Random(seed)
    kept = rng.sample(points, rng.randint(0, len(points) // 2))
    carry_out(load_lab(lab), run_of(run, lambda point, row: row if point in kept else None))
