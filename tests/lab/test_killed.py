"""A measurement that is killed: no rank survives it, nothing measured is lost, `--resume` does the rest.

Through the command line, with the all-reduce lab, whose ranks are inside collectives most of the time.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from labkit.lab.runs.store import Run
from tests.commands import all_runs, runs_by

MARK = "LABKIT_TEST_MARK"
# Enough points that the run is still going when it is killed.
COMMAND = ["measure", "all_reduce", "--profile", "smoke"]
for _setting in ("repeats=30", "world_sizes=[2]", "transports=[]", "scheduling_bytes=[]"):
    COMMAND += ["--set", _setting]
COMMAND += ["--set", f"sizes_bytes={[64 * n for n in range(1, 9)]}"]


def _until(condition, deadline_s=300.0):
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


class _Measurement:
    """A running `labkit measure`, the run it writes, and every process that descends from it."""

    def __init__(self):
        before = all_runs()
        self._mark = uuid.uuid4().hex
        environment = os.environ | {MARK: self._mark}
        command = [sys.executable, "-m", "labkit", *COMMAND]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.path = _until(lambda: next(iter(runs_by(COMMAND, before)), None))

    def family(self):
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def wait_for_points(self, number):
        _until(lambda: self.path.stat().st_size and self.path.read_text().count('"kind":"end"') >= number)


@pytest.fixture
def measurement():
    running = _Measurement()
    yield running
    for process in running.family():
        process.kill()
    running.process.wait()
    running.path.unlink()


def test_kill_9_of_the_measuring_process_loses_nothing_and_resume_does_the_rest(measurement, command):
    measurement.wait_for_points(2)
    measurement.process.send_signal(signal.SIGKILL)
    measurement.process.wait()
    _until(lambda: not measurement.family())
    ended = [point for point in Run.load(measurement.path).header.planned if point not in _pending(measurement)]
    assert len(ended) >= 2
    assert _pending(measurement)
    lines_before = measurement.path.read_text().splitlines()
    status, _, complaints = command("measure", "all_reduce", "--resume", str(measurement.path))
    assert status == 0, complaints
    assert _pending(measurement) == []
    ends = Counter(line.split('"point":"')[1][:12] for line in _lines(measurement) if '"kind":"end"' in line)
    assert set(ends.values()) == {1}
    assert [line for line in lines_before if '"kind":"end"' in line] == [
        line for line in _lines(measurement) if '"kind":"end"' in line
    ][: len(ended)]


def _pending(measurement):
    return Run.load(measurement.path).pending


def _lines(measurement):
    return measurement.path.read_text().splitlines()
