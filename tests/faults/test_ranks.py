"""What a rank may do to its measurement: it costs a point, which says why, and the next point is measured."""

from collections import namedtuple
from functools import partial

import pytest

from tests.faults.check import at_once, settings
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, SHARED, WRITING

# `say`: words of the reason; `ends`: how the point may end.
Case = namedtuple("Case", "action ends say moments")
LATER = (INSIDE, SHARED, WRITING, BETWEEN)  # the last may cost the next point instead
CASES = [  # a case and the next take about as long
    Case("raises", {"failed"}, "ValueError: deliberate", (BEFORE, *LATER)),
    Case("no JSON", {"failed"}, "row value 'value' is not JSON-able", (WRITING,)),
    Case("SIGKILL", {"failed"}, "was killed by SIGKILL", (BEFORE, *LATER)),
    Case("SIGTERM", {"failed"}, "was killed by SIGTERM", (BEFORE, *LATER)),
    Case("SIGSTOP", {"timeout"}, "still running after 4 s", (BEFORE, *LATER)),
    Case("loops", {"timeout"}, "still running after 4 s", (BEFORE, *LATER)),
    Case("exits", {"failed"}, "exited with code 0", (BEFORE, *LATER)),
    Case("aborts", {"failed"}, "was killed by SIGABRT", (BEFORE, *LATER)),
    Case("runs out of memory", {"oom"}, "rank 1: ", (BEFORE, *LATER)),
    Case("prints 10 MB", {"ok"}, "", (BEFORE, *LATER)),
    Case("sizes differ", {"failed"}, "was killed by SIGABRT: ", (INSIDE,)),
]
QUICK = {"raises": (BEFORE,), "sizes differ": (INSIDE,), "SIGKILL": (SHARED,)}
"""In `make test` too, or `make test-all`, so each alone."""
SLOW = {"sizes differ", "SIGKILL"}
"""Of them, those of `make test-all`: test_launch.py has either, and test_memory.py a kill at the same moment."""


def _cases():
    """Before there is a group, and one measurement with a point for every later moment; two measurements at once."""
    quick = [(case, QUICK[case.action]) for case in CASES if case.action in QUICK]
    before = [(case, (BEFORE,)) for case in CASES if BEFORE in case.moments]
    later = [(case, tuple(moment for moment in case.moments if moment != BEFORE)) for case in CASES]
    for alone in quick:
        marks = [pytest.mark.slow] if alone[0].action in SLOW else []
        yield pytest.param([alone], marks=marks, id=_name(alone))
    for parts in (before, later):
        slow = [part for part in parts if part not in quick]
        for pair in zip(slow[::2], slow[1::2], strict=True):
            yield pytest.param(pair, marks=pytest.mark.faults, id=" + ".join(map(_name, pair)))


def _name(part):
    case, moments = part
    return f"{case.action}, {moments[0] if len(moments) == 1 else 'later'}"


@pytest.mark.parametrize("parts", list(_cases()))
def test_a_rank(victim, parts):
    at_once(partial(_check, victim), *((str(number), *part) for number, part in enumerate(parts)))


def _check(victim, folder, case, moments):
    """Points 1, 3, ... go wrong, each at its moment; those before, between and after them are measured."""
    if moments == (BEFORE,):
        hit = victim(folder, LABKIT_FAULT_ON_IMPORT=case.action, LABKIT_FAULT_START_S="8").start()
    else:
        hit = victim(folder).start(*settings(action=case.action, moment=",".join(moments), points=2 * len(moments) + 1))
    status, said = hit.finish(300)
    (run,) = hit.runs()
    coverage = run.coverage()
    assert run.pending == []
    statuses, reasons = coverage["status"].tolist(), coverage["reason"].tolist()
    for number, moment in enumerate(moments):
        before, hurt, after = statuses[2 * number : 2 * number + 3]
        if moment == BEFORE:  # a group that does not come up is started once more: nothing is lost
            assert (before, hurt, after) == ("ok", "ok", "ok"), said
        elif moment == BETWEEN:  # hit before the next point has begun, or a little later
            assert before == "ok", said
            assert {hurt, after} <= case.ends | {"ok"}, said
            assert "ok" in (hurt, after), said
        else:
            assert hurt in case.ends, said
            assert before == "ok", said
            assert after == "ok", said
    for ended, reason in zip(statuses, reasons, strict=True):
        if ended != "ok":
            assert case.say in reason
            assert ended == "oom" or reason in said.replace("\n", " "), said
    assert status == (1 if {"failed", "timeout"} & set(statuses) else 0), said
    measured = run.frame()
    assert sorted(measured["number"].unique()) == [n for n, ended in enumerate(statuses) if ended == "ok"]
    assert set(measured.groupby("number")["rank"].nunique()) == {2}
    hit.assert_nothing_left()
    rows = []
    for number, moment in enumerate(moments):
        told = [reasons[at] for at in (2 * number + 1, 2 * number + 2) if statuses[at] != "ok"]
        rows.append((f"a rank: {case.action}", moment, "; ".join(told) or "nothing lost"))
    return rows
