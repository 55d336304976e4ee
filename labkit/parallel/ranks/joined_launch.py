"""Ranks that exist already: the same points, run inside a job that torchrun started.

Every rank of the job calls `launch` with the same arguments and iterates it to its end. Nothing is started
and nobody can be killed from here, so this is agreement instead of supervision, through the job's store. Each rank
puts its answer to a point there, rows and failure. The last one to do so says that the point is over. Rank 0 yields
rows and ends, and then tells the others to go on; they take part and yield nothing.

A rank that raises is an ordinary failed point. It says at once that the point is over, and leaves the process group.
Its peers may be waiting for it inside a collective: what gets them out of there is, under gloo, the end of its
connections, and under NCCL a thread of each rank that waits for that word and aborts the group. A rank that neither
answers nor fails in time dumps its stacks and ends, which is how torchrun learns that the job has failed.

The process group that the worker sees is made for the launch, and made anew after a failed point. What the caller
had before it has afterwards: its default process group, scheduling, threads, environment, current device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.core import build
from labkit.parallel.ranks import whose_turn
from labkit.parallel.ranks.answers import Worker, described, release_device_memory, rows_of
from labkit.parallel.ranks.deadlines import MARGIN_S
from labkit.parallel.ranks.device import use_device
from labkit.parallel.ranks.failure import blamed_in
from labkit.parallel.ranks.joined import PATIENCE, job_store, joined_rank, ranks_on_this_node, wait_for
from labkit.parallel.ranks.network_interface import GLOO_INTERFACE, choose_gloo_interface
from labkit.parallel.ranks.outcome import (
    Again,
    PointEnd,
    RankFailure,
    Report,
    Row,
    end_point,
    first_cause,
    next_attempt,
)
from labkit.parallel.ranks.own_group import OwnGroup
from labkit.parallel.ranks.process import variables_set
from labkit.parallel.ranks.rank import GroupPlan
from labkit.parallel.ranks.scheduling import scheduling_kept, use_scheduling

ANSWERED, FAILED = "answered", "failed"
GO_ON, STOP = "go on", "stop"


def run_points(
    worker: Worker, points: Sequence[Any], plan: GroupPlan, environment: Mapping[str, str]
) -> Generator[Row | Again | PointEnd, None, None]:
    """`launch` in the ranks of this job: rank 0 yields a point's rows and its end once all ranks have answered."""
    actual = int(os.environ["WORLD_SIZE"])
    if actual != plan.world_size:
        if joined_rank() == 0:
            reason = f"needs {plan.world_size} ranks, but this job has {actual}"
            for index in range(len(points)):
                facts = {"world_size": actual, "backend": plan.backend, "start_method": "joined"}
                yield PointEnd(index, "skipped", reason, None, 0.0, facts)
        return
    if not points:
        return
    key = _everybody_is_here(plan.world_size)
    with _state_kept({**_gloo_interface(plan), **environment}, plan.threads):
        joint = _JointLaunch(worker, plan, key)
        try:
            index, left_out = 0, dict[str, str]()
            while index < len(points):
                told = yield from joint.run_point(index, points[index], left_out)
                if told == STOP:
                    return
                index, left_out = (index + 1, {}) if told == GO_ON else (index, json.loads(told))
        finally:
            joint.leave()


class _JointLaunch:
    """One rank's part in a launch: its points one after another, in a process group that lasts until one fails."""

    def __init__(self, worker: Worker, plan: GroupPlan, key: str) -> None:
        self._worker, self._plan, self._key = worker, plan, key
        self._group: OwnGroup | None = None
        self._facts: dict[str, Any] = {}
        self._leaving = threading.Lock()

    def run_point(
        self, index: int, point: Any, left_out: Mapping[str, str]
    ) -> Generator[Row | Again | PointEnd, None, str]:
        """One point on this rank, and what rank 0 tells of it.

        Returns what rank 0 wants: the next one, the end, or the same one again; then, as JSON, what to leave out.
        """
        key, store = f"{self._key}/point {index}/{len(left_out)}", job_store()
        if not self._facts:
            self._get_ready(f"{key}: group")
        facts, begun = self._facts, time.monotonic()
        watch = _Watch(f"{key}: over", self._abort)
        whose_turn.new_point(index, left_out)
        answer = _answer(self._worker, point, self._plan)
        if (failure := answer["failure"]) is not None:
            failure["consequence"] |= watch.has_failed
            store.set(f"{key}: over", FAILED)
            self._abort()  # or leaving would wait for what peers have not begun, under NCCL
            self.leave()  # now: others may be waiting for the end of the connections
        store.set(f"{key}: rank {joined_rank()}", json.dumps(answer))
        if store.add(f"{key}: answers", 1) == self._plan.world_size:
            store.compare_set(f"{key}: over", "", ANSWERED)  # unless it has failed
        # a peer may be as late as its watchdog lets it
        if watch.ends_as(self._plan.timeout_s + 2 * MARGIN_S) == FAILED:
            self.leave()  # some ranks may have given up inside a collective that others never entered
        if joined_rank() > 0:
            wait_for([f"{key}: next"])
            return store.get(f"{key}: next").decode()
        word = STOP  # unless the caller asks for more
        try:
            answers = self._collect(key)
            failure = _first_failure(answers)
            if (again := next_attempt(index, failure, left_out)) is not None:
                yield again
                word = json.dumps({**left_out, again.alternative: again.reason})
            else:
                rows = ((rank, values) for rank, answer in enumerate(answers) for values in answer["rows"])
                yield from (Row(index, rank, values) for rank, values in rows)
                yield end_point(index, failure, time.monotonic() - begun, facts)
                word = GO_ON
        finally:
            store.set(f"{key}: next", word)
        return word

    def leave(self) -> None:
        """Take down the process group, if there is one: the next point gets another. Safe to repeat."""
        with self._leaving:
            group, self._group, self._facts = self._group, None, {}
            if group is not None:
                group.leave()

    def _abort(self) -> None:
        with self._leaving:
            if self._group is not None:
                self._group.abort()

    def _get_ready(self, key: str) -> None:
        """Make the worker's process group, and note what is in force."""
        begun, plan = time.monotonic(), self._plan
        of_gloo = {"shared_memory": build.prepare()} if plan.backend == "gloo" and plan.world_size > 1 else {}
        scheduling = use_scheduling(plan.scheduling)  # first: the threads of the process group inherit it
        if plan.backend is not None:
            self._group = OwnGroup(
                plan.backend,
                store=dist.PrefixStore(key, job_store()),  # type: ignore[attr-defined]
                rank=joined_rank(),
                world_size=plan.world_size,
                timeout_s=plan.timeout_s,
                device=torch.device(use_device("cuda")) if plan.backend == "nccl" else None,
            )
        self._facts = {
            "world_size": plan.world_size,
            "backend": plan.backend,
            "threads": torch.get_num_threads(),
            "scheduling": scheduling,
            "start_method": "joined",
            "start_s": time.monotonic() - begun,
            **of_gloo,
        }

    def _collect(self, key: str) -> list[dict[str, Any]]:
        """Every rank's answer, by rank; the store has them no longer. A failed point is over before all are there."""
        keys = [f"{key}: rank {rank}" for rank in range(self._plan.world_size)]
        wait_for(keys, timedelta(seconds=self._plan.timeout_s + 2 * MARGIN_S))
        answers = [json.loads(job_store().get(of_rank)) for of_rank in keys]
        for of_rank in keys:
            job_store().delete_key(of_rank)
        return answers


class _Watch:
    """Waits for the word that a point is over, beside this rank's work on it; `on_failure` is called if it failed.

    Asleep until then, so it takes nothing from what is measured, on a connection to the store of its own.
    """

    def __init__(self, key: str, on_failure: Callable[[], None]) -> None:
        self.has_failed = False
        self._word = ""
        arguments = (job_store().clone(), key, on_failure)
        self._thread = threading.Thread(target=self._listen, args=arguments, name="labkit-watch-point", daemon=True)
        self._thread.start()

    def ends_as(self, timeout_s: float) -> str:
        """Wait for the word and return it; RuntimeError if it does not come in time."""
        self._thread.join(timeout_s)
        if not self._word:
            raise RuntimeError(f"the other ranks of the job have not ended the point within {timeout_s:g} s")
        return self._word

    def _listen(self, store: Any, key: str, on_failure: Callable[[], None]) -> None:
        word = FAILED  # if the store has gone, and rank 0 with it
        with contextlib.suppress(RuntimeError):
            store.wait([key], PATIENCE)
            word = store.get(key).decode()
        if word == FAILED:
            self.has_failed = True
            on_failure()
        self._word = word


def _everybody_is_here(world_size: int) -> str:
    """Wait for all ranks, however late, before any time-out counts; what the keys of this launch begin with."""
    store, rank = job_store(), joined_rank()
    key = f"labkit/launch {store.add(f'labkit/launches of rank {rank}', 1)}"
    store.set(f"{key} has rank {rank}", "")
    wait_for([f"{key} has rank {other}" for other in range(world_size)])
    return key


def _gloo_interface(plan: GroupPlan) -> dict[str, str]:
    interface = choose_gloo_interface(job_store(), joined_rank(), plan.world_size, ranks_on_this_node())
    return {} if interface is None else {GLOO_INTERFACE: interface}


@contextlib.contextmanager
def _state_kept(environment: Mapping[str, str], threads: int) -> Iterator[None]:
    """Variables and torch threads as the launch wants them; afterwards they are as before, as scheduling and device."""
    threads_before = torch.get_num_threads()
    has_cuda = torch.cuda.is_available()
    device_before = torch.cuda.current_device() if has_cuda and torch.cuda.is_initialized() else 0
    torch.set_num_threads(threads)
    try:
        with variables_set(environment), scheduling_kept():
            yield
    finally:
        torch.set_num_threads(threads_before)
        if has_cuda and torch.cuda.is_initialized():
            torch.cuda.set_device(device_before)


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


def _first_failure(answers: Sequence[Mapping[str, Any]]) -> RankFailure | None:
    reports = []
    for rank, answer in enumerate(answers):
        if (said := answer["failure"]) is not None:
            kind: Any = "oom" if said["oom"] else "exception"
            message = f"rank {rank}: {said['message']}"
            failure = RankFailure(rank, kind, message, said["traceback"], "", blamed_in(said))
            reports.append(Report(failure, said["at"], said["consequence"]))
    return first_cause(reports) if reports else None
