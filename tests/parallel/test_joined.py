"""The same call inside ranks that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.parallel.joined import is_joined, joined_rank

# What every rank prints is one line, so that the lines of two ranks do not mix.
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from labkit.parallel.joined import is_joined, joined_rank
from labkit.parallel.launch import Row, launch, run_ranks

def worker(point):
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    yield {"point": point, "total": total, "pid": os.getpid(), "flag": os.environ.get("LABKIT_FLAG")}
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
points, world_size, timeout_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
options = {"world_size": world_size, "timeout_s": timeout_s, "environment": {"LABKIT_FLAG": "up"}}
first = [told(item) for item in launch(worker, points, **options)]
second = [told(item) for item in launch(lambda point: [{"rank": dist.get_rank()}], ["again"], world_size=2)]
results = run_ranks(lambda: dist.get_rank(), world_size=2)
print(json.dumps({"rank": joined_rank(), "pid": os.getpid(), "first": first, "second": second,
    "results": results, "flag": os.environ.get("LABKIT_FLAG")}) + "\\n", end="", flush=True)
"""


def torchrun(
    directory: Path, points: list[str], world_size: int = 2, timeout_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(script), json.dumps(points), str(world_size), str(timeout_s)]
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def told_by_ranks(completed: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert completed.returncode == 0, completed.stderr
    told = [json.loads(line) for line in completed.stdout.splitlines()]
    return sorted(told, key=lambda said: said["rank"])


def test_points_run_in_the_ranks_of_the_job(tmp_path: Path) -> None:
    ranks = told_by_ranks(torchrun(tmp_path, ["a", "b"]))
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
    assert [said["flag"] for said in ranks] == [None, None]  # the environment of a launch ends with it


def test_another_world_size_skips_every_point(tmp_path: Path) -> None:
    ranks = told_by_ranks(torchrun(tmp_path, ["a", "b"], world_size=4))
    reason = "needs 4 ranks, but this job has 2"
    assert [item[:4] for item in ranks[0]["first"]] == [["end", 0, "skipped", reason], ["end", 1, "skipped", reason]]
    assert ranks[1]["first"] == []


def test_all_ranks_agree_on_a_failure_and_carry_on(tmp_path: Path) -> None:
    ranks = told_by_ranks(torchrun(tmp_path, ["a", "fails", "fails", "b"], timeout_s=1.0))
    ends = [item[1:4] for item in ranks[0]["first"] if item[0] == "end"]
    failed = ["failed", "rank 1: ValueError: rank 1 has had enough"]
    assert ends == [[0, "ok", None], [1, *failed], [2, *failed], [3, "ok", None]]
    assert ranks[0]["results"] == [0, 1]


def test_a_hang_fails_the_job_loudly(tmp_path: Path) -> None:
    completed = torchrun(tmp_path, ["hangs"], timeout_s=1.0)
    assert completed.returncode != 0
    assert "Timeout (0:00:" in completed.stderr
    assert "in worker" in completed.stderr


def test_a_process_of_its_own_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_joined()
    assert joined_rank() == 0
