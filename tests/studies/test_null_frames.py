"""Simulated runs of each lab: in which nothing differs and predictions hold, but for noise; and in
which every alternative gains 10%."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom

from labkit.lab.answers import Check, Compare
from labkit.lab.compare import verdict_outcome
from labkit.studies import LABS, load_lab
from tests.pages.cells import recorded
from tests.studies.simulated import series_of, simulate

NOISE = 0.1
SEEDS = 40
MAX_CLAIMS = 0.025
NOISE_OF_MEDIANS = 1.25 * NOISE / 6**0.5  # of six rounds
NO_CLAIM = {Compare: {"no clear difference", "undecided"}, Check: {"yes"}}
GAIN = 0.1
MIN_AGREEMENT = 0.9
MIN_DECIDED = 2 / 3
MIN_POWER = 0.7
N_POWERFUL = 20
"""Comparisons that must have this power; the others have one noisy pair, or were not recorded."""

pytestmark = pytest.mark.slow


def recorded_labs():
    return [lab for lab in LABS if lab != "your_training"]


def check_null(question, run, rows, seed):
    """Answer a check of a run whose measured values are the predicted ones, but for noise."""
    rng = np.random.default_rng(seed)
    noise = np.exp(rng.normal(0, NOISE_OF_MEDIANS, len(rows)))
    measured = rows[question.predicted].astype(float) * noise
    table = rows.assign(**{question.measured: measured})
    return replace(question, table=lambda _: table).answer(run.results())


@cache
def null_claims(lab):
    """By kind of question: (claims, answers)."""
    run = recorded(lab)
    counts = {Compare: [0, 0], Check: [0, 0]}
    for question in load_lab(lab).questions:
        verdicts = []
        if isinstance(question, Compare) and series_of(lab, question.id):
            for seed in range(SEEDS):
                verdicts += [simulate(lab, question, seed, spread=NOISE).verdict]
                verdicts += [simulate(lab, question, seed).verdict]
        elif isinstance(question, Check) and question.within > 1 + 2 * NOISE:
            rows = question.table(run.results()).dropna(subset=[question.predicted])
            if len(rows):
                verdicts = [check_null(question, run, rows, seed).verdict for seed in range(SEEDS)]
        if verdicts:
            counts[type(question)][0] += sum(v not in NO_CLAIM[type(question)] for v in verdicts)
            counts[type(question)][1] += len(verdicts)
    return counts


def assert_few(claims, answers):
    """At most 2.5%, beyond what chance makes of that once in a hundred times."""
    assert claims <= binom.ppf(0.99, answers, MAX_CLAIMS), f"{claims} of {answers}"


@pytest.mark.parametrize("lab", recorded_labs())
def test_a_lab_claims_next_to_nothing_of_noise(lab):
    counts = null_claims(lab)
    print(lab, {kind.__name__: count for kind, count in counts.items()})
    assert_few(*map(sum, zip(*counts.values(), strict=True)))


@pytest.mark.parametrize("kind", [Compare, Check])
def test_questions_of_a_kind_claim_next_to_nothing_of_noise(kind):
    counts = [null_claims(lab)[kind] for lab in recorded_labs()]
    assert sum(answers for _, answers in counts)
    assert_few(*map(sum, zip(*counts, strict=True)))


def test_a_gain_of_10_percent_is_shown_by_most_comparisons_in_the_time_of_quick():
    """With the recorded noise; counts have none."""
    powers = Counter()
    for lab in recorded_labs():
        for question in load_lab(lab).questions:
            if not isinstance(question, Compare):
                continue
            if question.metric.exact:
                powers[lab, question.id] = 1.0
            elif series_of(lab, question.id):
                answers = [simulate(lab, question, seed, gain=GAIN) for seed in range(SEEDS // 2)]
                shown = [one.is_better and one.direction == "better" for one in answers]
                powers[lab, question.id] = np.mean(shown)
    print(powers)
    assert sum(power >= MIN_POWER for power in powers.values()) >= N_POWERFUL


def test_two_reports_of_one_machine_agree_and_none_says_the_opposite():
    """With the recorded effects and noise, and other rounds."""
    pairs = []
    for lab in recorded_labs():
        for question in load_lab(lab).questions:
            if isinstance(question, Compare) and series_of(lab, question.id):
                verdicts = [simulate(lab, question, seed, gain=None).verdict for seed in range(6)]
                pairs += [
                    (verdict_outcome(*pair), lab, question.id, *pair)
                    for pair in zip(verdicts[::2], verdicts[1::2], strict=True)
                ]
    # What one of them leaves undecided, more rounds would decide: as in benchmarks/agreement.py.
    decided = [pair for pair in pairs if "undecided" not in pair]
    counts = Counter(outcome for outcome, *_ in decided)
    print(len(pairs), counts, [pair for pair in pairs if pair[0] != "agree"])
    assert not counts["opposite"]
    assert counts["agree"] >= MIN_AGREEMENT * len(decided)
    assert len(decided) >= MIN_DECIDED * len(pairs)
