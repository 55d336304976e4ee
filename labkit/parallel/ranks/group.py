"""The caller's view of a group of ranks: start it, run points, close it.

The caller holds a connection to the group's leader, which ends the group when it closes, and a pipe to each rank. The
group's private directory has the rendezvous file, and each rank's output, stacks, turn and temporary files. Under
torchrun each process of the job starts one of the ranks (`JobGroup`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from labkit.machine.cgroups import oom_kills
from labkit.parallel.ranks import fork_server, torchrun
from labkit.parallel.ranks.results import (
    PointEnd,
    RankFailure,
    Row,
    death_failure,
    first_failure,
    read_turn,
    slowest_alternative,
)
from labkit.parallel.ranks.worker import LOOPBACK, START_TIMEOUT_S, GroupPlan
from labkit.parallel.transport import shared_memory

# After a first failure, others that may be its cause have this time; more if all failures so far are consequences.
GRACE_S, GRACE_FOR_CAUSE_S = 0.1, 1.0
CLOSE_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 1.0
OUTPUT_LINES, OUTPUT_BYTES = 40, 16 * 1024  # of a rank, per point

_Outcome = tuple[list[dict[str, Any]], RankFailure | None]


@dataclass
class _Rank:
    """One rank: its pipe, and the files that it writes."""

    number: int
    pipe: connection.Connection[Any, Any]
    directory: Path
    is_open: bool = True
    n_forwarded: int = 0  # bytes of its output that were shown

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has died, which the leader reports
            self.pipe.send_bytes(message)

    def receive(self) -> dict[str, Any] | None:
        """Return the next message if there is one."""
        try:
            return json.loads(self.pipe.recv_bytes()) if self.is_open and self.pipe.poll() else None
        except (EOFError, OSError):
            self.is_open = False
            return None

    def turn(self) -> tuple[int, str]:
        return read_turn(self.directory / f"rank-{self.number}.turn")

    def stacks(self) -> str:
        """Return the stacks written so far."""
        with contextlib.suppress(FileNotFoundError):  # none yet
            return (self.directory / f"rank-{self.number}.stacks").read_text(errors="replace")
        return ""

    def output(self, start: int = 0) -> tuple[list[str], int]:
        """Return the last lines of output after byte `start`, with a note if lines are left out, and the size of all.

        Of a progress bar that rewrites its line, the last state is the line.
        """
        with contextlib.suppress(FileNotFoundError), (self.directory / f"rank-{self.number}.log").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(start, size - OUTPUT_BYTES))
            text = file.read(size - begin).decode(errors="replace").removesuffix("\n")
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
            if begin > start or len(lines) > OUTPUT_LINES:
                lines = [f"... the last of {(size - start) / 1e6:.1f} MB of output", *lines[1:][-OUTPUT_LINES:]]
            return lines, size
        return [], start  # not yet, or the directory was removed

    def output_tail(self) -> str:
        return "\n".join(filter(None, self.output()[0]))


class RankGroup:
    """Ranks with a process group among them, which serve one point after another until one fails."""

    def __init__(
        self, plan: GroupPlan, payload: bytes, on_output: Callable[[str], None], numbers: Sequence[int] | None = None
    ) -> None:
        """`payload`: pickled, the plan, the worker and its points. `numbers`: the ranks to start; None: all."""
        self.facts: dict[str, Any] = {"world_size": plan.world_size, "backend": plan.backend}
        self._plan, self._payload, self._on_output = plan, payload, on_output
        self._numbers = range(plan.world_size) if numbers is None else numbers
        self._connection: socket.socket | None = None
        self._directory = Path(tempfile.gettempdir()) / f"labkit-{secrets.token_hex(8)}"
        self._ranks: dict[int, _Rank] = {}
        self._leader = -1
        self._kills_before = oom_kills() or 0

    def start(self, number: int = 0) -> RankFailure | None:
        """Start the ranks and wait until their process group is made; return the failure if it is not.

        `number`: of the group, in a job.
        """
        is_on_one_host = torchrun.ranks_here(self._plan.world_size) == self._plan.world_size
        environment = os.environ | {torchrun.GROUP_NUMBER: str(number)} | (LOOPBACK if is_on_one_host else {})
        if self._plan.backend == "gloo" and self._plan.world_size > 1:
            reason = shared_memory.unavailable_reason()
            self.facts["shared_memory"] = f"not available ({reason})" if reason else "compiled"
            environment |= {shared_memory.FAILURE: reason} if reason else {}
        begun, messages = time.monotonic(), list[dict[str, Any]]()
        failure: RankFailure | None
        try:
            self._connection = fork_server.open_group(self._directory, self._numbers, environment, self._payload)
            next(self._listen("ready", START_TIMEOUT_S, -1))
        except StopIteration as end:  # as always: a rank that is not ready sends no rows
            messages, failure = end.value
        except OSError as error:
            failure = RankFailure(None, "failed", f"the ranks were not started: {type(error).__name__}: {error}")
        except BaseException:
            self.close()
            raise
        if failure:
            self.close()
        else:
            self.facts |= messages[0]["facts"]
            self.facts |= {"start_method": "forkserver", "start_s": time.monotonic() - begun}
        return failure

    def run(self, index: int, excluded: Mapping[str, str]) -> Generator[Row, None, PointEnd]:
        """Run one point on every rank without the `excluded` alternatives; yield rows as they come, return the end.

        After an end other than ok the group is closed.
        """
        self._kills_before = oom_kills() or 0
        begun = time.monotonic()
        for rank in self._ranks.values():
            rank.send(json.dumps([index, excluded]).encode())
        messages, failure = yield from self._listen("done", self._plan.timeout_s, index)
        if failure:
            ended = time.monotonic()
            self.close()
        else:
            ended = max(message["at"] for message in messages)
            self._forward_output()
        return PointEnd(index, failure, ended - begun, self.facts)

    def has_lost_ranks(self) -> bool:
        """Return whether a rank has died since the last point."""
        return self._connection is not None and bool(connection.wait([self._connection], 0.0))

    def close(self) -> None:
        """End the ranks and all their children, and remove the directory. Safe to repeat."""
        self._forward_output()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.settimeout(CLOSE_TIMEOUT_S)
                while self._connection.recv(4096):  # until the leader has removed the group
                    pass
            self._connection.close()
        if self._directory.exists():  # the leader was killed, and perhaps the server
            fork_server.end_session(self._leader, self._directory)
        for rank in self._ranks.values():
            rank.pipe.close()
        self._connection, self._ranks = None, {}

    def _listen(self, kind: str, timeout_s: float, index: int) -> Generator[Row, None, _Outcome]:
        """Wait for a message of this kind from every rank; yield rows. Returns the messages and the failure, if any."""
        missing, deadline = set(self._numbers), time.monotonic() + timeout_s
        messages: list[dict[str, Any]] = []
        failures: list[RankFailure] = []
        while missing:
            is_late = time.monotonic() >= deadline
            for number, message in self._receive(max(0.0, deadline - time.monotonic())):
                if message["kind"] == "row":
                    handed_over = time.monotonic()
                    yield Row(index, number, message["values"])
                    deadline += time.monotonic() - handed_over  # the caller's time is not the point's
                    continue
                missing.discard(number)
                if message["kind"] == kind:
                    messages.append(message)
                    continue
                failures.append(self._describe_failure(number, message))
                grace_s = GRACE_FOR_CAUSE_S if all(one.is_consequence for one in failures) else GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
            if is_late and time.monotonic() >= deadline:
                break
        if failures:
            return messages, first_failure(failures)
        return messages, self._describe_lateness(kind, timeout_s, missing) if missing else None

    def _receive(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Wait until ranks start, send something or end; return (rank, message), in each rank's order."""
        assert self._connection is not None, "the group was started"
        watched: dict[Any, _Rank] = {rank.pipe: rank for rank in self._ranks.values() if rank.is_open}
        ready = connection.wait([self._connection, *watched], timeout_s)
        messages = ((rank.number, rank.receive()) for pipe, rank in watched.items() if pipe in ready)
        received = [(number, message) for number, message in messages if message]
        if self._connection not in ready:
            return received
        report = fork_server.read_report(self._connection) | {"at": time.monotonic()}
        if "pipe" in report:
            self._ranks[report["rank"]] = _Rank(report["rank"], report["pipe"], self._directory)
            self._leader = report["leader"]
            return received
        for number in [report["rank"]] if "rank" in report else self._numbers:
            if number in self._ranks:
                received += [(number, message) for message in iter(self._ranks[number].receive, None)]
            received.append((number, {"kind": "died", **report}))
        return received

    def _describe_failure(self, number: int, message: Mapping[str, Any]) -> RankFailure:
        if "reason" in message:
            return RankFailure(None, "failed", message["reason"], at=message["at"])
        rank = self._ranks[number]
        if message["kind"] == "failed":
            return replace(RankFailure(**message["failure"]), output_tail=rank.output_tail())
        return death_failure(
            number,
            message["code"],
            message["at"],
            output_tail=rank.output_tail(),
            stacks=rank.stacks(),
            alternative=rank.turn()[1],
            is_memory_full=(oom_kills() or 0) > self._kills_before,
        )

    def _describe_lateness(self, kind: str, timeout_s: float, missing: set[int]) -> RankFailure:
        late = [self._ranks[number] for number in sorted(missing & self._ranks.keys())]
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
        lateness = f"not ready after {timeout_s:g} s"
        if kind == "done":
            lateness = f"still running after {timeout_s:g} s (timeout_s)"
        slowest = slowest_alternative(rank.turn() for rank in late)
        message = f"{names} {lateness}" + (f", in {slowest}" if slowest else "")
        tails = "\n".join(filter(None, (rank.output_tail() for rank in late)))
        rank, now = min(missing) if len(missing) == 1 else None, time.monotonic()
        return RankFailure(rank, "timeout", message, self._dump_stacks(), tails, at=now)

    def _dump_stacks(self) -> str:
        """Return the stacks of every rank, as of now."""
        assert self._connection is not None, "the group was started"
        with contextlib.suppress(OSError):
            self._connection.send(b"s")
        deadline, before, now = time.monotonic() + STACKS_TIMEOUT_S, [""], [""]
        while time.monotonic() < deadline and (now != before or not all(now)):
            time.sleep(0.05)  # a dump has no end mark: it is complete when it no longer grows
            before, now = now, [rank.stacks() for rank in self._ranks.values()]
        return "\n".join(f"rank {n}:\n{dump or '(no answer)'}" for n, dump in zip(self._ranks, now, strict=False))

    def _forward_output(self) -> None:
        for rank in self._ranks.values():
            lines, rank.n_forwarded = rank.output(rank.n_forwarded)
            for line in lines:
                self._on_output(f"[rank {rank.number}] {line}")


class JobGroup:
    """This process's rank of a torchrun job, in step with the other processes, which call the same methods.

    Rank 0's process yields all rows at the end of a point: once every rank has ended, failed or reached its deadline.
    """

    def __init__(self, plan: GroupPlan, payload: bytes, on_output: Callable[[str], None]) -> None:
        """Arguments of `RankGroup`."""
        self._group = RankGroup(plan, payload, on_output, [torchrun.job_rank()])
        self.facts = self._group.facts

    def start(self) -> RankFailure | None:
        """Start the rank; return the failure, the same in every process, if any rank did not start."""
        failure = self._agree(self._group.start(torchrun.begin_step()))
        self.facts["start_method"] = "torchrun"
        return failure

    def run(self, index: int, excluded: Mapping[str, str]) -> Generator[Row, None, PointEnd]:
        """Run one point, as `RankGroup.run`."""
        torchrun.begin_step()
        rows, items = list[Any](), self._group.run(index, excluded)
        try:
            while True:
                rows.append(next(items).values)
        except StopIteration as stop:
            end: PointEnd = stop.value
        torchrun.job_store().set(f"rows of rank {torchrun.job_rank()}", json.dumps(rows))
        end = replace(end, failure=self._agree(end.failure), elapsed_s=max(torchrun.gather_from_ranks(end.elapsed_s)))
        for rank in range(torchrun.job_world_size() if torchrun.job_rank() == 0 else 0):
            for values in json.loads(torchrun.job_store().get(f"rows of rank {rank}")):
                yield Row(index, rank, values)
        return end

    def has_lost_ranks(self) -> bool:
        """Return whether the rank of any process has died since the last point."""
        torchrun.begin_step()
        return any(torchrun.gather_from_ranks(self._group.has_lost_ranks()))

    def close(self) -> None:
        """End the rank. Safe to repeat."""
        self._group.close()

    def _agree(self, failure: RankFailure | None) -> RankFailure | None:
        """Exchange how a step ended on each rank; return the failure to show."""
        ends = torchrun.gather_from_ranks(failure and asdict(failure))
        if failures := [RankFailure(**end) for end in ends if end]:
            self.close()
            return first_failure(failures)
        return None
