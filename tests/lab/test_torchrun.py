"""`labkit measure` in the ranks of a torchrun job: the first writes, the others take part, all sizes are answered."""

import os
import subprocess
import sys

import pytest

from labkit.lab.runs.store import Run
from tests.cases import thinned
from tests.commands import all_runs, runs_by


def _torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "labkit", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("is_resumed", thinned([False, True], lambda is_resumed: not is_resumed))
def test_a_lab_is_measured_by_the_ranks_that_exist_and_a_run_resumed_by_them(is_resumed):
    arguments = ["measure", "all_reduce", "--profile", "smoke", "--set", "algorithms=['torch', 'ring']"]
    for setting in ("sizes_bytes=[4096]", "world_sizes=[2, 3]", "transports=[]", "scheduling_bytes=[]"):
        arguments += ["--set", setting]
    before = all_runs()
    _torchrun(*arguments)
    (path,) = runs_by(arguments, before)
    coverage = Run.load(path).coverage()
    gloo = coverage[coverage["backend"] == "gloo"]
    assert set(gloo.loc[gloo["world_size"] == 2, "status"]) == {"ok"}
    others = gloo[gloo["world_size"] != 2]
    assert set(others["status"]) == {"skipped"}
    assert all("this job has 2" in reason for reason in others["reason"])

    if not is_resumed:
        return
    # As if it had been killed before the end of the last point that these ranks measured.
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"status":"ok"' in line)
    path.write_text("".join(lines[:last]))
    pending = Run.load(path).pending
    assert pending
    _torchrun("measure", "all_reduce", "--resume", path.stem)
    run = Run.load(path)
    assert run.pending == []
    assert len(run.resumptions) == 1
    assert run.coverage()["status"].tolist() == coverage["status"].tolist()
