"""Results of a point: its rows, its end, and the failure of a rank that raised, died or hangs.

A worker names the alternative that it is about to call (`current_alternative`). If the rank then
raises or dies, `launch` measures the point again without it. If ranks hang, the failure names it.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "oom", "skipped", "failed", "timeout"]
Worker = Callable[[Any], Iterable[Mapping[str, Any]] | None]

TURN_BYTES = 1024
# CPU allocator on Linux, the same elsewhere, CUDA and NCCL, `new` in C++, and cuBLAS, cuDNN and
# their like
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)
# gloo, the stores and NCCL, when the process at the other end is gone or never came
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed? ?out|communicator"
    r" was aborted"
    r"|remote process exited|connectFullMesh failed|ended or failed while this rank waited|waited"
    r" too long for rank"
    r"|has refused or ended it|one of the others raised",
    re.IGNORECASE,
)
# no alternative is to blame
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Row:
    """One measured row, handed over as soon as a rank yields it."""

    index: int  # of the point, from 0
    rank: int
    values: dict[str, Any]  # the worker's mapping, in JSON's types


@dataclass(frozen=True)
class Retry:
    """The point is measured again in new ranks, without an alternative that failed: its rows so far
    do not count."""

    index: int
    alternative: str
    reason: str  # for the row of that alternative
    failure: RankFailure


@dataclass(frozen=True)
class RankFailure:
    """The first thing that went wrong in a group of ranks, without its consequences."""

    rank: int | None  # None if no single rank is to blame, as when all of them hang
    status: Status  # of the point
    message: str  # one line: "rank 1 was killed by SIGKILL", "rank 0: ValueError: ..."
    traceback: str = ""  # full Python traceback; for a timeout or an abort the stacks of the ranks
    output_tail: str = ""  # the last lines the rank wrote to stdout and stderr
    blamed: Sequence[str] | None = None  # the alternative that failed, and the text for its row
    at: float = 0.0  # seconds, on a clock that the ranks of the group share
    # it reads like the loss of another rank, whose failure is the cause
    is_consequence: bool = False


@dataclass(frozen=True)
class PointEnd:
    """The end of one point; nothing more comes for its index."""

    index: int
    failure: RankFailure | None
    elapsed_s: float  # until the last rank was done, or until the failure was clear
    facts: Mapping[str, Any]  # world_size, backend, threads, scheduling, start_method, start_s

    @property
    def status(self) -> Status:
        """Return how the point ended."""
        return self.failure.status if self.failure else "ok"

    @property
    def reason(self) -> str | None:
        """Return one line that names rank and cause; None if all went well."""
        return self.failure.message if self.failure else None


class RankError(RuntimeError):
    """A function that was run on every rank failed; `failure` has rank and cause."""

    def __init__(self, failure: RankFailure) -> None:
        output = (
            f"last output of the rank:\n{failure.output_tail.rstrip()}"
            if failure.output_tail
            else ""
        )
        super().__init__(
            "\n\n".join(filter(None, (failure.message, failure.traceback.rstrip(), output)))
        )
        self.failure = failure

    def _render_traceback_(self) -> list[str]:
        """In a notebook, show the rank's traceback and not the caller's."""
        return [f"{type(self).__name__}: {self}"]


class CurrentAlternative:
    """The alternative that this rank works on, by `name`, and those that its point is measured
    without.

    A rank that dies or hangs cannot answer: number and name of its turn are in a file that its
    caller reads.
    """

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(TURN_BYTES)
        # the current alternative, and the text for its row
        self.blamed: tuple[str, str] | None = None
        self.begin_point(0, {})

    def __reduce__(self) -> str:
        return "current_alternative"  # a worker that is pickled by value refers to the rank's

    def share(self, path: Path) -> None:
        """Keep the turn in this file, where the caller finds it after the death of this process."""
        # a full disk must not end the rank
        with contextlib.suppress(OSError), path.open("w+b") as file:
            file.write(bytes(TURN_BYTES))  # and not later either
            file.flush()
            self._memory = mmap.mmap(file.fileno(), TURN_BYTES)

    def begin_point(self, index: int, excluded: Mapping[str, str]) -> None:
        """Begin a point without some alternatives, each with the reason."""
        self._point = index
        self._turn = 0
        self._excluded = excluded
        self.end()

    def excluded_reason(self, alternative: str) -> str | None:
        """Return why the point is measured without this alternative, for its row; None if it takes
        part."""
        return self._excluded.get(alternative)

    def begin(self, alternative: str) -> str:
        """Blame this alternative from here on. Returns an id of the turn, the same on all ranks. No
        system call."""
        self._turn += 1
        self._set(alternative)
        return f"turn {self._turn} of point {self._point}"

    def end(self) -> None:
        """Blame no alternative from here on."""
        self._set(None)

    def explain(self, reason: str) -> None:
        """Set the text for the alternative's row, in case this turn is the end of the rank's work
        on the point."""
        self.blamed = (self.name, reason) if self.name else None

    def _set(self, name: str | None) -> None:
        self.name = name
        self.blamed = None
        self._memory[:] = f"{self._turn} {name or ''}".encode()[:TURN_BYTES].ljust(
            TURN_BYTES, b"\0"
        )


current_alternative = CurrentAlternative()


def slowest_alternative(turns: Sequence[tuple[int, str]]) -> str:
    """Return the alternative of the earliest turn of hanging ranks: the others may wait for it. ""
    if there is none."""
    first = min((number for number, _ in turns), default=0)
    return max((name for number, name in turns if number == first), default="")


def plain_row(row: Any, name: str | None = None) -> Any:
    """Convert a row for JSON: scalars of numpy and torch become numbers, tuples lists.

    TypeError for a value that JSON cannot carry or would change: a tensor with dimensions, a key
    that is no string.
    """
    if isinstance(row, Mapping):
        if not all(isinstance(key, str) for key in row):
            raise TypeError(f"expected names to be strings, got {list(row)}")
        return {key: plain_row(value, key) for key, value in row.items()}
    if name is None:
        raise TypeError(
            f"expected a row to be a mapping from names to values, the worker yielded {row!r:.80}"
        )
    if isinstance(row, list | tuple):
        return [plain_row(value, name) for value in row]
    if getattr(row, "ndim", None) == 0 and hasattr(row, "item"):
        return row.item()
    if row is None or isinstance(row, str | int | float):
        return row
    raise TypeError(f"row value {name!r} is not JSON-able: {row!r:.80}")


def exception_failure(rank: int, error: BaseException, at: float) -> RankFailure:
    """Describe a rank that raised. No alternative is blamed for lack of memory or the loss of
    another rank."""
    is_oom = is_out_of_memory(error)
    is_consequence = _is_consequence(error)
    first_line = str(error).strip().partition("\n")[0]
    message = f"rank {rank}: {type(error).__qualname__}: {first_line}".removesuffix(": ")
    trace = "".join(traceback.format_exception(error))
    blamed = None if is_oom or is_consequence else current_alternative.blamed
    return RankFailure(
        rank, "oom" if is_oom else "failed", message, trace, "", blamed, at, is_consequence
    )


def death_failure(
    rank: int, code: int, at: float, output_tail: str, alternative: str, is_memory_full: bool
) -> RankFailure:
    """Describe a rank that died with an exit code, negative for a signal; `is_memory_full`: as the
    kernel counted."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    # of an exception that ends the process
    cpp_errors = re.findall(r"what\(\):\s*(.+)", output_tail)
    if code == -signal.SIGKILL and is_memory_full:
        cpp_errors = ["out of memory, by the kernel"]
    message = ": ".join([f"rank {rank} {how}", *cpp_errors[-1:]]).strip()
    is_oom = _OUT_OF_MEMORY.search(message) is not None
    is_consequence = _CONSEQUENCE.search(message) is not None
    is_blamed = alternative and not (is_oom or is_consequence or -code in _FROM_OUTSIDE)
    blamed = (alternative, f"failed: {message}") if is_blamed else None
    return RankFailure(
        rank, "oom" if is_oom else "failed", message, "", output_tail, blamed, at, is_consequence
    )


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure to show: a death or an exception before lateness and lost connections,
    then the earliest.

    Peers of a rank that dies raise "Connection closed by peer", often before its death is noticed.
    """
    return min(
        failures,
        key=lambda failure: (failure.is_consequence, failure.status == "timeout", failure.at),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, by its type or, for a RuntimeError, by its
    text.

    Not every RuntimeError that speaks of memory does: "an illegal memory access was encountered" is
    a bug.
    """
    if isinstance(error, RuntimeError) and "CUBLAS_STATUS_NOT_INITIALIZED" in str(error):
        from labkit.machine.gpus import is_nearly_full

        return is_nearly_full()
    is_said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    # torch's
    return is_said or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether an error, or the one it was raised from, is the loss of another rank."""
    while error is not None:
        if isinstance(error, RuntimeError | OSError) and _CONSEQUENCE.search(str(error)):
            return True
        error = error.__cause__
    return False
