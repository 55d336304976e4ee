"""For a class: notebooks without answers, hand-ins, and the page on which a teacher grades."""

import json
import os
import unicodedata
import zipfile
from datetime import UTC, datetime, timedelta

import nbformat
import pytest

from labkit.check.archives import MAX_BYTES, newest_run, scrub
from labkit.check.class_folder import holds_hand_ins, read_class
from labkit.check.class_page import write_class_page
from labkit.check.grades import Severity
from labkit.check.hand_in import write_hand_in
from labkit.check.student import student_notebook
from labkit.lab.config import ParameterError
from labkit.lab.pages.record import PageRecord
from labkit.lab.project import notebook_path, recorded_directory
from labkit.lab.user_checks import AlternativeCheck, save_check
from labkit.machine.description import describe_machine
from labkit.studies import LABS, load_lab
from tests.cases import thinned

ALL_REDUCE = load_lab("all_reduce")


@pytest.mark.parametrize("lab", LABS)
def test_a_students_notebook_has_a_task_and_neither_answers_nor_implementations(lab):
    study = load_lab(lab)
    notebook = student_notebook(nbformat.read(notebook_path(lab), as_version=4), study)
    nbformat.validate(notebook)
    text = "\n".join(cell.source for cell in notebook.cells)
    assert ".ipynb)" not in text  # the other notebooks are not beside it
    assert not any(
        word in text for word in ("lab.answer(", "lab.source(", "<details>", "```python")
    )
    assert "lab.measure(" in text
    assert "labkit hand-in" in text
    if study.task is not None:
        assert study.task.stub.strip() in text
        assert "lab.check(mine)" in text
    else:
        assert "lab.check" not in text
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        if cell.cell_type == "markdown":
            paragraphs = cell.source.strip().split("\n\n")
            if paragraphs[-1].endswith(":"):  # it announces the cell below
                assert following.cell_type == "code"
                assert "your figure" not in following.source
            is_heading = paragraphs[-1].startswith("#")
            assert not is_heading or not following.source.startswith("#"), paragraphs
    promised = "table of predictions" in text
    assert not promised or "lab.guesses(" in text


def _record(home, *, minutes=0, own=None, wrong=False, busy=False, slower=1.0, **header):
    """Put a recorded run of all_reduce among this machine's: begun later, with the ring as the
    student's own code."""
    source = max((recorded_directory() / "all_reduce").glob("*.jsonl"))
    first, *lines = map(json.loads, source.read_text().splitlines())
    # two sizes on two ranks: a class page reads every run of every student
    first["planned"] = {
        id: point
        for id, point in first["planned"].items()
        if (point["sweep"], point["world_size"]) == ("sizes", 2)
        and point["n_bytes"] in (1024, 65536)
    }
    lines = [line for line in lines if line["point"] in first["planned"]]
    started = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=minutes)
    first |= {"started": started.isoformat(), "user_alternatives": [own] if own else []} | header
    for line in lines:
        values = line.get("values", {})
        if own and values.get("algorithm") == "ring":
            values["algorithm"] = own
            if wrong:
                values |= {"status": "wrong", "reason": "element 3"}
        if values.get("algorithm") == "butterfly" and "seconds" in values:
            values["seconds"] = [slower * seconds for seconds in values["seconds"]]
        if line["kind"] == "end":
            line["load"] = {"average": 3.0, "busy_cores": 1.0 if busy else 0.0}
    path = home / "data/runs/all_reduce" / f"{started:%Y%m%dT%H%M%SZ}-x-quick.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob("*.jsonl"):
        other.unlink()
    path.write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]))
    return path


def _notebook(home, *own, profile="quick"):
    """The student's notebook of the lab with these cells of code added."""
    original = nbformat.read(notebook_path("all_reduce"), as_version=4)
    notebook = student_notebook(original, ALL_REDUCE)
    parameters = notebook.cells[1]
    assert '"quick"' in parameters.source
    parameters.source = parameters.source.replace('"quick"', f'"{profile}"')
    notebook.cells += [nbformat.v4.new_code_cell(text) for text in own]
    path = home / "all_reduce.ipynb"
    nbformat.write(notebook, path)
    return path


RING = "def mine(tensor):\n    for step in range(3):\n        send(step)\n    return tensor"


def _hand_in(home, folder, name, result=None, code=RING, **run):
    check = home / "data/checks/all_reduce.json"
    check.unlink(missing_ok=True)
    if result is not None:
        save_check(ALL_REDUCE, len, result)
    _record(home, **run)
    notebook = _notebook(home, *([code] if code else []))
    return write_hand_in(name, ["all_reduce"], folder, [notebook])


def test_a_teacher_grades_five_students_and_a_copy_from_one_page(home):
    folder = home / "class"
    jose = unicodedata.normalize("NFD", "José Núñez")
    right = AlternativeCheck("right", "6 x send")
    wrong = AlternativeCheck("wrong", "expected 133, got 66: rank 1's input is missing")
    hangs = AlternativeCheck("hangs", "rank 0 waits in receive, line 7 of the cell")
    cheats = AlternativeCheck("not allowed", "it calls all_reduce")
    _hand_in(home, folder, jose, right, minutes=1, own="mine")
    _hand_in(home, folder, "Bo", wrong, RING + "  # Bo", minutes=2)
    _hand_in(home, folder, "Cleo", hangs, RING + "  # Cleo", minutes=3)
    _hand_in(home, folder, "Dan", cheats, RING + "  # Dan", minutes=4)
    _hand_in(home, folder, "Eve", None, None, minutes=5, busy=True)
    _hand_in(home, folder, "Mal", right, minutes=1, own="mine")
    result = write_class_page(folder, home / "class.html")
    grades = {one.name: one.grades[0].verdict for one in result.students}
    assert grades == {
        "José Núñez": "right",
        "Bo": "wrong",
        "Cleo": "hangs",
        "Dan": "not allowed",
        "Eve": "nothing",
        "Mal": "right",
    }
    names = [one.name for one in result.students]
    assert names.index("Bo") < names.index("José Núñez") < names.index("Eve")
    flags = {one.name: {flag.severity for flag in one.flags} for one in result.students}
    assert Severity.COPY in flags["José Núñez"] & flags["Mal"]
    assert Severity.COPY not in flags["Bo"]
    assert {Severity.NOTHING, Severity.BUSY} <= flags["Eve"]
    assert any("untouched" in flag.text for one in result.students for flag in one.flags)
    assert result.status == 0
    html = (home / "class.html").read_text()
    words = ("José Núñez", "rank 1&#39;s input is missing", "line 7 of the cell", "# Cleo", "<text")
    assert all(word in html for word in words)
    assert "times torch" in html
    # What a student wrote stands below the heading that it answers.
    assert "Code, below: Three questions to think about" in html


def test_what_a_teacher_has_added_or_asked_for_is_no_copy(home):
    """A changed profile made every student of a class "a copy" of all others."""
    stub = RING.replace("return tensor", "raise NotImplementedError  # hints by the teacher")
    given = RING.replace("mine", "reference")
    for number, name in enumerate(("Ann", "Bo", "Cleo", "Dan", "Eve")):
        own = [stub, given, *([RING + f"  # {name}"] if name != "Eve" else [])]
        _record(home, minutes=number)
        notebook = _notebook(home, *own, profile="smoke")
        write_hand_in(name, ["all_reduce"], home / "class", [notebook])
    _record(home, minutes=9)
    write_hand_in("Fay, without a notebook", ["all_reduce"], home / "class", [])
    students = write_class_page(home / "class", home / "class.html").students
    texts = {one.name: " ".join(flag.text for flag in one.flags) for one in students}
    assert not any("copy" in text for text in texts.values())
    assert [name for name, text in texts.items() if "untouched" in text] == ["Eve"]


@pytest.mark.parametrize("known_by", ["cell", "check"])
def test_a_solution_that_all_have_is_a_copy(known_by, home):
    solution = RING.replace("send(step)", "send(step)\n        receive(step)\n        add(step)")
    for number, name in enumerate(("Ann", "Bo", "Cleo", "Dan", "Eve")):
        _record(home, minutes=number)
        if known_by == "check":
            save_check(ALL_REDUCE, _record, AlternativeCheck("right"))
        notebooks = [_notebook(home, solution)] if known_by == "cell" else []
        write_hand_in(name, ["all_reduce"], home / "class", notebooks)
    students = write_class_page(home / "class", home / "class.html").students
    copies = [[flag for flag in one.flags if flag.severity == Severity.COPY] for one in students]
    assert [len(flags) for flags in copies] == [1] * 5
    assert "Ann" in copies[-1][0].text


def test_without_a_check_the_run_grades(home):
    for number, name in enumerate(("Bo", "Ann")):
        _hand_in(home, home / "class", name, minutes=number, own="mine", wrong=name == "Bo")
    students = write_class_page(home / "class", home / "class.html").students
    found = [(one.name, one.grades[0].verdict, len(one.flags)) for one in students]
    assert found == [("Bo", "wrong", 1), ("Ann", "right", 0)]


def _zip(path, name, folder="", **files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}hand-in.json", json.dumps({"name": name, "labs": []}))
        for file, text in files.items():
            archive.writestr(file, text)


def test_hand_ins_are_known_by_their_card_whatever_a_platform_has_made_of_them(home):
    folder = home / "class"
    _zip(folder / "123_hand-in-Ann (1).zip", "Ann")
    _zip(folder / "HAND-IN-DORA.ZIP", "Dora")
    _zip(folder / "Eve.zip", "Eve", "Eve/")
    _zip(folder / "Win.zip", "Finn", "Finn\\")
    _zip(home / "c.zip", "Carla")
    zipfile.ZipFile(home / "c.zip").extractall(folder / "anything")  # as Safari does
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        archive.write(home / "c.zip", "hand-in-Carla.zip")
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX/._hand-in-Bob.zip").write_bytes(bytes(90))
    zipfile.ZipFile(folder / "empty.zip", "w").close()
    (folder / "list.txt").write_text("Ann")
    (folder / "hand-in-Broken.zip").write_bytes(b"no zip")
    assert holds_hand_ins(str(folder))
    content = read_class(folder)
    names = sorted(one.name for one in content.hand_ins)
    assert names == ["Ann", "Broken", "Carla", "Carla", "Dora", "Eve", "Finn"]
    assert sorted(content.others) == ["empty.zip", "list.txt"]
    (broken,) = [one for one in content.hand_ins if one.problems]
    assert broken.name == "Broken"
    assert write_class_page(folder, home / "class.html").status == 1


def test_a_zip_that_is_too_large_costs_none_of_the_others(home):
    folder = home / "class"
    for name in ("Ann", "Zoe"):
        _zip(home / f"{name}.zip", name)
    folder.mkdir()
    with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(home / "Ann.zip", "Ann.zip")
        archive.writestr("hand-in-Bo.zip", bytes(MAX_BYTES + 1))
        archive.write(home / "Zoe.zip", "Zoe.zip")
    hand_ins = read_class(folder).hand_ins
    assert {one.name: len(one.problems) for one in hand_ins} == {"Ann": 0, "Bo": 1, "Zoe": 0}


def test_a_zip_that_unpacks_to_gigabytes_is_not_read_to_its_end(home, monkeypatch):
    monkeypatch.setattr("labkit.check.class_folder.MAX_BYTES", 1000)
    _zip(home / "class/a.zip", "Ann", **{f"{number}.ipynb": "0" * 900 for number in range(40)})
    (hand_in,) = read_class(home / "class").hand_ins
    assert len(hand_in.problems) == 6


def test_names_that_are_no_unicode_are_shown_all_the_same(home, command):
    folder = home / "class"
    _zip(folder / os.fsdecode(b"hand-in-Jos\xe9.zip"), "Jos\ud800")
    (folder / os.fsdecode(b"hand-in-M\xfcller.zip")).write_bytes(b"no zip")
    status, said, complaints = command("compare", str(folder), "--output", str(home / "p.html"))
    assert (status, "Traceback" in complaints, "Jos?" in said) == (1, False, True)
    assert "Jos?" in (home / "p.html").read_text()


def test_a_run_that_was_interrupted_at_once_costs_a_class_no_page(home):
    for minutes, name in enumerate(("Ann", "Bo", "Cleo", "Dan")):
        _hand_in(home, home / "class", name, minutes=minutes)
    run = _record(home, minutes=9)
    run.write_text(run.read_text().partition("\n")[0] + "\n")
    write_hand_in("Eve", ["all_reduce"], home / "class")
    result = write_class_page(home / "class", home / "class.html")
    flags = {one.name: " ".join(flag.text for flag in one.flags) for one in result.students}
    assert "interrupted before" in flags["Eve"]


def test_what_no_hand_in_of_labkit_holds_is_named_in_plain_words(home):
    folder = home / "class"
    folder.mkdir()
    files = {
        "hand-in.json": json.dumps({"name": "Ann", "labs": ["all_reduce"]}),
        "all_reduce/check.json": "[]",
        "list.ipynb": "[]",
        "null.ipynb": '{"cells": null}',
    }
    with zipfile.ZipFile(folder / "hand-in-Ann.zip", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    for name, card in (("Bo", "[1]"), ("Cleo", '{"name": "Cleo"}'), ("Dan", '{"labs": []}')):
        with zipfile.ZipFile(folder / f"hand-in-{name}.zip", "w") as archive:
            archive.writestr("hand-in.json", card)
    problems = {one.name: one.problems for one in read_class(folder).hand_ins}
    assert {name: len(one) for name, one in problems.items()} == {
        "Ann": 3,
        "Bo": 1,
        "Cleo": 1,
        "Dan": 1,
    }
    assert all(
        "expected" in one or "without" in one for texts in problems.values() for one in texts
    )


def test_the_command_has_students_as_objects_and_status_1_if_one_cannot_be_read(home, command):
    _hand_in(home, home / "class", "Ann", AlternativeCheck("right"), own="mine")
    output = ("--output", str(home / "p.html"), "--json")
    status, printed, _ = command("compare", str(home / "class"), *output)
    (student,) = json.loads(printed)["students"]
    assert (status, student["name"]) == (0, "Ann")
    assert student["grades"][0]["verdict"] == "right"
    (home / "class/x.zip").write_bytes(b"")
    assert command("compare", str(home / "class"), *output)[0] == 1


def test_a_run_whose_rows_make_no_sense_costs_no_other_its_row(home, monkeypatch):
    for minutes, folder in enumerate(("one", "two")):
        _hand_in(home, home / "class" / folder, "Ann", minutes=minutes)
    run = type(read_class(home / "class").hand_ins[0].runs["all_reduce"])
    monkeypatch.setattr(run, "busy", property(lambda run: 1 / 0))
    result = write_class_page(home / "class", home / "class.html")
    assert [one.name for one in result.students] == ["Ann", "Ann (2)"]
    assert result.status == 1


NAMES = [
    *("José", "नेहा शर्मा", "กิตติ", "O’Brien", "lee, ann", "Ann+Lee", " Ann", "محمد"),
    *("O‘Brien", "Gal·la", "ジョン・スミス", "ג׳ון", "Anna–Maria", "علی\u200cرضا", "Ann #3"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_script_are_handed_in_under_a_safe_file_name(name, home):
    _record(home)
    path = write_hand_in(unicodedata.normalize("NFD", name), ["all_reduce"], home)
    assert path.name.isascii()
    assert path == write_hand_in(unicodedata.normalize("NFC", name), ["all_reduce"], home)
    with zipfile.ZipFile(path) as archive:
        card = json.loads(archive.read("hand-in.json"))
    assert card["name"] == unicodedata.normalize("NFC", name).strip()


BAD_NOTEBOOKS = {
    "latin.ipynb": "größe".encode("latin-1"),
    "wide.ipynb": '{"cells": []}'.encode("utf-16"),
    "doc.pdf": b"%PDF-1.4\n\xff",
    "empty.ipynb": b"",
    "page.ipynb": b"<html>",
    "big.ipynb": b"A" * 60_000_000,
}


@pytest.mark.parametrize("file", BAD_NOTEBOOKS)
def test_what_is_no_notebook_is_refused_in_one_line(file, home):
    _record(home)
    (home / file).write_bytes(BAD_NOTEBOOKS[file])
    with pytest.raises(ParameterError, match=f"{file}.*expected a notebook"):
        write_hand_in("Ann", ["all_reduce"], home, [home / file])


@pytest.mark.parametrize(
    ("name", "labs", "notebooks"),
    [
        ("../x", ["all_reduce"], ()),
        ("", ["all_reduce"], ()),
        ("\u0301", ["all_reduce"], ()),
        ("Ann", ["memory"], ()),
        ("Ann", ["all_reduce"], ("no",)),
    ],
)
def test_what_cannot_be_handed_in_is_one_line(home, name, labs, notebooks):
    _record(home)
    with pytest.raises(ParameterError):
        write_hand_in(name, labs, home, [home / file for file in notebooks])


def test_a_damaged_run_is_refused_before_it_is_handed_in(home):
    run = _record(home)
    run.write_bytes(run.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(ParameterError, match=f"{run.name}, line .*not a record of a run"):
        write_hand_in("Ann", ["all_reduce"], home)
    assert not list(home.glob("*.zip"))


def test_a_clock_that_begins_in_1970_hands_in_files_that_can_be_opened(home, monkeypatch):
    _record(home)
    monkeypatch.setattr("time.time", lambda: 60.0)
    with zipfile.ZipFile(write_hand_in("Ann", ["all_reduce"], home)) as archive:
        assert all(one.external_attr >> 16 & 0o400 for one in archive.infolist())


def test_notebooks_of_one_name_are_both_handed_in_and_an_older_runs_page_is_not(home):
    run = _record(home)
    (home / "a").mkdir()
    paths = [home / "nb.ipynb", home / "a" / "nb.ipynb"]
    for path in paths:
        path.write_text(json.dumps({"cells": [path.parent.name]}))
    page = home / "reports" / "all_reduce.html"
    page.parent.mkdir()
    page.write_text("<html>")

    def names(shown):
        record = PageRecord(lab="all_reduce", run=f"data/runs/all_reduce/{shown}")
        page.with_suffix(".json").write_text(record.model_dump_json())
        return zipfile.ZipFile(write_hand_in("Ann", ["all_reduce"], home, paths)).namelist()

    old = names("20200101T000000Z-x-quick.jsonl")
    assert {"notebooks/nb.ipynb", "notebooks/nb-2.ipynb"} <= {*old}
    assert "all_reduce/all_reduce.html" not in old
    assert "all_reduce/all_reduce.html" in names(run.name)


def test_a_run_from_the_future_is_not_the_newest_and_a_students_notebook_becomes_a_page(home):
    run = _record(home)
    (run.parent / "20990101T000000Z-x-quick.jsonl").write_bytes(run.read_bytes())
    assert newest_run("all_reduce") == run
    notebook = _notebook(home, "mine = 'my own words'")
    with zipfile.ZipFile(write_hand_in("Ann", ["all_reduce"], home, [notebook])) as archive:
        assert "my own words" in archive.read("notebooks/all_reduce.html").decode()


def test_a_hand_in_names_neither_host_nor_folders(home):
    run = _record(home, command=f"labkit measure {home}/secret/x")
    page = home / "reports" / "all_reduce.html"
    page.parent.mkdir()
    page.write_text(f"<p>{describe_machine().host}</p><img src='data:image/png;base64,ab+/cd/ef'>")
    record = PageRecord(lab="all_reduce", run=run.name)
    page.with_suffix(".json").write_text(record.model_dump_json())
    with zipfile.ZipFile(write_hand_in("Ann", ["all_reduce"], home)) as archive:
        text, html = (
            archive.read(f"all_reduce/{name}").decode() for name in ("run.jsonl", "all_reduce.html")
        )
    assert html == "<p>host</p><img src='data:image/png;base64,ab+/cd/ef'>"
    assert str(home) not in text
    assert describe_machine().host not in text


def test_scrubbed_text_keeps_names_of_files_and_keys_only(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "zoé")
    host = describe_machine().host
    text = scrub(f"{host} zoé /home/someone/project/file.py 4/5 https://example.org/a/b x/y")
    assert text == "host user ELSEWHERE/file.py 4/5 https://example.org/a/b x/y"
    lines = [
        {host: [0, 1], "zoé": "zoé", "trace": "at\n/home/zoé/file.py, zoé"},
        {"host": "node7", "on": "node7"},
    ]
    first, second = (json.loads(scrub(json.dumps(line))) for line in lines)
    assert first == {"host": [0, 1], "zoé": "user", "trace": "at\nELSEWHERE/user/file.py, user"}
    assert second == {"host": "host", "on": "host"}


@pytest.mark.parametrize(
    "name", thinned(["max", "row", "torch", "Max"], lambda name: name == "row")
)
def test_a_host_or_user_called_like_a_word_of_runs_changes_none(name, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: name)
    run = {"host": "cuda", "device": "cuda", "kind": name, "on": f"{name}@cuda"}
    expected = {"host": "host", "device": "cuda", "kind": name, "on": "user@host"}
    assert json.loads(scrub(json.dumps(run))) == expected
