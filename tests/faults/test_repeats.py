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
    """A hundred ranks, ten a measurement, then a hundred parents, a random while after the beginning of their run.

    Two measurements at a time: each is a surprise for the other's timing, and it takes half as long.
    """
    chance, counts, pair = random.Random(0), Counter(), (victim("one"), victim("two"))
    for repeat in range(RANK_KILLS // A_RUN // 2):
        names, moment = ("SIGKILL", "SIGTERM"), (INSIDE, SHARED)[repeat % 2]
        for hit, name in zip(pair, names, strict=True):
            hit.start(*settings(action=name, moment=moment, points=2 * A_RUN))
        for hit, name in zip(pair, names, strict=True):
            status, said = hit.finish()
            assert status == 1, said
            assert hit.runs()[-1].coverage()["status"].tolist() == ["ok", "failed"] * A_RUN
            counts[f"a rank {name}"] += A_RUN
        _assert_nothing_left(pair)
    runs = len(pair[0].runs())
    for repeat in range(PARENT_KILLS // 2):
        moment = (INSIDE, SHARED)[repeat // 3 % 2]
        numbers = PARENTS[repeat % 3], PARENTS[(repeat + 1) % 3]
        for hit in pair:
            hit.start(*settings(action="SIGSTOP", moment=moment, points=2, timeout_s=30.0))
        for hit, number in zip(pair, numbers, strict=True):
            until(lambda hit=hit, wanted=runs + repeat: len(list((hit.folder / "runs").rglob("*.jsonl"))) > wanted, 60)
            until(lambda: False, chance.uniform(0, 1.5))
            hit.process.send_signal(number)
            counts[f"the parent {number.name}"] += 1
        for hit, number in zip(pair, numbers, strict=True):
            status, said = hit.finish()
            assert status == (130 if number == signal.SIGINT else -number), (repeat, said)
        _assert_nothing_left(pair)
    assert [len(hit.runs()) for hit in pair] == [runs + PARENT_KILLS // 2] * 2  # every one of them readable
    note("kills", f"{counts.total()} repeats", f"nothing left behind: {dict(counts)}")


def _assert_nothing_left(pair):
    for hit in pair:
        hit.assert_nothing_left()
