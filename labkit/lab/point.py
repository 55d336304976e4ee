"""A point: one thing to measure, described completely.

The worker gets the point and nothing else, and the run records the same point, so that the two
cannot differ. Imports nothing heavy: every rank loads this module.
"""

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TypeVar

from labkit.lab.units import counted, format_bytes, label
from labkit.machine.cgroups import available_memory_bytes
from labkit.parallel.ranks.torchrun import ranks_here

if TYPE_CHECKING:
    from labkit.machine.description import Machine

# Resident memory of a rank on a CPU before it has a model: torch, mostly.
RANK_BYTES = 200 * 2**20
# Fields that name models, which differ in size: a series of points goes over them.
MODEL_FIELDS = ("size", "model", "workload")
BATCH = ("batch", "context_length")

POINT_S = 0.5
# Seconds that a plan allows for ranks to start.
START_S = {"cpu": 1.0, "cuda": 4.0}
# Models, their checks and warm-up pass some hundred times over the memory that a point needs.
# Measured on 2 cores: 1.5e-9 to 3.3e-9, for all ranks together; the GPU's is an estimate.
PREPARE_S_PER_BYTE = {"cpu": 2.5e-9, "cuda": 1e-10}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Fields of every point. A lab adds others; all must be JSON-able.

    Lists are tuples here (a point is hashable), and lists again when read from a run.
    """

    world_size: int = 1
    """Ranks that measure it together."""
    backend: str | None = None
    """Process-group backend, "gloo" or "nccl"; None: no process group."""
    scheduling: str = "batch"
    """Scheduling policy of CPU ranks, "batch" (SCHED_BATCH) or "default"."""
    timeout_s: float = 120.0
    """Deadline, after which the ranks are ended and the point is recorded as `timeout`."""

    fresh_ranks: bool = False
    """Whether new processes measure it, for effects that occur once per process."""

    @classmethod
    def of(cls, config: Any, **values: Any) -> Self:
        """Make a point with these fields and all others that `config` has; lists become tuples."""
        shared = {
            field.name: getattr(config, field.name)
            for field in fields(cls)
            if hasattr(config, field.name)
        }
        tuples = {
            name: tuple(value)
            for name, value in (shared | values).items()
            if isinstance(value, list)
        }
        return cls(**shared | values | tuples)

    @classmethod
    def on(cls, machine: "Machine", config: Any, world_size: int, **values: Any) -> Self:
        """Make a point of several ranks on the config's device, with the backend between them."""
        device = machine.device(config.device)
        backend = machine.backend(device, ranks_here(world_size))
        return cls.of(
            config, **{"world_size": world_size, "device": device, "backend": backend} | values
        )

    @cached_property
    def id(self) -> str:
        """Twelve hexadecimal digits of the description, the same on every machine."""
        # Sorted: a field that moves in its class changes no id, and a run is resumed.
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def describe(self) -> dict[str, Any]:
        """Fields by name as JSON has them, with tuples as lists."""
        # Through JSON, so that a planned point equals the one that is read from a run.
        return dict(json.loads(json.dumps(asdict(self))))

    @property
    def ranks_key(self) -> tuple[Any, ...]:
        """Key of the group of ranks: neighbors with equal keys share one."""
        # What a launch decides for all of its points.
        shared = (self.world_size, self.backend, self.scheduling, self.timeout_s)
        if self.fresh_ranks:
            return (*shared, self.id)
        return shared

    @property
    def needed_bytes(self) -> float:
        """Memory that one rank's tensors take on its device."""
        return 0.0

    @property
    def series(self) -> tuple[Hashable, float] | None:
        """Series and size: larger points are skipped after one that was too large or too slow.

        By default a series is all points that need memory and differ in their models and other
        numbers only.
        """
        others = ((name, value) for name, value in self._lab_fields() if name not in MODEL_FIELDS)
        names = [value for name, value in others if isinstance(value, str) or name in BATCH]
        group = (self.world_size, self.backend, self.scheduling, *names)
        if not self.needed_bytes:
            return None
        return group, self.needed_bytes

    @property
    def refusal(self) -> str | None:
        """Return why no machine can measure the point, or None."""
        return None

    def skip_reason(self, machine: "Machine") -> str | None:
        """Return why this machine cannot measure the point, such as a lack of memory, or None."""
        device = getattr(self, "device", "cpu")
        ranks = ranks_here(self.world_size)
        reason = self.refusal or machine.no_device_reason(device)
        if reason is not None:
            return reason
        if self.backend == "nccl" and ranks > len(machine.gpus) > 0:
            return f"NCCL needs one GPU per rank, and there are {len(machine.gpus)}"
        if device == "cuda" and ranks > len(machine.gpus) and machine.exclusive_gpus:
            return "ranks would share a GPU in exclusive mode (`nvidia-smi -c 0` ends it)"
        needed = ranks * self.needed_bytes
        if device == "cuda":
            # Ranks beyond the GPUs share them evenly, so the fullest one decides.
            gpus = [gpu.available_bytes for gpu in machine.gpus[:ranks]]
            available = len(gpus) * min(gpus)
        else:
            needed += ranks * RANK_BYTES
            available = available_memory_bytes()
        if needed <= available:
            return None
        return f"needs {format_bytes(needed)}, {format_bytes(available)} available"

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        if self.backend == "nccl":
            return "cuda"
        return getattr(self, "device", "cpu")

    @property
    def planned_s(self) -> float:
        """Planned seconds of the point itself."""
        # GPUs work side by side; ranks on a CPU wait for one memory.
        ranks = self.world_size if self.device_type == "cpu" else 1
        return POINT_S + PREPARE_S_PER_BYTE[self.device_type] * ranks * self.needed_bytes

    def mentions(self, names: Set[str]) -> bool:
        """Return whether a field is one of these names, or a list that has one."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value in names or (isinstance(value, tuple) and not names.isdisjoint(value)):
                return True
        return False

    def title(self) -> str:
        """Short name for a progress line: "2 ranks, wrappers, mini, cpu, batch 2"."""
        return ", ".join(self._title_parts())

    def title_among(self, points: "Sequence[Point]") -> str:
        """Shorter name that leaves out what these points have in common."""
        parts = self._title_parts()
        common = set(parts).intersection(*(point._title_parts() for point in points))
        return ", ".join(part for part in parts if part not in common) or self.title()

    def _title_parts(self) -> list[str]:
        parts = [counted(self.world_size, "rank")]
        if self.backend is not None:
            parts = [f"{self.world_size} ranks", self.backend]
        values = self._lab_fields()
        return parts + [
            label(name, value) for name, value in values if value and type(value) in (str, int)
        ]

    def _lab_fields(self) -> Iterator[tuple[str, Any]]:
        """Return names and values of the fields that a lab adds, device and batch last."""
        common = {field.name for field in fields(SessionPoint)}
        lab_names = [field.name for field in fields(self) if field.name not in common]
        return (
            (name, getattr(self, name))
            # What a point is about comes first in its title.
            for name in sorted(lab_names, key=lambda name: name in ("device", *BATCH))
        )


@dataclass(frozen=True, kw_only=True)
class TimedPoint(Point):
    """A point whose alternatives are timed in interleaved rounds."""

    warmup: int = 2
    """Rounds that do not count."""
    repeats: int = 10
    """Rounds that count, at most."""
    gain: float = 0.0
    """Rounds are as many as show a gain of this share with a power of 80%; 0: `repeats`."""
    rounds_s: float | None = None
    """Seconds that rounds may take; None: no limit."""
    seed: int = 0

    @property
    def contests(self) -> int:
        """Number of sets of rounds in the point, each of at most `rounds_s`."""
        return 1

    @property
    def planned_s(self) -> float:
        return super().planned_s + self.contests * (self.rounds_s or 0.0)

    @property
    def rounds(self) -> dict[str, Any]:
        """Options of `time_parts_interleaved`: number, end and order of the rounds."""
        ends = {"gain": self.gain, "rounds_s": math.inf if self.rounds_s is None else self.rounds_s}
        return {"warmup": self.warmup, "repeats": self.repeats, "seed": self.id} | ends

    def batch_seed(self, rank: int) -> int:
        """Seed of a rank's batch."""
        # 1000 apart: neighboring seeds of a reader share no batch with another rank's.
        return (1000 * self.seed + rank) % 2**63


# How often and how long something is measured, and on which random numbers: points and runs that
# differ in these alone did the same work. By `ratio_within`, a width of intervals, rounds ended
# before `gain` planned them: older runs have it.
REPETITION = {field.name for field in fields(TimedPoint)} - {field.name for field in fields(Point)}
REPETITION |= {"timeout_s", "sessions", "budget_s", "ratio_within"}


@dataclass(frozen=True, kw_only=True)
class DevicePoint(TimedPoint):
    """A timed point on "cpu" or "cuda"."""

    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class ModelPoint(DevicePoint):
    """A timed point that trains a model; `batch`: sequences or images per rank."""

    batch: int = 4
    context_length: int = 128


@dataclass(frozen=True, kw_only=True)
class SessionPoint(TimedPoint):
    """A point that may be measured again, by other ranks at another time."""

    session: int = 1

    @property
    def ranks_key(self) -> tuple[Any, ...]:
        return (*super().ranks_key, self.session)


P = TypeVar("P", bound=SessionPoint)


def repeat_in_sessions(points: Sequence[P], sessions: int = 2) -> Iterator[P]:
    """Yield the points of each further session, in reverse order."""
    # Reversed, so that what was measured early is measured late: a steady drift affects all alike.
    for _ in range(1, sessions):
        points = [replace(point, session=point.session + 1) for point in reversed(points)]
        yield from points


def planned_s(points: Iterable[Point]) -> float:
    """Planned seconds of points; where six rounds exceed `rounds_s`, they take longer."""
    return sum(
        START_S[group[0].device_type] + sum(point.planned_s for point in group)
        for group in by_ranks(points)
    )


def by_ranks(points: Iterable[Point]) -> list[list[Point]]:
    """Group neighbors that can share ranks."""
    return [list(group) for _, group in groupby(points, key=lambda point: point.ranks_key)]
