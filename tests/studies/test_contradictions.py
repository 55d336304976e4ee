"""No answer of a report says the opposite of another: over all recorded runs, by their fields."""

from dataclasses import replace

import pytest

from labkit.lab.answers import TOPICS
from labkit.lab.facts import Comparison
from labkit.studies import LABS, load_lab
from tests.studies.simulated import recorded_run


def compared(question, results, answer):
    """Names of all alternatives in the table of an answer."""
    column = question.metric.compare
    return {question._name(name, results): rows for name, rows in answer.table.groupby(column)}


def claims(question, results, answer):
    """Pairs (better, worse) that an answer states for all configurations, and pairs of which the
    first is at least as good: the best one that is named, and each of the others."""
    names = compared(question, results, answer)
    baseline = answer.baseline
    if answer.verdict == "yes":
        others = set(names) - {answer.subject, *(name for name, _ in answer.overtaken)}
        return {(answer.subject, baseline)}, {(answer.subject, name) for name in others}
    if answer.verdict == "no":
        worse = {name for name, rows in names.items() if (rows["verdict"] == "slower").all()}
        return {(baseline, name) for name in worse}, set()
    return set(), set()


def contradictions(asked, results):
    """Pairs that one answer states and another one denies, of the same quantity."""
    stated = {}
    found = []
    for question, answer in asked:
        if isinstance(answer, Comparison):
            better, at_least = claims(question, results, answer)
            stated.setdefault(answer.quantity, []).append((question.id, better, at_least))
    for quantity, by_question in stated.items():
        for one, better, _ in by_question:
            for other, opposite, at_least in by_question:
                denied = {(worse, good) for good, worse in better}
                found += [(quantity, one, other, pair) for pair in denied & (opposite | at_least)]
    return found


def answered(lab):
    study = load_lab(lab)
    results = recorded_run(lab).results()
    return [(one, one.answer(results)) for one in study.questions], results


@pytest.mark.parametrize("lab", LABS)
def test_no_answer_of_a_lab_denies_another(lab):
    assert not contradictions(*answered(lab))


def test_a_denial_is_found():
    asked, results = answered("model_parallel")
    by_id = {question.id: (question, answer) for question, answer in asked}
    question, answer = by_id["transport"]
    assert answer.verdict == "yes"
    swapped = replace(answer, subject=answer.baseline, baseline=answer.subject)
    assert contradictions([(question, answer), (question, swapped)], results)


def test_labs_do_not_advise_to_change_and_to_keep_in_one_topic():
    kinds = {topic: set() for topic in TOPICS}
    for lab in LABS:
        for question, answer in answered(lab)[0]:
            if isinstance(answer, Comparison) and answer.advice and question.topic:
                kinds[question.topic].add("keep" if answer.advice == question.keep else "change")
    assert any(kinds.values())
    assert all(len(kind) <= 1 for kind in kinds.values()), kinds
