"""Ranks that exist already: the same points, run inside a job that torchrun started.

Every rank of the job calls `launch` with the same arguments and iterates it to its end. Nothing is started
and nobody can be killed from here, so this is agreement instead of supervision: after each point all ranks
exchange what they have, rows and failures, over a process group of their own, and all of them know how the
point ended. Rank 0 yields rows and ends; the others take part and yield nothing.

A rank that raises is an ordinary failed point: its peers give up when their collectives time out, all agree,
and a new process group is made. A rank that does neither in time dumps its stacks and ends, which is how
torchrun learns that the job has failed.

The process group of the worker outlives a launch, as it would in a training script; torch keeps it, with the
time-out of the launch that made it.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import platform
import time
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.ranks.answers import Worker, described, release_device_memory, rows_of
from labkit.parallel.ranks.hosts import host_identity, label_hosts
from labkit.parallel.ranks.network_interface import choose_gloo_interface
from labkit.parallel.ranks.outcome import PointEnd, RankFailure, Report, Row, end_point, first_cause
from labkit.parallel.ranks.process import variables_set
from labkit.parallel.ranks.rank import MARGIN_S, START_TIMEOUT_S, GroupPlan, use_scheduling

_TOLD_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_joined() -> bool:
    """Whether this process is a rank of a torchrun job (or of anything that sets the same variables)."""
    return all(name in os.environ for name in _TOLD_BY_TORCHRUN)


def joined_rank() -> int:
    """This process's rank in the job; 0 if there is no job, so that "rank 0 writes" holds there too."""
    return int(os.environ["RANK"]) if is_joined() else 0


def agree(value: Any) -> Any:
    """Rank 0's JSON-able `value`, on every rank of the job; `value` itself if there is no job.

    For decisions that all ranks must take alike, and that depend on what only one of them sees (free memory, a
    file). Every rank calls this equally often; needs no process group.
    """
    if not is_joined():
        return value
    store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT_S)))  # type: ignore[attr-defined]
    number = store.add(f"labkit/agreements of rank {rank}", 1)
    key = f"labkit/agreement {number}"
    if rank == 0:
        store.set(key, json.dumps(value))
    return json.loads(store.get(key))


def ranks_by_host() -> dict[str, list[int]] | None:
    """The ranks of the job that share a host, by a name of that host, on every rank of the job; None without a job.

    A host is named by its host name; hosts of one name get a few hex digits to tell them apart. Every rank calls this
    equally often; needs no process group.
    """
    if not is_joined():
        return None
    patience = timedelta(seconds=START_TIMEOUT_S)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    store.set(f"labkit/host of rank {rank}", json.dumps([platform.node(), host_identity()]))
    told = [json.loads(store.get(f"labkit/host of rank {other}")) for other in range(world_size)]
    return label_hosts([(str(name), str(identity)) for name, identity in told])


def ranks_here(world_size: int) -> int:
    """Of `world_size` ranks, how many are or would be on this machine: all, unless a job of that size spans several."""
    is_job = is_joined() and int(os.environ["WORLD_SIZE"]) == world_size
    return ranks_on_this_node() if is_job else world_size


def ranks_on_this_node() -> int:
    """How many ranks of the job share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def run_points(
    worker: Worker, points: Sequence[Any], plan: GroupPlan, environment: Mapping[str, str]
) -> Generator[Row | PointEnd, None, None]:
    """`launch` in the ranks of this job: rank 0 yields a point's rows and its end once all ranks agree."""
    actual = int(os.environ["WORLD_SIZE"])
    if actual != plan.world_size:
        if joined_rank() == 0:
            reason = f"needs {plan.world_size} ranks, but this job has {actual}"
            for index in range(len(points)):
                facts = {"world_size": actual, "backend": plan.backend, "start_method": "joined"}
                yield PointEnd(index, "skipped", reason, None, 0.0, facts)
        return
    with variables_set(environment):
        yield from _run_points(worker, points, plan)


def _run_points(worker: Worker, points: Sequence[Any], plan: GroupPlan) -> Generator[Row | PointEnd, None, None]:
    facts, control = _ready(plan)
    for index, point in enumerate(points):
        begun = time.monotonic()
        answers = _exchange(_answer(worker, point, plan), control)
        failure = _first_failure(answers)
        if joined_rank() == 0:
            for rank, answer in enumerate(answers):
                yield from (Row(index, rank, values) for values in answer["rows"])
            yield end_point(index, failure, time.monotonic() - begun, facts)
        if failure is not None and index + 1 < len(points):
            # some ranks may have given up inside a collective that others never entered
            facts, control = _ready(plan, new_group=True)
    if control is not None:
        dist.destroy_process_group(control)


def _answer(worker: Worker, point: Any, plan: GroupPlan) -> dict[str, Any]:
    """One point on this rank: the rows it yielded, and the failure that ended it, if one did."""
    answer: dict[str, Any] = {"rows": [], "failure": None}
    # Later than the time-out of the collectives: ranks that wait for a peer should get to say so.
    faulthandler.dump_traceback_later(plan.timeout_s + MARGIN_S, exit=True)
    try:
        for row in rows_of(worker, point):
            answer["rows"].append(row)
    except Exception as error:
        answer["failure"] = described(error) | {"at": time.time()}
    finally:
        faulthandler.cancel_dump_traceback_later()
    release_device_memory()
    return answer


def _exchange(answer: dict[str, Any], control: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Every rank's answer, by rank, on every rank."""
    if control is None:
        return [answer]
    answers: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(answers, answer, group=control)
    return answers


def _first_failure(answers: Sequence[Mapping[str, Any]]) -> RankFailure | None:
    reports = []
    for rank, answer in enumerate(answers):
        if (said := answer["failure"]) is not None:
            kind: Any = "oom" if said["oom"] else "exception"
            failure = RankFailure(rank, kind, f"rank {rank}: {said['message']}", said["traceback"], "")
            reports.append(Report(failure, said["at"], said["consequence"]))
    return first_cause(reports) if reports else None


def _ready(plan: GroupPlan, *, new_group: bool = False) -> tuple[dict[str, Any], dist.ProcessGroup | None]:
    """Make sure of the worker's process group, and make one for the exchange; the facts of both."""
    begun = time.monotonic()
    scheduling = use_scheduling(plan.scheduling)
    torch.set_num_threads(plan.threads)
    control = None
    if plan.backend is not None:
        if new_group or not _has_group(plan.backend, plan.timeout_s):
            _make_group(plan.backend, plan.timeout_s)
        # a peer may be as late as its watchdog lets it
        patience = timedelta(seconds=plan.timeout_s + 2 * MARGIN_S)
        control = dist.new_group(backend="gloo", timeout=patience)
    facts = {
        "world_size": plan.world_size,
        "backend": plan.backend,
        "threads": torch.get_num_threads(),
        "scheduling": scheduling,
        "start_method": "joined",
        "start_s": time.monotonic() - begun,
    }
    return facts, control


def _has_group(backend: str, timeout_s: float) -> bool:
    """Whether the job's process group is of this kind, and gives up when this launch wants it to."""
    if not dist.is_initialized() or dist.get_backend() != backend:
        return False
    group: Any = dist.group.WORLD
    options = group._get_backend(torch.device("cuda" if backend == "nccl" else "cpu")).options
    return bool(options._timeout == timedelta(seconds=timeout_s))


def _make_group(backend: str, timeout_s: float) -> None:
    """Make the job's process group, in place of the one there may be.

    Whoever destroys the default group and makes it again meets the addresses of the first one in the job's
    store, and hangs. So every group gets keys of its own; a counter for each rank in that same store, at which all
    ranks arrive equally often, numbers them.
    """
    patience = timedelta(seconds=START_TIMEOUT_S)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    number = store.add(f"labkit/groups of rank {rank}", 1)
    store.set(f"labkit/group {number} has rank {rank}", "")
    # All ranks, however late, before the group's own time-out counts.
    store.wait([f"labkit/group {number} has rank {other}" for other in range(world_size)], patience)
    _leave()  # only now: rank 0 may be the one that serves the store, and keeps it while somebody uses it
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    choose_gloo_interface(store, rank, world_size)
    own_keys = dist.PrefixStore(f"labkit/group {number}", store)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=own_keys, rank=rank, world_size=world_size, timeout=timeout)
    atexit.unregister(_leave)
    atexit.register(_leave)  # without it, leaving aborts now and then


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
