"""How much more or less, and where: "15 to 23% less time", "3 times faster", "from 1 MiB up"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    is_share: bool = False
    """Whether the amount is the ratio itself in percent ("needs 20% of the memory of")."""


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


TIME = Phrasing(
    noun="time",
    less=Phrase("takes", "less time", "than"),
    fraction=Phrase("is", "times faster", "than"),
    more=Phrase("takes", "longer", "than"),
    multiple=Phrase("takes", "times as long", "as"),
    better="faster",
    worse="slower",
)
MEMORY = Phrasing(
    noun="memory",
    less=Phrase("needs", "less memory", "than"),
    fraction=Phrase("needs", "of the memory", "of", is_share=True),
    more=Phrase("needs", "more memory", "than"),
    multiple=Phrase("needs", "times the memory", "of"),
    better="lighter",
    worse="heavier",
)


def phrasing(quantity: str) -> Phrasing:
    """Choose words for a measured column by its name."""
    # All bytes by which alternatives are compared are memory.
    if quantity.endswith("bytes"):
        return MEMORY
    if is_time(quantity):
        return TIME
    noun = column(quantity).title
    return Phrasing(
        noun,
        less=Phrase("has", f"lower {noun}", "than"),
        fraction=Phrase("has", f"of the {noun}", "of", is_share=True),
        more=Phrase("has", f"higher {noun}", "than"),
        multiple=Phrase("has", f"times the {noun}", "of"),
        better="lower",
        worse="higher",
    )


def is_time(quantity: str) -> bool:
    """Whether a column holds seconds."""
    return quantity == "seconds" or quantity.endswith("_s")


@dataclass(frozen=True)
class Amount:
    """How large a difference is: "15 to 23%" and the phrase around it."""

    text: str
    phrase: Phrase


def change(answer: Answer) -> Amount | None:
    """Word how much better or worse a comparison is; None if no difference is shown."""
    if not isinstance(answer, Comparison) or answer.direction is None:
        return None
    if answer.subject is None and answer.counts.worse < answer.counts.total:
        # "none is faster" is the answer, not how much slower a few of them are.
        return None
    phrases = phrasing(answer.quantity)
    if answer.direction == "better":
        # From the smallest effect, which is the largest ratio, to the largest effect.
        if 1 / answer.low < TWOFOLD:
            return Amount(_percent_span(1 - answer.high, 1 - answer.low), phrases.less)
        if phrases.fraction.is_share:
            return Amount(_percent_span(answer.low, answer.high), phrases.fraction)
        return Amount(_factor_span(1 / answer.high, 1 / answer.low), phrases.fraction)
    if answer.high < TWOFOLD:
        return Amount(_percent_span(answer.low - 1, answer.high - 1), phrases.more)
    return Amount(_factor_span(answer.low, answer.high), phrases.multiple)


def interval(ratio: float, low: float, high: float, phrases: Phrasing) -> str:
    """Word a ratio with its interval: "12% [8, 16] less time", "3 [2.5, 3.6] times faster"."""
    if ratio < 1 / TWOFOLD and phrases.fraction.is_share:
        phrase = phrases.fraction
        numbers = _percents(ratio, low, high)
    elif ratio < 1 / TWOFOLD:
        phrase = phrases.fraction
        numbers = [format_factor(1 / one) for one in (ratio, high, low)]
    elif ratio < 1:
        phrase = phrases.less
        numbers = _percents(1 - ratio, 1 - high, 1 - low)
    elif ratio < TWOFOLD:
        phrase = phrases.more
        numbers = _percents(ratio - 1, low - 1, high - 1)
    else:
        phrase = phrases.multiple
        numbers = [format_factor(one) for one in (ratio, low, high)]
    value, first, last = numbers
    if phrase.is_share or phrase in (phrases.less, phrases.more):
        value += "%"
    if low < high:  # a count has no interval
        value += f" [{first}, {last}]"
    return f"{value} {phrase.words}"


def _percents(*shares: float) -> list[str]:
    """Percents without a decimal, or with one if the first is below 1%."""
    # All with the same digits: an interval must not seem to be more exact at one end.
    digits = 0 if abs(100 * shares[0]) >= 0.95 else 1
    return [f"{100 * share:.{digits}f}" for share in shares]


def _factor_span(low: float, high: float) -> str:
    return _span(format_factor(low), format_factor(high))


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


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _percent_span(low: float, high: float) -> str:
    """Format two shares as "15 to 23%", with one decimal if the first is below one percent."""
    digits = 0 if 100 * low >= 0.95 else 1
    return f"{_span(f'{100 * low:.{digits}f}', f'{100 * high:.{digits}f}')}%"


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
