"""What the index knows of a lab from its page, and what of it was measured on the machine that reads it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.lab.declaration import Lab
from labkit.lab.pages.export import OTHER_FORMAT, read_page
from labkit.lab.pages.importance import by_importance
from labkit.machine import describe_machine

Entry = Mapping[str, Any]
FAILED = ("failed", "timeout")


def index_entry(study: Lab, output: Path) -> dict[str, Any] | None:
    """What the index shows of a lab; None if there is no page of it."""
    page = output / f"{study.name}.html"
    found = read_page(page) if page.is_file() else None
    if found is None:
        return None
    record = found["record"]
    if record is not None:
        record = record | {"elsewhere": record["identity"] != describe_machine().identity}
    failed = [entry for entry in record["not_measured"] if entry["status"] in FAILED] if record else []
    about: dict[str, Any] = {"name": study.name, "title": study.title, "summary": study.summary, "page": page.name}
    about |= {"is_other_format": found["error"] == OTHER_FORMAT}
    about |= {"answers": by_importance(record["answers"]) if record else []}
    return about | {"record": record, "error": found["error"], "failed": failed}


def measured_here(labs: Iterable[Entry]) -> list[Entry]:
    """Those whose pages are of this machine."""
    return [lab for lab in labs if lab["record"] and not lab["record"]["elsewhere"]]


def answers_here(labs: Iterable[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Every lab that was measured here, with each of its findings."""
    return ((lab, answer) for lab in measured_here(labs) for answer in lab["record"]["answers"])


def href(lab: Entry, question: str) -> str:
    """Where the answer to a question stands, by its id."""
    return f"{lab['page']}#answer-{question}"
