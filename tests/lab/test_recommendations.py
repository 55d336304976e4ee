"""What the index recommends: every topic has a line, and none claims what its answers do not show."""

from dataclasses import asdict, replace

import pytest

from labkit.lab.claims import published
from labkit.lab.findings import TOPICS, Claim, Effect, Finding, Question
from labkit.lab.pages.export import OTHER_FORMAT
from labkit.lab.pages.recommendations import further_advice, published_trends, recommendations
from labkit.studies import LABS, load_lab
from tests.lab.fake_study import FakeStudy

ASKED = Question("which", "Which is faster?", "precision")
FREE = Question("else", "What else?")
SHOWN = Finding("yes", "It is.", caveat="not for float16.", advice="use bf16.", significant=True)


class AskedStudy(FakeStudy):
    questions = (ASKED, FREE)


def _lab(*findings, question=ASKED, elsewhere=False, error=None):
    answers = [{"question": asdict(question)} | finding.record() for finding in findings]
    record = {"elsewhere": elsewhere, "machine": "another", "answers": answers}
    about = {"name": "fake", "title": "Fake", "page": "fake.html", "is_other_format": error == OTHER_FORMAT}
    return about | {"error": error, "record": record if findings else None}


def _advice(*findings, **options):
    (topic,) = recommendations([AskedStudy()], {"fake": _lab(*findings, **options)})
    (advice,) = topic.advice
    return advice


def test_what_is_shown_is_recommended_with_a_link():
    advice = _advice(SHOWN)
    assert (advice.status, advice.text) == ("shown", "use bf16.")
    assert advice.href == "fake.html#answer-which"


def test_a_recommendation_tells_the_gain_that_it_rests_on():
    effect = Effect("a", "b", "here", "time", 0.5, 0.45, 0.55, "faster")
    assert _advice(replace(SHOWN, effects=(effect,), lead=effect)).gain == "2.0× faster"
    slower = replace(effect, ratio=2.0, low=1.9, high=2.1, verdict="slower")
    assert _advice(replace(SHOWN, effects=(slower,), lead=slower)).gain == _advice(SHOWN).gain == ""


def test_what_is_counted_or_predicted_is_recommended():
    assert _advice(replace(SHOWN, verdict="predicted", significant=False)).status == "shown"


def test_what_does_not_matter_is_not_shown_here_and_says_why():
    advice = _advice(replace(SHOWN, significant=False, advice="stay."))
    assert (advice.status, advice.text) == ("not shown here", "stay.")
    advice = _advice(replace(SHOWN, advice=None, headline="It is 0.99."))
    assert advice.status == "not shown here"
    assert advice.text.endswith("It is 0.99.")


def test_what_was_not_measured_says_why():
    advice = _advice(Finding("not measured", "Not measured: needs a GPU."))
    assert (advice.status, advice.text) == ("not measured", "needs a GPU.")
    assert _advice(SHOWN, elsewhere=True).text == "the page is of another machine, another."
    assert _advice(SHOWN, elsewhere=True).status == "not measured here"
    assert "failed" in _advice(error="broken").text
    assert _advice(error=OTHER_FORMAT).text == f"{OTHER_FORMAT}."
    (topic,) = recommendations([AskedStudy()], {})
    assert topic.advice[0].text == "the lab fake was not run."


def test_advice_without_a_topic_is_listed_apart():
    free = Finding("yes", "It is.", advice="do it.", significant=True)
    assert [advice.text for advice in further_advice([_lab(SHOWN), _lab(free, question=FREE)])] == ["do it."]
    assert further_advice([_lab(free, question=FREE, elsewhere=True)]) == []
    unsure = replace(free, significant=False)
    listed = further_advice([_lab(free, unsure, question=FREE)])
    assert [advice.status for advice in listed] == ["shown", "not shown here"]


def test_published_claims_are_listed_by_what_is_shown_of_them():
    found = [Claim("A grows", "holds here"), Claim("B falls", "is contradicted here"), Claim("C", "is not shown here")]
    finding = published([*found, None])
    listed = published_trends([_lab(finding), _lab(finding, elsewhere=True)])
    assert {outcome: [claim["text"] for claim in claims] for outcome, claims in listed.items()} == {
        "holds here": ["A grows"],
        "is contradicted here": ["B falls"],
        "is contradicted in some settings": [],
        "is not shown here": ["C"],
    }


def test_every_topic_is_asked_for_by_a_lab():
    asked = {question.topic for lab in LABS for question in load_lab(lab).questions}
    assert asked - {None} == set(TOPICS)


def test_an_unknown_topic_is_refused():
    with pytest.raises(ValueError, match="expected a topic among"):
        Question("which", "Which?", "prezision")
