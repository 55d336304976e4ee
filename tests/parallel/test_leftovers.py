"""Whatever ends a launch, it leaves no process and no directory behind, and nobody outside can connect."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from labkit.parallel.launch import PointEnd, Row, launch
from labkit.parallel.ranks.process import interrupts_deferred
from tests.parallel.waiting import is_gone, wait_until

MARK = "LABKIT_TEST_MARK"

# Two ranks report that they are there, then each does for ever what the test asks of it: one word for both, or one a
# rank. No guard, no closing: as in a first notebook cell.
SCRIPT = """
import os, sys, time
import psutil, torch, torch.distributed as dist
from labkit.parallel.launch import launch, run_ranks

sys.path.insert(0, "")  # the working directory comes first, as in a kernel

def worker(hows):
    yield {"pid": os.getpid()}
    how = (hows.split("+") * 2)[dist.get_rank()]
    if how == "asleep":
        time.sleep(1000)
    if how == "blocked":
        dist.recv(torch.ones(1), src=1 - dist.get_rank())
    if how == "child":
        os.system("sleep 1000")

print(run_ranks(lambda: "ready", world_size=2), flush=True)
print({os.getpgid(child.pid) == os.getpgrp() for child in psutil.Process().children()})
for item in launch(worker, sys.argv[1:], world_size=2):
    print(item, flush=True)
"""


class Script:
    """A Python process of its own that launches ranks, with all that descends from it."""

    def __init__(self, directory: Path) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="labkit-"))  # short: sockets lie in it, of 107 characters
        self._elsewhere = directory / "elsewhere"  # files of the working directory do not matter, whatever their names
        self._elsewhere.mkdir()
        for module in ("random", "statistics", "torch"):
            text = f"raise SystemExit('{module}.py of the working directory')\n"
            (self._elsewhere / f"{module}.py").write_text(text)
        self._path = directory / "script.py"
        self._path.write_text(SCRIPT)
        self._mark = uuid.uuid4().hex

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, MARK: self._mark, "TMPDIR": str(self.temporary)}
        command = [sys.executable, str(self._path), *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=self._elsewhere,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def wait_for_rows(self, number: int) -> list[int]:
        """Read its output until it has printed so many rows; the pids of the ranks. What comes first is in `begun`."""
        assert self.process.stdout is not None
        rows: list[int] = []
        self.begun: list[str] = []
        while len(rows) < number:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            if line.startswith("Row("):
                rows.append(int(line.split("'pid': ")[1].split("}")[0]))
            else:
                self.begun.append(line.strip())
        return rows

    def survivors(self) -> list[str]:
        """Processes that carry this script's mark, and directories it made."""
        return [*self._processes(), *(str(path) for path in self.temporary.iterdir())]

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield f"{process.pid} {process.cmdline()}"

    def kill(self) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    process.kill()
        self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.kill()


def children() -> set[psutil.Process]:
    """What descends from this process."""
    return set(psutil.Process().children(recursive=True))


@pytest.mark.parametrize(
    ("number", "how"),
    [
        # Ranks that are stopped, which can do even less, do not survive it either.
        pytest.param(signal.SIGKILL, "blocked", marks=pytest.mark.slow),
        # Neither would notice the end of the other.
        pytest.param(signal.SIGKILL, "asleep+child", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "blocked", marks=pytest.mark.faults),
        pytest.param(signal.SIGINT, "asleep", marks=pytest.mark.slow),
    ],
)
def test_nothing_survives_the_parent(script: Script, number: signal.Signals, how: str) -> None:
    script.start(how)
    script.wait_for_rows(2)
    script.process.send_signal(number)
    script.process.wait(20)
    assert script.process.returncode == -number
    assert wait_until(lambda: not script.survivors()), script.survivors()


def test_nothing_survives_a_ctrl_c_that_reaches_every_process(script: Script) -> None:
    script.start("blocked")
    script.wait_for_rows(2)
    os.killpg(script.process.pid, signal.SIGINT)
    _, errors = script.process.communicate(timeout=20)
    assert errors.count("Traceback") == 1, errors
    assert wait_until(lambda: not script.survivors()), script.survivors()


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(slice(0, 1), marks=pytest.mark.faults, id="one stopped"),
        pytest.param(slice(0, 2), id="all stopped"),
    ],
)
def test_stopped_ranks_do_not_survive_either(script: Script, stopped: slice) -> None:
    script.start("blocked")
    for pid in script.wait_for_rows(2)[stopped]:
        os.kill(pid, signal.SIGSTOP)
    script.process.kill()
    assert wait_until(lambda: not script.survivors()), script.survivors()


def test_a_script_without_a_guard_works_and_leaves_nothing_even_if_its_fork_server_is_killed(script: Script) -> None:
    """A kernel that is shut down may kill all its children first."""
    script.start("blocked", "works")
    script.wait_for_rows(2)
    for child in psutil.Process(script.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # what goes with the fork server
            if "forkserver" in " ".join(child.cmdline()):
                child.kill()
    output, errors = script.process.communicate(timeout=60)
    assert script.process.returncode == 0, errors
    # a kernel waits at its end for children in its own process group
    assert script.begun == ["['ready', 'ready']", "{False}"]
    assert "status='failed'" in output
    assert "status='ok'" in output, errors  # with a new server
    assert wait_until(lambda: not script.survivors()), script.survivors()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks of this test have their directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


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
    assert all(wait_until(lambda row=row: is_gone(row.values["pid"])) for row in rows)  # type: ignore[misc]
    assert all(wait_until(lambda row=row: is_gone(row.values["child"])) for row in rows)  # type: ignore[misc]
    assert not list(temporary.glob("labkit-*"))


@pytest.mark.parametrize("moment", ["nobody knows its id", "it waits for the others"])
def test_an_interrupt_while_a_rank_starts_leaves_nothing(
    moment: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for the others would, left alone, look for their file, which is gone, for minutes."""
    assert [end.status for end in launch(lambda _: None, [None], world_size=1) if isinstance(end, PointEnd)] == ["ok"]
    before = children()
    owner, name, has_come = {
        "nobody knows its id": (multiprocessing.forkserver, "connect_to_new_process", lambda: children() > before),
        "it waits for the others": (ForkServerProcess, "start", lambda: any(temporary.glob("labkit-*/store"))),
    }[moment]
    start = getattr(owner, name)

    def interrupted(*arguments: Any) -> Any:
        result = start(*arguments)
        assert wait_until(has_come)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(launch(report_and_sleep, [None], world_size=2))
    assert wait_until(lambda: children() <= before), children() - before
    assert not list(temporary.glob("labkit-*"))


def interrupt_twice(reached: list[str]) -> None:
    with interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after the first")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after the second")


def test_a_second_interrupt_is_not_deferred() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice(reached)
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_temporary_files_of_a_rank_go_with_its_group(temporary: Path) -> None:
    def worker(_: None) -> Iterator[dict[str, Any]]:
        yield {"folder": tempfile.mkdtemp(), "inherited": os.environ["TMPDIR"]}

    folders = [Path(item.values["folder"]) for item in launch(worker, [None], world_size=2) if isinstance(item, Row)]
    assert len(folders) == 2
    for folder in folders:
        assert temporary in folder.parents
        assert not folder.exists()
    assert not list(temporary.glob("labkit-*"))


def test_a_sweep_leaves_nothing(temporary: Path) -> None:
    def worker(point: int) -> None:
        assert point != 2

    open_files = []
    for _ in range(3):
        ends = [item for item in launch(worker, [1, 2, 3], world_size=2) if isinstance(item, PointEnd)]
        assert [end.status for end in ends] == ["ok", "failed", "ok"]
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
        tree = [psutil.Process(row.values["pid"]) for row in rows]
        sockets = [socket for process in tree for socket in process.net_connections("inet")]
        ours = [socket for process in children() for socket in process.net_connections("inet")]
    listening = [socket for socket in [*sockets, *ours] if socket.status == psutil.CONN_LISTEN]
    assert listening  # gloo's, one a rank
    assert {socket.laddr.ip for socket in listening} <= {"127.0.0.1", "::1"}


ORPHAN = """
import sys
import time
from pathlib import Path
from labkit.parallel.ranks import rank

rank.STORE_TIMEOUT_S = 1.0
store = rank._make_store(Path(sys.argv[1]), 2)
time.sleep(1.5)
print("goes on", flush=True)
store = rank._make_store(Path(sys.argv[2]), 2)
"""


def test_a_rank_whose_directory_is_gone_before_it_joins_the_group_ends(tmp_path: Path) -> None:
    """As when the parent is killed while its ranks start: torch would hold the interpreter for five minutes."""
    (tmp_path / "there").mkdir()
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "there"), str(tmp_path / "gone")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "goes on\n"  # when it has the first, nothing ends it later
    assert ended.returncode == 1
    assert "Timeout (" in ended.stderr  # and not torch's own error
    assert "in _make_store" in ended.stderr
