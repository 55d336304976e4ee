"""Measures the points of a run, one after the other, and writes every row as it comes."""

import math
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

from labkit.bench.intervals import MIN_SAMPLES
from labkit.bench.probe import PROBE, probed
from labkit.lab.declaration import Lab
from labkit.lab.point import Point, by_ranks
from labkit.lab.runs.budget import Budget, plan_budget
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.runs.records import RunWriter
from labkit.lab.units import format_seconds
from labkit.lab.user_worker import Plugins
from labkit.machine.description import describe_machine
from labkit.machine.load import LoadMeter
from labkit.parallel.launch import PointEnd, Row, launch, too_many_ranks_reason
from labkit.parallel.ranks.fork_server import PRELOADED
from labkit.parallel.ranks.torchrun import broadcast_from_first_rank, is_job_rank

Events = Generator[Row | PointEnd, None, None]
OnOutput = Callable[[str], None] | None
# A point that takes this many times `rounds_s` is the largest of its series. Without 16-bit
# instructions a CPU would take hours for the others.
TOO_LONG = 6


class SizeLimit(NamedTuple):
    """Points of a series are skipped from this size up, for this reason."""

    size: float
    reason: str


NO_LIMIT = SizeLimit(math.inf, "")


@dataclass
class Executor:
    """Measures points into one run, a launch per group of ranks; skips what does not fit here."""

    study: Lab
    plugins: Plugins
    writer: RunWriter
    on_progress: ShowProgress
    on_output: OnOutput
    _budget: Budget = field(init=False)
    _total: int = 0
    _done: int = 0
    _start: float = field(default_factory=time.monotonic)
    _size_limits: dict[Any, SizeLimit] = field(default_factory=dict)
    # Points by id that are still to be measured, without those that the budget leaves out.
    _pending: dict[str, Point] = field(default_factory=dict)
    # Seconds per row of the current point, of its median round: one stall makes no point too long.
    _rows_s: list[float] = field(default_factory=list)

    def measure(self, points: list[Point], *, budget_s: float | None = None, done: int = 0) -> None:
        """Measure points of a run, within a time if it has one, after `done` others."""
        self._budget = plan_budget(self.study, points, budget_s)
        self._total = done + len(points)
        self._done = done
        excluded = self._budget.exclude(points)
        self._pending = {point.id: point for point in points if point.id not in excluded}
        for same_ranks in by_ranks(points):
            while same_ranks:
                same_ranks = self._skip(same_ranks)
                # Ranks of a torchrun job measure what rank 0 has chosen.
                broadcast_from_first_rank([point.id for point in same_ranks])
                if not same_ranks:
                    break
                self._show(same_ranks[0].title())
                same_ranks = same_ranks[self._measure_group(same_ranks) :]
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        self._show("")

    def _show(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._start
        left_s = self._budget.expected_left_s(self._pending)
        run = self.writer.path.stem
        self.on_progress(Progress(self._done, self._total, text, elapsed_s, run, left_s))

    def _skip(self, points: list[Point]) -> list[Point]:
        """Record points that cannot be measured here, with the reason; return the others."""
        machine = describe_machine()
        remaining = []
        for point in points:
            reason = (
                point.skip_reason(machine)
                or self._too_large_reason(point)
                or too_many_ranks_reason(point.world_size)
            )
            if reason is None and not self._fits(point):
                reason = self._budget.reason
            if reason is None:
                remaining.append(point)
            else:
                self.writer.end_point(point, "skipped", reason=reason)
                self._pending.pop(point.id, None)
                self._done += 1
        return remaining

    def _too_large_reason(self, point: Point) -> str | None:
        if point.series is None:
            return None
        series, size = point.series
        limit = self._size_limits.get(series, NO_LIMIT)
        return limit.reason if size >= limit.size else None

    def _fits(self, point: Point) -> bool:
        """Return whether the budget has time for a point."""
        return point.id in self._pending and self._budget.has_time_for(point)

    def _measure_group(self, points: list[Point]) -> int:
        """Measure points of one group until all ended or the rest is too large; return how many."""
        ended = 0
        meter = LoadMeter(owns_all_ranks=not is_job_rank())
        probe = dict[str, float]()
        # closing: an interrupt must end the ranks now, not when a traceback lets go of the
        # generator.
        with closing(
            launch_points(self.study, points, self.plugins, self.on_output, self._checkpoints)
        ) as events:
            for event in events:
                point = points[event.index]
                match event:
                    case Row(values=values) if PROBE in values:
                        probe |= values[PROBE]
                    case Row(rank=rank, values=values):
                        self.writer.add_row(point, rank, values)
                        if rank == 0:
                            self._count_time(values)
                    case PointEnd():
                        self._end(point, event, meter.load().model_copy(update=probe))
                        ended += 1
                        probe = {}
                        if ended < len(points):
                            self._show(points[ended].title())
                        must_skip = self._limit_series(point, event)
                        if ended < len(points) and not self._fits(points[ended]):
                            must_skip = True
                        # Points cannot be taken out of a launch, so a new one gets the rest. In a
                        # torchrun job all ranks have the launch's list, and go on by it.
                        if must_skip and not is_job_rank():
                            break
        return ended

    def _count_time(self, values: Mapping[str, Any]) -> None:
        """Add the time of a row's fewest rounds to that of the point."""
        seconds = values.get("seconds")
        # A sum of other rows, such as both passes, would count their time twice.
        if isinstance(seconds, list) and seconds and not values.get("is_sum"):
            # The fewest: many rounds, which follow a long set-up, make a steady point no slow one.
            self._rows_s.append(median(seconds) * min(len(seconds), MIN_SAMPLES))

    def _end(self, point: Point, end: PointEnd, load: Any) -> None:
        fields = {"reason": end.reason, "elapsed_s": end.elapsed_s, "facts": end.facts}
        if end.failure is not None:
            parts = [end.failure.traceback.strip(), end.failure.output_tail.strip()]
            fields["details"] = "\n".join(filter(None, parts))
        self.writer.end_point(point, end.status, load=load, **fields)
        shutil.rmtree(self._checkpoints / point.id, ignore_errors=True)
        self._done += 1
        self._pending.pop(point.id, None)
        self._budget.count(point, end.elapsed_s)

    def _limit_series(self, point: Point, end: PointEnd) -> bool:
        """Skip larger points of a series after one that was too large or slow; return whether."""
        timed_s = median(self._rows_s) * len(self._rows_s) if self._rows_s else 0.0
        self._rows_s.clear()
        rounds_s = getattr(point, "rounds_s", None)
        # Fresh ranks time what occurs once, such as compiling: no smaller point would be faster.
        is_too_long = (
            rounds_s is not None and not point.fresh_ranks and timed_s > TOO_LONG * rounds_s
        )
        if point.series is None or not (end.status == "oom" or is_too_long):
            return False
        series, size = point.series
        limit = SizeLimit(size, f"{point.title()} ran out of memory")
        if end.status != "oom":
            took = f"{MIN_SAMPLES} rounds of {point.title()} already take {format_seconds(timed_s)}"
            # Only larger ones: others of this size may be faster.
            limit = SizeLimit(math.nextafter(size, math.inf), took)
        self._size_limits[series] = min(limit, self._size_limits.get(series, NO_LIMIT))
        return True

    @property
    def _checkpoints(self) -> Path:
        """Folder of the state of interrupted points, which goes once the run is complete."""
        return self.writer.path.with_suffix(".checkpoints")


def launch_points(
    study: Lab,
    points: list[Point],
    plugins: Plugins,
    on_output: OnOutput = None,
    checkpoints: Path | None = None,
) -> Events:
    """Launch points of one group of ranks and yield their events."""
    first = points[0]
    # The caller passes no folder on ranks of a job that must not write: see `run_as_worker_rank`.
    options = {"checkpoints": checkpoints} if study.keeps_checkpoints else {}
    PRELOADED.extend(module for module in study.preload if module not in PRELOADED)
    names = ("world_size", "backend", "scheduling", "timeout_s")
    group: dict[str, Any] = {name: getattr(first, name) for name in names}
    worker = partial(probed, study.worker_with(plugins), **options)
    return launch(worker, points, on_output=on_output, **group)


def run_as_worker_rank(study: Lab, points: list[Point], plugins: Plugins) -> NoReturn:
    """In a torchrun rank other than the first: measure what the first one chooses, then exit."""
    for same_ranks in by_ranks(points):
        chosen = set(broadcast_from_first_rank(None))
        to_measure = [point for point in same_ranks if point.id in chosen]
        if to_measure:
            for _ in launch_points(study, to_measure, plugins):
                pass  # the first rank gets the same events, and writes them
    raise SystemExit(0)
