"""Which answers of a page come first, and how large the difference is that each of them tells."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.lab.sentences import TWOFOLD, UNEVEN, towards_1
from labkit.lab.units import format_share

AT_LEAST = "≥ "


def by_importance(answers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of a lab: differences first, the largest before the others; claims of others and gaps last.

    Each with what `size_of` says of it.
    """
    told = [{**answer, **size_of(answer)} for answer in answers]
    return sorted(told, key=lambda answer: (_rank(answer), -answer["size"]))


def _rank(answer: Mapping[str, Any]) -> int:
    if answer["verdict"] == "not measured":
        return 4
    if answer["claims"]:
        return 3
    if answer["factor"]:
        return 0
    return 1 if answer["verdict"] in ("measured", "counted", "predicted") else 2


def size_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """How large the difference is that a headline quotes: `factor`, "4.2×", `words`, "faster", `size`, its logarithm.

    Of one that is too uneven to be quoted the least that it is. `of`: "up to", where it is the largest of several, or
    "typically". `against`: the largest the other way, "26 % longer". `factor` is "" without a difference, or of one
    that is surely there and may be next to nothing.
    """
    lead = answer["lead"]
    if lead is None:
        return {"of": "", "factor": "", "words": "", "against": "", "size": 0.0}
    same = [one for one in answer["effects"] if all(one[name] == lead[name] for name in ("subject", "quantity"))]
    alike, others = ([one for one in same if (one["verdict"] == lead["verdict"]) is is_it] for is_it in (True, False))
    factor, words, size = _size(lead)
    is_largest = all(abs(math.log(one["ratio"])) <= abs(math.log(lead["ratio"])) for one in alike)
    of = "" if len(alike) < 2 or factor.startswith(AT_LEAST) else "up to" if is_largest else "typically"
    opposed = [one for one in others if one["verdict"] in ("faster", "slower")]
    against = " ".join(_size(max(opposed, key=lambda one: abs(math.log(one["ratio"]))))[:2]) if opposed else ""
    return {"of": of, "factor": factor, "words": words, "against": against, "size": size}


def _size(effect: Mapping[str, Any]) -> tuple[str, str, float]:
    is_least, is_less = effect["low"] is not None and is_uneven(effect), effect["ratio"] < 1
    nearest = (effect["high"] if is_less else effect["low"]) if is_least else effect["ratio"]
    size, quantity = max(0.0, -math.log(nearest) if is_less else math.log(nearest)), effect["quantity"]
    factor = math.exp(size)
    if factor >= TWOFOLD:
        factor = towards_1(factor) if is_least else factor
        number, of_time = f"{factor:.0f}×" if factor >= 10 else f"{factor:.1f}×", "faster" if is_less else "slower"
    else:
        share = 1 - 1 / factor if is_less else factor - 1
        number = f"{math.floor(100 * share)} %" if is_least else format_share(share)
        of_time = "less time" if is_less else "longer"
    words = of_time if quantity.startswith("time") else f"{'less' if is_less else 'more'} {quantity}"
    if is_least and factor < 1 + MIN_RELEVANT_DIFFERENCE:
        return "", words, size
    return (AT_LEAST if is_least else "") + number, words, size


def is_uneven(effect: Mapping[str, Any]) -> bool:
    """Whether its ratio is too uncertain to be quoted."""
    return bool(effect["high"] > UNEVEN * effect["low"])
