"""The page of a class: a row per student with verdicts and flags, and a dot per student and question."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.check.checking import ALTERNATIVES
from labkit.check.hand_in import HandIn
from labkit.lab.answers import Answer
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages.cards import table
from labkit.lab.pages.html import render
from labkit.lab.project import write_file
from labkit.lab.runs.store import Run
from labkit.lab.units import counted
from labkit.studies import load_lab

WIDTH, ROW = 640.0, 18.0
"""Of the strips of dots, in CSS pixels."""
MANY_BUSY = 0.1
"""Share of the points from which on a busy machine is worth a look."""
USUAL = ("seed", "timeout_s", "device")
"""Parameters that may differ in a class."""


@dataclass(frozen=True)
class Row:
    """One student's run of a lab."""

    student: str
    run: Run
    flags: list[str]
    answers: Mapping[str, Answer]


@dataclass(frozen=True)
class Dot:
    """One student's effect of one question, at `x` pixels."""

    student: str
    effect: float
    x: float


def write_class_page(hand_ins: Sequence[HandIn], page: Path) -> list[str]:
    """Write the page of these hand-ins; return a line per student. ParameterError if there are none."""
    if not hand_ins:
        raise ParameterError("no hand-ins: expected zips that `labkit hand-in NAME` wrote")
    names = _unique_names(hand_ins)
    labs = list(dict.fromkeys(lab for one in hand_ins for lab in one.runs))
    sections = {lab: _rows(load_lab(lab), hand_ins, names) for lab in labs}
    flags: dict[str, list[str]] = {name: [] for name in names}
    for name, one in zip(names, hand_ins, strict=True):
        flags[name] += [f"{lab}: {problem}" for lab, problem in one.problems.items()]
        flags[name] += [f"{lab}: not handed in" for lab in labs if lab not in one.runs and lab not in one.problems]
    for lab, rows in sections.items():
        for row in rows:
            flags[row.student] += [f"{lab}: {flag}" for flag in row.flags]
    looks = sorted(names, key=lambda name: not flags[name])  # those with something to look at come first
    overview = pd.DataFrame([{"student": name, "to look at": "; ".join(flags[name]) or "nothing"} for name in looks])
    html = render(
        "class_page.html.j2",
        n_students=len(names),
        overview=table(overview, "Students, and what to look at").data,
        labs=[_section(load_lab(lab), rows) for lab, rows in sections.items()],
        width=WIDTH,
        row=ROW,
    )
    write_file(page, html)
    return [f"{name}: {'; '.join(flags[name]) or 'nothing to look at'}" for name in names]


def _unique_names(hand_ins: Sequence[HandIn]) -> list[str]:
    """The names handed in; the second of a name gets its number."""
    counts: Counter[str] = Counter()
    names = []
    for one in hand_ins:
        counts[one.name] += 1
        names.append(one.name if counts[one.name] == 1 else f"{one.name} ({counts[one.name]})")
    return names


def _rows(lab: Lab, hand_ins: Sequence[HandIn], names: Sequence[str]) -> list[Row]:
    pairs = [(name, one.runs[lab.name]) for name, one in zip(names, hand_ins, strict=True) if lab.name in one.runs]
    usual = _usual_config([run for _, run in pairs])
    return [_row(lab, name, run, usual) for name, run in pairs]


def _row(lab: Lab, name: str, run: Run, usual: Mapping[str, str]) -> Row:
    """The row of one run; one whose rows make no sense has a flag instead of answers."""
    try:
        return Row(name, run, list(_flags(run, usual)), lab.answers(run.results()))
    except Exception as error:  # rows that were edited: the others' page must come
        none = Answer("not measured", "Not measured: its rows make no sense.")
        return Row(name, run, [f"cannot be read: {error}"], {question.id: none for question in lab.questions})


def _usual_config(runs: Sequence[Run]) -> dict[str, str]:
    """The most frequent value of each parameter, and of the profile, as text."""
    values: dict[str, Counter[str]] = {}
    for run in runs:
        for name, value in {"profile": run.header.profile, **run.header.config}.items():
            values.setdefault(name, Counter())[repr(value)] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in values.items()}


def _flags(run: Run, usual: Mapping[str, str]) -> Iterator[str]:
    """Yield what a teacher should look at: other parameters, wrong results, hangs, missing points, load."""
    if repr(run.header.profile) != usual["profile"]:
        yield f"profile {run.header.profile}, the others {usual['profile'].strip(chr(39))}"
    else:
        for name, value in run.header.config.items():
            if name not in USUAL and repr(value) != usual.get(name):
                yield f"{name}={value}, the others {usual.get(name)}"
    frame = run.frame()
    if "check" in frame:
        name = next((column for column in ALTERNATIVES if column in frame), "point")
        wrong = frame[frame["check"].notna() & (frame["check"] != "ok")]
        for alternative, rows in wrong.groupby(name):
            yield f"{alternative}: {rows['check'].iloc[0]} ({counted(rows['point'].nunique(), 'point')})"
    coverage = run.coverage()
    for status in ("timeout", "failed", "oom"):
        ended = coverage[coverage["status"] == status]
        if len(ended):
            yield f"{'hangs' if status == 'timeout' else status}: {ended['reason'].iloc[0]} ({len(ended)} points)"
    if run.pending:
        yield f"{len(run.pending)} points were not measured"
    if len(run.busy) > MANY_BUSY * len(run.header.planned):
        share = f"{len(run.busy)} of {len(run.header.planned)} points"
        yield f"busy machine during {share}: {next(iter(run.busy.values()))}"


def _section(lab: Lab, rows: Sequence[Row]) -> dict[str, Any]:
    verdicts = pd.DataFrame(
        {
            "student": [row.student for row in rows],
            "machine": [row.run.header.machine.label for row in rows],
            **{question.id: [row.answers[question.id].verdict for row in rows] for question in lab.questions},
        }
    )
    effects = {
        question.text: [
            (row.student, row.answers[question.id].effect)
            for row in rows
            if row.answers[question.id].verdict != "not measured"
        ]
        for question in lab.questions
    }
    strips = {text: pairs for text, pairs in effects.items() if any(effect != 1 for _, effect in pairs)}
    largest = max((abs(math.log(effect)) for pairs in strips.values() for _, effect in pairs if effect > 0), default=1)
    reach = max(largest, math.log(1.5))
    return {
        "name": lab.name,
        "title": lab.title,
        "verdicts": table(verdicts, "Verdicts").data,
        "strips": {text: _dots(pairs, reach) for text, pairs in strips.items()},
        "ends": [f"{math.exp(end):.2g}" for end in (-reach, reach)],
    }


def _dots(pairs: Sequence[tuple[str, float]], reach: float) -> list[Dot]:
    """The dots of a question on a logarithmic axis from 1/e**reach to e**reach."""
    return [
        Dot(student, effect, WIDTH / 2 * (1 + 0.96 * math.log(effect) / reach))
        for student, effect in pairs
        if effect > 0
    ]
