"""The worker's side of a launch: what a rank sets up, and how it runs the points that its parent sends.

A rank answers over its connection with JSON, one message each: ``ready`` (with its facts), ``row``, ``done`` or
``failed``. After ``failed`` it keeps its connections open until it is killed: if it left, its peers would report the
lost connection, and the parent would have to guess which came first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.ranks import current_alternative, torchrun
from labkit.parallel.ranks.fork_server import STACKS_SIGNAL
from labkit.parallel.ranks.results import exception_failure, worker_rows

# A tenth of the memory there is: the parent may hold that much more than a rank before it is taken instead. Its tables
# and figures take less than a GiB; a larger number would have ranks killed for what other processes take.
OOM_SCORE = 100
COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"
"""Variable by which torch finds what it has compiled."""
USERS_DIRECTORY, USERS_CACHE = "LABKIT_USERS_TMPDIR", "LABKIT_USERS_COMPILED_CODE"
"""Variables of a rank: the directories that it would have without its private one."""
START_TIMEOUT_S = 120.0
MARGIN_S = 5.0
"""Between one deadline and the next, in case the first did not do."""


@dataclass(frozen=True)
class GroupPlan:
    """The arguments of a launch for a group of ranks, checked by `launch`."""

    world_size: int
    backend: str | None
    scheduling: str
    threads: int
    timeout_s: float
    store: list[str] | None = None
    """Host, port and prefix of a job's store; None if all ranks share the group's directory."""


def serve_points(parent: connection.Connection[Any, Any], rank: int, directory: Path) -> None:
    """Join the group, then run each point that the parent asks for; returns when the parent has ended."""
    _write_files(directory, rank)
    _prefer_for_oom_kill()
    _use_private_directory(directory / "tmp")
    try:
        plan = GroupPlan(**json.loads(parent.recv_bytes()))
        worker, points = pickle.loads(parent.recv_bytes())
        _send(parent, "ready", pid=os.getpid(), facts=_join_group(plan, rank, directory))
        while True:
            index, excluded = json.loads(parent.recv_bytes())
            current_alternative.begin_point(index, excluded)
            for values in worker_rows(worker, points[index]):
                _send(parent, "row", values=values)
            release_device_memory()
            _flush_output()
            _send(parent, "done")
    except BaseException as error:  # SystemExit, too
        _flush_output()
        with contextlib.suppress(EOFError, OSError):  # the parent has ended
            _send(parent, "failed", failure=asdict(exception_failure(rank, error, time.monotonic())))
            parent.recv_bytes()  # until killed


def call_once(function: Callable[..., Any], arguments: tuple[Any, ...], _point: None) -> list[dict[str, Any]]:
    """The worker behind `run_ranks`: one call, one row."""
    return [{"result": function(*arguments)}]


def make_code(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """The code of a function that came by value, with the name of its file."""
    return make(*arguments).replace(co_filename=filename)


def use_device(kind: str, rank: int | None = None) -> str:
    """The device of this rank, "cpu" or "cuda:1", which becomes the current one.

    Ranks of one machine take its GPUs in turn, by their number on that machine: under torchrun LOCAL_RANK, otherwise
    their rank, 0 without a process group. Several share a GPU if there are fewer. `rank` is for a rank that has no
    process group yet.
    """
    if kind == "cpu":
        return kind
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    number = torchrun.local_index() if torchrun.is_job_rank() else rank
    device = f"cuda:{number % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def release_device_memory() -> None:
    """At the end of a point, give the memory of its tensors back to the GPU, which other ranks may use.

    torch's allocator keeps freed memory, and only the garbage collector frees a model that its hooks lead back to.
    """
    if torch.cuda.is_initialized():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a device that is lost says so to the next point
            torch.cuda.empty_cache()


def use_scheduling(scheduling: str) -> str:
    """Set the policy of this thread and those that it will start, "batch" or "default"; return the one in force.

    SCHED_BATCH if the system has it: gloo's event loop pre-empts the thread it waits for, and then spins
    until the next scheduler tick; a batch thread does not pre-empt (4 KB, 4 ranks: 4.9 ms against 1.0 ms).
    """
    if not hasattr(os, "SCHED_BATCH"):
        return "default"
    policy = os.SCHED_BATCH if scheduling == "batch" else os.SCHED_OTHER
    with contextlib.suppress(OSError):  # the system refuses
        os.sched_setscheduler(0, policy, os.sched_param(0))
    return "batch" if os.sched_getscheduler(0) == os.SCHED_BATCH else "default"


def _join_group(plan: GroupPlan, rank: int, directory: Path) -> dict[str, Any]:
    """Set scheduling and threads, make the process group, and return the facts."""
    scheduling = use_scheduling(plan.scheduling)  # first: the threads of the process group inherit it
    torch.set_num_threads(plan.threads)
    # glibc gives freed memory back to the system, and new pages cost more than the work on them, until a process has
    # freed a block as large as this one: in a training that happens early
    torch.empty(31 << 20, dtype=torch.uint8)
    if plan.backend is not None:
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch read the fork server's environment
        dist.init_process_group(
            plan.backend,
            store=_open_store(plan, rank, directory),
            rank=rank,
            world_size=plan.world_size,
            # the parent's deadline comes first, and shows the stacks of every rank
            timeout=timedelta(seconds=plan.timeout_s + MARGIN_S),
            device_id=torch.device(use_device("cuda", rank)) if plan.backend == "nccl" else None,
        )
    return {"threads": torch.get_num_threads(), "scheduling": scheduling}


def _open_store(plan: GroupPlan, rank: int, directory: Path) -> Any:
    """Where the ranks find each other. Those of a job wait here until all have been forked."""
    if plan.store is None:
        return dist.FileStore(str(directory / "store"), plan.world_size)  # type: ignore[attr-defined]
    host, port, prefix = plan.store
    tcp_store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(prefix, tcp_store)  # type: ignore[attr-defined]
    store.set(str(rank), "")
    store.wait([str(other) for other in range(plan.world_size)], timedelta(seconds=START_TIMEOUT_S))
    return store


def _write_files(directory: Path, rank: int) -> None:
    """Write stacks and the current alternative to files, and output line by line; its descriptors are the log's."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):  # new objects: those inherited may be missing
        options: Any = {"encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
        setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, **options))
    stacks = (directory / f"rank-{rank}.stacks").open("w")  # faulthandler keeps it open
    faulthandler.enable(file=stacks)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    current_alternative.share(directory / f"rank-{rank}.turn")


def _prefer_for_oom_kill() -> None:
    """When memory runs out, let the kernel take a rank: that costs a point, and the parent would cost the rest.

    The kernel takes the process with the most memory, in thousandths of what there is, after adding this number.
    """
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # Linux has it
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))


def _use_private_directory(directory: Path) -> None:
    """Have temporary files, and what torch compiles, go with the group's directory.

    Compiled code that the user has elsewhere is not used: a result would depend on what ran before.
    """
    if users_cache := os.environ.pop(COMPILED_CODE, None):
        os.environ[USERS_CACHE] = users_cache
    tempfile.tempdir = None  # the fork server's
    os.environ[USERS_DIRECTORY] = tempfile.gettempdir()
    directory.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = None


def _send(parent: connection.Connection[Any, Any], kind: str, **body: Any) -> None:
    parent.send_bytes(json.dumps({"kind": kind, "at": time.monotonic(), **body}).encode())


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
