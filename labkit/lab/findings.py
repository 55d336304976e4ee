"""Findings: what a lab is asked, and what one run says of it. Verdict first, then one sentence, then the numbers.

    QUESTIONS = Questions()

    @QUESTIONS.ask("ring_against_torch", "Is a ring as fast as torch's all-reduce?", topic="all_reduce")
    def ring(frame):
        return compared(TIMES.over(frame, "torch"), "the ring", "torch")

A finder returns None where the run has no rows for it; the page then says what is missing, and why.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any, Literal

import pandas as pd

from labkit.costs.calibration import ANY, Calibration
from labkit.lab.made_once import unchanged_frames
from labkit.lab.units import join_words

Verdict = Literal[
    "yes", "no", "it depends", "measured", "counted", "predicted", "no clear difference", "undecided", "not measured"
]
"""Of a question with a yes or no; "measured", "counted" or "predicted" for one that asks for a number.

"undecided" if no interval tells.
"""

TOPICS = {
    "precision": "Precision",
    "attention": "Attention, and from which length on",
    "compile": "Compile or not",
    "synchronization": "Gradient synchronization",
    "bucket_size": "Bucket size",
    "sharding": "Shards instead of copies",
    "all_reduce": "All-reduce algorithm",
    "transport": "Messages or shared memory",
    "scheduling": "Scheduling of CPU ranks",
    "largest_model": "Largest model that fits",
    "checkpointing": "Checkpoint segment",
    "batch_norm": "Batch norm over all ranks",
}
"""What a report recommends for its machine, in this order; a question names the topic it is asked for."""

SMALLEST_DIFFERENCE = "smallest_difference"
"""The id of the question whose answer the index prints beside how steady the machine was."""

MOST_REASONS = 3
NOTHING = "this run has no rows for it"
CALIBRATE_FIRST = "run `!labkit measure limits` in a cell, which calibrates this machine, then this cell again"
UNCALIBRATED = "its machine had no calibration (labkit measure limits makes one)"


@dataclass(frozen=True)
class Question:
    """What a lab is asked. The id stays the same for ever; the text may be reworded.

    `topic` is a key of `TOPICS` if the finding recommends something there. ValueError for any other.
    """

    id: str
    text: str
    topic: str | None = None

    def __post_init__(self) -> None:
        if self.topic is not None and self.topic not in TOPICS:
            raise ValueError(f"expected a topic among {', '.join(TOPICS)}, got {self.topic!r}")


Outcome = Literal["holds here", "is contradicted here", "is contradicted in some settings", "is not shown here"]


@dataclass(frozen=True)
class Claim:
    """A published statement, what this run's intervals say of it, and what it has instead of the published number."""

    text: str
    outcome: Outcome
    seen: str = ""
    where_equal: Outcome | None = field(default=None, compare=False)
    """What is right of it where nothing differs; None where that depends."""


@dataclass(frozen=True)
class Effect:
    """One comparison that a finding rests on: `subject` over `baseline` in one setting, as a ratio of quantities.

    `verdict` is that of `bench.statistics.with_verdicts` over all comparisons of the finding. Two findings of a report
    that hold the same subject, baseline, setting and quantity must not contradict one another.
    """

    subject: str
    baseline: str
    setting: str
    quantity: str
    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Finding:
    """What one run says of one question.

    `headline` is one sentence of at most 25 words and two numbers; the numbers stand in `table`. `caveat` is what a
    reader would act differently for, `why` a sentence computed from this run, `advice` what to do on this machine,
    `significant` whether the advice rests on significant differences or exact counts. `where` says of which settings
    the headline speaks, `also` answers the other half of a question that has two.
    """

    verdict: Verdict
    headline: str
    table: pd.DataFrame | None = None
    caveat: str | None = None
    why: str | None = None
    advice: str | None = None
    significant: bool = False
    claims: tuple[Claim, ...] = ()
    effects: tuple[Effect, ...] = field(default=(), repr=False)
    where: str | None = None
    also: str | None = None
    lead: Effect | None = None
    """Of the differences that the headline speaks of, the one whose size it quotes, or the largest of several."""

    def record(self) -> dict[str, Any]:
        """All but the table, as JSON has it, which knows no NaN; effects that are no positive ratio are left out."""
        effects = [_record_of(effect) for effect in self.effects if 0 < effect.ratio < math.inf]
        lead = _record_of(self.lead) if self.lead and 0 < self.lead.ratio < math.inf else None
        return asdict(replace(self, table=None, effects=(), lead=None)) | {"effects": effects, "lead": lead}


def _record_of(effect: Effect) -> dict[str, Any]:
    has_interval = 0 < effect.low <= effect.high < math.inf
    return asdict(effect) | ({} if has_interval else {"low": None, "high": None})


Finder = Callable[..., Finding | None]
"""Of a run's frame; of its frame and its calibration (or None) if it takes two arguments."""


class Questions:
    """The questions of a lab in the order in which they are asked, each with the function that finds its answer.

    `missing` says what a run without an answer lacks.
    """

    def __init__(self, missing: str = NOTHING) -> None:
        self._finders: dict[str, tuple[Question, Finder, str]] = {}
        self._missing = missing

    def ask(
        self, identifier: str, text: str, topic: str | None = None, *, missing: str | None = None
    ) -> Callable[[Finder], Finder]:
        """Declare a question above its finder. ValueError for an id that is taken."""

        def declare(finder: Finder) -> Finder:
            if identifier in self._finders:
                raise ValueError(f"expected a new id, got {identifier!r} again")
            self._finders[identifier] = Question(identifier, text, topic), finder, missing or self._missing
            return finder

        return declare

    def __iter__(self) -> Iterator[Question]:
        return (question for question, _, _ in self._finders.values())

    def __len__(self) -> int:
        return len(self._finders)

    def find(
        self, frame: pd.DataFrame, coverage: pd.DataFrame, calibration: Calibration | None = None
    ) -> dict[str, Finding]:
        """A finding for each question, by its id, from `Run.frame()` and `Run.coverage()`; either may be empty.

        `calibration`: that of the run, which predictions are made of.
        """
        with unchanged_frames():
            return {identifier: self.finding(identifier, frame, coverage, calibration) for identifier in self._finders}

    def finding(
        self, identifier: str, frame: pd.DataFrame, coverage: pd.DataFrame, calibration: Calibration | None = None
    ) -> Finding:
        """That of one question, as `find` has it of all."""
        _, find, missing = self._finders[identifier]
        predicts = len(signature(find).parameters) > 1
        found = find(frame, calibration) if predicts else find(frame)
        if found is None:
            lacks_calibration = predicts and calibration is None and find(frame, ANY) is not None
            found = not_measured(coverage, UNCALIBRATED if lacks_calibration else missing)
        return found


def not_measured(coverage: pd.DataFrame, missing: str = NOTHING) -> Finding:
    """The finding where data is missing: what is missing, and the recorded reasons why."""
    reasons = reasons_why(coverage)
    return Finding("not measured", f"Not measured: {missing}.", caveat=f"{'; '.join(reasons)}." if reasons else None)


def reasons_why(coverage: pd.DataFrame) -> list[str]:
    """The distinct reasons of points that did not end `ok`, the most frequent first."""
    if "reason" not in coverage:
        return []
    counts = coverage.loc[coverage["status"] != "ok", "reason"].dropna().value_counts()
    told = [f"{reason} ({count} points)" if count > 1 else str(reason) for reason, count in counts.items()]
    return told[:MOST_REASONS] + ([f"and {len(told) - MOST_REASONS} other reasons"] if len(told) > MOST_REASONS else [])


def at_the_cost_of(gain: Finding | None, cost: Finding | None) -> Finding | None:
    """A finding on what is gained, and what another comparison says that it costs, as `also`; effects of both."""
    if gain is None or cost is None or cost.verdict == "not measured":
        return gain
    return replace(
        gain,
        also=without_verdict(cost.headline),
        significant=gain.significant or cost.significant,
        effects=(*gain.effects, *cost.effects),
    )


def without_verdict(headline: str) -> str:
    """A headline as a sentence of its own: without the "Yes", "No" or "It depends" that answers its question."""
    told = re.sub(r"^(Yes|No|It depends)(: |, (?=in most settings: ))", "", headline)
    return told if "_" in told.partition(" ")[0] else told[:1].upper() + told[1:]


def with_model(found: Finding | None, ratios: pd.DataFrame) -> Finding | None:
    """The finding, its headline with the name of the model, the `size` of `ratios`, if there is one alone."""
    if found is None or ratios["size"].nunique() != 1:
        return found
    verdict, colon, said = found.headline.rpartition(": ")
    said = said if colon else f"{said[0].lower()}{said[1:]}"
    told = f"with {ratios['size'].iloc[0]}, {said}"
    return replace(found, headline=f"{verdict}{colon}{told}" if colon else f"{told[0].upper()}{told[1:]}")


def troubles(frame: pd.DataFrame, name: str) -> str | None:
    """A caveat on alternatives that have no time: wrong results, shouted; then failures; then what ranks refused.

    `name` is the column that names an alternative.
    """
    told = []
    if "check" in frame and len(bad := frame[frame["check"].fillna("ok") != "ok"]):
        is_wrong = bad["check"].str.startswith("wrong")
        for kind, rows in (("WRONG RESULTS, and so no times, from", bad[is_wrong]), ("No times from", bad[~is_wrong])):
            if len(rows):
                reasons = join_words(list(dict.fromkeys(rows["check"])))
                told.append(f"{kind} {join_words(_names(rows[name]))}: {reasons}.")
    if "not_measured" in frame and len(refused := frame.dropna(subset="not_measured")):
        for reason, rows in refused.groupby("not_measured", sort=False):
            told.append(f"Not measured: {join_words(_names(rows[name]))}, since {reason}.")
    return " ".join(told) or None


def _names(values: pd.Series) -> list[str]:
    return [str(name).replace("_", " ") for name in dict.fromkeys(values)]
