"""No sentence of a report says the opposite of another: over all recorded runs, by fields, and on
the index as it is rendered, by topics."""

import re
from dataclasses import replace

import pytest

from labkit.lab.answers import TOPICS, Compare
from labkit.lab.facts import Comparison, Counts
from labkit.lab.pages import index
from labkit.lab.pages.record import PageRecord, answered_run
from labkit.lab.recommended import DEFAULT
from labkit.studies import LABS, load_lab
from tests.pages.cells import recorded

TOPIC_OF = {
    "attention.fastest": "attention",
    "attention.peak_memory": "attention",
    "training_step.compile": "compile",
    "precision.autocast_speed": "precision",
    "data_parallel.fastest": "wrapper",
    "data_parallel.memory": "wrapper",
    "data_parallel.bucket_size": "buckets",
    "data_parallel.accumulation": "accumulation",
    "sharding.peaks": "sharding",
    "sharding.time": "sharding",
    "sync_batchnorm.price": "batch norm",
    "sync_batchnorm.memory": "batch norm",
    "cifar100.sync_batchnorm": "batch norm",
    "cifar100.sync_batchnorm_time": "batch norm",
    "memory.checkpointing": "checkpointing",
    "memory.checkpointing_time": "checkpointing",
    "all_reduce.algorithms": "all-reduce",
    "all_reduce.transports": "transport",
    "all_reduce.scheduling": "scheduling",
    "model_parallel.transport": "transport",
    "model_parallel.width": "tensor parallelism",
    "context_parallel.length": "context parallelism",
    "context_parallel.memory": "context parallelism",
}
"""What questions are about: those of one topic have the same baseline, whatever it is called."""
FIELD_TOPICS = {
    "precision": "precision",
    "attention": "attention",
    "compiled": "compile",
    "wrapper": "wrapper",
}
"""What the fields of the combined configuration are about."""


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
    """Questions of a lab with the answers of its recorded run."""
    study = load_lab(lab)
    run, answers = answered_run(study, recorded(lab).path)
    asked = [(question, answers[question.id]) for question in study.questions]
    return asked, replace(run.results(), names=study.names)


def answers_of(lab):
    return answered_run(load_lab(lab), recorded(lab).path)[1]


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


@pytest.fixture
def rendered(tmp_path, monkeypatch):
    """Renders the index of all recorded runs as if this machine had measured them."""
    monkeypatch.setattr(index.Entry, "is_here", property(lambda entry: entry.run is not None))
    for lab in LABS:
        record = PageRecord(lab=lab, run=str(recorded(lab).path))
        (tmp_path / f"{lab}.json").write_text(record.model_dump_json())

    def render(**changed):
        """Its main part; `changed`: fields of the answer to whether the tuned step gains."""

        def answer(lab, file):
            run, answers = answered_run(lab, file)
            if lab.name == "tuned_step":
                answers = answers | {"gain": replace(answers["gain"], **changed)}
            return run, answers

        monkeypatch.setattr(index, "answered_run", answer)
        html = index.write_index(map(load_lab, LABS), tmp_path).read_text()
        return html[html.index("<main") : html.index("</main>")]

    return render


def shown_on(html):
    """Names of all questions whose answers an index says, "lab.question": with a link, or as the
    only line of a lab."""
    linked = re.findall(r'href="(\w+)\.html#answer-(\w+)"', html)
    lines = re.findall(r'<dt><a href="(\w+)\.html">', html)
    firsts = [(lab, load_lab(lab).questions[0].id) for lab in lines]
    return {".".join(pair) for pair in (*linked, *firsts)}


def recommended_on(html):
    """The question behind each recommendation of an index, by the title of its topic."""
    section = html.split('id="do-this"')[1].split("</section>")[0]
    topics = re.findall(r'<dt>([^<]*)</dt>.*?href="(\w+)\.html#answer-(\w+)"', section, re.DOTALL)
    return {title: f"{lab}.{question}" for title, lab, question in topics}


def stance(question, answer):
    """Whether an answer is for a change from the baseline or for keeping it; None for neither."""
    if answer.advice is not None:
        return "keep" if answer.advice == question.keep else "change"
    is_kept = answer.verdict == "no" and answer.direction == "worse"
    return {"yes": "change", "no": "keep" if is_kept else None}.get(answer.verdict)


def stances_on(html):
    """What an index is for: sets of stances by topic and kind of quantity."""
    stances = {}
    for name in shown_on(html):
        lab, question_id = name.split(".")
        question = load_lab(lab).question(question_id)
        answer = answers_of(lab)[question_id]
        if name in TOPIC_OF and isinstance(answer, Comparison):
            kind = "bytes" if answer.quantity.endswith("bytes") else answer.quantity
            key = TOPIC_OF[name], kind.replace("epoch_s", "seconds")
            stances.setdefault(key, set()).add(stance(question, answer))
    if "<pre" in html:  # the combined configuration, which is for all that it changes
        values = answers_of("tuned_step")["ingredients"].values
        for field, topic in FIELD_TOPICS.items():
            if values[field] != getattr(DEFAULT, field):
                stances.setdefault((topic, "seconds"), set()).add("change")
    return {key: found - {None} for key, found in stances.items()}


def test_every_question_with_a_recommendation_has_a_topic_here():
    for lab in LABS:
        for question in load_lab(lab).questions:
            if isinstance(question, Compare) and question.topic:
                assert f"{lab}.{question.id}" in TOPIC_OF


@pytest.mark.parametrize("verdict", ["yes", "no", "no clear difference", "undecided"])
def test_the_index_is_for_one_thing_in_each_topic(verdict, rendered):
    """Also if the joint gain is not shown: then all single recommendations stand."""
    changed = {"verdict": verdict}
    if verdict != "yes":
        direction = "worse" if verdict == "no" else None
        changed |= {"advice": None, "direction": direction, "low": 1.1, "high": 1.1, "effect": 1.1}
        changed |= {"counts": Counts(1, worse=verdict == "no")}
    html = rendered(**changed)
    stances = stances_on(html)
    assert {"change", "keep"} <= set().union(*stances.values())
    assert not [key for key, found in stances.items() if len(found) > 1]
    advised = set()
    for lab in LABS:
        asked, results = answered(lab)
        if load_lab(lab).example(results) is None:
            advised |= {TOPICS[one.topic] for one, answer in asked if one.topic and answer.advice}
    joint = {TOPICS[topic] for topic in index.COMBINED_TOPICS}
    assert advised & joint
    assert set(recommended_on(html)) == (advised - joint if verdict == "yes" else advised)
    assert ("<pre" in html) == (verdict == "yes")


def test_an_index_for_two_things_is_found(rendered, monkeypatch):
    html = rendered()
    monkeypatch.setitem(TOPIC_OF, "precision.autocast_speed", "batch norm")
    monkeypatch.setitem(TOPIC_OF, "sync_batchnorm.price", "precision")
    assert [key for key, found in stances_on(html).items() if len(found) > 1]


def test_labs_do_not_advise_to_change_and_to_keep_in_one_topic():
    kinds = {topic: set() for topic in TOPICS}
    for lab in LABS:
        for question, answer in answered(lab)[0]:
            if isinstance(answer, Comparison) and answer.advice and question.topic:
                kinds[question.topic].add(stance(question, answer))
    assert any(kinds.values())
    assert all(len(kind) <= 1 for kind in kinds.values()), kinds
