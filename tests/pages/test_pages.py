"""The cells of every lab's notebook on runs that lack something, as a GPU's first runs will.

A kind of points failed there, or all alternatives did. Each case takes that away from the recorded
run of its lab; the cells must build the rest without an exception.
"""

import random

import pytest

from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab
from tests.cases import thinned
from tests.pages.cells import carry_out, kind_of_point, recorded, run_of
from tests.rehearsal.machines import MACHINES

GPUS = [("8 H100", "quick"), ("8 H100", "paper"), ("1 H100", "quick"), ("1 H100", "paper")]
FAILED = {"status": "failed", "reason": "RuntimeError: rehearsed"}


def without_kind(run: Run, kind: str) -> Run:
    """All points of a kind failed."""
    return run_of(run, lambda point, row: None if kind_of_point(point) == kind else row)


def without_rows(run: Run, column: str, value: str) -> Run:
    """Points lack the rows with a value, as from a profiler that does not see collectives."""
    return run_of(run, lambda _, row: None if row["values"].get(column) == value else row)


def without_alternatives(run: Run) -> Run:
    def fail(_, row):
        if "status" not in row["values"]:
            return row
        names = {name: value for name, value in row["values"].items() if isinstance(value, str)}
        return row | {"values": names | FAILED}

    return run_of(run, fail)


def few_points(run: Run, seed: int) -> Run:
    """At most half of the points, as in a report that had no time for the others."""
    points = list(run.header.planned.values())
    rng = random.Random(seed)
    kept = rng.sample(points, rng.randint(0, len(points) // 2))
    return run_of(run, lambda point, row: row if point in kept else None)


def from_gpus(run: Run, name: str, profile: str) -> Run:
    """Every point that is planned there, with recorded rows of its kind."""
    study = load_lab(run.header.lab)
    machine = MACHINES[name]
    points = study.plan(study.profiles_on(machine)[profile], machine)
    planned = {point.id: point.describe() for point in points if not point.skip_reason(machine)}
    sources = {kind_of_point(point): id for id, point in run.header.planned.items()}
    rows = []
    ends = {}
    for id, point in planned.items():
        if source := sources.get(kind_of_point(point)):
            copied = [row for row in run.rows if row.point == source]
            rows += [row.model_copy(update={"point": id}) for row in copied]
            ends[id] = run.ends[source]
    changes = {"machine": machine, "planned": planned, "profile": profile}
    return Run(run.path, run.header.model_copy(update=changes), rows, ends)


def _cases():
    for lab in LABS:
        kinds = dict.fromkeys(map(kind_of_point, recorded(lab).header.planned.values()))
        yield lab, without_alternatives, ()
        yield from ((lab, without_kind, (kind,)) for kind in kinds)
        yield from ((lab, few_points, (seed,)) for seed in range(4))
        yield from ((lab, from_gpus, where) for where in GPUS)
    yield "data_parallel", without_rows, ("lane", "all-reduce")
    yield "data_parallel", without_rows, ("phase", "waiting")
    yield "training_step", without_rows, ("family", "elementwise")
    yield "cifar100", without_rows, ("phase", "memory")


def _is_quick(lab, change, arguments):
    """In `make test` every lab has a page of all its points (`test_tries.py`), and in turns one
    without its first kind of points, of few points, or without alternatives and of GPUs."""
    if change is without_kind:
        first = kind_of_point(next(iter(recorded(lab).header.planned.values())))
        return arguments == ("changes",) or (lab in LABS[::3] and arguments == (first,))
    if change is few_points:
        return lab in LABS[1::3] and arguments == (0,)
    is_third = lab in LABS[2::3]
    return is_third and (change is without_alternatives or arguments == GPUS[0])


@pytest.mark.parametrize(("lab", "change", "arguments"), thinned(_cases(), _is_quick))
def test_a_notebook_of_a_run_that_lacks_something(lab, change, arguments):
    carry_out(load_lab(lab), change(recorded(lab), *arguments))
