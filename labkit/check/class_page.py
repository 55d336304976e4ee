"""The page of a class: who needs a look first, then grades, code and answers of each student."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.check.class_folder import read_class
from labkit.check.grades import Severity, Student, grade_class
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.pages.cards import table
from labkit.lab.pages.html import render
from labkit.lab.project import write_file
from labkit.lab.wording import headline
from labkit.studies import load_lab

REACH = 36.0  # of the axis of a strip of dots, on either side of its middle, in percent
MIDDLE = 62.0  # of the axis: names stand left of it


@dataclass(frozen=True)
class ClassResult:
    """The students of a page, by severity, and the files that are no hand-ins."""

    students: Sequence[Student]
    others: Sequence[str]

    @property
    def status(self) -> int:
        """Exit status: 1 if something cannot be read."""
        flags = (flag for student in self.students for flag in student.flags)
        return int(any(flag.severity == Severity.UNREADABLE for flag in flags))

    def lines(self) -> list[str]:
        """Return a line per student, and one per file that is no hand-in."""
        lines = []
        for student in self.students:
            flags = "; ".join(flag.text for flag in student.flags)
            lines.append(f"{student.name}: {flags or 'nothing to look at'}")
        return [*lines, *(f"no hand-in: {name}" for name in self.others)]

    def describe(self) -> dict[str, Any]:
        """Return the fields of the JSON document (`docs/for-scripts.md`)."""
        students = [
            {
                "name": student.name,
                "file": student.hand_in.file,
                "grades": [asdict(grade) for grade in student.grades],
                "flags": [
                    {"severity": flag.severity.name.lower(), "text": flag.text}
                    for flag in student.flags
                ],
            }
            for student in self.students
        ]
        return {"students": students, "no_hand_ins": list(self.others)}


def write_class_page(folder: Path, page: Path) -> ClassResult:
    """Write the page of a folder's hand-ins."""
    content = read_class(folder)
    result = ClassResult(grade_class(content.hand_ins), content.others)
    labs = dict.fromkeys(lab for student in result.students for lab in student.answers)
    html = render(
        "class_page.html.j2",
        students=result.students,
        others=result.others,
        grades=[
            (student.name, grade, load_lab(grade.lab).title)
            for student in result.students
            for grade in student.grades
        ],
        labs=[_section(load_lab(lab), result.students) for lab in labs],
    )
    write_file(page, html)
    return result


def _section(lab: Lab, students: Sequence[Student]) -> dict[str, Any]:
    """Return a lab's part of the page: verdicts of its comparisons, and dots of the effects."""
    answers = {
        student.name: student.answers[lab.name]
        for student in students
        if lab.name in student.answers
    }
    compared = [question.id for question in lab.comparisons]
    rows = []
    for name, each in answers.items():
        rows.append({"student": name, **{id: headline(each[id]) for id in compared}})
    strips = []
    for question in lab.questions:
        of_class = [(name, each[question.id]) for name, each in answers.items()]
        strips.append(_strip(question.text, of_class))
    return {
        "name": lab.name,
        "title": lab.title,
        "verdicts": table(pd.DataFrame(rows), "Answers of each student's run").on_page,
        "strips": list(filter(None, strips)),
    }


def _strip(text: str, answers: Iterable[tuple[str, Answer]]) -> Mapping[str, Any]:
    """Place a dot per student on a logarithmic axis around 1; empty if all effects are 1."""
    # Counts may have an effect of 0, which has no place on a logarithmic axis.
    effects = [
        (name, answer.effect)
        for name, answer in answers
        if answer.verdict != "not measured" and answer.effect > 0
    ]
    if all(effect == 1 for _, effect in effects):
        return {}
    # At least 1.5, so that effects that hardly differ do not fill the axis.
    reach = max(1.5, *(max(effect, 1 / effect) for _, effect in effects))
    dots = [(name, effect, MIDDLE + REACH * math.log(effect, reach)) for name, effect in effects]
    return {"question": text, "dots": dots, "ends": [f"{1 / reach:.2g}", f"{reach:.2g}"]}
