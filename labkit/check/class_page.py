"""The page of a class: what to look at in each student's hand-in, verdicts, and a dot per student
and question."""

import json
import math
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.check.archives import CARD, MAX_BYTES
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer
from labkit.lab.pages.cards import table
from labkit.lab.pages.html import render
from labkit.lab.project import kind_of_path, write_file
from labkit.lab.runs.store import Run
from labkit.lab.user_checks import verdicts
from labkit.studies import LABS, load_lab

HAND_INS = "*hand-in-*.zip"
MANY_BUSY = 0.1
"""Share of busy points from which a run is flagged."""
MAY_DIFFER = ("seed", "timeout_s", "device")
"""Parameters that may differ in a class."""
FLAGS = {"timeout": "hangs"}
REACH = 48.0  # of the axis of a strip of dots, on either side of its middle, in percent


@dataclass(frozen=True)
class HandIn:
    """A student's name, runs by lab, and what a teacher should look at."""

    name: str
    runs: dict[str, Run] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


def holds_hand_ins(name: str) -> bool:
    """Return whether this names a folder with hand-ins, in it or below it."""
    return kind_of_path(name) == "folder" and any(Path(name).rglob(HAND_INS))


def read_hand_ins(folder: Path) -> Iterator[HandIn]:
    """Yield each hand-in of a folder, by file name. A damaged one has a flag instead of runs."""
    for path in sorted(folder.rglob(HAND_INS)):
        try:
            with zipfile.ZipFile(path) as archive:
                yield _read_hand_in(archive)
        # whatever a damaged or hostile zip raises, the page shows the others
        except Exception as error:
            yield HandIn(path.stem.rpartition("hand-in-")[2], flags=[f"cannot be read: {error}"])


def _read_hand_in(archive: zipfile.ZipFile) -> HandIn:
    if (size := max(file.file_size for file in archive.infolist())) > MAX_BYTES:
        raise ValueError(f"a file of {size >> 20} MiB, expected at most {MAX_BYTES >> 20}")
    card = json.loads(archive.read(CARD))
    result = HandIn(str(card["name"])[:64])
    with tempfile.TemporaryDirectory(prefix="labkit-hand-in-") as folder:
        copy = Path(folder) / "run.jsonl"
        for lab in map(str, card["labs"]):
            try:
                copy.write_bytes(archive.read(f"{lab}/run.jsonl"))
                run = Run.load(copy)
                if lab not in LABS or run.header.lab != lab:
                    raise ValueError(f"a run of {run.header.lab}, named {lab}")
                result.runs[lab] = run
            except (KeyError, ValueError) as error:
                result.flags.append(f"{lab}: {error}".replace(str(copy), "run.jsonl"))
    return result


def write_class_page(folder: Path, page: Path) -> list[str]:
    """Write the page of a folder's hand-ins; return a line per student."""
    students: dict[str, HandIn] = {}
    for one in read_hand_ins(folder):
        number = sum(other.name == one.name for other in students.values())
        students[f"{one.name} ({number + 1})" if number else one.name] = one
    labs = list(dict.fromkeys(lab for one in students.values() for lab in one.runs))
    sections = [_section(load_lab(lab), students) for lab in labs]
    flags = {name: "; ".join(one.flags) for name, one in students.items()}
    write_file(page, render("class_page.html.j2", flags=flags, labs=sections))
    return [f"{name}: {text or 'nothing to look at'}" for name, text in flags.items()]


def _section(lab: Lab, students: Mapping[str, HandIn]) -> dict[str, Any]:
    """Return a lab's part of the page, and add the flags of its runs to those of the students."""
    runs = {
        student: one.runs[lab.name] for student, one in students.items() if lab.name in one.runs
    }
    # the most frequent values
    usual = pd.DataFrame(map(_values, runs.values())).mode().iloc[0].to_dict()
    answers: dict[str, Mapping[str, Answer]] = {}
    rows = []
    for student, one in students.items():
        if student in runs:
            try:
                one.flags.extend(
                    f"{lab.name}: {flag}" for flag in _flags(lab, runs[student], usual)
                )
                answers[student] = lab.answers(runs[student].results())
            except Exception as error:  # rows that were edited: the page shows the others
                one.flags.append(f"{lab.name}: cannot be read: {error}")
            else:
                verdicts = {
                    question: answer.verdict for question, answer in answers[student].items()
                }
                rows.append(
                    {"student": student, "machine": runs[student].header.machine.label, **verdicts}
                )
        elif one.runs:  # else its flag says that nothing can be read
            one.flags.append(f"{lab.name}: not handed in")
    strips = [
        _strip(question.text, [(one, each[question.id]) for one, each in answers.items()])
        for question in lab.questions
    ]
    verdicts = table(pd.DataFrame(rows), "Verdicts").data
    return {
        "name": lab.name,
        "title": lab.title,
        "verdicts": verdicts,
        "strips": list(filter(None, strips)),
    }


def _strip(text: str, answers: Iterable[tuple[str, Answer]]) -> dict[str, Any]:
    """Place a dot per student on a logarithmic axis whose middle is 1; empty if all effects are
    1."""
    effects = [
        (one, answer.effect)
        for one, answer in answers
        if answer.verdict != "not measured" and answer.effect > 0
    ]
    if all(effect == 1 for _, effect in effects):
        return {}
    reach = max(1.5, *(max(effect, 1 / effect) for _, effect in effects))
    dots = [(one, effect, 50 + REACH * math.log(effect, reach)) for one, effect in effects]
    return {"question": text, "dots": dots, "ends": [f"{1 / reach:.2g}", f"{reach:.2g}"]}


def _values(run: Run) -> dict[str, str]:
    values = {"profile": run.header.profile, **run.header.config}
    return {name: str(value) for name, value in values.items() if name not in MAY_DIFFER}


def _flags(lab: Lab, run: Run, usual: Mapping[str, str]) -> Iterator[str]:
    """Yield what a teacher should look at: other parameters, wrong results, hangs, missing points,
    load."""
    different = {name: value for name, value in _values(run).items() if value != usual[name]}
    for name in ["profile"] if "profile" in different else different:
        yield f"{name} {different[name]}, the others {usual[name]}"
    bad = [one for one in verdicts(lab, run) if one.is_bad]
    yield from dict.fromkeys(
        f"{FLAGS.get(one.status, one.status)} ({one.title}): {one.reason or 'interrupted'}"
        for one in bad
    )
    if len(run.busy) > MANY_BUSY * len(run.header.planned):
        yield f"busy machine during {len(run.busy)} of {len(run.header.planned)} points"
