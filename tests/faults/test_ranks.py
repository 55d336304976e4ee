"""What a rank may do to its measurement: it costs a point, which says why, and the next point is measured."""

from collections import namedtuple

import pytest

from tests.faults.check import note, settings
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, SHARED, WRITING

# `say`: words of the reason; `ends`: how the point may end.
Case = namedtuple("Case", "action ends say moments")
LATER = (INSIDE, SHARED, BETWEEN, WRITING)
CASES = [
    Case("raises", {"failed"}, "ValueError: deliberate", (BEFORE, *LATER)),
    Case("SIGKILL", {"failed"}, "was killed by SIGKILL", (BEFORE, *LATER)),
    Case("SIGTERM", {"failed"}, "was killed by SIGTERM", (BEFORE, *LATER)),
    Case("SIGSTOP", {"timeout"}, "still running after 4 s", (BEFORE, *LATER)),
    Case("exits", {"failed"}, "exited with code 0", (BEFORE, *LATER)),
    Case("aborts", {"failed"}, "was killed by SIGABRT", (BEFORE, *LATER)),
    Case("sizes differ", {"failed"}, "was killed by SIGABRT: ", (INSIDE,)),
    Case("runs out of memory", {"oom"}, "rank 1: ", (BEFORE, *LATER)),
    Case("loops", {"timeout"}, "still running after 4 s", (BEFORE, *LATER)),
    Case("no JSON", {"failed"}, "row value 'value' is not JSON-able", (WRITING,)),
    Case("prints 10 MB", {"ok"}, "", (BEFORE, *LATER)),
]
QUICK = {("SIGKILL", SHARED), ("sizes differ", INSIDE), ("raises", BEFORE)}


def _cases():
    for case in CASES:
        for moment in case.moments:
            marks = [] if (case.action, moment) in QUICK else [pytest.mark.faults]
            yield pytest.param(case, moment, marks=marks, id=f"{case.action}, {moment}")


@pytest.mark.parametrize(("case", "moment"), list(_cases()))
def test_a_rank(victim, case, moment):
    before = {"LABKIT_FAULT_ON_IMPORT": case.action, "LABKIT_FAULT_START_S": "8"} if moment == BEFORE else {}
    chosen = {} if moment == BEFORE else {"action": case.action, "moment": moment}
    hit = victim(**before).start(*settings(**chosen))
    status, said = hit.finish()
    (run,) = hit.runs()
    coverage = run.coverage()
    assert run.pending == []
    statuses = coverage["status"].tolist()
    if moment == BEFORE:  # a group that does not come up is started once more: nothing is lost
        assert statuses == ["ok"] * 3, said
    elif moment == BETWEEN:  # hit before the next point has begun, or a little later
        assert statuses[0] == "ok", said
        assert set(statuses[1:]) <= case.ends | {"ok"}, said
        assert statuses.count("ok") >= 2, said
    else:
        assert statuses[::2] == ["ok", "ok"], said
        assert statuses[1] in case.ends, said
    for ended, reason in zip(statuses, coverage["reason"], strict=True):
        if ended != "ok":
            assert case.say in reason
            assert ended == "oom" or reason in said.replace("\n", " "), said
    assert status == (1 if {"failed", "timeout"} & set(statuses) else 0), said
    measured = run.frame()
    assert sorted(measured["number"].unique()) == [n for n in range(3) if statuses[n] == "ok"]
    assert set(measured.groupby("number")["rank"].nunique()) == {2}
    hit.assert_nothing_left()
    note(f"a rank: {case.action}", moment, "; ".join(coverage["reason"].dropna()) or "nothing lost")
