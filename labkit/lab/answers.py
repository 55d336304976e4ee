"""Questions and answers: a lab declares what is compared, checked or reported, and one template per kind words it.

A question names the numbers that decide it. `Compare` asks whether an alternative is better than a baseline, `Check`
whether a measurement is what was predicted, and `Report` how large something is. Each makes an `Answer` of the results
of a run: verdict, one sentence, the table it rests on, advice, and the size of the effect.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from labkit.lab.columns import format_value, label
from labkit.lab.figures import Figure
from labkit.lab.metric import Metric, Results, Table
from labkit.lab.units import counted, format_factor
from labkit.lab.wording import describe_region, describe_regions, describe_scope, phrasing, quotable

Verdict = Literal[
    "yes", "no", "it depends", "no clear difference", "undecided", "measured", "counted", "predicted", "not measured"
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
"""What a report recommends for its machine, in this order."""
NO_ROWS = "This run has no rows for it."
NO_CALIBRATION = "Its machine was not calibrated when it was measured; `labkit measure limits` calibrates it."


@dataclass(frozen=True)
class Answer:
    """What a run says of a question."""

    verdict: Verdict
    headline: str
    """One sentence of at most 25 words and two numbers, the verdict first."""
    table: pd.DataFrame | None = field(default=None, repr=False, compare=False)
    advice: str | None = None
    effect: float = 1.0
    """The typical ratio that the headline quotes; 1 if nothing differs."""
    change: str | None = None
    """That ratio in words: "1.4 to 2.1 times faster"."""
    scope: str = ""
    """The configurations that the headline speaks of, counted and named."""
    notes: tuple[str, ...] = ()
    """Wrong results, failures, refusals, and what else a reader would act differently for."""

    def record(self) -> dict[str, Any]:
        """Everything but the table, as JSON has it."""
        values = {name: value for name, value in asdict(self).items() if name != "table"}
        return values | {"notes": list(self.notes)}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a lab asks. The id stays the same over versions; the text may change."""

    id: str
    text: str
    figure: Figure | None = None
    topic: str | None = None
    """A key of `TOPICS`, if the advice belongs to one."""
    is_expected: bool = False
    """Whether everybody expects the answer: the index does not list it among the largest findings."""
    advice: str | None = None
    """A template, filled as the headline is, for an answer that finds something better."""

    def __post_init__(self) -> None:
        if self.topic is not None and self.topic not in TOPICS:
            raise ValueError(f"expected a topic among {', '.join(TOPICS)}, got {self.topic!r}")

    def answer(self, results: Results) -> Answer:
        """What these results say; "not measured", with the reasons, if they have no rows for it."""
        return self.find(results) or Answer(
            "not measured", f"Not measured: {self._lack(results)}", notes=results.missing
        )

    def find(self, results: Results) -> Answer | None:
        raise NotImplementedError

    def _lack(self, results: Results) -> str:
        return NO_ROWS


@dataclass(frozen=True, kw_only=True)
class Compare(Question):
    """Is an alternative better than the baseline, and in which configurations?

    Of several alternatives the one that is better in most configurations is named; the table has all.
    """

    metric: Metric
    baseline: Any
    among: Sequence[Any] | None = None
    """The alternatives of this question; None: all that were measured."""
    keep: str | None = None
    """Advice if nothing is better."""
    names: Mapping[Any, str] = field(default_factory=dict)
    """How sentences name alternatives, where their column's value is not the name."""

    def find(self, results: Results) -> Answer | None:
        metric, notes = self.metric, (*self.metric.failures(results.frame, self._compared()), *results.missing)
        table = metric.ratios_to(self.baseline, results.frame, self.among)
        if table.empty:
            return Answer("not measured", f"Not measured: {NO_ROWS}", notes=notes) if notes else None
        best = metric.best(table)
        rows = table if best is None else table[table[metric.compare] == best]
        summary = _summarize(rows, metric)
        words = self._words(summary, best, table)
        headline = _HEADLINES[summary.kind].format_map(words)
        advice = self.keep
        if summary.verdict in ("yes", "it depends"):
            is_safe = len(summary.better) > len(summary.worse)
            advice = self.advice.format_map(words) if self.advice and is_safe else None
        quoted = quotable(summary.better if len(summary.better) else summary.worse)["ratio"].astype(float)
        return Answer(
            summary.verdict,
            headline,
            table.assign(verdict=table["verdict"].replace({"faster": words["better"], "slower": words["worse"]})),
            advice=advice if summary.verdict != "undecided" else None,
            effect=float(np.exp(np.log(quoted).median())) if len(quoted) else 1.0,
            change=_amount(words["change"]) if len(quoted) else None,
            scope=f"{summary.counts(words)}: {describe_scope(rows, metric.configuration)}",
            notes=notes,
        )

    def _compared(self) -> set[Any] | None:
        """The alternatives of this question; None: all."""
        return None if self.among is None else {self.baseline, *self.among}

    def _words(self, summary: "_Summary", best: Any, table: pd.DataFrame) -> dict[str, Any]:
        metric, phrases = self.metric, phrasing(self.metric.value)
        alternatives = list(dict.fromkeys(table[metric.compare]))
        name = self._name(alternatives[0] if len(alternatives) == 1 else best)
        quoted = summary.better if len(summary.better) else summary.worse
        region = describe_region(summary.rows, summary.better, metric.configuration) if len(summary.better) else None
        where = describe_regions(summary.rows, summary.better, metric.configuration) if len(summary.better) else None
        is_everywhere = len(summary.better) == len(summary.rows)
        some = "in most configurations" if 2 * len(summary.better) > len(summary.rows) else "in some configurations"
        return {
            "name": name if name is not None else f"any of {len(alternatives)} alternatives",
            "baseline": self._name(self.baseline),
            "change": phrases.clause(quoted) if len(quoted) else "",
            "better": phrases.better,
            "worse": phrases.worse,
            "noun": phrases.noun,
            "region": region if region and len(re.findall(r"\d+", region)) <= 1 else some,
            "where": "" if is_everywhere else f" {where}" if where else f" ({phrases.better} {some})",
        }

    def _name(self, alternative: Any) -> str | None:
        if alternative is None:
            return None
        return self.names.get(alternative) or label(self.metric.compare, alternative)


def _amount(clause: str) -> str:
    """ "takes 15 to 23% less time than" -> "15 to 23% less time"."""
    return re.sub(r" (than|as|of)$", "", clause.partition(" ")[2])


_HEADLINES = {
    "all better": "Yes: {name} {change} {baseline}.",
    "mostly better": "Yes, {region}: {name} {change} {baseline}.",
    "partly better": "Only {region}: {name} {change} {baseline}.",
    "both": "It depends: {name} {change} {baseline} {region}, and is {worse} in others.",
    "all worse": "No: {name} {change} {baseline}.",
    "partly worse": "No: {name} is never measurably {better} than {baseline}, and {worse} in some configurations.",
    "none better": "No: none is measurably {better} than {baseline}.",
    "no difference": "No clear difference in {noun} between {name} and {baseline}.",
    "undecided": "Too few repeats to compare {name} with {baseline}.",
}


@dataclass(frozen=True)
class _Summary:
    """How many rows are better and worse, and what that amounts to."""

    verdict: Verdict
    kind: str
    rows: pd.DataFrame
    better: pd.DataFrame
    worse: pd.DataFrame

    def counts(self, words: Mapping[str, Any]) -> str:
        """ "faster in 10 of 12 configurations, slower in 1"; "all 6 configurations" if they agree."""
        n = len(self.rows)
        if n in (len(self.better), len(self.worse)) or not len(self.better) + len(self.worse):
            return {1: "the only configuration", 2: "both configurations"}.get(n, f"all {n} configurations")
        parts = [f"{words[name]} in {len(rows)}" for name, rows in (("better", self.better), ("worse", self.worse))]
        first, *others = [part for part in parts if not part.endswith(" in 0")]
        return ", ".join([f"{first} of {n} configurations", *others])


def _summarize(rows: pd.DataFrame, metric: Metric) -> _Summary:
    better, worse = rows[rows["verdict"] == "faster"], rows[rows["verdict"] == "slower"]
    verdict, kind = _judge(len(rows), len(better), len(worse), rows["p"].isna().all(), rows[metric.compare].nunique())
    return _Summary(verdict, kind, rows, better, worse)


def _judge(n: int, n_better: int, n_worse: int, is_undecided: bool, n_alternatives: int) -> tuple[Verdict, str]:
    if is_undecided:
        return "undecided", "undecided"
    if not n_better and not n_worse:
        return "no clear difference", "no difference"
    if not n_better:
        return "no", "none better" if n_alternatives > 1 else "all worse" if n_worse == n else "partly worse"
    if n_worse:
        return "it depends", "both"
    if n_better == n:
        return "yes", "all better"
    return ("yes", "mostly better") if 2 * n_better > n else ("it depends", "partly better")


@dataclass(frozen=True, kw_only=True)
class Check(Question):
    """Is the measurement what was predicted? "Yes" if all are within a factor of `within`, "it depends" if half are."""

    table: Table
    measured: str
    predicted: str
    within: float = 1.5
    subject: str = "times"
    """What is measured, in the plural."""
    reference: str = "the prediction"
    """What it is compared with."""
    configuration: tuple[str, ...] = ()
    """Columns that say of what the table speaks."""
    needs_calibration: bool = False
    """Whether the prediction is made of the machine's calibration."""

    def find(self, results: Results) -> Answer | None:
        table = self.table(results).dropna(subset=[self.measured, self.predicted])
        if table.empty:
            return None
        ratios = (table[self.measured] / table[self.predicted]).astype(float)
        ratios = ratios.mask(table[self.measured] == table[self.predicted], 1.0)
        factors = np.maximum(ratios, 1 / ratios).where(ratios > 0, np.inf)
        n_close = int((factors <= self.within).sum())
        verdict: Verdict = "yes" if n_close == len(factors) else "it depends" if 2 * n_close >= len(factors) else "no"
        return Answer(
            verdict,
            self._headline(verdict, ratios, factors, n_close),
            table.assign(measured_over_predicted=ratios),
            effect=float(ratios.median()),
            scope=f"{n_close} of {counted(len(table), 'comparison')}: {describe_scope(table, self.configuration)}",
            notes=results.missing,
        )

    def _headline(self, verdict: Verdict, ratios: pd.Series, factors: pd.Series, n_close: int) -> str:
        if verdict == "yes":
            is_exact = factors.max() < 1.0005
            amount = "exactly" if is_exact else f"within {100 * (factors.max() - 1):.2g}% of"
            return f"Yes: all {self.subject} are {amount} {self.reference}."
        most = "half of the" if 2 * n_close == len(factors) else "most"
        start = f"Partly: {most}" if verdict == "it depends" else "No: few" if n_close else "No: no"
        worst = format_factor(float(ratios[factors.idxmax()]))
        return (
            f"{start} {self.subject} are within a factor of {self.within:g} of {self.reference}; "
            f"the worst is {worst} times that."
        )

    def _lack(self, results: Results) -> str:
        return NO_CALIBRATION if self.needs_calibration and results.calibration is None else NO_ROWS


@dataclass(frozen=True, kw_only=True)
class Report(Question):
    """How large is it? `says` is filled with the values of one row of the table, in their units."""

    table: Table
    says: str
    pick: Callable[[pd.DataFrame], Any] = lambda table: table.index[-1]
    """The label of the row; by default the last."""
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
