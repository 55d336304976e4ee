"""The fork server's process, and the leaders and ranks that are forked from it.

The server runs this file as a script, and so imports nothing of labkit: what a rank imports is as
it is when its group starts. `fork_server` says what each of these processes guarantees.
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
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import psutil

STACKS_SIGNAL = signal.SIGUSR1
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
# Messages have fixed lengths, since sockets are streams: a request is the group's directory, and no
# path is longer than this (PATH_MAX); a report is JSON. Both are padded.
REQUEST_BYTES = 4096
REPORT_BYTES = 512


def end_session(leader: int, directory: Path) -> None:
    """Kill the other processes of a leader's session, and remove the directory.

    Also those that they start meanwhile: hence the loop, which gives up on a process that not even
    SIGKILL ends, as in an uninterruptible system call.
    """
    pause_s = 0.001
    while sum(_kill_member(leader, pid) for pid in psutil.pids()) and pause_s < 5.0:
        time.sleep(pause_s)
        pause_s *= 2
    shutil.rmtree(directory, ignore_errors=True)


def _kill_member(session: int, pid: int) -> bool:
    """Kill a process if it is another one of the session, and alive; return whether it is."""
    with contextlib.suppress(OSError, psutil.Error):  # it has ended
        is_member = os.getsid(pid) == session and pid != os.getpid()
        if is_member and psutil.Process(pid).status() not in ENDED:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


# In the server


def _serve(control: socket.socket) -> NoReturn:
    """Fork a leader per group, and clean up after leaders.

    Until the last process that holds the other end of `control` ends.
    """
    leaders: dict[int, Path] = {}  # process id -> the group's directory
    ended, _waking = _watch_children()
    has_callers = True
    while has_callers or leaders:
        ready = connection.wait([ended, control] if has_callers else [ended])
        if ended in ready:
            ended.recv(4096)
            _reap_leaders(leaders)
        if control in ready:
            request, descriptors, *_ = socket.recv_fds(control, REQUEST_BYTES, 3)
            has_callers = bool(request)
            if has_callers:
                directory = Path(os.fsdecode(request.rstrip(b"\0")))
                leader = os.fork()
                if leader == 0:
                    control.close()
                    _lead_group(directory, *descriptors)  # does not return
                leaders[leader] = directory
            for descriptor in descriptors:
                os.close(descriptor)
    os._exit(0)  # at a normal end Python may warn of the sockets, which are open


def _reap_leaders(leaders: dict[int, Path]) -> None:
    """Remove leaders that have ended, and end the sessions of those that were killed."""
    for leader in list(leaders):
        pid, status = os.waitpid(leader, os.WNOHANG)
        if pid == leader:
            directory = leaders.pop(leader)
            if status != 0:  # it was killed; else it has left nothing
                end_session(leader, directory)


# In a leader


def _lead_group(directory: Path, group: int, content: int, *callers: int) -> NoReturn:
    """Fork the ranks and report their starts and ends, until the caller ends or closes the group.

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
        numbers, run_rank = _adopt_state(content)
        for rank in numbers:
            if connection.wait([reports, *callers], 0.0):
                return  # type: ignore[misc]  # by way of `finally`
            ranks[rank] = _fork_rank(rank, directory, run_rank, reports, ended, waking)
        _report_ends(ranks, reports, ended, callers)
    except Exception as error:
        reason = f"the leader of the ranks failed: {type(error).__name__}: {error}"
        # Else it might be too long as JSON.
        _report(reports, {"reason": reason.encode("ascii", "replace").decode()[:200]})
    finally:
        end_session(os.getpid(), directory)
        for process in ranks.values():
            process.join(1.0)  # else it may stay a zombie
        os._exit(0)


def _report_ends(
    ranks: dict[int, BaseProcess],
    reports: socket.socket,
    ended: socket.socket,
    callers: Sequence[int],
) -> None:
    """Report ranks that end, and make them write their stacks when asked, until the caller ends or
    closes the group."""
    while True:
        ready = connection.wait([reports, ended, *callers])
        if any(caller in ready for caller in callers):
            return
        if reports in ready:
            if not reports.recv(1):
                return
            for process in ranks.values():
                os.kill(process.pid, STACKS_SIGNAL)  # type: ignore[arg-type]  # it was started
        if ended in ready:
            ended.recv(4096)
        for rank in [rank for rank, process in ranks.items() if process.exitcode is not None]:
            _report(reports, {"rank": rank, "code": ranks.pop(rank).exitcode})


def _adopt_state(content: int) -> tuple[list[int], Callable[..., None]]:
    """Take over the caller's variables, paths and working directory.

    Return the numbers of the ranks, and what each runs, with the payload.
    """
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
    # Imported here, not in the server: edits of the module take effect with the next group.
    module, name = state["run_rank"]
    return state["ranks"], partial(getattr(importlib.import_module(module), name), payload)


def _report(group: socket.socket, report: Mapping[str, Any], *descriptors: int) -> None:
    with contextlib.suppress(OSError):  # the caller has ended, or does not listen
        content = json.dumps(report).encode().ljust(REPORT_BYTES)
        socket.send_fds(group, [content], descriptors, socket.MSG_DONTWAIT)


def _watch_children() -> tuple[socket.socket, socket.socket]:
    """Return a socket that becomes readable when a child ends, and its other end, to keep open."""
    ended, waking = socket.socketpair()
    waking.setblocking(False)
    # Python writes to `waking` only for signals that have a handler.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    return ended, waking


def _fork_rank(
    rank: int, directory: Path, run_rank: Callable[..., None], *inherited: socket.socket
) -> BaseProcess:
    """Fork a rank, which closes the `inherited` sockets; report it through the first of them."""
    # The server has imported it, and a module imports nothing here that the caller has not.
    import torch.multiprocessing

    name = f"labkit-rank-{rank}"
    leader = os.getpid()
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        # In the rank. A signal to its process group spares the others.
        os.setpgid(0, 0)
        if sys.platform == "linux":
            prctl = ctypes.CDLL(None).prctl
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            prctl(15, name.encode())  # PR_SET_NAME, by which `pgrep` finds it
        # The leader may have ended before the line above.
        if os.getppid() != leader:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Else the other ends would see no end of file while this rank lives.
        ours.close()
        for each in inherited:
            each.close()
        log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        run_rank(theirs, rank, directory)

    process = torch.multiprocessing.get_context("fork").Process(target=run, name=name)
    with ours, theirs:
        process.start()  # forks
        _report(inherited[0], {"rank": rank, "leader": leader}, ours.fileno())
    return process


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, STACKS_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    # PYTHONWARNINGS=error is about the reader's code, and torch warns of itself when imported.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in sys.argv[2:]:
            importlib.import_module(module)
    gc.collect()
    # Else a collection in a rank would write to, and so copy, the pages that it shares with the
    # server.
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
