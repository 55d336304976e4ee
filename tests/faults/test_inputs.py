"""What a reader may hand to labkit: parameters, runs, notebooks. A clear error, or pages in which
text stays text."""

import json
import math
import re

import nbformat
import pytest

from labkit.lab.config import ParameterError, resolve_config
from labkit.lab.pages import cards
from labkit.lab.pages.record import provenance_rows
from labkit.lab.pages.report import export_page
from labkit.lab.parameters import check_parameters, notebook_parameters
from labkit.lab.runs.records import RunWriter
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine.description import describe_machine
from labkit.studies import LABS, load_lab
from tests.lab.fake_lab import FakePoint, header

HTML = "<script>alert('labkit')</script>"
WRONG = [
    HTML,
    "",
    "1",
    -1,
    0,
    1.5,
    True,
    10**30,
    -(10**30),
    math.nan,
    math.inf,
    1e308,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
]
WRONG += ["x" * 10_000, "\0", "~nobody-of-that-name/x", "../../etc/passwd", "/etc"]
WRONG += [[value] for value in (HTML, "", -1, 0, 1.5, True, 10**30, math.nan, math.inf, -1e308)]


def refusal(lab, study, parameters):
    """What is said of parameters that are refused, or None and the config."""
    try:
        return None, resolve_config(lab, study.profiles, "smoke", parameters)
    except ParameterError as error:
        return str(error), None


@pytest.mark.parametrize("lab", LABS)
def test_every_parameter_with_every_wrong_value_stops_by_name_or_is_planned(lab):
    study = load_lab(lab)
    machine = describe_machine()
    refused = planned = 0
    for name in type(study.profiles["smoke"]).model_fields:
        for value in WRONG:
            said, config = refusal(lab, study, {name: value})
            if said is None:
                try:
                    assert all(point.describe() for point in study.plan(config, machine))
                    planned += 1
                except ParameterError as error:  # a file of another kind, which exists
                    said = str(error)
            if said is not None:
                assert f"'{name}'" in said
                assert "\n" not in said
                refused += 1
    with pytest.raises(ParameterError, match="unknown parameter"):
        resolve_config(lab, study.profiles, "smoke", {"no_such": 1})
    with pytest.raises(ParameterError, match="unknown profile"):
        resolve_config(lab, study.profiles, HTML, {})
    for profile in ([], None, 7):
        with pytest.raises(ParameterError, match="unknown profile"):
            check_parameters(study, {"profile": profile})
    assert refused > planned


POINTS = [FakePoint(action="fine", size=size) for size in range(3)]


def write_run(directory):
    with RunWriter.create(directory, header(POINTS, lab="all_reduce")) as writer:
        for point in POINTS:
            writer.add_row(point, 0, {"value": [1.0, 2.0]})
            writer.end_point(point, "ok", elapsed_s=1.0, facts={"world_size": 1})
    return writer.path


def read_all(path):
    """Everything a page is made of, or a RunFileError that names the file."""
    try:
        run = Run.load(path)
        assert run.frame() is not None
        assert run.pending is not None
        assert cards.coverage(run)
        assert provenance_rows(load_lab("all_reduce"), run)
        assert cards.machine_card(run.header.machine)
    except RunFileError as error:
        if str(path) in str(error):
            return False
        raise
    return True


def test_a_run_torn_at_any_byte_is_read_up_to_there_or_refused_by_name(tmp_path):
    path = write_run(tmp_path)
    content = path.read_bytes()
    torn = tmp_path / "torn.jsonl"
    read = 0
    for length in range(0, len(content), 7):
        torn.write_bytes(content[:length])
        read += read_all(torn)
    assert read > 0


def _damaged(record, path, value):
    *parents, last = path
    for name in parents:
        record = record[name]
    record[last] = value


def _places(record, path=()):
    """Where something in a record may be damaged."""
    for name, value in record.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from _places(value, (*path, name))


def test_a_run_with_any_value_of_any_record_damaged_is_read_or_refused_by_name(tmp_path):
    lines = write_run(tmp_path).read_bytes().splitlines()
    damaged = tmp_path / "damaged.jsonl"
    read = refused = 0
    for number, line in list(enumerate(lines))[:3]:
        for turn, place in enumerate(_places(json.loads(line))):
            for value in (None, HTML, -1, [], {}, {"a": {}}, math.nan, ["x"])[turn % 2 :: 2]:
                record = json.loads(line)
                _damaged(record, place, value)
                damaged.write_bytes(
                    b"\n".join(
                        [*lines[:number], json.dumps(record).encode(), *lines[number + 1 :], b""]
                    )
                )
                good = read_all(damaged)
                read = read + good
                refused = refused + (not good)
    assert refused > 0


FOREIGN = [b"\x80\x04\x95", b"\xff" * 100, b"PK\x03\x04", b"[" * 100_000, b"{}", b'{"kind":[]}']


@pytest.mark.parametrize("line", FOREIGN)
def test_a_run_with_a_foreign_line_is_refused_by_name_and_left_as_it_is(tmp_path, command, line):
    path = write_run(tmp_path)
    path.write_bytes(before := path.read_bytes() + line + b"\n")
    assert not read_all(path)
    status, out, err = command("measure", "all_reduce", "--resume", str(path))
    assert status == 2, out + err
    assert str(path) in err
    assert path.read_bytes() == before


NO_LABS = [
    "../all_reduce",
    "all_reduce/../precision",
    "/etc/passwd",
    "all_reduce.ipynb",
    "",
    ".",
    HTML,
    "x" * 10_000,
]


@pytest.mark.parametrize("name", NO_LABS, ids=lambda name: repr(name[:30]))
def test_a_lab_name_with_a_path_in_it_is_no_lab(name):
    with pytest.raises(ParameterError, match="the labs are"):
        load_lab(name)


def test_text_of_an_output_stays_text_on_the_page(tmp_path):
    """What a cell prints and raises, a rank's output and traceback among it, and a figure's
    alternative text."""
    cell = nbformat.v4.new_code_cell("1")
    output = nbformat.v4.new_output
    cell.outputs = [
        output("stream", name="stdout", text=HTML),
        output("stream", name="stderr", text=HTML),
        output("error", ename="ValueError", evalue=HTML, traceback=[HTML]),
        output("display_data", data={"text/plain": HTML}),
        output(
            "display_data",
            data={"image/png": "iVBORw0KGgo="},
            metadata={"image/png": {"alt": f'"{HTML}'}},
        ),
    ]
    source = tmp_path / "a.ipynb"
    page = tmp_path / "a.html"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), source)
    export_page(source, page, load_lab("all_reduce"), error=HTML)
    scripts = re.findall(r"<script[^>]*>\s*alert", page.read_text())
    assert scripts == []
    assert "&lt;script&gt;alert" in page.read_text()


@pytest.mark.parametrize(
    ("tags", "source"),
    [([], "profile = 'quick'"), (["parameters"], "profile = f()"), (["parameters"], "import os")],
)
def test_a_notebook_without_parameters_is_refused_by_name(tmp_path, tags, source):
    cell = nbformat.v4.new_code_cell(source)
    cell.metadata["tags"] = tags
    path = tmp_path / "odd.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    with pytest.raises(ParameterError, match=r"odd\.ipynb"):
        notebook_parameters(path.read_text(), path.name)
