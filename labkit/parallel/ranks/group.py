"""A group of ranks as the process that starts them sees it: start, run points, close.

The caller holds a connection to the group, which is closed to end it (`rank_process.py`), and one to each rank. The
group's private directory has the rendezvous file, the ranks' output, stacks, current alternatives and temporary files.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from labkit.machine.cgroups import oom_kills
from labkit.parallel.ranks import current_alternative, rank_process
from labkit.parallel.ranks.rank_process import RankProcess
from labkit.parallel.ranks.results import (
    PointEnd,
    RankFailure,
    Row,
    death_failure,
    describe_kernel_kills,
    end_point,
    failure_from_json,
    first_failing_rank,
)
from labkit.parallel.ranks.worker import START_TIMEOUT_S, GroupPlan
from labkit.parallel.transport import build

GRACE_S = 0.1
"""How long to wait after a first failure for others that may be its cause: a death is noticed within milliseconds."""
GRACE_FOR_CAUSE_S = 1.0
"""The same while all failures are consequences: a large process takes longer to be taken down."""
CLOSE_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 1.0


class StartError(Exception):
    """A group did not start; `failure` has the cause, `facts` what was planned."""

    def __init__(self, failure: RankFailure, facts: dict[str, Any]) -> None:
        super().__init__(failure.message)
        self.failure, self.facts = failure, facts


@dataclass
class _Wait:
    """Waiting for one kind of message from every rank."""

    kind: str
    missing: set[int]
    deadline: float
    messages: list[dict[str, Any]] = field(default_factory=list)
    failures: list[RankFailure] = field(default_factory=list)

    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def note_failure(self, failure: RankFailure, rank: int) -> None:
        """The wait is over soon: what else comes in may be the cause of this failure."""
        self.failures.append(failure)
        self.missing.discard(rank)
        grace_s = GRACE_FOR_CAUSE_S if all(one.is_consequence for one in self.failures) else GRACE_S
        self.deadline = min(self.deadline, time.monotonic() + grace_s)


class RankGroup:
    """Ranks with a process group among them, which serve one point after another until one fails."""

    def __init__(
        self,
        plan: GroupPlan,
        environment: Mapping[str, str],
        on_output: Callable[[str], None],
        numbers: Sequence[int] | None = None,
    ) -> None:
        """`numbers`: the ranks of the group that are started here, all if None."""
        self.facts: dict[str, Any] = {"world_size": plan.world_size, "backend": plan.backend}
        self._plan = plan
        self._environment = environment
        self._on_output = on_output
        self._connection: socket.socket | None = None
        self._directory = Path(tempfile.gettempdir()) / f"labkit-{secrets.token_hex(8)}"
        self._numbers = range(plan.world_size) if numbers is None else numbers
        self._ranks: dict[int, RankProcess] = {}
        self._is_interrupted = False
        self._kills_before = oom_kills()

    def start(self, payload: bytes) -> None:
        """Start the ranks and wait until their process group is made; StartError with the cause otherwise.

        `payload` is the worker and the points, as `pickle.loads` takes them.
        """
        if self._plan.backend == "gloo" and self._plan.world_size > 1:
            reason = build.unavailable_reason()
            self.facts["shared_memory"] = f"not available ({reason})" if reason else "compiled"
            self._environment = {**self._environment, **({build.FAILURE: reason} if reason else {})}
        begun = time.monotonic()
        try:
            self._fork_ranks(payload)
            wait = _Wait("ready", set(self._numbers), begun + START_TIMEOUT_S)
            for row in self._listen(wait):
                raise AssertionError(f"a rank that is not ready sends no rows: {row}")
            if failure := self._failure(wait, f"not ready after {START_TIMEOUT_S:g} s"):
                raise StartError(failure, self.facts)
        except OSError as error:
            self.close()
            text = f"a rank was not started: {type(error).__name__}: {error}"
            raise StartError(RankFailure(None, "exception", text), self.facts) from error
        except BaseException:
            self.close()
            raise
        self.facts |= wait.messages[0]["facts"]
        self.facts |= {"start_method": "forkserver", "start_s": time.monotonic() - begun}

    def run(self, index: int, excluded: Mapping[str, str]) -> Generator[Row, None, PointEnd]:
        """Run one point on every rank, without some alternatives: rows as they come, then how it ended.

        A group whose point has not ended ok is of no more use, and has been closed.
        """
        self._kills_before = oom_kills()
        begun = time.monotonic()
        wait = _Wait("done", set(self._numbers), begun + self._plan.timeout_s)
        for rank in self._ranks.values():
            rank.send(json.dumps([index, excluded]).encode())
        yield from self._listen(wait, index)
        if failure := self._failure(wait, f"still running after {self._plan.timeout_s:g} s"):
            ended = time.monotonic()
            self.close()
        else:
            ended = max(message["at"] for message in wait.messages)
            self._forward_output()
        return end_point(index, failure, ended - begun, self.facts)

    def is_whole(self) -> bool:
        """Whether every rank waits for a point. The end of a rank between two points is reported, and costs none."""
        self._receive(0.0)
        ended = [rank for rank in self._ranks.values() if not rank.is_open or not rank.is_alive]
        for rank in ended:
            self._on_output(f"[rank {rank.number}] ended between two points")
        return not ended

    def interrupt(self) -> None:
        """Have the ranks ended, in whatever they do: from another thread."""
        self._is_interrupted = True
        with contextlib.suppress(OSError, AttributeError):  # it was closed meanwhile
            self._connection.shutdown(socket.SHUT_WR)  # type: ignore[union-attr]

    def close(self) -> None:
        """End the ranks with all that they have started, and remove the directory. Safe to repeat."""
        self._forward_output()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.settimeout(CLOSE_TIMEOUT_S)
                while self._connection.recv(4096):  # until the server has removed the group
                    pass
            self._connection.close()
        for rank in self._ranks.values():
            rank.kill()
            rank.pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)  # not there, unless the server was killed
        self._connection, self._ranks = None, {}

    def _fork_ranks(self, payload: bytes) -> None:
        self._connection = rank_process.open_group(self._directory)
        plan = json.dumps(asdict(self._plan)).encode()
        for number in self._numbers:
            pipe = rank_process.fork_rank(self._connection, number, self._environment)
            self._ranks[number] = RankProcess(number, pipe, self._directory)
        for rank in self._ranks.values():
            rank.send(plan, payload)

    def _listen(self, wait: _Wait, index: int = -1) -> Iterator[Row]:
        """Listen until every rank has answered or failed, or the deadline has passed; rows on the way."""
        while wait.missing:
            is_late = wait.remaining_s() == 0.0
            for rank, message in self._receive(wait.remaining_s()):
                if message["kind"] == "row":
                    handed_over = time.monotonic()
                    yield Row(index, rank.number, message["values"])
                    wait.deadline += time.monotonic() - handed_over  # the caller's time is not the point's
                elif message["kind"] == wait.kind:
                    wait.messages.append(message)
                    wait.missing.discard(rank.number)
                    if "pid" in message:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            rank.process = psutil.Process(message["pid"])
                else:
                    wait.note_failure(self._describe_failure(rank, message), rank.number)
            if is_late and wait.remaining_s() == 0.0:
                return

    def _receive(self, timeout_s: float) -> list[tuple[RankProcess, dict[str, Any]]]:
        """Wait until ranks send something or die; what they sent, in each rank's order."""
        assert self._connection is not None, "the group was started"
        watched: dict[Any, RankProcess] = {rank.pipe: rank for rank in self._ranks.values() if rank.is_open}
        received: list[tuple[RankProcess, dict[str, Any]]] = []
        ready = connection.wait([self._connection, *watched], timeout_s)
        for pipe in ready:
            if pipe is not self._connection and (message := watched[pipe].receive()):
                received.append((watched[pipe], message))
        if self._connection in ready:
            for number, how in rank_process.read_reports(self._connection):
                for rank in self._ranks.values() if number is None else [self._ranks[number]]:
                    received += [(rank, message) for message in iter(rank.receive, None)]
                    received.append((rank, {"kind": "died", "how": how, "at": time.monotonic()}))
                    rank.is_alive = False
        return received

    def _describe_failure(self, rank: RankProcess, message: Mapping[str, Any]) -> RankFailure:
        if message["kind"] == "failed":
            return failure_from_json(message["failure"], output_tail=rank.output_tail())
        if self._is_interrupted:
            return RankFailure(None, "killed", "interrupted: another rank failed", is_consequence=True)
        if isinstance(message["how"], str):
            return RankFailure(None, "killed", message["how"], at=message["at"])
        return death_failure(
            rank.number,
            message["how"],
            message["at"],
            output_tail=rank.output_tail(),
            stacks=rank.stacks(),
            alternative=rank.turn()[1],
            kernel_kills=describe_kernel_kills(self._kills_before),
        )

    def _failure(self, wait: _Wait, lateness: str) -> RankFailure | None:
        """The one failure to show for a wait, or None if every rank has answered."""
        if wait.failures:
            return first_failing_rank(wait.failures)
        if not wait.missing:
            return None
        late = [self._ranks[number] for number in sorted(wait.missing)]
        names = f"rank{'s' if len(late) > 1 else ''} {', '.join(str(rank.number) for rank in late)}"
        slowest = current_alternative.slowest_rank(rank.turn() for rank in late)
        message = f"{names} {lateness}" + (f", in {slowest}" if slowest else "")
        tails = "\n".join(filter(None, (rank.output_tail() for rank in late)))
        return RankFailure(late[0].number if len(late) == 1 else None, "timeout", message, self._dump_stacks(), tails)

    def _dump_stacks(self) -> str:
        """The stacks of every rank, as of now."""
        assert self._connection is not None, "the group was started"
        rank_process.request_stacks(self._connection)
        deadline, before, now = time.monotonic() + STACKS_TIMEOUT_S, [""], [""]
        while time.monotonic() < deadline and (now != before or not all(now)):
            time.sleep(0.05)  # a dump has no end mark: it is complete when it no longer grows
            before, now = now, [rank.stacks() for rank in self._ranks.values()]
        dumps = zip(self._ranks.values(), now, strict=True)
        return "\n".join(f"rank {rank.number}:\n{dump or '(no answer)'}" for rank, dump in dumps)

    def _forward_output(self) -> None:
        for rank in self._ranks.values():
            for line in rank.new_output():
                self._on_output(line)
