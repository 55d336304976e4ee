"""Faults of ranks and of their parent at several moments: a rank costs one point, a parent costs no
finished point.

tests/parallel/test_leftovers.py kills processes at more moments.
"""

import errno
import json
import os
import resource
import signal

import pytest

from labkit.lab.runs.records import RunFileError, RunWriter
from tests.commands import mounted
from tests.faults.check import settings, until
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, SHARED, WRITING
from tests.lab.fake_lab import FakePoint, header

LATER = (INSIDE, SHARED, WRITING, BETWEEN)  # the last may cost the next point instead
# The fault of a rank: how its point may end, words of the reason, moments.
RANKS = {
    "raises": ({"failed"}, "ValueError: deliberate", (BEFORE, *LATER)),
    "no JSON": ({"failed"}, "row value 'value' is not JSON-able", (WRITING,)),
    "SIGKILL": ({"failed"}, "was killed by SIGKILL", (BEFORE, *LATER)),
    "SIGTERM": ({"failed"}, "was killed by SIGTERM", (BEFORE, *LATER)),
    "SIGSTOP": ({"timeout"}, "still running after 4 s", (BEFORE, *LATER)),
    "loops": ({"timeout"}, "still running after 4 s", (BEFORE, *LATER)),
    "exits": ({"failed"}, "exited with code 0", (BEFORE, *LATER)),
    "aborts": ({"failed"}, "was killed by SIGABRT", (BEFORE, *LATER)),
    "runs out of memory": ({"oom"}, "rank 1: ", (BEFORE, *LATER)),
    "prints 10 MB": ({"ok"}, "", (BEFORE, *LATER)),
    "sizes differ": ({"failed"}, "was killed by SIGABRT: ", (INSIDE,)),
}
# Moments at which the parent is hit: finished points by then, of three.
PARENTS = {BEFORE: 0, INSIDE: 1, BETWEEN: 1, WRITING: 0}
NO_MOUNT = "a separate file system needs the right to mount one"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("action", "moment"), [(action, moment) for action, row in RANKS.items() for moment in row[2]]
)
def test_a_rank_costs_its_point(victim, action, moment):
    """The second of three points goes wrong; the others are measured."""
    ends, words, _ = RANKS[action]
    if moment == BEFORE:
        hit = victim(LABKIT_FAULT_ON_IMPORT=action, LABKIT_FAULT_START_S="40").start()
        ends = {"ok"}  # a group that does not come up is started once more: nothing is lost
    else:
        hit = victim().start(*settings(action=action, moment=moment))
    status, output = hit.finish()
    (run,) = hit.runs()
    coverage = run.coverage()
    before, hurt, after = statuses = coverage["status"].tolist()
    assert before == "ok", output
    if moment == BETWEEN:  # hit before the next point has begun, or a little later
        assert {hurt, after} <= ends | {"ok"}, output
        assert "ok" in (hurt, after), output
    else:
        assert hurt in ends, output
        assert after == "ok", output
    for ended, reason in zip(statuses, coverage["reason"].tolist(), strict=True):
        if ended != "ok":
            assert words in reason
            assert ended == "oom" or reason in output.replace("\n", " "), output
    assert status == (1 if {"failed", "timeout"} & set(statuses) else 0), output
    measured = run.frame()
    assert sorted(measured["number"].unique()) == [
        n for n, ended in enumerate(statuses) if ended == "ok"
    ]
    assert set(measured.groupby("number")["rank"].nunique()) == {2}
    hit.assert_nothing_left()


@pytest.mark.faults
@pytest.mark.parametrize("moment", PARENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_parent_keeps_what_was_measured(victim, number, moment):
    hit = victim(LABKIT_FAULT_PAUSE=moment)
    if moment == INSIDE:
        # the others wait for it
        hit.start(*settings(action="SIGSTOP", moment=INSIDE, timeout_s=600.0))
        until(hit.is_any_stopped)
    else:
        hit.start()
        hit.wait_for("paused")
    hit.process.send_signal(number)
    status, output = hit.finish()
    assert status == (130 if number == signal.SIGINT else -number), output
    assert number != signal.SIGINT or "--resume" in output
    hit.assert_nothing_left()
    (run,) = hit.runs()
    kept = ended_lines(run.path)
    assert (len(kept), len(run.pending)) == (PARENTS[moment], 3 - PARENTS[moment])
    if moment != INSIDE:  # there the point itself would stop again
        hit.resume()
        assert ended_lines(hit.runs()[0].path)[: len(kept)] == kept
        hit.assert_nothing_left()


def ended_lines(path):
    return [
        line for line in path.read_bytes().split(b"\n")[:-1] if json.loads(line)["kind"] == "end"
    ]


def refused(hit, words, status=2):
    """Assert that it ended with this status and one line with these words."""
    ended, output = hit.finish()
    assert ended == status, output
    assert words in output
    assert "Traceback" not in output
    hit.assert_nothing_left()
    return output


@pytest.mark.faults
def test_a_directory_that_is_read_only_when_a_run_is_taken_up(victim):
    hit = victim(LABKIT_FAULT_PAUSE=BETWEEN)
    hit.start().wait_for("paused")
    hit.process.kill()
    hit.finish()
    (run,) = hit.runs()
    before = run.path.read_bytes()
    runs = hit.folder / "runs"
    read_only = f"mount --bind {runs} {runs} && mount -o remount,bind,ro {runs}"
    hit.start("--resume", str(run.path), prefix=mounted(read_only) or pytest.skip(NO_MOUNT))
    assert f"{run.path}: " in refused(hit, "Read-only file system")
    assert run.path.read_bytes() == before
    hit.resume()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("option", "words"), [("size=4k", "No space left"), ("ro", "Read-only file system")]
)
def test_a_disk_that_takes_nothing_more(victim, option, words):
    hit = victim()
    runs = hit.folder / "runs"
    folder = runs / "faulty" if option == "size=4k" else runs
    prefix = mounted(
        f"mkdir -p {folder} && mount -t tmpfs -o {option} none {folder}"
    ) or pytest.skip(NO_MOUNT)
    hit.start(*settings(moment=WRITING, action="writes much"), prefix=prefix)
    assert "faulty" in refused(hit, words)  # the place


def test_a_run_that_cannot_be_written_is_an_error_that_names_it(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    point = FakePoint(action="fine", size=1)
    with RunWriter.create(tmp_path, header([point])) as writer:
        monkeypatch.setattr(os, "write", refuse)
        with pytest.raises(RunFileError, match=f"{writer.path}: .*No space left"):
            writer.add_row(point, 0, {"value": 1.0})
        monkeypatch.undo()


@pytest.mark.faults
def test_a_file_that_may_not_grow_keeps_what_was_measured(victim):
    hit = victim()
    hit.start(*settings(moment=WRITING, action="writes much"))
    until(lambda: any((hit.folder / "runs").rglob("*.jsonl")))
    resource.prlimit(hit.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    refused(hit, "File too large")
    (run,) = hit.runs()  # whole, but for the torn line
    assert run.coverage()["status"].tolist()[1:] == ["pending", "pending"]
    hit.resume()


@pytest.mark.slow
def test_two_measurements_of_one_lab_at_the_same_time(victim):
    one = victim()
    two = victim()
    one.start()
    two.start()
    assert [running.finish()[0] for running in (one, two)] == [0, 0]
    runs = one.runs()
    assert len(runs) == 2
    assert all(set(run.coverage()["status"]) == {"ok"} for run in runs)
    one.assert_nothing_left()
    two.assert_nothing_left()


@pytest.mark.slow
def test_a_clock_that_jumps(victim):
    hit = victim(LABKIT_FAULT_CLOCK="1")
    status, output = hit.start(*settings(action="raises", moment=INSIDE)).finish()
    assert status == 1, output
    (run,) = hit.runs()
    assert run.coverage()["status"].tolist() == ["ok", "failed", "ok"]
    assert run.coverage()["elapsed_s"].between(0, 60).all()
    hit.assert_nothing_left()
