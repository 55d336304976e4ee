"""The same call inside ranks that torchrun started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from typing import Any

import pytest
import torch.distributed as dist

from labkit.parallel.ranks import joined_launch
from labkit.parallel.ranks.joined import is_joined, joined_rank
from labkit.parallel.ranks.own_group import OwnGroup
from labkit.parallel.ranks.rank import GroupPlan

# A script that trains, with process groups of its own, and asks for measurements on the way.
TRAINING = """
import json, os, sys
import torch, torch.distributed as dist
from datetime import timedelta
from labkit.parallel.launch import Row, launch, run_ranks

dist.init_process_group("gloo", timeout=timedelta(seconds=77))
pair = dist.new_group([0, 1])
torch.set_num_threads(3)
rank, default = dist.get_rank(), dist.group.WORLD

def state():
    policies = {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
    return [torch.get_num_threads(), sorted(policies), dict(os.environ), sys.excepthook]

def sum_over(group):
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total, group=group)
    return total.item()

def worker(point):
    assert dist.group.WORLD is not default and dist.get_rank() == rank
    yield {"sum": sum_over(dist.new_group())}
    if point == "fails":
        if rank == 1:
            raise ValueError("rank 1 has had enough")
        dist.barrier()  # which nobody else enters

before, told = state(), []
for points in (["a", "fails"], ["b"], ["fails"]):
    # Were the end of a failed point a matter of time-outs, the job would not end in time.
    for item in launch(worker, points, world_size=2, timeout_s=3600, threads=2):
        assert dist.get_rank(pair) == rank
        told.append([item.index, item.values["sum"]] if isinstance(item, Row) else [item.index, item.reason])
for item in launch(worker, ["a", "b"], world_size=2, timeout_s=3600):
    break  # and ask for no more
results = run_ranks(sum_over, None, world_size=2)
kept = dist.group.WORLD is default and dist.get_rank(pair) == rank and state() == before
more = [sum_over(None), sum_over(pair), sum_over(dist.new_group())]
dist.destroy_process_group()
results_without = run_ranks(sum_over, None, world_size=2)
clean = not dist.is_initialized()
print(json.dumps({"part": "training", "rank": rank, "told": told, "results": [results, results_without],
    "kept": kept and clean, "more": more}) + "\\n", end="", flush=True)
"""

# What every rank prints is one line, so that the lines of two ranks do not mix.
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from labkit.parallel.ranks.joined import is_joined, joined_rank
from labkit.parallel.launch import Again, Row, launch, run_ranks
from labkit.parallel.ranks import joined_launch, whose_turn

emptied = []
torch.cuda.is_initialized, torch.cuda.empty_cache = lambda: True, lambda: emptied.append(True)

def worker(point):
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    yield {"point": point, "total": total, "pid": os.getpid(), "flag": os.environ.get("LABKIT_FLAG"),
        "emptied": len(emptied)}
    if point == "fails" and dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    if point == "one fails" and whose_turn.why_left_out("one") is None:
        whose_turn.begin("one")
        if dist.get_rank() == 1:
            whose_turn.explain("failed: of one's own doing")
            raise ValueError("one")
        dist.barrier()
    if point == "hangs" and dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()

def told(item):
    if isinstance(item, Again):
        return ["again", item.index, item.alternative, item.reason]
    if isinstance(item, Row):
        return ["row", item.index, item.rank, item.values]
    return ["end", item.index, item.status, item.reason, item.facts]

assert is_joined() and joined_rank() == int(os.environ["RANK"])
for number, (points, world_size, timeout_s) in enumerate(json.loads(sys.argv[1])):
    if "hangs" in points:
        joined_launch.MARGIN_S = 1.0  # this deadline is meant to pass
    options = {"world_size": world_size, "timeout_s": timeout_s, "environment": {"LABKIT_FLAG": "up"}}
    first = [told(item) for item in launch(worker, points, **options)]
    second = [told(item) for item in launch(lambda point: [{"rank": dist.get_rank()}], ["again"], world_size=2)]
    results = run_ranks(lambda: dist.get_rank(), world_size=2)
    print(json.dumps({"part": f"launch {number}", "rank": joined_rank(), "pid": os.getpid(), "first": first,
        "second": second, "results": results, "flag": os.environ.get("LABKIT_FLAG")}) + "\\n", end="", flush=True)
"""

# Ranks of a launcher that only says who they are: rank 0 serves the store.
BARE = """
import json, sys, time
from pathlib import Path
from labkit.parallel.launch import run_ranks
from labkit.parallel.ranks import joined

rank, told = joined.joined_rank(), Path(sys.argv[1])
joined.broadcast_from_first_rank(None)
joined.START_TIMEOUT_S = 0.1
if rank == 0:
    time.sleep(0.5)  # a download
assert joined.broadcast_from_first_rank("fetched" if rank == 0 else None) == "fetched"
hosts = joined.ranks_by_host()
place = [joined.ranks_here(2), joined.index_on_this_node(), [*hosts.values()]]
results = run_ranks(lambda a: a, "b", world_size=2)
if rank == 0:
    joined.broadcast_from_first_rank("the last word")
    told.touch()
else:
    while not told.exists():
        time.sleep(0.01)
    assert joined.broadcast_from_first_rank(None) == "the last word"
print(json.dumps([place, results]))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> CompletedProcess[str]:
    """Two ranks that train, and then take part in a launch of as many ranks as there are, one of more, one in which
    rank 1 fails, twice, and one in which it hangs. One job has it all: each is three programs that import torch.
    """
    directory = tmp_path_factory.mktemp("job")
    # Points, ranks, and the time-out of a point in seconds. The time-out of each launch is its own: after those that
    # wait longer, the failures would not be found in time.
    launches = [
        (["a", "b"], 2, 60.0),
        (["a", "b"], 4, 60.0),
        (["a", "fails", "fails", "b", "one fails", "b"], 2, 1.0),
        (["hangs"], 2, 1.0),
    ]
    script = directory / "script.py"
    script.write_text(TRAINING + SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(script), json.dumps(launches)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def told_by_ranks(job: CompletedProcess[str]) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank told of a part of the job, by rank."""
    told = [json.loads(line) for line in job.stdout.splitlines()]

    def of(part: str) -> list[dict[str, Any]]:
        by_rank = sorted((said for said in told if said["part"] == part), key=lambda said: said["rank"])
        assert [said["rank"] for said in by_rank] == [0, 1], job.stderr
        return by_rank

    return of


def test_points_run_in_the_ranks_of_the_job(told_by_ranks: Callable[[str], list[dict[str, Any]]]) -> None:
    ranks = told_by_ranks("launch 0")
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


def test_another_world_size_skips_every_point(told_by_ranks: Callable[[str], list[dict[str, Any]]]) -> None:
    ranks = told_by_ranks("launch 1")
    reason = "needs 4 ranks, but this job has 2"
    assert [item[:4] for item in ranks[0]["first"]] == [["end", 0, "skipped", reason], ["end", 1, "skipped", reason]]
    assert ranks[1]["first"] == []


def test_all_ranks_agree_on_a_failure_and_carry_on(told_by_ranks: Callable[[str], list[dict[str, Any]]]) -> None:
    ranks = told_by_ranks("launch 2")
    ends = [item[1:4] for item in ranks[0]["first"] if item[0] == "end"]
    failed = ["failed", "rank 1: ValueError: rank 1 has had enough"]
    fine = [[index, "ok", None] for index in range(6)]
    assert ends == [fine[0], [1, *failed], [2, *failed], *fine[3:]]
    assert [item[1:] for item in ranks[0]["first"] if item[0] == "again"] == [[4, "one", "failed: of one's own doing"]]
    assert len([item for item in ranks[0]["first"] if item[:2] == ["row", 4]]) == 2  # of the second attempt only
    assert {item[4]["world_size"] for item in ranks[0]["first"] if item[0] == "end"} == {2}  # of those that failed, too
    assert ranks[0]["results"] == [0, 1]


def test_a_failure_elsewhere_aborts_what_a_rank_waits_for_under_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's collectives wait for the time-out otherwise. A group is pretended; the words of the ranks are real."""

    class Group:
        def __init__(self) -> None:
            self.aborted = 0

        def abort(self) -> None:
            self.aborted += 1

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(joined_launch, "job_store", lambda: store)
    for backend, word, times in (("nccl", joined_launch.FAILED, 1), ("nccl", "answered", 0), ("gloo", "failed", 0)):
        made, own = Group(), object.__new__(OwnGroup)
        own._backend = backend
        monkeypatch.setattr(OwnGroup, "_made", lambda self, made=made: [made])
        joint = joined_launch._JointLaunch(lambda _: None, GroupPlan(b"", 2, backend, "batch", 1, 5.0, {}), "launch")
        joint._group = own
        watch = joined_launch._Watch(f"{backend} {word}", joint._abort)
        store.set(f"{backend} {word}", word)
        assert watch.ends_as(20.0) == word
        assert made.aborted == times


def test_a_launch_leaves_the_process_groups_and_the_state_of_a_script_as_they_were(
    told_by_ranks: Callable[[str], list[dict[str, Any]]],
) -> None:
    first, second = told_by_ranks("training")
    failed = "rank 1: ValueError: rank 1 has had enough"
    assert first["told"] == [
        *([0, 3.0], [0, 3.0], [0, None], [1, 3.0], [1, 3.0], [1, failed]),
        *([0, 3.0], [0, 3.0], [0, None]),  # the failure of a launch's last point is no other's
        *([0, 3.0], [0, 3.0], [0, failed]),
    ]
    assert second["told"] == []
    assert first["results"] == [[3.0, 3.0]] * 2
    assert [said["kept"] for said in (first, second)] == [True, True]
    assert first["more"] == second["more"] == [3.0] * 3


def test_ranks_that_torchrun_did_not_start_wait_for_rank_0_which_leaves_last(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE, str(tmp_path / "told")]
    ranks = [
        subprocess.Popen(command, env=os.environ | job | {"RANK": rank}, stdout=PIPE, stderr=PIPE, text=True)
        for rank in "01"
    ]
    try:
        told = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert json.loads(told[0][0]) == [[2, 0, [[0, 1]]], ["b", "b"]]
    assert json.loads(told[1][0]) == [[2, 1, [[0, 1]]], []]


def test_a_hang_fails_the_job_loudly(job: CompletedProcess[str]) -> None:
    assert job.returncode != 0
    assert "Timeout (0:00:" in job.stderr
    assert "in worker" in job.stderr


def test_a_process_of_its_own_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_joined()
    assert joined_rank() == 0
