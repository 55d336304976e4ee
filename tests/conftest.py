"""What all tests share: which are skipped, by name, and in which order their files run.

Skipped are tests that need more than is there, or more time than `make test` has. Files that took
longest the last time come first, so that the processes of `make test` end together.
"""

import atexit
import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.browser import opened_browser
from tests.fork_server import OF_TESTS, borrow, lend, preload

TESTS = Path(__file__).parent
DURATIONS = "labkit/file_durations"  # key in pytest's cache: seconds by file, of the last runs

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Runs and calibrations of whoever tests say nothing about labkit, and those of tests nothing
    # about the machine.
    folder = TemporaryDirectory(prefix="labkit-tests-")
    atexit.register(folder.cleanup)
    os.environ["LABKIT_HOME"] = folder.name

gc.disable()  # until all tests are collected: it would look through all modules a hundred times
preload(*OF_TESTS)
SERVER = Path(os.environ["LABKIT_HOME"]) / "fork-server"
if SERVER.exists() and "PYTEST_XDIST_WORKER" in os.environ:
    borrow(SERVER)

# What is started in the background of a shell ignores SIGINT, and so does all that it starts. Tests
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        lend(SERVER)


def pytest_collection_modifyitems(config, items):
    import torch  # here, since the process that hands the tests out collects none

    skipped = {}
    if not torch.cuda.is_available():
        skipped["gpu"] = "needs a CUDA device"
    if os.environ.get("LABKIT_FAULTS") != "all":
        skipped["faults"] = "run by `make faults`"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Every process of `make test` reads the same file, and so has the same order. Without it, as in
    # a fresh clone, files with many tests come first.
    cache = getattr(config, "cache", None)  # None with `-p no:cacheprovider`
    seconds = cache.get(DURATIONS, {}) if cache else {}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (-seconds.get(_file_name(item.path), 0.0), -counts[item.path]))


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay: no collection need look at them
    gc.enable()


_durations = Counter()


def pytest_runtest_logreport(report):
    _durations[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session):
    """Keep how long each file took, in the process that all results come to."""
    config = session.config
    is_part = config.option.keyword or any("::" in argument for argument in config.args)
    cache = getattr(config, "cache", None)
    if cache and "PYTEST_XDIST_WORKER" not in os.environ and not is_part:
        before = cache.get(DURATIONS, {})
        cache.set(DURATIONS, before | {name: round(s, 1) for name, s in _durations.items()})


def _file_name(path):
    return path.relative_to(TESTS.parent).as_posix()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    # what else there is by now ends with the process, and IPython would look through it then
    gc.freeze()


@pytest.fixture(scope="module")
def visit():
    """Opens a page in a browser."""
    with opened_browser() as opened:
        yield opened


@pytest.fixture
def home(tmp_path):
    """A folder of its own for runs, reports and calibrations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_HOME", str(tmp_path))
        yield tmp_path


@pytest.fixture
def command(monkeypatch, capfd):
    """Carries out a command in this process: its exit status, what it printed, and its
    complaints."""
    from labkit.__main__ import main

    # The program sets the garbage collector of its process for itself.
    before = gc.get_threshold()

    def carry_out(*arguments):
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/labkit", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capfd.readouterr()

    yield carry_out
    gc.set_threshold(*before)
    atexit.unregister(gc.freeze)
