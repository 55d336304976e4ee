"""Writing a run: a line at a time, at its end, under a lock. `store.py` says what the lines are, and reads them."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from labkit.lab.point import Point
from labkit.lab.runs.records import Again, End, Resumption, Row
from labkit.lab.runs.store import RunFileError, RunHeader
from labkit.machine import Source


class RunWriter:
    """Appends to a run; holds a lock on the file, so that nobody else appends to it."""

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, directory: Path, header: RunHeader) -> Self:
        """A new file `<utc-time>-<machine>-<profile>.jsonl` in `directory`; a taken name gets a number."""
        with _failing_by_name(directory):
            directory.mkdir(parents=True, exist_ok=True)
        stem = f"{header.started:%Y%m%dT%H%M%SZ}-{header.machine.slug}-{header.profile}"
        for attempt in range(1, 1000):
            path = directory / (f"{stem}.jsonl" if attempt == 1 else f"{stem}-{attempt}.jsonl")
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o644)
            except FileExistsError:
                continue
            except OSError as error:
                raise _cannot_be_written(path, error) from error
            writer = cls(path, descriptor)
            writer._lock()
            writer._append(header)
            writer.sync()
            return writer
        raise RunFileError(f"{directory}: a thousand runs of the name {stem} exist")

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """A run that is there, as it is until `start_resumption`. RunFileError if somebody else is writing it."""
        with _failing_by_name(path):
            writer = cls(path, os.open(path, os.O_RDWR | os.O_APPEND))
        try:
            writer._lock()
        except BlockingIOError:
            writer.close()
            raise RunFileError(f"{path}: another process is writing this run") from None
        return writer

    def start_resumption(self, command: str, source: Source | None) -> None:
        """Take up a reopened run: a torn last line is dropped, and what follows is of this command and source."""
        with _failing_by_name(self.path):
            os.ftruncate(self._descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        self._append(Resumption(kind="resumed", at=datetime.now(UTC), command=command, source=source))

    def add_row(self, point: Point, rank: int, values: dict[str, Any]) -> None:
        self._append(Row(kind="row", point=point.id, rank=rank, values=values))

    def end_point(self, point: Point, status: str, **fields: Any) -> None:
        """Record how a point ended, with the `fields` of `End`. ValueError for a reason too many, or none."""
        self._append(End.model_validate({"kind": "end", "point": point.id, "status": status} | fields))
        self.sync()

    def measure_again(self, point: Point, alternative: str, reason: str, details: str) -> None:
        """Record that a point begins anew without an alternative that failed; `details` as in `End`."""
        self._append(Again(kind="again", point=point.id, alternative=alternative, reason=reason, details=details))

    def sync(self) -> None:
        """Onto the disk itself, so that not even a power cut loses it."""
        with _failing_by_name(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _append(self, record: BaseModel) -> None:
        values = record.model_dump(exclude_unset=not isinstance(record, RunHeader))
        line = json.dumps(values, separators=(",", ":"), default=datetime.isoformat).encode() + b"\n"
        with _failing_by_name(self.path):
            while line:  # a write may be partial when the disk is nearly full; the next one raises
                line = line[os.write(self._descriptor, line) :]


@contextmanager
def _failing_by_name(path: Path) -> Iterator[None]:
    """Turn what the system says of a disk into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise _cannot_be_written(path, error) from error


def _cannot_be_written(path: Path, error: OSError) -> RunFileError:
    return RunFileError(f"{path}: cannot be written ({error.strerror}); what was written before is kept")
