"""Whose turn it is on this rank, and which alternatives its point is measured without.

A worker says which alternative it is about to call. Should the rank raise then, or die, the failure is that
alternative's: `launch` measures the point again in new ranks without it. A rank that dies says nothing any more, so the
name stands in memory that its parent can read. Standard library only: a rank imports this before torch.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LONGEST = 1024  # bytes of a name


@dataclass
class _Turn:
    name: bytearray | mmap.mmap = field(default_factory=lambda: bytearray(LONGEST))
    """Padded with zeros; nothing else in it: it is nobody's turn."""
    point: int = 0
    number: int = 0
    reason: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


_TURN = _Turn()


def share(path: Path) -> None:
    """Keep the name in this file from now on, where `name_in` finds it after the death of this process."""
    with contextlib.suppress(OSError), path.open("w+b") as file:  # a full disk must not end the rank
        file.write(bytes(LONGEST))  # and not later either
        file.flush()
        _TURN.name = mmap.mmap(file.fileno(), LONGEST)


def name_in(path: Path) -> str | None:
    """Whose turn it was when the process ended that shared this file; None: nobody's."""
    try:
        return _read(path.read_bytes())
    except OSError:
        return None


def new_point(index: int, left_out: Mapping[str, str]) -> None:
    """A point begins, without these alternatives; by name, why."""
    end()
    _TURN.point, _TURN.number, _TURN.left_out = index, 0, left_out


def why_left_out(alternative: str) -> str | None:
    """Why this point is measured without it, in the words of a row's `gate`; None: it takes part."""
    return _TURN.left_out.get(alternative)


def begin(alternative: str) -> str:
    """From here on it is to blame; a name of the turn, the same on all ranks. A write to memory, no system call."""
    _TURN.name[:] = _padded(alternative)
    _TURN.number, _TURN.reason = _TURN.number + 1, None
    return f"turn {_TURN.number} of point {_TURN.point}"


def end() -> None:
    _TURN.name[:] = bytes(LONGEST)
    _TURN.reason = None


def explain(reason: str) -> None:
    """What its row should say if this turn is the end of the rank's work on the point."""
    _TURN.reason = reason


def alternative() -> str | None:
    """Whose turn it is."""
    return _read(bytes(_TURN.name))


def blamed() -> tuple[str, str] | None:
    """Whose turn it is, and what its row should say; None if nothing was explained."""
    name = alternative()
    return (name, _TURN.reason) if name is not None and _TURN.reason is not None else None


@cache
def _padded(alternative: str) -> bytes:
    return alternative.encode()[:LONGEST].ljust(LONGEST, b"\0")


def _read(content: bytes) -> str | None:
    return content.rstrip(b"\0").decode(errors="replace") or None
