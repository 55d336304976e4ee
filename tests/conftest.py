"""What all tests share: tests that need more than is there, or more time than `make test` has, are skipped by name."""

import os
import signal
import subprocess
import sys

import pytest
import torch

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


@pytest.fixture(scope="session")
def smoke_report(tmp_path_factory):
    """`labkit report` of all labs at profile `smoke`, begun now; calling it waits, and returns the pages' folder."""
    folder = tmp_path_factory.mktemp("report")
    command = [sys.executable, "-m", "labkit", "report", "--profile", "smoke", "--output", str(folder)]
    with (tmp_path_factory.getbasetemp() / "report.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

        def complete():
            status = process.wait(600)
            log.seek(0)
            assert status == 0, log.read()
            return folder

        yield complete
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="session", autouse=True)
def _begin_early(request):
    """A report takes two minutes, and hardly ever two cores: where many tests run, it is made meanwhile."""
    items = request.session.items
    if len(items) > 500 and any("smoke_report" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("smoke_report")
