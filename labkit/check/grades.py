"""Grades of a class: the verdict on each student's code, and what a teacher should look at."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import nbformat
import pandas as pd

from labkit.check.archives import CLOCK_TOLERANCE
from labkit.check.class_folder import HandIn
from labkit.check.student import YOUR_ANSWER, student_notebook
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.project import notebook_path
from labkit.lab.runs.store import Run
from labkit.lab.units import counted
from labkit.lab.user_checks import Correctness, verdicts
from labkit.studies import load_lab

# A point or two that a browser disturbed need no look; a run with a larger share of them does.
MANY_BUSY = 0.1
# Of fewer students nobody knows what the teacher gave to all.
MIN_CLASS = 4
# Lists of alternatives have a student's own name; seeds and devices may differ in a class.
MAY_DIFFER = ("seed", "timeout_s", "device", "implementations", "algorithms", "alternatives")
# Fewer lines may be alike by chance: there are not many ways to write them.
MIN_COPIED_LINES = 4
# What a task asks for; a teacher's cell may have its stub, which raises.
SOLUTION = re.compile(r"^(def|class) mine\b(?!.*NotImplementedError)", re.DOTALL | re.MULTILINE)
NOTHING = "nothing"


class Severity(IntEnum):
    """How soon a teacher should look at something."""

    UNREADABLE = 0
    CODE = 1
    COPY = 2
    NOTHING = 3
    PARAMETERS = 4
    BUSY = 5


@dataclass(frozen=True)
class Flag:
    """Something to look at."""

    severity: Severity
    text: str


@dataclass(frozen=True)
class Grade:
    """One lab of one student."""

    lab: str
    verdict: str
    """On the student's code: right, wrong, fails, hangs, not allowed, or nothing."""
    details: str = ""
    ratio: str = ""
    """Typical time of the student's code over the baseline's."""
    machine: str = ""


@dataclass(frozen=True)
class Work:
    """A cell that a student wrote or changed."""

    kind: str
    """`code` or `markdown`."""
    below: str
    """The heading above it, which says what it answers."""
    text: str


@dataclass
class Student:
    """A hand-in with its grades and flags."""

    name: str
    hand_in: HandIn
    grades: list[Grade] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    answers: dict[str, Mapping[str, Answer]] = field(default_factory=dict)
    """By lab, the answers of the student's run."""
    work: list[Work] = field(default_factory=list)

    @property
    def severity(self) -> int:
        """Severity of the gravest flag, by which students are sorted."""
        return min((flag.severity for flag in self.flags), default=len(Severity))

    def flag(self, severity: Severity, text: str) -> None:
        """Add a flag once."""
        if Flag(severity, text) not in self.flags:
            self.flags.append(Flag(severity, text))


def grade_class(hand_ins: Sequence[HandIn]) -> list[Student]:
    """Return the students, those to look at first before the others, and by name among these."""
    students = list[Student]()
    for hand_in in hand_ins:
        number = sum(other.hand_in.name == hand_in.name for other in students)
        name = f"{hand_in.name} ({number + 1})" if number else hand_in.name
        students.append(Student(name, hand_in))
    labs = dict.fromkeys(lab for hand_in in hand_ins for lab in (*hand_in.runs, *hand_in.checks))
    for student in students:
        for problem in student.hand_in.problems:
            student.flag(Severity.UNREADABLE, problem)
    for lab in labs:
        _grade_lab(load_lab(lab), students)
    originals = _original_cells(students, list(labs))
    _read_work(students, originals)
    _flag_copies(students, originals)
    for student in students:
        student.flags.sort(key=lambda flag: flag.severity)
    return sorted(students, key=lambda student: (student.severity, student.name.casefold()))


def _grade_lab(lab: Lab, students: Sequence[Student]) -> None:
    """Add the grade of a lab to each student, and the flags of its run."""
    # What most students set is what the teacher asked for.
    runs = [
        student.hand_in.runs[lab.name] for student in students if lab.name in student.hand_in.runs
    ]
    usual: dict[str, str] = {}
    if runs:
        usual = pd.DataFrame(map(_comparable_parameters, runs)).mode().iloc[0].to_dict()
    for student in students:
        run = student.hand_in.runs.get(lab.name)
        check = student.hand_in.checks.get(lab.name)
        if run is None and check is None:
            if not student.hand_in.problems:
                student.flag(Severity.NOTHING, f"{lab.name}: not handed in")
            continue
        try:
            if run is not None:
                student.answers[lab.name] = lab.answers(run.results())
            grade = _grade(lab, run, check, student.answers.get(lab.name, {}))
            for flag in _run_flags(lab, run, usual, grade):
                student.flag(flag.severity, f"{lab.name}: {flag.text}")
        except Exception as error:  # rows that were edited: the page shows the others
            student.flag(Severity.UNREADABLE, f"{lab.name}: cannot be read: {error}")
            continue
        student.grades.append(grade)
        if grade.verdict == NOTHING:
            student.flag(Severity.NOTHING, f"{lab.name}: no code of the student was checked")
        elif grade.verdict != "right":
            text = ": ".join(filter(None, (lab.name, grade.verdict, grade.details)))
            student.flag(Severity.CODE, text)


def _grade(
    lab: Lab, run: Run | None, check: Mapping[str, str] | None, answers: Mapping[str, Answer]
) -> Grade:
    """Grade by the last `lab.check`, else by the run."""
    machine = ""
    ratio = ""
    results: list[Correctness] = []
    if run is not None:
        user_names = run.header.user_alternatives
        machine = run.header.machine.label
        ratio = _typical_ratio(lab, user_names, answers)
        results = [result for result in verdicts(lab, run) if result.name in user_names]
    # The check knows more: code that hangs has no run, and runs do not count forbidden calls.
    if check is not None:
        return Grade(lab.name, check["verdict"], check["details"], ratio, machine)
    if not results:
        return Grade(lab.name, NOTHING, "", "", machine)
    bad = next((result for result in results if result.is_bad), None)
    if bad is None:
        return Grade(lab.name, "right", "by its run; not checked with lab.check", ratio, machine)
    return Grade(lab.name, bad.verdict, str(bad.reason), ratio, machine)


def _typical_ratio(lab: Lab, user_names: Sequence[str], answers: Mapping[str, Answer]) -> str:
    """Return the geometric mean of the first comparison's ratios of the student's alternatives."""
    for question in lab.comparisons:
        if question.id not in answers:
            continue
        table = answers[question.id].table
        if table is not None and table[question.metric.compare].isin(user_names).any():
            rows = table[table[question.metric.compare].isin(user_names)]
            mean = math.exp(rows["ratio"].map(math.log).mean())
            return f"{mean:.2g} times {question.baseline}'s"
    return ""


def _run_flags(lab: Lab, run: Run | None, usual: Mapping[str, str], grade: Grade) -> Iterator[Flag]:
    """Yield what a teacher should look at, but for what the grade says already."""
    if run is None:
        return
    different = {
        name: value for name, value in _comparable_parameters(run).items() if value != usual[name]
    }
    # All parameters of another profile differ, so it alone is named.
    if "profile" in different:
        different = {"profile": different["profile"]}
    for name, value in different.items():
        yield Flag(Severity.PARAMETERS, f"{name} {value}, the others {usual[name]}")
    for result in verdicts(lab, run):
        is_graded = result.name in run.header.user_alternatives and result.verdict == grade.verdict
        if result.is_bad and not is_graded:
            yield Flag(Severity.CODE, f"{result.verdict} ({result.title}): {result.reason}")
    if run.pending:
        yield Flag(Severity.NOTHING, f"interrupted before {counted(len(run.pending), 'point')}")
    if run.header.started > datetime.now(UTC) + CLOCK_TOLERANCE:
        yield Flag(Severity.PARAMETERS, f"its clock is wrong: measured {run.header.started:%F}")
    if len(run.busy) > MANY_BUSY * len(run.header.planned):
        points = f"{len(run.busy)} of {len(run.header.planned)} points"
        yield Flag(Severity.BUSY, f"busy machine during {points}")


def _comparable_parameters(run: Run) -> dict[str, str]:
    values = {"profile": run.header.profile, **run.header.config}
    return {name: str(value) for name, value in values.items() if name not in MAY_DIFFER}


def _original_cells(students: Sequence[Student], labs: Sequence[str]) -> set[str]:
    """Return the cells that students found in their notebooks: the labs', and the teacher's."""
    originals = set[str]()
    for lab in labs:
        original = nbformat.read(notebook_path(lab), as_version=4)
        for notebook in (original, student_notebook(original, load_lab(lab))):
            originals.update(cell.source.strip() for cell in notebook.cells)
    by_student = [
        {text.strip() for cells in student.hand_in.notebooks.values() for _, text in cells}
        for student in students
        if student.hand_in.notebooks
    ]
    if len(by_student) >= MIN_CLASS:
        shared = set.intersection(*by_student)
        # A solution that all have is copied: no teacher hands it out with the task.
        originals.update(text for text in shared if not SOLUTION.search(text))
    return originals


def _read_work(students: Sequence[Student], originals: set[str]) -> None:
    """Find the cells that each student wrote or changed."""
    for student in students:
        for file, cells in student.hand_in.notebooks.items():
            written = list(_student_cells(cells, originals))
            student.work += written
            if not written:
                student.flag(Severity.NOTHING, f"{file} is untouched")
        if not student.hand_in.notebooks and not student.hand_in.problems:
            student.flag(Severity.NOTHING, "no notebook")


def _student_cells(cells: Sequence[tuple[str, str]], originals: set[str]) -> Iterator[Work]:
    """Yield the cells that are not among the originals."""
    heading = ""
    for kind, text in cells:
        if text.strip() and text.strip() not in originals:
            # A cell with a heading of its own says what it answers.
            below = "" if text.startswith("#") else heading
            yield Work(kind, below, text.replace(YOUR_ANSWER, "").strip())
        if kind == "markdown":
            headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
            heading = headings[-1] if headings else heading


def _flag_copies(students: Sequence[Student], originals: set[str]) -> None:
    """Flag students with one run, or with the same code: who copied, no file says."""
    # Two students who change the same parameter in a cell have not copied it.
    original_lines = {line.strip() for text in originals for line in text.splitlines()}
    groups = defaultdict[Any, list[Student]](list)
    for student in students:
        for lab, run in student.hand_in.runs.items():
            # The start has microseconds: two runs that share it are one.
            groups[f"{lab}: the same run", run.header.started, *run.header.planned].append(student)
        code = {cell.text for cell in student.work if cell.kind == "code"}
        # Checks count, too: a hand-in may lack the notebook, or its cell may have other lines.
        code.update(check["code"].strip() for check in student.hand_in.checks.values())
        for text in code:
            own_lines = [line for line in text.splitlines() if line.strip() not in original_lines]
            if len(own_lines) >= MIN_COPIED_LINES:
                groups["the same code", text].append(student)
    for (same, *_), group in groups.items():
        for student in group:
            others = ", ".join(other.name for other in group if other is not student)
            if others:
                student.flag(Severity.COPY, f"{same} as {others}: one of them is a copy")
