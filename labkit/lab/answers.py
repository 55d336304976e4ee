"""Answers: a question, a few sentences whose numbers come from the measured frame, a verdict, the evidence."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from labkit.lab.findings import TOPICS, Claim, Finding, Question

__all__ = ["TOPICS", "Question"]

Verdict = Literal["yes", "no", "mixed", "measured", "no difference shown", "not shown", "not measured"]
Outcome = Literal["holds here", "is contradicted here", "is not shown here"]

LONGEST_HEADLINE = 240  # characters: three lines below a figure
_SENTENCE_END = re.compile(r"(?<=[\w)%\]][.!?])\s+")


@dataclass(frozen=True)
class Trend:
    """A published claim and what this machine's intervals say of it."""

    claim: str
    outcome: Outcome

    @classmethod
    def judged(cls, claim: str, shown: Iterable[bool], contradicted: Iterable[bool]) -> "Trend":
        """The outcome over several settings: one that contradicts is enough, and all must show it to hold."""
        if any(contradicted):
            return cls(claim, "is contradicted here")
        cases = list(shown)
        return cls(claim, "holds here" if cases and all(cases) else "is not shown here")

    def __str__(self) -> str:
        return f"{self.claim}: {self.outcome.removeprefix('is ')}."


@dataclass(frozen=True)
class Answer:
    """One question, answered from one run.

    `verdict` is what the statistics allow: "yes"/"no"/"mixed" for a claim, "not shown" for published claims that
    are all left open, "measured" where the question asks for a number. `figure` names the figure that shows it,
    `more_figures` those that add to it; `recommendation` is what to do on this machine, `is_shown` whether intervals
    (or counts, which are exact) show that it is worth doing, and `evidence` the numbers behind it with their
    intervals. `trends` are the published claims it judges.
    """

    question: Question
    verdict: Verdict
    text: str
    figure: str | None = None
    recommendation: str | None = None
    is_shown: bool = False
    evidence: str | None = None
    more_figures: tuple[str, ...] = ()
    trends: tuple[Trend, ...] = ()

    @property
    def headline(self) -> str:
        """The first sentence, for the caption of a figure; a long one ends at a comma or semicolon, not in brackets."""
        first = _SENTENCE_END.split(self.text, maxsplit=1)[0]
        if len(first) <= LONGEST_HEADLINE:
            return first
        outside = _without_brackets(first)[:LONGEST_HEADLINE]
        clause = max(outside.rfind(mark, LONGEST_HEADLINE // 3) for mark in ("; ", ", "))
        return f"{first[: clause if clause > 0 else max(outside.rfind(' '), first.find(' '))]} …"


def _without_brackets(text: str) -> str:
    """The text with what stands in brackets blotted out: an interval is told whole or not at all."""
    depth, seen = 0, []
    for character in text:
        depth += character in "[("
        seen.append("_" if depth else character)
        depth -= character in "])" and depth > 0
    return "".join(seen)


Find = Callable[[pd.DataFrame], Answer | None]


def answer_each(
    finders: Mapping[Question, Find],
    frame: pd.DataFrame,
    coverage: pd.DataFrame,
    missing: str = "no row of this run holds what it needs",
) -> list[Answer]:
    """The answer each finder gives from the frame; where it gives None, what is `missing`, and the reasons."""
    return [find(frame) or not_measured(question, coverage, missing) for question, find in finders.items()]


def not_measured(question: Question, coverage: pd.DataFrame, missing: str) -> Answer:
    """The answer to a question whose data is missing: what is missing, and the recorded reasons why."""
    reasons = reasons_why(coverage)
    because = f" Reasons recorded: {'; '.join(reasons)}." if reasons else ""
    return Answer(question, "not measured", f"Not measured: {missing}.{because}")


def reasons_why(coverage: pd.DataFrame, most: int = 3) -> list[str]:
    """The distinct reasons of points that did not end `ok`, the most frequent first."""
    if "reason" not in coverage:
        return []
    counts = coverage.loc[coverage["status"] != "ok", "reason"].dropna().value_counts()
    shown = [f"{reason} ({count} points)" if count > 1 else str(reason) for reason, count in counts.items()]
    return shown[:most] + ([f"and {len(shown) - most} other reasons"] if len(shown) > most else [])


def check_complete(questions: Iterable[Question], answers: Iterable[Answer]) -> list[Answer]:
    """The answers in the order of the questions. ValueError if one is missing, double or of another lab."""
    wanted = [question.id for question in questions]
    given = list(answers)
    if sorted(wanted) != sorted(answer.question.id for answer in given):
        raise ValueError(f"expected one answer a question, {wanted}, got {[a.question.id for a in given]}")
    by_id = {answer.question.id: answer for answer in given}
    return [by_id[identifier] for identifier in wanted]


def as_findings(answers: Iterable[Answer]) -> dict[str, Finding]:
    """For labs that still give answers."""
    words = {"mixed": "it depends", "no difference shown": "no clear difference", "not shown": "undecided"}
    return {
        a.question.id: Finding(
            words.get(a.verdict, a.verdict),  # type: ignore[arg-type]
            a.headline,
            why=a.text.removeprefix(a.headline).strip() or None,
            advice=a.recommendation,
            significant=a.is_shown,
            claims=tuple(Claim(t.claim, t.outcome) for t in a.trends),
        )
        for a in answers
    }
