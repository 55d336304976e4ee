"""A group of ranks under torchrun: every process of the job forks one rank, and the ranks of all make a process group.

Every process of the job calls `launch` with the same arguments and iterates it to its end. They agree through the job's
store, step by step (a start, a point): all meet; each runs its rank; each notes how that ended. When a rank fails, its
process says at once that the step is over, and the others end their ranks, which may be inside a collective. Rank 0's
process yields the rows of all ranks; it begins the next step once its caller requests more, and the others wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from labkit.parallel.ranks.group import RankGroup, StartError
from labkit.parallel.ranks.hosts import GLOO_INTERFACE, choose_gloo_interface
from labkit.parallel.ranks.results import PointEnd, RankFailure, Row, end_point, failure_from_json, first_failing_rank
from labkit.parallel.ranks.torchrun import PATIENCE, job_rank, job_store, local_index, ranks_here, wait_for
from labkit.parallel.ranks.worker import MARGIN_S, START_TIMEOUT_S, GroupPlan

GO_ON, STOP, FAILED = "go on", "stop", "failed"


class LaunchStopped(Exception):
    """The caller in rank 0's process requests no more."""


class JobSteps:
    """The steps of one launch, which all processes of the job take together."""

    def __init__(self, world_size: int) -> None:
        self.rank, self._world_size, self._number = job_rank(), world_size, 0
        self._prefix = f"labkit/launch {job_store().add(f'labkit/launches of rank {self.rank}', 1)}"

    @property
    def key(self) -> str:
        """Of the current step."""
        return f"{self._prefix}/{self._number}"

    def begin(self, word: str = GO_ON) -> None:
        """Wait for the other processes, however late; raise LaunchStopped if rank 0's says so."""
        self._number += 1
        job_store().set(self._rank_key("is here", self.rank), word)
        if word == GO_ON:
            wait_for([self._rank_key("is here", rank) for rank in range(self._world_size)])
            if job_store().get(self._rank_key("is here", 0)) == STOP.encode():
                raise LaunchStopped

    def watch(self, group: RankGroup) -> None:
        """Interrupt this process's group as soon as a rank elsewhere has failed in this step."""
        threading.Thread(target=_watch, args=(job_store().clone(), f"{self.key}: over", group), daemon=True).start()

    def agree(self, failure: RankFailure | None, rows: list[dict[str, Any]], timeout_s: float) -> RankFailure | None:
        """Exchange how the step ended on each rank; return the failure to show. Rank 0 finds the rows in the store."""
        store, keys = job_store(), [self._rank_key("ended", rank) for rank in range(self._world_size)]
        if failure is not None:
            store.set(f"{self.key}: over", FAILED)
        store.set(self._rank_key("rows", self.rank), json.dumps(rows))
        store.set(keys[self.rank], json.dumps(failure and asdict(failure)))
        wait_for(keys, timedelta(seconds=timeout_s + 2 * MARGIN_S))
        ends = [json.loads(store.get(key)) for key in keys]
        if not any(ends):
            store.set(f"{self.key}: over", GO_ON)
        failures = [failure_from_json(end) for end in ends if end]
        return first_failing_rank(failures) if failures else None

    def take_rows(self, rank: int) -> list[dict[str, Any]]:
        """The rows of a rank, which the store has no longer."""
        key = self._rank_key("rows", rank)
        rows: list[dict[str, Any]] = json.loads(job_store().get(key))
        job_store().delete_key(key)
        return rows

    def _rank_key(self, what: str, rank: int) -> str:
        return f"{self.key}: rank {rank} {what}"


class JobGroup:
    """As `RankGroup`, of which each process of the job has one with a single rank."""

    def __init__(
        self, plan: GroupPlan, environment: Mapping[str, str], on_output: Callable[[str], None], steps: JobSteps
    ) -> None:
        self._steps, self._plan = steps, plan
        self._arguments = (environment, on_output)
        self._group: RankGroup | None = None

    def start(self, payload: bytes) -> None:
        """Start this process's rank; StartError on all processes if one did not start."""
        self._steps.begin()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job has the same server
        prefix = f"labkit/attempt {attempt}/{self._steps.key}: group"
        store = [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], prefix]
        group = self._group = RankGroup(replace(self._plan, store=store), *self._arguments, [self._steps.rank])
        failure = None
        self._steps.watch(group)
        try:
            group.start(payload)
        except StartError as error:
            failure = error.failure
        if failure := self._steps.agree(failure, [], START_TIMEOUT_S):
            self.close()
            raise StartError(failure, group.facts)
        group.facts["start_method"] = "torchrun"

    def run(self, index: int, excluded: Mapping[str, str]) -> Generator[Row, None, PointEnd]:
        """Run one point on every rank; rank 0's process yields the rows of all once they have ended."""
        assert self._group is not None, "the group was started"
        self._steps.begin()
        self._steps.watch(self._group)
        rows, end = _run_to_end(self._group.run(index, excluded))
        if failure := self._steps.agree(end.failure, rows, self._plan.timeout_s):
            self.close()
        if self._steps.rank == 0:
            for rank in range(self._plan.world_size):
                yield from (Row(index, rank, values) for values in self._steps.take_rows(rank))
        return end_point(index, failure, end.elapsed_s, end.facts)

    def is_whole(self) -> bool:
        """True: a rank that ends between two points costs the next one, on all processes alike."""
        return True

    def close(self) -> None:
        """End this process's rank. Safe to repeat."""
        if self._group is not None:
            self._group.close()


def job_environment(world_size: int) -> dict[str, str]:
    """Variables for the rank that this process forks: its place on the host, and the interface to the other hosts."""
    here = ranks_here(world_size)
    interface = choose_gloo_interface(job_store(), job_rank(), world_size, here)
    place = {"LOCAL_RANK": str(local_index()), "LOCAL_WORLD_SIZE": str(here)}
    return place | ({GLOO_INTERFACE: interface} if interface else {})


def _run_to_end(items: Generator[Row, None, PointEnd]) -> tuple[list[dict[str, Any]], PointEnd]:
    rows = []
    while True:
        try:
            rows.append(next(items).values)
        except StopIteration as stop:
            return rows, stop.value


def _watch(store: Any, key: str, group: RankGroup) -> None:
    with contextlib.suppress(RuntimeError):  # the store has gone, and rank 0's process with it
        store.wait([key], PATIENCE)
        if store.get(key) == FAILED.encode():
            group.interrupt()
