"""Run a worker on a group of ranks, point by point, and hand over its rows as they come.

    for item in launch(worker, points, world_size=4):
        match item:
            case Row():       # one measurement; the ranks are still at work
            case Retry():     # an alternative failed: its point begins again without it
            case PointEnd():  # ok, or why not; then the next point

Every rank calls ``worker(point)`` with `torch.distributed` ready, and its rows arrive here at once. One group of ranks
serves all points. A rank that raises, dies, aborts in C++ or hangs costs its point, never the sweep: the group is
ended, the first failure is reported, and a new group carries on with the next point. If the worker has named the
current alternative (`ranks.current_alternative`) and it raised or died, the same point is measured again without it.
Nothing is left behind, whatever ends this process (`ranks.fork_server`).

Under torchrun every process of the job forks one of the ranks (`ranks.job_group`).
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import resource
import sys
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from labkit.machine import available_cores, available_memory_bytes
from labkit.parallel.ranks import torchrun
from labkit.parallel.ranks.group import RankGroup, StartError
from labkit.parallel.ranks.hosts import GLOO_INTERFACE, LOOPBACK
from labkit.parallel.ranks.job_group import STOP, JobGroup, JobSteps, LaunchStopped, job_environment
from labkit.parallel.ranks.results import PointEnd, RankError, RankFailure, Retry, Row, Worker, next_attempt
from labkit.parallel.ranks.worker import GroupPlan, call_once, make_code

__all__ = ["PointEnd", "RankError", "RankFailure", "Retry", "Row", "launch", "run_ranks", "too_many_ranks_reason"]

RANK_BYTES = 20 * 2**20  # forked from a server that has imported torch: 11 MiB, and buffers of the process group
RANKS_PER_CORE = 64  # more are not ready in time: every rank connects to every other
THREADS_PER_RANK = 4  # its main thread and gloo's
FILES_PER_RANK = 4  # of the parent; a rank has one for each of the others
SPARE = 64

Items = Generator[Row | Retry | PointEnd, None, None]


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
) -> Items:
    """Run `worker(point)` on `world_size` ranks for every point; yield rows at once and an end per point.

    The arguments are checked before this returns, and nothing starts before the first item is requested.
    To stop early, wrap the result in `contextlib.closing`: closing ends the ranks.

    Args:
        worker: called on every rank with each point; yields mappings from names to JSON-able values.
            Imported, or defined in a notebook cell.
        points: anything that cloudpickle can carry.
        world_size: ranks; as many as this machine can start, by cores, memory and its limits of files and processes.
        backend: of the process group: "gloo", "nccl" (a GPU per rank), or None for one rank without a group.
        scheduling: "batch" or "default"; the facts of a point's end have what was in force.
        threads: torch threads per rank; available cores // ranks, at least 1, if None.
        timeout_s: deadline of one point, from its start; time that the caller spends on a row does not count.
        environment: variables for the ranks, on top of this process's as they are now.
        on_output: gets the ranks' output, as "[rank r] line"; stderr if None.

    Raises:
        ValueError: an argument that cannot work, with the expected values.
    """
    environment = environment or {}
    _check(worker, world_size, backend, scheduling, threads, timeout_s, environment)
    points = list(points)
    threads = threads or max(1, available_cores() // torchrun.ranks_here(world_size))
    plan = GroupPlan(world_size, backend, scheduling, threads, timeout_s)
    payload, on_output = _serialize(worker, points), on_output or _print_to_stderr
    if torchrun.is_job_rank():
        return _run_in_job(plan, payload, len(points), environment, on_output)
    # A cluster's choice of interface gives way: these ranks are all on one machine.
    loopback = {GLOO_INTERFACE: LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    variables = {**os.environ, **loopback, **environment}
    return _run_points(partial(RankGroup, plan, variables, on_output), payload, len(points))


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
            elif isinstance(item, Retry):
                results.clear()
            elif item.failure is not None:
                raise RankError(_with_advice(item.failure))
            elif item.status != "ok":
                raise ValueError(f"world_size: {item.reason}; {torchrun.describe_job()}")
    return [results[rank] for rank in sorted(results)]


def _with_advice(failure: RankFailure) -> RankFailure:
    if failure.kind != "timeout":
        return failure
    return replace(failure, message=f"{failure.message}; run_ranks(..., timeout_s=...) sets this deadline")


def _run_in_job(
    plan: GroupPlan, payload: bytes, n_points: int, environment: Mapping[str, str], on_output: Callable[[str], None]
) -> Items:
    """Run the points in the ranks of this job. Rank 0's process yields the items, the others none."""
    actual = torchrun.job_world_size()
    if actual != plan.world_size:
        reason = f"needs {plan.world_size} ranks, but this job has {actual}"
        facts = {"world_size": actual, "backend": plan.backend, "start_method": "torchrun"}
        for index in range(n_points if torchrun.job_rank() == 0 else 0):
            yield PointEnd(index, "skipped", reason, None, 0.0, facts)
        return
    steps = JobSteps(plan.world_size)
    variables = {**os.environ, **job_environment(plan.world_size), **environment}
    items = _run_points(partial(JobGroup, plan, variables, on_output, steps), payload, n_points)
    if steps.rank > 0:
        with contextlib.suppress(LaunchStopped):
            for _ in items:
                pass
        return
    try:
        yield from items
    finally:
        steps.begin(STOP)


def _run_points(make_group: Callable[[], RankGroup | JobGroup], payload: bytes, n_points: int) -> Items:
    group: RankGroup | JobGroup | None = None
    index, excluded = 0, dict[str, str]()
    try:
        while index < n_points:
            if group is not None and not group.is_whole():
                group.close()  # a rank has died since the last point, which costs none
                group = None
            if group is None:
                try:
                    group = _start_group(make_group, payload)
                except StartError as error:
                    yield from _end_all(range(index, n_points), error)
                    return
            end = yield from group.run(index, excluded)
            if end.status != "ok":
                group = None
            if (retry := next_attempt(index, end.failure, excluded)) is not None:
                excluded[retry.alternative] = retry.reason
                yield retry
                continue
            yield end
            index, excluded = index + 1, {}
    finally:
        if group is not None:
            group.close()


def _start_group(make_group: Callable[[], RankGroup | JobGroup], payload: bytes) -> RankGroup | JobGroup:
    """A group that is ready for its first point; StartError if it does not start the second time either."""
    for is_last in (False, True):
        group = make_group()
        try:
            group.start(payload)
            break
        except StartError:
            if is_last:
                raise
    return group


def _end_all(indices: range, error: StartError) -> Iterator[PointEnd]:
    reason = f"the ranks did not start, twice: {error.failure.message}"
    failure = replace(error.failure, message=reason)
    for index in indices:
        yield PointEnd(index, "failed", reason, failure, 0.0, error.facts)


def _check(
    worker: Any,
    world_size: Any,
    backend: Any,
    scheduling: Any,
    threads: Any,
    timeout_s: Any,
    environment: Mapping[Any, Any],
) -> None:
    """Stop at an argument that cannot work, before anything starts."""
    expectations = (
        (callable(worker), f"worker: expected a function of one point, got {worker!r:.80}"),
        (_is_count(world_size), f"world_size: expected a whole number of ranks, 1 or more, got {world_size!r}"),
        (backend in ("gloo", "nccl", None), f"backend: expected 'gloo', 'nccl' or None, got {backend!r}"),
        (backend is not None or world_size == 1, "backend: expected 'gloo' or 'nccl'; None is for a single rank"),
        (scheduling in ("batch", "default"), f"scheduling: expected 'batch' or 'default', got {scheduling!r}"),
        (
            threads is None or _is_count(threads),
            f"threads: expected a whole number, 1 or more, or None to share the cores, got {threads!r}",
        ),
        (
            isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf,
            f"timeout_s: expected a positive number of seconds, got {timeout_s!r}",
        ),
        (
            all(isinstance(text, str) for item in environment.items() for text in item),
            f"environment: expected names and values to be strings, got {environment!r:.80}",
        ),
    )
    for is_met, message in expectations:
        if not is_met:
            raise ValueError(message)
    if backend == "nccl":
        _check_gpus(torchrun.ranks_here(world_size))
    if not torchrun.is_job_rank() and (limit := too_many_ranks_reason(world_size)) is not None:
        raise ValueError(f"world_size: this machine can start {limit}; got {world_size}")


def _check_gpus(ranks: int) -> None:
    gpus = torch.cuda.device_count()
    if not dist.is_nccl_available():
        raise ValueError("backend: expected 'gloo', since this build of torch has no NCCL, got 'nccl'")
    if ranks > gpus:
        raise ValueError(f"world_size: expected at most {gpus}, since NCCL needs a GPU per rank, got {ranks}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def too_many_ranks_reason(ranks: int) -> str | None:
    """Why so many ranks cannot be started here ("at most 128 ranks, 64 per core"), or None."""
    memory = available_memory_bytes()
    limits = [(RANKS_PER_CORE * available_cores(), f"{RANKS_PER_CORE} per core")]
    limits.append((memory // RANK_BYTES, f"{RANK_BYTES / 2**20:.0f} MiB each of {memory / 2**30:.1f} GiB"))
    for kind, name, share in (
        (resource.RLIMIT_NOFILE, "open files", FILES_PER_RANK),
        (resource.RLIMIT_NPROC, "processes and threads", THREADS_PER_RANK),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            limits.append(((limit - SPARE) // share, f"{share} of the {limit} {name} allowed each"))
    most, reason = min(limits)
    return None if ranks <= most else f"at most {max(0, most)} ranks, {reason}"


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _serialize(worker: Any, points: list[Any]) -> bytes:
    """Worker and points for a rank: names of what can be imported, the rest by value. ValueError if that cannot be."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump((worker, points))
    except Exception as error:
        raise ValueError(f"worker, points: expected what cloudpickle can send to a rank: {error}") from error
    return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make_code, (code.co_filename, make, arguments)


class _Pickler(cloudpickle.Pickler):
    """Keeps the name of the file that a function is from, which cloudpickle leaves out since 3.1.3: for tracebacks."""

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
