"""Fork server: a process that has imported torch. Its forks are ready at once.

The server runs this file as a script, and forks a leader per group (`_lead_group`). The leader
takes over what the caller's process has set, and forks the ranks (`_fork_rank`), each a
`torch.multiprocessing` worker. If one of these processes ends, the others clean up after it:

* If the caller ends, or closes a group's connection, the leader kills the ranks with all that they
  have started, and removes the group's directory. The server ends with its last caller.
* If a leader ends, the kernel kills its ranks, even if they are stopped or hold the GIL
  (PR_SET_PDEATHSIG). The server kills the rest of the leader's session and removes the group's
  directory; the caller does so if the server ended, too.
* If the server ends, its groups go on, and the caller starts another for the next group.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import psutil

PRELOADED = ["torch", "torch.distributed"]  # modules that the server imports
STACKS_SIGNAL = signal.SIGUSR1
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
REQUEST_BYTES = 4096
REPORT_BYTES = 512  # of a message: JSON padded to a fixed length, since sockets are streams
# BLAS and OpenMP read these when the server loads torch: a process that forks must have one thread.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_lock = threading.RLock()
# Connection and process of the server, for this process and all that are forked from it; empty
# without one.
_server: list[tuple[socket.socket, Popen[bytes]]] = []


def start_server() -> int:
    """Start the server unless it runs; return its process id."""
    with _lock:
        if not _server:
            control, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-P", __file__, str(theirs.fileno()), *PRELOADED]
                env = os.environ | dict.fromkeys(_ONE_THREAD, "1")
                # In a session of its own it gets no Ctrl-C, and a Jupyter kernel that shuts down
                # does not wait for it.
                process = Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    start_new_session=True,
                    env=env,
                )
            _server.append((control, process))
        return _server[0][1].pid


def open_group(
    directory: Path, ranks: Sequence[int], environment: Mapping[str, str], payload: bytes
) -> socket.socket:
    """Start a group of ranks with a private directory, which its leader makes. Closing the
    connection ends the group.

    Each rank gets these variables, this process's `sys.path` and working directory, and the
    payload.
    """
    state = {
        "environment": dict(environment),
        "path": list(map(str, sys.path)),
        "argv": list(map(str, sys.argv)),
    }
    state |= {
        "cwd": str(Path.cwd()),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
    }
    request = (
        json.dumps({"directory": str(directory), "ranks": list(ranks)})
        .encode()
        .ljust(REQUEST_BYTES)
    )
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as closing, theirs, tempfile.TemporaryFile() as content:
        content.write(json.dumps(state).encode() + b"\n" + payload)
        content.seek(0)
        descriptors = [theirs.fileno(), content.fileno()]
        with contextlib.suppress(OSError, AttributeError):  # the system has no pidfd_open
            descriptors.append(os.pidfd_open(os.getpid()))
            closing.callback(os.close, descriptors[-1])
        closing.enter_context(_lock)
        while True:
            start_server()
            try:
                # one system call, which no interrupt cuts
                socket.send_fds(_server[0][0], [request], descriptors)
                return ours
            except OSError:  # it was killed
                _server.clear()


def read_report(group: socket.socket) -> dict[str, Any]:
    """Return a rank's start ("rank", "pipe", "leader"), its end ("rank", "code"), or why the group
    ended ("reason")."""
    content = b""
    descriptors = list[int]()
    with contextlib.suppress(OSError):
        content, descriptors, *_ = socket.recv_fds(group, REPORT_BYTES, 1)
    if not content:
        return {"reason": "the process that starts the ranks was killed"}
    report = json.loads(content)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
        report["pipe"] = connection.Connection(descriptor)
    return report


def end_session(leader: int, directory: Path) -> None:
    """Kill all other processes of a leader's session, and those that they start meanwhile; remove
    the directory."""
    pause_s = 0.001
    while sum(_kill_member(leader, pid) for pid in psutil.pids()) and pause_s < 5.0:
        time.sleep(pause_s)
        pause_s *= 2
    shutil.rmtree(directory, ignore_errors=True)


def _kill_member(session: int, pid: int) -> bool:
    """Kill a process if it is another one of the session, and alive; return whether it is."""
    with contextlib.suppress(OSError, psutil.Error):  # it has ended
        if (
            os.getsid(pid) == session
            and pid != os.getpid()
            and psutil.Process(pid).status() not in ENDED
        ):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


# The server


def _fork_leaders(control: socket.socket) -> None:
    """Fork a leader per group, and clean up after leaders, until the last process that holds
    `control` ends; never return."""
    leaders: dict[int, Path] = {}  # process id -> the group's directory
    ended, _waking = _watch_children()
    has_callers = True
    while has_callers or leaders:
        ready = connection.wait([ended, control] if has_callers else [ended])
        if ended in ready:
            ended.recv(4096)
            for leader, (pid, status) in [(each, os.waitpid(each, os.WNOHANG)) for each in leaders]:
                if pid:
                    directory = leaders.pop(leader)
                    if status:  # it was killed; else there is nothing left
                        end_session(leader, directory)
        if control in ready:
            content, descriptors, *_ = socket.recv_fds(control, REQUEST_BYTES, 3)
            has_callers = bool(content)
            if has_callers:
                request = json.loads(content)
                if (leader := os.fork()) == 0:  # a leader; ranks: `_fork_rank`
                    control.close()
                    _lead_group(Path(request["directory"]), request["ranks"], *descriptors)
                leaders[leader] = Path(request["directory"])
            for descriptor in descriptors:
                os.close(descriptor)
    os._exit(0)  # at a normal end Python may warn of the sockets, which are open


def _lead_group(
    directory: Path, numbers: Sequence[int], group: int, content: int, *callers: int
) -> None:
    """Fork the ranks and report their starts and ends, until the caller ends or closes the group;
    never return.

    Whatever the caller sends makes the ranks write their stacks. `callers`: a descriptor, if the
    system has it, that becomes ready when the caller ends, even if its children hold the group's
    connection.
    """
    os.setsid()
    reports = socket.socket(fileno=group)
    ended, waking = _watch_children()
    ranks: dict[int, BaseProcess] = {}
    try:
        directory.mkdir(mode=0o700)
        run_rank = _adopt_state(content)
        for rank in numbers:
            if connection.wait([reports, *callers], 0.0):
                return
            ranks[rank] = _fork_rank(rank, directory, run_rank, reports, ended, waking)
        while not {*callers} & {*(ready := connection.wait([reports, ended, *callers]))}:
            if reports in ready and not reports.recv(1):
                return
            if reports in ready:
                for process in ranks.values():
                    os.kill(process.pid, STACKS_SIGNAL)  # type: ignore[arg-type]  # it was started
            if ended in ready:
                ended.recv(4096)
            for rank in [rank for rank, process in ranks.items() if process.exitcode is not None]:
                _report(reports, {"rank": rank, "code": ranks.pop(rank).exitcode})
    except Exception as error:
        reason = f"the leader of the ranks failed: {type(error).__name__}: {error}"
        # else too long as JSON
        _report(reports, {"reason": reason.encode("ascii", "replace").decode()[:200]})
    finally:
        end_session(os.getpid(), directory)
        for process in ranks.values():
            process.join(1.0)  # else it may stay a zombie
        os._exit(0)


def _adopt_state(content: int) -> Callable[..., None]:
    """Take over the caller's variables, paths and working directory; return `run_rank` with the
    payload."""
    with open(content, "rb") as file:
        state = json.loads(file.readline())
        payload = file.read()
    os.environ.clear()
    os.environ.update(state["environment"])
    sys.path[:] = state["path"]
    sys.argv[:] = state["argv"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # the caller's script is not run again
    multiprocessing.current_process().authkey = bytes.fromhex(state["authkey"])
    os.chdir(state["cwd"])
    # not preloaded: edits take effect
    worker = importlib.import_module("labkit.parallel.ranks.worker")
    return partial(worker.run_rank, payload)


def _report(group: socket.socket, report: Mapping[str, Any], *descriptors: int) -> None:
    with contextlib.suppress(OSError):  # the caller has ended, or does not listen
        content = json.dumps(report).encode().ljust(REPORT_BYTES)
        socket.send_fds(group, [content], descriptors, socket.MSG_DONTWAIT)


def _watch_children() -> tuple[socket.socket, socket.socket]:
    """Return a socket that becomes readable when a child ends, and its other end, which must be
    kept open."""
    ended, waking = socket.socketpair()
    waking.setblocking(False)
    # without a handler nothing is written to `waking`
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    return ended, waking


def _fork_rank(
    rank: int, directory: Path, run_rank: Callable[..., None], *inherited: socket.socket
) -> BaseProcess:
    """Fork a rank, which closes the `inherited` sockets, and report it to the caller through the
    first of them."""
    import torch.multiprocessing

    leader = os.getpid()
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        os.setpgid(0, 0)  # a signal to its process group spares the others
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != leader:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ours.close()
        for each in inherited:
            each.close()  # else the other end would see no end of file while this rank lives
        log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        run_rank(theirs, rank, directory)

    process = torch.multiprocessing.get_context("fork").Process(
        target=run, name=f"labkit-rank-{rank}"
    )
    with ours, theirs:
        process.start()  # forks
        _report(inherited[0], {"rank": rank, "leader": leader}, ours.fileno())
    return process


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, STACKS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    # else a collection in a rank would write to, and so copy, the pages that it shares with the
    # server
    gc.freeze()
    _fork_leaders(socket.socket(fileno=int(sys.argv[1])))
