"""Published trends: a claim from other hardware, and whether it holds in a run from here."""

from collections.abc import Sequence

from labkit.lab.answers import Answer, Outcome, Question, Trend, Verdict
from labkit.lab.units import counted

__all__ = ["Outcome", "Trend", "trends_answer", "trends_verdict"]


def trends_verdict(trends: Sequence[Trend]) -> Verdict:
    """Whether the published trends hold: all, none, some, or not shown either way."""
    outcomes = {trend.outcome for trend in trends}
    if outcomes == {"holds here"}:
        return "yes"
    if outcomes == {"is not shown here"}:
        return "not shown"
    return "mixed" if "holds here" in outcomes else "no"


def _counted(trends: Sequence[Trend]) -> str:
    """How many hold, are contradicted and are left open: what a reader wants to know first."""
    holding, contradicted, opened = (
        sum(trend.outcome == outcome for trend in trends)
        for outcome in ("holds here", "is contradicted here", "is not shown here")
    )
    claims = counted(len(trends), "published claim")
    return f"Of {claims}, this run confirms {holding}, contradicts {contradicted} and leaves {opened} open."


def trends_answer(
    question: Question, found: Sequence[Trend], figure: str | None = None, more_figures: tuple[str, ...] = ()
) -> Answer | None:
    """The answer that tells each trend and its outcome; None if the run has the rows to check none of them."""
    if not found:
        return None
    text = " ".join([_counted(found), *map(str, found)])
    return Answer(question, trends_verdict(found), text, figure, more_figures=more_figures, trends=tuple(found))
