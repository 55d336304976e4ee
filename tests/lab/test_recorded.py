"""Runs that come with labkit: each can be read, answers its lab's questions, and has the figures drawn from it."""

import pytest

from labkit.lab.project import figures_directory, recorded_directory
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_study

RECORDED = sorted(recorded_directory().glob("*/*.jsonl"))


def test_every_lab_has_one():
    assert {path.parent.name for path in RECORDED} >= set(LABS)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recorded_run_is_complete_and_answers_questions(path):
    run = Run.load(path)
    assert run.header.lab == path.parent.name
    assert run.pending == []
    assert all(source and source.commit and not source.dirty for source in run.sources), (
        "its commit is not the source that measured it"
    )
    findings = load_study(run.header.lab).findings(run.frame(), run.coverage(), run.header.calibration)
    assert sum(finding.verdict == "not measured" for finding in findings.values()) <= 1
    assert list((figures_directory() / path.parent.name / path.stem).glob("*.png"))
