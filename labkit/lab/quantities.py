"""What is compared, and the words for less and more of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantity:
    """How to say less and more of what ratios are of, a fraction of it and several times it; and the adjectives."""

    name: str
    less: str
    times_less: str
    more: str
    times_more: str
    better: str
    worse: str


TIME = Quantity(
    *("time", "take {n} less time than", "are {n} faster than", "take {n} longer than", "take {n} as long as"),
    *("faster", "slower"),
)
MEMORY = Quantity(
    *("memory", "need {n} less memory than", "need {n} less memory than"),
    *("need {n} more memory than", "need {n} as much memory as", "lighter", "heavier"),
)
