"""An answer as fields: what was compared or checked, and what was found, before anybody words it.

`labkit.lab.wording` turns these fields into sentences for pages, terminals and JSON. Nothing reads
a sentence back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pandas as pd

Verdict = Literal[
    "yes",
    "no",
    "it depends",
    "no clear difference",
    "undecided",
    "measured",
    "counted",
    "predicted",
    "not measured",
]
# How a row or a point ended. All but `ok` come with a reason.
# `too_slow`: right, but one pass takes longer than all rounds may. `refused`: an alternative that
# cannot run here. `skipped`: a point that was not begun. `pending`: a point that has not ended.
Status = Literal[
    "ok", "wrong", "oom", "failed", "timeout", "too_slow", "refused", "skipped", "pending"
]
STATUSES: tuple[Status, ...] = get_args(Status)
# The alternative is to blame; the other statuses are limits of the machine. The gravest first.
BAD: tuple[Status, ...] = ("wrong", "oom", "failed", "timeout")

# The columns that name a configuration, each with the distinct values that were measured.
Scope = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class Note:
    """Something that did not end well: alternatives by name, or points if there are no names."""

    status: Status
    reason: str
    names: tuple[str, ...] = ()
    points: int = 1


@dataclass(frozen=True)
class Region:
    """Values of one column that some configurations have and no other has."""

    column: str
    relation: Literal["equal", "from", "up to", "among"]
    """`among`: names, which have no order."""
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Counts:
    """Configurations of a comparison, or rows of a check, by outcome."""

    total: int
    better: int = 0
    """Of a check: within the factor."""
    worse: int = 0

    @property
    def is_mostly_better(self) -> bool:
        return 2 * self.better > self.total


@dataclass(frozen=True)
class Overall:
    """One alternative over all configurations: the ratio that readers quote."""

    ratio: float
    low: float
    high: float
    """Its 95% interval."""
    n: int
    """Configurations, two or more."""
    direction: Literal["better", "worse"] | None
    """None if no difference is shown."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a run to a question; as it stands, that of a run without rows for it."""

    verdict: Verdict
    reason: str = ""
    """Why nothing was measured; empty if the notes say it."""
    effect: float = 1.0
    """Median of the ratios that the answer is about; 1 if nothing differs."""
    scope: Scope = ()
    notes: tuple[Note, ...] = ()
    advice: str | None = None
    """Template of the recommendation. It may use `{name}` and `{where}`, or columns of a report."""
    remarks: tuple[str, ...] = ()
    """Sentences about this run that come from outside the question, such as on a reader's guess."""
    table: pd.DataFrame | None = field(default=None, repr=False, compare=False)

    @property
    def is_better(self) -> bool:
        """Whether something beats the baseline, at least in some configurations."""
        return self.verdict in ("yes", "it depends")


@dataclass(frozen=True, kw_only=True)
class Comparison(Answer):
    """The answer to a `Compare`."""

    quantity: str
    """Measured column; its name decides the words for more and less."""
    baseline: str
    counts: Counts
    noun: str = "alternative"
    """What the alternatives are, in the singular."""
    subject: str | None = None
    """Name of the best alternative; None if there are several and none is better anywhere."""
    n_alternatives: int = 1
    direction: Literal["better", "worse"] | None = None
    """Of the ratios that `low`, `high` and `effect` cover; None if no difference is shown."""
    low: float = 1.0
    high: float = 1.0
    """Smallest and largest ratio of those counted as better, or, if none is, as worse."""
    is_overall: bool = False
    """Whether these are the ratio over all configurations: too few by themselves show what it does,
    or any gain."""
    overall: Overall | None = None
    """The subject over all configurations; None for one configuration, and without a subject."""
    region: Region | None = None
    """Where it is better, if one column tells."""
    ties: tuple[str, ...] = ()
    """Alternatives that are as good as the subject, to within the smallest relevant difference."""
    overtaken: tuple[tuple[str, Region | None], ...] = ()
    """Alternatives that are clearly better than the subject somewhere, with the region."""
    seconds_more: float = 0.0
    """Seconds of further rounds that would decide on a gain of 10%; 0 if that is not undecided."""


@dataclass(frozen=True, kw_only=True)
class Agreement(Answer):
    """The answer to a `Check`."""

    quantity: str
    subject: str
    reference: str
    within: float
    counts: Counts
    low: float
    high: float
    """Smallest and largest ratio of measured to predicted."""

    @property
    def worst(self) -> float:
        """The ratio furthest from 1; infinite if one is not positive."""
        if self.low <= 0 or 1 / self.low > self.high:
            return self.low
        return self.high

    @property
    def factor(self) -> float:
        """The worst ratio as a factor of at least 1."""
        if self.low <= 0:
            return float("inf")
        return max(self.high, 1 / self.low)


@dataclass(frozen=True, kw_only=True)
class Finding(Answer):
    """The answer to a `Report`: one row of its table, and the sentence that it fills."""

    says: str
    values: Mapping[str, Any]


def find_region(table: pd.DataFrame, rows: pd.DataFrame, along: Sequence[str]) -> Region | None:
    """Find the column `along` whose range of values tells `rows` from all other rows, or None."""
    if rows.empty or len(rows) == len(table):
        return None
    for name in along:
        values = table[name]
        selected = set(rows[name])
        # A value that better and other configurations share tells nothing about where it is better.
        if values.nunique() < 2 or (values.isin(selected) != table.index.isin(rows.index)).any():
            continue
        ordered = sorted(set(values))
        chosen = tuple(sorted(selected))
        # Names have no order, so "from" and "up to" mean nothing for them.
        if isinstance(ordered[0], str | bool):
            return Region(name, "among", chosen)
        if len(chosen) == 1:
            return Region(name, "equal", chosen)
        if chosen == tuple(ordered[-len(chosen) :]):
            return Region(name, "from", chosen)
        if chosen == tuple(ordered[: len(chosen)]):
            return Region(name, "up to", chosen)
    return None


def find_scope(table: pd.DataFrame, columns: Sequence[str]) -> Scope:
    """List the distinct values of these columns: names in the table's order, numbers ascending."""
    scope = []
    for name in columns:
        if name not in table:
            continue
        values = list(table[name].dropna().unique())
        if values and not isinstance(values[0], str | bool):
            values.sort()
        scope.append((name, tuple(values)))
    return tuple(scope)
