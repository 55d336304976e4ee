"""The torchrun job that this process is a rank of: its store, its hosts, and what its ranks agree on.

The job's ranks share torchrun's store before any process group exists.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GROUP_NUMBER = "LABKIT_GROUP"
"""Variable by which the ranks of a job have keys of their own, apart from those of the processes that forked them."""
# Processes wait for one that downloads a large file or shows a figure. When one dies, torchrun ends the job.
PATIENCE = timedelta(days=1)
CONNECT_TIMEOUT = timedelta(seconds=20)

_steps = itertools.count()  # all ranks take the same steps in the same order


class LaunchStopped(Exception):
    """The caller in rank 0's process requests no more."""


def is_job_rank() -> bool:
    """Return whether torchrun has started this process; ValueError for the variables of any other job."""
    if not all(name in os.environ for name in VARIABLES):
        return False
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_agents or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        raise ValueError(f"expected a job of torchrun, which sets LOCAL_RANK and shares its store; {describe_job()}")
    return True


def job_rank() -> int:
    """Return this process's rank in the job; 0 without a job, so that "rank 0 writes" holds there, too."""
    return _read_variable("RANK") if is_job_rank() else 0


def job_world_size() -> int:
    """Return the number of ranks of the job."""
    return _read_variable("WORLD_SIZE")


def local_rank() -> int:
    """Return this process's number among the job's ranks on this host, from 0."""
    return _read_variable("LOCAL_RANK")


def ranks_here(world_size: int) -> int:
    """Return how many of `world_size` ranks run on this host: all, unless a job of that size spans several."""
    return _read_variable("LOCAL_WORLD_SIZE") if is_job_rank() and job_world_size() == world_size else world_size


def describe_job() -> str:
    """Name the variables that make this process a rank of a job, for messages."""
    variables = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES)
    return f"{variables} describe a job: unset them if there is none"


@cache
def job_store() -> Any:
    """Open the job's store, a `torch.distributed.PrefixStore`, once; it stays open until this process ends.

    ValueError if nobody answers, as when the variables are left over from another job.
    """
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=CONNECT_TIMEOUT))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise ValueError(f"expected a job whose store answers; {describe_job()}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job may have the same store
    group = os.environ.get(GROUP_NUMBER, "")
    return dist.PrefixStore(f"labkit/attempt {attempt}/{group}", store)  # type: ignore[attr-defined]


def broadcast_from_first_rank(value: Any) -> Any:
    """Return rank 0's JSON-able `value` on every rank of the job; `value` itself without a job.

    For decisions that all ranks must take alike, and that depend on what one of them sees (free memory, a file). All
    ranks call this, and wait for rank 0 as long as it takes. Needs no process group.
    """
    if not is_job_rank():
        return value
    key = f"step {next(_steps)}"
    if job_rank() == 0:
        job_store().set(key, json.dumps(value))
    return json.loads(_wait_and_get(key))


def begin_step() -> int:
    """Wait until rank 0's caller requests more; LaunchStopped if it does not. Returns a number, alike on all ranks."""
    if not broadcast_from_first_rank(True):
        raise LaunchStopped
    return next(_steps)


def stop_launch() -> None:
    """Let the other ranks' `begin_step` raise LaunchStopped. Rank 0 calls this."""
    broadcast_from_first_rank(False)


def gather_from_ranks(value: Any) -> list[Any]:
    """Return every rank's JSON-able `value`, by rank, on every rank of the job."""
    key = f"step {next(_steps)} of rank"
    job_store().set(f"{key} {job_rank()}", json.dumps(value))
    return [json.loads(_wait_and_get(f"{key} {rank}")) for rank in range(job_world_size())]


def ranks_by_host() -> dict[str, list[int]] | None:
    """Return the job's ranks by name of their host, on every rank of the job; None without a job.

    A host is named by its host name; hosts of one name get a few hex digits to tell them apart. All ranks call this.
    """
    if not is_job_rank():
        return None
    return label_hosts([tuple(host) for host in gather_from_ranks([platform.node(), host_identity()])])


@cache
def host_identity() -> str:
    """Return 16 hex digits that all processes of a host share, and no others.

    Two processes share a host if they run under one boot of one kernel and see the same processes and the same
    network. Containers, and network namespaces, are separate hosts.
    """
    parts = [platform.node()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts.append(boot.read_text().strip())
    for namespace in (Path("/proc/self/ns/pid"), Path("/proc/self/ns/net")):
        if namespace.exists():
            parts.append(str(namespace.stat().st_ino))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def label_hosts(ranks: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    """Group ranks by host, in the order of their first rank, from (host name, `host_identity`) by rank."""
    hosts: dict[str, list[int]] = {}
    for rank, (name, identity) in enumerate(ranks):
        is_only_one = all(other == identity for same, other in ranks if same == name)
        hosts.setdefault(name if is_only_one else f"{name}-{identity[:4]}", []).append(rank)
    return hosts


def describe_hosts(hosts: dict[str, list[int]] | None) -> str:
    """Describe which ranks share a host: "rank 0 on a; ranks 1, 2 on b"."""
    if hosts is None:
        return "ranks started on one machine"
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on {host}" for host, ranks in hosts.items()
    )


def _wait_and_get(key: str) -> bytes:
    job_store().wait([key], PATIENCE)
    return bytes(job_store().get(key))


def _read_variable(name: str) -> int:
    if not os.environ.get(name, "").isdecimal():
        raise ValueError(f"{name}: expected a whole number in the environment, as torchrun sets it; {describe_job()}")
    return int(os.environ[name])
