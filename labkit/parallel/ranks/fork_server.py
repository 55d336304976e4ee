"""Fork server: a process that has imported torch. Its forks are ready at once.

The server, which runs this file as a script, forks a leader per group (`_lead_group`). The leader forks the ranks
(`fork_rank`, each a `torch.multiprocessing` worker) that the caller requests (`request_rank`). If one of these
processes ends, the others clean up after it:

* If the caller ends, or closes a group's connection, the leader kills the ranks with all that they have started, and
  removes the group's directory. The server ends with its last caller.
* If a leader ends, the kernel kills its ranks, even if they are stopped or hold the GIL (PR_SET_PDEATHSIG). The server
  kills the rest of the leader's session and removes the group's directory.
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
import threading
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, NoReturn

PRELOADED = ["torch", "torch.distributed"]  # modules that the server imports
STACKS_SIGNAL = signal.SIGUSR1
REQUEST_BYTES, REPORT_BYTES = 4096, 256  # of a message: JSON padded to a fixed length, since sockets are streams
# BLAS and OpenMP read these when the server loads torch: a process that forks must have one thread.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

_lock = threading.Lock()
# Connection and process of the server, for this process and all that are forked from it; empty without one.
_server: list[tuple[socket.socket, Popen[bytes]]] = []


def start_server() -> int:
    """Start the server unless it runs; return its process id."""
    with _lock:
        if not _server:
            control, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-P", __file__, str(theirs.fileno()), *PRELOADED]
                env = os.environ | dict.fromkeys(_ONE_THREAD, "1")
                # In a session of its own it gets no Ctrl-C, and a Jupyter kernel that shuts down does not wait for it.
                process = Popen(
                    command, pass_fds=[theirs.fileno()], stdin=DEVNULL, stdout=DEVNULL, start_new_session=True, env=env
                )
            _server.append((control, process))
        return _server[0][1].pid


def open_group(directory: Path) -> socket.socket:
    """Open a group of ranks with a private directory, which its leader makes. Closing the connection ends the group."""
    ours, theirs = socket.socketpair()
    passed = [theirs.detach()]
    with contextlib.suppress(OSError, AttributeError):  # the system has no pidfd_open
        passed.append(os.pidfd_open(os.getpid()))
    try:
        while True:
            start_server()
            try:
                _send(_server[0][0], {"directory": str(directory)}, *passed)
                return ours
            except OSError:  # the server was killed
                _server.clear()
    finally:
        for descriptor in passed:
            os.close(descriptor)


def request_rank(group: socket.socket, rank: int, environment: Mapping[str, str]) -> connection.Connection[Any, Any]:
    """Have the leader fork a rank with these variables, and this process's `sys.path` and working directory."""
    ours, theirs = multiprocessing.Pipe()
    state = {"environment": dict(environment), "path": list(map(str, sys.path)), "argv": list(map(str, sys.argv))}
    state |= {"cwd": str(Path.cwd()), "authkey": bytes(multiprocessing.current_process().authkey).hex()}
    with theirs, contextlib.suppress(OSError):  # the leader has ended, and reported why
        _send(group, {"rank": rank}, theirs.fileno())
        ours.send_bytes(json.dumps(state).encode())
    return ours


def read_reports(group: socket.socket) -> list[tuple[int | None, int | str]]:
    """Return (rank, exit code) of each rank that has ended; (None, reason) if the whole group has."""
    content = b""
    with contextlib.suppress(OSError):  # the leader was killed before it read all requests
        content = group.recv(64 * REPORT_BYTES)
    if not content:
        return [(None, "the fork server of the ranks was killed")]
    return [json.loads(content[at : at + REPORT_BYTES]) for at in range(0, len(content), REPORT_BYTES)]


def _send(peer: socket.socket, request: Mapping[str, Any], *descriptors: int) -> None:
    """Send in one system call, so that an interrupt leaves nothing halfway."""
    socket.send_fds(peer, [json.dumps(request).encode().ljust(REQUEST_BYTES)], descriptors)


# The server


def _serve(control: socket.socket) -> None:
    """Fork a leader per group, and clean up after leaders, until the last process that holds `control` ends."""
    leaders: dict[int, str] = {}  # process id -> the group's directory
    ended, _waking = _watch_children()
    while True:
        ready = connection.wait([control, ended])
        if ended in ready:
            ended.recv(4096)
            for leader in list(leaders):
                _clean_up(leader, leaders, os.WNOHANG)
        if control in ready:
            content, descriptors, *_ = socket.recv_fds(control, REQUEST_BYTES, 2)
            if not content:
                break
            directory = json.loads(content)["directory"]
            if (leader := os.fork()) == 0:  # a leader; ranks: `fork_rank`
                control.close()
                _lead_group(directory, *descriptors)
            leaders[leader] = directory
            for descriptor in descriptors:
                os.close(descriptor)
    for leader in list(leaders):
        _clean_up(leader, leaders, 0)


def _clean_up(leader: int, leaders: dict[int, str], flags: int) -> None:
    """Reap a leader; if it was killed, kill what is left of its session, and remove the group's directory."""
    ended, status = os.waitpid(leader, flags)
    if ended:
        directory = leaders.pop(leader)
        if status != 0:
            _kill_session(leader)
            shutil.rmtree(directory, ignore_errors=True)


def _lead_group(directory: str, group: int, caller: int = -1) -> NoReturn:
    """Fork ranks as the caller requests them and report their ends, until the caller ends or closes the group.

    `caller`: a descriptor that becomes ready when the caller ends, even if its children hold the group's connection.
    """
    os.setsid()
    requests, (ended, waking) = socket.socket(fileno=group), _watch_children()
    watched: list[Any] = [requests, ended] if caller == -1 else [requests, ended, caller]
    ranks: dict[int, BaseProcess] = {}
    try:
        Path(directory).mkdir(mode=0o700)
        while caller not in (ready := connection.wait(watched)):  # no rank is forked for a caller that has ended
            if requests in ready:
                content, descriptors, *_ = socket.recv_fds(requests, REQUEST_BYTES, 1)
                if not content:
                    break
                rank = json.loads(content)["rank"]
                ranks[rank] = fork_rank(directory, rank, descriptors[0], [requests, ended, waking])
                os.close(descriptors[0])
            if ended in ready:
                ended.recv(4096)
            for rank, process in list(ranks.items()):
                if process.exitcode is not None:
                    _kill(process)  # and its children; ids are assigned in turn: this one is not in use again yet
                    _report(requests, rank, ranks.pop(rank).exitcode)
    except OSError as error:
        _report(requests, None, f"the ranks were not started: {error.strerror}")
    finally:
        for process in ranks.values():
            _kill(process)
        for process in ranks.values():
            process.join(1.0)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)


def _report(group: socket.socket, rank: int | None, how: int | str | None) -> None:
    with contextlib.suppress(OSError):  # the caller has ended, or does not listen
        group.send(json.dumps([rank, how]).encode().ljust(REPORT_BYTES), socket.MSG_DONTWAIT)


def _watch_children() -> tuple[socket.socket, socket.socket]:
    """Return a socket that becomes readable when a child ends, and its other end, which must be kept open."""
    ended, waking = socket.socketpair()
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to `waking`
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    return ended, waking


def fork_rank(directory: str, rank: int, pipe: int, inherited: Sequence[socket.socket]) -> BaseProcess:
    """Fork a rank, with a POSIX process group (setpgid) of its own. The rank closes the `inherited` sockets."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("fork")
    arguments = (os.getpid(), directory, rank, pipe, inherited)
    process = context.Process(target=_run_rank, args=arguments, name=f"labkit-rank-{rank}")
    process.start()
    with contextlib.suppress(OSError):  # the rank was faster
        os.setpgid(process.pid or 0, process.pid or 0)
    return process


def _kill(process: BaseProcess) -> None:
    """Kill the rank and all that it has started."""
    with contextlib.suppress(OSError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it was started


def _run_rank(leader: int, directory: str, rank: int, pipe: int, inherited: Sequence[socket.socket]) -> None:
    """Run in the new rank: tie it to the leader, adopt the caller's environment, measure points until told to end."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != leader:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in inherited:
        each.close()  # else the other end would see no end of file while this rank lives
    log = os.open(f"{directory}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    with connection.Connection(pipe) as caller:
        caller.send_bytes(json.dumps({"kind": "started", "pid": os.getpid()}).encode())
        state = json.loads(caller.recv_bytes())
        os.environ.clear()
        os.environ.update(state["environment"])
        sys.path[:], sys.argv[:] = state["path"], state["argv"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # the caller's script is not run again
        multiprocessing.current_process().authkey = bytes.fromhex(state["authkey"])
        os.chdir(state["cwd"])
        worker = importlib.import_module("labkit.parallel.ranks.worker")  # not preloaded: edits take effect
        worker.serve_points(caller, rank, Path(directory))


def _kill_session(session: int) -> None:
    """Kill the processes of a session, and those that they start meanwhile."""
    import psutil

    is_empty, deadline = False, time.monotonic() + 5.0
    while not is_empty and time.monotonic() < deadline:
        is_empty = True
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    is_empty = False
        time.sleep(0.01)


def _main(control: int, modules: Sequence[str]) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, STACKS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else a collection in a rank would write to, and so copy, the pages that it shares with the server
    _serve(socket.socket(fileno=control))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
