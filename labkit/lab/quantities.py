"""What is compared, and the words for less and more of it."""

from dataclasses import dataclass, replace

import pandas as pd

from labkit.bench.statistics import adjust_p


@dataclass(frozen=True)
class Quantity:
    """How to say less and more of what ratios are of, a fraction of it and several times it; and the adjectives.

    `marks`: what stands in a table's row for less and for more; the adjectives if None. `part`: of what it is, if that
    is to be told behind the comparison. `lead`: in what there is no difference, where the things compared do not say.
    """

    name: str
    less: str
    times_less: str
    more: str
    times_more: str
    better: str
    worse: str
    marks: tuple[str, str] | None = None
    part: str = ""
    lead: str = ""

    def marked(self, table: pd.DataFrame) -> pd.DataFrame:
        """A judged table as it is shown: `verdict` in this quantity's words, and the `p` that it rests on, adjusted."""
        less, more = self.marks or (self.better, self.worse)
        verdict = table["verdict"].replace({"faster": less, "slower": more})
        return table.assign(p=adjust_p(table["p"].to_numpy(dtype=float)), verdict=verdict)


TIME = Quantity(
    *("time", "take {n} less time than", "are {n} faster than", "take {n} longer than", "take {n} as long as"),
    *("faster", "slower"),
    lead=" in time",
)
MEMORY = Quantity(
    *("memory", "need {n} less memory than", "need {n} less memory than"),
    *("need {n} more memory than", "need {n} as much memory as", "lighter", "heavier"),
    marks=("less", "more"),
    lead=" in memory",
)


def time_of_a_part(phrase: str) -> Quantity:
    """Time of a part of a step, which `phrase` tells: "for backward", "without the optimizer"."""
    return replace(TIME, name=f"time {phrase}", part=f" ({phrase})")
