"""What all tests share: which are skipped, by name, and which come first.

Skipped are tests that need more than is there, or more time than `make test` has.
"""

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from labkit.__main__ import main
from tests.browser import opened_browser
from tests.fork_server import OF_TESTS, borrow, lend, preload

TESTS = Path(__file__).parent
# Of the files that the processes of `make test` share, those that take longest, so that both end
# together.
FIRST = (
    *(
        "test_notebooks.py",
        "rehearsal/test_tries.py",
        "parallel/test_sharding_parity.py",
        "test_cli.py",
    ),
    *("parallel/test_leftovers.py", "parallel/test_data_parallel.py", "test_adding_a_lab.py"),
    *("nn/test_flash_attention.py", "parallel/test_collectives.py"),
    *("check/test_class.py", "studies/test_cifar100_training.py", "parallel/test_torchrun.py"),
    *(
        "studies/test_one_rank_fails.py",
        "studies/test_own_alternatives.py",
        "parallel/test_launch.py",
    ),
    *(
        "nn/test_tiled_attention.py",
        "costs/test_memory.py",
        "nn/test_transformer.py",
        "parallel/test_tensor.py",
    ),
    *(
        "parallel/test_pipeline.py",
        "parallel/test_fsdp.py",
        "test_layout.py",
        "scaling/test_published.py",
    ),
    *("rehearsal/test_machines.py", "lab/test_measure.py", "parallel/test_context.py"),
)

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


def pytest_collection_modifyitems(items):
    skipped = {}
    if not torch.cuda.is_available():
        skipped["gpu"] = "needs a CUDA device"
    if os.environ.get("LABKIT_FAULTS") != "all":
        skipped["faults"] = "run by `make faults`"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    places = {TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay: no collection need look at them
    gc.enable()


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
