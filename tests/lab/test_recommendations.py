"""What the index recommends: every topic has a line, and none claims what its answers do not show."""

from dataclasses import replace

import pytest

from labkit.lab.answers import TOPICS, Answer, Question, Trend
from labkit.lab.pages.cards import answer_record
from labkit.lab.pages.export import OTHER_FORMAT
from labkit.lab.pages.recommendations import further_advice, published_trends, recommendations
from labkit.lab.trends import trends_answer
from labkit.studies import LABS, load_study
from tests.lab.fake_study import FakeStudy

ASKED = Question("which", "Which is faster?", "precision")
FREE = Question("else", "What else?")
SHOWN = Answer(ASKED, "yes", "It is.", None, "use bf16.", True, "nano: 0.50 [0.48, 0.52]")


class AskedStudy(FakeStudy):
    questions = (ASKED, FREE)


def _lab(*answers, elsewhere=False, error=None):
    record = {"elsewhere": elsewhere, "machine": "another", "answers": [answer_record(answer) for answer in answers]}
    about = {"name": "fake", "title": "Fake", "page": "fake.html", "is_other_format": error == OTHER_FORMAT}
    return about | {"error": error, "record": record if answers else None}


def _advice(*answers, **options):
    (topic,) = recommendations([AskedStudy()], {"fake": _lab(*answers, **options)})
    (advice,) = topic.advice
    return advice


def test_what_is_shown_is_recommended_with_its_interval_and_a_link():
    advice = _advice(SHOWN)
    assert (advice.status, advice.text) == ("shown", "use bf16.")
    assert advice.evidence == "nano: 0.50 [0.48, 0.52]"
    assert advice.href == "fake.html#answer-which"


def test_what_does_not_matter_is_not_shown_here_and_says_why():
    advice = _advice(replace(SHOWN, is_shown=False, recommendation="no difference is shown: stay."))
    assert (advice.status, advice.text) == ("not shown here", "no difference is shown: stay.")
    advice = _advice(replace(SHOWN, recommendation=None, text="It is 0.99. More."))
    assert advice.status == "not shown here"
    assert advice.text.endswith("It is 0.99.")


def test_what_was_not_measured_says_why():
    advice = _advice(Answer(ASKED, "not measured", "Not measured: needs a GPU."))
    assert (advice.status, advice.text) == ("not measured", "needs a GPU.")
    assert _advice(SHOWN, elsewhere=True).text == "the page is of another machine, another."
    assert _advice(SHOWN, elsewhere=True).status == "not measured here"
    assert "failed" in _advice(error="broken").text
    assert _advice(error=OTHER_FORMAT).text == f"{OTHER_FORMAT}."
    (topic,) = recommendations([AskedStudy()], {})
    assert topic.advice[0].text == "the lab fake was not run."


def test_advice_without_a_topic_is_listed_apart():
    free = Answer(FREE, "yes", "It is.", None, "do it.", True)
    assert [advice.text for advice in further_advice([_lab(SHOWN, free)])] == ["do it."]
    assert further_advice([_lab(free, elsewhere=True)]) == []
    unsure = replace(free, is_shown=False)
    assert [advice.status for advice in further_advice([_lab(free, unsure)])] == ["shown", "not shown here"]


def test_published_claims_are_listed_by_what_is_shown_of_them():
    found = [Trend("A grows", "holds here"), Trend("B falls", "is contradicted here"), Trend("C", "is not shown here")]
    answer = trends_answer(FREE, found)
    listed = published_trends([_lab(answer), _lab(answer, elsewhere=True)])
    assert {outcome: [claim["claim"] for claim in claims] for outcome, claims in listed.items()} == {
        "holds here": ["A grows"],
        "is contradicted here": ["B falls"],
        "is not shown here": ["C"],
    }
    assert answer.text.startswith("Of 3 published claims, this run confirms 1, contradicts 1 and leaves 1 open. A")
    assert trends_answer(FREE, []) is None


def test_every_topic_is_asked_for_by_a_lab():
    asked = {question.topic for lab in LABS for question in load_study(lab).questions}
    assert asked - {None} == set(TOPICS)


def test_an_unknown_topic_is_refused():
    with pytest.raises(ValueError, match="expected a topic among"):
        Question("which", "Which?", "prezision")
