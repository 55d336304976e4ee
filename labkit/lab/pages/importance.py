"""Which answers of a page come first, and how large the difference is that each of them tells."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from labkit.lab.sentences import TWOFOLD, UNEVEN
from labkit.lab.units import format_share


def by_importance(answers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of a lab: differences first, the largest before the others; claims of others and gaps last.

    `factor` and `words` say how large what the headline quotes is, "4.2×" and "faster", `size` is its logarithm: of one
    that is too uneven to be quoted the least that it is. Without a difference `factor` is "".
    """
    told = [{**answer, **size_of(answer["lead"])} for answer in answers]
    return sorted(told, key=lambda answer: (_rank(answer), -answer["size"]))


def _rank(answer: Mapping[str, Any]) -> int:
    if answer["verdict"] == "not measured":
        return 4
    if answer["claims"]:
        return 3
    if answer["factor"]:
        return 0
    return 1 if answer["verdict"] in ("measured", "counted", "predicted") else 2


def size_of(lead: Mapping[str, Any] | None) -> dict[str, Any]:
    """`factor`, `words` and `size` of the effect that a headline quotes."""
    if lead is None:
        return {"factor": "", "words": "", "size": 0.0}
    is_least = lead["low"] is not None and is_uneven(lead)
    size = min(abs(math.log(ratio)) for ratio in ([lead["low"], lead["high"]] if is_least else [lead["ratio"]]))
    is_less, factor, quantity = lead["ratio"] < 1, math.exp(size), lead["quantity"]
    if factor >= TWOFOLD:
        number, of_time = f"{factor:.0f}×" if factor >= 10 else f"{factor:.1f}×", "faster" if is_less else "slower"
    else:
        number = format_share(1 - 1 / factor if is_less else factor - 1)
        of_time = "less time" if is_less else "longer"
    words = of_time if quantity.startswith("time") else f"{'less' if is_less else 'more'} {quantity}"
    return {"factor": ("≥ " if is_least else "") + number, "words": words, "size": size}


def is_uneven(effect: Mapping[str, Any]) -> bool:
    """Whether its ratio is too uncertain to be quoted."""
    return bool(effect["high"] > UNEVEN * effect["low"])
