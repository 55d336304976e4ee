"""The same call in the ranks of a torchrun job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.lab.config import ParameterError
from labkit.lab.runs.measure import resume
from labkit.lab.runs.store import Run
from labkit.parallel.launch import launch, run_ranks
from labkit.parallel.ranks import torchrun, worker
from labkit.parallel.ranks.torchrun import describe_hosts, host_identity, label_hosts
from labkit.parallel.ranks.worker import use_device
from labkit.studies import load_lab
from tests.lab.test_torchrun import MEASURE, assert_measured

TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
JOB = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

# What every rank prints is one line, so that the lines of two ranks do not mix.
SCRIPT = """
import json, os, sys, time
from contextlib import suppress
import psutil, torch, torch.distributed as dist
from labkit.__main__ import main
from labkit.parallel.collectives import all_reduce
from labkit.parallel.launch import Row, launch, run_ranks
from labkit.parallel.ranks import torchrun
from labkit.parallel.ranks.results import current_alternative

rank = int(os.environ["RANK"])

def total(group=None):
    tensor = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(tensor, group=group)
    return tensor.item()

def worker(point):
    yield {"sum": total(dist.new_group()), "pid": os.getpid(),
    "loopback": os.environ.get("GLOO_SOCKET_IFNAME"),
        "place": [torchrun.ranks_here(2), torchrun.read_variable("LOCAL_RANK")]}
    if point == "fails" and rank == 1:
        raise ValueError("rank 1 has had enough")
    if point == "one fails":
        current_alternative.begin("one")
        if rank == 1:
            raise ValueError("deliberately")
        all_reduce(torch.ones(1))
    if point == "fails beside a hang":
        if rank == 0:
            time.sleep(1000)
        raise ValueError("while rank 0 hangs")
    if point == "dies" and rank == 1:
        os._exit(3)
    if point == "hangs":
        current_alternative.begin("one")
        time.sleep(1000 if rank == 1 else 0)
    all_reduce(torch.ones(10))  # which rank 1 does not enter if it fails
    dist.barrier()

def die_between():
    items = []
    for item in launch(worker, ["a", "b"], world_size=2, timeout_s=3600):
        items.append(plain(item))
        if len(items) == 2:
            os.kill(items[1][3]["pid"], 9)  # rank 1's
            # until its parent has seen it, and has had a while to report it
            while psutil.pid_exists(items[1][3]["pid"]):
                time.sleep(0.01)
            time.sleep(0.3)
    return items

def plain(item):
    if isinstance(item, Row):
        return ["row", item.index, item.rank, item.values]
    return ["end", item.index, item.status, item.reason, item.facts]

def measure(points, **options):
    options = {"world_size": 2, "timeout_s": 3600} | options
    return [plain(item) for item in launch(worker, points, **options)]

def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)

def summarize():
    # Were the end of a failed point a matter of time-outs, the job would not end in time.
    results = {
        "works": measure(["a", "b"]),
        "other size": refused(lambda: launch(worker, ["a"], world_size=4)),
        "fails": measure(["a", "fails", "fails", "b", "one fails", "b"]),
        "dies": measure(["dies", "b"]),
        "hangs": measure(["hangs", "b"], timeout_s=3),
        "fails beside a hang": measure(["fails beside a hang", "b"], timeout_s=2),
        "died between": die_between(),
        "fails at the end": measure(["fails"]),
    }
    store = torchrun.job_store().underlying_store
    results["keys"] = [key for key in store.list_keys() if "labkit" in key]
    for item in launch(worker, ["a", "b"], world_size=2, timeout_s=3600):
        break  # and request no more
    results["run_ranks"] = run_ranks(total, world_size=2)
    results["hosts"] = [*torchrun.ranks_by_host().values()]
    results["loopback"] = os.environ.get("GLOO_SOCKET_IFNAME")
    dist.init_process_group("gloo")  # the caller's
    results["callers group"] = [len(measure(["a"])), total()]
    dist.destroy_process_group()  # torch may abort at exit otherwise
    return {"rank": rank, "pid": os.getpid(), "is job": torchrun.is_job_rank(), **results}

print(json.dumps(summarize()) + "\\n", end="", flush=True)
sys.argv[1:] = json.loads(os.environ["ARGUMENTS"])
with suppress(SystemExit):
    main()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each rank printed, by rank. One job has all launches: it is three programs that import
    torch."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    environment |= {"LABKIT_HOME": str(directory), "ARGUMENTS": json.dumps(MEASURE)}
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert (job.returncode, len(lines)) == (0, 2), job.stderr
    return sorted(lines, key=lambda line: line["rank"])


def ends(items: list[Any]) -> list[Any]:
    return [item[1:4] for item in items if item[0] == "end"]


def test_points_run_in_the_ranks_of_the_job(ranks: list[dict[str, Any]]) -> None:
    items = ranks[0]["works"]
    assert ranks[1]["works"] == []  # the others take part and yield nothing
    rows = [item[1:] for item in items if item[0] == "row"]
    assert [row[:2] for row in rows] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    pids = [row[2]["pid"] for row in rows]
    assert pids[:2] == pids[2:]
    # two processes of the job, and a rank of each
    assert len({*pids, *(rank["pid"] for rank in ranks)}) == 4
    assert {(row[2]["sum"], row[2]["loopback"]) for row in rows} == {(3.0, "lo")}
    assert [row[2]["place"] for row in rows] == [[2, 0], [2, 1]] * 2
    assert ends(items) == [[0, "ok", None], [1, "ok", None]]
    facts = items[-1][4]
    assert (facts["start_method"], facts["world_size"]) == ("torchrun", 2)
    assert [rank["run_ranks"] for rank in ranks] == [[3.0, 3.0], []]
    assert [(rank["is job"], rank["hosts"], rank["loopback"]) for rank in ranks] == [
        (True, [[0, 1]], None)
    ] * 2


def test_the_callers_process_group_is_not_replaced(ranks: list[dict[str, Any]]) -> None:
    assert [rank["callers group"] for rank in ranks] == [[3, 3.0], [0, 3.0]]


def test_another_world_size_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert all("needs 4 ranks, but this job has 2" in rank["other size"] for rank in ranks)


def test_all_ranks_agree_on_a_failure_and_carry_on(ranks: list[dict[str, Any]]) -> None:
    failed = ["failed", "rank 1: ValueError: rank 1 has had enough"]
    fine = ["ok", None]
    named = ["failed", "rank 1: ValueError: deliberately, in one"]
    expected = [fine, failed, failed, fine, named, fine]
    assert ends(ranks[0]["fails"]) == [[index, *end] for index, end in enumerate(expected)]
    assert ends(ranks[0]["fails at the end"]) == [[0, *failed]]


def test_the_jobs_store_does_not_fill_up(ranks: list[dict[str, Any]]) -> None:
    """Some 20 points in 10 groups were measured, and the job may measure for days."""
    assert all(len(rank["keys"]) < 50 for rank in ranks), ranks[0]["keys"]


def test_a_death_and_a_hang_cost_a_point(ranks: list[dict[str, Any]]) -> None:
    assert ends(ranks[0]["dies"]) == [[0, "failed", "rank 1 exited with code 3"], [1, "ok", None]]
    hang, after = ends(ranks[0]["hangs"])
    assert hang[:2] == [0, "timeout"]
    assert "still running after 3 s (timeout_s), in one" in hang[2]
    assert after == [1, "ok", None]
    assert ends(ranks[0]["fails beside a hang"])[0] == [
        0,
        "failed",
        "rank 1: ValueError: while rank 0 hangs",
    ]
    assert ends(ranks[0]["died between"]) == [[0, "ok", None], [1, "ok", None]]


def test_the_command_measures_by_the_ranks_that_exist(
    directory: Path, ranks: list[dict[str, Any]]
) -> None:
    (path,) = directory.glob("data/runs/all_reduce/*.jsonl")
    assert_measured(Run.load(path))


# Variables of a job that is not there


@pytest.fixture
def set_job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_variables(**variables: str) -> None:
        for name, value in (JOB | TORCHRUN | variables).items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_left_over_variables_are_named_at_once(
    set_job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job()
    with pytest.raises(
        ValueError, match=r"needs 2 ranks, but this job has 4; RANK=0, WORLD_SIZE=4, .* unset them"
    ):
        run_ranks(int, world_size=2)
    monkeypatch.setattr(torchrun, "CONNECT_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(
        ValueError, match=r"a job whose store answers; RANK=0, WORLD_SIZE=4, .* unset them"
    ):
        run_ranks(int, world_size=4)  # of a job that is over
    set_job(WORLD_SIZE="four")
    with pytest.raises(ValueError, match="WORLD_SIZE: expected a whole number in the environment"):
        launch(lambda point: None, [None], world_size=4)
    for name in TORCHRUN:  # another launcher
        set_job()
        monkeypatch.delenv(name)
        with pytest.raises(
            ValueError,
            match=r"expected .*torchrun.*RANK=0, WORLD_SIZE=4.*unset them if there is none",
        ):
            run_ranks(int, world_size=4)
        with pytest.raises(ParameterError, match="unset them"):
            resume(load_lab("all_reduce"), Path("no run"))  # one line of the command line


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
    assert label_hosts([("c", "123456"), ("c", "abcdef"), ("c", "123456")]) == {
        "c-1234": [0, 2],
        "c-abcd": [1],
    }
    assert host_identity() == host_identity()
    assert describe_hosts({"a": [0, 1, 2], "b": [4]}) == "ranks 0, 1, 2 on a; rank 4 on b"


@pytest.mark.parametrize(
    ("variables", "rank", "n_gpus", "device"),
    [
        # Two ranks on each of two nodes with eight GPUs, under torchrun: the third rank is its
        # node's first.
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
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(worker, "cores_beside", lambda index: worker.ALL_CORES)
    assert use_device("cpu") == "cpu"
    assert use_device("cuda", rank) == device
    assert current == [device]
