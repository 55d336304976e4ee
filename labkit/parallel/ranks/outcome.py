"""What becomes of a point that ranks were asked to measure: rows, then one end.

The words of `labkit.parallel.launch`, apart from it because the ranks themselves, the parent that started
them and the ranks of a torchrun job all speak them. Standard library only: a rank imports this before torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "oom", "skipped", "failed", "timeout"]
FailureKind = Literal["exception", "killed", "exited", "timeout", "oom"]

# CPU allocator on Linux, the same elsewhere, CUDA and NCCL, `new` in C++, and cuBLAS, cuDNN and their like
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)
# gloo, the stores and NCCL, when the process at the other end is gone or never came
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed? ?out|communicator was aborted"
    r"|remote process exited|connectFullMesh failed|ended while this rank waited|waited too long for rank"
    r"|one of the others raised",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Row:
    """One measured row, handed over as soon as a rank yields it."""

    index: int
    """Which of the points, counted from 0."""
    rank: int
    values: dict[str, Any]
    """What the worker yielded, after a round trip through JSON."""


@dataclass(frozen=True)
class Again:
    """The point is measured again in new ranks, without an alternative that failed: its rows so far do not count."""

    index: int
    alternative: str
    reason: str
    """What stands in the row of that alternative."""
    failure: RankFailure


@dataclass(frozen=True)
class RankFailure:
    """The first thing that went wrong in a group of ranks; what followed from it is left out."""

    rank: int | None
    """None where no single rank is to blame, as when all of them hang."""
    kind: FailureKind
    message: str
    """One line: "rank 1 was killed by SIGKILL", "rank 0: ValueError: ..."."""
    traceback: str
    """Full Python traceback; the dumped stacks of every rank for a timeout or an abort; else empty."""
    output_tail: str
    """The last lines the rank wrote to stdout and stderr."""
    blamed: tuple[str, str] | None = None
    """The alternative whose failure this is, and what its row should say; None: the whole point's."""

    @property
    def status(self) -> Status:
        """How the point ends that this happened to."""
        return self.kind if self.kind == "oom" or self.kind == "timeout" else "failed"


@dataclass(frozen=True)
class PointEnd:
    """The end of one point; nothing more comes for its index."""

    index: int
    status: Status
    reason: str | None
    """None when ok; otherwise one line that names rank and cause."""
    failure: RankFailure | None
    elapsed_s: float
    """From telling the ranks until the last of them was done, or until the failure was clear."""
    facts: dict[str, Any]
    """As the ranks report it: world_size, backend, threads, scheduling, start_method, start_s."""


class RankError(RuntimeError):
    """A function run on every rank did not end well; `failure` says where and why."""

    def __init__(self, failure: RankFailure) -> None:
        parts = [failure.message]
        if failure.traceback:
            parts.append(failure.traceback.rstrip())
        if failure.output_tail:
            parts.append(f"last output of the rank:\n{failure.output_tail.rstrip()}")
        super().__init__("\n\n".join(parts))
        self.failure = failure

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: of the caller's side there is nothing to tell."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Report:
    """A failure as one rank saw it, with what is needed to find the first among several."""

    failure: RankFailure
    at: float
    """When, on a clock that all reports of the group share."""
    consequence: bool
    """It reads like the loss of another rank: the cause, if anybody else reports one, is there."""


def first_cause(reports: Iterable[Report]) -> RankFailure:
    """The report to show: a death or an exception of its own before lost connections, then the earliest.

    When a rank dies, its peers raise "Connection closed by peer" within milliseconds, often before the
    death itself is noticed, so time alone would name the wrong rank.
    """
    return min(reports, key=lambda report: (report.consequence, report.at)).failure


def reads_as_out_of_memory(text: str) -> bool:
    """Whether the text of an error says that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, by its type or, for a RuntimeError, by its text.

    Not every RuntimeError that speaks of memory does: "an illegal memory access was encountered" is a bug.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        return True
    if isinstance(error, RuntimeError) and "CUBLAS_STATUS_NOT_INITIALIZED" in str(error):
        from labkit.machine.gpus import is_nearly_full

        return is_nearly_full()
    return isinstance(error, RuntimeError) and reads_as_out_of_memory(str(error))


def reads_as_consequence(text: str) -> bool:
    """Whether the text of an error says that a peer was lost."""
    return _CONSEQUENCE.search(text) is not None


MOST_LEFT_OUT = 32
"""Alternatives that a point goes on without; with one more failure it has failed."""
MOST_HANGING = 2
"""Of them, those that hang: each costs the point's whole time. A point that is late once more has too little time."""


def next_attempt(
    index: int, failure: RankFailure | None, left_out: Mapping[str, str], n_hanging: int = 0
) -> Again | None:
    """Whether a point that ended so is measured once more, beside those left out already, so many for hanging."""
    if failure is None or failure.blamed is None or len(left_out) >= MOST_LEFT_OUT:
        return None
    alternative, reason = failure.blamed
    if alternative in left_out or (failure.kind == "timeout" and n_hanging >= MOST_HANGING):
        return None
    return Again(index, alternative, reason, failure)


def end_point(index: int, failure: RankFailure | None, elapsed_s: float, facts: Mapping[str, Any]) -> PointEnd:
    """The end of a point that ran: ok without a failure, otherwise what the failure makes of it."""
    if failure is None:
        return PointEnd(index, "ok", None, None, elapsed_s, dict(facts))
    return PointEnd(index, failure.status, failure.message, failure, elapsed_s, dict(facts))
