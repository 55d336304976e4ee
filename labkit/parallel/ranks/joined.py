"""The job that this process is a rank of, if torchrun (or anything that sets the same variables) has started it.

What the ranks of a job have in common before any process group exists is its store: torchrun's own, or, where there
is none, one that rank 0 serves. Here is what they tell one another through it. Points run in the ranks of a job in
`labkit.parallel.ranks.joined_launch`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from labkit.parallel.ranks.deadlines import MARGIN_S, START_TIMEOUT_S
from labkit.parallel.ranks.hosts import host_identity, label_hosts

_TOLD_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Ranks wait for one that fetches a large file, or shows a figure. One that has ended ends the wait: torchrun ends its
# job, and with rank 0 goes the store that it serves.
PATIENCE = timedelta(days=1)


def is_joined() -> bool:
    """Whether this process is a rank of a torchrun job (or of anything that sets the same variables)."""
    return all(name in os.environ for name in _TOLD_BY_TORCHRUN)


def joined_rank() -> int:
    """This process's rank in the job; 0 if there is no job, so that "rank 0 writes" holds there too."""
    return int(os.environ["RANK"]) if is_joined() else 0


def job_store() -> Any:
    """The job's store, a `torch.distributed.TCPStore`: opened once, and kept until this process ends."""
    return _store(*(os.environ[name] for name in _TOLD_BY_TORCHRUN))


def wait_for(keys: Sequence[str], patience: timedelta = PATIENCE) -> None:
    """Wait until the job's store has all keys. torch's DistStoreError after `patience`, DistNetworkError without it."""
    job_store().wait(list(keys), patience)


def broadcast_from_first_rank(value: Any) -> Any:
    """Rank 0's JSON-able `value`, on every rank of the job; `value` itself if there is no job.

    For decisions that all ranks must take alike, and that depend on what only one of them sees (free memory, a
    file). Every rank calls this equally often, and waits for rank 0 as long as it takes; needs no process group.
    """
    if not is_joined():
        return value
    store = job_store()
    number = store.add(f"labkit/agreements of rank {joined_rank()}", 1)
    key = f"labkit/agreement {number}"
    if joined_rank() == 0:
        store.set(key, json.dumps(value))
    wait_for([key])
    return json.loads(store.get(key))


def ranks_by_host() -> dict[str, list[int]] | None:
    """The ranks of the job that share a host, by a name of that host, on every rank of the job; None without a job.

    A host is named by its host name; hosts of one name get a few hex digits to tell them apart. Waits until every
    rank has opened the job's store; needs no process group.
    """
    return _hosts(*(os.environ[name] for name in _TOLD_BY_TORCHRUN)) if is_joined() else None


def ranks_here(world_size: int) -> int:
    """Of `world_size` ranks, how many are or would be on this machine: all, unless a job of that size spans several."""
    is_job = is_joined() and int(os.environ["WORLD_SIZE"]) == world_size
    return ranks_on_this_node() if is_job else world_size


def ranks_on_this_node() -> int:
    """How many ranks of the job share this machine."""
    told = os.environ.get("LOCAL_WORLD_SIZE")
    return len(_neighbors()) if told is None else int(told)


def index_on_this_node() -> int:
    """This process's number among the ranks of the job that share this machine, from 0."""
    told = os.environ.get("LOCAL_RANK")
    return _neighbors().index(joined_rank()) if told is None else int(told)


def _neighbors() -> list[int]:
    """The ranks of the job on this host; for launchers that say nothing of it."""
    hosts = ranks_by_host() or {}
    return next(ranks for ranks in hosts.values() if joined_rank() in ranks)


@cache
def _store(*job: str) -> Any:
    """The store of a job, given by its four variables. Every rank says at once which host it is on."""
    patience = timedelta(seconds=START_TIMEOUT_S)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    store.set(f"labkit/host of rank {rank}", json.dumps([platform.node(), host_identity()]))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        atexit.register(_leave_job, store, rank, world_size)
    return store


@cache
def _hosts(*job: str) -> dict[str, list[int]]:
    store, world_size = _store(*job), int(os.environ["WORLD_SIZE"])
    keys = [f"labkit/host of rank {rank}" for rank in range(world_size)]
    wait_for(keys)
    told = [json.loads(store.get(key)) for key in keys]
    return label_hosts([(str(name), str(identity)) for name, identity in told])


def _leave_job(store: Any, rank: int, world_size: int) -> None:
    """Rank 0, which serves the store, leaves last: the others may still have to read what it has written there."""
    with contextlib.suppress(RuntimeError):  # torch's, if somebody is gone already
        if rank > 0:
            store.set(f"labkit/rank {rank} has left", "")
        else:
            keys = [f"labkit/rank {other} has left" for other in range(1, world_size)]
            store.wait(keys, timedelta(seconds=MARGIN_S))
