"""What is compared, and the words for less and more of it."""

from dataclasses import dataclass, replace

import pandas as pd


@dataclass(frozen=True)
class Quantity:
    """How to say less and more of what ratios are of, a fraction of it and several times it; and the adjectives.

    `marks`: what stands in a table's row for less and for more; the adjectives if None.
    """

    name: str
    less: str
    times_less: str
    more: str
    times_more: str
    better: str
    worse: str
    marks: tuple[str, str] | None = None

    def marked(self, table: pd.DataFrame) -> pd.DataFrame:
        """A judged table with `verdict` in this quantity's words."""
        less, more = self.marks or (self.better, self.worse)
        return table.assign(verdict=table["verdict"].replace({"faster": less, "slower": more}))


TIME = Quantity(
    *("time", "take {n} less time than", "are {n} faster than", "take {n} longer than", "take {n} as long as"),
    *("faster", "slower"),
)
MEMORY = Quantity(
    *("memory", "need {n} less memory than", "need {n} less memory than"),
    *("need {n} more memory than", "need {n} as much memory as", "lighter", "heavier"),
    marks=("less", "more"),
)


def time_of_a_part(phrase: str) -> Quantity:
    """Time of a part of a step, which `phrase` tells: "for backward", "without the optimizer"."""
    return replace(
        TIME,
        name=f"time {phrase}",
        less=f"take {{n}} less time {phrase} than",
        times_less=f"are {{n}} faster {phrase} than",
        more=f"take {{n}} longer {phrase} than",
        times_more=f"take {{n}} as long {phrase} as",
    )
