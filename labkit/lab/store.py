"""Runs on disk: one JSON-lines file a run, append-only, readable at every moment.

    {"kind": "header", ...}    once: what was asked for, on which machine, from which source, the plan
    {"kind": "row", "point": id, "rank": r, "values": {...}}     as soon as it is measured
    {"kind": "end", "point": id, "status": ..., "reason": ...}   once a point is over; the file is synced
    {"kind": "resumed", ...}   each time a run is taken up again

A killed run keeps every complete line. Rows of a point that did not end are ignored, and measured again by
`--resume`. Values that are lists are samples: they come back as one row a repeat.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.lab.point import Point
from labkit.lab.project import kind_of_path
from labkit.lab.records import check_record
from labkit.machine import Machine

SCHEMA = 1
STATUSES = ("ok", "oom", "skipped", "failed", "timeout")

Record = dict[str, Any]


class RunFileError(ValueError):
    """A file that is not a run this version can read; the message names the file and the line."""


class RunHeader(BaseModel):
    """The first line of a run: everything needed to judge it and to measure it again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = "header"
    format_version: int = SCHEMA
    lab: str
    profile: str
    config: dict[str, Any]
    machine: Machine
    command: str
    started: datetime
    planned: dict[str, dict[str, Any]]
    """Points by id, in the order in which they are measured."""
    ranks_by_host: dict[str, list[int]] | None = None
    """Which ranks of a torchrun job share a host; None: ranks were started, all on the machine."""


class Run:
    """A run as read from its file."""

    def __init__(self, path: Path, header: RunHeader, rows: list[Record], ends: dict[str, Record]):
        self.path = path
        self.header = header
        self._rows = rows
        self._ends = ends

    @classmethod
    def load(cls, path: Path | str) -> "Run":
        """Read a run. RunFileError for a foreign or damaged file; a torn last line is passed over."""
        path = Path(path)
        records = _read_records(path)
        header = _read_header(path, next(records, None))
        rows: dict[str, list[Record]] = {}
        ends: dict[str, Record] = {}
        for number, record in enumerate(records, start=2):
            try:
                check_record(record, header.planned)
            except ValueError as error:
                raise RunFileError(f"{path}, line {number}: not a record of a run ({error})") from None
            _collect(record, rows, ends)
        ended_rows = [row for point, of_point in rows.items() if point in ends for row in of_point]
        return cls(path, header, ended_rows, ends)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def pending(self) -> list[str]:
        """Ids of planned points that have not ended."""
        return [point for point in self.header.planned if point not in self._ends]

    def frame(self) -> pd.DataFrame:
        """What was measured: one row a (point, rank, repeat), with the point's fields beside the values.

        Only points that ended `ok`: in another some ranks are missing, and the slowest rank unknown. Fields
        of a point that are lists (the alternatives it compared) are left out.
        """
        ok = {point for point, end in self._ends.items() if end["status"] == "ok"}
        flat = [
            {"point": row["point"], "rank": row["rank"], **self._scalar_fields(row["point"]), **row["values"]}
            for row in self._rows
            if row["point"] in ok
        ]
        return _one_row_a_repeat(flat)

    def sampled(self) -> list[str]:
        """Names of values that were recorded as samples, one a repeat; others were recorded once."""
        rows = (row["values"].items() for row in self._rows)
        return list(dict.fromkeys(name for values in rows for name, value in values if isinstance(value, list)))

    def coverage(self) -> pd.DataFrame:
        """One row a planned point: its fields, status ("pending" if it has not ended), reason, elapsed_s."""
        pending = {"status": "pending", "reason": None, "elapsed_s": float("nan")}
        rows = [
            {"point": point, **self._scalar_fields(point)}
            | {field: self._ends.get(point, pending).get(field) for field in pending}
            for point in self.header.planned
        ]
        return pd.DataFrame(rows, columns=None if rows else ["point", *pending])

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the ranks said of themselves (threads, scheduling, start method), by point id."""
        return {point: end.get("facts", {}) for point, end in self._ends.items()}

    def _scalar_fields(self, point: str) -> dict[str, Any]:
        fields = self.header.planned[point]
        return {name: value for name, value in fields.items() if not isinstance(value, list | dict)}


class RunWriter:
    """Appends to a run; holds a lock on the file, so that nobody else appends to it."""

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, directory: Path, header: RunHeader) -> "RunWriter":
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
            writer._append(header.model_dump(mode="json"))
            writer.sync()
            return writer
        raise RunFileError(f"{directory}: a thousand runs of the name {stem} exist")

    @classmethod
    def reopen(cls, path: Path) -> "RunWriter":
        """A run that is there, as it is until `begin_again`. RunFileError if somebody else is writing it."""
        with _failing_by_name(path):
            writer = cls(path, os.open(path, os.O_RDWR | os.O_APPEND))
        try:
            writer._lock()
        except BlockingIOError:
            writer.close()
            raise RunFileError(f"{path}: another process is writing this run") from None
        return writer

    def begin_again(self, command: str) -> None:
        """Take up a reopened run: a torn last line is dropped, and from here on rows are of another attempt."""
        with _failing_by_name(self.path):
            os.ftruncate(self._descriptor, _whole_lines_bytes(self.path))
        self._append({"kind": "resumed", "command": command, "at": datetime.now(UTC).isoformat()})

    def add_row(self, point: Point, rank: int, values: dict[str, Any]) -> None:
        self._append({"kind": "row", "point": point.id, "rank": rank, "values": values})

    def end_point(
        self,
        point: Point,
        status: str,
        *,
        reason: str | None = None,
        elapsed_s: float = 0.0,
        facts: dict[str, Any] | None = None,
        details: str = "",
    ) -> None:
        """Record how a point ended; `details` is the traceback and the output of the rank that failed."""
        if status not in STATUSES or (reason is None) != (status == "ok"):
            raise ValueError(f"expected a status of {STATUSES} and a reason unless ok: {status}, {reason}")
        end = {"kind": "end", "point": point.id, "status": status, "reason": reason, "elapsed_s": elapsed_s}
        self._append(end | {"facts": facts or {}} | ({"details": details} if details else {}))
        self.sync()

    def sync(self) -> None:
        """Onto the disk itself, so that not even a power cut loses it."""
        with _failing_by_name(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _append(self, record: Record) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
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


def find_run(directories: Iterable[Path], text: str) -> Path:
    """A run by its path, or by an unambiguous beginning of its name inside one of `directories`."""
    given = Path(text)
    if kind_of_path(given) == "file":
        return given
    runs = [path for directory in directories for path in sorted(directory.glob("*.jsonl"))]
    name = given.name.removesuffix(".jsonl")
    matches = [path for path in runs if path.stem == name] or [path for path in runs if path.stem.startswith(name)]
    if len(matches) != 1:
        found = ", ".join(path.stem for path in matches) or "none"
        raise RunFileError(f"expected a run file or the beginning of a name, got {text!r:.300} (matches: {found})")
    return matches[0]


def _read_records(path: Path) -> Iterator[Record]:
    """Whole lines as JSON objects. A last line without its newline was torn by a kill, and is not read."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise RunFileError(f"{path}, line {number}: not a line of a run ({error})") from None
        yield record


def _read_header(path: Path, record: Record | None) -> RunHeader:
    if record is None or record.get("kind") != "header":
        raise RunFileError(f"{path}: not a run: it does not begin with a header line")
    if record.get("format_version") != SCHEMA:
        version = record.get("format_version")
        raise RunFileError(f"{path}: written in format {version}, this labkit reads format {SCHEMA}")
    try:
        return RunHeader.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunFileError(f"{path}: damaged header: {place}: {first['msg']}") from None


def _collect(record: Record, rows: dict[str, list[Record]], ends: dict[str, Record]) -> None:
    match record["kind"]:
        case "row":
            rows.setdefault(record["point"], []).append(record)
        case "end":
            ends[record["point"]] = record
        case "resumed":  # what an interrupted attempt measured of a point is measured again
            for point in rows.keys() - ends.keys():
                del rows[point]


def _whole_lines_bytes(path: Path) -> int:
    content = path.read_bytes()
    return content.rfind(b"\n") + 1


def _one_row_a_repeat(rows: list[Record]) -> pd.DataFrame:
    """Turn list-valued fields (samples, all of one length in a row) into rows numbered by `repeat`."""
    long: list[Record] = []
    for row in rows:
        samples = {name: value for name, value in row.items() if isinstance(value, list)}
        scalars = {name: value for name, value in row.items() if name not in samples}
        lengths = {len(values) for values in samples.values()}
        if len(lengths) > 1:
            raise ValueError(f"samples of one row differ in number: {sorted(samples)}")
        for repeat in range(max(lengths, default=1)):
            long.append(scalars | {"repeat": repeat} | {name: s[repeat] for name, s in samples.items()})
    return pd.DataFrame(long)
