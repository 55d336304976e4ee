"""Zips without personal data, a bug report's bundle and a student's hand-in; and the page of a class's hand-ins."""

import getpass
import io
import json
import math
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from labkit.check.checking import ALTERNATIVES, CheckResult
from labkit.lab.answers import Answer
from labkit.lab.commands.doctor import machine_rows
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages.cards import table
from labkit.lab.pages.html import render
from labkit.lab.project import kind_of_path, project_root, reports_directory, runs_directory, write_file
from labkit.lab.runs.store import Run, RunFileError
from labkit.lab.units import counted
from labkit.machine import describe_machine
from labkit.studies import LABS, load_lab

CARD, HAND_INS = "hand-in.json", "*hand-in-*.zip"
MAX_BYTES = 50 * 2**20
"""Of a file in a hand-in, and of a run in a bundle."""
NAME = re.compile(r"\w[\w .'-]{0,63}")
FOLDERS = re.compile(r"(?:(?<=\\[nrt])|(?<![\w/<>.~-]))(?<!:/)/(?:[\w.@+-]+/)+(?=[\w.@+-])")
"""Folders of an absolute path, in text or JSON; the name of the file stays."""
HOST = re.compile(r'"host": ?"([^"]+)"')
COMMON_NAMES = ("root", "user", "ubuntu", "admin")
"""User names that identify nobody, and are words of other texts."""
MANY_BUSY = 0.1
"""Share of busy points from which a run is flagged."""
MAY_DIFFER = ("seed", "timeout_s", "device")
"""Parameters that may differ in a class."""
WIDTH, ROW = 640.0, 18.0  # of a strip of dots, in CSS pixels


def scrub(text: str) -> str:
    """Return text or JSON lines without names of user and hosts, and without folders outside the project."""
    places = {
        str(project_root()): "PROJECT",
        str(Path(__file__).parents[2]): "LABKIT",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
    }
    for place, word in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 1:
            text = text.replace(place, word)
    return scrub_names(FOLDERS.sub("ELSEWHERE/", text))


def scrub_names(text: str) -> str:
    """Return text without names of user and hosts: paths stay, as pictures have what looks like them."""
    hosts = {describe_machine().host, *HOST.findall(text)}
    words = {short: "host" for name in hosts for short in (name, name.partition(".")[0])}
    words |= {form: "user" for name in _user_names() for form in (name, json.dumps(name)[1:-1])}
    for name, word in words.items():
        if len(name) > 1 and name not in COMMON_NAMES:  # keys of JSON stay, but for hosts with their ranks
            text = re.sub(rf'(?<![^\W_]){re.escape(name)}(?![^\W_])(?!":\s?[^\s\[])', word, text)
    return text


def _user_names() -> Iterator[str]:
    with suppress(KeyError, OSError):  # a container's user may have no name
        yield getpass.getuser()
    with suppress(RuntimeError, KeyError):
        yield Path.home().name


def _write_zip(path: Path, files: Mapping[str, str]) -> None:
    """Write the zip, whole or not at all."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    write_file(path, file.getvalue())


# ------------------------------------------------------------------------------------------- bug report


def write_bundle(path: Path, result: CheckResult, document: Mapping[str, Any]) -> None:
    """Write machine, check, newest runs, failures with tracebacks and kernels. `document` is the check's JSON."""
    kernels = result.run.frame().reindex(columns=["device", "kernel", "registers", "spills"]).dropna(subset="kernel")
    failures = [(f"{one.lab}, {one.name}", one.reason, one.details) for one in result.correctness if one.is_bad]
    files = {
        "doctor.txt": "".join(f"{name}: {value}\n" for name, value in machine_rows()),
        "check.json": json.dumps(document),
        "check.jsonl": result.run.path.read_text(),
        "kernels.txt": kernels.drop_duplicates().to_string(index=False) if len(kernels) else "no kernels launched\n",
        "failures/check.txt": _failure_text([*failures, *result.failures]),
    }
    for lab in LABS:
        newest = max((runs_directory() / lab).glob("*.jsonl"), default=None, key=lambda path: path.stat().st_mtime)
        if newest is not None and newest.stat().st_size <= MAX_BYTES:
            files[f"runs/{lab}.jsonl"] = newest.read_text(encoding="utf-8", errors="replace")
            try:
                files[f"failures/{lab}.txt"] = _failure_text(Run.load(newest).failures())
            except RunFileError as error:
                files[f"failures/{lab}.txt"] = str(error)
    _write_zip(path, {name: scrub(text) for name, text in files.items() if text})


def _failure_text(failures: Any) -> str:
    return "\n\n".join(f"{point}: {reason}\n{details}" for point, reason, details in failures)


# ------------------------------------------------------------------------------------------- hand-ins


@dataclass(frozen=True)
class HandIn:
    """A student's name and runs by lab; `problems`: why a lab's run cannot be read."""

    name: str
    runs: dict[str, Run] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def write_hand_in(name: str, labs: Sequence[str], folder: Path, notebooks: Sequence[Path] = ()) -> Path:
    """Write `hand-in-<name>.zip` with the newest run and page of each measured lab; return its path.

    Raises ParameterError for an unusable name, a missing notebook, and if no lab was measured.
    """
    if not NAME.fullmatch(name):
        raise ParameterError(f"expected a name of letters, digits, blanks and .-'_, at most 64, got {name!r:.80}")
    for notebook in notebooks:
        if not notebook.is_file():
            raise ParameterError(f"{notebook}: no such notebook")
    newest = {lab: max((runs_directory() / lab).glob("*.jsonl"), default=None) for lab in labs}
    runs = {lab: path for lab, path in newest.items() if path is not None}
    if not runs:
        raise ParameterError(f"nothing to hand in: no run of {', '.join(labs)} in {runs_directory()}")
    files = {CARD: json.dumps({"name": name, "labs": list(runs), "labkit": str(describe_machine().source)})}
    files |= {f"notebooks/{notebook.name}": _scrub_notebook(notebook) for notebook in notebooks}
    for lab, path in runs.items():
        files[f"{lab}/run.jsonl"] = scrub(path.read_text())
        if (page := reports_directory() / f"{lab}.html").is_file():
            files[f"{lab}/{lab}.html"] = scrub_names(page.read_text(encoding="utf-8"))
    path = folder / f"hand-in-{name.replace(' ', '-')}.zip"
    _write_zip(path, files)
    return path


def _scrub_notebook(path: Path) -> str:
    """Scrub the text of a notebook's outputs; pictures stay as they are."""
    notebook = nbformat.read(path, as_version=4)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        texts = output.get("data", output)
        for name in {"text", "text/plain", "text/html", "evalue"} & texts.keys():
            texts[name] = scrub(texts[name])
        if "traceback" in output:
            output["traceback"] = [scrub(line) for line in output["traceback"]]
    return str(nbformat.writes(notebook))


def holds_hand_ins(name: str) -> bool:
    """Return whether this names a folder with hand-ins, in it or below it."""
    return kind_of_path(name) == "folder" and any(Path(name).rglob(HAND_INS))


def read_hand_ins(folder: Path) -> Iterator[HandIn]:
    """Yield each hand-in of a folder, by name. A damaged one has a problem instead of runs."""
    for path in sorted(folder.rglob(HAND_INS)):
        try:
            with zipfile.ZipFile(path) as archive:
                yield _read_hand_in(archive)
        except Exception as error:  # whatever a damaged or hostile zip raises, the page shows the others
            yield HandIn(path.stem.rpartition("hand-in-")[2], problems={"all": f"cannot be read: {error}"})


def _read_hand_in(archive: zipfile.ZipFile) -> HandIn:
    if (size := max(file.file_size for file in archive.infolist())) > MAX_BYTES:
        raise ValueError(f"a file of {size >> 20} MiB, expected at most {MAX_BYTES >> 20}")
    card = json.loads(archive.read(CARD))
    result = HandIn(str(card["name"])[:64])
    with tempfile.TemporaryDirectory(prefix="labkit-hand-in-") as folder:
        for lab in map(str, card["labs"]):
            copy = Path(folder) / "run.jsonl"
            try:
                copy.write_bytes(archive.read(f"{lab}/run.jsonl"))
                run = Run.load(copy)
                if lab not in LABS or run.header.lab != lab:
                    raise ValueError(f"a run of {run.header.lab}, named {lab}")
                result.runs[lab] = run
            except (KeyError, ValueError) as error:
                result.problems[lab] = str(error).replace(str(copy), "run.jsonl")
    return result


# ------------------------------------------------------------------------------------------- page of a class


def write_class_page(hand_ins: Sequence[HandIn], page: Path) -> list[str]:
    """Write the page of these hand-ins; return a line per student. Raises ParameterError if there are none."""
    if not hand_ins:
        raise ParameterError("no hand-ins: expected zips that `labkit hand-in NAME` wrote")
    students: dict[str, HandIn] = {}
    for one in hand_ins:
        number = 1 + sum(other.name == one.name for other in students.values())
        students[one.name if number == 1 else f"{one.name} ({number})"] = one
    labs = list(dict.fromkeys(lab for one in hand_ins for lab in one.runs))
    flags: dict[str, list[str]] = {}
    for name, one in students.items():
        flags[name] = [f"{lab}: {problem}" for lab, problem in one.problems.items()]
        flags[name] += [f"{lab}: not handed in" for lab in labs if lab not in one.runs and lab not in one.problems]
    sections = [_section(load_lab(lab), students, flags) for lab in labs]
    lines = {name: "; ".join(flags[name]) for name in students}
    first = sorted(lines, key=lambda name: not lines[name])  # students with flags come first
    overview = pd.DataFrame([{"student": name, "to look at": lines[name] or "nothing"} for name in first])
    cells = table(overview, "Students, and what to look at").data
    sizes = {"n_students": len(students), "width": WIDTH, "row": ROW}
    write_file(page, render("class_page.html.j2", overview=cells, labs=sections, **sizes))
    return [f"{name}: {line or 'nothing to look at'}" for name, line in lines.items()]


def _section(lab: Lab, students: Mapping[str, HandIn], flags: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return a lab's part of the page, and add the flags of its runs to those of the students."""
    runs = {student: one.runs[lab.name] for student, one in students.items() if lab.name in one.runs}
    usual, answers = _usual_values(runs.values()), dict[str, Mapping[str, Answer]]()
    for student, run in runs.items():
        try:
            new = list(_flags(run, usual))
            answers[student] = lab.answers(run.results())
        except Exception as error:  # rows that were edited: the page shows the others
            new, none = [f"cannot be read: {error}"], Answer("not measured", "Not measured: its rows make no sense.")
            answers[student] = {question.id: none for question in lab.questions}
        flags[student].extend(f"{lab.name}: {flag}" for flag in new)
    verdicts = {question.id: [each[question.id].verdict for each in answers.values()] for question in lab.questions}
    machines = [run.header.machine.label for run in runs.values()]
    effects = {
        question.text: {
            student: each[question.id].effect
            for student, each in answers.items()
            if each[question.id].verdict != "not measured" and each[question.id].effect > 0
        }
        for question in lab.questions
    }
    effects = {text: values for text, values in effects.items() if any(value != 1 for value in values.values())}
    reach = max([math.log(1.5), *(abs(math.log(value)) for values in effects.values() for value in values.values())])
    return {
        "name": lab.name,
        "title": lab.title,
        "verdicts": table(pd.DataFrame({"student": list(runs), "machine": machines, **verdicts}), "Verdicts").data,
        "strips": {text: _dots(values, reach) for text, values in effects.items()},
        "ends": [f"{math.exp(end):.2g}" for end in (-reach, reach)],
    }


def _dots(effects: Mapping[str, float], reach: float) -> list[dict[str, Any]]:
    """Place a question's dots on a logarithmic axis from 1/e**reach to e**reach."""
    return [
        {"student": student, "effect": effect, "x": WIDTH / 2 * (1 + 0.96 * math.log(effect) / reach)}
        for student, effect in effects.items()
    ]


def _values(run: Run) -> dict[str, str]:
    values = {"profile": run.header.profile, **run.header.config}
    return {name: str(value) for name, value in values.items() if name not in MAY_DIFFER}


def _usual_values(runs: Iterable[Run]) -> dict[str, str]:
    """Return the most frequent value of the profile and of each parameter."""
    counts: dict[str, Counter[str]] = {}
    for name, value in (item for run in runs for item in _values(run).items()):
        counts.setdefault(name, Counter())[value] += 1
    return {name: each.most_common(1)[0][0] for name, each in counts.items()}


def _flags(run: Run, usual: Mapping[str, str]) -> Iterator[str]:
    """Yield what a teacher should look at: other parameters, wrong results, hangs, missing points, load."""
    different = {name: value for name, value in _values(run).items() if value != usual[name]}
    for name in ["profile"] if "profile" in different else different:
        yield f"{name} {different[name]}, the others {usual[name]}"
    frame, coverage = run.frame(), run.coverage()
    if "check" in frame:
        name = next((column for column in ALTERNATIVES if column in frame), "point")
        wrong = frame[frame["check"].notna() & (frame["check"] != "ok")]
        for alternative, rows in wrong.groupby(name):
            yield f"{alternative}: {rows['check'].iloc[0]} ({counted(rows['point'].nunique(), 'point')})"
    for status, points in coverage[~coverage["status"].isin(["ok", "skipped"])].groupby("status"):
        kind = {"timeout": "hangs", "pending": "not measured"}.get(status, status)
        yield f"{kind}: {points['reason'].iloc[0] or 'interrupted'} ({counted(len(points), 'point')})"
    if len(run.busy) > MANY_BUSY * len(run.header.planned):
        share = f"{len(run.busy)} of {len(run.header.planned)} points"
        yield f"busy machine during {share}: {next(iter(run.busy.values()))}"
