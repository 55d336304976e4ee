"""The torchrun job that this process is a rank of: its store, its hosts, and how its ranks agree.

They agree in the store, which is there before any process group exists. Without a job, a process
agrees with itself.
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
# Variable of forked ranks, which thus have other keys in the store than the processes of the job.
GROUP_NUMBER = "LABKIT_GROUP"
# A process may have to wait for one that downloads a large file or shows a figure. It need not
# notice when one dies, since torchrun then ends the job.
PATIENCE = timedelta(days=1)
CONNECT_TIMEOUT = timedelta(seconds=20)

# Names the keys: all ranks take the same steps in the same order.
_steps = itertools.count()
# Keys that this rank has set and not yet deleted. The store lives as long as the job, which may
# measure for days.
_set_keys: list[str] = []


class LaunchStopped(Exception):
    """The caller in rank 0's process requests no more."""


def is_job_rank() -> bool:
    """Return whether torchrun has started this process; ValueError for any other kind of job."""
    if not all(name in os.environ for name in VARIABLES):
        return False
    # torchrun's agent serves the store, so that it is there before rank 0 calls anything.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not has_agent or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        raise ValueError(
            "expected a job of torchrun, which sets LOCAL_RANK and shares its store;"
            f" {describe_job()}"
        )
    return True


def job_rank() -> int:
    """Return this process's rank in the job; 0 without one, so that "rank 0 writes" holds, too."""
    return read_variable("RANK") if is_job_rank() else 0


def ranks_here(world_size: int) -> int:
    """Return how many of `world_size` ranks run on this host.

    All of them, unless a job of that size spans several hosts.
    """
    if is_job_rank() and read_variable("WORLD_SIZE") == world_size:
        return read_variable("LOCAL_WORLD_SIZE")
    return world_size


def describe_job() -> str:
    """Name the variables that make this process a rank of a job, for messages."""
    variables = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES)
    return f"{variables} describe a job: unset them if there is none"


@cache
def job_store() -> Any:
    """Open the job's store, a `torch.distributed.PrefixStore`, which stays open.

    ValueError if nobody answers, as when the variables are left over from another job.
    """
    try:
        meetings = dist.rendezvous("env://", timeout=CONNECT_TIMEOUT)  # type: ignore[attr-defined]
        store, *_ = next(meetings)
    except RuntimeError as error:
        raise ValueError(f"expected a job whose store answers; {describe_job()}") from error
    group = os.environ.get(GROUP_NUMBER, "job")
    return dist.PrefixStore(f"{_attempt()}/{group}", store)  # type: ignore[attr-defined]


def _attempt() -> str:
    """Return the prefix of all keys; a restarted job may have the same store."""
    return f"labkit/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def broadcast_from_first_rank(value: Any) -> Any:
    """Return rank 0's JSON-able `value` on every rank of the job.

    For decisions that all must take alike, and that depend on what one of them sees. All ranks call
    this, and wait for rank 0 as long as it takes.
    """
    if not is_job_rank():
        return value
    key = f"step {next(_steps)}"
    if job_rank() == 0:
        _set(key, value)
    return _wait_and_read(key)


def begin_step() -> int:
    """Wait until rank 0's caller requests more; LaunchStopped if it does not.

    Return a number, the same on all ranks.
    """
    if not broadcast_from_first_rank(True):  # rank 0 broadcasts False at the end of a launch
        raise LaunchStopped
    return next(_steps)


def gather_from_ranks(value: Any, *, only_first: bool = False) -> list[Any]:
    """Return every rank's JSON-able `value`, by rank, on every rank of the job.

    With `only_first` on rank 0 alone, and [] on the others.
    """
    if not is_job_rank():
        return [value]
    old_keys = list(_set_keys)
    step = f"step {next(_steps)} of rank"
    _set(f"{step} {job_rank()}", value)
    if only_first and job_rank() > 0:
        return []
    values = [_wait_and_read(f"{step} {rank}") for rank in range(read_variable("WORLD_SIZE"))]
    # Every rank has reached this step, and so has read whatever was set before it.
    for key in old_keys:
        job_store().delete_key(key)
        _set_keys.remove(key)
    return values


def delete_other_groups(current: str) -> None:
    """Delete the keys of groups of ranks that have ended, once all ranks run group `current`.

    gloo and NCCL leave there how their ranks find one another.
    """
    if not is_job_rank() or job_rank() > 0:
        return
    store = dist.PrefixStore(_attempt(), job_store().underlying_store)  # type: ignore[attr-defined]
    # Not every version of torch can list them.
    for key in getattr(store, "list_keys", list)():
        if key.partition("/")[0] not in (current, "job"):
            store.delete_key(key)


def ranks_by_host() -> dict[str, list[int]] | None:
    """Return the job's ranks by name of their host (`label_hosts`); None without a job.

    All ranks call this.
    """
    if not is_job_rank():
        return None
    hosts = gather_from_ranks([platform.node(), host_identity()])
    return label_hosts([tuple(host) for host in hosts])


@cache
def host_identity() -> str:
    """Return 16 hex digits that all processes of a host share, and no others.

    They run under one boot of one kernel, and see the same processes and network: containers are
    separate hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespaces = map(Path, ("/proc/self/ns/pid", "/proc/self/ns/net"))
    parts = [platform.node(), boot.read_text() if boot.exists() else ""]
    parts += [str(path.stat().st_ino) for path in namespaces if path.exists()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def label_hosts(ranks: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
    """Group ranks by host, from (host name, `host_identity`) by rank.

    Hosts stand in the order of their first rank.
    Hosts of one name get a few hex digits to tell them apart.
    """
    hosts: dict[str, list[int]] = {}
    for rank, (name, identity) in enumerate(ranks):
        is_only_one = all(other == identity for same, other in ranks if same == name)
        hosts.setdefault(name if is_only_one else f"{name}-{identity[:4]}", []).append(rank)
    return hosts


def describe_hosts(hosts: dict[str, list[int]] | None) -> str:
    """Describe which ranks share a host: "rank 0 on a; ranks 1, 2 on b"."""
    if hosts is None:
        return "ranks started on one machine"
    return "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: "rank 0" or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _set(key: str, value: Any) -> None:
    job_store().set(key, json.dumps(value))
    _set_keys.append(key)


def _wait_and_read(key: str) -> Any:
    job_store().wait([key], PATIENCE)
    return json.loads(job_store().get(key))


def read_variable(name: str) -> int:
    """Return a number that torchrun sets, as WORLD_SIZE; ValueError if it is none."""
    if not os.environ.get(name, "").isdecimal():
        raise ValueError(
            f"{name}: expected a whole number in the environment, as torchrun sets it;"
            f" {describe_job()}"
        )
    return int(os.environ[name])
