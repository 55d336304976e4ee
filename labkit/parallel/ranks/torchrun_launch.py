"""A launch in ranks that exist already: the same points, inside a job that torchrun started.

Every rank of the job calls `launch` with the same arguments and iterates it to its end. Nothing is started and no rank
can be killed from here: the ranks agree through the job's store instead. Each rank puts its rows and its failure
there; the last one notes that the point is over. Rank 0 yields rows and ends, and then lets the others go on; they take
part and yield nothing.

A rank that raises notes at once that the point is over, and leaves the process group. Its peers may be inside a
collective: under gloo the end of its connections gets them out, under NCCL a thread of each rank that waits for the
note and aborts the group. A rank that neither answers nor fails in time dumps its stacks and ends, which is how
torchrun learns that the job has failed.

The launch makes a process group of its own, and another after a failed point. It refuses if the caller has one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.parallel.ranks import current_alternative
from labkit.parallel.ranks.hosts import GLOO_INTERFACE, choose_gloo_interface
from labkit.parallel.ranks.results import (
    PointEnd,
    Retry,
    Row,
    Worker,
    describe_error,
    end_point,
    exception_failure,
    first_failing_rank,
    next_attempt,
    worker_rows,
)
from labkit.parallel.ranks.torchrun import PATIENCE, job_rank, job_store, job_world_size, ranks_here, wait_for
from labkit.parallel.ranks.worker import (
    MARGIN_S,
    GroupPlan,
    release_device_memory,
    use_device,
    use_scheduling,
)
from labkit.parallel.transport import build

ANSWERED, FAILED = "answered", "failed"
GO_ON, STOP = "go on", "stop"


def run_points(
    worker: Worker, points: Sequence[Any], plan: GroupPlan, environment: Mapping[str, str]
) -> Generator[Row | Retry | PointEnd, None, None]:
    """`launch` in the ranks of this job: rank 0 yields a point's rows and its end once all ranks have answered.

    ValueError on all ranks if one of them has a default process group.
    """
    actual = job_world_size()
    if actual != plan.world_size:
        if job_rank() == 0:
            reason = f"needs {plan.world_size} ranks, but this job has {actual}"
            for index in range(len(points)):
                facts = {"world_size": actual, "backend": plan.backend, "start_method": "torchrun"}
                yield PointEnd(index, "skipped", reason, None, 0.0, facts)
        return
    if not points:
        return
    key = _meet(plan.world_size)
    local = ranks_here(plan.world_size)
    interface = choose_gloo_interface(job_store(), job_rank(), plan.world_size, local)
    variables = {**({GLOO_INTERFACE: interface} if interface else {}), **environment}
    with _temporary_state(variables, plan.threads), contextlib.closing(_JobLaunch(worker, plan, key)) as job_launch:
        index, excluded = 0, dict[str, str]()
        while index < len(points):
            word = yield from job_launch.run_point(index, points[index], excluded)
            if word == STOP:
                return
            index, excluded = (index + 1, {}) if word == GO_ON else (index, json.loads(word))


@contextlib.contextmanager
def scoped_process_group(backend: str, **options: Any) -> Iterator[None]:
    """Torch's default process group inside the block, for a process that has none outside of it."""
    hook = sys.excepthook
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # with all groups that the worker has made
        sys.excepthook = hook
        gc.collect()  # under gloo, connections end with the last reference, and with them the peers' waiting


class _JobLaunch:
    """One rank's part in a launch: its points one after another, in a process group that lasts until one fails."""

    def __init__(self, worker: Worker, plan: GroupPlan, key: str) -> None:
        self._worker, self._plan, self._key = worker, plan, key
        self._group = contextlib.ExitStack()
        self._facts: dict[str, Any] = {}

    def run_point(
        self, index: int, point: Any, excluded: Mapping[str, str]
    ) -> Generator[Row | Retry | PointEnd, None, str]:
        """Run one point on this rank; return rank 0's word: go on, stop, or what to exclude next time, as JSON."""
        key, store = f"{self._key}/point {index}/{len(excluded)}", job_store()
        if not self._facts:
            self._join_group(f"{key}: group")
        facts, begun = self._facts, time.monotonic()
        if self._plan.backend == "nccl":  # on another connection to the store: this one may be in use
            arguments = (store.clone(), f"{key}: over")
            threading.Thread(target=_abort_when_failed, args=arguments, name="labkit-abort", daemon=True).start()
        current_alternative.begin_point(index, excluded)
        rows, error = _run_worker(self._worker, point, self._plan.timeout_s)
        if error is not None:
            error["is_consequence"] |= store.check([f"{key}: over"])
            store.set(f"{key}: over", FAILED)
            _abort(self._plan.backend)  # or leaving would wait for what peers have not begun
            self.close()  # now: others may be waiting for the end of the connections
        store.set(f"{key}: rank {job_rank()}", json.dumps([rows, error]))
        if store.add(f"{key}: answers", 1) == self._plan.world_size:
            store.compare_set(f"{key}: over", "", ANSWERED)  # unless it has failed
        wait_for([f"{key}: over"], timedelta(seconds=self._plan.timeout_s + 2 * MARGIN_S))
        if store.get(f"{key}: over") == FAILED.encode():
            self.close()  # some ranks may have given up inside a collective that others never entered
        if job_rank() > 0:
            wait_for([f"{key}: next"])
            return store.get(f"{key}: next").decode()
        word = STOP  # unless the caller asks for more
        try:
            answers = self._collect(key)
            failures = [exception_failure(rank, one, one["at"]) for rank, (_, one) in enumerate(answers) if one]
            failure = first_failing_rank(failures) if failures else None
            if (retry := next_attempt(index, failure, excluded)) is not None:
                yield retry
                word = json.dumps({**excluded, retry.alternative: retry.reason})
            else:
                yield from (Row(index, rank, row) for rank, (rows, _) in enumerate(answers) for row in rows)
                yield end_point(index, failure, time.monotonic() - begun, facts)
                word = GO_ON
        finally:
            store.set(f"{key}: next", word)
        return word

    def close(self) -> None:
        """Take down the process group: the next point gets another. Safe to repeat."""
        self._facts = {}
        self._group.close()

    def _join_group(self, key: str) -> None:
        """Make the worker's process group, and note the facts."""
        begun, plan = time.monotonic(), self._plan
        facts: dict[str, Any] = {"world_size": plan.world_size, "backend": plan.backend, "start_method": "torchrun"}
        if plan.backend == "gloo" and plan.world_size > 1:
            facts["shared_memory"] = build.prepare()
        facts["scheduling"] = use_scheduling(plan.scheduling)  # first: the threads of the process group inherit it
        if plan.backend is not None:
            group = scoped_process_group(
                plan.backend,
                store=dist.PrefixStore(key, job_store()),  # type: ignore[attr-defined]
                rank=job_rank(),
                world_size=plan.world_size,
                timeout=timedelta(seconds=plan.timeout_s),
                device_id=torch.device(use_device("cuda")) if plan.backend == "nccl" else None,
            )
            self._group.enter_context(group)
        self._facts = {**facts, "threads": torch.get_num_threads(), "start_s": time.monotonic() - begun}

    def _collect(self, key: str) -> list[Any]:
        """(rows, error) of every rank; the store has them no longer. A failed point is over before all are there."""
        keys = [f"{key}: rank {rank}" for rank in range(self._plan.world_size)]
        wait_for(keys, timedelta(seconds=self._plan.timeout_s + 2 * MARGIN_S))
        answers = [json.loads(job_store().get(one)) for one in keys]
        for one in keys:
            job_store().delete_key(one)
        return answers


def _abort_when_failed(store: Any, key: str) -> None:
    """Wait for the note that a point is over, and abort the group if the point failed. In a thread."""
    is_failed = True  # if the store has gone, and rank 0 with it
    with contextlib.suppress(RuntimeError):
        store.wait([key], PATIENCE)
        is_failed = store.get(key) == FAILED.encode()
    if is_failed:
        _abort("nccl")


def _abort(backend: str | None) -> None:
    """Have NCCL's collectives fail. gloo's end with the connections, which an aborted group would keep."""
    if backend == "nccl" and dist.is_initialized():
        distributed_c10d._abort_process_group()


def _meet(world_size: int) -> str:
    """Wait for all ranks, however late, before any time-out counts; a prefix for the keys of this launch."""
    store, rank = job_store(), job_rank()
    key = f"labkit/launch {store.add(f'labkit/launches of rank {rank}', 1)}"
    store.set(f"{key} has rank {rank}", str(dist.is_initialized()))
    keys = [f"{key} has rank {other}" for other in range(world_size)]
    wait_for(keys)
    if any(store.get(one) == b"True" for one in keys):
        raise ValueError(
            "this job has a default process group, and a launch needs one of its own: "
            "call torch.distributed.destroy_process_group() before it"
        )
    return key


@contextlib.contextmanager
def _temporary_state(environment: Mapping[str, str], threads: int) -> Iterator[None]:
    """Variables and torch threads of a launch; afterwards they are as before, as are scheduling and device."""
    threads_before, environment_before = torch.get_num_threads(), dict(os.environ)
    policy_before = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "SCHED_BATCH") else None
    device_before = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    torch.set_num_threads(threads)
    os.environ.update(environment)
    try:
        yield
    finally:
        if policy_before is not None:
            os.sched_setscheduler(0, *policy_before)
        os.environ.clear()
        os.environ.update(environment_before)
        torch.set_num_threads(threads_before)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(device_before)


def _run_worker(worker: Worker, point: Any, timeout_s: float) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """One point on this rank: the rows it yielded, and the error that ended it, if one did."""
    rows: list[dict[str, Any]] = []
    error = None
    # Later than the time-out of the collectives: ranks that wait for a peer should get to say so.
    faulthandler.dump_traceback_later(timeout_s + MARGIN_S, exit=True)
    try:
        for row in worker_rows(worker, point):
            rows.append(row)
    except Exception as raised:
        error = describe_error(raised) | {"at": time.time()}
    finally:
        faulthandler.cancel_dump_traceback_later()
    release_device_memory()
    return rows, error
