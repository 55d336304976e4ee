"""`labkit measure` in the ranks of a torchrun job: the first writes, the others take part, all sizes are answered."""

import os
import subprocess
import sys

from labkit.lab.store import Run
from tests.commands import all_runs, runs_by


def test_a_lab_is_measured_by_the_ranks_that_exist():
    arguments = ["measure", "all_reduce", "--profile", "smoke"]
    before = all_runs()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "labkit", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr
    (path,) = runs_by(arguments, before)
    coverage = Run.load(path).coverage()
    gloo = coverage[coverage["backend"] == "gloo"]
    assert set(gloo.loc[gloo["world_size"] == 2, "status"]) == {"ok"}
    others = gloo[gloo["world_size"] != 2]
    assert set(others["status"]) == {"skipped"}
    assert all("this job has 2" in reason for reason in others["reason"])
