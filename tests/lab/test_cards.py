"""Pieces of a page: units, and nothing that a run or a parameter holds gets into the HTML unescaped."""

import json
import re
from datetime import UTC, datetime

import pandas as pd
from IPython.core.formatters import DisplayFormatter

from labkit.lab import figures
from labkit.lab.columns import INTERVAL
from labkit.lab.findings import Finding, Question
from labkit.lab.pages import cards
from labkit.lab.pages.provenance import provenance, provenance_rows
from labkit.lab.runs.measure import measure
from labkit.lab.runs.progress import Progress
from labkit.lab.runs.store import Run, RunHeader
from labkit.lab.runs.writer import RunWriter
from labkit.machine import Source, describe_machine
from tests.lab.fake_study import FAKE, FakeConfig, FakePoint

EVIL = "<script>alert(1)</script>"
QUOTED = "\" onerror='alert(1)"

POINTS = [FakePoint(action="fine", size=size) for size in range(3)]


def header(**changes):
    fields = {"lab": "fake", "profile": "smoke", "config": {}, "machine": describe_machine(), "command": "labkit"}
    fields |= {"started": datetime(2030, 1, 2, tzinfo=UTC), "planned": {point.id: point.describe() for point in POINTS}}
    return RunHeader(**(fields | changes))


def answer(question, finding):
    """A finding with a figure, in a notebook and on a page; the figure's lines are named as the question is."""
    frame = pd.DataFrame({"n_bytes": [1, 2], "seconds": [1.0, 2.0], "algorithm": question.text})
    plot = figures.lines(frame, x="n_bytes", y="seconds", hue="algorithm")
    figure = cards.figure(plot, b"PNG", question.text, question.id, question.text)
    shown = cards.answer(question, finding, [figure])
    return shown.data, shown.on_page


def test_everything_is_escaped():
    question = Question(EVIL, EVIL)
    finding = Finding(EVIL, EVIL, pd.DataFrame({EVIL: [EVIL]}), EVIL, EVIL, EVIL)
    pieces = [
        *answer(question, finding),
        cards.progress(Progress(1, 2, EVIL)),
        cards.table(pd.DataFrame({EVIL: [EVIL]}), EVIL).data,
        cards.machine_card(describe_machine().model_copy(update={"cpu": EVIL}), elsewhere=False).data,
    ]
    for piece in pieces:
        assert "<script" not in piece
        assert "&lt;script" in piece


def test_a_quote_does_not_end_an_attribute(tmp_path):
    question = Question(QUOTED, QUOTED)
    finding = Finding(QUOTED, QUOTED, pd.DataFrame({QUOTED: [QUOTED]}), QUOTED, QUOTED, QUOTED)
    machine = describe_machine()
    source = Source(commit=QUOTED, dirty=True)
    pieces = [
        *answer(question, finding),
        cards.progress(Progress(1, 2, QUOTED)),
        cards.table(pd.DataFrame({QUOTED: [QUOTED]}), QUOTED).data,
        cards.machine_card(
            machine.model_copy(update={"cpu": QUOTED, "host": QUOTED, "source": source}),
            elsewhere=True,
            hosts={QUOTED: [0], f"other {QUOTED}": [1]},
        ).data,
    ]
    with RunWriter.create(tmp_path, header(lab=QUOTED, config={QUOTED: QUOTED}, command=QUOTED)) as writer:
        writer.end_point(POINTS[0], "skipped", reason=QUOTED)
        writer.begin_again(QUOTED, source)
    run = Run.load(writer.path)
    pieces += [cards.coverage(run), provenance(FAKE, run)]
    for piece in pieces:
        assert QUOTED not in re.sub(r"<text[^>]*>[^<]*</text>", "", piece)  # in an element's text it is a quote
        assert "&#34; onerror=&#39;alert(1)" in piece


def test_points_that_did_not_end_say_so(tmp_path):
    with RunWriter.create(tmp_path, header()) as writer:
        writer.end_point(POINTS[0], "skipped", reason="needs a GPU")
    html = cards.coverage(Run.load(writer.path))
    assert "2 pending: not ended" in html
    assert "1 skipped: needs a GPU" in html
    assert "nan:" not in html


def test_what_a_run_holds_is_escaped(tmp_path):
    run = measure(FAKE, FakeConfig(actions=["skip", EVIL], world_size=1), profile="smoke", directory=tmp_path)
    assert "<script" not in cards.coverage(run) + provenance(FAKE, run)
    assert "1 skipped: needs what this machine has not" in cards.coverage(run)


def test_the_command_that_measures_again_has_the_changed_parameters(tmp_path):
    run = measure(FAKE, FakeConfig(actions=["fine"], world_size=1), profile="smoke", directory=tmp_path)
    assert "labkit report fake --profile smoke --set world_size=1<" in provenance(FAKE, run)
    own = Run(run.path, run.header.model_copy(update={"config": {"actions": "of a reader"}}), run._rows, run._ends)
    assert "labkit report" not in provenance_rows(FAKE, own)["Measure again"]


def test_the_provenance_of_a_resumed_run_says_when_and_at_which_commit(tmp_path):
    old = {"kind": "resumed", "command": "labkit measure fake --resume a", "at": "2030-01-02T03:04:05+00:00"}
    known = old | {"at": "2030-01-03T03:04:05+00:00", "git": {"commit": "abc1234def", "dirty": True}}
    outside = {"kind": "resumed", "git": None}
    with RunWriter.create(tmp_path, header()) as writer:
        assert "Resumed" not in provenance(FAKE, Run.load(writer.path))
    with writer.path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in (old, known, outside))
    rows = provenance_rows(FAKE, Run.load(writer.path))
    assert rows["Resumed at"].split("; ") == [
        "2030-01-02 03:04:05 UTC, commit not recorded, by labkit measure fake --resume a",
        "2030-01-03 03:04:05 UTC, commit abc1234def with local changes, by labkit measure fake --resume a",
        "a time that was not recorded, not a git checkout",
    ]
    assert '<th scope="row">Resumed at</th>' in provenance(FAKE, Run.load(writer.path))


def test_cells_have_units_and_missing_values_a_dash():
    frame = pd.DataFrame({"n_bytes": [65536], "seconds": [0.00123], "error": [float("nan")], "busbw_gb_per_s": [1.5]})
    html = cards.table(frame).data
    for text in ("64 KiB", "1.23 ms", "–", "1.5"):
        assert f">{text}<" in html


def test_names_of_operators_and_paths_are_spelled_out_and_other_names_read_as_words():
    frame = pd.DataFrame({"name": ["aten::_softmax", "figures/my_lab/a_file.png", "recursive_doubling"]})
    html = cards.table(frame).data
    for text in ("aten::_softmax", "figures/my_lab/a_file.png", "recursive doubling"):
        assert f">{text}<" in html


def test_large_counts_have_separators_and_headings_no_unit_that_the_cells_carry():
    row = {"flops": 2518679552, "parameters": 1998235200, "matmul_flops_per_s": 1.87e11, "n": 4096}
    html = cards.table(pd.DataFrame([row])).data
    for text in ("2.52 GFLOP", "1,998,235,200", "187 GFLOP/s", "4096", "matmul"):
        assert f">{text}<" in html


def test_numbers_are_aligned_and_sorted_by_value_and_text_is_not():
    html = cards.table(pd.DataFrame({"name": ["b", "a"], "seconds": [0.002, 1.5], "fits": [True, False]})).data
    assert html.count('class="text"') == 2 * 3  # two of the three columns, with their headings
    assert '<td data-sort="0.002">2 ms</td><td class="text">yes</td>' in html
    assert '<td data-sort="1.5">1.5 s</td>' in html


def test_beside_a_mean_the_heading_of_a_median_says_so():
    table = pd.DataFrame({"seconds": [0.1], "mean_s": [0.2], "mfu_percent": [12.0]})
    assert ">median</th>" in cards.table(table).data
    assert ">MFU (%)</th>" in cards.table(table).data
    assert ">time</th>" in cards.table(table.drop(columns="mean_s")).data


def test_an_interval_says_of_what_share_it_is():
    table = pd.DataFrame({"seconds": [0.1], "low": [0.09], "high": [0.2]})
    assert ">95 % interval</th>" in cards.table(table).data
    table.attrs[INTERVAL] = "90 %"
    assert ">90 % interval</th>" in cards.table(table.assign(rank=1)).data


def test_a_long_text_in_a_table_goes_on_in_a_second_line_and_a_path_does_not():
    reason, path = "Triton kernels need a CUDA GPU (or TRITON_INTERPRET=1, for tests)", "figures/kernels/" + "a" * 60
    html = cards.table(pd.DataFrame({"reason": [reason], "file": [path], "model": ["nano"]})).data
    assert f'<td class="text wide">{reason}</td><td class="text">{path}</td><td class="text">nano</td>' in html


def test_a_console_that_shows_no_html_gets_text():
    finding = Finding("yes", "Ring.", advice="Use ring.")
    assert repr(cards.answer(Question("which", "Which?"), finding)) == "Which? [yes]\nRing.\nUse ring."
    frame = pd.DataFrame({"name": ["b", "longer"], "seconds": [0.002, 1.5]})
    assert repr(cards.table(frame, "Times.")) == "Times.\nname     time\nb        2 ms\nlonger  1.5 s"
    machine = describe_machine()
    text = repr(cards.machine_card(machine, elsewhere=False))
    assert "Memory  " in text
    assert text.count(machine.cpu) == 1  # of a CPU the label says its name


def test_records_travel_with_a_piece_unseen():
    data, _ = DisplayFormatter().format(cards.Shown("<b>yes</b>", "yes", {"application/vnd.labkit.page+json": {}}))
    assert data == {"application/vnd.labkit.page+json": {}, "text/html": "<b>yes</b>", "text/plain": "yes"}


def test_progress_says_how_long_it_has_taken_and_may_take():
    begun = Progress(3, 9, "ring", elapsed_s=61.4, left_s=150.0, run="a")
    assert "3 of 9 points   61 s so far, about 2 min 30 s left   ring" in cards.progress(begun)
    assert begun.after(100).times() == "2 min 41 s so far, about 50 s left"
    assert "0 of 9 points   fetching" in cards.progress(Progress(0, 9, "fetching"))


def test_a_table_of_verdicts_says_when_a_row_counts():
    judged = pd.DataFrame({"ratio": [0.5], "p": [0.001], "verdict": ["faster"]})
    for frame, told in ((judged, True), (judged.drop(columns="p"), False)):
        shown = cards.table(frame)
        assert [cards.RULE in text for text in (shown.data, shown.on_page, repr(shown))] == [told] * 3
