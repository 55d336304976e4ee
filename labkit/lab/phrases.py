"""How much more or less, and where: "15 to 23% less time", "3 times faster", "from 1 MiB up"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from labkit.lab.facts import Answer, Comparison, Region, Scope
from labkit.lab.units import column, counted, format_factor, join_words, label, label_range

TWOFOLD = 1.95  # from this factor up "times" reads better than "%"
MAX_NAMES = 4  # a scope lists up to this many names, and counts more


@dataclass(frozen=True)
class Phrase:
    """Words around an amount, between a subject and a baseline: takes | 15% | less time | than."""

    verb: str
    words: str
    preposition: str
    unit: Literal["% less", "% of", "% more", "times less", "times"]
    """What the amount is: for a ratio of 0.2 "80% less", "20% of" or "5 times less"."""

    def amount(self, ratio: float) -> float:
        """Return a ratio in this unit."""
        match self.unit:
            case "% less":
                return 100 * (1 - ratio)
            case "% of":
                return 100 * ratio
            case "% more":
                return 100 * (ratio - 1)
            case "times less":
                return 1 / ratio
            case "times":
                return ratio

    def format(self, amounts: Sequence[float]) -> list[str]:
        """Format amounts without their "%"."""
        if not self.unit.startswith("%"):
            return [format_factor(amount) for amount in amounts]
        # All with the same digits: an interval must not seem to be more exact at one end.
        digits = 0 if abs(amounts[0]) >= 0.95 else 1
        return [f"{amount:.{digits}f}" for amount in amounts]

    @property
    def sign(self) -> str:
        """What follows the amount directly."""
        return "%" if self.unit.startswith("%") else ""


@dataclass(frozen=True)
class Phrasing:
    """Words for less and more of a quantity."""

    noun: str
    less: Phrase
    """For a share: "takes 15% less time than"."""
    fraction: Phrase
    """For less than half: "is 3 times faster than"."""
    more: Phrase
    multiple: Phrase
    better: str
    worse: str

    def choose(self, ratio: float) -> Phrase:
        """Choose the phrase for a ratio."""
        if ratio < 1:
            return self.fraction if ratio <= 1 / TWOFOLD else self.less
        return self.more if ratio < TWOFOLD else self.multiple


TIME = Phrasing(
    noun="time",
    less=Phrase("takes", "less time", "than", "% less"),
    fraction=Phrase("is", "times faster", "than", "times less"),
    more=Phrase("takes", "longer", "than", "% more"),
    multiple=Phrase("takes", "times as long", "as", "times"),
    better="faster",
    worse="slower",
)


def phrasing(quantity: str) -> Phrasing:
    """Choose words for a measured column by its name."""
    # All bytes by which alternatives are compared are memory.
    if quantity.endswith("bytes"):
        return _phrasing("memory", "needs", ("less", "more"), ("lighter", "heavier"))
    if is_time(quantity):
        return TIME
    return _phrasing(column(quantity).title, "has", ("lower", "higher"), ("lower", "higher"))


def _phrasing(
    noun: str, verb: str, amounts: tuple[str, str], verdicts: tuple[str, str]
) -> Phrasing:
    """Make the words for an amount of something; each pair is that of a gain and of a loss."""
    return Phrasing(
        noun,
        less=Phrase(verb, f"{amounts[0]} {noun}", "than", "% less"),
        fraction=Phrase(verb, f"of the {noun}", "of", "% of"),
        more=Phrase(verb, f"{amounts[1]} {noun}", "than", "% more"),
        multiple=Phrase(verb, f"times the {noun}", "of", "times"),
        better=verdicts[0],
        worse=verdicts[1],
    )


def is_time(quantity: str) -> bool:
    """Whether a column holds seconds."""
    return quantity == "seconds" or quantity.endswith("_s")


class Amount(NamedTuple):
    """How large a difference is: "15 to 23%" and the phrase around it."""

    text: str
    phrase: Phrase


def find_change(answer: Answer) -> Amount | None:
    """Return how much better or worse a comparison is; None if no difference is shown."""
    if not isinstance(answer, Comparison) or answer.direction is None:
        return None
    is_partly_worse = answer.counts.worse < answer.counts.total and not answer.is_overall
    if is_partly_worse and (answer.subject is None or answer.direction == "worse"):
        # "none is faster" is the answer, not how much slower a few of them are.
        return None
    # The largest effect decides on the words, also for the smallest one.
    largest = answer.low if answer.direction == "better" else answer.high
    phrase = phrasing(answer.quantity).choose(largest)
    ends = phrase.format(sorted([phrase.amount(answer.low), phrase.amount(answer.high)]))
    return Amount(" to ".join(dict.fromkeys(ends)) + phrase.sign, phrase)


def describe_ratio(ratio: float, low: float, high: float, phrases: Phrasing) -> str:
    """Word a ratio with its interval: "12% [8, 16] less time", "3 [2.5, 3.6] times faster"."""
    phrase = phrases.choose(ratio)
    ends = sorted([phrase.amount(low), phrase.amount(high)])
    value, first, last = phrase.format([phrase.amount(ratio), *ends])
    interval = f" [{first}, {last}]" if low < high else ""  # a count has none
    return f"{value}{phrase.sign}{interval} {phrase.words}"


def format_outside(ratio: float, within: float) -> str:
    """Round a ratio that is outside of a factor so that it stays outside: 0.858 -> "0.86"."""
    if ratio <= 0:
        return "0"
    # At most five digits: a ratio may lie directly outside.
    for digits in range(2, 6):
        text = f"{ratio:.{digits}g}"
        rounded = float(text)
        if max(rounded, 1 / rounded) > within:
            break
    if ratio >= 10:
        return f"{ratio:,.0f}"
    return text


def ceil_percent(factor: float) -> str:
    """1.0083 -> "0.84%": rounded up, so that the claim holds."""
    percent = max(0.05, 100 * (factor - 1))
    step = 10 ** (math.floor(math.log10(percent)) - 1)
    # 1e-9: floating point makes 0.84 a little more, which is no reason to say 0.85.
    return f"{math.ceil(percent / step - 1e-9) * step:.2g}%"


def describe_region(region: Region) -> str:
    """Word a region: "from 1 MiB up", "with 4 ranks", "for mini"."""
    name = region.column
    names = join_words([label(name, value) for value in region.values])
    match region.relation:
        case "among" if name == "transport":
            words = {"shared": "shared memory"}
            places = [words.get(value, label(name, value)) for value in region.values]
            return f"over {join_words(places)}"
        case "among":
            return f"for {names}"
        case "equal":
            preposition = "with" if name == "world_size" else "at"
            return f"{preposition} {names}"
        case "from":
            return f"from {label(name, region.values[0])} up"
        case "up to":
            return f"up to {label(name, region.values[-1])}"


def describe_scope(covered: Scope) -> str:
    """Word the configurations of a table: "gloo · 2 and 4 ranks · 4 KiB to 10 MiB"."""
    parts = [_describe_values(name, values) for name, values in covered]
    return " · ".join(filter(None, parts))


def _describe_values(name: str, values: Sequence[Any]) -> str:
    if column(name).is_internal or not values:
        return ""
    if not isinstance(values[0], str | bool):
        return label_range(name, values)
    if len(values) > MAX_NAMES:
        return counted(len(values), column(name).title)
    return join_words([label(name, value) for value in values])
