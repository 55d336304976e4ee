"""Run a worker on a group of ranks, point by point, and yield its rows as they come.

    for item in launch(worker, points, world_size=4):
        match item:
            case Row():       # one measurement; the ranks are still at work
            case PointEnd():  # ok, or why not; then the next point

Every rank calls ``worker(point)`` with `torch.distributed` ready. One group of ranks runs all
points. A rank that raises, dies, aborts in C++ or hangs costs its point, never the sweep: the group
ends, the first failure is reported with the alternative that was running (`ranks.results`), and a
new group runs the next point. Nothing is left behind, whatever ends this process
(`ranks.fork_server`).

Under torchrun each process of the job starts one rank, and rank 0's process yields all rows.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, NoReturn

import torch

from labkit.machine.cgroups import available_cores, available_memory_bytes
from labkit.parallel.ranks import torchrun
from labkit.parallel.ranks.group import RankGroup
from labkit.parallel.ranks.results import PointEnd, RankError, RankFailure, Row, Worker
from labkit.parallel.ranks.serialization import serialize
from labkit.parallel.ranks.worker import GroupPlan, call_once

__all__ = [
    "PointEnd",
    "RankError",
    "RankFailure",
    "Row",
    "launch",
    "run_ranks",
    "too_many_ranks_reason",
]

# Forked from a server that has imported torch, a rank takes 11 MiB, and buffers of the process
# group.
RANK_BYTES = 20 * 2**20
# More are not ready in time: every rank connects to every other.
RANKS_PER_CORE = 64

Items = Generator[Row | PointEnd, None, None]


def launch(
    worker: Worker,
    points: Iterable[Any],
    *,
    world_size: int,
    backend: str | None = "gloo",
    scheduling: str = "batch",
    timeout_s: float = 120.0,
    on_output: Callable[[str], None] | None = None,
) -> Items:
    """Run `worker(point)` on `world_size` ranks for every point; yield rows and ends as they come.

    Arguments are checked at once; nothing starts before the first item is requested. To stop early,
    close the result (`contextlib.closing`). torch has available cores // ranks threads on each
    rank, at least one.

    Args:
        worker: called on every rank with each point; yields mappings from names to JSON-able
            values. Imported, or defined in a notebook cell.
        points: anything that cloudpickle can carry.
        world_size: number of ranks. As many as a torchrun job has, else at most what this machine
            can start (cores, memory).
        backend: of the process group: "gloo", "nccl" (a GPU per rank), or None for one rank without
            a group.
        scheduling: "batch" or "default"; the facts of a point's end have the policy in force.
        timeout_s: deadline of one point, from its start; time that the caller spends on a row does
            not count.
        on_output: gets the ranks' output, as "[rank r] line"; stderr if None.

    Raises:
        ValueError: an argument that cannot work, with the expected values.
    """
    plan = GroupPlan(world_size, backend, scheduling, timeout_s)
    if not callable(worker):
        raise ValueError(f"worker: expected a function of one point, got {worker!r:.80}")
    _check_plan(plan)
    points = list(points)
    payload = serialize((plan, worker, points))
    group = RankGroup(plan, payload, on_output or partial(print, file=sys.stderr))
    items = _run_points(group, len(points))
    return _run_in_job(items) if torchrun.is_job_rank() else items


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int, **options: Any
) -> list[Any]:
    """Call `function(*args)` once on every rank and return the results by rank.

    For tests and notebooks; results must be JSON-able, and `options` are those of `launch`: the
    call has 120 s, unless `timeout_s` gives it another deadline. Under torchrun only rank 0 gets
    the results, the others an empty list.

    Raises:
        RankError: with rank, cause, traceback and last output, if any rank did not return.
        ValueError: as `launch`.
    """
    results: dict[int, Any] = {}
    worker = partial(call_once, function, args)
    with contextlib.closing(launch(worker, [None], world_size=world_size, **options)) as items:
        for item in items:
            if isinstance(item, Row):
                results[item.rank] = item.values["result"]
            elif isinstance(item, PointEnd) and item.failure is not None:
                raise RankError(item.failure)
    return [results[rank] for rank in sorted(results)]


def _run_in_job(items: Items) -> Items:
    """Run the points on the ranks of this job; only rank 0's process yields the items."""
    torchrun.job_store()  # ValueError now, before anything has to be closed
    if torchrun.job_rank() > 0:
        # This process takes the same steps as rank 0's, until that one's caller requests no more.
        with contextlib.suppress(torchrun.LaunchStopped):
            list(items)
            torchrun.begin_step()
        return
    try:
        yield from items
    finally:
        torchrun.broadcast_from_first_rank(False)  # stops the others in `begin_step`


def _run_points(group: RankGroup, n_points: int) -> Items:
    try:
        for index in range(n_points):
            # Without ranks, after two attempts, this point and all later ones have failed.
            if (failure := group.start()) is not None:
                yield from (PointEnd(i, failure, 0.0, group.facts) for i in range(index, n_points))
                return
            yield (yield from group.run(index))
    finally:
        group.close()


def _check_plan(plan: GroupPlan) -> None:
    """Raise ValueError for an argument that cannot work, before anything starts."""
    ranks = plan.world_size
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        _refuse("world_size", "a whole number of ranks, 1 or more", ranks)
    if plan.backend not in ("gloo", "nccl", None):
        _refuse("backend", "'gloo', 'nccl' or None", plan.backend)
    if plan.backend is None and ranks > 1:
        _refuse("backend", "'gloo' or 'nccl', None is for a single rank", None)
    if plan.scheduling not in ("batch", "default"):
        _refuse("scheduling", "'batch' or 'default'", plan.scheduling)
    timeout_s = plan.timeout_s
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        _refuse("timeout_s", "a positive number of seconds", timeout_s)
    n_gpus = torch.cuda.device_count()
    if plan.backend == "nccl" and torchrun.ranks_here(ranks) > n_gpus:
        _refuse("world_size", f"at most {n_gpus}, since NCCL needs a GPU per rank", ranks)
    reason = too_many_ranks_reason(ranks)
    if reason and torchrun.is_job_rank():
        raise ValueError(f"world_size: {reason}; {torchrun.describe_job()}")
    if reason:
        raise ValueError(f"world_size: this machine can start {reason}; got {ranks}")


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


def too_many_ranks_reason(ranks: int) -> str | None:
    """Return why there cannot be so many ranks, as "at most 128 ranks, 64 per core", or None.

    Under torchrun there are as many as the job has.
    """
    if torchrun.is_job_rank():
        size = torchrun.read_variable("WORLD_SIZE")
        return None if ranks == size else f"needs {ranks} ranks, but this job has {size}"
    by_cores = RANKS_PER_CORE * available_cores()
    if ranks > by_cores:
        return f"at most {by_cores} ranks, {RANKS_PER_CORE} per core"
    memory = available_memory_bytes()
    by_memory = max(0, memory // RANK_BYTES)
    if ranks > by_memory:
        sizes = f"{RANK_BYTES / 2**20:.0f} MiB each of {memory / 2**30:.1f} GiB"
        return f"at most {by_memory} ranks, {sizes}"
    return None
