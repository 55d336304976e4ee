"""One group of started ranks, as their parent sees it: start, run points, close.

The parent owns everything: the processes, a pipe to each, and a private directory with the rendezvous file
and the ranks' output. `RankGroup.close` gives all of it back, at any moment and as often as one likes.
"""

from __future__ import annotations

import atexit
import secrets
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from labkit.machine.cgroups import oom_kills
from labkit.parallel.core import build
from labkit.parallel.ranks import whose_turn
from labkit.parallel.ranks.deadlines import START_TIMEOUT_S
from labkit.parallel.ranks.failure import Message, death_of, exception_of
from labkit.parallel.ranks.janitor import Janitor
from labkit.parallel.ranks.outcome import PointEnd, RankFailure, Report, Row, end_point, first_cause
from labkit.parallel.ranks.process import RankProcess, start_context
from labkit.parallel.ranks.rank import GroupPlan

# Of the time of a point: a turn that has taken so much of it when time is up is said to hang. Where it has taken less,
# all are slow together, and whose turn it happens to be is not to blame.
HANGS_FROM = 0.5
# How long to go on listening after a first failure, since its consequences in other ranks may be reported before
# it. A death is noticed within milliseconds, but a large process takes longer to be taken down: when all that has
# come in are consequences, it is worth waiting for the cause.
GRACE_S = 0.1
GRACE_FOR_CAUSE_S = 1.0
LEAVE_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 1.0


class StartError(Exception):
    """A group did not come up; `failure` says why."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class _Wait:
    """Waiting until every rank has said a certain word: what has come in, and from whom it is missing."""

    word: str
    missing: set[int]
    deadline: float
    answers: list[Message] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def answer(self, message: Message) -> None:
        self.answers.append(message)
        self.missing.discard(message.rank)

    def fail(self, report: Report, rank: int) -> None:
        """Note a failure; the wait is over soon, and what else comes in may be its cause."""
        self.reports.append(report)
        self.missing.discard(rank)
        grace_s = GRACE_FOR_CAUSE_S if all(known.consequence for known in self.reports) else GRACE_S
        self.deadline = min(self.deadline, time.monotonic() + grace_s)


class RankGroup:
    """Ranks with a process group among them, which serve one point after another until one fails."""

    def __init__(self, plan: GroupPlan, on_output: Callable[[str], None]) -> None:
        self.facts: dict[str, Any] = {"world_size": plan.world_size, "backend": plan.backend}
        self._plan = plan
        self._on_output = on_output
        self._ranks: list[RankProcess] = []
        self._directory: Path | None = None
        self._janitor: Janitor | None = None
        self._kills_before = oom_kills()

    def start(self) -> None:
        """Start the ranks and wait until their process group is made; StartError with the cause otherwise."""
        if self._plan.backend == "gloo" and self._plan.world_size > 1:
            self.facts["shared_memory"] = build.prepare()
        begun = time.monotonic()
        try:
            self._start_processes()
            wait = self._wait_for("ready", begun + START_TIMEOUT_S)
            for row in self._listen(wait):
                raise AssertionError(f"a rank that is not ready sends no rows: {row}")
            if failure := self._failure(wait, f"not ready after {START_TIMEOUT_S:g} s"):
                raise StartError(failure)
        except BaseException as error:
            self.close()
            if isinstance(error, EOFError | OSError):  # the fork server has died in our hands, for one
                raise StartError(_not_started(error)) from error
            raise
        self._note_facts([answer.body["facts"] for answer in wait.answers], time.monotonic() - begun)

    def run(self, index: int, left_out: Mapping[str, str]) -> Generator[Row, None, PointEnd]:
        """Run one point on every rank, without some alternatives: rows as they come, then how it ended.

        A group whose point has not ended ok is of no more use, and has been closed.
        """
        self._kills_before = oom_kills()
        begun = time.monotonic()
        wait = self._wait_for("done", begun + self._plan.timeout_s)
        for rank in self._ranks:
            rank.tell((index, left_out))
        yield from self._listen(wait, index)
        if failure := self._failure(wait, f"still running after {self._plan.timeout_s:g} s"):
            ended = time.monotonic()
            self.close()
        else:
            ended = max(answer.at for answer in wait.answers)
            self._forward(self._new_output(whole_lines=True))
        return end_point(index, failure, ended - begun, self.facts)

    def is_whole(self) -> bool:
        """Whether every rank waits for a point. One that died between two points is told of, and costs none."""
        lost = [rank.number for rank in self._ranks if not rank.is_idle()]
        self._forward([f"[rank {number}] ended between two points" for number in lost])
        return not lost

    def leave(self) -> None:
        """Let idle ranks take down their process group and end by themselves, then close."""
        for rank in self._ranks:
            rank.tell(None)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.close()

    def close(self) -> None:
        """Kill what runs, remove the directory, forward the last output. Safe to repeat.

        In this order: a parent that is killed meanwhile (Jupyter interrupts a kernel and kills it at once) has ranks
        that remove the directory as long as it is there.
        """
        for rank in self._ranks:
            rank.stop()
        output = self._new_output(whole_lines=False)
        self._remove_directory()
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.release()
        self._remove_directory()  # what a rank that was about to be stopped has made
        if self._janitor is not None:
            self._janitor.dismiss()
        self._ranks, self._directory, self._janitor = [], None, None
        atexit.unregister(self.close)
        self._forward(output)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _start_processes(self) -> None:
        # A generator that nobody finished would otherwise keep the interpreter from ending: multiprocessing
        # joins its children at exit, and these wait for their next point. Registered later, this runs before.
        atexit.register(self.close)
        directory = Path(tempfile.gettempdir()) / f"labkit-{secrets.token_hex(8)}"
        self._janitor = Janitor(directory)
        directory.mkdir(mode=0o700)
        self._directory = directory
        context = start_context()
        self.facts["start_method"] = context.get_start_method()
        for number in range(self._plan.world_size):
            rank = RankProcess.prepared(context, self._plan, number, self._directory)
            self._ranks.append(rank)
            rank.start()

    def _note_facts(self, told: list[dict[str, Any]], start_s: float) -> None:
        batch = all(facts["scheduling"] == "batch" for facts in told)
        self.facts["threads"] = max(facts["threads"] for facts in told)
        self.facts["scheduling"] = "batch" if batch else "default"
        self.facts["start_s"] = start_s

    def _wait_for(self, word: str, deadline: float) -> _Wait:
        return _Wait(word, {rank.number for rank in self._ranks}, deadline)

    def _listen(self, wait: _Wait, index: int = -1) -> Iterator[Row]:
        """Listen until every rank has answered or failed, or the deadline has passed; rows on the way."""
        while wait.missing:
            overdue = wait.remaining_s() == 0.0
            for message in self._receive(wait.remaining_s()):
                if message.kind == "row":
                    handed_over = time.monotonic()
                    yield Row(index, message.rank, message.body["values"])
                    wait.deadline += time.monotonic() - handed_over  # the caller's time is not the point's
                elif message.kind == wait.word:
                    wait.answer(message)
                else:
                    wait.fail(self._report(message), message.rank)
            if overdue and wait.remaining_s() == 0.0:
                return

    def _receive(self, timeout_s: float) -> list[Message]:
        """Wait until ranks say something or die; what they said, in each rank's order."""
        watched: dict[Any, RankProcess] = {rank.pipe: rank for rank in self._ranks if rank.talking}
        watched |= {rank.process.sentinel: rank for rank in self._ranks if rank.alive}
        messages = []
        for handle in connection.wait(list(watched), timeout_s):
            rank = watched[handle]
            if handle is rank.pipe:
                heard = [rank.read()]
            else:
                rank.alive = False
                heard = [*iter(rank.read, None), {"kind": "died", "at": time.monotonic()}]
            messages += [Message(rank.number, body["kind"], body["at"], body) for body in heard if body]
        return messages

    def _report(self, message: Message) -> Report:
        rank = self._ranks[message.rank]
        return exception_of(rank, message) if message.kind == "failed" else death_of(rank, message, self._kills_before)

    def _failure(self, wait: _Wait, overdue: str) -> RankFailure | None:
        """The one failure to show for a wait, or None if every rank has answered."""
        if wait.reports:
            return first_cause(wait.reports)
        if not wait.missing:
            return None
        missing = sorted(wait.missing)
        alone = missing[0] if len(missing) == 1 else None
        names = f"ranks {', '.join(map(str, missing))}" if alone is None else f"rank {alone}"
        turn = whose_turn.furthest_behind(self._ranks[number].turn() for number in missing)
        message = f"{names} {overdue}" + (f", in {turn.alternative}" if turn else "")
        tails = [self._ranks[number].log.tail() for number in missing]
        blamed = None
        if turn and turn.alternative and time.monotonic() - turn.begun_s >= HANGS_FROM * self._plan.timeout_s:
            blamed = turn.alternative, f"failed: {names} {overdue}"
        return RankFailure(alone, "timeout", message, self._dump_stacks(), "\n".join(filter(None, tails)), blamed)

    def _dump_stacks(self) -> str:
        """What every rank is doing at this moment."""
        for rank in self._ranks:
            rank.ask_for_stacks()
        deadline, before, now = time.monotonic() + STACKS_TIMEOUT_S, [""], [""]
        while time.monotonic() < deadline and (now != before or not all(now)):
            time.sleep(0.05)  # a dump has no end mark: it is complete when it no longer grows
            before, now = now, [rank.stacks() for rank in self._ranks]
        dumps = zip(self._ranks, now, strict=True)
        return "\n".join(f"rank {rank.number}:\n{dump or '(no answer)'}" for rank, dump in dumps)

    def _new_output(self, *, whole_lines: bool) -> list[str]:
        lines = [(rank.number, rank.log.new_lines(whole_lines=whole_lines)) for rank in self._ranks]
        return [f"[rank {number}] {line}" for number, new in lines for line in new]

    def _forward(self, lines: list[str]) -> None:
        for line in lines:
            self._on_output(line)


def _not_started(error: Exception) -> RankFailure:
    text = "".join(traceback.format_exception(error))
    return RankFailure(None, "exception", f"a rank was not started: {type(error).__name__}: {error}", text, "")
