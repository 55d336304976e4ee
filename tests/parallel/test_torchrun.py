"""The same call in ranks that torchrun, or another launcher, has started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.launch import launch, run_ranks
from labkit.parallel.ranks import hosts, torchrun
from labkit.parallel.ranks.hosts import GLOO_INTERFACE, choose_gloo_interface, host_identity, label_hosts
from labkit.parallel.ranks.worker import use_device

JOB = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

# What every rank prints is one line, so that the lines of two ranks do not mix.
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
from labkit.parallel.launch import Retry, Row, launch, run_ranks
from labkit.parallel.ranks import current_alternative, torchrun

rank = int(os.environ["RANK"])

def total(group=None):
    tensor = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(tensor, group=group)
    return tensor.item()

def worker(point):
    yield {"sum": total(dist.new_group()), "pid": os.getpid(), "flag": os.environ.get("LABKIT_FLAG"),
        "place": [torchrun.ranks_here(2), torchrun.local_index()]}
    if point == "fails" and rank == 1:
        raise ValueError("rank 1 has had enough")
    if point == "one fails" and current_alternative.excluded_reason("one") is None:
        current_alternative.begin("one")
        if rank == 1:
            current_alternative.explain("failed: deliberately")
            raise ValueError("one")
        dist.barrier()
    if point == "hangs" and rank == 1:
        time.sleep(1000)
    dist.barrier()  # which rank 1 does not enter if it fails

def plain(item):
    if isinstance(item, Retry):
        return ["retry", item.index, item.alternative, item.reason]
    if isinstance(item, Row):
        return ["row", item.index, item.rank, item.values]
    return ["end", item.index, item.status, item.reason, item.facts]

def measure(points, **options):
    return [plain(item) for item in launch(worker, points, **{"world_size": 2, "timeout_s": 3600} | options)]

dist.init_process_group("gloo")  # the caller's
# Were the end of a failed point a matter of time-outs, the job would not end in time.
results = {
    "works": measure(["a", "b"], threads=2, environment={"LABKIT_FLAG": "up"}),
    "other size": measure(["a"], world_size=4),
    "fails": measure(["a", "fails", "fails", "b", "one fails", "b"]),
    "hangs": measure(["hangs"], timeout_s=2.0),
    "fails at the end": measure(["fails"]),
}
for item in launch(worker, ["a", "b"], world_size=2, timeout_s=3600):
    break  # and request no more
results["run_ranks"] = run_ranks(total, world_size=2)
results["callers group"] = total()
print(json.dumps({"rank": rank, "pid": os.getpid(), "is job": torchrun.is_job_rank(), **results}) + "\\n", end="")
"""

# Ranks of a launcher that only says who they are: rank 0 serves the store.
BARE = """
import json, sys, time
from pathlib import Path
from labkit.parallel.launch import run_ranks
from labkit.parallel.ranks import torchrun

rank, is_last = torchrun.job_rank(), Path(sys.argv[1])
torchrun.broadcast_from_first_rank(None)
torchrun.START_TIMEOUT_S = 0.1
if rank == 0:
    time.sleep(0.5)  # a download
assert torchrun.broadcast_from_first_rank("fetched" if rank == 0 else None) == "fetched"
place = [torchrun.ranks_here(2), torchrun.local_index(), [*torchrun.ranks_by_host().values()]]
results = run_ranks(lambda a: a, "b", world_size=2)
if rank == 0:
    torchrun.broadcast_from_first_rank("the last word")
    is_last.touch()
else:
    while not is_last.exists():
        time.sleep(0.01)
    assert torchrun.broadcast_from_first_rank(None) == "the last word"
print(json.dumps([place, results]))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> CompletedProcess[str]:
    """Two ranks that launch in all these ways. One job has them all: it is three programs that import torch."""
    directory = tmp_path_factory.mktemp("job")
    script = directory / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def ranks(job: CompletedProcess[str]) -> list[dict[str, Any]]:
    """What each rank printed, by rank."""
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    assert len(lines) == 2, job.stderr
    return sorted(lines, key=lambda line: line["rank"])


def ends(items: list[Any]) -> list[Any]:
    return [item[1:4] for item in items if item[0] == "end"]


def test_points_run_in_the_ranks_of_the_job(ranks: list[dict[str, Any]]) -> None:
    items = ranks[0]["works"]
    assert ranks[1]["works"] == []  # the others take part and yield nothing
    rows = [item[1:] for item in items if item[0] == "row"]
    assert [row[:2] for row in rows] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len({row[2]["pid"] for row in rows}) == 2
    assert {(row[2]["sum"], row[2]["flag"]) for row in rows} == {(3.0, "up")}
    assert [row[2]["place"] for row in rows] == [[2, 0], [2, 1]] * 2
    assert ends(items) == [[0, "ok", None], [1, "ok", None]]
    facts = items[-1][4]
    assert (facts["start_method"], facts["world_size"], facts["threads"]) == ("torchrun", 2, 2)
    assert [rank["run_ranks"] for rank in ranks] == [[3.0, 3.0], []]
    assert [rank["is job"] for rank in ranks] == [True, True]
    assert [rank["callers group"] for rank in ranks] == [3.0, 3.0]


def test_another_world_size_skips_every_point(ranks: list[dict[str, Any]]) -> None:
    assert ends(ranks[0]["other size"]) == [[0, "skipped", "needs 4 ranks, but this job has 2"]]
    assert ranks[1]["other size"] == []


def test_all_ranks_agree_on_a_failure_and_carry_on(ranks: list[dict[str, Any]]) -> None:
    failed = ["failed", "rank 1: ValueError: rank 1 has had enough"]
    fine = [[index, "ok", None] for index in range(6)]
    assert ends(ranks[0]["fails"]) == [fine[0], [1, *failed], [2, *failed], *fine[3:]]
    retries = [item[1:] for item in ranks[0]["fails"] if item[0] == "retry"]
    assert retries == [[4, "one", "failed: deliberately"]]
    assert ends(ranks[0]["fails at the end"]) == [[0, *failed]]


def test_a_hang_costs_its_point(job: CompletedProcess[str], ranks: list[dict[str, Any]]) -> None:
    ((index, status, reason),) = ends(ranks[0]["hangs"])
    assert (index, status) == (0, "timeout")
    assert re.match("rank [01] still running after 2 s", reason)
    assert job.returncode == 0, job.stderr  # and the launches after it were as they should be


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_ranks_that_torchrun_did_not_start_wait_for_rank_0_which_leaves_last(tmp_path: Path) -> None:
    variables = os.environ | JOB | {"WORLD_SIZE": "2", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BARE, str(tmp_path / "last")]
    running = [
        subprocess.Popen(command, env=variables | {"RANK": rank}, stdout=PIPE, stderr=PIPE, text=True) for rank in "01"
    ]
    try:
        output = [rank.communicate(timeout=120) for rank in running]
    finally:
        for rank in running:
            rank.kill()
    assert [rank.returncode for rank in running] == [0, 0], output
    assert [json.loads(text) for text, _ in output] == [[[2, 0, [[0, 1]]], ["b", "b"]], [[2, 1, [[0, 1]]], []]]


# Variables of a job that is not there


@pytest.fixture
def set_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets the variables of a job, and forgets its store afterwards."""

    def set_variables(**variables: str) -> None:
        for name, value in (JOB | variables).items():
            monkeypatch.setenv(name, value)

    yield set_variables
    torchrun.job_store.cache_clear()


def test_left_over_variables_are_named_at_once(
    set_job: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_job(MASTER_PORT=free_port())
    with pytest.raises(ValueError, match=r"needs 2 ranks, but this job has 4; RANK=0, WORLD_SIZE=4, .* unset them"):
        run_ranks(int, world_size=2)
    monkeypatch.setattr(torchrun, "START_TIMEOUT_S", 1.5)
    with pytest.raises(ValueError, match=r"were not found.*WORLD_SIZE=4.*unset them if there is none"):
        run_ranks(int, world_size=4)
    assert "labkit waits for the other ranks of the job; RANK=0, WORLD_SIZE=4," in capfd.readouterr().err
    set_job(WORLD_SIZE="four")
    with pytest.raises(ValueError, match="WORLD_SIZE: expected a whole number in the environment"):
        launch(lambda point: None, [None], world_size=4)


def test_a_single_left_over_variable_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not torchrun.is_job_rank()
    assert torchrun.job_rank() == 0
    assert run_ranks(dist.get_rank, world_size=2) == [0, 1]


# Hosts and devices


def test_ranks_are_grouped_by_host_and_hosts_of_one_name_told_apart() -> None:
    assert label_hosts([("a", "11"), ("a", "11"), ("b", "22")]) == {"a": [0, 1], "b": [2]}
    assert label_hosts([("c", "123456"), ("c", "abcdef"), ("c", "123456")]) == {"c-1234": [0, 2], "c-abcd": [1]}
    assert host_identity() == host_identity()
    assert (
        hosts.describe_hosts({"a": [0, 1, 2], "b": [4], "c": [3, 7]}) == "ranks 0–2 on a; rank 4 on b; ranks 3, 7 on c"
    )


def test_loopback_is_found_by_route_and_address() -> None:
    assert hosts.source_address("127.0.0.1") == "127.0.0.1"
    assert hosts.interface_with("127.0.0.1") == hosts.LOOPBACK
    assert hosts.source_address("no-such-host.invalid") == ""
    assert hosts.interface_with("203.0.113.1") is None


class _Store(dict[str, bytes]):
    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


@pytest.mark.parametrize(
    ("setting", "master", "other", "ranks_here", "interface"),
    [
        (None, "10.0.0.1", b"", 1, "eth7"),  # the interface that routes to the master
        (None, "127.0.1.1", b"10.0.0.2", 1, "eth7"),  # a master whose name is its loopback looks for the others
        (None, "127.0.1.1", b"", 1, None),  # gloo may know better
        ("ib0", "10.0.0.1", b"", 1, "ib0"),
        ("ib0", "10.0.0.1", b"", 2, "ib0"),
        (None, "10.0.0.1", b"", 2, hosts.LOOPBACK),
    ],
)
def test_the_interface_that_leads_to_the_other_hosts_is_chosen(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, master: str, other: bytes, ranks_here: int, interface: str
) -> None:
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    if setting:
        monkeypatch.setenv(GLOO_INTERFACE, setting)
    monkeypatch.setenv("MASTER_ADDR", "master")
    monkeypatch.setattr(hosts, "source_address", lambda host: {"master": master, "10.0.0.2": "10.0.0.1"}[host])
    monkeypatch.setattr(hosts, "interface_with", {"10.0.0.1": "eth7", "127.0.1.1": "lo"}.get)
    store = _Store({"labkit/address of rank 1": other})
    assert choose_gloo_interface(store, 0, 2, ranks_here) == interface
    assert (store.get("labkit/address of rank 0") == master.encode()) == (ranks_here == 1)  # others may wait for it


@pytest.mark.parametrize(
    ("variables", "rank", "n_gpus", "device"),
    [
        # Two ranks on each of two nodes with eight GPUs, under torchrun: the third rank is its node's first.
        ({"RANK": "2", "LOCAL_RANK": "0"}, None, 8, "cuda:0"),
        ({"RANK": "3", "LOCAL_RANK": "1"}, None, 8, "cuda:1"),
        # Ranks started here share what there is.
        (None, 3, 4, "cuda:3"),
        (None, 3, 2, "cuda:1"),
        (None, None, 2, "cuda:0"),  # a rank alone needs no process group
    ],
)
def test_ranks_take_the_gpus_of_their_machine_in_turn(
    set_job: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str] | None,
    rank: int | None,
    n_gpus: int,
    device: str,
) -> None:
    if variables:
        set_job(**variables)
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert use_device("cpu") == "cpu"
    assert use_device("cuda", rank) == device
    assert current == [device]
