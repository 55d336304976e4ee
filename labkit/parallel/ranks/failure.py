"""What the parent makes of a rank that raised or died: the failure to show, and whether it is the first cause."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.machine.cgroups import memory_limit_bytes, oom_kills
from labkit.parallel.ranks.outcome import FailureKind, RankFailure, Report, reads_as_consequence, reads_as_out_of_memory
from labkit.parallel.ranks.process import STATUS_LOST, RankProcess

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a rank is not its own doing then."""


@dataclass(frozen=True)
class Message:
    """What a rank said, or that it died."""

    rank: int
    kind: str
    at: float
    body: dict[str, Any]


def exception_of(rank: RankProcess, message: Message) -> Report:
    """The failure of a rank that reported an exception."""
    body = message.body
    failure = RankFailure(
        rank=rank.number,
        kind="oom" if body["oom"] else "exception",
        message=f"rank {rank.number}: {body['message']}",
        traceback=body["traceback"],
        output_tail=rank.log.tail(),
        blamed=blamed_in(body),
    )
    return Report(failure, message.at, body["consequence"])


def blamed_in(said: Mapping[str, Any]) -> tuple[str, str] | None:
    """The alternative whose failure an exception was; of none if this rank ran out of memory, or lost another one."""
    if said["blamed"] is None or said["oom"] or said["consequence"]:
        return None
    name, reason = said["blamed"]
    return name, reason


def death_of(rank: RankProcess, message: Message, kills_before: int | None) -> Report:
    """The failure of a rank that died; `kills_before` is what `oom_kills` said when its point began."""
    rank.process.join()
    code, tail = rank.process.exitcode or 0, rank.log.tail()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    how += " (or its fork server was killed)" if code == STATUS_LOST else ""
    # What C++ says of an exception that ends the process, as when two ranks disagree about a size.
    said = re.findall(r"what\(\):\s*(.+)", tail)
    cause = f": {said[-1].strip()}" if said else ""
    if code == -signal.SIGKILL:
        cause += _kernel_kills(kills_before, oom_kills())
    died: FailureKind = "killed" if code < 0 else "exited"
    kind: FailureKind = "oom" if reads_as_out_of_memory(cause) else died
    is_consequence, reason = reads_as_consequence(cause), f"rank {rank.number} {how}{cause}"
    name = rank.turn().alternative if kind != "oom" and not is_consequence and -code not in FROM_OUTSIDE else None
    failure = RankFailure(
        rank=rank.number,
        kind=kind,
        message=reason,
        traceback=rank.stacks(),
        output_tail=tail,
        blamed=(name, f"failed: {reason}") if name and code != STATUS_LOST else None,
    )
    return Report(failure, message.at, is_consequence)


def _kernel_kills(before: int | None, now: int | None) -> str:
    """Why a rank was killed by SIGKILL, as far as the kernel's count of such kills tells; it does not say whom."""
    if before is None or now is None or now <= before:
        return ""
    number = f"{now - before} process{'' if now - before == 1 else 'es'}"
    limit = memory_limit_bytes()
    limited = "" if limit is None else f", whose limit is {limit / 2**20:,.0f} MiB"
    return f": out of memory: meanwhile the kernel killed {number} of its cgroup for that{limited}"
