"""Results of a point: rows, then one end; and what is reported of a rank that raised or died.

Used by ranks, by the process that started them, and by the ranks of a torchrun job.
"""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit.parallel.ranks import current_alternative

Status = Literal["ok", "oom", "skipped", "failed", "timeout"]
FailureKind = Literal["exception", "killed", "exited", "timeout", "oom"]
Worker = Callable[[Any], Iterable[Mapping[str, Any]] | None]

MAX_EXCLUDED = 32
"""A point is measured without at most so many alternatives; with one more failure it has failed."""
# CPU allocator on Linux, the same elsewhere, CUDA and NCCL, `new` in C++, and cuBLAS, cuDNN and their like
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|_ALLOC_FAILED", re.IGNORECASE
)
# gloo, the stores and NCCL, when the process at the other end is gone or never came
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed? ?out|communicator was aborted"
    r"|remote process exited|connectFullMesh failed|ended while this rank waited|waited too long for rank"
    r"|one of the others raised",
    re.IGNORECASE,
)
_MACHINERY = Path(__file__).parent
# A rank that ends by these was ended from outside.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Row:
    """One measured row, handed over as soon as a rank yields it."""

    index: int
    """The point, counted from 0."""
    rank: int
    values: dict[str, Any]
    """The worker's mapping, after a round trip through JSON."""


@dataclass(frozen=True)
class Retry:
    """The point is measured again in new ranks, without an alternative that failed: its rows so far do not count."""

    index: int
    alternative: str
    reason: str
    """For the row of that alternative."""
    failure: RankFailure


@dataclass(frozen=True)
class RankFailure:
    """The first thing that went wrong in a group of ranks, without its consequences."""

    rank: int | None
    """None if no single rank is to blame, as when all of them hang."""
    kind: FailureKind
    message: str
    """One line: "rank 1 was killed by SIGKILL", "rank 0: ValueError: ..."."""
    traceback: str = ""
    """Full Python traceback; for a timeout or an abort the stacks of the ranks."""
    output_tail: str = ""
    """The last lines the rank wrote to stdout and stderr."""
    blamed: tuple[str, str] | None = None
    """The alternative that failed and the text for its row; None if the failure is the whole point's."""
    at: float = 0.0
    """Seconds, on a clock that the ranks of the group share."""
    is_consequence: bool = False
    """It reads like the loss of another rank: the cause is another failure, if there is one."""

    @property
    def status(self) -> Status:
        """Status of the point."""
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
    """From the start of the point until the last rank was done, or until the failure was clear."""
    facts: dict[str, Any]
    """As the ranks report it: world_size, backend, threads, scheduling, start_method, start_s."""


class RankError(RuntimeError):
    """A function that was run on every rank failed; `failure` has rank and cause."""

    def __init__(self, failure: RankFailure) -> None:
        parts = [failure.message]
        if failure.traceback:
            parts.append(failure.traceback.rstrip())
        if failure.output_tail:
            parts.append(f"last output of the rank:\n{failure.output_tail.rstrip()}")
        super().__init__("\n\n".join(parts))
        self.failure = failure

    def _render_traceback_(self) -> list[str]:
        """In a notebook, show the rank's traceback and not the caller's."""
        return [f"{type(self).__name__}: {self}"]


def worker_rows(worker: Worker, point: Any) -> Iterator[dict[str, Any]]:
    """Run the worker on a point; yield its rows, each checked and made plain at once."""
    rows = worker(point)
    if rows is None:
        return
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise TypeError(f"a worker yields rows or returns a list of them, but it returned a {_type_name(rows)}")
    for row in rows:
        yield plain_row(row)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as JSON has it: scalars of numpy and torch become numbers, tuples become lists; NaN and infinities pass.

    TypeError naming the value that JSON cannot carry or would change: a tensor with dimensions, a key that is no
    string.
    """
    if not isinstance(row, Mapping):
        raise TypeError(
            f"a row is a mapping from names to values, but the worker yielded a {_type_name(row)}: {row!r:.80}"
        )
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise TypeError(f"a row's names are strings, but the worker yielded {name!r:.80}")
        try:
            _check_keys(value)
            plain[name] = json.loads(json.dumps(value, default=_to_number))
        except (TypeError, ValueError) as error:
            raise TypeError(f"row value {name!r} is not JSON-able: {error} ({value!r:.80})") from None
    return plain


def _check_keys(value: Any) -> None:
    """TypeError for a mapping inside the value with a key that JSON would change."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys must be strings, not {_type_name(key)}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inside in value:
            _check_keys(inside)


def _to_number(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"it holds a {_type_name(value)}")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def exception_failure(rank: int, error: BaseException, at: float) -> RankFailure:
    """The failure of a rank that raised. No alternative is blamed for lack of memory or the loss of another rank."""
    name, text = type(error).__qualname__, str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    frame = error.__traceback__
    while frame and frame.tb_next and Path(frame.tb_frame.f_code.co_filename).parent == _MACHINERY:
        frame = frame.tb_next  # the first line to show is the worker's
    is_oom, is_consequence = is_out_of_memory(error), _is_consequence(error)
    return RankFailure(
        rank=rank,
        kind="oom" if is_oom else "exception",
        message=f"rank {rank}: {name}: {first_line}" if first_line else f"rank {rank}: {name}",
        traceback="".join(traceback.format_exception(type(error), error, frame)),
        blamed=None if is_oom or is_consequence else current_alternative.blamed(),
        at=at,
        is_consequence=is_consequence,
    )


def failure_from_json(values: Mapping[str, Any], **changes: Any) -> RankFailure:
    """A failure that came from another process as JSON."""
    blamed = values["blamed"]
    return RankFailure(**{**values, "blamed": tuple(blamed) if blamed else None, **changes})


def death_failure(
    rank: int, code: int, at: float, *, output_tail: str, stacks: str, alternative: str | None, kernel_kills: str
) -> RankFailure:
    """The failure of a rank that died with an exit code, negative for a signal.

    `kernel_kills` says that the kernel killed processes for lack of memory meanwhile, or "".
    """
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    cpp_errors = re.findall(r"what\(\):\s*(.+)", output_tail)  # of an exception that ends the process
    cause = f": {cpp_errors[-1].strip()}" if cpp_errors else ""
    cause += kernel_kills if code == -signal.SIGKILL else ""
    is_oom, is_consequence = _OUT_OF_MEMORY.search(cause) is not None, _CONSEQUENCE.search(cause) is not None
    message = f"rank {rank} {how}{cause}"
    if is_oom or is_consequence or -code in _FROM_OUTSIDE:
        alternative = None
    return RankFailure(
        rank=rank,
        kind="oom" if is_oom else "killed" if code < 0 else "exited",
        message=message,
        traceback=stacks,
        output_tail=output_tail,
        blamed=(alternative, f"failed: {message}") if alternative else None,
        at=at,
        is_consequence=is_consequence,
    )


def describe_kernel_kills(before: int | None) -> str:
    """Why a rank was killed by SIGKILL, as far as the kernel's count of such kills shows; it does not say whom."""
    from labkit.machine.cgroups import memory_limit_bytes, oom_kills  # not in every rank that starts

    now = oom_kills()
    if before is None or now is None or now <= before:
        return ""
    number = f"{now - before} process{'' if now - before == 1 else 'es'}"
    limit = memory_limit_bytes()
    limited = "" if limit is None else f", whose limit is {limit / 2**20:,.0f} MiB"
    return f": out of memory: meanwhile the kernel killed {number} of its cgroup for that{limited}"


def first_failing_rank(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure to show: a death or an exception before lost connections, then the earliest.

    When a rank dies, its peers raise "Connection closed by peer" within milliseconds, often before the
    death itself is noticed, so time alone would name the wrong rank.
    """
    return min(failures, key=lambda failure: (failure.is_consequence, failure.at))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, by its type or, for a RuntimeError, by its text.

    Not every RuntimeError that speaks of memory does: "an illegal memory access was encountered" is a bug.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        return True
    if isinstance(error, RuntimeError) and "CUBLAS_STATUS_NOT_INITIALIZED" in str(error):
        from labkit.machine.gpus import is_nearly_full

        return is_nearly_full()
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error, or the one it was raised from, is the loss of another rank."""
    while error is not None:
        if isinstance(error, RuntimeError | OSError) and _CONSEQUENCE.search(str(error)):
            return True
        error = error.__cause__
    return False


def next_attempt(index: int, failure: RankFailure | None, excluded: Mapping[str, str]) -> Retry | None:
    """Whether a point that ended so is measured again, without one alternative more."""
    if failure is None or failure.blamed is None or len(excluded) >= MAX_EXCLUDED:
        return None
    alternative, reason = failure.blamed
    return None if alternative in excluded else Retry(index, alternative, reason, failure)


def end_point(index: int, failure: RankFailure | None, elapsed_s: float, facts: Mapping[str, Any]) -> PointEnd:
    """The end of a point that ran."""
    if failure is None:
        return PointEnd(index, "ok", None, None, elapsed_s, dict(facts))
    return PointEnd(index, failure.status, failure.message, failure, elapsed_s, dict(facts))
