"""The record of a lab: what its notebook leaves when it closes. The index reads it from a file next to the page."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import nbformat
from pydantic import AfterValidator, BaseModel, ValidationError

from labkit.bench.statistics import FALSE_DISCOVERY_RATE, MIN_RELEVANT_DIFFERENCE
from labkit.lab.advise.local import write_code
from labkit.lab.answers import Answer, Verdict
from labkit.lab.calibration import LIMITS, describe_calibration
from labkit.lab.config import AUTO, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages.cards import MissingPoints, Piece, machine_rows, missing_points
from labkit.lab.pages.html import piece
from labkit.lab.project import relative_to_project
from labkit.lab.recommended import Configuration
from labkit.lab.runs.records import Resumption
from labkit.lab.runs.store import Run, RunHeader
from labkit.lab.units import counted, format_seconds
from labkit.machine import describe_machine
from labkit.parallel.ranks.hosts import describe_hosts

PAGE_MIME = "application/vnd.labkit.page+json"  # how the record stands in an executed notebook
OTHER_FORMAT = "its record is older or newer than this labkit: draw it again"
FAILED = ("failed", "timeout")
BUSY_SHARE = 0.25
"""From this share of the measured time up, other programs make a run a busy machine's."""
RULE = (
    f"A difference counts if it is at least {100 * MIN_RELEVANT_DIFFERENCE:.0f}% and significant (false discovery "
    f"rate {FALSE_DISCOVERY_RATE:g} per question). Intervals are 95% and cover what varied within this run. A ratio is "
    "estimated from rounds, so it may differ from the ratio of two medians. Between sections compare ratios, not "
    "times: other processes measured them at another moment."
)


class AnswerRecord(BaseModel, frozen=True):
    """A question and its answer without the table."""

    id: str
    text: str
    topic: str | None
    is_expected: bool
    verdict: Verdict
    headline: str
    advice: str | None
    effect: Annotated[float, AfterValidator(lambda value: value if math.isfinite(value) else 1.0)]
    """JSON knows neither NaN nor infinity."""
    change: str | None
    scope: str
    notes: list[str]

    @property
    def size(self) -> float:
        """How large the effect is: 0 for none, the same for half and twice."""
        return abs(math.log(self.effect)) if self.effect > 0 else 0.0


class RunRecord(BaseModel, frozen=True):
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


class LabRecord(BaseModel, frozen=True):
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
    def python(self) -> str | None:
        """The configuration that it measured, as Python to paste."""
        return self.run.python if self.run else None

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
    busy_s = float(coverage["elapsed_s"][coverage["point"].isin(run.busy)].sum())
    duration_s = float(coverage["elapsed_s"].sum())
    return RunRecord(
        run=relative_to_project(run.path),
        started=run.header.started,
        duration_s=duration_s,
        profile=run.header.profile,
        identity=list(machine.identity),
        machine=machine.label,
        machine_rows=list(machine_rows(machine, elsewhere=elsewhere).items()),
        provenance=list(provenance_rows(lab, run).items()),
        coverage=coverage["status"].value_counts().to_dict(),
        missing=missing_points(run),
        is_busy=busy_s > 0 and busy_s >= BUSY_SHARE * duration_s,
        python=_joined_code(run),
        answers=[
            AnswerRecord(
                id=question.id,
                text=question.text,
                topic=question.topic,
                is_expected=question.is_expected,
                **answers[question.id].record(),
            )
            for question in lab.questions
        ],
    )


def record_card(record: RunRecord) -> Piece:
    """The card below a lab's last cell: where the numbers come from, with the record. A page has it at its end."""
    rows = [*record.provenance, ("Differences", RULE)]
    return Piece(piece("provenance", rows=rows), on_page="", records={PAGE_MIME: record.model_dump(mode="json")})


def provenance_rows(lab: Lab, run: Run) -> dict[str, str]:
    """The facts of the provenance card by their names."""
    path = relative_to_project(run.path)
    rows = {
        "Run": path,
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        **({"Resumed at": "; ".join(map(_describe_resumption, run.resumptions))} if run.resumptions else {}),
        "Draw again": f"labkit report {lab.name} --run {shlex.quote(path)}",
        "Measure again": _command_again(lab, run.header),
        "Ranks": _describe_ranks(run),
        **({"Predicted from": describe_calibration(run)} if lab.name != LIMITS else {}),
        **({"Load": _describe_load(run)} if run.header.load else {}),
    }
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    return rows


def _describe_resumption(resumption: Resumption) -> str:
    """When, at which commit and by which command a run was taken up again."""
    when = f"{resumption.at:%Y-%m-%d %H:%M:%S} UTC" if resumption.at else "a time that was not recorded"
    unknown = "not a git checkout" if "source" in resumption.model_fields_set else "commit not recorded"
    command = f", by {resumption.command}" if resumption.command else ""
    return f"{when}, {resumption.source or unknown}{command}"


def _describe_load(run: Run) -> str:
    load, cores = run.header.load, run.header.machine.cores
    assert load is not None, "asked for only if it was recorded"
    busy = "unknown" if load.busy_cores is None else f"{load.busy_cores:.1f} of {cores} cores"
    gpu = load.gpu
    gpus = f"; GPUs at up to {gpu.temperature} °C, power limit {gpu.power_limit_w:.0f} W" if gpu else ""
    return f"other programs at the start: {busy}{gpus}"


def _command_again(lab: Lab, header: RunHeader) -> str:
    """With the --set options that lead from the profile to the config of the run."""
    try:
        lab.configure(header.profile, header.config, header.machine)
    except ParameterError:
        return "by the notebook with the alternatives that it adds, or the labkit that measured it"
    profiles = lab.profiles_on(header.machine, header.config.get("device") or AUTO)
    profile = profiles[header.profile].model_dump(mode="json")
    changed = {name: value for name, value in header.config.items() if profile[name] != value}
    options = [f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items()]
    return f"labkit report {lab.name} --profile {header.profile}" + "".join(options)


def _describe_ranks(run: Run) -> str:
    """How the ranks ran, as they reported it: start method, scheduling policy, threads, and code for shared memory."""
    needed = {"world_size", "backend", "start_method", "scheduling", "threads"}  # known once ranks are ready
    facts = [fact for fact in run.facts().values() if needed <= fact.keys() and isinstance(fact["world_size"], int)]
    described = {
        f"{counted(fact['world_size'], 'rank')}: {fact['backend'] or 'no process group'}, {fact['start_method']}, "
        f"scheduling {fact['scheduling']}, {counted(fact['threads'], 'thread')} each"
        f"{', shared memory ' + fact['shared_memory'] if 'shared_memory' in fact else ''}"
        for fact in facts
    }
    return "; ".join(sorted(described, key=lambda text: (int(text.split()[0]), text))) or "none"


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
