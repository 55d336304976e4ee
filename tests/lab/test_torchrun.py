"""`labkit measure` in the ranks of a torchrun job: the first writes, the others take part, all
sizes are answered."""

import os
import subprocess
import sys

import pytest

from labkit.lab.runs.store import Run
from tests.commands import all_runs, runs_by

MEASURE = ["measure", "all_reduce", "--profile", "smoke", "--set", "algorithms=['torch', 'ring']"]
for setting in ("sizes_bytes=[4096]", "world_sizes=[2, 3]", "transports=[]", "scheduling_bytes=[]"):
    MEASURE += ["--set", setting]


def assert_measured(run):
    """Two ranks are measured, and points of others are skipped."""
    coverage = run.coverage()
    gloo = coverage[coverage["backend"] == "gloo"]
    assert set(gloo.loc[gloo["world_size"] == 2, "status"]) == {"ok"}
    others = gloo[gloo["world_size"] != 2]
    assert set(others["status"]) == {"skipped"}
    assert all("this job has 2" in reason for reason in others["reason"])


def _torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "labkit", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_run_is_resumed_by_the_ranks_that_exist():
    before = all_runs()
    _torchrun(*MEASURE)
    (path,) = runs_by(MEASURE, before)
    assert_measured(whole := Run.load(path))
    # As if it had been killed before the end of the last point that these ranks measured.
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"status":"ok"' in line)
    path.write_text("".join(lines[:last]))
    assert Run.load(path).pending
    _torchrun("measure", "all_reduce", "--resume", path.stem)
    run = Run.load(path)
    assert run.pending == []
    assert len(run.resumptions) == 1
    assert run.coverage()["status"].tolist() == whole.coverage()["status"].tolist()
