"""What holds for the findings of every lab: on a run without rows, on its recorded runs, and of the words in them.

And of those runs, which come with labkit: each can be read, answers its lab's questions, and has its figures.
"""

from functools import cache

import pandas as pd
import pytest

from labkit.lab.project import checkout, recorded_directory
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab
from tests.studies.answering import check_headline

RECORDED = sorted(recorded_directory().glob("*/*.jsonl"))
RUNS = pytest.mark.parametrize("path", RECORDED, ids=str)


@cache
def _recorded(path):
    run = Run.load(path)
    return run, load_lab(run.header.lab).findings(run.frame(), run.coverage(), run.header.calibration)


@pytest.mark.parametrize("lab", LABS)
@pytest.mark.parametrize("columns", [(), ("sweep", "seconds", "check", "rank", "repeat", "world_size")])
def test_a_run_without_rows_answers_nothing_and_says_why(lab, columns):
    coverage = pd.DataFrame({"status": ["skipped"] * 2, "reason": ["needs 51 GiB"] * 2})
    findings = load_lab(lab).findings(pd.DataFrame(columns=list(columns)), coverage)
    assert {finding.verdict for finding in findings.values()} == {"not measured"}
    assert all("needs 51 GiB (2 points)" in finding.caveat for finding in findings.values())


def test_every_lab_has_a_recorded_run():
    assert {path.parent.name for path in RECORDED} >= set(LABS)


@RUNS
def test_a_recorded_run_is_complete_and_answers_questions(path):
    run, findings = _recorded(path)
    assert run.header.lab == path.parent.name
    assert run.pending == []
    assert all(source and source.commit and not source.dirty for source in run.sources), (
        "its commit is not the source that measured it"
    )
    assert sum(finding.verdict == "not measured" for finding in findings.values()) <= 1
    assert list((checkout() / "figures" / path.parent.name / path.stem).glob("*.png"))


@RUNS
def test_a_headline_is_one_short_sentence(path):
    for finding in _recorded(path)[1].values():
        check_headline(finding.headline)


@RUNS
def test_verdict_marks_and_advice_agree(path):
    for identifier, finding in _recorded(path)[1].items():
        marks = {effect.verdict for effect in finding.effects}
        if not marks:
            continue
        assert marks & {"faster", "slower"} or finding.verdict in ("no clear difference", "undecided"), identifier
        assert "faster" in marks or finding.verdict not in ("yes", "it depends"), identifier
        assert finding.significant == bool(marks & {"faster", "slower"}), identifier


def test_no_two_findings_of_one_report_contradict_each_other():
    said = {}
    for path in RECORDED:
        for identifier, finding in _recorded(path)[1].items():
            for effect in finding.effects:
                key = (effect.subject, effect.baseline, effect.setting, effect.quantity)
                said.setdefault(key, {}).setdefault(effect.verdict, f"{path.parent.name}: {identifier}")
    assert [key for key, verdicts in said.items() if {"faster", "slower"} <= verdicts.keys()] == []


@RUNS
def test_every_effect_of_a_finding_says_what_it_is_of(path):
    for identifier, finding in _recorded(path)[1].items():
        said = [(effect.subject, effect.baseline, effect.setting, effect.quantity) for effect in finding.effects]
        assert len(said) == len(set(said)), identifier
