"""A rank's side of a launch: set up the process, join the group, run points.

And devices and scheduling for workers. A forked rank (`run_rank`) answers its caller with JSON
messages: ``ready`` (with its facts), ``row``, ``done`` or ``failed``. After ``failed`` it keeps its
connections open until it is killed: if it left, its peers would report the lost connection, and the
caller would have to guess which came first.
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
from typing import Any

import torch
import torch.distributed as dist

from labkit.machine.cgroups import available_cores
from labkit.machine.gpus import cores_beside, count_gpus
from labkit.parallel.ranks import torchrun
from labkit.parallel.ranks.debugger import break_here
from labkit.parallel.ranks.results import current_alternative, exception_failure, plain_row
from labkit.parallel.ranks.server_process import STACKS_SIGNAL

# A tenth of all memory: the caller may hold that much more than a rank before the kernel kills the
# caller instead.
OOM_SCORE = 100
COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"  # variable by which torch finds what it has compiled
# Ranks of one host need no other interface, whatever a cluster has set.
LOOPBACK = dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo"
)
# The cores that this process may use, before it takes a GPU.
ALL_CORES = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
START_TIMEOUT_S = 120.0
MARGIN_S = 5.0  # from the caller's deadline to that of the process group


@dataclass(frozen=True)
class GroupPlan:
    """The arguments of a launch for a group of ranks, checked by `launch`."""

    world_size: int
    backend: str | None
    scheduling: str
    timeout_s: float


def run_rank(
    payload: bytes, caller: connection.Connection[Any, Any], rank: int, directory: Path
) -> None:
    """Join the group, then run each point that the caller requests, until the caller has ended."""
    _set_up_process(rank, directory)

    def send(kind: str, **body: Any) -> None:
        # The caller shows a point's output when the point ends: nothing may stay in a buffer.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        caller.send_bytes(json.dumps({"kind": kind, "at": time.monotonic(), **body}).encode())

    try:
        plan, worker, points = pickle.loads(payload)
        if torchrun.is_job_rank():
            store: Any = torchrun.job_store()
        else:
            # A file needs no port, to which other programs of this host could connect.
            path = str(directory / "store")
            store = dist.FileStore(path, plan.world_size)  # type: ignore[attr-defined]
        # The process group is made before the clock of the first point starts.
        send("ready", facts=_join_group(plan, rank, store))
        while True:
            index = json.loads(caller.recv_bytes())
            current_alternative.begin_point(index)
            for row in worker(points[index]) or ():
                send("row", values=plain_row(row))
            _release_device_memory()
            send("done")
    # SystemExit, too: a rank that left by itself would take its connections with it.
    except BaseException as error:
        with contextlib.suppress(EOFError, OSError):  # the caller has ended
            send("failed", failure=asdict(exception_failure(rank, error, time.monotonic())))
            caller.recv_bytes()  # until killed


def call_once(
    function: Callable[..., Any], arguments: tuple[Any, ...], _point: None
) -> list[dict[str, Any]]:
    """Call a function and return one row: the worker behind `run_ranks`."""
    return [{"result": function(*arguments)}]


def use_device(kind: str, rank: int | None = None) -> str:
    """Make the device of this rank the current one; return its name, "cpu" or "cuda:1".

    Ranks of one machine take its GPUs in turn, by LOCAL_RANK under torchrun, otherwise by their
    rank, 0 without a process group. Several share a GPU if there are fewer. `rank` is for a rank
    that has no process group yet.
    """
    if kind == "cpu":
        if torch.cuda.is_initialized():  # an earlier point took a GPU
            _bind(ALL_CORES)
        return kind
    if torchrun.is_job_rank():
        rank = torchrun.read_variable("LOCAL_RANK")
    elif rank is None and dist.is_initialized():
        rank = dist.get_rank()
    index = (rank or 0) % count_gpus()
    device = f"cuda:{index}"
    torch.cuda.set_device(device)
    # From another socket every launch and copy crosses the link between them.
    _bind(ALL_CORES & cores_beside(index))
    return device


def _bind(cores: set[int]) -> None:
    """Let this thread, and those that it will start, run on these cores only, if there are any."""
    if cores:
        with contextlib.suppress(OSError, AttributeError):  # refused, or not Linux
            os.sched_setaffinity(0, cores)


def use_scheduling(scheduling: str) -> str:
    """Set the policy of this thread and those that it will start; return the one in force.

    "batch" or "default". SCHED_BATCH, since gloo's event loop pre-empts the thread it waits for,
    and then spins until the next scheduler tick; a batch thread does not pre-empt (4 KB, 4 ranks:
    4.9 ms against 1.0 ms).
    """
    if not hasattr(os, "SCHED_BATCH"):
        return "default"
    policy = os.SCHED_BATCH if scheduling == "batch" else os.SCHED_OTHER
    with contextlib.suppress(OSError):  # the system refuses
        os.sched_setscheduler(0, policy, os.sched_param(0))
    return "batch" if os.sched_getscheduler(0) == os.SCHED_BATCH else "default"


def _join_group(plan: GroupPlan, rank: int, store: Any) -> dict[str, Any]:
    """Set scheduling and threads, make the process group, and return the facts."""
    # First of all, since the threads of the process group inherit it.
    scheduling = use_scheduling(plan.scheduling)
    torch.set_num_threads(max(1, available_cores() // torchrun.ranks_here(plan.world_size)))
    # Until a block as large as this one was freed, glibc gives freed memory back to the system, and
    # new pages cost more than the work on them.
    torch.empty(31 << 20, dtype=torch.uint8)
    if plan.backend is not None:
        # torch has read it from the environment of the fork server.
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]
        dist.init_process_group(
            plan.backend,
            store=store,
            rank=rank,
            world_size=plan.world_size,
            # The caller's deadline comes first, and shows the stacks of every rank.
            timeout=timedelta(seconds=plan.timeout_s + MARGIN_S),
            device_id=torch.device(use_device("cuda", rank)) if plan.backend == "nccl" else None,
        )
    return {"threads": torch.get_num_threads(), "scheduling": scheduling}


def _release_device_memory() -> None:
    """Return the memory of a point's tensors to the GPU, which other ranks may use.

    torch's allocator keeps freed memory, and only the garbage collector frees a model that its
    hooks lead back to.
    """
    if torch.cuda.is_initialized():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a device that is lost says so to the next point
            torch.cuda.empty_cache()


def _set_up_process(rank: int, directory: Path) -> None:
    """Direct output, stacks, the current alternative and temporary files to the group's directory.

    Everything here concerns this rank's process alone.
    """
    # Their descriptors are the log's. A line is there when it ends, even if the rank is killed.
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stacks = (directory / f"rank-{rank}.stacks").open("w")  # faulthandler keeps it open
    faulthandler.enable(file=stacks)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    sys.breakpointhook = break_here
    current_alternative.share(directory / f"rank-{rank}.alternative")
    # A rank that the kernel kills for memory costs a point; its caller would cost all others.
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # Linux has it
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))
    # In the fork server, with its environment, Python may have chosen a folder already.
    tempfile.tempdir = None
    # What torch compiles outlives the rank, unlike its other temporary files: it takes 15 s.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_labkit_{os.getuid()}"
    os.environ[COMPILED_CODE] = os.environ.get(COMPILED_CODE) or str(compiled)
    tempfile.tempdir = str(directory / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    Path(tempfile.tempdir).mkdir(exist_ok=True)
