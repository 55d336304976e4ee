"""The same call inside ranks that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from labkit.parallel.ranks.joined import is_joined, joined_rank

# What every rank prints is one line, so that the lines of two ranks do not mix.
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from labkit.parallel.ranks.joined import is_joined, joined_rank
from labkit.parallel.launch import Row, launch, run_ranks

emptied = []
torch.cuda.is_initialized, torch.cuda.empty_cache = lambda: True, lambda: emptied.append(True)

def worker(point):
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    yield {"point": point, "total": total, "pid": os.getpid(), "flag": os.environ.get("LABKIT_FLAG"),
        "emptied": len(emptied)}
    if point == "fails" and dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    if point == "hangs" and dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()

def told(item):
    if isinstance(item, Row):
        return ["row", item.index, item.rank, item.values]
    return ["end", item.index, item.status, item.reason, item.facts]

assert is_joined() and joined_rank() == int(os.environ["RANK"])
for number, (points, world_size, timeout_s) in enumerate(json.loads(sys.argv[1])):
    options = {"world_size": world_size, "timeout_s": timeout_s, "environment": {"LABKIT_FLAG": "up"}}
    first = [told(item) for item in launch(worker, points, **options)]
    second = [told(item) for item in launch(lambda point: [{"rank": dist.get_rank()}], ["again"], world_size=2)]
    results = run_ranks(lambda: dist.get_rank(), world_size=2)
    print(json.dumps({"launch": number, "rank": joined_rank(), "pid": os.getpid(), "first": first, "second": second,
        "results": results, "flag": os.environ.get("LABKIT_FLAG")}) + "\\n", end="", flush=True)
"""


def torchrun(directory: Path, *launches: tuple[list[str], int, float]) -> CompletedProcess[str]:
    """A job of two ranks, which take part in each launch: points, ranks, and the time-out of a point in seconds."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), json.dumps(launches)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def told_by_ranks(completed: CompletedProcess[str]) -> list[list[dict[str, Any]]]:
    """By launch, what each rank told of it."""
    assert completed.returncode == 0, completed.stderr
    told = [json.loads(line) for line in completed.stdout.splitlines()]
    launches = range(1 + max(said["launch"] for said in told))
    return [sorted((s for s in told if s["launch"] == number), key=lambda s: s["rank"]) for number in launches]


@pytest.fixture(scope="module")
def two_launches(tmp_path_factory: pytest.TempPathFactory) -> CompletedProcess[str]:
    """A job with a launch of as many ranks as there are, and one of more."""
    return torchrun(tmp_path_factory.mktemp("job"), (["a", "b"], 2, 30.0), (["a", "b"], 4, 30.0))


def test_points_run_in_the_ranks_of_the_job(two_launches: CompletedProcess[str]) -> None:
    ranks = told_by_ranks(two_launches)[0]
    assert [said["first"] for said in ranks[1:]] == [[]]  # the others take part and yield nothing
    first = ranks[0]["first"]
    assert [item[:3] for item in first if item[0] == "row"] == [
        ["row", 0, 0],
        ["row", 0, 1],
        ["row", 1, 0],
        ["row", 1, 1],
    ]
    pids = {item[3]["pid"] for item in first if item[0] == "row"}
    assert pids == {said["pid"] for said in ranks}
    ends = [item for item in first if item[0] == "end"]
    assert [end[:4] for end in ends] == [["end", 0, "ok", None], ["end", 1, "ok", None]]
    assert ends[0][4]["start_method"] == "joined"
    assert ends[0][4]["world_size"] == 2
    assert [item[3] for item in ranks[0]["second"][:2]] == [{"rank": 0}, {"rank": 1}]
    assert [said["results"] for said in ranks] == [[0, 1], []]
    assert {item[3]["flag"] for item in first if item[0] == "row"} == {"up"}
    assert [item[3]["emptied"] for item in first if item[0] == "row"] == [0, 0, 1, 1]  # memory of a GPU, at each end
    assert [said["flag"] for said in ranks] == [None, None]  # the environment of a launch ends with it


def test_another_world_size_skips_every_point(two_launches: CompletedProcess[str]) -> None:
    ranks = told_by_ranks(two_launches)[1]
    reason = "needs 4 ranks, but this job has 2"
    assert [item[:4] for item in ranks[0]["first"]] == [["end", 0, "skipped", reason], ["end", 1, "skipped", reason]]
    assert ranks[1]["first"] == []


def test_all_ranks_agree_on_a_failure_and_carry_on(tmp_path: Path) -> None:
    # After a launch that waits longer: the time-out of each is its own, or the failures would not be found in time.
    _, ranks = told_by_ranks(torchrun(tmp_path, (["a"], 2, 60.0), (["a", "fails", "fails", "b"], 2, 1.0)))
    ends = [item[1:4] for item in ranks[0]["first"] if item[0] == "end"]
    failed = ["failed", "rank 1: ValueError: rank 1 has had enough"]
    assert ends == [[0, "ok", None], [1, *failed], [2, *failed], [3, "ok", None]]
    assert ranks[0]["results"] == [0, 1]


def test_a_hang_fails_the_job_loudly(tmp_path: Path) -> None:
    completed = torchrun(tmp_path, (["hangs"], 2, 1.0))
    assert completed.returncode != 0
    assert "Timeout (0:00:" in completed.stderr
    assert "in worker" in completed.stderr


def test_a_process_of_its_own_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_joined()
    assert joined_rank() == 0
