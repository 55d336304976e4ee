"""A run within a time: how long its points take on this machine, and which are left out."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import NamedTuple

import numpy as np

from labkit.costs.calibration import Calibration
from labkit.lab.calibration import newest_calibration
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.point import MODEL_FIELDS, REPETITION, START_S, Point, by_ranks
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import Run, newest_runs
from labkit.lab.units import format_seconds
from labkit.machine.description import Machine, describe_machine
from labkit.machine.load import slowdown_by_others

# Newest runs of a lab that are read.
MAX_RUNS = 3
# Work by which two machines are compared: a matmul and an addition of medium size.
FLOPS = 1e9
ADDED_BYTES = 2**24


class Elapsed(NamedTuple):
    """Seconds that a point took, and those that each of its sets of rounds might have taken."""

    seconds: float
    rounds_s: float


@dataclass
class Budget:
    """The time of one run, which its points use up; those that do not fit are left out."""

    seconds: float
    """Infinite if the time is not limited."""
    expected: Mapping[str, float]
    """Seconds by point, from `expected_seconds`."""
    _start: float = field(default_factory=time.monotonic)
    _measured_s: float = 0.0
    _expected_s: float = 0.0

    def exclude(self, points: Sequence[Point]) -> set[str]:
        """Return the ids of the points to leave out: the longest, until the others fit."""
        excess_s = sum(self.expected[point.id] for point in points) - self.seconds
        left = Counter(map(_kind, points))
        excluded = set[str]()
        # Then few points are lost, and each of the many short ones answers as much.
        longest_first = sorted(points, key=lambda point: -self.expected[point.id])
        # The last point of a kind goes only if nothing else is left: a question may be about it.
        for spares_last in (True, False):
            for point in longest_first:
                is_spared = spares_last and left[_kind(point)] == 1
                if excess_s > 0 and point.id not in excluded and not is_spared:
                    excluded.add(point.id)
                    left[_kind(point)] -= 1
                    excess_s -= self.expected[point.id]
        return excluded

    def count(self, point: Point, elapsed_s: float) -> None:
        """Learn the pace from a point that has ended."""
        self._measured_s += elapsed_s
        self._expected_s += self.expected[point.id]

    def has_time_for(self, point: Point) -> bool:
        """Return whether a point fits, if points go on taking longer or shorter than expected."""
        remaining_s = self._start + self.seconds - time.monotonic()
        return self._pace * self.expected[point.id] <= remaining_s

    def expected_left_s(self, points: Iterable[str]) -> float:
        """Return the seconds of the points with these ids, if they go on as those before."""
        return self._pace * sum(self.expected[id] for id in points)

    @property
    def _pace(self) -> float:
        # Of all points together: one that is wrongly planned says little of the others.
        return self._measured_s / self._expected_s if self._expected_s > 0 else 1.0

    @property
    def reason(self) -> str:
        """Why a point is left out."""
        return f"left out to fit into {format_seconds(round(self.seconds))}"


def plan_budget(study: Lab, points: Sequence[Point], budget_s: float | None) -> Budget:
    """Return how long each point takes, and within what time; None for no limit."""
    expected = expected_seconds(study, points, describe_machine())
    if budget_s is None:
        return Budget(math.inf, expected)
    # Other programs take their share of the cores while it measures, too.
    slowdown = slowdown_by_others()
    return Budget(budget_s, {id: slowdown * seconds for id, seconds in expected.items()})


def expected_seconds(study: Lab, points: Sequence[Point], machine: Machine) -> dict[str, float]:
    """Return the seconds that each point takes on this machine, with the start of its ranks.

    They are those of the same point in this machine's newest runs while nothing else ran, or in the
    recorded run, times how much longer this machine takes for the same work. A point of neither is
    planned by its memory and its rounds. Points that this machine cannot measure take no time.
    """
    earlier = dict[str, Elapsed]()
    # First the recorded run, then this machine's from the oldest to the newest: the last one wins.
    for run in newest_runs(recorded_directory() / study.name):
        earlier |= _elapsed(run, slowness(run.header.calibration, machine))
    for run in reversed([*islice(newest_runs(runs_directory() / study.name), MAX_RUNS)]):
        # Not of busy runs: the plan allows for today's load by itself.
        if run.header.machine.identity == machine.identity and not run.is_busy:
            earlier |= _elapsed(run)
    expected = {}
    for group in by_ranks(points):
        start_s = START_S[group[0].device_type] / len(group)
        for point in group:
            expected[point.id] = 0.0
            if point.skip_reason(machine) is None:
                seconds = point.planned_s
                key = _key(point.describe())
                if key in earlier:
                    # Rounds that may take longer than they could then do so.
                    limit_s = getattr(point, "rounds_s", None) or 0.0
                    longer_s = max(0.0, limit_s - earlier[key].rounds_s)
                    seconds = earlier[key].seconds + getattr(point, "contests", 0) * longer_s
                expected[point.id] = start_s + seconds
    return expected


def expected_lab_seconds(study: Lab, points: Sequence[Point], machine: Machine) -> list[float]:
    """Return the seconds of each point of a lab that this machine can measure.

    A lab that plans its points by the runs of others has none yet that can be measured: its only
    number is that of its recorded run, and no less than it plans. The recorded run found compiled
    code in a cache, and a run here took 64 s of the 28 that it had.
    """
    seconds = [
        point_s for point_s in expected_seconds(study, points, machine).values() if point_s > 0
    ]
    if seconds:
        return seconds
    for run in newest_runs(recorded_directory() / study.name):
        pace = slowness(run.header.calibration, machine)
        recorded_s = pace * sum(end.elapsed_s for end in run.ends.values())
        return [max(recorded_s, sum(point.planned_s for point in points))]
    return []


def slowness(calibration: Calibration | None, machine: Machine) -> float:
    """Return how many times as long this machine takes as the calibrated one; 1 if unknown."""
    local = newest_calibration(machine)
    # A calibration of a busy machine would count twice what other programs take.
    if calibration is None or local is None or local.is_disturbed:
        return 1.0
    device = machine.device("auto")
    local_rates = local.rates_on(device)
    other_rates = calibration.rates_on(device)
    if local_rates is None or other_rates is None:
        return 1.0
    # One of each kind: which of them bounds a lab's points is not known.
    ratios = [
        local_rates.operator_s(flops, n_bytes) / other_rates.operator_s(flops, n_bytes)
        for flops, n_bytes in ((FLOPS, 0.0), (0.0, ADDED_BYTES))
    ]
    return float(np.exp(np.mean(np.log(ratios))))


def with_more_rounds(study: Lab, config: LabConfig, more_s: float) -> LabConfig:
    """Divide more seconds for rounds among all points. ParameterError if rounds have no time."""
    if not 0 < more_s < math.inf:
        raise ParameterError(f"expected more seconds of rounds than 0, got more={more_s}")
    machine = describe_machine()
    points = [point for point in study.plan(config, machine) if point.skip_reason(machine) is None]
    # Points without rounds, or without a limit of their time, have none to share.
    rounds_s = sum(
        getattr(point, "contests", 0) * (getattr(point, "rounds_s", None) or 0.0)
        for point in points
    )
    # The more rounds, the more of both limits: either may be what ended them.
    values = config.model_dump()
    if not rounds_s or values.get("rounds_s") is None:
        raise ParameterError(f"{study.name}: expected rounds with a time (`rounds_s`)")
    factor = 1 + more_s / rounds_s
    longer = {
        "rounds_s": factor * values["rounds_s"],
        "repeats": math.ceil(factor * values["repeats"]),
    }
    return config.model_copy(update=longer)


def _elapsed(run: Run, pace: float = 1.0) -> dict[str, Elapsed]:
    """Return how long each point of a run took, by its key."""
    elapsed = {}
    for id, end in run.ends.items():
        about = run.header.planned[id]
        # A failure, or a deadline, says nothing of how long the point takes where it works.
        if end.status == "ok":
            elapsed[_key(about)] = Elapsed(pace * end.elapsed_s, about.get("rounds_s") or 0.0)
    return elapsed


def _key(about: Mapping[str, object]) -> str:
    return json.dumps({name: about[name] for name in sorted(about) if name not in REPETITION})


def _kind(point: Point) -> str:
    """Name a point's kind by its names, such as a sweep or a device, but for models."""
    values = (
        getattr(point, attribute.name)
        for attribute in fields(point)
        if attribute.name not in MODEL_FIELDS
    )
    return " ".join(value for value in values if isinstance(value, str))
