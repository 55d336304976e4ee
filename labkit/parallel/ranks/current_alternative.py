"""The alternative that this rank works on, and those that its point is measured without.

A worker says which alternative it is about to call. If the rank then raises or dies, the failure is that alternative's,
and `launch` measures the point again without it. If ranks hang, the failure names it. A rank that dies or hangs cannot
speak, so the name stands in a file that its parent reads.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

HEAD = struct.Struct("=Q")  # number of the turn; then the name
NAME_BYTES = 1024


class Turn(NamedTuple):
    """How many turns of the point have begun, and the alternative; None between two turns."""

    number: int
    alternative: str | None


@dataclass
class _State:
    memory: bytearray | mmap.mmap = field(default_factory=lambda: bytearray(HEAD.size + NAME_BYTES))
    """The number, then the name, padded with zeros."""
    point: int = 0
    reason: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)


_STATE = _State()


def share(path: Path) -> None:
    """Keep the turn in this file from now on, where `read_turn` finds it after the death of this process."""
    with contextlib.suppress(OSError), path.open("w+b") as file:  # a full disk must not end the rank
        file.write(bytes(HEAD.size + NAME_BYTES))  # and not later either
        file.flush()
        _STATE.memory = mmap.mmap(file.fileno(), HEAD.size + NAME_BYTES)


def read_turn(path: Path) -> Turn:
    """The turn of the process that shares this file, or its last one."""
    try:
        return _parse(path.read_bytes())
    except (OSError, struct.error):  # no turn has begun
        return Turn(0, None)


def slowest_rank(turns: Iterable[Turn]) -> Turn | None:
    """Among ranks that do not end, the earliest turn with an alternative: others may wait for it."""
    turns = list(turns)
    last = min(turn.number for turn in turns)
    return next((turn for turn in turns if turn.number == last and turn.alternative), None)


def begin_point(index: int, excluded: Mapping[str, str]) -> None:
    """Begin a point without some alternatives, each with the reason."""
    _STATE.memory[:] = bytes(HEAD.size + NAME_BYTES)
    _STATE.point, _STATE.reason, _STATE.excluded = index, None, excluded


def excluded_reason(alternative: str) -> str | None:
    """Why the point is measured without this alternative, for the `gate` of its row; None if it takes part."""
    return _STATE.excluded.get(alternative)


def begin(alternative: str) -> str:
    """Blame this alternative from here on. Returns an id of the turn, the same on all ranks. No system call."""
    number = _parse(bytes(_STATE.memory)).number + 1
    _STATE.memory[:] = HEAD.pack(number) + _padded(alternative)
    _STATE.reason = None
    return f"turn {number} of point {_STATE.point}"


def end() -> None:
    """Blame no alternative from here on."""
    _STATE.memory[HEAD.size :] = bytes(NAME_BYTES)
    _STATE.reason = None


def explain(reason: str) -> None:
    """Set the text for the alternative's row, in case this turn is the end of the rank's work on the point."""
    _STATE.reason = reason


def name() -> str | None:
    """The current alternative."""
    return _parse(bytes(_STATE.memory)).alternative


def blamed() -> tuple[str, str] | None:
    """The current alternative and the text for its row; None if nothing was explained."""
    current = name()
    return (current, _STATE.reason) if current is not None and _STATE.reason is not None else None


@cache
def _padded(alternative: str) -> bytes:
    return alternative.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


def _parse(content: bytes) -> Turn:
    (number,) = HEAD.unpack_from(content)
    return Turn(number, content[HEAD.size :].rstrip(b"\0").decode(errors="replace") or None)
