"""The index of a report: what to do here, the largest differences, and every lab's first answer.

It is made from the runs that the pages draw, whichever machine measured them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from labkit.lab.answers import TOPICS, Question
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.pages.cards import machine_rows, machine_summary
from labkit.lab.pages.html import render
from labkit.lab.pages.record import OTHER_FORMAT, answered_run, read_record
from labkit.lab.phrases import find_change
from labkit.lab.project import from_project, write_file
from labkit.lab.recommended import Configuration, write_code
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine.description import describe_machine

MAX_LARGEST = 5
# A combined configuration sets these; advice on each by itself would say the same twice.
COMBINED_TOPICS = ("precision", "attention", "compile", "synchronization")
# Questions of the lab that measures the combined configuration.
GAIN = "gain"
INGREDIENTS = "ingredients"
# What else ran changes nothing of what is counted or computed.
TIMELESS = ("counted", "predicted")


@dataclass(frozen=True)
class Answered:
    """A question of a lab with its answer, as the index shows it."""

    lab: Lab
    question: Question
    answer: Answer

    @property
    def href(self) -> str:
        return f"{self.lab.name}.html#answer-{self.question.id}"

    @property
    def size(self) -> float:
        """Size of the effect: 0 for none, the same for half and twice."""
        effect = self.answer.effect
        return abs(math.log(effect)) if 0 < effect < math.inf else 0.0


@dataclass(frozen=True)
class Entry:
    """A lab on the index: its run with all answers, or why there is none."""

    lab: Lab
    run: Run | None = None
    error: str | None = None
    answers: Sequence[Answered] = field(default_factory=tuple)

    @property
    def is_here(self) -> bool:
        """Whether this machine measured it."""
        if self.run is None:
            return False
        return self.run.header.machine.identity == describe_machine().identity

    @property
    def is_busy(self) -> bool:
        """Whether other programs were at work while it was measured."""
        return self.run is not None and self.run.is_busy

    @property
    def example(self) -> str | None:
        """What the run measured if it is an example; None if it tells about the machine."""
        return self.lab.example(self.run.results()) if self.run else None

    @property
    def first(self) -> Answered | None:
        """The lab in one line: the first question that was measured."""
        # The times of a busy run would be taken for facts.
        for answered in self.answers:
            verdict = answered.answer.verdict
            if verdict in TIMELESS or (verdict != "not measured" and not self.is_busy):
                return answered
        return None

    @property
    def origin(self) -> str:
        """ "quick, 2026-11-23, 63 of 103 points"; without the points if all were measured."""
        assert self.run is not None
        header = self.run.header
        status = self.run.coverage()["status"]
        n_measured = int((status == "ok").sum())
        facts = [header.profile, f"{header.started:%Y-%m-%d}"]
        if n_measured < len(status):
            facts.append(f"{n_measured} of {len(status)} points")
        if self.is_busy:
            facts.append("on a busy machine")
        return ", ".join(facts)


def write_index(labs: Iterable[Lab], output: Path, to_come: Sequence[Lab] = ()) -> Path:
    """Write `<output>/index.html` from the records in `output`, in the order of `labs`.

    `to_come` are labs that a report under way still measures. Returns the path.
    """
    entries = []
    missing = []
    for lab in labs:
        path = output / f"{lab.name}.json"
        if path.is_file():
            entries.append(_read_entry(lab, path))
        else:
            missing.append(lab.title)
    # Pages may be copied together from several machines: only this one's runs recommend.
    local = [entry for entry in entries if entry.is_here]
    busy = [entry.lab.title for entry in local if entry.is_busy]
    usable = [entry for entry in local if not entry.is_busy and entry.example is None]
    answers = [answered for entry in usable for answered in entry.answers]
    code = next(filter(None, (combined_code(entry.run) for entry in usable if entry.run)), None)
    # Not while labs are to come, whose answers it combines.
    combined = None if to_come or code is None else _find(answers, GAIN)
    # The parts of a combination whose gain is not shown may still gain, each by itself.
    replaces_single = combined is not None and combined.answer.verdict == "yes"
    machine = machine_rows(describe_machine())
    html = render(
        "index_page.html.j2",
        machine=machine.items(),
        machine_summary=machine_summary(machine),
        to_come=[lab.title for lab in to_come],
        other_format=OTHER_FORMAT,
        entries=entries,
        timeless=TIMELESS,
        busy=busy,
        combined=combined,
        replaces_single=replaces_single,
        code=code,
        ingredients=_find(answers, INGREDIENTS),
        topics=_recommendations(answers, without=COMBINED_TOPICS if replaces_single else ()),
        largest=_largest_differences(answers),
        missing=missing,
    )
    page = output / "index.html"
    write_file(page, html)
    return page


def _read_entry(lab: Lab, path: Path) -> Entry:
    record = read_record(lab, path)
    if record.run is None:
        return Entry(lab, error=record.error)
    try:
        run, by_id = answered_run(lab, from_project(record.run))
    except (OSError, RunFileError) as error:
        return Entry(lab, error=record.error or f"its run cannot be read: {error}")
    answers = [Answered(lab, question, by_id[question.id]) for question in lab.questions]
    return Entry(lab, run, record.error, answers)


def _find(answers: Iterable[Answered], question: str) -> Answered | None:
    measured = (answered for answered in answers if answered.answer.verdict != "not measured")
    return next((answered for answered in measured if answered.question.id == question), None)


def _recommendations(answers: Iterable[Answered], without: Sequence[str]) -> Mapping[str, Answered]:
    """Return the strongest advice by the title of its topic, but for some topics."""
    best: dict[str | None, Answered] = {}
    # The last one of a topic stays: a change goes before keeping the default, then the larger gain.
    for answered in sorted(
        answers, key=lambda answered: (answered.answer.is_better, answered.size)
    ):
        if answered.answer.advice and answered.question.topic not in without:
            best[answered.question.topic] = answered
    return {title: best[topic] for topic, title in TOPICS.items() if topic in best}


def _largest_differences(answers: Iterable[Answered]) -> list[Answered]:
    """Return the largest clear effect of each lab, largest first, without expected ones."""
    largest: dict[str, Answered] = {}
    # From the smallest: a larger one of the same lab takes its place.
    for answered in sorted(answers, key=lambda answered: answered.size):
        answer = answered.answer
        is_clear = answer.verdict in ("yes", "no") and find_change(answer) is not None
        if is_clear and not answered.question.is_expected:
            largest[answered.lab.name] = answered
    return sorted(largest.values(), key=lambda answered: -answered.size)[:MAX_LARGEST]


def combined_code(run: Run) -> str | None:
    """Return the combined configuration of a tuned step as Python; None for other labs' runs."""
    names = [field.name for field in fields(Configuration)]
    rows = run.frame().reindex(columns=["implementation", "model", "context_length", *names])
    rows = rows.dropna()
    for row in rows[rows["implementation"] == "joined"].to_dict("records"):
        configuration = Configuration(**{name: row[name] for name in names})
        return write_code(configuration, row["model"], int(row["context_length"]))
    return None
