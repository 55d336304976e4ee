"""The index over runs: what to do here, what is largest, which labs are of another machine, busy,
failed or old."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, replace

import nbformat
import pytest

from labkit.lab.answers import Question
from labkit.lab.facts import Answer, Comparison, Counts, Finding
from labkit.lab.pages.html import with_nonbreaking_units
from labkit.lab.pages.index import write_index
from labkit.lab.pages.record import OTHER_FORMAT, RUN_MIME, PageRecord
from labkit.lab.pages.report import export_page
from labkit.lab.recommended import DEFAULT
from labkit.lab.runs.records import RunWriter
from labkit.lab.runs.store import Run
from labkit.lab.wording import headline, statement
from labkit.machine.description import describe_machine
from labkit.studies import load_lab
from tests.lab.fake_lab import FAKE, FakePoint, header
from tests.pages.cells import recorded

MAX_WORDS = 1500
POINTS = [FakePoint(action="fine", size=size) for size in range(7)]


@dataclass(frozen=True, kw_only=True)
class Given(Question):
    """A question whose answer is given."""

    given: Answer

    def find_answer(self, results):
        return self.given


def answer(name="which", *, ratio=0.5, verdict="yes", topic=None, is_expected=False, **others):
    """A question with a comparison: the subject, named as the question, takes `ratio` of the
    time."""
    direction = "better" if ratio < 1 else "worse"
    sign = None if verdict in ("no clear difference", "undecided") else direction
    given = Comparison(
        verdict=verdict,
        quantity="seconds",
        subject=name,
        baseline="base",
        counts=Counts(1, better=ratio < 1, worse=ratio > 1),
        direction=sign,
        low=ratio,
        high=ratio,
        effect=ratio if sign else 1.0,
        **others,
    )
    return Given(id=name, text="Which?", topic=topic, is_expected=is_expected, given=given)


def write_run(folder, *, lab="fake", machine=None, ends=("ok", "ok"), rows=(), is_busy=False):
    """A file of a run of seven points, of which those without an end are pending."""
    given = {"machine": machine or describe_machine(), "lab": lab}
    with RunWriter.create(folder / "runs" / lab, header(POINTS, **given)) as writer:
        for values in rows:
            writer.add_row(POINTS[0], 0, values)
        for point, status in zip(POINTS, ends, strict=False):
            reason = None if status == "ok" else "no room"
            load = {"busy_cores": 64.0} if is_busy else None
            writer.end_point(point, status, reason=reason, elapsed_s=1.0, load=load)
    return writer.path


def index(folder, *questions, error=None, study=FAKE, **run):
    """Its main part, with plain spaces before units."""
    lab = replace(study, questions=questions)
    path = None if error else str(write_run(folder, **run))
    record = PageRecord(lab="fake", error=error, run=path)
    (folder / "fake.json").write_text(record.model_dump_json())
    html = write_index([lab], folder).read_text().replace("\N{NO-BREAK SPACE}", " ")
    return html[html.index("<main") : html.index("</main>")]


BETTER = answer(topic="precision", advice="use bf16.", ratio=0.5)
COMBINED = {"implementation": "joined", "model": "mini", "context_length": 64, **vars(DEFAULT)}


def test_what_is_better_is_recommended_with_its_gain_and_a_link(tmp_path):
    html = index(tmp_path, BETTER)
    assert re.search(
        r"<dt>Precision</dt>\s*<dd>Use bf16\. .*2 times faster · <a"
        r' href="fake\.html#answer-which">',
        html,
    )


@pytest.mark.parametrize("reason", ["host", "instructions", "busy"])
def test_a_run_of_another_or_a_busy_machine_recommends_and_finds_nothing_here(reason, tmp_path):
    machine = describe_machine()
    if reason != "busy":
        machine = machine.model_copy(update={reason: "another"})
    html = index(tmp_path, BETTER, machine=machine, is_busy=reason == "busy")
    assert "Use bf16" not in html
    assert 'id="largest"' not in html
    assert ("2 times faster" in html) == (reason != "busy")
    assert ("This machine was busy" if reason == "busy" else "measured elsewhere") in html


def test_an_example_recommends_and_finds_nothing_and_says_what_it_is(tmp_path):
    example = replace(FAKE, example=lambda results: "an example")
    html = index(tmp_path, BETTER, study=example)
    assert "Use bf16" not in html
    assert 'id="largest"' not in html
    assert re.search(r"<dd>An example: .*2 times faster", html)
    assert load_lab("your_training").example(recorded("your_training").results())


def test_a_few_slower_alternatives_are_no_difference_where_none_is_faster(tmp_path):
    few = answer("few", verdict="no", ratio=1.4)
    given = replace(few.given, subject=None, counts=Counts(10, better=0, worse=1))
    html = index(tmp_path, replace(few, given=given))
    assert 'id="largest"' not in html
    assert "40%" not in html
    every = replace(given, counts=Counts(10, better=0, worse=10))
    assert 'id="largest"' in index(tmp_path, replace(few, given=every))


def test_a_topic_has_one_recommendation_that_of_the_largest_change(tmp_path):
    keep = answer("keep", topic="precision", verdict="no", advice="keep float32.", ratio=9.0)
    small = answer("small", topic="precision", advice="use fp16.", ratio=0.9)
    html = index(tmp_path, keep, small, BETTER)
    assert "Use bf16" in html
    assert "Use fp16" not in html
    assert "Keep float32" not in html
    assert "Keep float32" in index(tmp_path, keep)


@pytest.mark.parametrize(
    ("verdict", "replaces"), [("yes", True), ("no", False), ("undecided", False)]
)
def test_only_a_gain_that_is_shown_replaces_single_recommendations(verdict, replaces, tmp_path):
    ratio = {"yes": 0.6, "no": 1.2}.get(verdict, 1.0)
    gain = answer("gain", verdict=verdict, ratio=ratio, advice="train combined.", seconds_more=14.0)
    html = index(tmp_path, gain, BETTER, rows=[COMBINED])
    assert ("import torch" in html) is replaces
    assert ("Train combined" in html) is replaces
    assert ("Use bf16" in html) is not replaces
    assert ("about 10 s more" in html) is (verdict == "undecided")


def test_the_largest_findings_come_by_size_and_what_everybody_expects_is_not_among_them(tmp_path):
    labs = []
    for name, ratio in {"least": 0.95, "slower": 4.0, "faster": 0.3}.items():
        questions = [answer(name, ratio=ratio)]
        if name == "faster":
            questions.append(answer("smaller", ratio=0.8))
            questions.append(answer("memory", ratio=0.01, is_expected=True))
            found = Finding(verdict="counted", says="Counted.", values={})
            questions.append(Given(id="counted", text="?", given=found))
        labs.append(replace(FAKE, name=name, questions=questions))
        record = PageRecord(lab=name, run=str(write_run(tmp_path, lab=name)))
        (tmp_path / f"{name}.json").write_text(record.model_dump_json())
    html = write_index(labs, tmp_path).read_text()
    largest = html.split('id="largest"')[1].split("</section>")[0]
    assert re.findall(r"</span> (\w+) ", largest) == ["Slower", "Faster", "Least"]


def test_a_failed_lab_a_failed_point_and_another_format_are_named_and_end_nothing(tmp_path):
    assert "failed:</a> it broke" in index(tmp_path, error="it broke").replace(
        "</a> failed:", "failed:</a>"
    )
    assert "2 points failed: no room" in index(tmp_path, ends=["failed", "failed"])
    record = json.loads((tmp_path / "fake.json").read_text())
    for text in (
        json.dumps(record | {"format_version": 5}),
        json.dumps([]),
        json.dumps({"run": "a"}),
        "{",
        "",
    ):
        (tmp_path / "fake.json").write_text(text)
        assert (
            f'<a href="fake.html">Fake</a>: {OTHER_FORMAT}'
            in write_index([FAKE], tmp_path).read_text()
        )
    (tmp_path / "fake.json").write_text(json.dumps(record | {"run": "gone.jsonl"}))
    assert "its run cannot be read" in write_index([FAKE], tmp_path).read_text()


def test_while_a_report_is_under_way_the_index_says_what_is_to_come(tmp_path):
    assert "Still being measured" in write_index([FAKE], tmp_path, to_come=[FAKE]).read_text()
    assert "Still being measured" not in index(tmp_path)


def write_page(folder, *, piece=None):
    """A page of a notebook that left its run."""
    cell = nbformat.v4.new_code_cell("1")
    path = write_run(folder, rows=[{"seconds": [1.0]}])
    data = {RUN_MIME: {"run": str(path)}, "text/html": ""}
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    if piece is not None:
        pieces = piece._repr_mimebundle_() | {"text/html": piece.data}
        cell.outputs.append(nbformat.v4.new_output("display_data", data=pieces))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "fake.ipynb")
    export_page(folder / "fake.ipynb", folder / "fake.html", FAKE)
    return folder / "fake.html"


def test_a_page_is_written_with_its_record_and_both_whole_or_not_at_all(tmp_path, monkeypatch):
    page = write_page(tmp_path)
    record = PageRecord.model_validate_json((tmp_path / "fake.json").read_text())
    assert Run.load(record.run).coverage()["status"].tolist() == ["ok"] * 2 + ["pending"] * 5
    before = page.read_bytes(), sorted(tmp_path.glob("fake*"))

    def fill(path, data):
        path.open("wb").write(data[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", fill)
    with pytest.raises(OSError, match="No space left"):
        export_page(tmp_path / "fake.ipynb", page, FAKE, error="another")
    assert (page.read_bytes(), sorted(tmp_path.glob("fake*"))) == before


def test_the_policy_of_pages_allows_their_own_script_by_its_hash_and_no_other(tmp_path):
    pages = [write_page(tmp_path), write_index([FAKE], tmp_path)]
    for html in (page.read_text() for page in pages):
        (policy,) = re.findall(r'content="(default-src[^"]*)"', html)
        (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in policy
        assert "base-uri 'none'; form-action 'none'" in policy


def test_a_number_stays_on_one_line_with_its_unit_and_nothing_but_text_is_changed():
    text = (
        '<p title="3 s">9{0}ms, [1, 2]{0}s</p><script>"3 s"</script><svg><text>5'
        " s</text></svg><td>7 steps</td>"
    )
    assert with_nonbreaking_units(text.format(" ")) == text.format("\N{NO-BREAK SPACE}")


def test_a_statement_does_not_repeat_the_verdict_that_stands_next_to_it():
    whole = answer(ratio=0.5).given
    assert headline(whole) == f"Yes: {statement(whole)[0].lower()}{statement(whole)[1:]}"
