"""Whatever ends a launch leaves no process and no directory behind, and nobody outside can connect.

One matrix: what the ranks do, and who is killed, stopped or interrupted then.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from labkit.parallel.launch import PointEnd, Row, launch
from labkit.parallel.ranks import fork_server
from labkit.parallel.ranks.worker import run_rank
from tests.parallel.waiting import Program, is_gone, wait_until

# Two ranks report their ids, then each does for ever what the test requests. No guard, no closing:
# as in a notebook.
SCRIPT = """
import ctypes, os, subprocess, sys, time
import torch, torch.distributed as dist
from labkit.parallel.launch import launch, run_ranks
from labkit.parallel.ranks import fork_server

sys.path.insert(0, "")  # the working directory comes first, as in a kernel

def worker(how):
    yield {"pid": os.getpid(), "leader": os.getppid()}
    if how == "child" and dist.get_rank() == 1:
        os.system("sleep 1000")
    if how == "forks" and os.fork() == 0:
        time.sleep(1000)
    if how == "asleep":
        time.sleep(1000)
    if how == "GIL":
        ctypes.PyDLL(None).sleep(1000)
    if how != "works":
        dist.recv(torch.ones(1), src=1 - dist.get_rank())

print("starts", flush=True)
print(run_ranks(lambda: "ready", world_size=2), flush=True)
print("server", fork_server.start_server().pid, flush=True)
for item in launch(worker, sys.argv[1:], world_size=2):
    print(item, getattr(item, "status", ""), flush=True)
"""


class Script(Program):
    """A Python process that launches ranks."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        # files of the working directory do not matter, whatever their names
        self._elsewhere = directory / "elsewhere"
        self._elsewhere.mkdir()
        for module in ("random", "statistics", "torch"):
            text = f"raise SystemExit('{module}.py of the working directory')\n"
            (self._elsewhere / f"{module}.py").write_text(text)
        self._path = directory / "script.py"
        self._path.write_text(SCRIPT)
        self.ids: dict[str, int] = {}

    def start(self, *points: str) -> None:
        self.run([sys.executable, str(self._path), *points], self._elsewhere)
        self.ids = {"parent": self.process.pid}

    def wait_for_rows(self) -> None:
        """Read its output until both ranks have reported, and note all ids."""
        assert self.process.stdout is not None
        while "rank 1" not in self.ids or "rank 0" not in self.ids:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            if line.startswith("server"):
                self.ids["server"] = int(line.split()[1])
            if line.startswith("Row("):
                row = eval(line.strip(), {"Row": Row})
                self.ids |= {f"rank {row.rank}": row.values["pid"], "leader": row.values["leader"]}

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            os.kill(self.ids[name], number)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.kill()


def kill(*names: str) -> Callable[[Script], None]:
    return lambda script: script.signal(signal.SIGKILL, *names)


def stop_ranks_and_kill(*names: str) -> Callable[[Script], None]:
    def act(script: Script) -> None:
        script.signal(signal.SIGSTOP, "rank 0", "rank 1")
        script.signal(signal.SIGKILL, *names)

    return act


ENDS: dict[str, Callable[[Script], None]] = {
    "parent killed": kill("parent"),
    "parent terminated": lambda script: script.process.terminate(),
    "parent interrupted": lambda script: script.process.send_signal(signal.SIGINT),
    "Ctrl-C to all": lambda script: os.killpg(script.process.pid, signal.SIGINT),
    "ranks stopped, parent killed": stop_ranks_and_kill("parent"),
    "leader killed": kill("leader"),
    "leader, then parent killed": kill("leader", "parent"),
    "parent, then leader killed": kill("parent", "leader"),
    "server, then parent killed": kill("server", "parent"),
    "parent, then server killed": kill("parent", "server"),
    "leader and server killed": kill("leader", "server"),
    "ranks stopped, leader and parent killed": stop_ranks_and_kill("leader", "parent"),
}
ACTIVITIES = ("blocked", "asleep", "child", "forks", "GIL")
QUICK = ("ranks stopped, parent killed", "child")


def cells() -> Iterator[Any]:
    for end in ENDS:
        for activity in ACTIVITIES:
            marks = [] if (end, activity) == QUICK else [pytest.mark.faults]
            yield pytest.param(end, activity, marks=marks, id=f"{end}, {activity}")


@pytest.mark.parametrize(("end", "activity"), list(cells()))
def test_nothing_is_left(script: Script, end: str, activity: str) -> None:
    script.start(activity)
    script.wait_for_rows()
    time.sleep(0.1)  # until they do it
    ENDS[end](script)
    _, errors = script.process.communicate(timeout=30)
    if end == "Ctrl-C to all":
        assert errors.count("Traceback") == 1, errors
    script.assert_nothing_left()


@pytest.mark.faults
@pytest.mark.parametrize("delay_s", [n / 50 for n in range(140)])
def test_a_parent_that_is_killed_while_its_ranks_start_leaves_nothing(
    script: Script, delay_s: float
) -> None:
    script.start("blocked")
    assert script.process.stdout is not None
    assert script.process.stdout.readline() == "starts\n"
    time.sleep(delay_s)
    script.process.kill()
    script.assert_nothing_left()


# In this process


def test_a_leader_that_is_killed_before_it_has_read_everything_is_reported() -> None:
    ours, theirs = socket.socketpair()
    ours.send(b"s")
    theirs.close()
    assert fork_server.read_report(ours) == {
        "reason": "the process that starts the ranks was killed"
    }


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks of this test have their directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def own_server() -> Iterator[None]:
    """A fork server of this process alone, which loads little."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fork_server, "PRELOADED", ["torch.distributed"])
        patched.setattr(fork_server, "server", None)
        fork_server.start_server()
        yield
        server = fork_server.start_server()
        server.control.close()
        assert server.process is not None
        server.process.wait()


@pytest.mark.usefixtures("own_server")
def test_a_killed_server_costs_a_point_and_is_not_in_the_callers_process_group(
    temporary: Path,
) -> None:
    """A Jupyter kernel waits at its end for children in its process group."""

    def worker(point: str) -> Iterator[dict[str, Any]]:
        yield {"pid": os.getpid(), "leader": os.getppid()}
        if point == "blocked":
            dist.recv(torch.ones(1), src=1 - dist.get_rank())

    server = fork_server.start_server().pid
    rows = list[Row]()
    ends = list[PointEnd]()
    assert os.getpgid(server) == server
    for item in launch(worker, ["blocked", "works"], world_size=2):
        rows += [item] if isinstance(item, Row) else []
        ends += [item] if isinstance(item, PointEnd) else []
        if len(rows) == 2 and not ends:
            os.kill(server, signal.SIGKILL)
            os.kill(rows[0].values["leader"], signal.SIGKILL)
    assert [end.status for end in ends] == ["failed", "ok"]
    assert ends[0].reason == "the process that starts the ranks was killed"
    assert fork_server.start_server().pid != server
    assert wait_until(lambda: all(is_gone(row.values["pid"]) for row in rows))
    assert not list(temporary.glob("labkit-*"))


def report_and_sleep(point: None) -> Iterator[dict[str, Any]]:
    child = subprocess.Popen(["sleep", "1000"])
    yield {"pid": os.getpid(), "child": child.pid}
    time.sleep(1000)


@pytest.mark.parametrize("finish", ["close", "drop", "raise"])
def test_a_caller_that_stops_early_leaves_nothing(temporary: Path, finish: str) -> None:
    items = launch(report_and_sleep, [None], world_size=2)
    rows = [row for row in (next(items), next(items)) if isinstance(row, Row)]
    assert [path.stat().st_mode & 0o777 for path in temporary.glob("labkit-*")] == [0o700]
    if finish == "close":
        items.close()
    if finish == "drop":
        del items
    if finish == "raise":
        with pytest.raises(KeyboardInterrupt), closing(items):
            items.throw(KeyboardInterrupt)
    assert len(rows) == 2
    assert all(is_gone(row.values[name]) for row in rows for name in ("pid", "child"))
    assert not list(temporary.glob("labkit-*"))


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize(
    ("module", "name"),
    [(socket, "send_fds"), (fork_server, "open_group"), (fork_server, "read_report")],
)
def test_an_interrupt_while_ranks_start_leaves_nothing(
    module: Any, name: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while the error is kept with all its frames, as a notebook keeps its last one."""
    fork_server.start_server()  # it stays
    before = set(psutil.Process().children(recursive=True))
    original = getattr(module, name)

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - before

    def interrupted(*arguments: Any) -> Any:
        result = original(*arguments)
        # Else nothing would be left because nothing has begun.
        assert wait_until(lambda: bool(started()))
        os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        list(launch(lambda _: os._exit(1), [None], world_size=2))
    assert wait_until(lambda: not started())
    assert not list(temporary.glob("labkit-*"))
    assert kept.tb is not None


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize(
    ("error", "n_servers"),
    [
        (OSError("no buffer space"), 1),
        pytest.param(BrokenPipeError("gone"), 4, marks=pytest.mark.faults),
    ],
)
def test_a_lasting_error_of_the_server_fails_the_point_and_does_not_start_it_for_ever(
    error: OSError, n_servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts at a group, and in each another server if the first one was killed."""
    pids = []

    def send(*_: object) -> None:
        pids.append(fork_server.start_server().pid)
        assert len(pids) < 10
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", send)
        (end,) = launch(int, [None], world_size=1)
    assert isinstance(end, PointEnd)
    assert end.reason is not None
    assert str(error) in end.reason
    assert len(set(pids)) in (n_servers, n_servers - 1)
    assert list(launch(print, [None], world_size=1))[-1].status == "ok"


@pytest.mark.usefixtures("own_server")
def test_a_group_of_many_ranks_is_requested_whole(temporary: Path) -> None:
    """A request that is cut would end the server, and with it the next groups."""
    server = fork_server.start_server().pid
    connection, leader_end = socket.socketpair()
    with connection, leader_end:
        connection.shutdown(socket.SHUT_WR)  # the leader ends before it forks the first rank
        fork_server.open_group(
            leader_end, temporary / "group", range(10_000), os.environ, run_rank, b""
        )
    assert wait_until(lambda: not psutil.Process(server).children())
    assert list(launch(print, [None], world_size=1))[-1].status == "ok"
    assert fork_server.start_server().pid == server


# A caller that ends while a child of its own holds the connection. The process that it prints must
# end then.
WITH_A_CHILD = {
    "rank runs": (
        """
from labkit.parallel.launch import launch
items = launch(lambda _: [{"pid": os.getpid()}] * 2, [1], world_size=1)
print(next(items).values["pid"], flush=True)
if os.fork() == 0:
    os.close(1)
    os.read(0, 1)
os._exit(0)
"""
    ),
    "requests are pending": (
        """
server = psutil.Process(fork_server.start_server().pid)
server.suspend()
group, leader_end = socket.socketpair()
fork_server.open_group(leader_end, Path(sys.argv[1], "group"), [0], os.environ, run_rank, b"")
leader_end.close()
parent, child = os.getpid(), os.fork()
if child:
    print(child, flush=True)
    os._exit(0)
os.close(1)
while psutil.pid_exists(parent) and os.getppid() == parent:
    time.sleep(0.01)
server.resume()
while group.recv(4096):  # until the server has removed the group
    pass
os._exit(0)
"""
    ),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("rank runs", marks=pytest.mark.slow),
        pytest.param("requests are pending", marks=pytest.mark.faults),
    ],
)
def test_a_forked_child_does_not_keep_the_ranks_of_its_parent_alive(
    moment: str, tmp_path: Path
) -> None:
    """A group lives as long as the process that opened it, even if a child has inherited the
    connection."""
    ours, theirs = socket.socketpair()
    imports = (
        "import os, psutil, socket, sys, time\nfrom pathlib import Path\n"
        "from labkit.parallel.ranks import fork_server\n"
        "from labkit.parallel.ranks.worker import run_rank\n"
    )
    command = [sys.executable, "-c", imports + WITH_A_CHILD[moment], str(tmp_path)]
    with ours, theirs:
        output = subprocess.run(
            command, stdin=theirs, stdout=subprocess.PIPE, text=True, timeout=60, check=True
        ).stdout
        assert wait_until(lambda: is_gone(int(output)))
        assert list(tmp_path.iterdir()) == []


def test_a_sweep_leaves_no_files_and_no_descriptors(temporary: Path) -> None:
    def worker(point: int) -> Iterator[dict[str, Any]]:
        yield {"folder": tempfile.mkdtemp()}
        assert point != 2

    open_files = []
    for _ in range(3):
        items = list(launch(worker, [1, 2, 3], world_size=2))
        assert [item.status for item in items if isinstance(item, PointEnd)] == [
            "ok",
            "failed",
            "ok",
        ]
        assert all(
            temporary in Path(item.values["folder"]).parents
            for item in items
            if isinstance(item, Row)
        )
        assert not list(temporary.glob("labkit-*"))
        open_files.append(psutil.Process().num_fds())
    assert open_files[1] == open_files[2]


def test_nothing_listens_beyond_loopback() -> None:
    def worker(point: None) -> Iterator[dict[str, Any]]:
        dist.barrier()
        yield {"pid": os.getpid()}
        time.sleep(1000)

    with closing(launch(worker, [None], world_size=2)) as items:
        rows = [row for row in (next(items), next(items)) if isinstance(row, Row)]
        ranks = [psutil.Process(row.values["pid"]) for row in rows]
        processes = [
            psutil.Process(),
            psutil.Process(fork_server.start_server().pid),
            *ranks,
            *ranks[0].parents()[:1],
        ]
        sockets = [socket for process in processes for socket in process.net_connections("inet")]
    listening = [socket for socket in sockets if socket.status == psutil.CONN_LISTEN]
    assert listening  # gloo's, one per rank
    assert {socket.laddr.ip for socket in listening} <= {"127.0.0.1", "::1"}
