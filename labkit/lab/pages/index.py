"""The index of a report, made of the records in its folder: what to do here, the largest findings, and every lab."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.lab.answers import TOPICS
from labkit.lab.declaration import Lab
from labkit.lab.pages import cards
from labkit.lab.pages.html import render
from labkit.lab.pages.record import OTHER_FORMAT, AnswerRecord, LabRecord, read_records
from labkit.lab.project import write_file
from labkit.machine import describe_machine

MAX_LARGEST = 5
DIFFERS = ("yes", "no", "it depends")
CHANGES = ("yes", "it depends")
JOINED_TOPICS = ("precision", "attention", "compile", "synchronization", "bucket_size")
"""What the joined configuration of a training step sets."""


@dataclass(frozen=True)
class Entry:
    """An answer, and the lab that gives it."""

    lab: LabRecord
    answer: AnswerRecord

    @property
    def href(self) -> str:
        return f"{self.lab.page}#answer-{self.answer.id}"

    @property
    def is_better(self) -> bool:
        """Whether something other than the default is better, at least in some configurations."""
        return self.answer.verdict in CHANGES


def write_index(labs: Iterable[Lab], output: Path, to_come: Sequence[Lab] = ()) -> Path:
    """Write `<output>/index.html` from the records in `output`, in the order of `labs`.

    `to_come` are labs that a report under way still measures. Whether a record is of this machine is judged here, so
    records and pages may be copied together from several reports.
    """
    labs = list(labs)
    records = read_records(labs, output)
    usable = [record for record in records if record.is_here and not (record.run and record.run.is_busy)]
    tuned = joined_configuration(usable)
    topics = recommendations(usable, tuned)
    machine = cards.machine_rows(describe_machine(), elsewhere=False)
    html = render(
        "index_page.html.j2",
        machine=machine.items(),
        machine_summary=cards.machine_summary(machine),
        to_come=[lab.title for lab in to_come],
        other_format=OTHER_FORMAT,
        records=records,
        busy=[record.title for record in records if record.is_here and record not in usable],
        tuned=None if to_come else tuned,  # it joins what all labs say
        topics=topics,
        unsettled=[title for title in TOPICS.values() if title not in topics],
        largest=largest_findings(usable),
        missing=[lab.title for lab in labs if lab.name not in {record.lab for record in records}],
    )
    page = output / "index.html"
    write_file(page, html)
    return page


def _entries(records: Iterable[LabRecord]) -> list[Entry]:
    return [Entry(record, answer) for record in records if record.run for answer in record.run.answers]


def joined_configuration(records: Iterable[LabRecord]) -> Entry | None:
    """The gain of the configuration that joins all recommendations, if it was measured."""
    gains = (entry for entry in _entries(records) if entry.answer.id == "gain" and entry.lab.python)
    return next(gains, None)


def recommendations(records: Iterable[LabRecord], tuned: Entry | None) -> dict[str, Entry]:
    """The title of each topic that has advice, and its strongest answer: one that changes something comes first.

    If the joined configuration is not better than the default, nothing recommends a part of it.
    """
    is_refuted = tuned is not None and not tuned.is_better
    best: dict[str | None, Entry] = {}
    for entry in sorted(_entries(records), key=lambda entry: (entry.is_better, entry.answer.size)):
        if entry.answer.advice:
            best[entry.answer.topic] = entry
    return {
        title: best[topic]
        for topic, title in TOPICS.items()
        if topic in best and not (is_refuted and topic in JOINED_TOPICS and best[topic].is_better)
    }


def largest_findings(records: Iterable[LabRecord]) -> list[Entry]:
    """The answers with the largest effects; what everybody expects is not among them."""
    entries = [entry for entry in _entries(records) if entry.answer.verdict in DIFFERS and entry.answer.change]
    surprising = [entry for entry in entries if not entry.answer.is_expected]
    return sorted(surprising, key=lambda entry: -entry.answer.size)[:MAX_LARGEST]
