"""Where the numbers of a page come from: its run, and the record next to it that names the run."""

import json
import shlex
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from labkit.bench.intervals import FALSE_DISCOVERY_RATE
from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.lab.calibration import LIMITS, describe_calibration
from labkit.lab.config import AUTO, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.pages.cards import Piece
from labkit.lab.pages.html import piece
from labkit.lab.project import from_project, relative_to_project
from labkit.lab.runs.records import RunHeader
from labkit.lab.runs.store import Run
from labkit.lab.units import counted
from labkit.parallel.ranks.torchrun import describe_hosts

RUN_MIME = "application/vnd.labkit.run+json"  # the run of an executed notebook
OTHER_FORMAT = "its record is older or newer than this labkit: draw it again"

RULE = (
    f"A difference counts if it is at least {100 * MIN_RELEVANT_DIFFERENCE:.0f}% and significant"
    f" (false discovery rate {FALSE_DISCOVERY_RATE:.1%} per question). Intervals are 95% and cover"
    " what varied within this run. A ratio is estimated from rounds, so it may differ from the"
    " ratio of two medians. Compare ratios, not times, between sections: other processes measured"
    " them at other times."
)


class PageRecord(BaseModel, frozen=True):
    """What the index needs to know of a page, in `<lab>.json` next to it."""

    format_version: Literal[9] = 9
    """Raised whenever a field changes its name or meaning."""
    lab: str
    run: str | None = None
    """Path relative to the project; None if the notebook did not run to its end."""
    error: str | None = None
    """Why it did not."""


def run_card(lab: Lab, run: Run) -> Piece:
    """Return the card below a lab's last cell: where the numbers come from."""
    rows = [*provenance_rows(lab, run).items(), ("Differences", RULE)]
    record = {"run": relative_to_project(run.path)}
    # A page has the same facts at its end.
    return Piece(piece("provenance", rows=rows), on_page="", records={RUN_MIME: record})


def notebook_run(notebook: Path) -> Path | None:
    """Return the run of an executed notebook; None if it did not get to its last cell."""
    import nbformat  # a second to load, and a kernel that imports this module reads no notebook

    for cell in reversed(nbformat.read(notebook, as_version=4).cells):
        for output in cell.get("outputs", []):
            record = output.get("data", {}).get(RUN_MIME)
            if record:
                return from_project(record["run"])
    return None


def answered_run(lab: Lab, file: Path) -> tuple[Run, dict[str, Answer]]:
    """Load a run and answer its lab's questions. OSError or RunFileError if it cannot be read."""
    # A report writes its index after every lab, from the same runs: what has not changed is kept.
    key = (lab.name, file, file.stat().st_mtime_ns)
    if key not in _ANSWERED:
        run = Run.load(file)
        _ANSWERED[key] = run, lab.answers(run.results())
    return _ANSWERED[key]


_ANSWERED: dict[tuple[str, Path, int], tuple[Run, dict[str, Answer]]] = {}


def read_record(lab: Lab, path: Path) -> PageRecord:
    """Read a record; one of another format, or none at all, says so as its error."""
    try:
        return PageRecord.model_validate_json(path.read_bytes())
    except (ValidationError, OSError):
        return PageRecord(lab=lab.name, error=OTHER_FORMAT)


def provenance_rows(lab: Lab, run: Run) -> dict[str, str]:
    """Return facts of the provenance card by name."""
    path = relative_to_project(run.path)
    rows = {
        "Run": path,
        "Subject": lab.example(run.results()),
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        "Resumed at": "; ".join(
            f"{again.at:%F %T} UTC, {again.source or 'unknown commit'}, by {again.command}"
            for again in run.resumptions
        ),
        "Draw again": f"labkit report {lab.name} --run {shlex.quote(path)}",
        "Measure again": _command_again(lab, run.header),
        "Ranks": _describe_ranks(run),
    }
    if lab.name != LIMITS:
        rows["Predicted from"] = describe_calibration(run)
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    # Most runs have no example and no resumption.
    return {name: value for name, value in rows.items() if value}


def _command_again(lab: Lab, header: RunHeader) -> str:
    """Return the command, with --set for what differs from the profile, that measures it again."""
    # A config may name alternatives of a notebook, or be of another version of the lab.
    try:
        lab.configure(header.profile, header.config, header.machine)
    except ParameterError:
        return "by the notebook with the alternatives that it adds, or the labkit that measured it"
    profiles = lab.profiles_on(header.machine, header.config.get("device") or AUTO)
    profile = profiles[header.profile].model_dump(mode="json")
    # Without the run's time: on another machine it would leave out other points, or none.
    changed = {
        name: value
        for name, value in header.config.items()
        if name != "budget_s" and profile[name] != value
    }
    options = [
        f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items()
    ]
    return f"labkit report {lab.name} --profile {header.profile}" + "".join(options)


def _describe_ranks(run: Run) -> str:
    """Say how the ranks ran: "2 ranks: gloo, forkserver, scheduling batch, 1 thread each"."""
    described = set()
    for fact in run.facts().values():
        # Ranks that failed to start have reported only some of these.
        if {"world_size", "backend", "start_method", "scheduling", "threads"} <= fact.keys():
            parts = [
                fact["backend"] or "no process group",
                fact["start_method"],
                f"scheduling {fact['scheduling']}",
                f"{counted(fact['threads'], 'thread')} each",
            ]
            if "shared_memory" in fact:
                parts.append(f"shared memory {fact['shared_memory']}")
            described.add((fact["world_size"], ", ".join(parts)))
    texts = [f"{counted(ranks, 'rank')}: {text}" for ranks, text in sorted(described)]
    return "; ".join(texts) or "none"
