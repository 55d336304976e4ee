"""The record of a lab: what its notebook leaves when it closes. The index reads it from a file next to the page."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import nbformat
from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.lab.advise.local import write_code
from labkit.lab.answers import Answer, Verdict
from labkit.lab.declaration import Lab
from labkit.lab.pages.cards import machine_rows, missing_points
from labkit.lab.pages.provenance import provenance_rows
from labkit.lab.project import relative_to_project
from labkit.lab.recommended import Configuration
from labkit.lab.runs.store import Run
from labkit.lab.units import format_seconds
from labkit.machine import describe_machine

PAGE_MIME = "application/vnd.labkit.page+json"  # how the record stands in an executed notebook
OTHER_FORMAT = "its record is older or newer than this labkit: draw it again"
FAILED = ("failed", "timeout")
BUSY_SHARE = 0.25
"""From this share of the measured time up, other programs make a run a busy machine's."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class AnswerRecord(_Frozen):
    """A question and its answer without the table."""

    id: str
    text: str
    topic: str | None
    is_expected: bool
    verdict: Verdict
    headline: str
    advice: str | None
    effect: float
    change: str | None
    scope: str
    notes: list[str]

    @property
    def size(self) -> float:
        """How large the effect is: 0 for none, the same for half and twice."""
        return abs(math.log(self.effect)) if 0 < self.effect < math.inf else 0.0


class MissingPoints(_Frozen):
    """How many points ended in a status other than `ok`, and why."""

    status: str
    reason: str
    count: int


class RunRecord(_Frozen):
    """What a page says of its run."""

    run: str
    """Its path, relative to the project."""
    started: datetime
    duration_s: float
    profile: str
    identity: list[str | None]
    """Of the machine: two runs with equal ones are of one machine."""
    machine: str
    machine_rows: list[tuple[str, str]]
    provenance: list[tuple[str, str]]
    coverage: dict[str, int]
    """Points by status."""
    missing: list[MissingPoints]
    is_busy: bool
    """Whether other programs were at work while it measured."""
    python: str | None
    """The configuration that it measured, as Python to paste."""
    answers: list[AnswerRecord]

    @property
    def coverage_line(self) -> str:
        """ "63 of 103 points in 64 s, profile quick, 2026-11-23"."""
        n_measured, n_planned = self.coverage.get("ok", 0), sum(self.coverage.values())
        time = format_seconds(self.duration_s)
        return f"{n_measured} of {n_planned} points in {time}, profile {self.profile}, {self.started:%Y-%m-%d}"


class LabRecord(_Frozen):
    """A lab's page; `run` is None if its notebook failed, for the reason in `error`."""

    format_version: Literal[6] = 6
    """Raised whenever what an index reads changes its name or meaning."""
    lab: str
    title: str
    error: str | None = None
    run: RunRecord | None = None

    @property
    def page(self) -> str:
        return f"{self.lab}.html"

    @property
    def is_here(self) -> bool:
        """Whether this machine measured it."""
        return self.run is not None and self.run.identity == list(describe_machine().identity)

    @property
    def failures(self) -> list[MissingPoints]:
        return [one for one in self.run.missing if one.status in FAILED] if self.run else []


def run_record(lab: Lab, run: Run, answers: Mapping[str, Answer], *, elsewhere: bool) -> RunRecord:
    """What a notebook leaves for its page and for the index."""
    coverage, machine = run.coverage(), run.header.machine
    questions = [lab.question(question.id) for question in lab.questions]
    return RunRecord(
        run=relative_to_project(run.path),
        started=run.header.started,
        duration_s=float(coverage["elapsed_s"].sum()),
        profile=run.header.profile,
        identity=list(machine.identity),
        machine=machine.label,
        machine_rows=list(machine_rows(machine, elsewhere=elsewhere).items()),
        provenance=list(provenance_rows(lab, run).items()),
        coverage=coverage["status"].value_counts().to_dict(),
        missing=[MissingPoints(**one) for one in missing_points(run)],
        is_busy=_is_busy(run),
        python=_joined_code(run),
        answers=[
            AnswerRecord(
                id=question.id,
                text=question.text,
                topic=question.topic,
                is_expected=question.is_expected,
                **_finite(answers[question.id].record()),
            )
            for question in questions
        ],
    )


def _is_busy(run: Run) -> bool:
    elapsed = run.coverage().set_index("point")["elapsed_s"]
    busy = float(elapsed[elapsed.index.isin(run.busy)].sum())
    return busy > 0 and busy >= BUSY_SHARE * float(elapsed.sum())


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows neither NaN nor infinity."""
    return values | {"effect": values["effect"] if math.isfinite(values["effect"]) else 1.0}


def _joined_code(run: Run) -> str | None:
    """The configuration that the lab of tuned steps measured against the default; None for every other lab."""
    frame, names = run.frame(), [field.name for field in fields(Configuration)]
    if not {"implementation", "model", "context_length", *names} <= set(frame.columns):
        return None
    rows = frame[frame["implementation"] == "joined"]
    if rows.empty:
        return None
    row = rows.iloc[0]
    values: dict[str, Any] = {name: None if row[name] != row[name] else row[name] for name in names}
    return write_code(Configuration(**values), row["model"], int(row["context_length"]))


def read_notebook_record(notebook: Path) -> RunRecord | None:
    """What an executed notebook left; None if it did not get to its last cell."""
    for cell in reversed(nbformat.read(notebook, as_version=4).cells):
        for output in cell.get("outputs", []):
            if PAGE_MIME in output.get("data", {}):
                return RunRecord.model_validate(output["data"][PAGE_MIME])
    return None


def read_record(path: Path) -> LabRecord:
    """The record in a file. ValueError if it is of another format, or no record."""
    try:
        return LabRecord.model_validate_json(path.read_bytes())
    except (ValidationError, OSError):
        raise ValueError(OTHER_FORMAT) from None


def read_records(labs: Iterable[Lab], folder: Path) -> list[LabRecord]:
    """The records in a folder, in the order of the labs; one that cannot be read says so as its error."""
    records = []
    for lab in labs:
        path = folder / f"{lab.name}.json"
        if path.is_file():
            try:
                records.append(read_record(path))
            except ValueError as error:
                records.append(LabRecord(lab=lab.name, title=lab.title, error=str(error)))
    return records
