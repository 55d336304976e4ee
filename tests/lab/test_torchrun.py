"""`labkit measure` in the ranks of a torchrun job: the first writes, the others take part, all sizes are answered."""

import os
import shlex
import subprocess
import sys

import pytest

from labkit.lab.runs.store import Run

ARGUMENTS = ["measure", "all_reduce", "--profile", "smoke", "--set", "algorithms=['torch', 'ring']"]
for _sizes in ("sizes_bytes", "transport_sizes_bytes", "phase_sizes_bytes"):
    ARGUMENTS += ["--set", f"{_sizes}=[4096]"]

# Both commands in one job: each job is three programs that import torch.
PROGRAM = """
import shutil, sys
from pathlib import Path
from labkit.__main__ import main
from labkit.lab.project import runs_directory
from labkit.parallel.ranks.joined import broadcast_from_first_rank, joined_rank

def labkit(*arguments):
    sys.argv = ["labkit", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code

def killed():
    '''Cuts the run off as if it had been killed before the end of the last point that these ranks measured.'''
    (path,) = runs_directory().glob("*/*.jsonl")
    shutil.copy(path, kept)
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"status":"ok"' in line)
    path.write_text("".join(lines[:last]))
    shutil.copy(path, cut)
    return path.stem

kept, cut, *arguments = sys.argv[1:]
labkit(*arguments)
labkit("measure", "all_reduce", "--resume", broadcast_from_first_rank(killed() if joined_rank() == 0 else None))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run as it was measured, as it was cut off, and as it was resumed."""
    folder = tmp_path_factory.mktemp("torchrun")
    kept, cut = folder / "kept.jsonl", folder / "cut.jsonl"
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(program), str(kept), str(cut), *ARGUMENTS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LABKIT_HOME": str(folder)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr
    (resumed,) = folder.glob("data/runs/*/*.jsonl")
    return [Run.load(path) for path in (kept, cut, resumed)]


def test_a_lab_is_measured_by_the_ranks_that_exist(runs):
    assert runs[0].header.command == shlex.join(["labkit", *ARGUMENTS])
    coverage = runs[0].coverage()
    gloo = coverage[coverage["backend"] == "gloo"]
    assert set(gloo.loc[gloo["world_size"] == 2, "status"]) == {"ok"}
    others = gloo[gloo["world_size"] != 2]
    assert set(others["status"]) == {"skipped"}
    assert all("this job has 2" in reason for reason in others["reason"])


def test_a_run_is_resumed_by_the_ranks_that_exist(runs):
    first, cut, resumed = runs
    assert cut.pending
    assert resumed.pending == []
    assert len(resumed.resumptions) == 1
    assert resumed.coverage()["status"].tolist() == first.coverage()["status"].tolist()
