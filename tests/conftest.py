"""What all tests share: which are skipped, by name, and the errands that take long, which are begun first.

Skipped are tests that need more than is there, or more time than `make test` has.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.errands import Errand, Errands

TESTS = Path(__file__).parent

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


def _interpreted(folder):
    """The tests of the Triton kernels under the interpreter, in two halves of one thread each."""
    command = [sys.executable, "-m", "pytest", str(TESTS / "nn" / "test_flash_attention.py"), "-q"]
    command += ["-p", "no:cacheprovider", "-m", "not gpu", "-k"]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {half: Errand([*command, half], TESTS.parent, variables) for half in ("causal", "not causal")}


def _report(folder):
    command = [sys.executable, "-m", "labkit", "report", "--profile", "smoke", "--output", str(folder / "pages")]
    return {"report": Errand(command, TESTS.parent)}


def _tour(folder):
    notebook = TESTS.parent / "notebooks" / "00_start_here.ipynb"
    command = [sys.executable, "-m", "papermill", str(notebook), str(folder / "tour.ipynb"), "-p", "repeats", "6"]
    return {"tour": Errand(command, folder)}


def _compiled(folder):
    """The worker of the end-to-end lab on the smallest model, compiled, which takes half a minute; its rows as JSON."""
    point = "sweep='compile', device='cpu', size='nano', batch=1, context_length=8, warmup=1, repeats=2"
    program = [
        "import json",
        "from labkit.parallel.ranks.answers import plain_row",
        "from labkit.studies.end_to_end.worker import EndToEndPoint, measure_point",
        f"print(json.dumps([plain_row(row) for row in measure_point(EndToEndPoint({point}))]))",
    ]
    return {"compiled": Errand([sys.executable, "-c", "\n".join(program)], TESTS.parent)}


def _broken(folder):
    """A report of a run that is damaged, which only the notebook finds out."""
    run = folder / "broken.jsonl"
    run.write_text(json.dumps({"kind": "header", "format_version": 1}) + "\n")
    command = [sys.executable, "-m", "labkit", "report", "all_reduce", "--run", str(run)]
    return {"broken": Errand([*command, "--output", str(folder / "broken")], TESTS.parent)}


def _papermill(folder):
    """The notebook of a lab from another folder, by papermill's own command."""
    notebook = TESTS.parent / "notebooks" / "07_all_reduce.ipynb"
    command = [sys.executable, "-m", "papermill", str(notebook), "out.ipynb", "-y", "profile: smoke"]
    return {"papermill": Errand(command, folder)}


# By the fixture that hands over their outcome, as they are begun: what is asked for first, what takes
# longest, the rest.
ERRANDS = {
    "interpreted_kernels": _interpreted,
    "smoke_report": _report,
    "compiled_rows": _compiled,
    "broken_report": _broken,
    "notebook_by_papermill": _papermill,
    "tour": _tour,
}


@pytest.fixture(scope="session")
def errands(request, tmp_path_factory):
    """The errands of the collected tests. Where many tests run, one at a time: most take a core, and most tests one."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    folder = tmp_path_factory.mktemp("errands")
    errands = {}
    for fixture, errands_of in ERRANDS.items():
        if fixture in asked:
            errands |= errands_of(folder)
    running = Errands(folder, errands, at_once=1 if _are_many(request.session) else 2)
    yield running
    running.end()


def _are_many(session):
    return len(session.items) > 500


@pytest.fixture(scope="session", autouse=True)
def _begin_early(request):
    """What takes minutes, and hardly ever two cores, goes on while many tests run."""
    if _are_many(request.session):
        request.getfixturevalue("errands")


@pytest.fixture(scope="session")
def interpreted_kernels(errands):
    """Waits for the tests of the kernels under the interpreter; what came of each half."""
    return [errands.outcome(half) for half in _interpreted(None)]


@pytest.fixture(scope="session")
def smoke_report(errands):
    """Waits for `labkit report` of all labs at profile `smoke`; the pages' folder."""
    outcome = errands.outcome("report")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return errands.folder / "pages"


@pytest.fixture(scope="session")
def compiled_rows(errands):
    """Waits for the worker of the end-to-end lab to compile the smallest model and time it; its rows."""
    outcome = errands.outcome("compiled")
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.fixture(scope="session")
def broken_report(errands):
    """Waits for the report of a damaged run; what the command came to, and the pages' folder."""
    return errands.outcome("broken"), errands.folder / "broken"


@pytest.fixture(scope="session")
def notebook_by_papermill(errands):
    """Waits for papermill to carry out a lab's notebook in another folder; the notebook."""
    outcome = errands.outcome("papermill")
    assert outcome.returncode == 0, outcome.stderr
    return errands.folder / "out.ipynb"


@pytest.fixture(scope="session")
def tour(errands):
    """Waits for the tour for newcomers, carried out by papermill in another folder; the notebook."""
    outcome = errands.outcome("tour")
    assert outcome.returncode == 0, outcome.stderr
    return errands.folder / "tour.ipynb"
