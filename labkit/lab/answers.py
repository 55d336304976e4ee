"""Answers: a question, a few sentences whose numbers come from the measured frame, a verdict, the evidence."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pandas as pd

Verdict = Literal["yes", "no", "mixed", "measured", "no difference shown", "not measured"]


@dataclass(frozen=True)
class Question:
    """What a lab is asked. The id stays the same for ever; the text may be reworded."""

    id: str
    text: str


@dataclass(frozen=True)
class Answer:
    """One question, answered from one run.

    `verdict` is what the statistics allow: "yes"/"no"/"mixed" for a claim, "measured" where the question asks
    for a number. `figure` names the figure that shows it, `recommendation` what to do on this machine.
    """

    question: Question
    verdict: Verdict
    text: str
    figure: str | None = None
    recommendation: str | None = None


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
