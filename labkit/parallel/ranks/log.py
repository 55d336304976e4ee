"""What a rank wrote to stdout and stderr, read by the parent without ever holding all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

KEPT_AT_EACH_END = 20
TAIL_LINES = 20
TAIL_BYTES = 16 * 1024
LINE_BYTES = 2000
"""A longer line comes in pieces of this."""


class RankLog:
    """A file that a rank appends to, read once from the front and as often as wanted from the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new_lines(self, *, whole_lines: bool) -> list[str]:
        """Lines since the last call: the first and the last few, with a count of those left out between.

        With `whole_lines`, a last line that has no end yet is kept for the next call.
        """
        first: list[str] = []
        last: deque[str] = deque(maxlen=KEPT_AT_EACH_END)
        left_out = 0
        for line in self._unread(whole_lines):
            if len(first) < KEPT_AT_EACH_END:
                first.append(_as_shown(line))
            else:
                left_out += len(last) == KEPT_AT_EACH_END
                last.append(_as_shown(line))
        return [*first, *([f"... {left_out} lines left out"] if left_out else []), *last]

    def tail(self) -> str:
        """The last lines so far."""
        with self._opened() as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
        if size > TAIL_BYTES:
            del lines[0]  # half a line
        return "\n".join([_as_shown(line) for line in lines if line][-TAIL_LINES:])

    def _unread(self, whole_lines: bool) -> Iterator[bytes]:
        with self._opened() as file:
            file.seek(self._read)
            for line in iter(partial(file.readline, LINE_BYTES), b""):
                if whole_lines and not line.endswith(b"\n") and len(line) < LINE_BYTES:
                    return
                self._read += len(line)
                yield line

    def _opened(self) -> BinaryIO:
        """The file; an empty one before the rank has made it, and after somebody has cleaned up, at any moment."""
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return BytesIO()


def _as_shown(line: bytes) -> str:
    """As a terminal would leave it: of a progress bar that rewrites its line, the last state."""
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
