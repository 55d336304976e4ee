"""Fork server: a process that has imported torch. Its forks are ready at once.

The server (`server_process`) forks a leader per group. The leader takes over what the caller's
process has set, and forks the ranks, each a `torch.multiprocessing` worker. If one of these
processes ends, the others clean up after it:

* If the caller ends, or closes a group's connection, the leader kills the ranks with all that they
  have started, and removes the group's directory. The server ends with its last caller.
* If a leader ends, the kernel kills its ranks, even if they are stopped or hold the GIL
  (PR_SET_PDEATHSIG). The server kills the rest of the leader's session and removes the group's
  directory; the caller does so if the server ended, too.
* If the server ends, its groups go on, and the caller starts another for the next group.

All of this file runs in the caller's process.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, NamedTuple

from labkit.parallel.ranks import server_process
from labkit.parallel.ranks.server_process import REPORT_BYTES, REQUEST_BYTES

PRELOADED = ["torch", "torch.distributed"]  # modules that the server imports
# BLAS and OpenMP read these when the server loads torch: a process that forks must have one thread.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class Server(NamedTuple):
    """The fork server of this process, and of all that are forked from it."""

    control: socket.socket
    pid: int
    process: Popen[bytes] | None = None  # None if another process has started it


server: Server | None = None
_lock = threading.RLock()


def start_server() -> Server:
    """Start the server unless it runs; return it."""
    global server
    with _lock:
        if server is None:
            control, theirs = socket.socketpair()
            with theirs:
                # In a separate session it gets no Ctrl-C, and a Jupyter kernel that shuts down does
                # not wait for it.
                process = Popen(
                    [
                        sys.executable,
                        "-P",
                        server_process.__file__,
                        str(theirs.fileno()),
                        *PRELOADED,
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    start_new_session=True,
                    env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
                )
            server = Server(control, process.pid, process)
        return server


def open_group(
    leader_end: socket.socket,
    directory: Path,
    ranks: Sequence[int],
    environment: Mapping[str, str],
    run_rank: Callable[..., None],
    payload: bytes,
) -> None:
    """Start a group of ranks with a private directory, which its leader makes.

    The group lives until the caller closes the other end of `leader_end`, or ends. Each rank gets
    these variables, this process's `sys.path` and working directory, and calls
    `run_rank(payload, pipe to the caller, rank, directory)`, a function of a module.

    Raises:
        OSError: the system refuses, or the server was killed twice.
    """
    # What a new process would inherit, as of now: the server was started some time ago.
    state = {
        "ranks": list(ranks),
        "environment": dict(environment),
        "path": list(map(str, sys.path)),
        "argv": list(map(str, sys.argv)),
        "cwd": str(Path.cwd()),
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
        "run_rank": [run_rank.__module__, run_rank.__name__],
    }
    request = os.fsencode(directory).ljust(REQUEST_BYTES, b"\0")
    # The worker may be large, and a socket's buffer is small: it goes in a file without a name.
    with contextlib.ExitStack() as closing, tempfile.TemporaryFile() as content:
        content.write(json.dumps(state).encode() + b"\n" + payload)
        content.seek(0)
        descriptors = [leader_end.fileno(), content.fileno()]
        with contextlib.suppress(OSError, AttributeError):  # the system has no pidfd_open
            descriptors.append(os.pidfd_open(os.getpid()))
            closing.callback(os.close, descriptors[-1])
        closing.enter_context(_lock)
        try:
            _send_request(request, descriptors)
        except ConnectionError:  # the server was killed
            _forget_server()
            _send_request(request, descriptors)


def _send_request(request: bytes, descriptors: Sequence[int]) -> None:
    # One system call, so that an interrupt comes before or after it.
    socket.send_fds(start_server().control, [request], descriptors)


def _forget_server() -> None:
    global server
    if server is not None:
        server.control.close()
    server = None


def read_report(group: socket.socket) -> dict[str, Any]:
    """Receive what a group's leader reports.

    A rank's start ("rank", "pipe", "leader"), its end ("rank", "code"), or why the group ended
    ("reason").
    """
    content = b""
    descriptors = list[int]()
    with contextlib.suppress(OSError):
        content, descriptors, *_ = socket.recv_fds(group, REPORT_BYTES, 1)
    if not content:
        return {"reason": "the process that starts the ranks was killed"}
    report = json.loads(content)
    # Programs that the caller starts must not hold a rank's pipe.
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
        report["pipe"] = connection.Connection(descriptor)
    return report
