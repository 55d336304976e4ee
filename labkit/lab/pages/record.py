"""The record of a lab, which its notebook leaves when it closes, and the index of a report, made of
records.

A record stands next to each page as JSON. The index says what to do here, the largest differences,
and every lab's answers.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import nbformat
from pydantic import AfterValidator, BaseModel, ValidationError

from labkit.bench.statistics import FALSE_DISCOVERY_RATE, MIN_RELEVANT_DIFFERENCE
from labkit.lab.answers import TOPICS, Answer, Verdict
from labkit.lab.calibration import LIMITS, describe_calibration
from labkit.lab.config import AUTO, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages.cards import (
    MissingPoints,
    Piece,
    machine_rows,
    machine_summary,
    missing_points,
)
from labkit.lab.pages.html import piece, render
from labkit.lab.project import relative_to_project, write_file
from labkit.lab.recommended import Configuration, write_code
from labkit.lab.runs.records import Resumption, RunHeader
from labkit.lab.runs.store import Run
from labkit.lab.units import counted
from labkit.machine.description import describe_machine
from labkit.parallel.ranks.torchrun import describe_hosts

PAGE_MIME = "application/vnd.labkit.page+json"  # the record in an executed notebook
OTHER_FORMAT = "its record is older or newer than this labkit: draw it again"
BUSY_SHARE = 0.25
"""Share of the measured time from which other programs make a run that of a busy machine."""
MAX_LARGEST = 5
JOINED_TOPICS = ("precision", "attention", "compile", "synchronization")
"""Topics that the joined configuration of a training step sets."""
RULE = (
    f"A difference counts if it is at least {100 * MIN_RELEVANT_DIFFERENCE:.0f}% and significant"
    f" (false discovery rate {FALSE_DISCOVERY_RATE:.1%} per question). Intervals are 95% and cover"
    " what varied within this run. A ratio is estimated from rounds, so it may differ from the"
    " ratio of two medians. Compare ratios, not times, between sections: other processes measured"
    " them at other times."
)


class AnswerRecord(BaseModel, frozen=True):
    """A question of a lab and its answer without the table."""

    lab: str
    lab_title: str
    id: str
    text: str
    topic: str | None
    is_expected: bool
    verdict: Verdict
    headline: str
    advice: str | None
    effect: Annotated[float, AfterValidator(lambda value: value if math.isfinite(value) else 1.0)]
    """JSON has neither NaN nor infinity."""
    change: str | None
    scope: str
    notes: tuple[str, ...]

    @property
    def size(self) -> float:
        """Size of the effect: 0 for none, the same for half and twice."""
        return abs(math.log(self.effect)) if self.effect > 0 else 0.0

    @property
    def href(self) -> str:
        return f"{self.lab}.html#answer-{self.id}"

    @property
    def is_better(self) -> bool:
        """Return whether something beats the default, at least in some configurations."""
        return self.verdict in ("yes", "it depends")


class RunRecord(BaseModel, frozen=True):
    """Facts about a run for its page and for the index."""

    run: str
    """Path relative to the project."""
    started: datetime
    profile: str
    identity: list[str | None]
    """Identity of the machine; runs with equal ones are of one machine."""
    machine: str
    machine_rows: list[tuple[str, str]]
    provenance: list[tuple[str, str]]
    coverage: dict[str, int]
    """Points by status."""
    missing: list[MissingPoints]
    is_busy: bool
    """Whether other programs were at work while it measured."""
    python: str | None
    """Measured configuration as Python to paste."""
    answers: list[AnswerRecord]

    @property
    def origin(self) -> str:
        """ "quick, 2026-11-23, 63 of 103 points"; without the points if all were measured."""
        n_measured = self.coverage.get("ok", 0)
        n_planned = sum(self.coverage.values())
        points = f", {n_measured} of {n_planned} points" if n_measured < n_planned else ""
        return f"{self.profile}, {self.started:%Y-%m-%d}{points}"


class LabRecord(BaseModel, frozen=True):
    """Record of a lab's page; `run` is None if its notebook failed, for the reason in `error`."""

    format_version: Literal[8] = 8
    """Raised whenever a field that the index reads changes its name or meaning."""
    lab: str
    title: str
    error: str | None = None
    run: RunRecord | None = None

    @property
    def is_here(self) -> bool:
        """Return whether this machine measured it."""
        return self.run is not None and self.run.identity == list(describe_machine().identity)

    @property
    def first_answer(self) -> AnswerRecord | None:
        """The lab in one line: the answer to the first question that was measured."""
        answers = self.run.answers if self.run else []
        return next((answer for answer in answers if answer.verdict != "not measured"), None)


def run_record(lab: Lab, run: Run, answers: Mapping[str, Answer]) -> RunRecord:
    """Make the record of a run, for its page and for the index."""
    coverage = run.coverage()
    machine = run.header.machine
    is_busy = coverage["point"].isin(run.busy)
    busy_share = coverage["elapsed_s"][is_busy].sum() / max(coverage["elapsed_s"].sum(), 1e-9)
    return RunRecord(
        run=relative_to_project(run.path),
        started=run.header.started,
        profile=run.header.profile,
        identity=list(machine.identity),
        machine=machine.label,
        machine_rows=list(machine_rows(machine).items()),
        provenance=list(provenance_rows(lab, run).items()),
        coverage=coverage["status"].value_counts().to_dict(),
        missing=missing_points(run),
        is_busy=bool(is_busy.any() and busy_share >= BUSY_SHARE),
        python=_joined_code(run),
        answers=[
            AnswerRecord(
                lab=lab.name, lab_title=lab.title, **vars(question) | vars(answers[question.id])
            )
            for question in lab.questions
        ],
    )


def record_card(record: RunRecord) -> Piece:
    """The card below a lab's last cell: where the numbers come from, with the record. A page has it
    at its end."""
    rows = [*record.provenance, ("Differences", RULE)]
    return Piece(
        piece("provenance", rows=rows),
        on_page="",
        records={PAGE_MIME: record.model_dump(mode="json")},
    )


def provenance_rows(lab: Lab, run: Run) -> dict[str, str]:
    """Return facts of the provenance card by name."""
    path = relative_to_project(run.path)
    hosts = run.header.ranks_by_host
    resumed = "; ".join(map(_describe_resumption, run.resumptions))
    return {
        "Run": path,
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        **({"Resumed at": resumed} if resumed else {}),
        "Draw again": f"labkit report {lab.name} --run {shlex.quote(path)}",
        "Measure again": _command_again(lab, run.header),
        "Ranks": _describe_ranks(run),
        **({"Predicted from": describe_calibration(run)} if lab.name != LIMITS else {}),
        **({"Hosts": describe_hosts(hosts)} if hosts is not None else {}),
    }


def _describe_resumption(resumption: Resumption) -> str:
    """Say when, at which commit and by which command a run was resumed; older runs lack some."""
    when = f"{resumption.at:%F %T} UTC" if resumption.at else "unknown time"
    return (
        f"{when}, {resumption.source or 'unknown commit'}, by"
        f" {resumption.command or 'an unknown command'}"
    )


def _command_again(lab: Lab, header: RunHeader) -> str:
    """Return the command with the --set options that lead from the profile to the config of the
    run."""
    try:
        lab.configure(header.profile, header.config, header.machine)
    except ParameterError:
        return "by the notebook with the alternatives that it adds, or the labkit that measured it"
    profiles = lab.profiles_on(header.machine, header.config.get("device") or AUTO)
    profile = profiles[header.profile].model_dump(mode="json")
    changed = {name: value for name, value in header.config.items() if profile[name] != value}
    options = [
        f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items()
    ]
    return f"labkit report {lab.name} --profile {header.profile}" + "".join(options)


def _describe_ranks(run: Run) -> str:
    """Say how the ranks ran, as they reported: "2 ranks: gloo, forkserver, scheduling batch, 1
    thread each"."""
    described = set()
    for fact in run.facts().values():
        # the ranks were ready
        if {"world_size", "backend", "start_method", "scheduling", "threads"} <= fact.keys():
            text = (
                f"{fact['backend'] or 'no process group'}, {fact['start_method']}, scheduling"
                f" {fact['scheduling']}"
            )
            memory = f", shared memory {fact['shared_memory']}" if "shared_memory" in fact else ""
            described.add(
                (fact["world_size"], f"{text}, {counted(fact['threads'], 'thread')} each{memory}")
            )
    return (
        "; ".join(f"{counted(ranks, 'rank')}: {text}" for ranks, text in sorted(described))
        or "none"
    )


def _joined_code(run: Run) -> str | None:
    """Return the joined configuration of the lab of tuned steps as Python; None for every other
    lab."""
    frame = run.frame()
    names = [field.name for field in fields(Configuration)]
    rows = frame.reindex(columns=["implementation", "model", "context_length", *names]).dropna()
    for row in rows[rows["implementation"] == "joined"].to_dict("records"):
        configuration = Configuration(**{name: row[name] for name in names})
        return write_code(configuration, row["model"], int(row["context_length"]))
    return None


def read_notebook_record(notebook: Path) -> RunRecord | None:
    """Read the record in an executed notebook; None if it did not get to its last cell."""
    for cell in reversed(nbformat.read(notebook, as_version=4).cells):
        for output in cell.get("outputs", []):
            if PAGE_MIME in output.get("data", {}):
                return RunRecord.model_validate(output["data"][PAGE_MIME])
    return None


def _read_record(lab: Lab, path: Path) -> LabRecord:
    """Read a record; one of another format, or none at all, says so as its error."""
    try:
        return LabRecord.model_validate_json(path.read_bytes())
    except (ValidationError, OSError):
        return LabRecord(lab=lab.name, title=lab.title, error=OTHER_FORMAT)


def write_index(labs: Iterable[Lab], output: Path, to_come: Sequence[Lab] = ()) -> Path:
    """Write `<output>/index.html` from the records in `output`, in the order of `labs`, and return
    its path.

    `to_come` are labs that a report under way still measures. Whether a record is of this machine
    is decided here, so records and pages may be copied together from several reports.
    """
    paths = {lab.name: (lab, output / f"{lab.name}.json") for lab in labs}
    records = [_read_record(lab, path) for lab, path in paths.values() if path.is_file()]
    usable = [
        record for record in records if record.is_here and not (record.run and record.run.is_busy)
    ]
    answers = [answer for record in usable if record.run for answer in record.run.answers]
    python = {
        record.lab: record.run.python for record in usable if record.run and record.run.python
    }
    tuned = None  # until all labs are measured, whose answers it joins
    if not to_come:
        tuned = next(
            (answer for answer in answers if answer.id == "gain" and answer.lab in python), None
        )
    machine = machine_rows(describe_machine())
    html = render(
        "index_page.html.j2",
        machine=machine.items(),
        machine_summary=machine_summary(machine),
        to_come=[lab.title for lab in to_come],
        other_format=OTHER_FORMAT,
        records=records,
        busy=[record.title for record in records if record.is_here and record not in usable],
        tuned=tuned,
        python=python,
        changes=next((answer for answer in answers if answer.id == "ingredients"), None),
        topics=_recommendations(answers, has_joined=tuned is not None),
        largest=_largest_differences(answers),
        missing=[lab.title for lab, path in paths.values() if not path.is_file()],
    )
    page = output / "index.html"
    write_file(page, html)
    return page


def _recommendations(
    answers: Iterable[AnswerRecord], *, has_joined: bool
) -> dict[str, AnswerRecord]:
    """The title of each topic with its strongest advice; parts of a measured joined configuration
    are left out."""
    best: dict[str | None, AnswerRecord] = {}
    for answer in sorted(answers, key=lambda answer: (answer.is_better, answer.size)):
        if answer.advice and not (
            has_joined and answer.topic in JOINED_TOPICS and answer.is_better
        ):
            best[answer.topic] = answer
    return {title: best[topic] for topic, title in TOPICS.items() if topic in best}


def _largest_differences(answers: Iterable[AnswerRecord]) -> list[AnswerRecord]:
    """Return the largest clear effect of each lab, without those that everybody expects, by
    size."""
    largest: dict[str, AnswerRecord] = {}
    for answer in sorted(answers, key=lambda answer: answer.size):
        if answer.verdict in ("yes", "no") and answer.change and not answer.is_expected:
            largest[answer.lab] = answer
    return sorted(largest.values(), key=lambda answer: -answer.size)[:MAX_LARGEST]
