"""What runs inside one rank: get ready, then do each point the parent asks for.

The order in `main` matters. First whatever keeps a rank from outliving its parent, then its output and its
environment, and only then torch, the worker and the process group. That is why this module imports nothing
but the standard library at its top: under spawn, torch is imported by a rank that already watches its parent.

A rank answers over its pipe with JSON, one message each: ``ready`` (with its facts), ``row``, ``done`` or
``failed``. After ``failed`` it stays where it is, connections open, until it is killed: were it to leave, its
peers would report the lost connection, and the parent would have to guess which came first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from labkit.parallel.ranks import whose_turn
from labkit.parallel.ranks.answers import described, release_device_memory, rows_of
from labkit.parallel.ranks.deadlines import MARGIN_S
from labkit.parallel.ranks.scheduling import use_scheduling

STACKS_SIGNAL = signal.SIGUSR1
# A tenth of the memory there is: the parent may hold that much more than a rank before it is taken instead. Its tables
# and figures take less than a GiB; a larger number would have ranks killed for what somebody else's processes take.
OOM_SCORE = 100
# A variable of a fork server that others use as well: its socket is not the parent's to remove.
SERVER_OF_SEVERAL = "LABKIT_SERVER_OF_SEVERAL"
# Where torch keeps what it compiles.
COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"
# Variables of a rank: the directories that it would have if it had none of its own.
USERS_DIRECTORY, USERS_CACHE = "LABKIT_USERS_TMPDIR", "LABKIT_USERS_COMPILED_CODE"
# To open a file: milliseconds, or never.
STORE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class GroupPlan:
    """All that a group of ranks is told when it starts; checked before, by `launch`."""

    payload: bytes
    """The worker and the points, by cloudpickle."""
    world_size: int
    backend: str | None
    scheduling: str
    threads: int
    timeout_s: float
    environment: Mapping[str, str]

    @property
    def collective_timeout_s(self) -> float:
        """Time-out of the process group: the parent's deadline comes first, and dumps the stacks of every rank."""
        return self.timeout_s + MARGIN_S


def log_path(directory: Path, rank: int) -> Path:
    """Where a rank's stdout and stderr go."""
    return directory / f"rank-{rank}.log"


def stacks_path(directory: Path, rank: int) -> Path:
    """Where a rank dumps its Python stacks when it is told to, and when it crashes."""
    return directory / f"rank-{rank}.stacks"


def turn_path(directory: Path, rank: int) -> Path:
    """Where a rank notes whose turn it is."""
    return directory / f"rank-{rank}.turn"


def main(plan: GroupPlan, rank: int, directory: Path, parent: connection.Connection[Any, Any]) -> None:
    """The life of one rank, from its first instruction to its last."""
    gc.freeze()  # what the fork server has imported is no garbage: to look at it copies 30 MB, a quarter of a start
    watcher = _die_with_parent(directory)
    _die_before_parent()
    _redirect_output(directory, rank)
    whose_turn.share(turn_path(directory, rank))
    os.environ.clear()
    os.environ.update(plan.environment)
    _use_own_temporary_directory(directory)
    try:
        worker, points = pickle.loads(plan.payload)
        _send(parent, "ready", facts=_join_group(plan, rank, directory))
        while (told := parent.recv()) is not None:
            index, left_out = told
            whose_turn.new_point(index, left_out)
            for values in rows_of(worker, points[index]):
                _send(parent, "row", values=values)
            release_device_memory()
            _flush_output()
            _send(parent, "done")
        _leave_group()
    except BaseException as error:  # SystemExit too: whatever a worker raises is its answer
        _flush_output()
        with contextlib.suppress(EOFError, OSError):  # the parent may have closed its end, and want no answer
            _send(parent, "failed", **described(error))
            parent.recv()  # until killed
        # The pipe has ended, and so the parent: leaving now would stop the watcher in the middle of its cleaning.
        watcher.join(MARGIN_S)


def call_once(function: Callable[..., Any], arguments: tuple[Any, ...], _point: None) -> list[dict[str, Any]]:
    """The worker behind `run_ranks`: one call, one row."""
    return [{"result": function(*arguments)}]


def _die_with_parent(directory: Path) -> threading.Thread:
    """Leave nothing behind when the parent goes, however it goes and whatever this rank is doing.

    * Interrupts belong to the parent, which then kills its ranks.
    * A thread waits for the end of the parent: it runs also while the main thread is inside a collective.
    * A stopped rank runs no threads. But a rank is its own process group, and when the process that links it
      to the session (the fork server, or the parent itself) exits, the kernel continues a stopped group, with
      a hang-up signal that is ignored here. So the fork server must not wait for its ranks, as it would
      while they hold the write end of its "alive" pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.setpgid(0, 0)  # before the thread, which kills the group it is in
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    if (alive := getattr(server, "_forkserver_alive_fd", None)) is not None:
        os.close(alive)
    address = None if SERVER_OF_SEVERAL in os.environ else getattr(server, "_forkserver_address", None)
    socket = Path(address or directory / "no-server")
    arguments = (directory, socket)
    watcher = threading.Thread(target=_outlive_parent, args=arguments, name="labkit-watch-parent", daemon=True)
    watcher.start()
    return watcher


def _outlive_parent(directory: Path, server_socket: Path) -> None:
    """Wait for the end of the parent, remove what it can no longer remove, and end this rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is a child process"
    connection.wait([parent.sentinel])
    for _ in range(100):  # the other ranks are at the same directory: an entry may go or come under our hands
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            break
    with contextlib.suppress(OSError):  # not there, or the directory holds more than the socket
        server_socket.unlink(missing_ok=True)
        server_socket.parent.rmdir()
    os.killpg(0, signal.SIGKILL)  # this rank, and whatever its worker has started


def _die_before_parent() -> None:
    """When memory runs out, let the kernel take a rank: that costs a point, and the parent would cost the rest.

    The kernel takes the process with the most memory, in thousandths of what there is, after adding this number.
    """
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # Linux has it
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))


def _use_own_temporary_directory(directory: Path) -> None:
    """What torch.compile and others leave in the temporary directory goes when the group's own directory does.

    So does compiled code that the user has elsewhere: what a rank finds compiled would depend on what ran before.
    """
    if users_cache := os.environ.pop(COMPILED_CODE, None):
        os.environ[USERS_CACHE] = users_cache
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = None  # what the process has found that this one was forked from
    os.environ[USERS_DIRECTORY] = tempfile.gettempdir()
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None  # read again


def _redirect_output(directory: Path, rank: int) -> None:
    """Send what Python, C++ and child processes write to this rank's file, and stacks to another."""
    log = os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # new objects: those inherited may be missing, and buffer blocks where a line should be seen at once
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    stacks = stacks_path(directory, rank).open("w")  # faulthandler keeps it open
    faulthandler.enable(file=stacks)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)


def _join_group(plan: GroupPlan, rank: int, directory: Path) -> dict[str, Any]:
    """Set scheduling and threads, make the process group, and say what is in force."""
    scheduling = use_scheduling(plan.scheduling)  # first: the threads of the process group inherit it
    import torch
    import torch.distributed as dist

    from labkit.parallel.ranks.device import use_device

    torch.set_num_threads(plan.threads)
    if plan.backend is not None:
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch read the fork server's environment, not this one
        dist.init_process_group(
            plan.backend,
            store=_make_store(directory, plan.world_size),
            rank=rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=plan.collective_timeout_s),
            device_id=torch.device(use_device("cuda", rank)) if plan.backend == "nccl" else None,
        )
    return {"threads": torch.get_num_threads(), "scheduling": scheduling}


def _make_store(directory: Path, world_size: int) -> Any:
    """Where the ranks of a group find each other.

    Once the parent has ended, its directory goes. torch would try for minutes to open a file there, and let no other
    thread of this process run meanwhile, not the one that ends it either.
    """
    import torch.distributed as dist

    faulthandler.dump_traceback_later(STORE_TIMEOUT_S, exit=True)  # without Python's help
    try:
        return dist.FileStore(str(directory / "store"), world_size)  # type: ignore[attr-defined]
    finally:
        faulthandler.cancel_dump_traceback_later()


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()  # without it, leaving aborts now and then


def _send(parent: connection.Connection[Any, Any], kind: str, **body: Any) -> None:
    parent.send_bytes(json.dumps({"kind": kind, "at": time.monotonic(), **body}).encode())


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
