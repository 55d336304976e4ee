"""What all tests share: which are skipped, by name, which come first, and the commands that take long.

Skipped are tests that need more than is there, or more time than `make test` has.
"""

import atexit
import gc
import json
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from labkit.__main__ import main
from labkit.lab.project import notebook_path
from labkit.studies import LABS
from tests.commands import carry_out
from tests.fork_server import OF_TESTS, preload

BY_COMMAND = ("all_reduce",)
"""The lab whose notebook `make test` carries out as users do, `make test-all` all of them."""

TESTS = Path(__file__).parent
# Of the files that the processes of `make test` share, those that take longest, so that both end together.
FIRST = (
    *("test_notebooks.py", "parallel/test_sharding_parity.py", "nn/test_flash_attention.py"),
    *("parallel/test_leftovers.py", "parallel/test_collectives.py", "parallel/test_shared_memory.py"),
    *("studies/test_own_alternatives.py", "test_cli.py", "parallel/test_data_parallel.py", "test_adding_a_lab.py"),
    *("faults/test_measurements.py", "parallel/test_torchrun.py", "check/test_class.py", "check/test_comparison.py"),
    *("lab/test_comparison.py", "test_start_here.py", "parallel/test_pipeline.py"),
    *("parallel/test_tensor.py", "studies/test_one_rank_fails.py", "parallel/test_fsdp.py", "lab/test_torchrun.py"),
    *("rehearsal/test_machines.py", "parallel/test_launch.py", "rehearsal/test_missing_rows.py"),
)

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Runs and calibrations of whoever tests say nothing about labkit, and those of tests nothing about the machine.
    home = TemporaryDirectory(prefix="labkit-tests-")
    atexit.register(home.cleanup)
    os.environ["LABKIT_HOME"] = home.name

preload(*OF_TESTS)

# What is started in the background of a shell ignores SIGINT, and so does all that it starts. Tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    gc.freeze()  # what else there is by now ends with the process, and IPython would look through it then


@pytest.fixture(scope="session")
def interpreted_kernels(request):
    """What came of the tests of the Triton kernels under the interpreter, in one thread."""
    selected = request.config.option.markexpr or "not gpu"
    command = [sys.executable, "-m", "pytest", str(TESTS / "nn" / "test_flash_attention.py"), "-q"]
    command += ["-p", "no:cacheprovider", "-m", f"not gpu and ({selected})"]
    return carry_out(command, TESTS.parent, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="session")
def smoke_report(request, tmp_path_factory):
    """The folder of the pages of `labkit report` of all labs at profile `smoke`; in `make test` some come cheaper."""
    pages = tmp_path_factory.mktemp("smoke") / "pages"
    by_command = BY_COMMAND if "not slow" in request.config.option.markexpr else LABS
    if others := [lab for lab in LABS if lab not in by_command]:
        outcome = carry_out([sys.executable, "-m", "tests.smoke", str(pages), *others], TESTS.parent)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    command = [sys.executable, "-m", "labkit", "report", *by_command, "--profile", "smoke", "--output", str(pages)]
    outcome = carry_out(command, TESTS.parent)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return pages


@pytest.fixture(scope="session")
def broken_report(tmp_path_factory):
    """What a report came to of a run that is damaged, which only the notebook finds out; and the pages' folder."""
    folder = tmp_path_factory.mktemp("broken")
    run = folder / "broken.jsonl"
    run.write_text(json.dumps({"kind": "header", "format_version": 1}) + "\n")
    command = [sys.executable, "-m", "labkit", "report", "all_reduce", "--run", str(run)]
    return carry_out([*command, "--output", str(folder / "pages")], TESTS.parent), folder / "pages"


@pytest.fixture(scope="session")
def notebook_by_papermill(tmp_path_factory):
    """The notebook of a lab, carried out by papermill's own command in another folder."""
    folder = tmp_path_factory.mktemp("papermill")
    notebook = str(notebook_path("sync_batchnorm"))  # which measures with ranks, and little
    outcome = carry_out([sys.executable, "-m", "papermill", notebook, "out.ipynb", "-y", "profile: smoke"], folder)
    assert outcome.returncode == 0, outcome.stderr
    return folder / "out.ipynb"


@pytest.fixture(scope="session")
def tour(tmp_path_factory):
    """The tour for newcomers, carried out by papermill in another folder."""
    folder = tmp_path_factory.mktemp("tour")
    notebook = TESTS.parent / "notebooks" / "00_start_here.ipynb"
    outcome = carry_out([sys.executable, "-m", "papermill", str(notebook), "tour.ipynb", "-p", "repeats", "6"], folder)
    assert outcome.returncode == 0, outcome.stderr
    return folder / "tour.ipynb"


@pytest.fixture
def command(monkeypatch, capfd):
    """Carries out a command in this process: its exit status, what it printed, and its complaints."""
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
