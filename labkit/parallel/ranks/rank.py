"""One rank as its caller sees it: its pipe, and the files that it writes."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

OUTPUT_LINES = 40
OUTPUT_BYTES = 16 * 1024  # of a rank, per point


@dataclass
class Rank:
    """One rank: its pipe, and the directory of its group's files."""

    number: int
    pipe: connection.Connection[Any, Any]
    directory: Path
    n_forwarded: int = 0  # bytes of its output that were shown

    def receive(self) -> dict[str, Any] | None:
        """Return the next message if there is one."""
        try:
            return json.loads(self.pipe.recv_bytes()) if self.pipe.poll() else None
        except (EOFError, OSError):
            self.pipe.close()
            return None

    def stacks(self) -> str:
        """Return the stacks that the rank has written so far."""
        return self._read("stacks")

    def current_alternative(self) -> tuple[int, str]:
        """Return number and name of what the rank runs; 0 if nothing has begun, "" between two."""
        number, _, name = self._read("alternative").partition(" ")
        # It may be read while the rank writes it.
        return int(number) if number.isdecimal() else 0, name

    def output(self, start: int = 0) -> tuple[list[str], int]:
        """Return the last lines of output after byte `start`, and the size of all output.

        A first line says so if lines are left out. Of a progress bar that rewrites its line, the
        last state is the line.
        """
        try:
            with (self.directory / f"rank-{self.number}.log").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = file.seek(max(start, size - OUTPUT_BYTES))
                text = file.read(size - begin).decode(errors="replace").removesuffix("\n")
        except FileNotFoundError:  # not yet, or the directory was removed
            return [], start
        if not text:
            return [], size
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        if begin > start or len(lines) > OUTPUT_LINES:
            note = f"... the last of {(size - start) / 1e6:.1f} MB of output"
            lines = [note, *lines[1:][-OUTPUT_LINES:]]
        return lines, size

    def output_tail(self) -> str:
        """Return the last lines of all output, without empty ones."""
        return "\n".join(filter(None, self.output()[0]))

    def _read(self, kind: str) -> str:
        with contextlib.suppress(FileNotFoundError):  # not yet, or the directory was removed
            path = self.directory / f"rank-{self.number}.{kind}"
            return path.read_text(errors="replace").rstrip("\0")
        return ""
