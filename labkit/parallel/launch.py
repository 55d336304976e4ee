"""Run a measuring function on a group of ranks, point by point, and hand over its rows as they come.

    for item in launch(worker, points, world_size=4):
        match item:
            case Row():       # one measurement; the ranks are still at work
            case PointEnd():  # ok, or why not; then the next point

Every rank calls ``worker(point)`` with `torch.distributed` ready, and what it yields arrives here at once.
One group of ranks serves all points. A rank that raises, dies, aborts in C++ or hangs costs its point, never
the sweep: the group is killed, the first failure is reported, and a new group carries on with the next point. If the
worker said whose turn it was (`labkit.parallel.ranks.whose_turn`), the failure costs that alternative only: an `Again`
is handed over, and a new group measures the same point without it. One that hangs costs the time of the point as well;
where it has taken less than half of that, all are slow, and the point is late.
Nothing is left behind, whatever ends this process: `labkit.parallel.ranks.rank` says how.

Under torchrun the ranks exist already, and the same call runs the points in them, as
`labkit.parallel.ranks.joined_launch` says.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from labkit.machine import available_cores
from labkit.parallel.ranks import joined, joined_launch
from labkit.parallel.ranks.answers import Worker
from labkit.parallel.ranks.capacity import why_too_many
from labkit.parallel.ranks.group import RankGroup, StartError
from labkit.parallel.ranks.network_interface import GLOO_INTERFACE, LOOPBACK
from labkit.parallel.ranks.outcome import Again, PointEnd, RankError, RankFailure, Row, next_attempt
from labkit.parallel.ranks.packing import packed
from labkit.parallel.ranks.rank import GroupPlan, call_once

__all__ = ["Again", "PointEnd", "RankError", "RankFailure", "Row", "launch", "run_ranks"]

BACKENDS = ("gloo", "nccl", None)
SCHEDULINGS = ("batch", "default")


def launch(
    worker: Worker,
    points: Iterable[Any],
    *,
    world_size: int,
    backend: str | None = "gloo",
    scheduling: str = "batch",
    threads: int | None = None,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Generator[Row | Again | PointEnd, None, None]:
    """Run `worker(point)` on `world_size` ranks for every point; yield rows at once and an end a point.

    The arguments are checked before this returns, and nothing starts before the first item is asked for.
    Whoever may stop early wraps the result in `contextlib.closing`; closing kills the ranks.

    Args:
        worker: called on every rank with each point; yields mappings from names to JSON-able values.
            Imported, or defined in a notebook cell.
        points: anything that cloudpickle can carry.
        world_size: ranks; as many as this machine can start, by cores, memory and its limits of files and processes.
        backend: of the process group: "gloo", "nccl" (a GPU a rank), or None for one rank without a group.
        scheduling: "batch" or "default"; what was in force is in the facts.
        threads: torch threads a rank; available cores // ranks, at least 1, if not given.
        timeout_s: deadline of one point, from its start; time that the caller spends on a row does not count.
        environment: variables for the ranks, on top of this process's own as they are now.
        on_output: gets what ranks write, as "[rank r] line"; stderr if not given.

    Raises:
        ValueError: an argument that cannot work, with what was expected.
    """
    _check(worker, world_size, backend, scheduling, threads, timeout_s)
    points = list(points)
    plan = GroupPlan(
        payload=b"" if joined.is_joined() else packed(worker, points),
        world_size=world_size,
        backend=backend,
        scheduling=scheduling,
        threads=threads or max(1, available_cores() // _ranks_here(world_size)),
        timeout_s=timeout_s,
        environment=_rank_environment(environment or {}),
    )
    if joined.is_joined():
        return joined_launch.run_points(worker, points, plan, environment or {})
    return _run_points(plan, len(points), on_output or _to_stderr)


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int, **options: Any) -> list[Any]:
    """Call `function(*args)` once on every rank and return the results by rank.

    For tests and notebooks; results must be JSON-able, `options` are those of `launch`. The call has 120 s, unless
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
            elif isinstance(item, Again):
                results.clear()
            elif item.failure is not None:
                raise RankError(_with_advice(item.failure))
            elif item.status != "ok":
                raise ValueError(f"world_size: {item.reason}")
    return [results[rank] for rank in sorted(results)]


def _with_advice(failure: RankFailure) -> RankFailure:
    if failure.kind != "timeout":
        return failure
    return replace(failure, message=f"{failure.message}; run_ranks(..., timeout_s=...) sets this deadline")


def _run_points(
    plan: GroupPlan, number: int, on_output: Callable[[str], None]
) -> Generator[Row | Again | PointEnd, None, None]:
    group: RankGroup | None = None
    index, left_out, n_hanging = 0, dict[str, str](), 0
    try:
        while index < number:
            if group is None or not group.is_whole():
                if group is not None:  # a rank has died since the last point, and took nothing with it
                    group.close()
                try:
                    group = _started(plan, on_output)
                except StartError as error:
                    yield from _not_started(range(index, number), error, plan)
                    return
            end = yield from group.run(index, left_out)
            if end.status != "ok":
                group = None
            if (again := next_attempt(index, end.failure, left_out, n_hanging)) is not None:
                left_out[again.alternative] = again.reason
                n_hanging += end.status == "timeout"
                yield again
                continue
            yield end
            index, left_out, n_hanging = index + 1, {}, 0
        if group is not None:
            group.leave()
    finally:
        if group is not None:
            group.close()


def _started(plan: GroupPlan, on_output: Callable[[str], None]) -> RankGroup:
    """A group that is ready for its first point; StartError if it does not come up the second time either."""
    group = RankGroup(plan, on_output)
    try:
        group.start()
    except StartError:
        group = RankGroup(plan, on_output)
        group.start()
    return group


def _not_started(indices: range, error: StartError, plan: GroupPlan) -> Iterator[PointEnd]:
    reason = f"the ranks did not start, twice: {error.failure.message}"
    failure = replace(error.failure, message=reason)
    for index in indices:
        facts = {"world_size": plan.world_size, "backend": plan.backend}
        yield PointEnd(index, "failed", reason, failure, 0.0, facts)


def _check(
    worker: object,
    world_size: object,
    backend: object,
    scheduling: object,
    threads: object,
    timeout_s: object,
) -> None:
    """Stop at an argument that cannot work, before anything starts."""
    if not callable(worker):
        raise ValueError(f"worker: expected a function of one point, got {worker!r:.80}")
    if not _is_count(world_size):
        raise ValueError(f"world_size: expected a whole number of ranks, 1 or more, got {world_size!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected 'gloo', 'nccl' or None, got {backend!r}")
    if backend is None and world_size != 1:
        raise ValueError(f"backend: expected 'gloo' or 'nccl' for {world_size} ranks; None is for a single one")
    if scheduling not in SCHEDULINGS:
        raise ValueError(f"scheduling: expected 'batch' or 'default', got {scheduling!r}")
    if threads is not None and not _is_count(threads):
        raise ValueError(f"threads: expected a whole number, 1 or more, or None to share the cores, got {threads!r}")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s: expected a positive number of seconds, got {timeout_s!r}")
    if backend == "nccl":
        _check_gpus(world_size)
    if not joined.is_joined() and (limit := why_too_many(world_size)) is not None:
        raise ValueError(f"world_size: this machine can start {limit}; got {world_size}")


def _check_gpus(world_size: int) -> None:
    ranks, gpus = _ranks_here(world_size), torch.cuda.device_count()
    if not dist.is_nccl_available():
        raise ValueError("backend: expected 'gloo', since this build of torch has no NCCL, got 'nccl'")
    if ranks > gpus:
        raise ValueError(f"world_size: expected at most {gpus}, since NCCL needs a GPU a rank here, got {ranks}")


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _ranks_here(world_size: int) -> int:
    """Ranks on this machine: all, unless a torchrun job spans several."""
    return joined.ranks_on_this_node() if joined.is_joined() else world_size


def _rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's variables as they are now, loopback for the ranks' sockets, and the caller's on top."""
    if not all(isinstance(text, str) for item in environment.items() for text in item):
        raise ValueError(f"environment: expected names and values to be strings, got {environment!r:.80}")
    # A cluster's own choice of interface gives way: these ranks are all on one machine.
    return {
        **os.environ,
        GLOO_INTERFACE: LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        **environment,
    }


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
