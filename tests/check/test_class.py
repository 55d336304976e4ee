"""For a class: a check of one's own function, a notebook without answers, hand-ins, and the page of
twenty of them."""

import json
import zipfile

import nbformat
import pytest
import torch
import torch.distributed as dist

from labkit.check.archives import scrub, write_hand_in
from labkit.check.class_page import holds_hand_ins, read_hand_ins, write_class_page
from labkit.check.commands import student_notebook
from labkit.lab.config import ParameterError
from labkit.lab.project import notebook_path, recorded_directory
from labkit.lab.user_checks import check_alternative
from labkit.machine.description import describe_machine
from labkit.parallel.exchange import exchange
from labkit.studies import LABS, load_lab
from tests.cases import thinned

STATUS = ["right", "wrong", "fails", "hangs"]


def _sums(tensor):
    dist.all_reduce(tensor)


def _adds_its_neighbor_only(tensor):
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    other = torch.empty_like(tensor)
    exchange(tensor, (rank + 1) % ranks, other, (rank - 1) % ranks)
    tensor.add_(other)


def _raises(tensor):
    raise KeyError("no")


def _waits_for_ever(tensor):
    dist.recv(tensor, 1 - dist.get_rank())


@pytest.mark.parametrize(
    ("own", "verdict", "where"),
    [
        (_sums, "right", ""),
        (_adds_its_neighbor_only, "wrong", "on 3 ranks"),
        (_raises, "fails", "KeyError"),
        (_waits_for_ever, "hangs", "on 2 ranks"),
    ],
)
def test_an_own_all_reduce_is_right_wrong_fails_or_hangs(own, verdict, where, monkeypatch):
    shortest = {"repeats": 1, "warmup": 0, "sessions": 1, "transports": [], "scheduling_bytes": []}
    shortest["timeout_s"] = 4.0 if verdict == "hangs" else 60.0
    monkeypatch.setattr("labkit.lab.user_checks.SHORTEST", shortest)
    result = check_alternative(load_lab("all_reduce"), own)
    assert (result.verdict, bool(result), result.status) == (
        verdict,
        verdict == "right",
        STATUS.index(verdict),
    )
    assert where in result.details


def test_a_lab_that_compares_nothing_refuses_an_own_function():
    with pytest.raises(ParameterError, match="limits"):
        check_alternative(load_lab("limits"), _sums)


@pytest.mark.parametrize("lab", LABS)
def test_a_students_notebook_has_no_answers_and_no_implementations(lab):
    takes_mine = load_lab(lab).plugin_parameter is not None
    notebook = student_notebook(
        nbformat.read(notebook_path(lab), as_version=4), takes_mine=takes_mine
    )
    nbformat.validate(notebook)
    text = "\n".join(cell.source for cell in notebook.cells)
    assert "lab.answer(" not in text
    assert "lab.source(" not in text
    assert "<details>" not in text
    assert "lab.measure(" in text
    assert ("lab.check(mine)" in text) == takes_mine


def _record(home, **changes):
    """Put a recorded run of all_reduce among this machine's, with other rows, ends or header."""
    source = max((recorded_directory() / "all_reduce").glob("*.jsonl"))
    header, *lines = map(json.loads, source.read_text().splitlines())
    header |= changes.get("header", {})
    for line in lines:
        if (
            line["kind"] == "row"
            and line["values"].get("algorithm") == "ring"
            and "wrong" in changes
        ):
            line["values"] |= {"status": "wrong", "reason": "element 3"}
        if line["kind"] == "end" and "hangs" in changes:
            line |= {"status": "timeout", "reason": "rank 1 still running after 10 s"}
    path = home / "data" / "runs" / "all_reduce" / source.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))


@pytest.mark.parametrize("students", thinned([5, 20], lambda students: students == 5))
def test_hand_ins_make_one_page_that_says_what_to_look_at(students, home):
    folder = home / "class"
    kinds = [
        {"wrong": True},
        {"hangs": True},
        {"header": {"profile": "smoke"}},
        *[{}] * (students - 4),
    ]
    for number, changes in enumerate(kinds):
        _record(home, **changes)
        write_hand_in(f"Student {number:02}", ["all_reduce"], folder)
    (folder / "hand-in-Broken.zip").write_bytes(b"no zip")
    assert holds_hand_ins(str(folder))
    page = home / "class.html"
    lines = write_class_page(folder, page)
    assert len(lines) == students
    said = dict(line.split(": ", 1) for line in lines)
    assert "wrong (ring): element 3" in said["Student 00"]
    assert "hangs" in said["Student 01"]
    assert "profile smoke" in said["Student 02"]
    assert "cannot be read" in said["Broken"]
    assert all("wrong" not in said[f"Student {number:02}"] for number in range(2, students - 1))
    html = page.read_text()
    assert all(name in html for name in said)
    assert "<circle" in html


def test_a_run_whose_rows_make_no_sense_costs_no_other_its_row_and_equal_names_are_told_apart(
    home, monkeypatch
):
    _record(home)
    for folder in ("one", "two"):
        write_hand_in("Ann", ["all_reduce"], home / "class" / folder)
    one, _ = read_hand_ins(home / "class")
    monkeypatch.setattr(type(one.runs["all_reduce"]), "busy", property(lambda run: 1 / 0))
    lines = write_class_page(home / "class", home / "class.html")
    assert [line.partition(":")[0] for line in lines] == ["Ann", "Ann (2)"]
    assert all("cannot be read" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "labs", "notebooks"),
    [
        ("../x", ["all_reduce"], ()),
        ("", ["all_reduce"], ()),
        ("Ann", ["memory"], ()),
        ("Ann", ["all_reduce"], ("no",)),
    ],
)
def test_what_cannot_be_handed_in_is_one_line(home, name, labs, notebooks):
    _record(home)
    with pytest.raises(ParameterError):
        write_hand_in(name, labs, home, [home / file for file in notebooks])


def test_a_hand_in_names_neither_host_nor_folders(home):
    _record(home, header={"command": f"labkit measure {home}/secret/x"})
    page = home / "reports" / "all_reduce.html"
    page.parent.mkdir()
    page.write_text(f"<p>{describe_machine().host}</p><img src='data:image/png;base64,ab+/cd/ef'>")
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


def test_only_a_folder_with_hand_ins_holds_some(tmp_path):
    assert not holds_hand_ins(str(tmp_path))
    assert not holds_hand_ins("x" * 10_000)
