"""Runs as read from disk: append-only files, readable at every moment (format: `records.py`).

A killed run keeps every complete line. Rows of a point that did not end are ignored; `--resume`
measures them again.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from labkit.lab.facts import Note
from labkit.lab.metric import Results
from labkit.lab.project import kind_of_path, relative_to_project
from labkit.lab.runs.records import (
    SCHEMA,
    End,
    Resumption,
    Row,
    RunFileError,
    RunHeader,
    parse_record,
)
from labkit.machine.load import Load, busy_points
from labkit.machine.source import Source
from labkit.scaling import first_problem

__all__ = ["Run", "RunFileError", "RunHeader", "find_run", "newest_runs"]

MAX_REASONS = 3
# From this share of the measured time up, nothing is recommended by a run: ratios shift, too.
BUSY_SHARE = 0.25


@dataclass(eq=False, repr=False)
class Run:
    """A run as read from its file."""

    path: Path
    header: RunHeader
    rows: Sequence[Row]
    """Rows of points that have ended."""
    ends: Mapping[str, End]
    """By point."""
    resumptions: Sequence[Resumption] = ()

    @classmethod
    def load(cls, path: Path | str) -> "Run":
        """Read a run; a torn last line is skipped. RunFileError for a foreign or damaged file."""
        path = Path(path)
        try:
            # A kill tears the last line before its newline.
            lines = path.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise RunFileError(f"{path}: cannot be read ({error.strerror})") from None
        header = _parse_header(path, lines[0] if lines else b"{}")
        rows: dict[str, list[Row]] = {}
        ends: dict[str, End] = {}
        resumptions: list[Resumption] = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                record = parse_record(line)
                if not isinstance(record, Resumption) and record.point not in header.planned:
                    raise ValueError(f"the point {record.point!r:.40} is not in the plan")
            except ValueError as error:
                raise RunFileError(
                    f"{path}, line {number}: not a record of a run ({error})"
                ) from None
            match record:
                case Row():
                    rows.setdefault(record.point, []).append(record)
                case End():
                    ends[record.point] = record
                case Resumption():  # points that had not ended are measured again
                    resumptions.append(record)
                    # What was measured of them before the interruption is of other processes.
                    rows = {point: measured for point, measured in rows.items() if point in ends}
        return cls(
            path,
            header,
            [row for point in rows if point in ends for row in rows[point]],
            ends,
            resumptions,
        )

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def sources(self) -> list[Source | None]:
        """Sources that measured it, each once, in order; None: not recorded."""
        sources = [self.header.machine.source, *(again.source for again in self.resumptions)]
        return list(dict.fromkeys(sources))

    @property
    def pending(self) -> list[str]:
        """Ids of planned points that have not ended."""
        return [point for point in self.header.planned if point not in self.ends]

    def frame(self) -> pd.DataFrame:
        """Return a copy of the rows, one per (point, rank, repeat), with the point's fields.

        Only points that ended `ok`: in others ranks are missing, and so may be the slowest. Fields
        of a point that are lists (the alternatives it compared) are left out.
        """
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        long = []
        for row in self.rows:
            if self.ends[row.point].status != "ok":
                continue
            values = {
                "point": row.point,
                "rank": row.rank,
                **self._scalar_fields(row.point),
                **row.values,
            }
            samples = {name: value for name, value in values.items() if isinstance(value, list)}
            scalars = {name: value for name, value in values.items() if name not in samples}
            for repeat in range(max(map(len, samples.values()), default=1)):
                sample = {name: value[repeat] for name, value in samples.items()}
                long.append(scalars | {"repeat": repeat} | sample)
        return pd.DataFrame(long)

    def results(self) -> Results:
        """Rows, calibration and reasons for missing points: the input of questions."""
        machine = self.header.machine
        # Points of a run that is still being measured are to come, not missing.
        ended = [note for note in self.missing_points() if note.status != "pending"]
        return Results(
            self._frame,
            calibration=self.header.calibration,
            missing=tuple(ended[:MAX_REASONS]),
            is_busy=self.is_busy,
            user_alternatives=tuple(self.header.user_alternatives),
            machine_bytes=machine.memory_of(
                machine.device(self.header.config.get("device") or "auto")
            ),
            link_bytes_per_s=machine.link_bytes_per_s,
        )

    def missing_points(self) -> list[Note]:
        """Return points that did not end `ok`, by status and reason, the most frequent first."""
        table = self.coverage()
        others = table[table["status"] != "ok"]
        pending = others["status"] == "pending"
        others = others.assign(reason=others["reason"].mask(pending, "not ended"))
        counts = others.groupby(["status", "reason"], dropna=False).size()
        return [
            Note(status, str(reason), points=int(count))
            for (status, reason), count in counts.sort_values(ascending=False).items()
        ]

    def coverage(self) -> pd.DataFrame:
        """Return fields, status, reason and elapsed_s of each planned point."""
        pending = {"status": "pending", "reason": None, "elapsed_s": float("nan")}
        ends = {
            point: {name: getattr(end, name) for name in pending}
            for point, end in self.ends.items()
        }
        rows = [
            {"point": id, **self._scalar_fields(id), **ends.get(id, pending)}
            for id in self.header.planned
        ]
        return pd.DataFrame(rows, columns=None if rows else ["point", *pending])

    @property
    def loads(self) -> dict[str, Load]:
        """Load of the machine during each point that recorded it."""
        return {point: end.load for point, end in self.ends.items() if end.load is not None}

    @cached_property
    def busy(self) -> dict[str, str]:
        """Points during which the machine was busy or slow, with the reason as a phrase."""
        return busy_points(self.loads, self.header.machine.cores)

    @property
    def is_busy(self) -> bool:
        """Whether other programs were at work during a quarter of the measured time or more."""
        points = self.coverage()
        elapsed_s = points["elapsed_s"]
        busy_s = elapsed_s[points["point"].isin(self.busy)].sum()
        return bool(self.busy) and busy_s >= BUSY_SHARE * max(elapsed_s.sum(), 1e-9)

    def failures(self) -> Iterator[tuple[str, str, str]]:
        """Yield point, reason and details (traceback, last output) of each point that failed."""
        for point, end in self.ends.items():
            if end.status not in ("ok", "skipped"):
                yield point, f"{end.status}: {end.reason}", end.details

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what the ranks reported about themselves (threads, scheduling), by point id."""
        return {point: end.facts for point, end in self.ends.items()}

    def _scalar_fields(self, point: str) -> dict[str, Any]:
        fields = self.header.planned[point]
        return {name: value for name, value in fields.items() if not isinstance(value, list | dict)}


def newest_runs(*folders: Path) -> Iterator[Run]:
    """Yield the runs in these folders that can be read, newest first."""
    paths = (path for folder in folders for path in folder.glob("*.jsonl"))
    # Names begin with the time of the start; files of a copy have other times.
    for path in sorted(paths, key=lambda path: path.name, reverse=True):
        with suppress(RunFileError):
            yield Run.load(path)


def find_run(directories: Iterable[Path], text: str) -> Path:
    """Find a run by its path, or by an unambiguous beginning of its name in a directory."""
    path = Path(text)
    if kind_of_path(path) == "file":
        return path
    directories = list(directories)
    runs = [run for directory in directories for run in sorted(directory.glob("*.jsonl"))]
    name = path.name.removesuffix(".jsonl")
    # A whole name first: with a number behind it, it begins the name of the next run.
    matches = [run for run in runs if run.stem == name]
    matches = matches or [run for run in runs if run.stem.startswith(name)]
    if len(matches) > 1:
        names = ", ".join(f"{run.parent.name}/{run.stem}" for run in matches)
        raise RunFileError(
            f"{text!r:.300} begins the names of {len(matches)} runs: {names}; give more of one"
        )
    if not matches:
        # One lab has two folders; those of all labs would fill the screen.
        places = directories
        if len(directories) > 2:
            places = [directory.parent for directory in directories]
        where = " or ".join(dict.fromkeys(relative_to_project(place) for place in places))
        raise RunFileError(
            f"{text!r:.300} is neither a run file nor the start of the name of one in {where}"
        )
    return matches[0]


def _parse_header(path: Path, line: bytes) -> RunHeader:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"{path}, line 1: not a line of a run ({error})") from None
    if record.get("kind") != "header":
        raise RunFileError(f"{path}: not a run: it does not begin with a header line")
    version = record.get("format_version")
    if version != SCHEMA:
        raise RunFileError(
            f"{path}: written by {_writer(record)} in format {version}; this one reads format"
            f" {SCHEMA}"
        )
    try:
        header = RunHeader.model_validate(record)
        # Rounds ended by the width of intervals before they were planned by a gain: no lab's config
        # has this parameter, by which a run is resumed and measured again.
        header.config.pop("ratio_within", None)
        return header
    except ValidationError as error:
        name, problem = first_problem(error)
        if error.errors()[0]["type"] == "extra_forbidden":
            raise RunFileError(
                f"{path}: written by {_writer(record)}; {name} is unknown to this labkit"
            ) from None
        raise RunFileError(f"{path}: damaged header: {name} {problem}") from None


def _writer(record: dict[str, Any]) -> str:
    """Name the labkit that wrote a header which this version cannot read."""
    match record:
        case {"machine": {"source": {"version": str(version), "commit": str(commit)}}}:
            return f"labkit {version[:40]} (commit {commit[:40]})"
        case {"machine": {"source": {"version": str(version)}}}:
            return f"labkit {version[:40]}"
    return "another labkit"
