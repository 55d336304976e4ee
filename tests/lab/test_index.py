"""The index over records: what to do here, what is largest, which labs are of another machine,
busy, failed or old."""

import base64
import hashlib
import json
import re

import nbformat
import pytest

from labkit.lab.answers import TOPICS, Answer
from labkit.lab.pages.html import split_change, statement, with_nonbreaking_units
from labkit.lab.pages.record import (
    OTHER_FORMAT,
    PAGE_MIME,
    AnswerRecord,
    LabRecord,
    RunRecord,
    write_index,
)
from labkit.lab.pages.report import export_page
from labkit.machine.description import describe_machine
from labkit.studies import LABS, load_lab
from tests.lab.fake_lab import FAKE

MAX_WORDS = 1500


def answer(
    name="which",
    *,
    lab="fake",
    topic=None,
    is_expected=False,
    verdict="yes",
    headline="Yes: it is.",
    **others,
):
    about = {
        "lab": lab,
        "lab_title": "Fake",
        "id": name,
        "text": "Which?",
        "topic": topic,
        "is_expected": is_expected,
    }
    values = vars(Answer(verdict, headline, **others))
    return AnswerRecord(
        **about, **{name: value for name, value in values.items() if name != "table"}
    )


def run_record(*answers, **changes):
    machine = describe_machine()
    values = {"run": "a.jsonl", "started": "2030-01-02T00:00:00Z", "profile": "smoke"}
    values |= {
        "identity": machine.identity,
        "machine": machine.label,
        "machine_rows": [],
        "provenance": [],
    }
    values |= {"coverage": {"ok": 2, "pending": 5}, "missing": [], "is_busy": False, "python": None}
    return RunRecord(**(values | {"answers": answers} | changes))


def index(folder, *answers, error=None, **changes):
    """Its main part, with plain spaces before units."""
    run = run_record(*answers, **changes)
    record = LabRecord(lab="fake", title="Fake", error=error, run=None if error else run)
    (folder / "fake.json").write_text(record.model_dump_json())
    html = write_index([FAKE], folder).read_text().replace("\N{NO-BREAK SPACE}", " ")
    return html[html.index("<main") : html.index("</main>")]


BETTER = answer(topic="precision", advice="use bf16.", effect=0.5, change="2 times faster")


def test_what_is_better_is_recommended_with_its_gain_and_a_link(tmp_path):
    html = index(tmp_path, BETTER)
    assert re.search(
        r"<dt>Precision</dt>\s*<dd>Use bf16\. .*2 times faster · <a"
        r' href="fake\.html#answer-which">',
        html,
    )


@pytest.mark.parametrize("reason", [0, 1, 2, "busy"], ids=["host", "label", "instructions", "busy"])
def test_a_record_of_another_or_a_busy_machine_recommends_and_finds_nothing_here(reason, tmp_path):
    identity = list(describe_machine().identity)
    if reason != "busy":
        identity[reason] = "another"
    html = index(tmp_path, BETTER, identity=identity, is_busy=reason == "busy")
    assert "Use bf16" not in html
    assert 'id="largest"' not in html
    assert ("This machine was busy" if reason == "busy" else "measured elsewhere") in html


def test_a_topic_has_one_recommendation_that_of_the_largest_change(tmp_path):
    keep = answer(
        "keep",
        topic="precision",
        verdict="no",
        advice="keep float32.",
        effect=9.0,
        change="9 times as long",
    )
    small = answer(
        "small", topic="precision", advice="use fp16.", effect=0.9, change="10% less time"
    )
    html = index(tmp_path, keep, small, BETTER)
    assert "Use bf16" in html
    assert "Use fp16" not in html
    assert "Keep float32" not in html
    assert "Keep float32" in index(tmp_path, keep)


@pytest.mark.parametrize(("verdict", "is_better"), [("yes", True), ("no", False)])
def test_the_joined_configuration_comes_first_and_nothing_contradicts_it(
    verdict, is_better, tmp_path
):
    gain = answer(
        "gain", verdict=verdict, headline="So: together.", effect=0.6, change="40% less time"
    )
    html = index(tmp_path, gain, BETTER, python="import torch")
    assert ("import torch" in html) is is_better
    assert "Use bf16" not in html  # a part of it, or refuted with it
    assert html.index("So: together.") < html.index('id="labs"')


def test_the_largest_findings_come_by_size_and_what_everybody_expects_is_not_among_them(tmp_path):
    sizes = {"least": 0.95, "slower": 4.0, "faster": 0.3}
    answers = [
        answer(name, lab=name, headline=f"No: {name}.", effect=size, change="1% less")
        for name, size in sizes.items()
    ]
    answers.append(
        answer("smaller", lab="faster", headline="No: smaller.", effect=0.8, change="20% less")
    )
    answers.append(
        answer("memory", headline="No: memory.", effect=0.01, change="1% of it", is_expected=True)
    )
    answers.append(answer("counted", headline="Counted.", verdict="counted"))
    largest = index(tmp_path, *answers).split('id="largest"')[1].split("</section>")[0]
    assert re.findall(r"</span> (\w+)\.", largest) == ["Slower", "Faster", "Least"]


def test_a_failed_lab_a_failed_point_and_another_format_are_named_and_end_nothing(tmp_path):
    assert "failed:</a> it broke" in index(tmp_path, error="it broke").replace(
        "</a> failed:", "failed:</a>"
    )
    failed = [{"status": "failed", "reason": "no room", "count": 2}]
    assert "2 points failed: no room" in index(tmp_path, missing=failed)
    record = json.loads((tmp_path / "fake.json").read_text())
    for text in (
        json.dumps(record | {"format_version": 5}),
        json.dumps([]),
        json.dumps({"lab": "fake"}),
        "{",
        "",
    ):
        (tmp_path / "fake.json").write_text(text)
        assert (
            f'<a href="fake.html">Fake</a>: {OTHER_FORMAT}'
            in write_index([FAKE], tmp_path).read_text()
        )


def test_while_a_report_is_under_way_the_index_says_what_is_to_come(tmp_path):
    assert "Still being measured" in write_index([FAKE], tmp_path, to_come=[FAKE]).read_text()
    assert "Still being measured" not in index(tmp_path)


def test_the_index_of_all_labs_stays_short(tmp_path):
    """Five answers per lab of fifteen words each, and advice on every topic."""
    headline = "Yes: " + "word " * 14 + "end."
    advice = "word " * 12 + "end."
    for lab, topic in zip(LABS[:11], TOPICS, strict=False):
        same = {"headline": headline, "effect": 0.5, "change": "2 times faster"}
        answers = [answer(f"q{number}", **same) for number in range(4)]
        gain = {"topic": topic, "advice": advice, "effect": 0.4, "change": "60% less time"}
        answers.append(answer("gain", headline=headline, **gain))
        run = run_record(*answers, python="word\n" * 40 if lab == LABS[0] else None)
        (tmp_path / f"{lab}.json").write_text(
            LabRecord(lab=lab, title=lab, run=run).model_dump_json()
        )
    html = write_index([load_lab(lab) for lab in LABS], tmp_path).read_text()
    text = re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)
    assert len(text.split()) <= MAX_WORDS


def write_page(folder, *, piece=None, **changes):
    """A page of a notebook that left its record."""
    cell = nbformat.v4.new_code_cell("1")
    data = {PAGE_MIME: run_record(BETTER, **changes).model_dump(mode="json"), "text/html": ""}
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    if piece is not None:
        pieces = piece._repr_mimebundle_() | {"text/html": piece.data}
        cell.outputs.append(nbformat.v4.new_output("display_data", data=pieces))
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / "fake.ipynb")
    export_page(folder / "fake.ipynb", folder / "fake.html", FAKE)
    return folder / "fake.html"


def test_a_page_is_written_with_its_record_and_both_whole_or_not_at_all(tmp_path, monkeypatch):
    page = write_page(tmp_path)
    record = LabRecord.model_validate_json((tmp_path / "fake.json").read_text())
    assert record.run.answers == [BETTER]
    before = page.read_bytes(), sorted(tmp_path.iterdir())

    def fill(path, data):
        path.open("wb").write(data[:10])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", fill)
    with pytest.raises(OSError, match="No space left"):
        write_page(tmp_path, profile="quick")
    assert (page.read_bytes(), sorted(tmp_path.iterdir())) == before


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


def test_a_headline_does_not_repeat_its_verdict_and_the_amount_of_a_change_is_large():
    assert statement("Yes: it is.") == "It is."
    assert statement("Yes, from 1 MiB up: it is.") == "From 1 MiB up: it is."
    assert split_change("1.4 to 2.1 times faster") == ("1.4 to 2.1", "times faster")
    assert split_change("less time") == ("", "less time")
