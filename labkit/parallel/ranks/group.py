"""The caller's view of a group of ranks: start it, run points, close it.

The caller holds a connection to the group's leader, which ends the group when it closes, and a pipe
to each rank. The group's private directory has the rendezvous file, and each rank's output, stacks,
current alternative and temporary files.

Under torchrun each process of the job has a group of one rank, and all call the same methods in
step. They agree on failures. Rank 0's process yields all rows at the end of a point, once every
rank has ended or reached its deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from labkit.machine.cgroups import oom_kills
from labkit.parallel.ranks import fork_server, results, torchrun
from labkit.parallel.ranks.debugger import terminal_variables
from labkit.parallel.ranks.rank import Rank
from labkit.parallel.ranks.results import PointEnd, RankFailure, Row
from labkit.parallel.ranks.server_process import end_session
from labkit.parallel.ranks.worker import LOOPBACK, START_TIMEOUT_S, GroupPlan, run_rank
from labkit.parallel.transport import library

# Time after a failure to wait for an earlier one that caused it; longer while all look like
# consequences.
GRACE_S = 0.1
GRACE_FOR_CAUSE_S = 1.0
CLOSE_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 1.0
LATENESS = {"ready": "not ready after {:g} s", "done": "still running after {:g} s (timeout_s)"}


class RankGroup:
    """Ranks with a process group among them, which run one point after another until one fails."""

    def __init__(self, plan: GroupPlan, payload: bytes, on_output: Callable[[str], None]) -> None:
        """`payload`: pickled, the plan, the worker and its points."""
        is_in_job = torchrun.is_job_rank()
        self.facts: dict[str, Any] = {}
        self._plan = plan
        self._payload = payload
        self._on_output = on_output
        self._numbers = [torchrun.job_rank()] if is_in_job else list(range(plan.world_size))
        self._leader: socket.socket | None = None  # the connection to it, once it is started
        self._leader_pid = -1  # known with the first rank
        self._directory = Path()
        self._ranks: dict[int, Rank] = {}
        self._kills_before = 0
        self._messages: list[dict[str, Any]] = []
        self._failure: RankFailure | None = None

    def start(self) -> RankFailure | None:
        """Start the ranks unless all of them run; return the failure if that is not possible.

        After a first failure they are started once more: the machine may have been busy.
        """
        torchrun.begin_step()
        has_died = self._leader is not None and bool(connection.wait([self._leader], 0.0))
        if any(torchrun.gather_from_ranks(has_died)):
            self.close()  # a rank has died since the last point
        if self._leader is not None or self._start_once() is None:
            return None
        failure = self._start_once()
        if failure is None:
            return None
        return replace(failure, message=f"the ranks did not start, twice: {failure.message}")

    def _start_once(self) -> RankFailure | None:
        self._directory = Path(tempfile.gettempdir()) / f"labkit-{secrets.token_hex(8)}"
        self.facts = {
            "world_size": self._plan.world_size,
            "backend": self._plan.backend,
            "start_method": "torchrun" if torchrun.is_job_rank() else "forkserver",
        }
        environment = self._environment()
        self._kills_before = oom_kills() or 0
        begun = time.monotonic()
        # Kept before anything starts: whenever an interrupt comes, `close` ends the leader, even if
        # somebody keeps the error with all its frames, as a notebook keeps its last one.
        self._leader, leader_end = socket.socketpair()
        try:
            with leader_end:
                fork_server.open_group(
                    leader_end, self._directory, self._numbers, environment, run_rank, self._payload
                )
            list(self._listen("ready", START_TIMEOUT_S, -1))
            for message in self._messages:
                self.facts |= message["facts"] | {"start_s": time.monotonic() - begun}
        except OSError as error:
            reason = f"the ranks were not started: {type(error).__name__}: {error}"
            self._failure = RankFailure(None, "failed", reason)
        failure = self._agree()
        if failure is None:
            torchrun.delete_other_groups(environment[torchrun.GROUP_NUMBER])
        return failure

    def _environment(self) -> dict[str, str]:
        """Return the variables of the ranks; note in the facts whether they can share memory."""
        environment = os.environ | terminal_variables()
        environment[torchrun.GROUP_NUMBER] = str(torchrun.begin_step())
        if torchrun.ranks_here(self._plan.world_size) == self._plan.world_size:
            environment |= LOOPBACK
        if self._plan.backend == "gloo" and self._plan.world_size > 1:
            reason = library.unavailable_reason()
            self.facts["shared_memory"] = "compiled"
            if reason is not None:
                self.facts["shared_memory"] = f"not available ({reason})"
                environment[library.FAILURE] = reason
        return environment

    def run(self, index: int) -> Generator[Row, None, PointEnd]:
        """Run one point on every rank; yield rows as they come, return the end."""
        torchrun.begin_step()
        self._kills_before = oom_kills() or 0
        begun = time.monotonic()
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):  # it has died, which the leader reports
                rank.pipe.send_bytes(json.dumps(index).encode())
        # A point's time begins here: a rank that is late to read its pipe is late at the point.
        rows = self._listen("done", self._plan.timeout_s, index)
        # Rank 0's process yields the rows of the whole job: the others keep theirs until the end.
        job_rows = []
        if torchrun.is_job_rank():
            job_rows = [asdict(row) for row in rows]
        else:
            yield from rows
        # The ranks say when they were done; reading their messages takes time, too.
        ended = time.monotonic()
        if self._failure is None:
            ended = max(message["at"] for message in self._messages)
        self._forward_output()
        failure = self._agree()
        elapsed_s = max(torchrun.gather_from_ranks(ended - begun))
        end = PointEnd(index, failure, elapsed_s, dict(self.facts))
        # Gathered before a yield: the caller may request nothing after it.
        for rank_rows in torchrun.gather_from_ranks(job_rows, only_first=True):
            yield from (Row(**row) for row in rank_rows)
        return end

    def close(self) -> None:
        """End the ranks and all their children, and remove the directory. Idempotent."""
        if self._leader is None:
            return
        self._forward_output()
        with contextlib.suppress(OSError):
            self._leader.shutdown(socket.SHUT_WR)
            self._leader.settimeout(CLOSE_TIMEOUT_S)
            while self._leader.recv(4096):  # until the leader has removed the group
                pass
        self._leader.close()
        # If it is still there, the leader was killed, and perhaps the server.
        if self._directory.exists():
            end_session(self._leader_pid, self._directory)
        for rank in self._ranks.values():
            rank.pipe.close()
        self._leader = None
        self._leader_pid = -1
        self._ranks = {}

    def _agree(self) -> RankFailure | None:
        """Close the group after a failure; return the one to show.

        It is the same in every process of a job.
        """
        if self._failure:
            self.close()  # first: ranks of other processes may wait for this one
        ends = torchrun.gather_from_ranks(self._failure and asdict(self._failure))
        failures = [RankFailure(**end) for end in ends if end]
        if not failures:
            return None
        self.close()
        return results.first_failure(failures)

    def _listen(self, kind: str, timeout_s: float, index: int) -> Iterator[Row]:
        """Wait for a message of this kind from every rank; yield rows.

        Sets the messages and the failure, if any.
        """
        missing = set(self._numbers)
        deadline = time.monotonic() + timeout_s
        failures: list[RankFailure] = []
        self._messages = []
        while missing:
            is_late = time.monotonic() >= deadline  # looks once more after it
            for number, message in self._receive(max(0.0, deadline - time.monotonic())):
                if message["kind"] == "row":
                    handed_over = time.monotonic()
                    yield Row(index, number, message["values"])
                    # The time that the caller takes for a row is not the point's.
                    deadline += time.monotonic() - handed_over
                    continue
                missing.discard(number)
                if message["kind"] == kind:
                    self._messages.append(message)
                    continue
                failures.append(self._describe_failure(number, message))
                has_cause = not all(failure.is_consequence for failure in failures)
                grace_s = GRACE_S if has_cause else GRACE_FOR_CAUSE_S
                deadline = min(deadline, time.monotonic() + grace_s)
            # The deadline may have moved while the caller had a row.
            if is_late and time.monotonic() >= deadline:
                break
        if missing and not failures:
            failures.append(self._describe_lateness(kind, timeout_s, sorted(missing)))
        self._failure = results.first_failure(failures) if failures else None

    def _receive(self, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Wait until ranks start, send something or end; yield (rank, message).

        A rank's messages come in its order, and its end last.
        """
        assert self._leader is not None, "the group was started"
        watched: dict[Any, Rank] = {
            rank.pipe: rank for rank in self._ranks.values() if not rank.pipe.closed
        }
        ready = connection.wait([self._leader, *watched], timeout_s)
        for pipe, rank in watched.items():
            if pipe in ready and (message := rank.receive()):
                yield rank.number, message
        if self._leader not in ready:
            return
        report = fork_server.read_report(self._leader) | {"at": time.monotonic()}
        if "pipe" in report:
            self._ranks[report["rank"]] = Rank(report["rank"], report["pipe"], self._directory)
            self._leader_pid = report["leader"]
            return
        ended = [report["rank"]] if "rank" in report else self._numbers
        for number in ended:
            # What a rank has sent before it died comes first.
            while number in self._ranks and (message := self._ranks[number].receive()):
                yield number, message
            yield number, {"kind": "died", **report}

    def _describe_failure(self, number: int, message: Mapping[str, Any]) -> RankFailure:
        if "reason" in message:
            return RankFailure(None, "failed", message["reason"], at=message["at"])
        rank = self._ranks[number]
        tail = rank.output_tail()
        if message["kind"] == "failed":
            return replace(RankFailure(**message["failure"]), output_tail=tail)
        # Read before and after the point: other processes of the cgroup may have been killed, too.
        is_memory_full = (oom_kills() or 0) > self._kills_before
        failure = results.death_failure(
            number,
            message["code"],
            message["at"],
            tail,
            rank.current_alternative()[1],
            is_memory_full,
        )
        return replace(failure, traceback=rank.stacks())

    def _describe_lateness(self, kind: str, timeout_s: float, missing: list[int]) -> RankFailure:
        late = [self._ranks[number] for number in missing if number in self._ranks]
        message = f"{torchrun.name_ranks(missing)} {LATENESS[kind].format(timeout_s)}"
        output: list[str] = []
        for rank in late:
            lines = rank.output_tail().splitlines()
            if len(late) > 1:
                lines = [f"[rank {rank.number}] {line}" for line in lines]
            output += lines
        return RankFailure(
            # Of several, none can be told to be the cause.
            missing[0] if len(missing) == 1 else None,
            "timeout",
            message,
            traceback=self._dump_stacks(missing),
            output_tail="\n".join(output),
            alternative=results.slowest_alternative([rank.current_alternative() for rank in late]),
            at=time.monotonic(),
        )

    def _dump_stacks(self, missing: list[int]) -> str:
        """Return the stacks of the missing ranks, as of now, and which others have finished."""
        assert self._leader is not None, "the group was started"
        # Whatever the leader receives makes it signal its ranks.
        with contextlib.suppress(OSError):
            self._leader.send(b"s")
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        before: dict[int, str] = {}
        late = [number for number in missing if number in self._ranks]
        now = dict.fromkeys(late, "")
        # A dump has no end mark: it is complete when it no longer grows.
        while time.monotonic() < deadline and (now != before or not all(now.values())):
            time.sleep(0.05)
            before = now
            now = {number: self._ranks[number].stacks() for number in late}
        stacks = {n: f"rank {n}:\n{dump or '(no answer)'}" for n, dump in now.items()}
        return "\n".join(stacks.get(n, f"rank {n}: has finished") for n in self._ranks)

    def _forward_output(self) -> None:
        for rank in self._ranks.values():
            lines, rank.n_forwarded = rank.output(rank.n_forwarded)
            for line in lines:
                self._on_output(f"[rank {rank.number}] {line}")
