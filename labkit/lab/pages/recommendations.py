"""What a report recommends for its machine: a fixed list of topics, each with what the answers of its labs show.

A topic never falls silent: where no lab shows anything it reads "not shown here" with the reason, and where a lab was
not run it says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from labkit.lab.answers import Question
from labkit.lab.declaration import Lab
from labkit.lab.findings import TOPICS, Outcome
from labkit.lab.pages.entries import answers_here, href
from labkit.lab.pages.importance import size_of

Status = Literal["shown", "not shown here", "not measured here", "not measured"]


@dataclass(frozen=True)
class Advice:
    """What one question says on a topic, and where on which page that is.

    `lab` is the title of the lab that says it.
    """

    status: Status
    text: str
    lab: str
    href: str | None = None
    gain: str = ""
    """How much the difference is that it rests on: "up to 2.3× faster"."""


@dataclass(frozen=True)
class TopicAdvice:
    """A topic and what each of its questions says."""

    title: str
    advice: list[Advice]

    @property
    def is_settled(self) -> bool:
        """Whether all of it is shown."""
        return all(advice.status == "shown" for advice in self.advice)


def recommendations(studies: Iterable[Lab], labs: Mapping[str, Mapping[str, Any]]) -> list[TopicAdvice]:
    """Every topic in its fixed order. `labs` are the entries of the index by the name of their lab."""
    asked: dict[str, list[Advice]] = {topic: [] for topic in TOPICS}
    for study in studies:
        for question in study.questions:
            if question.topic is not None:
                asked[question.topic].append(_advice(study, question, labs.get(study.name)))
    return [TopicAdvice(TOPICS[topic], advice) for topic, advice in asked.items() if advice]


def _advice(study: Lab, question: Question, lab: Mapping[str, Any] | None) -> Advice:
    if lab is None:
        return Advice("not measured", f"the lab {study.name} was not run.", study.title)
    place, record = href(lab, question.id), lab["record"]
    if record is None:
        text = lab["error"] if lab["is_other_format"] else f"the lab {study.name} failed"
        return Advice("not measured", f"{text}.", study.title, lab["page"])
    if record["elsewhere"]:
        text = f"the page is of another machine, {record['machine']}."
        return Advice("not measured here", text, study.title, place)
    answer = next((answer for answer in record["answers"] if answer["question"]["id"] == question.id), None)
    if answer is None:
        return Advice("not measured", f"the page of {study.name} is older than this question.", study.title)
    if answer["verdict"] == "not measured":
        text = answer["headline"].removeprefix("Not measured: ")
        return Advice("not measured", text, study.title, place)
    text = answer["advice"] or answer["headline"]
    return Advice(_status(answer), text, study.title, place, _gain(answer))


def _status(answer: Mapping[str, Any]) -> Status:
    is_known = answer["significant"] or answer["verdict"] in ("counted", "predicted")
    return "shown" if answer["advice"] and is_known else "not shown here"


def _gain(answer: Mapping[str, Any]) -> str:
    """Nothing where the sentence quotes no number of its own."""
    told = size_of(answer)
    is_gain = answer["advice"] and told["factor"] and answer["lead"]["ratio"] < 1
    return f"{told['of']} {told['factor']} {told['words']}".strip() if is_gain else ""


def further_advice(labs: Iterable[Mapping[str, Any]]) -> list[Advice]:
    """Recommendations of questions that belong to no topic."""
    return [
        Advice(_status(answer), answer["advice"], lab["title"], href(lab, answer["question"]["id"]), _gain(answer))
        for lab, answer in answers_here(labs)
        if answer["advice"] and answer["question"]["topic"] is None
    ]


def published_trends(labs: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, str]]]:
    """Published claims by what this machine's runs say of them."""
    found: dict[str, list[dict[str, str]]] = {outcome: [] for outcome in get_args(Outcome)}
    for lab, answer in answers_here(labs):
        about = {"lab": lab["title"], "href": href(lab, answer["question"]["id"])}
        for claim in answer["claims"]:
            found[claim["outcome"]].append(claim | about)
    return found
