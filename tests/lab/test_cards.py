"""Pieces of a page: units, and nothing that a run or a parameter holds gets into the HTML
unescaped."""

import re

import numpy as np
import pandas as pd
import pytest

from labkit.lab.answers import Question
from labkit.lab.facts import Finding, Note
from labkit.lab.figures import Lines
from labkit.lab.figures.draw import draw_frame
from labkit.lab.pages import cards
from labkit.lab.pages.html import piece
from labkit.lab.pages.record import provenance_rows
from labkit.lab.runs.progress import Progress
from labkit.lab.runs.records import RunWriter
from labkit.lab.runs.store import Run
from labkit.machine.description import describe_machine
from labkit.machine.source import Source
from labkit.parallel.collectives import ring_all_reduce
from tests.lab.fake_lab import FAKE, FakeConfig, FakePoint, header

EVIL = "<script>alert(1)</script>"
QUOTED = "\" onerror='alert(1)"

POINTS = [FakePoint(action="fine", size=size) for size in range(3)]


def answer_pieces(text):
    """An answer with a figure, in a notebook and on a page; everything in it is named by the
    text."""
    question = Question(id=text, text=text)
    answer = Finding(
        verdict=text,
        says=text,
        values={},
        table=pd.DataFrame({text: [text]}),
        advice=text,
        scope=((text, (text,)),),
        notes=(Note("failed", text, names=(text,)),),
    )
    frame = pd.DataFrame({"n_bytes": [1, 2], "seconds": [1.0, 2.0], "algorithm": text})
    plot = draw_frame(Lines(x="n_bytes", y="seconds", hue="algorithm"), frame)
    answered = cards.answer(question, answer, [cards.figure(plot, text, text, text)])
    return [answered.data, answered.on_page]


@pytest.mark.parametrize(
    ("text", "escaped"), [(EVIL, "&lt;script"), (QUOTED, "&#34; onerror=&#39;alert(1)")]
)
def test_nothing_becomes_markup_or_ends_an_attribute(text, escaped, tmp_path):
    names = dict.fromkeys(("cpu", "host", "system", "python"), text)
    machine = describe_machine().model_copy(
        update=names | {"versions": {text: text}, "source": Source(commit=text)}
    )
    pieces = [
        *answer_pieces(text),
        piece("progress", text=Progress(1, 2, text).line()),
        cards.table(pd.DataFrame({text: [text]}), text).data,
        cards.machine_card(machine).data,
    ]
    with RunWriter.create(
        tmp_path,
        header(
            POINTS, config={text: text}, command=text, ranks_by_host={text: [0], f"{text}2": [1]}
        ),
    ) as writer:
        writer.end_point(
            POINTS[0],
            "failed",
            reason=text,
            facts={"world_size": 2, "backend": text, "scheduling": text},
        )
        writer.start_resumption(text, Source(commit=text))
    run = Run.load(writer.path)
    assert provenance_rows(FAKE, run)["Resumed at"].endswith(f", by {text}")
    pieces += [
        cards.coverage(run).data,
        piece("provenance", rows=provenance_rows(FAKE, run).items()),
    ]
    for html in pieces:
        # in an element's text a quote is a quote
        assert text not in re.sub(r"<text[^>]*>[^<]*</text>", "", html)
        assert escaped in html


def test_points_that_did_not_end_say_so(tmp_path):
    with RunWriter.create(tmp_path, header(POINTS)) as writer:
        writer.end_point(POINTS[0], "skipped", reason="needs a GPU")
    html = cards.coverage(Run.load(writer.path)).data
    assert "2 pending: not ended" in html
    assert "1 skipped: needs a GPU" in html
    assert "nan:" not in html


def test_the_command_that_measures_again_has_the_changed_parameters(tmp_path):
    commands = []
    budget = FakeConfig(world_size=2, budget_s=23.7).model_dump()
    for config in (budget, {"actions": "of a reader"}):
        with RunWriter.create(tmp_path, header(POINTS, config=config)) as writer:
            commands.append(provenance_rows(FAKE, Run.load(writer.path))["Measure again"])
    assert commands[0].endswith("labkit report fake --profile smoke --set world_size=2")
    assert "labkit report" not in commands[1]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("n_bytes", 65536, "64 KiB"),
        ("error", float("nan"), "–"),
        ("name", "aten::_softmax", "aten::_softmax"),
        ("name", "figures/my_lab/a_file.png", "figures/my_lab/a_file.png"),
        ("name", "recursive_doubling", "recursive doubling"),
        ("parameters", 1998235200, "1,998,235,200"),
        ("fits", True, "yes"),
        ("average", [1.5, 2.5], "[1.5, 2.5]"),
        # Neither of these can be compared with itself.
        ("average", np.array([1.5, 2.5]), "[1.5 2.5]"),
        ("count", pd.NA, "&lt;NA&gt;"),
    ],
)
def test_a_cell_says_its_value_as_a_reader_would(name, value, text):
    assert f">{text}<" in cards.table(pd.DataFrame({name: [value]})).data


def test_a_wide_table_says_once_what_is_the_same_in_all_rows():
    frame = pd.DataFrame(
        {"n_bytes": [4096, 1024], "device": "cpu"} | {f"c{at}": [1.0, 2.0] for at in range(8)}
    )
    html = cards.table(frame).data
    assert "The same in all rows: device cpu." in html
    assert ">device</th>" not in html
    assert ">device</th>" in cards.table(frame.drop(columns="c1")).data


def test_numbers_are_aligned_and_sorted_by_value_and_text_is_not():
    html = cards.table(
        pd.DataFrame({"name": ["b", "a"], "seconds": [0.002, 1.5], "fits": [True, False]})
    ).data
    assert html.count('class="text"') == 2 * 3  # two of the three columns, with their headings
    assert '<td data-sort="0.002">2 ms</td><td class="text">yes</td>' in html
    assert '<td data-sort="1.5">1.5 s</td>' in html


def test_low_and_high_become_an_interval():
    table = pd.DataFrame({"seconds": [0.1], "low": [0.09], "high": [0.2], "mfu_percent": [12.0]})
    for heading in ("time", "95% interval", "MFU (%)"):
        assert f">{heading}</th>" in cards.table(table).data


def test_a_console_that_shows_no_html_gets_text():
    answer = Finding(verdict="yes", says="Ring.", values={}, advice="Use `ring`.")
    answered = cards.answer(Question(id="which", text="Which?"), answer)
    assert repr(answered).splitlines() == ["yes Ring.", "On this machine Use ring."]
    assert "Use <code>ring</code>." in answered.data
    frame = pd.DataFrame({"name": ["b", "longer"], "seconds": [0.002, 1.5]})
    assert repr(cards.table(frame, "Times.")) == "Times.\nname  time\nb  2 ms\nlonger  1.5 s"
    machine = describe_machine()
    text = repr(cards.machine_card(machine))
    assert "Memory" in text
    assert text.count(machine.cpu) == 1  # of a CPU the label says its name
    other = cards.machine_card(machine.model_copy(update={"host": "elsewhere"}))
    assert ["not measured here" in repr(card) for card in (cards.machine_card(machine), other)] == [
        False,
        True,
    ]


def test_a_functions_source_is_shown_with_its_docstring_folded_on_a_page():
    source = cards.render_source(ring_all_reduce)
    page = source.on_page
    for html in (page, source.data):
        assert "<code>ring_all_reduce</code> (collectives.py, line " in html
        assert '<span class="sd">' in html  # its docstring, highlighted
    assert "<details" in page
    assert " open>" not in page
    assert "<style>" not in page
    assert "prefers-color-scheme: dark" in source.data
    assert "def ring_all_reduce(" in repr(source)
    with pytest.raises(ValueError, match="expected a function or class of a module"):
        cards.render_source(len)
