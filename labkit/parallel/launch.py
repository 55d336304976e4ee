"""Run a worker on a group of ranks, point by point, and yield its rows as they come.

    for item in launch(worker, points, world_size=4):
        match item:
            case Row():       # one measurement; the ranks are still at work
            case Retry():     # an alternative failed: its point begins again without it
            case PointEnd():  # ok, or why not; then the next point

Every rank calls ``worker(point)`` with `torch.distributed` ready, and its rows arrive here at once. One group of ranks
serves all points. A rank that raises, dies, aborts in C++ or hangs costs its point, never the sweep: the group ends,
the first failure is reported, and a new group runs the next point. If the worker has named the current alternative
(`ranks.results`) and it raised or died, the same point is measured again without it. Nothing is left behind, whatever
ends this process (`ranks.fork_server`).

Under torchrun each process of the job starts one rank, and rank 0's process yields all rows (`ranks.group.JobGroup`).
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

import cloudpickle
import torch

from labkit.machine.cgroups import available_cores, available_memory_bytes
from labkit.parallel.ranks import torchrun
from labkit.parallel.ranks.group import JobGroup, RankGroup
from labkit.parallel.ranks.results import PointEnd, RankError, RankFailure, Retry, Row, Worker
from labkit.parallel.ranks.worker import GroupPlan, call_once, make_code

__all__ = ["PointEnd", "RankError", "RankFailure", "Retry", "Row", "launch", "run_ranks", "too_many_ranks_reason"]

RANK_BYTES = 20 * 2**20  # forked from a server that has imported torch: 11 MiB, and buffers of the process group
RANKS_PER_CORE = 64  # more are not ready in time: every rank connects to every other

Items = Generator[Row | Retry | PointEnd, None, None]


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
    """Run `worker(point)` on `world_size` ranks for every point; yield rows at once and an end per point.

    Arguments are checked at once; nothing starts before the first item is requested. To stop early, close the result
    (`contextlib.closing`), which ends the ranks. torch has available cores // ranks threads on each rank, at least one.

    Args:
        worker: called on every rank with each point; yields mappings from names to JSON-able values.
            Imported, or defined in a notebook cell.
        points: anything that cloudpickle can carry.
        world_size: ranks, at most as many as this machine can start, by cores and memory.
        backend: of the process group: "gloo", "nccl" (a GPU per rank), or None for one rank without a group.
        scheduling: "batch" or "default"; the facts of a point's end have the policy in force.
        timeout_s: deadline of one point, from its start; time that the caller spends on a row does not count.
        on_output: gets the ranks' output, as "[rank r] line"; stderr if None.

    Raises:
        ValueError: an argument that cannot work, with the expected values.
    """
    plan = GroupPlan(world_size, backend, scheduling, timeout_s)
    _check(plan, worker)
    points = list(points)
    payload = _serialize((plan, worker, points))
    show = on_output or partial(print, file=sys.stderr)
    if torchrun.is_job_rank():
        return _run_in_job(plan, lambda: JobGroup(plan, payload, show), len(points))
    return _run_points(lambda: RankGroup(plan, payload, show), len(points))


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int, **options: Any) -> list[Any]:
    """Call `function(*args)` once on every rank and return the results by rank.

    For tests and notebooks; results must be JSON-able, and `options` are those of `launch`: the call has 120 s, unless
    `timeout_s` gives it another deadline. Under torchrun only rank 0 gets the results, the others an empty list.

    Raises:
        RankError: with rank, cause, traceback and last output, if any rank did not return.
        ValueError: as `launch`, and for a world size that the torchrun job does not have.
    """
    results: dict[int, Any] = {}
    worker = partial(call_once, function, args)
    with contextlib.closing(launch(worker, [None], world_size=world_size, **options)) as items:
        for item in items:
            if isinstance(item, Row):
                results[item.rank] = item.values["result"]
            elif isinstance(item, PointEnd) and item.status == "skipped":
                raise ValueError(f"world_size: {item.reason}; {torchrun.describe_job()}")
            elif isinstance(item, PointEnd) and item.failure is not None:
                raise RankError(item.failure)
    return [results[rank] for rank in sorted(results)]


def _run_in_job(plan: GroupPlan, make_group: Callable[[], JobGroup], n_points: int) -> Items:
    """Run the points on the ranks of this job. Rank 0's process yields the items, the others none."""
    size, is_first = torchrun.job_world_size(), torchrun.job_rank() == 0
    if size != plan.world_size:
        failure = RankFailure(None, "skipped", f"needs {plan.world_size} ranks, but this job has {size}")
        facts = {"world_size": size, "backend": plan.backend, "start_method": "torchrun"}
        yield from (PointEnd(i, failure, 0.0, facts) for i in range(n_points * is_first))
        return
    torchrun.job_store()  # ValueError now, not once more at the end
    items = _run_points(make_group, n_points)
    if not is_first:
        with contextlib.suppress(torchrun.LaunchStopped):
            list(items)
            torchrun.begin_step()
        return
    try:
        yield from items
    finally:
        torchrun.stop_launch()


def _run_points(make_group: Callable[[], RankGroup] | Callable[[], JobGroup], n_points: int) -> Items:
    group: RankGroup | JobGroup | None = None
    index, excluded = 0, dict[str, str]()
    try:
        while index < n_points:
            if group is not None and group.has_lost_ranks():
                group.close()
                group = None
            if group is None:
                group = make_group()
                if group.start() is not None:
                    group = make_group()  # once more: the machine may have been busy
                    if (failure := group.start()) is not None:
                        failure = replace(failure, message=f"the ranks did not start, twice: {failure.message}")
                        yield from (PointEnd(i, failure, 0.0, group.facts) for i in range(index, n_points))
                        return
            end = yield from group.run(index, excluded)
            if end.status != "ok":
                group = None
            if end.failure and end.failure.blamed and end.failure.blamed[0] not in excluded:
                alternative, reason = end.failure.blamed
                excluded[alternative] = reason
                yield Retry(index, alternative, reason, end.failure)
            else:
                yield end
                index, excluded = index + 1, {}
    finally:
        if group is not None:
            group.close()


def _check(plan: GroupPlan, worker: Any) -> None:
    """Raise ValueError for an argument that cannot work, before anything starts."""
    ranks, backend, timeout_s = plan.world_size, plan.backend, plan.timeout_s
    is_time = isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf
    is_count = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1
    expectations: list[tuple[bool, str, Any]] = [
        (callable(worker), "worker: expected a function of one point", worker),
        (is_count, "world_size: expected a whole number of ranks, 1 or more", ranks),
        (backend in ("gloo", "nccl", None), "backend: expected 'gloo', 'nccl' or None", backend),
        (backend is not None or ranks == 1, "backend: expected 'gloo' or 'nccl', None is for a single rank", backend),
        (plan.scheduling in ("batch", "default"), "scheduling: expected 'batch' or 'default'", plan.scheduling),
        (is_time, "timeout_s: expected a positive number of seconds", timeout_s),
    ]
    for is_met, expectation, value in expectations:
        if not is_met:
            raise ValueError(f"{expectation}, got {value!r:.80}")
    ranks_here = torchrun.ranks_here(ranks)
    if backend == "nccl" and ranks_here > (gpus := torch.cuda.device_count()):
        raise ValueError(f"world_size: expected at most {gpus}, since NCCL needs a GPU per rank, got {ranks}")
    if not torchrun.is_job_rank() and (limit := too_many_ranks_reason(ranks)) is not None:
        raise ValueError(f"world_size: this machine can start {limit}; got {ranks}")


def too_many_ranks_reason(ranks: int) -> str | None:
    """Return why so many ranks cannot be started here ("at most 128 ranks, 64 per core"), or None."""
    memory = available_memory_bytes()
    by_cores = RANKS_PER_CORE * available_cores(), f"{RANKS_PER_CORE} per core"
    by_memory = memory // RANK_BYTES, f"{RANK_BYTES / 2**20:.0f} MiB each of {memory / 2**30:.1f} GiB"
    most, reason = min(by_cores, by_memory)
    return None if ranks <= most else f"at most {max(0, most)} ranks, {reason}"


def _serialize(content: Any) -> bytes:
    """Pickle what a rank needs: names of what can be imported, the rest by value. ValueError if that cannot be."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(content)
    except Exception as error:
        raise ValueError(f"worker, points: expected what cloudpickle can send to a rank: {error}") from error
    return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make_code, (code.co_filename, make, arguments)


class _Pickler(cloudpickle.Pickler):
    """Keeps the name of the file that a function is from, which cloudpickle leaves out since 3.1.3: for tracebacks."""

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
