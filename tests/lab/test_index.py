"""The index over pages: of which machine they are, which cannot be read, what did not end; and which script may run."""

import base64
import hashlib
import re

import nbformat
import pytest
from jinja2.utils import htmlsafe_json_dumps

from labkit.lab.advise.report import Section
from labkit.lab.findings import SMALLEST_DIFFERENCE
from labkit.lab.notebook import PAGE_MIME
from labkit.lab.pages.export import OTHER_FORMAT, PAGE_FORMAT, export_page, read_page
from labkit.lab.pages.html import unbroken
from labkit.lab.pages.report import write_index
from labkit.machine import describe_machine
from tests.lab.fake_study import FAKE

ADVISED = Section("Training on this machine", "measured here", ("model", "measured here"), [("mini", "61 %")])


def write_page(folder, **changes):
    """A page of a notebook that left its record."""
    machine = describe_machine()
    record = {"run": "data/runs/fake/a.jsonl", "identity": machine.identity, "machine": machine.label}
    record |= {
        "profile": "smoke",
        "started": "2030-01-02T00:00:00",
        "coverage": {"ok": 2, "pending": 5},
        "duration_s": 1.0,
    }
    record |= {"not_measured": [], "figures": {}, "answers": [], "machine_rows": [], "provenance": []}
    cell = nbformat.v4.new_code_cell("1")
    cell.outputs = [nbformat.v4.new_output("display_data", data={PAGE_MIME: record | changes, "text/html": ""})]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "fake.ipynb")
    export_page(folder / "fake.ipynb", folder / "fake.html", lab="fake", title="Fake")
    return folder / "fake.html"


def index(folder):
    """Its text with plain spaces before units."""
    return write_index([FAKE], folder).read_text().replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("changed", [0, 1, 2], ids=["host", "label", "instructions"])
def test_whether_a_page_is_of_this_machine_is_judged_where_the_index_is_made(changed, tmp_path):
    write_page(tmp_path)
    assert "(elsewhere)" not in index(tmp_path)
    identity = describe_machine().identity
    write_page(tmp_path, identity=[*identity[:changed], "another", *identity[changed + 1 :]])
    assert "(elsewhere)" in index(tmp_path)


def test_points_that_did_not_end_have_a_column(tmp_path):
    write_page(tmp_path)
    html = index(tmp_path)
    assert ">pending</th>" in html
    assert '<td data-sort="5">5</td>' in html


@pytest.mark.parametrize("version", [None, PAGE_FORMAT - 1, PAGE_FORMAT + 1, [], "1"])
def test_a_page_of_another_format_is_listed_and_ends_nothing(version, tmp_path):
    page = write_page(tmp_path)
    written = f'"format_version": {PAGE_FORMAT}'
    assert written in page.read_text()
    page.write_text(page.read_text().replace(written, f'"format_version": {htmlsafe_json_dumps(version)}'))
    assert f'<a href="fake.html">Fake</a>: {OTHER_FORMAT}' in index(tmp_path)


@pytest.mark.parametrize("record", [{}, {"run": 5}, [], "text"])
def test_a_record_without_what_an_index_needs_is_of_another_format(record, tmp_path):
    about = {"format_version": PAGE_FORMAT, "lab": "fake", "title": "Fake", "error": None, "record": record}
    page = tmp_path / "fake.html"
    page.write_text(f'<script type="application/json" id="labkit-record">{htmlsafe_json_dumps(about)}</script>')
    assert read_page(page)["error"] == OTHER_FORMAT
    assert OTHER_FORMAT in index(tmp_path)


def test_a_number_stays_on_one_line_with_its_unit_and_nothing_but_text_is_changed():
    text = '<p title="3 %">9{0}ms, [1, 2]{0}%</p><script>"3 s"</script><svg><text>5 s</text></svg><td>7 steps</td>'
    assert unbroken(text.format(" ")) == text.format("\N{NO-BREAK SPACE}")


def test_the_policy_of_pages_allows_their_own_script_by_its_hash_and_no_other(tmp_path):
    for html in (write_page(tmp_path).read_text(), index(tmp_path)):
        (policy,) = re.findall(r'content="(default-src[^"]*)"', html)
        (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in policy
        assert "base-uri 'none'; form-action 'none'" in policy


def test_the_index_says_what_this_machine_should_use_and_what_that_gains_by_model(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.lab.pages.report.by_size", lambda: ("Change 1.", ADVISED))
    write_page(tmp_path, identity=["elsewhere", "", ""])
    assert 'id="joined"' not in index(tmp_path)
    write_page(tmp_path)
    assert re.search(r'id="joined".*Change 1\..*<td class="text">mini</td>.*61 %', index(tmp_path), re.DOTALL)


def test_the_index_names_labs_of_a_busy_machine_and_the_smallest_difference(tmp_path):
    question = {"id": SMALLEST_DIFFERENCE, "text": "?", "topic": None}
    answer = {"question": question, "verdict": "measured", "headline": "4 % between products.", "effects": []}
    answer |= {"claims": [], "advice": None, "caveat": None, "why": None, "significant": False, "lead": None}
    answer |= {"also": None, "where": None}
    write_page(tmp_path, answers=[answer], busy=2)
    html = index(tmp_path)
    assert '<a href="fake.html#answer-smallest_difference">4 % between products.</a>' in html
    assert "busy or slow during points of Fake" in html
    write_page(tmp_path)
    assert "busy or slow" not in index(tmp_path)


def test_while_a_report_is_under_way_the_index_says_what_is_to_come(tmp_path):
    write_page(tmp_path)
    coming = "Still being measured"
    assert coming in write_index([FAKE], tmp_path, to_come=[FAKE]).read_text()
    assert coming not in index(tmp_path)
