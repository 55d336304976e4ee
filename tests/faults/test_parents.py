"""What may happen to a measuring process, its disk and its clock: all that was measured is kept, and can be resumed."""

import json
import os
import resource
import shutil
import signal
import subprocess
from functools import partial

import psutil
import pytest

from tests.cases import thinned
from tests.faults.check import at_once, note, settings, until
from tests.faults.worker import BEFORE, BETWEEN, INSIDE, WRITING

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
TOGETHER = ((BEFORE, WRITING), (INSIDE, BETWEEN))
ALONE = (signal.SIGINT, BETWEEN)
"""In `make test-all` too. In `make test`, test_cli.py interrupts a report and goes on with its run, test_killed.py
kills a measurement and resumes it, and test_leftovers.py looks for what an interrupt leaves.
"""


def _cases():
    yield pytest.param(ALONE[0], [ALONE[1]], marks=pytest.mark.slow, id=_name(ALONE[0], [ALONE[1]]))
    for number in SIGNALS:
        for together in TOGETHER:
            moments = [moment for moment in together if (number, moment) != ALONE]
            yield pytest.param(number, moments, marks=pytest.mark.faults, id=_name(number, moments))


def _name(number, moments):
    return f"{number.name}, {' + '.join(moments)}"


def ended_lines(path):
    return [line for line in path.read_bytes().split(b"\n")[:-1] if json.loads(line)["kind"] == "end"]


@pytest.mark.parametrize(("number", "moments"), list(_cases()))
def test_a_signal_to_the_parent(victim, number, moments):
    at_once(partial(_check_signal, victim, number), *((str(folder), moment) for folder, moment in enumerate(moments)))


def _check_signal(victim, number, folder, moment):
    hit = victim(folder, LABKIT_FAULT_PAUSE=moment)
    if moment == INSIDE:
        hit.start(*settings(action="SIGSTOP", moment=INSIDE, timeout_s=60.0))  # the others wait for it
        until(lambda: any(p.status() == psutil.STATUS_STOPPED for p in hit.processes()), 60)
    else:
        hit.start()
        hit.wait_for("paused")
    hit.process.send_signal(number)
    status, said = hit.finish(20)
    assert status == (130 if number == signal.SIGINT else -number), said
    assert number != signal.SIGINT or "--resume" in said
    hit.assert_nothing_left()
    (run,) = hit.runs()
    kept = ended_lines(run.path)
    assert len(kept) == {BEFORE: 0, INSIDE: 1, BETWEEN: 1, WRITING: 0}[moment]
    lost = len(run.pending)
    assert lost == 3 - len(kept)
    if moment != INSIDE:  # there the point itself would stop again
        status, said = hit.start("--resume", str(run.path)).finish()
        assert status == 0, said
        (run,) = hit.runs()
        assert set(run.coverage()["status"]) == {"ok"}
        assert ended_lines(run.path)[: len(kept)] == kept
        hit.assert_nothing_left()
    resumed = "" if moment == INSIDE else ", then resumed"
    return [(f"the parent: {number.name}", moment, f"{len(kept)} of 3 points kept, the rest pending{resumed}")]


def _needs_mounts():
    if os.geteuid() or not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a file system of its own needs the right to mount one")


def _small_disk(folder):
    """A file system of one page for the runs, in a mount namespace of the victim's own."""
    runs = folder / "runs" / "faulty"
    return ["unshare", "-m", "sh", "-c", f'mkdir -p {runs} && mount -t tmpfs -o size=4k none {runs} && exec "$@"', "sh"]


def _read_only(folder):
    runs = folder / "runs"
    return ["unshare", "-m", "sh", "-c", f'mkdir -p {runs} && mount -t tmpfs -o ro none {runs} && exec "$@"', "sh"]


def _becomes_read_only(folder):
    """What is there can be read, and nothing be written."""
    runs = folder / "runs"
    mount = f"mount --bind {runs} {runs} && mount -o remount,bind,ro {runs}"
    return ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]


@pytest.mark.faults
def test_a_directory_that_is_read_only_when_a_run_is_taken_up(victim):
    _needs_mounts()
    hit = victim(LABKIT_FAULT_PAUSE=BETWEEN)
    hit.start().wait_for("paused")
    hit.process.kill()
    hit.finish()
    (run,) = hit.runs()
    before = run.path.read_bytes()
    status, said = hit.start("--resume", str(run.path), prefix=_becomes_read_only(hit.folder)).finish()
    assert status == 2, said
    assert f"{run.path}: " in said
    assert "Read-only file system" in said
    assert "Traceback" not in said
    hit.assert_nothing_left()
    assert run.path.read_bytes() == before
    status, said = hit.start("--resume", str(run.path)).finish()
    assert status == 0, said
    note("the disk", "Read-only before --resume", "refused by name, 1 of 3 points kept, then resumed")


@pytest.mark.parametrize(
    ("disk", "words"),
    thinned(
        [(_small_disk, "No space left"), (_read_only, "Read-only file system")], lambda disk, _: disk is _small_disk
    ),
)
def test_a_disk_that_takes_nothing_more(victim, disk, words):
    _needs_mounts()
    hit = victim()
    status, said = hit.start(*settings(moment=WRITING, action="writes much"), prefix=disk(hit.folder)).finish()
    assert status == 2, said
    assert words in said
    assert "faulty" in said  # the place
    assert "Traceback" not in said
    hit.assert_nothing_left()
    note("the disk", words, said.strip().splitlines()[-1])


@pytest.mark.faults
def test_a_file_that_may_not_grow_keeps_what_was_measured(victim):
    hit = victim()
    hit.start(*settings(moment=WRITING, action="writes much"))
    until(lambda: any((hit.folder / "runs").rglob("*.jsonl")), 60)
    resource.prlimit(hit.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    status, said = hit.finish()
    assert status == 2, said
    assert "File too large" in said
    assert "Traceback" not in said
    (run,) = hit.runs()  # whole, but for the torn line
    assert run.coverage()["status"].tolist()[1:] == ["pending", "pending"]
    hit.assert_nothing_left()
    status, said = hit.start("--resume", str(run.path)).finish()
    assert status == 0, said
    assert set(hit.runs()[0].coverage()["status"]) == {"ok"}
    note("the disk", "a file may not grow", f"{words_of(said)}")


def words_of(said):
    return said.strip().splitlines()[-1].split(";")[0]


@pytest.mark.slow
def test_two_measurements_of_one_lab_at_the_same_time(victim):
    one, two = victim(), victim()
    one.start()
    two.start()
    assert [running.finish()[0] for running in (one, two)] == [0, 0]
    runs = one.runs()
    assert len(runs) == 2
    assert all(set(run.coverage()["status"]) == {"ok"} for run in runs)
    one.assert_nothing_left()
    two.assert_nothing_left()
    note("two measurements", "at the same time", "two runs, both whole")


@pytest.mark.slow  # `test_a_run_that_somebody_writes_is_refused...` of tests/lab/test_measure.py has it in one process
@pytest.mark.parametrize("resumed", ["paused", pytest.param("finished", marks=pytest.mark.faults)])
def test_a_run_that_somebody_writes_is_not_taken_up(victim, resumed):
    first = victim(LABKIT_FAULT_PAUSE=BETWEEN if resumed == "paused" else "")
    first.start()
    if resumed == "paused":
        first.wait_for("paused")
    else:
        first.finish()
    (run,) = first.runs()
    second = victim()
    status, said = second.start("--resume", str(run.path)).finish()
    if resumed == "paused":
        assert status == 2
        assert "another process is writing this run" in said
    else:
        assert status == 0, said
    note("two measurements", f"the first is {resumed}", "refused" if status else "nothing to do")


@pytest.mark.slow
def test_a_clock_that_jumps(victim):
    hit = victim(LABKIT_FAULT_CLOCK="1")
    status, said = hit.start(*settings(action="raises", moment=INSIDE)).finish()
    assert status == 1, said
    (run,) = hit.runs()
    assert run.coverage()["status"].tolist() == ["ok", "failed", "ok"]
    assert run.coverage()["elapsed_s"].between(0, 60).all()
    hit.assert_nothing_left()
    note("the clock", "jumps by 11 days at each look", "deadlines and durations hold")
