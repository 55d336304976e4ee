"""Published statements, and what a run from here says of them."""

from collections.abc import Iterable

import pandas as pd

from labkit.bench.statistics import judged
from labkit.lab.findings import Claim, Finding, Verdict
from labkit.lab.units import counted, span


def published(claims: Iterable[Claim | None]) -> Finding | None:
    """What a run says of published statements; None if it has the rows to check none of them."""
    checked = [claim for claim in claims if claim is not None]
    if not checked:
        return None
    holding = sum(claim.outcome == "holds here" for claim in checked)
    contradicted = [claim.text for claim in checked if claim.outcome == "is contradicted here"]
    verdict: Verdict = "it depends" if holding else "no" if contradicted else "undecided"
    if holding == len(checked):
        verdict = "yes"
    headline = f"{holding} of {counted(len(checked), 'published claim')} {'holds' if holding == 1 else 'hold'} here"
    others = "other is" if len(checked) - holding == 1 else "others are"
    headline += f"; the {others} open." if not contradicted and holding < len(checked) else "."
    if verdict == "undecided":
        headline = "No published claim can be confirmed or contradicted here."
    rows = [
        {"published": claim.text, "here": claim.outcome.removeprefix("is "), "seen": claim.seen} for claim in checked
    ]
    caveat = f"Contradicted here: {'; '.join(contradicted)}." if contradicted else None
    return Finding(verdict, headline, pd.DataFrame(rows), caveat, claims=tuple(checked))


def claim(text: str, ratios: pd.DataFrame, expects: str) -> Claim | None:
    """A published statement that every ratio is `expects`, "faster" or "slower"; None without ratios."""
    if ratios.empty:
        return None
    verdicts = judged(ratios)["verdict"]
    opposite = {"faster": "slower", "slower": "faster"}[expects]
    return judged_claim(text, verdicts == expects, verdicts == opposite, f"{span(ratios['ratio'])} times")


def judged_claim(text: str, shown: Iterable[bool], contradicted: Iterable[bool], seen: str = "") -> Claim | None:
    """The outcome over several settings: one that contradicts is enough, and all must show it to hold; None of none."""
    cases = list(shown)
    if any(contradicted):
        return Claim(text, "is contradicted here", seen)
    return Claim(text, "holds here" if all(cases) else "is not shown here", seen) if cases else None
