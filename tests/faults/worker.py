"""A worker whose last rank misbehaves at a requested moment.

All imports are at the top, so that a point's few seconds do not include them.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from labkit.lab.point import Point
from labkit.parallel.collectives import all_reduce

BEFORE = "before rendezvous"
INSIDE = "inside a collective"
SHARED = "inside a shared-memory collective"
BETWEEN = "between points"
WRITING = "while a row is written"


@dataclass(frozen=True, kw_only=True)
class FaultyPoint(Point):
    number: int
    action: str = ""
    moment: str = ""


def first_time(what):
    """Return whether this is the first call with `what` in any process of the victim."""
    folder = os.environ.get("LABKIT_FAULT_FOLDER")
    if folder is None:
        return False
    try:
        os.close(os.open(Path(folder) / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def act(action):
    if action == "raises":
        raise ValueError("deliberate")
    if action.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, action))
        time.sleep(60)
    if action == "exits":
        os._exit(0)
    if action == "aborts":
        ctypes.CDLL(None).abort()
    if action == "runs out of memory":
        torch.empty(1 << 60, dtype=torch.uint8)
    if action.startswith("fills memory"):
        fill_memory(parent_first=action != "fills memory")
    if action == "prints 10 MB":
        print("\n".join(["x" * 1000] * 10_000))
    while action == "loops":
        pass


def fill_memory(parent_first):
    """Allocate until the kernel kills a process, or far beyond the limit.

    It kills the process with the most memory, after adding its score. The parent is its choice only
    once, so that a resumed run completes.
    """
    if parent_first and not first_time("filled"):
        return
    if parent_first:
        Path("/proc/self/oom_score_adj").write_text("0")
        _leader, _server, parent = psutil.Process().parents()[:3]
        Path(f"/proc/{parent.pid}/oom_score_adj").write_text("1000")
    taken = []
    for _ in range(128):
        taken.append(b"\1" * (64 << 20))
    time.sleep(60)


def act_meanwhile(action):
    """Act in 50 ms, in the middle of other work; an exception is raised at once."""
    if action.startswith("SIG") or action in ("exits", "aborts"):
        threading.Timer(0.05, act, [action]).start()
    else:
        act(action)


def send_too_much():
    if dist.get_rank() == 0:
        dist.send(torch.ones(1000), dst=1)
    else:
        dist.recv(torch.ones(1), src=0)


def all_reduce_meanwhile(point, faulty):
    tensor = torch.ones(200_000)
    transport = "shared" if point.moment == SHARED else "point_to_point"
    all_reduce(tensor, transport=transport)
    if faulty:
        act_meanwhile(point.action)
    hit_meanwhile = point.action.startswith("SIG") or point.action in ("exits", "aborts")
    for _ in range(10**9 if hit_meanwhile else 3):
        all_reduce(tensor, transport=transport)


def measure_point(point):
    faulty = bool(point.action) and dist.get_rank() == point.world_size - 1
    if point.action == "sizes differ":
        yield {"value": 1.0}
        send_too_much()
        return
    if faulty and point.action == "no JSON":
        yield {"value": object()}
    if point.moment == WRITING:
        if faulty and point.action.startswith("SIG"):
            threading.Timer(0.02, act, [point.action]).start()
        for _ in range(5 if faulty else 1):
            yield {"value": [0.1] * 100_000}
        if faulty:
            act(point.action)
    else:
        yield {"value": float(point.number)}
    if point.moment in (INSIDE, SHARED):
        all_reduce_meanwhile(point, faulty)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if point.moment == BETWEEN and faulty:
        act_meanwhile(point.action)


def _fail_on_import():
    """A rank imports this before it meets the others."""
    action = os.environ.get("LABKIT_FAULT_ON_IMPORT", "")
    is_last = multiprocessing.current_process().name == "labkit-rank-1"
    if action and is_last and first_time("import"):
        act(action)


_fail_on_import()
