"""A point: one thing to measure, described completely.

The measuring function gets the point and nothing else, and the same point is what is recorded, so that the
record and the run cannot differ. Imports nothing heavy: every rank loads this module.
"""

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from labkit.machine import Machine


START_S, START_ON_GPU_S, POINT_S = 0.5, 5.0, 0.5
"""Allowances in a plan: for ranks to start, and for the inputs, checks and warm-up of a point."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The fields of every point. A study adds others; all must be JSON-able.

    Lists are tuples here (a point is hashable) and come back from a run's file as lists.
    """

    world_size: int = 1
    """Ranks that measure it together."""
    backend: str | None = None
    """Process-group backend, "gloo" or "nccl"; None: no process group."""
    scheduling: str = "batch"
    """Scheduling policy of CPU ranks, "batch" (SCHED_BATCH) or "default"."""
    timeout_s: float = 120.0
    """After this the ranks are ended and the point is recorded as `timeout`."""

    fresh_ranks: bool = False
    """Whether new processes measure it: for what happens once in the life of a process."""

    @classmethod
    def of(cls, config: Any, **values: Any) -> Self:
        """The point with these fields, and all others that `config` has under the same name; lists become tuples."""
        shared = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        lists = {name: tuple(value) for name, value in (shared | values).items() if isinstance(value, list)}
        return cls(**shared | values | lists)

    @cached_property
    def id(self) -> str:
        """Twelve hexadecimal digits that identify the description, in every process and on every machine."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def describe(self) -> dict[str, Any]:
        """The point as JSON has it: fields by name, tuples as lists."""
        description: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return description

    @property
    def of_ranks(self) -> tuple[Any, ...]:
        """Neighbors that are equal in this share one group of ranks."""
        shared = (self.world_size, self.backend, self.scheduling, self.timeout_s)
        return (*shared, self.id) if self.fresh_ranks else shared

    @property
    def series(self) -> tuple[Hashable, float] | None:
        """(series, size): after one of a series runs out of memory or takes far too long, larger ones are skipped."""
        return None

    def skip_reason(self, machine: "Machine") -> str | None:
        """Why this machine cannot measure the point ("needs 51 GiB, 22 GiB available"), or None."""
        return None

    @property
    def start_s(self) -> float:
        """The seconds that its ranks take to start, by the plan."""
        is_on_gpu = self.backend == "nccl" or getattr(self, "device", "cpu") == "cuda"
        return START_ON_GPU_S if is_on_gpu else START_S

    @property
    def planned_s(self) -> float:
        """The seconds it takes by the plan: nothing is measured."""
        return POINT_S

    def mentions(self, names: Set[str]) -> bool:
        """Whether a field is one of these names, or a list that has one."""
        values = (getattr(self, field.name) for field in fields(self))
        return any(not names.isdisjoint(value if isinstance(value, tuple) else (value,)) for value in values)

    def title(self) -> str:
        """A few words for a progress line."""
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class TimedPoint(Point):
    """One whose alternatives take turns before the clock."""

    warmup: int = 2
    """Rounds that are thrown away."""
    repeats: int = 10
    """Rounds that are kept, at most."""
    ratio_within: float = 0.0
    """Rounds end when the ratio of any two alternatives is known to this share; 0: they do not."""
    rounds_s: float | None = None
    """They end after so many seconds, too; None: they do not."""
    seed: int = 0

    @property
    def contests(self) -> int:
        """How often alternatives take turns in it, each time for at most `rounds_s`."""
        return 1

    @property
    def planned_s(self) -> float:
        return super().planned_s + self.contests * (self.rounds_s or 0.0)

    @property
    def rounds(self) -> dict[str, Any]:
        """Options of `time_parts_interleaved`: how many rounds, until when, and the seed of their order."""
        ends = {"ratio_within": self.ratio_within, "rounds_s": math.inf if self.rounds_s is None else self.rounds_s}
        return {"warmup": self.warmup, "repeats": self.repeats, "seed": self.id} | ends

    def seed_of(self, rank: int) -> int:
        """The seed of a rank's batch."""
        return (1000 * self.seed + rank) % 2**63


@dataclass(frozen=True, kw_only=True)
class SessionPoint(TimedPoint):
    """One that may be measured once more, by another group of ranks at another time (`labkit.bench.sessions`)."""

    session: int = 1

    @property
    def of_ranks(self) -> tuple[Any, ...]:
        return (*super().of_ranks, self.session)

    def next_session(self) -> Self:
        return replace(self, session=self.session + 1)


P = TypeVar("P", bound=SessionPoint)


def repeat_in_sessions(points: Sequence[P], sessions: int = 2) -> Iterator[P]:
    """The points again in each session but the first, the last one first: what drifts evenly hits all alike."""
    for _ in range(1, sessions):
        points = [point.next_session() for point in reversed(points)]
        yield from points


def planned_s(points: Iterable[Point]) -> float:
    """The seconds that points take by the plan: all rounds until their time is up, and allowances.

    A device for which six rounds take longer than `rounds_s` takes longer.
    """
    return sum(group[0].start_s + sum(point.planned_s for point in group) for group in by_ranks(points))


def by_ranks(points: Iterable[Point]) -> list[list[Point]]:
    """Neighbors that can share one group of ranks."""
    return [list(group) for _, group in groupby(points, key=lambda point: point.of_ranks)]
