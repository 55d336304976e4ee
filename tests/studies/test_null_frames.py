"""Null frames: a lab's own points and columns, in which no alternative differs and predictions
hold, but for noise."""

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from labkit.lab.answers import Check, Compare
from labkit.lab.metric import Results
from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab

NOISE = 0.1
SEEDS = 100
MOST_CLAIMS = 0.05
NOISE_OF_MEDIANS = 1.25 * NOISE / 6**0.5  # of six rounds
NO_CLAIM = {Compare: {"no clear difference", "undecided"}, Check: {"yes"}}


def answer_null(question, run, rows, seed):
    """The answer of a question to one null frame: of measured times, or of measured beside
    predicted values."""
    rng = np.random.default_rng(seed)
    if isinstance(question, Compare):
        value = question.metric.value
        return question.answer(
            Results(rows.assign(**{value: np.exp(rng.normal(0, NOISE, len(rows)))}))
        )
    measured = rows[question.predicted].astype(float) * np.exp(
        rng.normal(0, NOISE_OF_MEDIANS, len(rows))
    )
    return replace(question, table=lambda _: rows.assign(**{question.measured: measured})).answer(
        run.results()
    )


def rows_of(question, run):
    """Rows whose values are replaced; none of a report, of a count without noise, or where nothing
    was measured."""
    if isinstance(question, Compare) and not question.metric.exact:
        frame = run.frame()
        metric = question.metric
        rows = frame.dropna(subset=metric.value) if metric.value in frame else frame.iloc[:0]
        for column, wanted in metric.where.items():
            rows = rows[rows[column].isin(wanted if isinstance(wanted, tuple) else (wanted,))]
        return rows if (rows.get(metric.compare) == question.baseline).any() else rows.iloc[:0]
    if isinstance(question, Check) and question.within > 1 + 2 * NOISE:
        return question.table(run.results()).dropna(subset=[question.predicted])
    return pd.DataFrame()


@cache
def null_claims(lab):
    """By kind of question: (claims, answers)."""
    (path,) = (recorded_directory() / lab).glob("*.jsonl")
    run = Run.load(path)
    counts = {Compare: [0, 0], Check: [0, 0]}
    for question in load_lab(lab).questions:
        if len(rows := rows_of(question, run)):
            for seed in range(SEEDS):
                verdict = answer_null(question, run, rows, seed).verdict
                counts[type(question)][0] += verdict not in NO_CLAIM[type(question)]
                counts[type(question)][1] += 1
    return counts


def assert_few(claims, answers):
    """At most 5 %, beyond what chance makes of that once in a hundred times."""
    assert claims <= binom.ppf(0.99, answers, MOST_CLAIMS), f"{claims} of {answers}"


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_a_lab_claims_next_to_nothing_of_noise(lab):
    counts = null_claims(lab)
    print(lab, {kind.__name__: count for kind, count in counts.items()})
    assert_few(*map(sum, zip(*counts.values(), strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Compare, Check])
def test_questions_of_a_kind_claim_next_to_nothing_of_noise(kind):
    counts = [null_claims(lab)[kind] for lab in LABS]
    assert sum(answers for _, answers in counts)
    assert_few(*map(sum, zip(*counts, strict=True)))
