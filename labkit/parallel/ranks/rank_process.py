"""A rank as its caller sees it: how the fork server is asked for it, what it sends, the files that it writes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from labkit.parallel.ranks import current_alternative, fork_server
from labkit.parallel.ranks.fork_server import PRELOADED, REPORT_BYTES, REQUEST_BYTES

OUTPUT_LINES, OUTPUT_BYTES = 40, 16 * 1024
"""At most so much of a rank's output is shown per point: the end of it."""
# BLAS and OpenMP read these when the server loads torch: what forks must have no other thread.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

_lock = threading.Lock()
# Connection and process of the server, for this process and all that are forked from it; empty without one.
_server: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def start_server(modules: Sequence[str] = ()) -> int:
    """Start the server unless it runs, with further modules. Returns the id of a process that ranks descend from."""
    with _lock:
        if not _server:
            control, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", fork_server.__file__, str(theirs.fileno()), *PRELOADED, *modules],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # out of reach of a Ctrl-C, and of a kernel that waits for its children
                    env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
                )
            _server.append((control, process))
        return _server[0][1].pid


def open_group(directory: Path) -> socket.socket:
    """Open a group of ranks with a private directory, which the server makes. Closing the connection ends the group."""
    ours, theirs = socket.socketpair()
    request = {"directory": str(directory), "caller": os.getpid()}
    with theirs:
        try:
            start_server()
            _send(_server[0][0], request, theirs.fileno())
        except OSError:  # the server was killed
            _server.clear()
            start_server()
            _send(_server[0][0], request, theirs.fileno())
    return ours


def fork_rank(group: socket.socket, rank: int, environment: Mapping[str, str]) -> connection.Connection[Any, Any]:
    """Fork a rank with these variables, and this process's `sys.path` and working directory."""
    ours, theirs = multiprocessing.Pipe()
    state: dict[str, Any] = {"environment": dict(environment), "directory": str(Path.cwd())}
    state |= {"path": [str(entry) for entry in sys.path], "argv": [str(argument) for argument in sys.argv]}
    state["authkey"] = bytes(multiprocessing.current_process().authkey).hex()
    with theirs, contextlib.suppress(OSError):  # the server has ended the group, and reported why
        _send(group, {"rank": rank}, theirs.fileno())
        ours.send_bytes(json.dumps(state).encode())
    return ours


def request_stacks(group: socket.socket) -> None:
    """Have all ranks of the group write their stacks, even inside C++."""
    with contextlib.suppress(OSError):  # the server was killed
        _send(group, {})


def read_reports(group: socket.socket) -> list[tuple[int | None, int | str]]:
    """Ranks that have ended, with exit codes; or None, and why the group has ended."""
    content = b""
    with contextlib.suppress(OSError):  # the server was killed before it read all requests
        content = group.recv(64 * REPORT_BYTES)
    if not content:
        return [(None, "the fork server of the ranks was killed")]
    return [json.loads(content[at : at + REPORT_BYTES]) for at in range(0, len(content), REPORT_BYTES)]


def _send(peer: socket.socket, request: Mapping[str, Any], *descriptors: int) -> None:
    """Send in one system call, so that an interrupt leaves nothing halfway."""
    socket.send_fds(peer, [json.dumps(request).encode().ljust(REQUEST_BYTES)], descriptors)


@dataclass
class RankProcess:
    """One rank: its connection, and the files that it writes."""

    number: int
    pipe: connection.Connection[Any, Any]
    directory: Path
    process: psutil.Process | None = None
    """Known when the rank is ready."""
    is_open: bool = True
    is_alive: bool = True
    n_forwarded: int = 0
    """Bytes of its output that were shown."""

    def send(self, *messages: bytes) -> None:
        with contextlib.suppress(OSError):  # it has died, which the server reports
            for message in messages:
                self.pipe.send_bytes(message)

    def receive(self) -> dict[str, Any] | None:
        """The next message if there is one."""
        try:
            return json.loads(self.pipe.recv_bytes()) if self.is_open and self.pipe.poll() else None
        except (EOFError, OSError):
            self.is_open = False
            return None

    def turn(self) -> tuple[int, str | None]:
        return current_alternative.read_turn(self.directory / f"rank-{self.number}.turn")

    def stacks(self) -> str:
        """The stacks that it has written so far."""
        with contextlib.suppress(FileNotFoundError):  # none yet
            return (self.directory / f"rank-{self.number}.stacks").read_text(errors="replace")
        return ""

    def output(self, start: int = 0) -> tuple[list[str], int]:
        """Its last lines of output from byte `start` on, with a note of what is left out; and the bytes of all output.

        Each line is as a terminal would leave it: of a progress bar that rewrites its line, the last state.
        """
        try:
            with (self.directory / f"rank-{self.number}.log").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = file.seek(max(start, size - OUTPUT_BYTES))
                content = file.read(size - begin)
        except FileNotFoundError:  # not yet, or the directory was removed
            return [], start
        raw = content.removesuffix(b"\n").split(b"\n") if content else []
        lines = [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in raw]
        if begin > start or len(lines) > OUTPUT_LINES:
            lines = [f"... the last of {(size - start) / 1e6:.1f} MB of output", *lines[1:][-OUTPUT_LINES:]]
        return lines, size

    def output_tail(self) -> str:
        return "\n".join(filter(None, self.output()[0]))

    def new_output(self) -> list[str]:
        """Lines since the last call."""
        lines, self.n_forwarded = self.output(self.n_forwarded)
        return [f"[rank {self.number}] {line}" for line in lines]

    def kill(self) -> None:
        """Kill it and its children, if nobody else has done so. The id is still its own while one of them is there."""
        if self.process and (self.process.is_running() or not psutil.pid_exists(self.process.pid)):
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
