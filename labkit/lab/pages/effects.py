"""What a report found, by size: the largest differences, and all of them on one axis, each with its interval."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.lab.findings import SMALLEST_DIFFERENCE, without_verdict
from labkit.lab.pages.entries import answers_here, href, measured_here
from labkit.lab.pages.importance import is_uneven

MOST_LARGEST = 5
MOST_TICKS = 6
WIDEST = 64.0  # factor at which the axis ends on either side; what lies beyond stands at its end


@dataclass(frozen=True)
class Row:
    """All ratios of one thing over another in one lab: the one in the middle with its interval, the others.

    Places are in percent of the axis; `verdict` is that of the ratio in the middle.
    """

    subject: str
    against: str
    lab: str
    href: str
    verdict: str
    value: str
    interval: str
    place: float
    low: float
    high: float
    others: list[float]


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis of ratios; its ends are powers of two."""

    low: float
    high: float

    def place(self, ratio: float) -> float:
        """Where a ratio stands, in percent."""
        return round(100 * max(0.0, min(1.0, (math.log2(ratio) - self.low) / (self.high - self.low))), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts of powers of two, or of four where they would be many."""
        step = 1 if self.high - self.low < MOST_TICKS else 2
        powers = range(step * math.ceil(self.low / step), math.floor(self.high) + 1, step)
        return [(self.place(2.0**power), f"{2**power}" if power >= 0 else f"1/{2**-power}") for power in powers]


def largest(labs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of what is measured here, the answers whose headlines quote the largest differences.

    Each with the title of its `lab` and its place, `href`, beside what `by_importance` says of it.
    """
    found = [
        told
        | {"headline": without_verdict(told["headline"])}
        | {"lab": lab["title"], "href": href(lab, told["question"]["id"])}
        for lab in measured_here(labs)
        for told in lab["answers"]
        if told["factor"]
    ]
    return sorted(found, key=lambda told: -told["size"])[:MOST_LARGEST]


def all_effects(labs: Iterable[Mapping[str, Any]]) -> tuple[list[Row], list[tuple[float, str]]]:
    """A row for each thing that a lab compares with another, the fastest first; and the ticks of their axis.

    Ticks are places and texts; that of 1 is among them. What two questions ask of one setting counts once, and a row
    leads to the question that the ratio in its middle is of.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for lab, answer in answers_here(labs):
        of_answer: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for effect in _effects(answer):
            key: tuple[str, ...] = (lab["title"], effect["subject"], effect["baseline"], effect["quantity"])
            of_answer.setdefault(key, []).append(effect | {"page": href(lab, answer["question"]["id"])})
        for key, effects in of_answer.items():
            asked = {effect["setting"] for effect in groups.setdefault(key, [])}
            groups[key] += [effect for effect in effects if effect["setting"] not in asked]
    ratios = [effect[name] for effects in groups.values() for effect in effects for name in ("low", "ratio", "high")]
    known = [min(WIDEST, max(1 / WIDEST, ratio)) for ratio in ratios if ratio > 0]
    axis = Axis(math.log2(min([0.5, *known])), math.log2(max([2.0, *known])))
    by_ratio = {key: sorted(effects, key=lambda effect: float(effect["ratio"])) for key, effects in groups.items()}
    middles = {key: _middle(effects) for key, effects in by_ratio.items()}
    ordered = sorted(groups, key=lambda key: float(middles[key]["ratio"]))
    return [_row(key, middles[key], groups[key], axis) for key in ordered], axis.ticks()


def _middle(effects: list[dict[str, Any]]) -> dict[str, Any]:
    """Of effects in the order of their ratios; of two the one nearer to 1."""
    both = effects[(len(effects) - 1) // 2], effects[len(effects) // 2]
    return min(both, key=lambda effect: abs(math.log(effect["ratio"])))


def smallest_difference(labs: Iterable[Mapping[str, Any]]) -> dict[str, str] | None:
    """What the index says of alternatives that were measured against themselves here, and where that stands."""
    for lab, answer in answers_here(labs):
        if answer["question"]["id"] == SMALLEST_DIFFERENCE and answer["verdict"] == "measured":
            return {"headline": answer["headline"], "href": href(lab, SMALLEST_DIFFERENCE)}
    return None


def _effects(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The effects of a finding; without an interval its ends are NaN, which JSON does not know."""
    ends = ("low", "high")
    return [
        effect | {end: math.nan if effect[end] is None else effect[end] for end in ends} for effect in answer["effects"]
    ]


def _row(key: tuple[str, ...], middle: Mapping[str, Any], effects: list[dict[str, Any]], axis: Axis) -> Row:
    lab, subject, baseline, quantity = key
    has_interval = middle["low"] == middle["low"]
    low, high = (axis.place(middle[end] if has_interval else middle["ratio"]) for end in ("low", "high"))
    against = f"vs. {baseline}" + ("" if quantity == "time" else f", {quantity}")
    interval = f"[{middle['low']:.2f}, {middle['high']:.2f}]" if middle["low"] < middle["high"] else ""  # not of counts
    others = sorted({axis.place(effect["ratio"]) for effect in effects if effect is not middle})
    place, value = axis.place(middle["ratio"]), f"{middle['ratio']:.2f}" if not is_uneven(middle) else ""
    return Row(subject, against, lab, middle["page"], middle["verdict"], value, interval, place, low, high, others)
