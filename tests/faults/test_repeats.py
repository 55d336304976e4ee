"""Kills, two hundred times, at moments that drift: nothing is left behind, and the count is on record."""

import os
import random
import signal

import pytest

from tests.faults.check import note, settings, until
from tests.faults.worker import INSIDE, SHARED

REPEATS = 200
PARENTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.faults
def test_two_hundred_kills_leave_nothing(victim):
    """A measurement a repeat: by turns a rank is killed, then the parent, a random while after the first row."""
    chance, counts = random.Random(0), {}
    hit = victim()
    for repeat in range(REPEATS):
        moment = (INSIDE, SHARED)[repeat % 2]
        if repeat % 4 < 2:
            how = f"a rank: {('SIGKILL', 'SIGTERM')[repeat // 4 % 2]}"
            status, said = hit.start(*settings(action=how[8:], moment=moment, points=2)).finish()
            assert status == 1, (repeat, said)
        else:
            number = PARENTS[repeat // 4 % 3]
            how = f"the parent: {number.name}"
            rows = len(list((hit.folder / "runs").rglob("*.jsonl")))
            hit.start(*settings(action="SIGSTOP", moment=moment, points=2, timeout_s=30.0))
            until(lambda rows=rows: len(list((hit.folder / "runs").rglob("*.jsonl"))) > rows, 60)
            until(lambda: False, chance.uniform(0, 1.5))
            os.kill(hit.process.pid, number)
            status, said = hit.finish()
            assert status in (-number, 130), (repeat, said)
        hit.assert_nothing_left()
        counts[how] = counts.get(how, 0) + 1
    assert len(hit.runs()) == REPEATS  # every one of them readable
    note("kills", f"{REPEATS} repeats", f"nothing left behind: {counts}")
