"""Published statements, and what a run from here says of them: all of a lab's are judged together."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, beyond_p, is_significant
from labkit.lab.findings import Claim, Finding, Outcome, Verdict
from labkit.lab.units import counted, span

HOLDS: Outcome = "holds here"
CONTRADICTED: Outcome = "is contradicted here"
IN_SOME: Outcome = "is contradicted in some settings"
OPEN: Outcome = "is not shown here"
RELEVANT = 1 + MIN_RELEVANT_DIFFERENCE


@dataclass(frozen=True)
class Trend:
    """A published statement on ratios, which is judged with the others.

    Rows `against` contradict it where their `p`, (rows,), is significant; rows that show it, `holds`, need that as well
    unless whole intervals do (`by_interval`).
    """

    text: str
    seen: str
    where_equal: Outcome | None
    p: np.ndarray
    holds: np.ndarray
    against: np.ndarray
    by_interval: bool = False

    def with_verdicts(self, significant: np.ndarray) -> Claim:
        """With which of its rows are significant beside those of all statements."""
        shown = self.holds & (significant | self.by_interval)
        return Claim(self.text, _outcome(shown, self.against, significant), self.seen, self.where_equal)


def _outcome(holds: np.ndarray, against: np.ndarray, significant: np.ndarray | bool = True) -> Outcome:
    """Of a statement on all settings: one shown against it contradicts it, as a whole if all are against it."""
    if (against & significant).any():
        return CONTRADICTED if against.all() else IN_SOME
    return HOLDS if holds.all() else OPEN


def published(claims: Iterable[Claim | Trend | None]) -> Finding | None:
    """What a run says of published statements; None if it has the rows to check none of them."""
    stated = [claim for claim in claims if claim is not None]
    if not stated:
        return None
    trends = [claim for claim in stated if isinstance(claim, Trend)]
    p = np.concatenate([np.empty(0), *(trend.p for trend in trends)])
    significant = is_significant(np.where(p > 0, p, np.nan)) | (p == 0)  # counts are certain, and tell nothing of noise
    parts = iter(np.split(significant, np.cumsum([len(trend.p) for trend in trends])[:-1]))
    checked = [claim.with_verdicts(next(parts)) if isinstance(claim, Trend) else claim for claim in stated]
    holding = sum(claim.outcome == HOLDS for claim in checked)
    texts = {which: [claim.text for claim in checked if claim.outcome == which] for which in get_args(Outcome)}
    told = [f"{which.removeprefix('is ')}: {'; '.join(some)}" for which, some in texts.items() if some]
    is_against = bool(texts[CONTRADICTED] or texts[IN_SOME])
    verdict: Verdict = "it depends" if holding or texts[IN_SOME] else "no" if is_against else "undecided"
    if holding == len(checked):
        verdict = "yes"
    headline = f"{holding} of {counted(len(checked), 'published claim')} {'holds' if holding == 1 else 'hold'} here"
    others = "other is" if len(checked) - holding == 1 else "others are"
    headline += f"; the {others} open." if not is_against and holding < len(checked) else "."
    if verdict == "undecided":
        headline = "No published claim can be confirmed or contradicted here."
    rows = [
        {"published": claim.text, "here": claim.outcome.removeprefix("is "), "seen": claim.seen} for claim in checked
    ]
    return Finding(verdict, headline, pd.DataFrame(rows), claims=tuple(checked), where=" · ".join(told))


def claim(text: str, ratios: pd.DataFrame, expects: str) -> Trend | None:
    """A published statement that every ratio is `expects`, "faster" or "slower"; None without ratios."""
    if ratios.empty:
        return None
    ratio, p = (ratios[name].to_numpy(dtype=float) for name in ("ratio", "p"))
    sides = {"faster": ratio <= 1 / RELEVANT, "slower": ratio >= RELEVANT}
    opposite = {"faster": "slower", "slower": "faster"}[expects]
    return Trend(text, _times(ratios), OPEN, p, sides[expects], sides[opposite])


def lies_within(
    text: str,
    table: pd.DataFrame,
    least: float = 0.0,
    most: float = math.inf,
    *,
    seen: str | None = None,
    equal: float | None = 1.0,
    if_shown: bool = True,
) -> Trend | None:
    """A published statement that every `ratio`, with its interval `low` and `high`, is between `least` and `most`.

    It holds if whole intervals lie there, and is contradicted by a ratio that is significantly outside. None without
    any. `equal`: the ratio where nothing differs, if that is known. `if_shown`: what must be so besides to hold.
    """
    if table.empty:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value, low, high = (np.log(table[name].to_numpy(dtype=float)) for name in ("ratio", "low", "high"))
        bounds = np.log([least, most])
    p = beyond_p(value, low, high, *bounds)
    is_within = (low >= bounds[0]) & (high <= bounds[1])
    where_equal = None if equal is None else HOLDS if least < equal < most else CONTRADICTED
    if equal in (least, most):
        where_equal = OPEN
    told = _times(table) if seen is None else seen
    return Trend(text, told, where_equal, p, is_within & if_shown, p < 1, by_interval=True)


def quotients(table: pd.DataFrame, below: pd.DataFrame, value: str = "seconds") -> pd.DataFrame:
    """Medians over others that were measured apart, row by row: `ratio`, `low`, `high` by the ends of both."""
    pairs = {"ratio": (value, value), "low": ("low", "high"), "high": ("high", "low")}
    return pd.DataFrame({name: table[of] / below[by] for name, (of, by) in pairs.items()}).astype(float)


def exact(text: str, holds: Iterable[bool], contradicted: Iterable[bool], seen: str = "") -> Claim | None:
    """Of counts, in which no noise is; None of none."""
    cases, against = (np.array(list(which), dtype=bool) for which in (holds, contradicted))
    return Claim(text, _outcome(cases, against), seen) if cases.size or against.any() else None


def _times(table: pd.DataFrame) -> str:
    return f"{span(table['ratio'])} times"
