"""Results of a point: its rows, its end, and the failure of a rank that raised, died or hangs.

A worker names the alternative that it is about to call (`current_alternative`). A failure names the
alternative that was running.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit.machine.gpus import is_nearly_full

Status = Literal["ok", "oom", "skipped", "failed", "timeout"]
Worker = Callable[[Any], Iterable[Mapping[str, Any]] | None]

CURRENT_BYTES = 1024
# Texts of the CPU allocator (on Linux, and elsewhere), CUDA and NCCL, `new` in C++, and cuBLAS,
# cuDNN and their like.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)
# Texts of gloo, the stores, NCCL and labkit's transports, when the process at the other end is gone
# or never came.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed? ?out|communicator"
    r" was aborted|remote process exited|connectFullMesh failed"
    r"|ended or failed while this rank waited|waited too long for rank|has refused or ended it",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Row:
    """One measured row, handed over as soon as a rank yields it."""

    index: int  # of the point, from 0
    rank: int
    values: dict[str, Any]  # the worker's mapping, in JSON's types


@dataclass(frozen=True)
class RankFailure:
    """The first thing that went wrong in a group of ranks, without its consequences."""

    rank: int | None  # None if no single rank failed, as when all of them hang
    status: Status  # of the point
    message: str  # one line: "rank 1 was killed by SIGKILL", "rank 0: ValueError: ..."
    traceback: str = ""  # full Python traceback; for a timeout or an abort the stacks of the ranks
    output_tail: str = ""  # the last lines it wrote to stdout and stderr; of several, each named
    alternative: str = ""  # the one that was running; "" if none was
    at: float = 0.0  # seconds, on a clock that the ranks of the group share
    # Whether it reads like the loss of another rank, whose failure then is the cause.
    is_consequence: bool = False

    @property
    def reason(self) -> str:
        """Return one line with rank, cause and the alternative that was running."""
        return f"{self.message}, in {self.alternative}" if self.alternative else self.message


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
        return self.failure.reason if self.failure else None


class RankError(RuntimeError):
    """A function that was run on every rank failed; `failure` has rank and cause."""

    def __init__(self, failure: RankFailure) -> None:
        output = failure.output_tail.rstrip()
        if output:
            output = f"last output of the rank:\n{output}"
        parts = (failure.reason, failure.traceback.rstrip(), output)
        super().__init__("\n\n".join(filter(None, parts)))
        self.failure = failure

    def _render_traceback_(self) -> list[str]:
        """In a notebook, show the rank's traceback and not the caller's."""
        return [f"{type(self).__name__}: {self}"]


class CurrentAlternative:
    """The alternative that this rank is running, by `name`; "" between two.

    A rank that dies or hangs cannot answer. So its caller finds the name, with a number that counts
    the alternatives of the point, in a file (`share`).
    """

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(CURRENT_BYTES)
        self.begin_point(0)

    def __reduce__(self) -> str:
        return "current_alternative"  # a worker that is pickled by value refers to the rank's

    def share(self, path: Path) -> None:
        """Keep number and name in this file, which outlives the process."""
        # In the rank, before its first point. A full disk must not end the rank, neither here nor
        # at a later write to the mapping: hence the zeros.
        with contextlib.suppress(OSError), path.open("w+b") as file:
            file.write(bytes(CURRENT_BYTES))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), CURRENT_BYTES)

    def begin_point(self, index: int) -> None:
        """Begin the point of this index, with no alternative running."""
        self._point = index
        self._number = 0
        self.end()

    def begin(self, alternative: str) -> str:
        """Name the alternative from here on, without a system call.

        Returns an id of this call, the same on all ranks.
        """
        self._number += 1
        self._set(alternative)
        return f"alternative {self._number} of point {self._point}"

    def end(self) -> None:
        """Name no alternative from here on."""
        self._set("")

    @contextlib.contextmanager
    def running(self, alternative: str) -> Iterator[str]:
        """Name the alternative inside the block; yield the id of `begin`.

        After an exception the name stays: the failure that ends the rank shall have it.
        """
        yield self.begin(alternative)
        self.end()

    def _set(self, name: str) -> None:
        self.name = name
        content = f"{self._number} {name}".encode()[:CURRENT_BYTES]
        self._memory[:] = content.ljust(CURRENT_BYTES, b"\0")


current_alternative = CurrentAlternative()


def slowest_alternative(current: Sequence[tuple[int, str]]) -> str:
    """Return the alternative of the slowest of some hanging ranks, from each one's number and name.

    The others may wait for that rank. "" if it runs none.
    """
    slowest = min((number for number, _ in current), default=0)
    return max((name for number, name in current if number == slowest), default="")


def plain_row(row: Any, name: str | None = None) -> Any:
    """Convert a row for JSON: scalars of numpy and torch become numbers, tuples lists.

    TypeError for a value that JSON cannot carry or would change: a tensor with dimensions, a key
    that is no string.
    """
    if isinstance(row, Mapping):
        if not all(isinstance(key, str) for key in row):
            raise TypeError(f"expected names to be strings, got {list(row)}")
        return {key: plain_row(value, key) for key, value in row.items()}
    # Only the row itself has no name.
    if name is None:
        raise TypeError(
            f"expected a row to be a mapping from names to values, the worker yielded {row!r:.80}"
        )
    if isinstance(row, list | tuple):
        return [plain_row(value, name) for value in row]
    # Scalars of numpy and torch, without importing either.
    if getattr(row, "ndim", None) == 0 and hasattr(row, "item"):
        return row.item()
    if row is None or isinstance(row, str | int | float):
        return row
    raise TypeError(f"row value {name!r} is not JSON-able: {row!r:.80}")


def exception_failure(rank: int, error: BaseException, at: float) -> RankFailure:
    """Describe a rank that raised; notes of the error become part of the message."""
    notes: list[str] = getattr(error, "__notes__", [])
    first_line = str(error).strip().partition("\n")[0]
    message = f"rank {rank}: {type(error).__qualname__}: {first_line}".removesuffix(": ")
    return RankFailure(
        rank,
        "oom" if is_out_of_memory(error) else "failed",
        ", ".join([message, *(note.partition("\n")[0] for note in notes)]),
        traceback="".join(traceback.format_exception(error)),
        alternative=current_alternative.name,
        at=at,
        is_consequence=_is_consequence(error),
    )


def death_failure(
    rank: int, code: int, at: float, output_tail: str, alternative: str, is_memory_full: bool
) -> RankFailure:
    """Describe a rank that died with an exit code, negative for a signal.

    `is_memory_full`: whether the kernel has counted a kill for lack of memory.
    """
    # What the caller knows is the exit code, and what it finds in the rank's files.
    message = f"rank {rank} exited with code {code}"
    if code < 0:
        message = f"rank {rank} was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL and is_memory_full:
        message += ": out of memory, by the kernel"
    # An exception of C++ that nobody catches ends the process, and its text is all that is left.
    elif cpp_errors := re.findall(r"what\(\):\s*(.+)", output_tail):
        message += f": {cpp_errors[-1].strip()}"
    return RankFailure(
        rank,
        "oom" if _OUT_OF_MEMORY.search(message) else "failed",
        message,
        output_tail=output_tail,
        alternative=alternative,
        at=at,
        is_consequence=_CONSEQUENCE.search(message) is not None,
    )


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure to show.

    A death or an exception comes before lateness and lost connections, then the earliest: peers of
    a rank that dies raise "Connection closed by peer", often before its death is noticed.
    """
    return min(
        failures,
        key=lambda failure: (failure.is_consequence, failure.status == "timeout", failure.at),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    By its type or, for a RuntimeError, by its text. Not every RuntimeError that speaks of memory
    does: "an illegal memory access was encountered" is a bug.
    """
    # `torch.OutOfMemoryError`, wherever a version of torch has it
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    # cuBLAS says so, too, where it finds no memory for its work area
    if "CUBLAS_STATUS_NOT_INITIALIZED" in str(error):
        return is_nearly_full()
    return _OUT_OF_MEMORY.search(str(error)) is not None


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether an error, or the one it was raised from, is due to another rank."""
    while error is not None:
        if getattr(error, "is_consequence", False):
            return True
        if isinstance(error, RuntimeError | OSError) and _CONSEQUENCE.search(str(error)):
            return True
        error = error.__cause__
    return False
