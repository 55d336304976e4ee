"""What else the machine does beside a measurement: seen, recorded, told on the page, and never in the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.lab.commands.console import tell_of_load
from labkit.lab.pages import cards
from labkit.lab.pages.provenance import provenance_rows
from labkit.lab.runs.measure import measure
from labkit.lab.runs.store import Run
from labkit.machine.load import Load, announced, disturbances, load_before_measuring, other_measurements
from tests.lab.fake_study import FAKE, FakeConfig

ANNOUNCE = "from labkit.machine.load import announced\nwith announced():\n    print(flush=True)\n    input()"
CONFIG = FakeConfig(actions=["fine", "raise"], world_size=1)


@pytest.fixture(autouse=True)
def name_of_these_tests(monkeypatch):
    """Labs that others measure on this machine at the same time are not seen here."""
    name = f"labkit-tested-{os.getpid()}-"
    monkeypatch.setattr("labkit.machine.load._NAME", name)
    return name


@pytest.fixture
def other(name_of_these_tests):
    """Another process that says it measures."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    code = f"from labkit.machine import load\nload._NAME = {name_of_these_tests!r}\n{ANNOUNCE}"
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_another_measurement_is_seen_as_long_as_it_lasts(other):
    assert other_measurements() == 1
    other.communicate(b"\n")
    assert other_measurements() == 0


def test_a_measurement_that_was_killed_is_none(other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert other_measurements() == 0


def test_a_measurement_does_not_see_itself_and_leaves_nothing_behind(name_of_these_tests):
    with announced():
        assert name_of_these_tests in Path("/proc/net/unix").read_text()
        assert other_measurements() == 0
    assert name_of_these_tests not in Path("/proc/net/unix").read_text()


@pytest.mark.usefixtures("other")
def test_the_terminal_tells_of_another_measurement(capsys):
    tell_of_load()
    assert capsys.readouterr().err.startswith("Another labkit measurement")


@pytest.mark.usefixtures("other")
def test_a_run_records_the_load_and_its_page_tells_of_another_measurement(tmp_path):
    run = measure(FAKE, CONFIG, profile="smoke", directory=tmp_path / "runs")
    assert run.header.load.other_measurements == 1
    assert run.header.load.busy_cores >= 0
    assert set(run.steadiness.busy) == set(run.header.planned)
    ends = [json.loads(line) for line in run.path.read_text().splitlines() if '"kind":"end"' in line]
    assert all(end["load"]["average"] >= 0 for end in ends)
    assert "2 points another labkit measurement" in cards.coverage(run)
    assert "load average" in provenance_rows(FAKE, run)["Load"]


def test_a_quiet_run_says_nothing_and_an_older_one_is_read(tmp_path, monkeypatch):
    quiet = Load(average=0.1, other_measurements=0, busy_cores=0.05)
    monkeypatch.setattr("labkit.lab.runs.measure.load_before_measuring", lambda: quiet)
    run = measure(FAKE, CONFIG, profile="smoke", directory=tmp_path / "runs")
    for text in ("another labkit", "cores busy"):
        assert text not in cards.coverage(run)
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    for line in lines:
        line.pop("load", None)
    run.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = Run.load(run.path)
    assert (older.header.load, dict(older.steadiness.busy)) == (None, {})
    assert "Load" not in provenance_rows(FAKE, older)


def test_other_programs_are_worth_a_word_from_a_share_of_the_cores_on():
    def said(busy, cores):
        return disturbances(Load(average=0, other_measurements=0, busy_cores=busy), cores)

    assert not said(0.3, 2)
    assert said(0.6, 2)
    assert not said(2, 64)
    assert said(12, 64)
    assert load_before_measuring().busy_cores <= os.cpu_count()
