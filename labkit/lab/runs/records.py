"""A run's file, line by line: the header, the records after it, and the writer that appends them.

    {"kind": "header", ...}    once: parameters, machine, source, plan
    {"kind": "row", "point": id, "rank": r, "values": {...}}     as soon as it is measured
    {"kind": "end", "point": id, "status": ..., "reason": ...}   at its end; synced
    {"kind": "resumed", "at": ..., "command": ..., "source": ...}   each time a run is resumed

Lists in `values` are samples. Records are validated when read, because a run may come from anybody.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from labkit.costs.calibration import Calibration
from labkit.lab.config import ParameterError
from labkit.lab.point import Point
from labkit.lab.project import lock_file
from labkit.machine.description import Machine
from labkit.machine.load import Load
from labkit.machine.source import Source
from labkit.scaling import first_problem

SCHEMA = 2
Status = Literal["ok", "oom", "skipped", "failed", "timeout"]


class RunFileError(ParameterError):
    """A file that cannot be read or written as a run; the message names the file and the line."""


# Unknown fields are refused: a newer labkit may have recorded what changes the meaning of others.
class RunHeader(BaseModel, extra="forbid", frozen=True):
    """The first line of a run: everything needed to judge it and to measure it again."""

    kind: str = "header"
    format_version: int = SCHEMA
    lab: str
    profile: str
    config: dict[str, Any]
    machine: Machine
    command: str
    started: datetime
    planned: dict[str, dict[str, Any]]
    """Points by id, in the order of measuring."""
    ranks_by_host: dict[str, list[int]] | None = None
    """Ranks of a torchrun job by host; None: labkit started the ranks on this machine."""
    load: Load | None = None
    """Load of the machine before the first point; None in older runs."""
    user_alternatives: list[str] = []
    """Names of the alternatives that a reader added to labkit's."""
    is_partial: bool = False
    """Whether labkit's other alternatives were left out (`only=True`)."""
    calibration: Calibration | None = None
    """Basis of the run's predictions; None without one, and in older runs."""


class _PointRecord(BaseModel, strict=True):
    """A record that belongs to a point."""

    point: str


class Row(_PointRecord):
    """Values that a rank measured; lists are samples of one length."""

    kind: Literal["row"]
    rank: int
    values: dict[str, Any]

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        # A frame has one row per repeat, and pairs the samples of a record by it.
        if len({len(value) for value in self.values.values() if isinstance(value, list)}) > 1:
            raise ValueError("its samples differ in number")
        return self


class End(_PointRecord):
    """The end of a point, with a reason unless it is ok."""

    kind: Literal["end"]
    status: Status
    reason: str | None = None
    elapsed_s: float = 0.0
    facts: dict[str, Any] = {}
    """Reports of the ranks about themselves: threads, scheduling, start method."""
    load: Load | None = None
    details: str = ""
    """Traceback and output of the rank that failed."""

    @model_validator(mode="after")
    def _check_reason(self) -> Self:
        if (self.reason is None) != (self.status == "ok"):
            raise ValueError("expected a reason unless the status is ok")
        return self


class Resumption(BaseModel, frozen=True):
    """A run was resumed: when, by which command, from which source."""

    kind: Literal["resumed"] = "resumed"
    at: datetime
    command: str
    source: Source | None = None


Record = Row | End | Resumption
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def parse_record(line: bytes) -> Record:
    """Parse a line. ValueError in one line if it is no record."""
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        raise ValueError(" ".join(first_problem(error)).strip()) from None


class RunWriter:
    """Appends to a run and holds a lock on its file, so that no other process appends to it."""

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, directory: Path, header: RunHeader) -> Self:
        """Create `<utc-time>-<machine>-<profile>.jsonl`; a taken name gets a number."""
        stem = f"{header.started:%Y%m%dT%H%M%SZ}-{header.machine.slug}-{header.profile}"
        with _errors_named(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for suffix in chain([""], (f"-{number}" for number in count(2))):
                path = directory / f"{stem}{suffix}.jsonl"
                with suppress(FileExistsError):
                    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND
                    descriptor = os.open(path, flags, 0o644)
                    break
        writer = cls(path, descriptor)
        try:
            lock_file(descriptor, path)
        except ParameterError:
            writer.close()
            # It would be a run without a header.
            path.unlink()
            raise
        writer._append(header)
        writer.sync()
        return writer

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Open an existing run, unchanged as yet. RunFileError if another process has it."""
        with _errors_named(path):
            writer = cls(path, os.open(path, os.O_RDWR | os.O_APPEND))
        try:
            lock_file(writer._descriptor, path)
        except BlockingIOError:
            writer.close()
            raise RunFileError(f"{path}: another process is writing this run") from None
        return writer

    def start_resumption(self, command: str, source: Source | None) -> None:
        """Drop a torn last line and record that this command and source measure from here on."""
        with _errors_named(self.path):
            os.ftruncate(self._descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        self._append(
            Resumption(kind="resumed", at=datetime.now(UTC), command=command, source=source)
        )

    def add_row(self, point: Point, rank: int, values: dict[str, Any]) -> None:
        # Not synced: a power cut loses rows of the point under way, which is measured again.
        self._append(Row(kind="row", point=point.id, rank=rank, values=values))

    def end_point(self, point: Point, status: str, **fields: Any) -> None:
        """Record a point's end with the `fields` of `End`. ValueError if its reason is missing."""
        end = {"kind": "end", "point": point.id, "status": status} | fields
        self._append(End.model_validate(end))
        self.sync()

    def sync(self) -> None:
        """Write to the disk itself, so that a power cut loses nothing."""
        with _errors_named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: BaseModel) -> None:
        # Without defaults, which would be most of a row's line; the header is to be complete.
        values = record.model_dump(exclude_unset=not isinstance(record, RunHeader))
        text = json.dumps(values, separators=(",", ":"), default=datetime.isoformat)
        line = f"{text}\n".encode()
        with _errors_named(self.path):
            # A write may be partial when the disk is nearly full; the next one raises.
            while line:
                line = line[os.write(self._descriptor, line) :]


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the file."""
    try:
        yield
    except OSError as error:
        message = f"{path}: cannot be written ({error.strerror}); everything written before is kept"
        raise RunFileError(message) from error
