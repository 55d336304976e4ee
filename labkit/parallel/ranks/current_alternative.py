"""The alternative that this rank works on, and those that its point is measured without.

A worker says which alternative it is about to call. If the rank then raises or dies, the failure is that alternative's,
and `launch` measures the point again without it. If ranks hang, the failure names it. A rank that dies or hangs cannot
speak, so number and name of its turn stand in a file that its parent reads.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TURN = struct.Struct("=Q1024s")
"""Number of the turn in its point, then the name of the alternative, or zeros between two turns."""
Turn = tuple[int, str | None]


@dataclass
class _State:
    memory: bytearray | mmap.mmap = field(default_factory=lambda: bytearray(TURN.size))
    point: int = 0
    reason: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)


_STATE = _State()


def share(path: Path) -> None:
    """Keep the turn in this file from now on, where `read_turn` finds it after the death of this process."""
    with contextlib.suppress(OSError), path.open("w+b") as file:  # a full disk must not end the rank
        file.write(bytes(TURN.size))  # and not later either
        file.flush()
        _STATE.memory = mmap.mmap(file.fileno(), TURN.size)


def read_turn(path: Path) -> Turn:
    """Number and alternative of the turn of the process that shares this file, or its last one."""
    try:
        return _parse(path.read_bytes())
    except (OSError, struct.error):  # no turn has begun
        return 0, None


def slowest_rank(turns: Iterable[Turn]) -> str | None:
    """Among ranks that do not end, the alternative of the earliest turn: others may wait for it."""
    turns = list(turns)
    first = min(number for number, _ in turns)
    return next((name for number, name in turns if number == first and name), None)


def begin_point(index: int, excluded: Mapping[str, str]) -> None:
    """Begin a point without some alternatives, each with the reason."""
    _STATE.memory[:] = bytes(TURN.size)
    _STATE.point, _STATE.reason, _STATE.excluded = index, None, excluded


def excluded_reason(alternative: str) -> str | None:
    """Why the point is measured without this alternative, for its row; None if it takes part."""
    return _STATE.excluded.get(alternative)


def begin(alternative: str) -> str:
    """Blame this alternative from here on. Returns an id of the turn, the same on all ranks. No system call."""
    number = _parse(bytes(_STATE.memory))[0] + 1
    _STATE.memory[:] = TURN.pack(number, alternative.encode())
    _STATE.reason = None
    return f"turn {number} of point {_STATE.point}"


def end() -> None:
    """Blame no alternative from here on."""
    _STATE.memory[:] = TURN.pack(_parse(bytes(_STATE.memory))[0], b"")
    _STATE.reason = None


def explain(reason: str) -> None:
    """Set the text for the alternative's row, in case this turn is the end of the rank's work on the point."""
    _STATE.reason = reason


def name() -> str | None:
    """The current alternative."""
    return _parse(bytes(_STATE.memory))[1]


def blamed() -> tuple[str, str] | None:
    """The current alternative and the text for its row; None if nothing was explained."""
    current = name()
    return (current, _STATE.reason) if current is not None and _STATE.reason is not None else None


def _parse(content: bytes) -> Turn:
    number, encoded = TURN.unpack_from(content)
    return number, encoded.rstrip(b"\0").decode(errors="replace") or None
