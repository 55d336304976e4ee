"""Quantities that several labs measure, each under a key that holds all that matters, and whether the values agree.

A lab says by `Study.known` which of its rows are such a quantity. Two values differ if their 95 % intervals do not
meet.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import Any, ClassVar, Literal

import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, slowest_rank, summarize
from labkit.lab.columns import label
from labkit.lab.rows import select, summed
from labkit.lab.units import counted

PHASES = ("forward", "backward", "optimizer")
STEP, PASSES = "step", "forward and backward"
_WITH_OPTIMIZER = (STEP, "optimizer")

Agreement = Literal["agree", "differ", "too few repeats"]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A quantity and how its ranks ran; subclasses add their setting, whose fields are columns of a frame."""

    name: ClassVar[str]
    is_exact: ClassVar[bool] = False
    """A count, which repeats exactly, and which no slow machine changes."""

    device: str
    world_size: int
    threads: int
    """Of each rank."""
    scheduling: str

    @classmethod
    def setting(cls) -> list[str]:
        """The columns by which the quantity is told from others of its kind, but for `threads`."""
        return [field.name for field in fields(cls) if field.name != "threads"]

    def words(self) -> str:
        """ "training, forward, nano, batch 4, 64 tokens, float32, cpu, 2 threads"."""
        internal = ("world_size", "threads", "scheduling", "device")
        own = [label(name, value) for name, value in asdict(self).items() if name not in internal and value]
        ranks = [counted(self.world_size, "rank")] if self.world_size > 1 else []
        policy = [f"scheduling {self.scheduling}"] if self.scheduling != "batch" else []
        threads = counted(self.threads, "thread") + (" each" if ranks else "")
        return ", ".join([self.name, *own, self.device, *ranks, threads, *policy])


@dataclass(frozen=True, kw_only=True)
class StepTime(Shared):
    """Seconds of a part of an eager training step of a Transformer with explicit attention, without communication.

    `optimizer` is "" for the parts that do without. Made by `step_times`.
    """

    name = "training"
    part: str
    size: str
    batch: int
    context_length: int
    precision: str
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class ProductTime(Shared):
    """Seconds of the product of two square matrices with `size` rows, into one that is there."""

    name = "matrix product"
    size: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class AllReduceTime(Shared):
    """Seconds of one sum over all ranks of a float32 tensor, behind a barrier. `over`: "gloo", "nccl",
    "messages", "shared".
    """

    name = "all-reduce"
    n_bytes: int
    algorithm: str
    over: str


@dataclass(frozen=True, kw_only=True)
class PeakMemory(Shared):
    """The allocator's peak in bytes over a training step with AdamW and explicit attention, or a part of it."""

    name = "peak memory"
    is_exact = True
    part: str
    size: str
    batch: int
    context_length: int
    precision: str
    checkpoint_segment: int


@dataclass(frozen=True)
class Known:
    """Rows of a frame that measure a shared quantity in the column `value`, and where in the lab ("compiling")."""

    kind: type[Shared]
    rows: pd.DataFrame
    place: str = ""
    value: str = "seconds"

    def samples(self, threads: dict[str, int]) -> Iterable[tuple[Shared, str, pd.Series]]:
        """Key, point and samples of the slowest rank; `threads` by point. ValueError for a column that is missing."""
        if self.rows.empty:
            return
        columns = [*self.kind.setting(), "point"]
        if missing := [name for name in columns if name not in self.rows]:
            raise ValueError(f"expected the columns {', '.join(missing)} of {self.kind.__name__}")
        rows = self.rows.dropna(subset=self.value)
        for setting, group in slowest_rank(rows, self.value, columns).groupby(columns, sort=False):
            values = dict(zip(columns, setting, strict=True))
            point = str(values.pop("point"))
            if point in threads:
                yield self.kind(**_typed(self.kind, values), threads=threads[point]), point, group[self.value]


def _typed(kind: type[Shared], values: dict[str, Any]) -> dict[str, Any]:
    """A column of whole numbers is one of floats where other rows have none."""
    whole = {field.name for field in fields(kind) if field.type in (int, "int")}
    return {name: int(value) if name in whole else value for name, value in values.items()}


def step_times(rows: pd.DataFrame, optimizer: str, place: str = "") -> Known:
    """Of rows of training steps with the columns `part` and `seconds`; parts that follow one another are added, too.

    One point has one step: its rows differ by part, rank and repeat.
    """
    rows = select(rows, ["part", "seconds", "point", "rank", "repeat"]).dropna(subset="seconds")
    sums = [_sum(rows, name, parts) for name, parts in ((PASSES, PHASES[:2]), (STEP, PHASES))]
    rows = pd.concat([rows, *(total for total in sums if len(total))])
    needed = [optimizer if part in _WITH_OPTIMIZER else "" for part in rows["part"]]
    return Known(StepTime, rows.assign(optimizer=needed), place)


def _sum(rows: pd.DataFrame, name: str, parts: Sequence[str]) -> pd.DataFrame:
    """Rows of all these parts as one, in repeats that have each of them."""
    keys = ["point", "rank", "repeat"]
    about = select(rows, part=list(parts)).drop(columns=["part", "seconds"]).drop_duplicates(keys)
    return about.merge(summed(rows, "part", parts, name, ["point"]), on=keys)


@dataclass(frozen=True)
class Value:
    """What one point of a lab measured; `low` and `high` are None without an interval."""

    lab: str
    place: str
    value: float
    low: float | None
    high: float | None

    def meets(self, other: "Value") -> bool:
        """Whether intervals explain the difference. Of values without an interval: yes."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        if ratio_of([self, other]) < 1 + MIN_RELEVANT_DIFFERENCE:
            return True
        return self.low <= other.high and other.low <= self.high


def value_of(samples: Iterable[float], *, is_exact: bool) -> tuple[float, float | None, float | None]:
    """Median and interval; of a count the smallest and the largest."""
    known = list(samples)
    found = summarize(known)
    if is_exact:
        return found.median, min(known), max(known)
    return (found.median, found.low, found.high) if found.low == found.low else (found.median, None, None)


def agreement_of(values: Sequence[Value]) -> tuple[Agreement, float]:
    """Whether all of them agree, and how many times the largest is the smallest of those concerned."""
    told = [value for value in values if value.low is not None]
    if apart := [pair for pair in combinations(told, 2) if not pair[0].meets(pair[1])]:
        return "differ", max(map(ratio_of, apart))
    return ("agree" if len(told) > 1 else "too few repeats"), ratio_of(told or values)


def ratio_of(values: Sequence[Value]) -> float:
    """The largest over the smallest."""
    numbers = [value.value for value in values]
    return max(numbers) / min(numbers) if min(numbers) > 0 else float("inf") if max(numbers) > 0 else 1.0
