"""Every lab as it is declared: its profiles, its plan, its questions, the published rows it shows,
its recorded run."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from labkit.lab import wording
from labkit.lab.facts import Comparison, Note
from labkit.lab.metric import Results
from labkit.lab.project import checkout, notebook_path, recorded_directory, reference_directory
from labkit.lab.runs.store import Run
from labkit.lab.units import column
from labkit.lab.wording import headline
from labkit.machine.description import describe_machine
from labkit.studies import LABS, load_lab
from tests import small_steps  # noqa: F401

RECORDED = sorted(recorded_directory().glob("*/*.jsonl"))
READERS = ("labkit", "notebooks", "benchmarks")
MAX_WORDS = 25
MAX_NUMBERS = 3
WORD = re.compile(r"\w+")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COLUMN = re.compile(r"[a-z]+(_[a-z0-9]+)*_(s|bytes|flops|per_s|over_[a-z]+)")
NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")


@pytest.mark.parametrize("lab", LABS)
def test_profiles_are_valid_and_plan_points(lab):
    declared = load_lab(lab)
    machine = describe_machine()
    for profile, config in declared.profiles.items():
        assert type(config).model_validate(config.model_dump()) == config, profile
        assert declared.plan(config, machine), profile


@pytest.mark.parametrize("lab", LABS)
def test_questions_have_ids_that_fit_a_link_and_end_with_a_question_mark(lab):
    questions = load_lab(lab).questions
    assert 1 <= len(questions) <= 8
    assert len({question.id for question in questions}) == len(questions)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", question.id) for question in questions)
    assert all(question.text.endswith("?") for question in questions)


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize(
    "columns", [(), ("sweep", "seconds", "status", "rank", "repeat", "world_size")]
)
def test_a_run_without_rows_answers_nothing_and_says_why(lab, columns):
    notes = (Note("skipped", "needs 51 GiB", points=2),)
    results = Results(pd.DataFrame(columns=list(columns)), missing=notes)
    answers = load_lab(lab).answers(results)
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    for question, answer in answers.items():
        assert answer.notes == notes
        reason = answer.reason or notes[0].reason
        assert headline(answer) == f"Not measured: {reason.removesuffix('.')}."
        needs = load_lab(lab).question(question).needs_calibration
        # The real reason alone, and once.
        assert (reason == notes[0].reason) is not needs
        assert len(wording.notes(answer)) == needs


def test_every_published_measurement_is_shown():
    """By a lab, a notebook, or a script that names its table."""
    sources = [
        path
        for folder in READERS
        for path in (checkout() / folder).rglob("*")
        if path.suffix in (".py", ".ipynb")
    ]
    text = "".join(path.read_text() for path in sources).replace('\\"', '"')
    assert [
        path.stem for path in reference_directory().glob("*.csv") if not _is_read(path.stem, text)
    ] == []


def _is_read(name: str, text: str) -> bool:
    """Whether the text has the name in quotes, or as `allreduce_ring_vs_{name}`."""
    parts = name.rpartition("_")
    return f'"{name}' in text or f'"{parts[0]}_{{name}}"' in text


def test_every_lab_has_a_recorded_run():
    assert {path.parent.name for path in RECORDED} == set(LABS)


@cache
def _answers(path: Path):
    run = Run.load(path)
    return run, load_lab(run.header.lab).answers(run.results())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_recorded_run_is_complete_and_answers_its_questions(path):
    run, answers = _answers(path)
    assert run.header.lab == path.parent.name
    assert run.pending == []
    not_measured = [answer for answer in answers.values() if answer.verdict == "not measured"]
    assert len(not_measured) <= 1
    assert all(answer.reason or answer.notes for answer in not_measured)
    for answer in answers.values():
        check_headline(headline(answer))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_text_names_columns_as_the_table_beside_it_does(path):
    run, answers = _answers(path)
    tables = {id: one.table for id, one in answers.items() if one.table is not None}
    names = set(run.frame()).union(*tables.values())
    cells = nbformat.read(notebook_path(run.header.lab), as_version=4).cells
    code = " ".join(cell.source for cell in cells if cell.cell_type == "code")
    # Parameters and what a cell of code says are written as they are.
    spelled = {*type(load_lab(run.header.lab).profiles["quick"]).model_fields, *WORD.findall(code)}
    shown = set()
    for cell in cells:
        if cell.cell_type == "code":
            question = re.search(r'lab\.answer\("(\w+)"\)', cell.source)
            if question and question[1] in tables:
                shown = {column(name).title for name in tables[question[1]]}
            continue
        for span in SPAN.findall(cell.source):
            is_column = span in names or COLUMN.fullmatch(span)
            assert not is_column or span in spelled | shown, (span, shown)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_an_undecided_comparison_has_a_short_headline(path):
    """On a busy machine: with the words that a recorded run may not need."""
    for answer in _answers(path)[1].values():
        if isinstance(answer, Comparison):
            subject = answer.subject if answer.n_alternatives == 1 else None
            is_open = replace(answer, verdict="undecided", subject=subject, seconds_more=1200.0)
            check_headline(headline(is_open))


def check_headline(headline):
    """One sentence, short enough to be read."""
    assert len(headline.split()) <= MAX_WORDS, headline
    assert len(NUMBER.findall(headline)) <= MAX_NUMBERS, headline
    assert headline.endswith("."), headline
