"""The record next to a page: which run, named in the notebook's last output, the page draws."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.pages.cards import Piece
from labkit.lab.pages.html import piece
from labkit.lab.pages.provenance import RULE, provenance_rows
from labkit.lab.project import from_project, relative_to_project
from labkit.lab.runs.store import Run

RUN_MIME = "application/vnd.labkit.run+json"  # the run of an executed notebook
OTHER_FORMAT = "its record is older or newer than this labkit: draw it again"


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
