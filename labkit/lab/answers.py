"""Questions: a lab declares what it compares, checks or reports, and gets an answer made of fields.

`Compare` asks whether an alternative beats a baseline, and in which configurations. Its verdict
takes four steps:

1. Ratio (`Metric.ratios_to`): each alternative over the baseline, per configuration. The slowest
   rank of a repeat counts. Interleaved repeats are compared round by round; sessions, in other
   processes, are combined into one ratio.
2. Significance (`labkit.bench.statistics.with_verdicts`): a configuration is "faster" or "slower"
   if its ratio differs from 1 by at least 3%, at a false discovery rate of 2.5% over all rows of
   the question. Else it counts for neither. One more row per alternative is over all its
   configurations (`pool_configurations`).
3. Choice (`Metric.select_subjects`): of several alternatives, the answer names the one with most
   wins minus losses over their common configurations. Ties go to the best mean ratio; within 3%, to
   the first.
4. Verdict (`verdicts.decide`): "yes" if it is better in more than half of its configurations, or
   over all of them, and worse in none; "no" if it is worse in some or over all, and better in none.
   If it is neither: "no clear difference" if a gain of 10% is excluded, "undecided" if it is not,
   or if there are too few repeats for any p-value. Else "it depends".

`Check` asks whether measurements match predictions, within a factor. `Report` says how large
something is. `labkit.lab.facts` has the fields of answers, `labkit.lab.wording` their sentences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_float_dtype

from labkit.bench.statistics import pool_configurations
from labkit.lab.facts import (
    Agreement,
    Answer,
    Comparison,
    Counts,
    Finding,
    Overall,
    Region,
    Verdict,
    find_region,
    find_scope,
)
from labkit.lab.figures import Figure
from labkit.lab.metric import Metric, Results, Table
from labkit.lab.units import label
from labkit.lab.verdicts import (
    RELEVANT_GAIN,
    best_overall,
    decide,
    find_faster,
    judge_together,
    open_widths,
    seconds_more,
)

# Topics of the recommendations on the index page, by key, in the order of the page.
TOPICS = {
    "precision": "Precision",
    "attention": "Attention",
    "compile": "Compile or not",
    "synchronization": "Gradient synchronization",
    "bucket_size": "Bucket size",
    "sharding": "Sharding",
    "all_reduce": "All-reduce algorithm",
    "transport": "Transport between ranks",
    "scheduling": "Scheduling of CPU ranks",
    "largest_model": "Largest model that fits",
    "checkpointing": "Activation checkpointing",
    "batch_norm": "Batch norm over all ranks",
}
LEFT_OUT = "The parameters of this run, or its machine, leave it out."
NO_CALIBRATION = (
    "Its machine was not calibrated before; `labkit measure limits` calibrates it for later runs."
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a lab. Its id stays the same over versions; its text may change."""

    id: str
    text: str
    figure: Figure | None = None
    topic: str | None = None
    """Key of `TOPICS` that the advice belongs to."""
    is_expected: bool = False
    """Whether everybody expects the answer; the index does not list it as a large difference."""
    advice: str | None = None
    """Template if something is better; `{name}` is the best alternative, `{where}` its region."""
    needs_calibration: bool = False
    """Whether the answer uses the machine's calibration."""
    without_rows: str = LEFT_OUT
    """Why a run whose points all ended well may have no rows for it."""

    def __post_init__(self) -> None:
        if self.topic is not None and self.topic not in TOPICS:
            raise ValueError(f"expected a topic among {', '.join(TOPICS)}, got {self.topic!r}")

    def answer(self, results: Results) -> Answer:
        """Answer from the results of a run; "not measured", with reasons, without rows for it."""
        answer = self.find_answer(results)
        if answer is None:
            reason = self.without_rows
            if results.refusal:
                # One wrong setup refuses every point.
                reason = results.refusal
            elif self.needs_calibration and results.calibration is None:
                reason = NO_CALIBRATION
            elif results.missing:
                # Points that failed, or had no time, may be those it needs: the notes say which.
                reason = ""
            return Answer(verdict="not measured", reason=reason, notes=results.missing)
        # Other programs change ratios: of 7, 3 quiet ones lay outside a busy run's intervals.
        return replace(answer, advice=None) if results.is_busy else answer

    def find_answer(self, results: Results) -> Answer | None:
        """Return the answer, or None without rows."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Compare(Question):
    """Is an alternative better than the baseline, and in which configurations?"""

    metric: Metric
    baseline: Any
    among: Sequence[Any] | None = None
    """labkit's alternatives of the question; None: all measured. A reader's always take part."""
    noun: str = "alternative"
    """What the alternatives are, in the singular."""
    keep: str | None = None
    """Advice if a gain of 10% is excluded everywhere."""

    def find_answer(self, results: Results) -> Answer | None:
        metric = self.metric
        names = None
        if self.among is not None:
            # The lab cannot know the names that a reader adds.
            names = {self.baseline, *self.among, *results.user_alternatives}
        notes = (*metric.failures(results.frame, names), *results.missing)
        # 1. Ratio
        table = metric.ratios_to(self.baseline, results.frame, names)
        if table.empty:
            return Answer(verdict="not measured", notes=notes) if notes else None
        # 2. Significance
        table, pooled = judge_together(table, pool_configurations(table, metric.compare))
        # 3. Choice: all configurations together may show what none of them shows by itself.
        subjects = metric.select_subjects(table) or best_overall(pooled)
        rows = table  # without a subject, the answer is about all alternatives
        if subjects:
            rows = table[table[metric.compare] == subjects[0]]
        better = rows[rows["verdict"] == "faster"]
        counts = Counts(len(rows), len(better), int((rows["verdict"] == "slower").sum()))
        overall = None
        # An average of gains and losses describes none of the configurations.
        if subjects and not (counts.better and counts.worse):
            overall = pooled.get(subjects[0])
        # 4. Verdict
        widths = open_widths(rows, pooled)
        verdict: Verdict = "undecided"
        if rows["p"].notna().any():  # a p-value needs six repeats
            verdict = decide(
                counts, overall, rows["ratio"], has_winner=bool(subjects), is_open=bool(widths)
            )
        size = _describe_size(verdict, counts, overall, rows)
        names_better = counts.better > 0 and not size.get("is_overall")
        timed_s = 0.0
        if verdict == "undecided" and widths:
            timed_s = results.timed_s(metric.matching(results.frame), metric.value)
        answer = Comparison(
            verdict=verdict,
            quantity=metric.value,
            subject=self._name(subjects[0], results) if subjects else None,
            baseline=self._name(self.baseline, results),
            noun=self.noun,
            n_alternatives=table[metric.compare].nunique(),
            counts=counts,
            overall=overall,
            **size,
            region=find_region(rows, better, metric.configuration),
            ties=tuple(self._name(name, results) for name in subjects[1:]),
            overtaken=self._overtaken(table, rows, results) if names_better else (),
            scope=find_scope(rows, metric.configuration),
            seconds_more=seconds_more(widths, timed_s) if timed_s else 0.0,
            notes=notes,
            table=table,
        )
        return replace(answer, advice=self._advice(answer, table))

    def _advice(self, answer: Comparison, table: pd.DataFrame) -> str | None:
        """Choose the template of the advice: to change, to keep, or none."""
        if answer.verdict == "undecided":
            return None
        if answer.is_better:
            counts = answer.counts
            never_loses = answer.is_overall and not counts.worse
            return self.advice if never_loses or counts.better > counts.worse else None
        # A gain that is not shown may still be there: keeping the default needs evidence, too.
        excludes_gain = bool((table["low"] >= 1 - RELEVANT_GAIN).all())
        return self.keep if excludes_gain else None

    def _overtaken(
        self, table: pd.DataFrame, rows: pd.DataFrame, results: Results
    ) -> tuple[tuple[str, Region | None], ...]:
        """Name alternatives that are clearly better than the named one in some configurations."""
        keys = list(self.metric.configuration)
        faster = find_faster(table, rows, keys)
        return tuple(
            (self._name(name, results), find_region(rows, rows.loc[beaten["index"]], keys))
            for name, beaten in faster.groupby(self.metric.compare, sort=False)
        )

    def _name(self, alternative: Any, results: Results) -> str:
        return results.names.get(alternative) or label(self.metric.compare, alternative)


def _describe_size(
    verdict: Verdict, counts: Counts, overall: Overall | None, rows: pd.DataFrame
) -> dict[str, Any]:
    """Return the fields of a `Comparison` on how large its difference is; none without one."""
    # The range covers exactly the rows that are counted. Without the uncertain ones it once said
    # "3 to 3.4 times in 7 of 8", and the seven spanned 2.4 to 3.4.
    counted = rows[rows["verdict"] == ("faster" if counts.better else "slower")]
    is_general = verdict == "yes" and not counts.is_mostly_better
    if not counts.better:  # what some configurations lose is not what all of them do
        is_general = counts.worse < counts.total
    if overall is not None and overall.direction and (is_general or counted.empty):
        size = dict.fromkeys(("low", "high", "effect"), overall.ratio)
        return {"direction": overall.direction, "is_overall": True, **size}
    if counted.empty:
        return {}
    ratios = counted["ratio"].astype(float)
    return {
        "direction": "better" if counts.better else "worse",
        "low": float(ratios.min()),
        "high": float(ratios.max()),
        # By logarithms, half the time and twice the time are equally far from no effect.
        "effect": float(np.exp(np.log(ratios).median())),
    }


@dataclass(frozen=True, kw_only=True)
class Check(Question):
    """Are predictions met within a factor? "Yes": in all rows; "it depends": in half or more."""

    table: Table
    measured: str
    predicted: str
    within: float = 1.5
    subject: str = "times"
    """Plural noun for the measured quantity."""
    reference: str = "the prediction"
    """Noun for the predicted quantity."""

    def find_answer(self, results: Results) -> Answer | None:
        table = self.table(results).dropna(subset=[self.measured, self.predicted])
        if table.empty:
            return None
        ratios = (table[self.measured] / table[self.predicted]).astype(float)
        # Nothing predicted and nothing measured is right, and 0 / 0 is not a number.
        ratios = ratios.mask(table[self.measured] == table[self.predicted], 1.0)
        factors = np.maximum(ratios, 1 / ratios).where(ratios > 0, np.inf)
        counts = Counts(len(table), better=int((factors <= self.within).sum()))
        verdict: Verdict = "no"
        if counts.better == counts.total:
            verdict = "yes"
        elif 2 * counts.better >= counts.total:
            verdict = "it depends"
        return Agreement(
            verdict=verdict,
            quantity=self.measured,
            subject=self.subject,
            reference=self.reference,
            within=self.within,
            counts=counts,
            low=float(ratios.min()),
            high=float(ratios.max()),
            effect=float(ratios.median()),
            scope=find_scope(table, self.keys(table)),
            notes=results.missing,
            table=table.assign(measured_over_predicted=ratios),
        )

    def keys(self, table: pd.DataFrame) -> list[str]:
        """Columns that name the rows: those before the measured one, without other measurements."""
        before = table.columns[: list(table.columns).index(self.measured)]
        return [name for name in before if not is_float_dtype(table[name])]


@dataclass(frozen=True, kw_only=True)
class Report(Question):
    """How large is it? `says` is filled with the values of one row of the table, in their units."""

    table: Table
    says: str
    pick: Callable[[pd.DataFrame], Any] = lambda table: table.index[-1]
    """Returns the label of the row; the last by default. None: no row answers the question."""
    verdict: Verdict = "measured"
    configuration: tuple[str, ...] = ()

    def find_answer(self, results: Results) -> Answer | None:
        table = self.table(results)
        picked = None if table.empty else self.pick(table)
        if picked is None:
            return None
        values = table.loc[picked].to_dict()
        for column in set(values) & set(results.alternatives):
            values[column] = results.names.get(values[column], values[column])
        return Finding(
            verdict=self.verdict,
            says=self.says,
            values=values,
            advice=self.advice,
            scope=find_scope(table, self.configuration),
            notes=results.missing,
            table=table,
        )
