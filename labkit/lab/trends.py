"""Published trends: a claim from other hardware, and whether it holds in a run from here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.lab.answers import Verdict

Outcome = Literal["holds here", "is contradicted here", "is not shown here"]


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
        return f"{self.claim}: {self.outcome}."


def trends_verdict(trends: Sequence[Trend]) -> Verdict:
    """Whether the published trends hold: all, none, some, or not shown either way."""
    outcomes = {trend.outcome for trend in trends}
    if outcomes == {"holds here"}:
        return "yes"
    if outcomes == {"is not shown here"}:
        return "no difference shown"
    return "mixed" if "holds here" in outcomes else "no"
