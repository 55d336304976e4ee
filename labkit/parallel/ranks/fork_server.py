"""Fork server: a process that has imported torch and forks ranks, each a `torch.multiprocessing` worker.

Three processes take part, and each ends what another leaves behind:

* The caller (`group.py`) opens a connection per group of ranks. When it is closed, or the caller ends, the server kills
  the ranks' process groups and removes the group's directory. It has one thread and never waits for a rank.
* If the server ends, the kernel kills its ranks, even if they are stopped or hold the GIL (PR_SET_PDEATHSIG). The
  cleaner, which is the server's parent, kills the rest of the server's session and removes the groups' directories. It
  does the same when the last caller ends, even while the server still imports torch.
* If the cleaner ends, the server ends its groups and itself.

The server runs this file as a script. A rank imports labkit and its worker: an edited file takes effect at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = ["torch", "torch.distributed"]  # modules that the server imports
STACKS_SIGNAL = signal.SIGUSR1
REQUEST_BYTES, REPORT_BYTES = 4096, 256  # JSON, padded, so that each is one record of its socket
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class _Group:
    connection: socket.socket
    directory: str
    caller: int | None = None  # a descriptor that becomes ready when the caller ends
    ranks: dict[int, BaseProcess] = field(default_factory=dict)
    is_over: bool = False

    def end(self) -> None:
        """Kill every rank and its children. The group is removed once all are reaped."""
        self.is_over = True
        for process in self.ranks.values():
            _signal(process, signal.SIGKILL)

    def reap(self) -> None:
        """Report ranks that have ended, and end what they have started."""
        for rank, process in list(self.ranks.items()):
            if process.exitcode is not None:
                _signal(process, signal.SIGKILL)  # ids are given out in turn: nobody else has this one yet
                del self.ranks[rank]
                self.report(rank, process.exitcode)

    def report(self, rank: int | None, how: int | str) -> None:
        with contextlib.suppress(OSError):  # the caller has ended, or does not listen
            self.connection.send(json.dumps([rank, how]).encode().ljust(REPORT_BYTES), socket.MSG_DONTWAIT)

    def remove(self) -> None:
        for process in self.ranks.values():
            process.join(1.0)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.connection.close()
        if self.caller is not None:
            os.close(self.caller)


def _serve(control: socket.socket, cleaner: socket.socket) -> None:
    """Open groups and fork their ranks until the last process that holds `control` ends, or the cleaner does."""
    groups: list[_Group] = []
    reaping, waking = socket.socketpair()
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to `waking`
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    try:
        while True:
            alive = [group for group in groups if not group.is_over]
            callers = {group.caller: group for group in alive if group.caller is not None}
            connections = {group.connection: group for group in alive}
            for ready in connection.wait([control, cleaner, reaping, *callers, *connections]):
                if ready is reaping:
                    reaping.recv(4096)
                elif ready in connections:
                    _answer(connections[ready], [control, cleaner, reaping, waking, *connections])
                elif ready in callers:
                    callers[ready].end()
                elif ready is cleaner or not _open_group(control, cleaner, groups):
                    return
            for group in list(groups):
                group.reap()
                if group.is_over and not group.ranks:
                    groups.remove(group)
                    group.remove()
    finally:
        for group in groups:
            group.end()
        for group in groups:
            group.remove()


def _open_group(control: socket.socket, cleaner: socket.socket, groups: list[_Group]) -> bool:
    """Open the group that a caller requests; False if there is no caller any more."""
    content, descriptors, *_ = socket.recv_fds(control, REQUEST_BYTES, 1)
    if not content:
        return False
    request = json.loads(content)
    group = _Group(socket.socket(fileno=descriptors[0]), request["directory"])
    groups.append(group)
    cleaner.sendall(f"{group.directory}\0".encode())
    try:
        Path(group.directory).mkdir(mode=0o700)
    except OSError as error:
        group.report(None, f"the ranks were not started: {error.strerror}")
        group.end()
    with contextlib.suppress(OSError, AttributeError):  # the system has no such descriptors
        group.caller = os.pidfd_open(request["caller"])
    return True


def _answer(group: _Group, inherited: Sequence[socket.socket]) -> None:
    """Do what the caller requests: fork a rank, have all write their stacks or, if it has closed the group, end it."""
    try:
        content, descriptors, *_ = socket.recv_fds(group.connection, REQUEST_BYTES, 1)
    except OSError:
        content, descriptors = b"", []
    if not content:
        group.end()
    elif not descriptors:
        for process in group.ranks.values():
            _signal(process, STACKS_SIGNAL)
    else:
        rank = json.loads(content)["rank"]
        try:
            group.ranks[rank] = _fork(group.directory, rank, descriptors[0], inherited)
        except OSError as error:
            group.report(None, f"rank {rank} was not started: {error.strerror}")
        os.close(descriptors[0])


def _fork(directory: str, rank: int, pipe: int, inherited: Sequence[socket.socket]) -> BaseProcess:
    """Fork a rank, which leads a process group; `inherited` is for the server alone."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("fork")
    arguments = (os.getpid(), directory, rank, pipe, inherited)
    process = context.Process(target=_run_rank, args=arguments, name=f"labkit-rank-{rank}")
    process.start()
    with contextlib.suppress(OSError):  # the rank was faster
        os.setpgid(process.pid or 0, process.pid or 0)
    return process


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    """Kill the rank's process group, or have the rank alone write its stacks."""
    send = os.kill if number == STACKS_SIGNAL else os.killpg
    assert process.pid is not None, "it was started"
    with contextlib.suppress(OSError):  # all of it has ended
        send(process.pid, number)


def _run_rank(server: int, directory: str, rank: int, pipe: int, inherited: Sequence[socket.socket]) -> None:
    """The life of a rank: tie it to the server, take over the caller's state, serve points."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in inherited:
        each.close()  # or the other end would not see it closed while this rank lives
    log = os.open(f"{directory}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    with connection.Connection(pipe) as caller:
        state = json.loads(caller.recv_bytes())
        os.environ.clear()
        os.environ.update(state["environment"])
        sys.path[:], sys.argv[:] = state["path"], state["argv"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # the caller's script is not run again
        multiprocessing.current_process().authkey = bytes.fromhex(state["authkey"])
        os.chdir(state["directory"])
        worker = importlib.import_module("labkit.parallel.ranks.worker")
        worker.serve_points(caller, rank, Path(directory))


def _clean_up(server: int, control: int, notes: socket.socket) -> None:
    """Wait for the end of the server or of its last caller, end the session, remove the directories in `notes`.

    A server that still imports torch would see only later that its callers have ended.
    """
    named = b""
    events = select.poll()
    events.register(notes, select.POLLIN)
    events.register(control, 0)  # its end, not what is in it
    while control not in dict(events.poll()) and (note := notes.recv(4096)):
        named += note
    _kill_session(server)
    os.waitpid(server, 0)  # until now its id, which is the session's, cannot be somebody else's
    while note := notes.recv(4096):
        named += note
    for directory in filter(None, named.decode().split("\0")):
        shutil.rmtree(directory, ignore_errors=True)


def _kill_session(session: int) -> None:
    """Kill the processes of a session, and those that they start meanwhile."""
    import psutil

    for _ in range(500):
        is_empty = True
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    is_empty = False
        if is_empty:
            return
        time.sleep(0.01)


def _main(control: int, modules: Sequence[str]) -> None:
    notes, cleaner = socket.socketpair()
    if server := os.fork():
        cleaner.close()
        _clean_up(server, control, notes)
        return
    try:
        notes.close()
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, STACKS_SIGNAL):
            signal.signal(number, signal.SIG_IGN)
        for module in modules:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # a collection in a rank would copy the pages of what is imported here
        _serve(socket.socket(fileno=control), cleaner)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
