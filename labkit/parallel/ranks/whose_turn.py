"""Whose turn it is on this rank, and which alternatives its point is measured without.

A worker says which alternative it is about to call. Should the rank raise then, die or hang, the failure is that
alternative's: `launch` measures the point again in new ranks without it. A rank that dies or hangs says nothing any
more, so the name stands in memory that its parent can read; the number of the turn, by which the ranks that hang are
told from those that wait for them; and when it began, by which they are told from those that are slow. Standard library
only: a rank imports this before torch.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

HEAD = struct.Struct("=Qd")  # number of the turn, and when it began; then the name
LONGEST = 1024  # bytes of a name


class Turn(NamedTuple):
    """How many turns of the point have begun, and whose it is; None: nobody's, as between two."""

    number: int
    alternative: str | None
    begun_s: float = 0.0
    """On the monotonic clock, which a host's processes share."""


@dataclass
class _Turn:
    memory: bytearray | mmap.mmap = field(default_factory=lambda: bytearray(HEAD.size + LONGEST))
    """The number, the time, then the name, padded with zeros."""
    point: int = 0
    reason: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


_TURN = _Turn()


def share(path: Path) -> None:
    """Keep the turn in this file from now on, where `turn_in` finds it after the death of this process."""
    with contextlib.suppress(OSError), path.open("w+b") as file:  # a full disk must not end the rank
        file.write(bytes(HEAD.size + LONGEST))  # and not later either
        file.flush()
        _TURN.memory = mmap.mmap(file.fileno(), HEAD.size + LONGEST)


def turn_in(path: Path) -> Turn:
    """The turn of the process that shares this file, or when it ended."""
    try:
        return _read(path.read_bytes())
    except (OSError, struct.error):  # it has not begun, or has not come to it
        return Turn(0, None)


def furthest_behind(turns: Iterable[Turn]) -> Turn | None:
    """Of ranks that do not end: an alternative's turn in which those are for which others may wait."""
    turns = list(turns)
    last = min(turn.number for turn in turns)
    return next((turn for turn in turns if turn.number == last and turn.alternative), None)


def new_point(index: int, left_out: Mapping[str, str]) -> None:
    """A point begins, without these alternatives; by name, why."""
    _TURN.memory[:] = bytes(HEAD.size + LONGEST)
    _TURN.point, _TURN.reason, _TURN.left_out = index, None, left_out


def why_left_out(alternative: str) -> str | None:
    """Why this point is measured without it, in the words of a row's `gate`; None: it takes part."""
    return _TURN.left_out.get(alternative)


def begin(alternative: str) -> str:
    """From here on it is to blame; a name of the turn, the same on all ranks. A write to memory, no system call."""
    number = _now().number + 1
    _TURN.memory[:] = HEAD.pack(number, time.monotonic()) + _padded(alternative)
    _TURN.reason = None
    return f"turn {number} of point {_TURN.point}"


def end() -> None:
    _TURN.memory[HEAD.size :] = bytes(LONGEST)
    _TURN.reason = None


def explain(reason: str) -> None:
    """What its row should say if this turn is the end of the rank's work on the point."""
    _TURN.reason = reason


def alternative() -> str | None:
    """Whose turn it is."""
    return _now().alternative


def blamed() -> tuple[str, str] | None:
    """Whose turn it is, and what its row should say; None if nothing was explained."""
    name = alternative()
    return (name, _TURN.reason) if name is not None and _TURN.reason is not None else None


@cache
def _padded(alternative: str) -> bytes:
    return alternative.encode()[:LONGEST].ljust(LONGEST, b"\0")


def _now() -> Turn:
    return _read(bytes(_TURN.memory))


def _read(content: bytes) -> Turn:
    number, begun_s = HEAD.unpack_from(content)
    return Turn(number, content[HEAD.size :].rstrip(b"\0").decode(errors="replace") or None, begun_s)
