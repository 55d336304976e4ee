"""Kills, two hundred times, at moments that drift: nothing is left behind, and the count is on record."""

import random
import signal
from collections import Counter

import pytest

from tests.faults.check import note, settings, until
from tests.faults.worker import INSIDE, SHARED

RANK_KILLS, PARENT_KILLS, A_RUN = 100, 100, 10
PARENTS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@pytest.mark.faults
def test_two_hundred_kills_leave_nothing(victim):
    """A hundred ranks, ten a measurement, then a hundred parents, a random while after the beginning of their run."""
    chance, counts, hit = random.Random(0), Counter(), victim()
    for repeat in range(RANK_KILLS // A_RUN):
        name, moment = ("SIGKILL", "SIGTERM")[repeat // 2 % 2], (INSIDE, SHARED)[repeat % 2]
        status, said = hit.start(*settings(action=name, moment=moment, points=2 * A_RUN)).finish()
        assert status == 1, said
        assert hit.runs()[-1].coverage()["status"].tolist() == ["ok", "failed"] * A_RUN
        hit.assert_nothing_left()
        counts[f"a rank {name}"] += A_RUN
    runs = len(hit.runs())
    for repeat in range(PARENT_KILLS):
        number, moment = PARENTS[repeat % 3], (INSIDE, SHARED)[repeat // 3 % 2]
        hit.start(*settings(action="SIGSTOP", moment=moment, points=2, timeout_s=30.0))
        until(lambda wanted=runs + repeat: len(list((hit.folder / "runs").rglob("*.jsonl"))) > wanted, 60)
        until(lambda: False, chance.uniform(0, 1.5))
        hit.process.send_signal(number)
        status, said = hit.finish()
        assert status == (130 if number == signal.SIGINT else -number), (repeat, said)
        hit.assert_nothing_left()
        counts[f"the parent {number.name}"] += 1
    assert len(hit.runs()) == runs + PARENT_KILLS  # every one of them readable
    note("kills", f"{counts.total()} repeats", f"nothing left behind: {dict(counts)}")
