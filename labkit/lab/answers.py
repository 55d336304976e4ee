"""Questions and answers: a lab declares what it compares, checks or reports; one template per kind
words the answer.

`Compare` asks whether an alternative beats a baseline, and in which configurations. Its verdict
takes four steps:

1. Ratio (`Metric.ratios_to`): each alternative over the baseline, per configuration. The slowest
   rank of a repeat counts. Interleaved repeats are compared round by round; sessions, in other
   processes, are combined into one ratio.
2. Significance (`labkit.bench.statistics.with_verdicts`): a configuration is "faster" or "slower"
   if its ratio differs from 1 by at least 3%, at a false discovery rate of 2.5% over all rows of
   the question. Else it counts for neither.
3. Choice (`Metric.best`): of several alternatives, the answer names the one with most wins minus
   losses over their common configurations. Ties go to the best mean ratio; within 3%, to the first.
4. Count (`_judge`): "yes" if it is better in more than half of its configurations and worse in
   none, "no" if it is worse in some and better in none, "no clear difference" if it is better and
   worse in none, else "it depends"; "undecided" if there are too few repeats for any p-value.

`Check` asks whether measurements match predictions, within a factor. `Report` says how large
something is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_float_dtype

from labkit.lab.figures import Figure
from labkit.lab.metric import Metric, Results, Table
from labkit.lab.units import counted, format_factor, format_value, label
from labkit.lab.wording import describe_region, describe_scope, phrasing, quotable

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
"""Topics of the recommendations on the index page, by key, in the order of the page."""
NO_ROWS = "This run has no rows for it."
NO_CALIBRATION = (
    "Its machine was not calibrated when it was measured; `labkit measure limits` calibrates it."
)


@dataclass(frozen=True)
class Answer:
    """The answer of a run to a question."""

    verdict: Verdict
    headline: str
    """One sentence of at most 25 words and two numbers, the verdict first."""
    table: pd.DataFrame | None = field(default=None, repr=False, compare=False)
    advice: str | None = None
    effect: float = 1.0
    """Median of the ratios that the headline is about; 1 if nothing differs."""
    change: str | None = None
    """The ratio in words: "1.4 to 2.1 times faster"."""
    scope: str = ""
    """Configurations that the headline covers, counted and named."""
    notes: tuple[str, ...] = ()
    """Wrong results, failures, refusals, and other caveats that a reader would act on."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a lab. Its id stays the same over versions; its text may change."""

    id: str
    text: str
    figure: Figure | None = None
    topic: str | None = None
    """Key of `TOPICS` that the advice belongs to."""
    is_expected: bool = False
    """Whether everybody expects the answer. The index page does not list it among the largest
    differences."""
    advice: str | None = None
    """Template for an answer that finds something better; filled like the headline."""
    needs_calibration: bool = False
    """Whether the answer uses the machine's calibration."""

    def __post_init__(self) -> None:
        if self.topic is not None and self.topic not in TOPICS:
            raise ValueError(f"expected a topic among {', '.join(TOPICS)}, got {self.topic!r}")

    def answer(self, results: Results) -> Answer:
        """Answer from the results of a run; "not measured", with reasons, if they have no rows for
        it."""
        reason = (
            NO_CALIBRATION if self.needs_calibration and results.calibration is None else NO_ROWS
        )
        return self.find(results) or Answer(
            "not measured", f"Not measured: {reason}", notes=results.missing
        )

    def find(self, results: Results) -> Answer | None:
        """Return the answer, or None without rows."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Compare(Question):
    """Is an alternative better than the baseline, and in which configurations?"""

    metric: Metric
    baseline: Any
    among: Sequence[Any] | None = None
    """Alternatives of this question; None: all that were measured."""
    keep: str | None = None
    """Advice if nothing is better."""

    def find(self, results: Results) -> Answer | None:
        metric = self.metric
        compared = None if self.among is None else {self.baseline, *self.among}
        notes = (*metric.failures(results.frame, compared), *results.missing)
        table = metric.ratios_to(self.baseline, results.frame, self.among)
        if table.empty:
            return (
                Answer("not measured", f"Not measured: {NO_ROWS}", notes=notes) if notes else None
            )
        best = metric.best(table)
        rows = table if best is None else table[table[metric.compare] == best]
        better = rows[rows["verdict"] == "faster"]
        worse = rows[rows["verdict"] == "slower"]
        is_undecided = bool(rows["p"].isna().all())
        no_winner = rows[metric.compare].nunique() > 1
        verdict, headline = _judge(len(rows), len(better), len(worse), is_undecided, no_winner)
        quoted = better if len(better) else worse
        words = self._words(rows, better, quoted)
        n_alternatives = table[metric.compare].nunique()
        words["name"] = (
            f"any of {n_alternatives} alternatives" if best is None else self._name(best, results)
        )
        words["baseline"] = self._name(self.baseline, results)
        count = _count(words, rows, better, worse, "comparisons" if no_winner else "configurations")
        advice = self.keep
        if verdict in ("yes", "it depends"):
            advice = (
                self.advice.format_map(words) if self.advice and len(better) > len(worse) else None
            )
        ratios = quotable(quoted)["ratio"].astype(float)
        return Answer(
            verdict,
            headline.format_map(words),
            table.assign(
                verdict=table["verdict"].replace(
                    {"faster": words["better"], "slower": words["worse"]}
                )
            ),
            advice=None if is_undecided else advice,
            effect=float(np.exp(np.log(ratios).median())) if len(quoted) else 1.0,
            # "2 times faster" from "is 2 times faster than"
            change=re.sub(r" (than|as|of)$", "", words["change"].partition(" ")[2]) or None,
            scope=": ".join(filter(None, (count, describe_scope(rows, metric.configuration)))),
            notes=notes,
        )

    def _words(
        self, rows: pd.DataFrame, better: pd.DataFrame, quoted: pd.DataFrame
    ) -> dict[str, str]:
        """Return values for the placeholders of headlines and advice, except names."""
        phrases = phrasing(self.metric.value)
        region = describe_region(rows, better, self.metric.configuration) if len(better) else None
        some = "in most configurations" if 2 * len(better) > len(rows) else "in some configurations"
        return {
            "change": phrases.clause(quoted) if len(quoted) else "",
            "better": phrases.better,
            "worse": phrases.worse,
            "noun": phrases.noun,
            "region": region if region and len(re.findall(r"\d+", region)) <= 1 else some,
            "where": (
                ""
                if len(better) == len(rows)
                else f" {region}"
                if region
                else f" ({phrases.better} {some})"
            ),
        }

    def _name(self, alternative: Any, results: Results) -> str:
        return results.names.get(alternative) or label(self.metric.compare, alternative)


def _judge(
    n: int, n_better: int, n_worse: int, is_undecided: bool, no_winner: bool
) -> tuple[Verdict, str]:
    """Choose verdict and headline template; `n` counts the winner's configurations, or the rows of
    all alternatives."""
    if is_undecided:
        return "undecided", "Too few repeats to compare {name} with {baseline}."
    if not n_better and not n_worse:
        return "no clear difference", "No clear difference in {noun} between {name} and {baseline}."
    if not n_better and no_winner:
        result = "all are {worse}" if n_worse == n else "none is measurably {better}"
        return "no", f"No: {result} than {{baseline}}."
    if n_worse == n:
        return "no", "No: {name} {change} {baseline}."
    if not n_better:
        return (
            "no",
            (
                "No: {name} is never measurably {better} than {baseline}, and {worse} in some"
                " configurations."
            ),
        )
    if n_worse:
        return (
            "it depends",
            "It depends: {name} {change} {baseline} {region}, and is {worse} in others.",
        )
    if n_better == n:
        return "yes", "Yes: {name} {change} {baseline}."
    if 2 * n_better > n:
        return "yes", "Yes, {region}: {name} {change} {baseline}."
    return "it depends", "Only {region}: {name} {change} {baseline}."


def _count(
    words: Mapping[str, Any],
    rows: pd.DataFrame,
    better: pd.DataFrame,
    worse: pd.DataFrame,
    noun: str,
) -> str:
    """Count configurations: "faster in 10 of 12 configurations, slower in 1"; "all 6
    configurations"; "" for one."""
    n = len(rows)
    if n in (len(better), len(worse)) or not len(better) + len(worse):
        return {1: "", 2: f"both {noun}"}.get(n, f"all {n} {noun}")
    parts = [
        f"{words[name]} in {len(some)}"
        for name, some in (("better", better), ("worse", worse))
        if len(some)
    ]
    return ", ".join([f"{parts[0]} of {n} {noun}", *parts[1:]])


@dataclass(frozen=True, kw_only=True)
class Check(Question):
    """Does the measurement match the prediction within a factor? "Yes" if all rows do, "it depends"
    if half or more."""

    table: Table
    measured: str
    predicted: str
    within: float = 1.5
    subject: str = "times"
    """Plural noun for the measured quantity."""
    reference: str = "the prediction"
    """Noun for the predicted quantity."""

    def find(self, results: Results) -> Answer | None:
        table = self.table(results).dropna(subset=[self.measured, self.predicted])
        if table.empty:
            return None
        ratios = (table[self.measured] / table[self.predicted]).astype(float)
        ratios = ratios.mask(table[self.measured] == table[self.predicted], 1.0)
        factors = np.maximum(ratios, 1 / ratios).where(ratios > 0, np.inf)
        n_close = int((factors <= self.within).sum())
        verdict: Verdict = (
            "yes"
            if n_close == len(factors)
            else "it depends"
            if 2 * n_close >= len(factors)
            else "no"
        )
        return Answer(
            verdict,
            self._headline(verdict, ratios, factors, n_close),
            table.assign(measured_over_predicted=ratios),
            effect=float(ratios.median()),
            scope=(
                f"{n_close} of {counted(len(table), 'comparison')}:"
                f" {describe_scope(table, self.keys(table))}"
            ),
            notes=results.missing,
        )

    def keys(self, table: pd.DataFrame) -> list[str]:
        """Columns that name the rows: those before the measured one, without other measurements."""
        before = table.columns[: list(table.columns).index(self.measured)]
        return [name for name in before if not is_float_dtype(table[name])]

    def _headline(
        self, verdict: Verdict, ratios: pd.Series, factors: pd.Series, n_close: int
    ) -> str:
        if verdict == "yes":
            percent = max(0.05, 100 * (factors.max() - 1))
            relation = "equal" if factors.max() == 1 else f"are within {percent:.2g}% of"
            return f"Yes: all {self.subject} {relation} {self.reference}."
        most = "half of the" if 2 * n_close == len(factors) else "most"
        start = (
            f"Partly: {most}"
            if verdict == "it depends"
            else "No: fewer than half of the"
            if n_close
            else "No: no"
        )
        worst = format_factor(float(ratios[factors.idxmax()]))
        return (
            f"{start} {self.subject} are within a factor of {self.within:g} of {self.reference}; "
            f"the worst is {worst} times that."
        )


@dataclass(frozen=True, kw_only=True)
class Report(Question):
    """How large is it? `says` is filled with the values of one row of the table, in their units."""

    table: Table
    says: str
    pick: Callable[[pd.DataFrame], Any] = lambda table: table.index[-1]
    """Returns the label of the row; the last by default."""
    verdict: Verdict = "measured"
    configuration: tuple[str, ...] = ()

    def find(self, results: Results) -> Answer | None:
        table = self.table(results)
        if table.empty:
            return None
        row = table.loc[self.pick(table)]
        words = {name: format_value(str(name), value) for name, value in row.items()}
        return Answer(
            self.verdict,
            self.says.format_map(words),
            table,
            advice=self.advice.format_map(words) if self.advice else None,
            scope=describe_scope(table, self.configuration),
            notes=results.missing,
        )
