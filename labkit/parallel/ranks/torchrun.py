"""The job that this process is a rank of, if torchrun (or anything that sets the same variables) has started it.

Before any process group exists, the ranks of a job share a store: torchrun's, or one that rank 0 serves. Through it
they agree and learn of each other's hosts. `job_group` runs points in the ranks of a job.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from labkit.parallel.ranks.hosts import host_identity, label_hosts

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 5.0
NOTE_AFTER_S = 1.0
# Ranks wait for one that downloads a large file or shows a figure. One that has ended ends the wait: torchrun ends its
# job, and with rank 0 goes the store that it serves.
PATIENCE = timedelta(days=1)


def is_job_rank() -> bool:
    """Whether this process is a rank of a torchrun job (or of anything that sets the same variables)."""
    return all(name in os.environ for name in VARIABLES)


def job_rank() -> int:
    """This process's rank in the job; 0 if there is no job, so that "rank 0 writes" holds there, too."""
    return _read_variable("RANK") if is_job_rank() else 0


def job_world_size() -> int:
    """Ranks of the job."""
    return _read_variable("WORLD_SIZE")


@cache
def job_store() -> Any:
    """The job's store, a `torch.distributed.TCPStore`: opened once, and kept until this process ends.

    Every rank notes at once which host it is on. ValueError that names the job's variables, if the other ranks are not
    found in time.
    """
    waiting = f"labkit waits for the other ranks of the job; {describe_job()}"
    note = threading.Timer(NOTE_AFTER_S, lambda: print(waiting, file=sys.stderr))
    note.daemon = True
    note.start()
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT_S)))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the other ranks of the job were not found ({reason}); {describe_job()}") from error
    finally:
        note.cancel()
    store.set(f"labkit/host of rank {job_rank()}", json.dumps([platform.node(), host_identity()]))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        atexit.register(_leave_job, store, job_rank(), job_world_size())
    return store


def wait_for(keys: Sequence[str], patience: timedelta = PATIENCE) -> None:
    """Wait until the job's store has all keys. torch's DistStoreError after `patience`, DistNetworkError without it."""
    job_store().wait(list(keys), patience)


def broadcast_from_first_rank(value: Any) -> Any:
    """Rank 0's JSON-able `value`, on every rank of the job; `value` itself if there is no job.

    For decisions that all ranks must take alike, and that depend on what only one of them sees (free memory, a
    file). Every rank calls this equally often, and waits for rank 0 as long as it takes; needs no process group.
    """
    if not is_job_rank():
        return value
    store = job_store()
    number = store.add(f"labkit/agreements of rank {job_rank()}", 1)
    key = f"labkit/agreement {number}"
    if job_rank() == 0:
        store.set(key, json.dumps(value))
    wait_for([key])
    return json.loads(store.get(key))


def ranks_by_host() -> dict[str, list[int]] | None:
    """The ranks of the job that share a host, by a name of that host, on every rank of the job; None without a job.

    A host is named by its host name; hosts of one name get a few hex digits to tell them apart. Waits until every
    rank has opened the job's store; needs no process group.
    """
    if not is_job_rank():
        return None
    keys = [f"labkit/host of rank {rank}" for rank in range(job_world_size())]
    wait_for(keys)
    return label_hosts([tuple(json.loads(job_store().get(key))) for key in keys])


def ranks_here(world_size: int) -> int:
    """How many of `world_size` ranks are or would be on this machine: all, unless a job of that size spans several."""
    if not is_job_rank() or job_world_size() != world_size:
        return world_size
    return _read_variable("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else len(_neighbors())


def local_index() -> int:
    """This process's number among the ranks of the job on this machine, from 0."""
    return _read_variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else _neighbors().index(job_rank())


def _neighbors() -> list[int]:
    """The ranks of the job on this host, for launchers that do not say."""
    hosts = ranks_by_host() or {}
    return next(ranks for ranks in hosts.values() if job_rank() in ranks)


def _read_variable(name: str) -> int:
    if not os.environ[name].isdecimal():
        raise ValueError(f"{name}: expected a whole number in the environment, as torchrun sets it; {describe_job()}")
    return int(os.environ[name])


def describe_job() -> str:
    """The variables that make this process a rank of a job, for messages."""
    variables = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES)
    return f"{variables} describe a job: unset them if there is none"


def _leave_job(store: Any, rank: int, world_size: int) -> None:
    """Rank 0, which serves the store, leaves last: the others may still read from it."""
    with contextlib.suppress(RuntimeError):  # a rank is gone already
        if rank > 0:
            store.set(f"labkit/rank {rank} has left", "")
        else:
            keys = [f"labkit/rank {other} has left" for other in range(1, world_size)]
            store.wait(keys, timedelta(seconds=LEAVE_TIMEOUT_S))
