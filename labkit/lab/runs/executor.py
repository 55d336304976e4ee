"""Measures the points of a run, one after the other on their ranks; writes every row as it comes."""

import math
import shutil
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from labkit.bench.probe import PROBE, probed
from labkit.lab.declaration import Lab
from labkit.lab.point import Point, by_ranks
from labkit.lab.runs.progress import Tally
from labkit.lab.runs.writer import RunWriter
from labkit.lab.units import format_seconds
from labkit.lab.user_plugins import Plugins, worker_with_plugins
from labkit.machine import describe_machine
from labkit.machine.load import Load, LoadMeter
from labkit.parallel.launch import PointEnd, RankFailure, Retry, Row, launch, too_many_ranks_reason
from labkit.parallel.ranks.torchrun import broadcast_from_first_rank, is_job_rank

TOO_LONG = 6
"""Times what its rounds should take: a point whose fewest rounds take longer is the largest of its series, as on a CPU
without instructions for 16-bit numbers."""
SizeLimits = dict[Any, tuple[float, str]]
"""By series: the size from which on points are skipped, and why."""


def measure_points(
    study: Lab,
    points: list[Point],
    writer: RunWriter,
    tally: Tally,
    on_output: Callable[[str], None] | None,
    plugins: Plugins,
) -> None:
    """Measure these points, those of the same ranks by one launch; skip points that this machine cannot hold."""
    size_limits: SizeLimits = {}
    for same_ranks in by_ranks(points):
        while same_ranks:
            same_ranks, skipped = _skip(study, same_ranks, size_limits)
            broadcast_from_first_rank([point.id for point in same_ranks])
            for point, reason in skipped:
                writer.end_point(point, "skipped", reason=reason)
                tally.skipped(point.id)
            if not same_ranks:
                break
            tally.tell(same_ranks[0].title())
            ended = _measure_group(study, same_ranks, writer, size_limits, on_output, tally, plugins)
            same_ranks = same_ranks[ended:]
    shutil.rmtree(_checkpoints(writer), ignore_errors=True)
    tally.tell("")


def _measure_group(
    study: Lab,
    points: list[Point],
    writer: RunWriter,
    size_limits: SizeLimits,
    on_output: Callable[[str], None] | None,
    tally: Tally,
    plugins: Plugins,
) -> int:
    """Measure points of one group of ranks, until all ended or the rest is too large; returns how many."""
    ended, rows_s, meter = 0, list[float](), LoadMeter(knows_own=not is_job_rank())
    probe: dict[str, float] = {}
    # closing: an interrupt must end the ranks now, not when a traceback lets go of the generator
    with closing(_launch(study, points, on_output, plugins, _checkpoints(writer))) as events:
        for event in events:
            point = points[event.index]
            if isinstance(event, Row):
                values = event.values
                if PROBE in values:
                    probe |= values[PROBE]
                    continue
                writer.add_row(point, event.rank, values)
                if event.rank == 0 and (seconds := values.get("seconds")) and isinstance(seconds, list):
                    rows_s.append(median(seconds) * len(seconds))
                if event.rank == 0 and (text := study.progress(point, values)):
                    tally.tell(f"{point.title()}: {text}")
                continue
            if isinstance(event, Retry):
                writer.measure_again(point, event.alternative, event.reason, _details(event.failure))
                tally.tell(f"{point.title()}: again, without {event.alternative} ({event.reason})")
                rows_s.clear()
                continue
            _record_end(writer, point, event, meter.load().model_copy(update=probe))
            probe.clear()
            shutil.rmtree(_checkpoints(writer) / point.id, ignore_errors=True)
            ended += 1
            tally.ended(point.id)
            if ended < len(points):
                tally.tell(points[ended].title())
            reason, is_larger = _why_no_larger(point, event, rows_s)
            rows_s.clear()
            if reason and (series := point.series) is not None:
                size = math.nextafter(series[1], math.inf) if is_larger else series[1]
                size_limits[series[0]] = min((size, reason), size_limits.get(series[0], (math.inf, "")))
                if not is_job_rank():  # the ranks of a torchrun job all go on to the next point
                    break
    return ended


def _checkpoints(writer: RunWriter) -> Path:
    """Where the workers of a run keep what an interrupted point goes on from; not there once the run is complete."""
    return writer.path.with_suffix(".checkpoints")


def _launch(
    study: Lab,
    points: list[Point],
    on_output: Callable[[str], None] | None,
    plugins: Plugins,
    checkpoints: Path | None = None,
) -> Generator[Row | Retry | PointEnd, None, None]:
    first = points[0]
    worker = worker_with_plugins(study, plugins)
    return launch(
        partial(probed, worker, **({"checkpoints": checkpoints} if study.keeps_checkpoints else {})),
        points,
        world_size=first.world_size,
        backend=first.backend,
        scheduling=first.scheduling,
        timeout_s=first.timeout_s,
        on_output=on_output,
    )


def _record_end(writer: RunWriter, point: Point, end: PointEnd, load: Load) -> None:
    writer.end_point(
        point,
        end.status,
        reason=end.reason,
        elapsed_s=end.elapsed_s,
        facts=end.facts,
        details=_details(end.failure),
        load=load,
    )


def _details(failure: RankFailure | None) -> str:
    parts = (failure.traceback, failure.output_tail) if failure is not None else ()
    return "\n".join(part.strip() for part in parts if part.strip())


def _skip(study: Lab, points: list[Point], size_limits: SizeLimits) -> tuple[list[Point], list[tuple[Point, str]]]:
    """Split points into those to measure and those this machine cannot, with the reason."""
    machine = describe_machine()
    remaining, skipped = [], []
    for point in points:
        reason = point.skip_reason(machine) or _size_limits_reason(study, point, size_limits)
        if point.fresh_ranks and is_job_rank():
            reason = "needs new processes, and the ranks of a torchrun job are there already"
        if reason is None and not is_job_rank():
            reason = too_many_ranks_reason(point.world_size)
        if reason is None:
            remaining.append(point)
        else:
            skipped.append((point, reason))
    return remaining, skipped


def _why_no_larger(point: Point, end: PointEnd, rows_s: list[float]) -> tuple[str, bool]:
    """Why larger points of a series need not be tried, "" if they may; and whether another of this size may.

    `rows_s` is what each row took, by its median: neither one that is slow nor a stall is to blame for all.
    """
    if end.status == "oom":
        return "a smaller point of this series ran out of memory", False
    rounds_s = getattr(point, "rounds_s", None)
    timed_s = median(rows_s) * len(rows_s) if rows_s else 0.0
    if rounds_s is not None and not point.fresh_ranks and timed_s > TOO_LONG * rounds_s:
        return f"a smaller point of this series took {format_seconds(timed_s)}", True
    return "", False


def _size_limits_reason(study: Lab, point: Point, size_limits: SizeLimits) -> str | None:
    size, reason = math.inf, None
    if (series := point.series) is not None:
        size, reason = size_limits.get(series[0], (math.inf, None))
    return reason if series is not None and series[1] >= size else None


def run_as_worker_rank(study: Lab, points: list[Point], plugins: Plugins) -> None:
    """A rank of torchrun other than the first: the points that the first one chooses, nothing written."""
    for same_ranks in by_ranks(points):
        chosen = set(broadcast_from_first_rank(None))
        if to_measure := [point for point in same_ranks if point.id in chosen]:
            for _ in _launch(study, to_measure, None, plugins):
                pass
