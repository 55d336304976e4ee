"""Measuring: the pending points of a study on their ranks, every row into the run as it comes."""

import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from labkit.lab.config import LabConfig, ParameterError, resolve_config
from labkit.lab.point import Point
from labkit.lab.project import runs_directory
from labkit.lab.store import Run, RunFileError, RunHeader, RunWriter
from labkit.lab.study import Study
from labkit.machine import describe_machine
from labkit.parallel.joined import agree, is_joined, joined_rank, ranks_by_host
from labkit.parallel.launch import PointEnd, Row, launch


@dataclass(frozen=True)
class Progress:
    """Where a measurement stands: `done` of `total` points, and what is being measured now."""

    done: int
    total: int
    text: str


ShowProgress = Callable[[Progress], None]


def measure(
    study: Study,
    config: LabConfig,
    *,
    profile: str,
    directory: Path | None = None,
    on_progress: ShowProgress = lambda progress: None,
    on_start: Callable[[Path], None] = lambda path: None,
    on_output: Callable[[str], None] | None = None,
) -> Run:
    """Measure every point of `config` into a new run in `data/runs/<lab>/`; returns it, complete.

    Points that fail are recorded with their reason and do not stop the others. Interrupted at any moment, the
    run keeps what was measured and can be resumed. `on_start` gets the run's path before anything is measured.
    """
    machine = describe_machine()
    unavailable = _prepare(study, config, on_progress)
    points = list(study.points(config, machine))
    header = RunHeader(
        lab=study.name,
        profile=profile,
        config=config.model_dump(mode="json"),
        machine=machine,
        command=_command(),
        started=datetime.now(UTC),
        planned={point.id: point.describe() for point in points},
        ranks_by_host=ranks_by_host(),
    )
    if len(header.planned) != len(points):
        raise ValueError(f"{study.name}: the plan names a point twice")
    if joined_rank() > 0:  # under torchrun the first rank writes; the others only take part
        _take_part(study, [] if unavailable else points)
        raise SystemExit(0)
    with RunWriter.create(directory or runs_directory() / study.name, header) as writer:
        on_start(writer.path)
        if unavailable:
            for point in points:
                writer.end_point(point, "skipped", reason=unavailable)
        else:
            _measure_points(study, points, len(points), writer, on_progress, on_output)
    return Run.load(writer.path)


def resume(
    study: Study,
    path: Path,
    *,
    on_progress: ShowProgress = lambda progress: None,
    on_output: Callable[[str], None] | None = None,
) -> Run:
    """Measure the points of a run that have not ended. RunFileError if it is of another lab or machine.

    ParameterError if what they need is no longer to be had.
    """
    run = Run.load(path)
    _check_same_setting(study, run)
    config = resolve_config(study.name, study.profiles, run.header.profile, run.header.config)
    if run.pending and (unavailable := _prepare(study, config, on_progress)):
        raise ParameterError(f"{path}: cannot go on: {unavailable}")
    points = _replan(study, run, config)
    pending = set(run.pending)
    remaining = [point for point in points if point.id in pending]
    if joined_rank() > 0:
        _take_part(study, remaining)
        raise SystemExit(0)
    with RunWriter.resume(path, _command()) as writer:
        _measure_points(study, remaining, len(points), writer, on_progress, on_output)
    return Run.load(path)


def _prepare(study: Study, config: LabConfig, on_progress: ShowProgress) -> str | None:
    """What the study fetches and checks first, on the first rank; every rank hears the reason why not, or raises."""
    reason, error = None, None
    if joined_rank() == 0:
        try:
            reason = study.prepare(config, lambda text: on_progress(Progress(0, 1, text)))
        except ParameterError as found:
            error = str(found)
    reason, error = agree([reason, error])
    if error is not None:
        raise ParameterError(error)
    return reason


def _command() -> str:
    """What the user typed, without the paths of this machine; "notebook" inside a kernel."""
    program = Path(sys.argv[0]).name
    if program.startswith("ipykernel") or "ipykernel" in sys.modules:
        return "notebook"
    is_labkit = program in ("labkit", "__main__.py")
    return shlex.join(["labkit", *sys.argv[1:]] if is_labkit else [program])


def describe_hosts(hosts: dict[str, list[int]] | None) -> str:
    """The layout of a run's ranks in words."""
    if hosts is None:
        return "ranks started on one machine"
    return "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {_span(ranks)} on {host}" for host, ranks in hosts.items())


def _span(ranks: list[int]) -> str:
    """0–7, or the ranks one by one where they are not neighbors."""
    neighbors = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if neighbors else ", ".join(map(str, ranks))


def _check_same_setting(study: Study, run: Run) -> None:
    """RunFileError for a run of another lab, machine, or layout of ranks."""
    header = run.header
    if header.lab != study.name:
        raise RunFileError(f"{run.path}: a run of the lab {header.lab!r}, not of {study.name!r}")
    here = describe_machine()
    if (header.machine.host, header.machine.label) != (here.host, here.label):
        there = f"{header.machine.label} ({header.machine.host})"
        raise RunFileError(f"{run.path}: measured on {there}, and numbers of two machines do not mix")
    if header.ranks_by_host != ranks_by_host():
        there = describe_hosts(header.ranks_by_host)
        raise RunFileError(f"{run.path}: measured by {there}, and numbers of two layouts of ranks do not mix")


def _replan(study: Study, run: Run, config: LabConfig) -> list[Point]:
    """The points of a run, planned again from its config; they must be the ones in its header."""
    points, then = list(study.points(config, run.header.machine)), run.header.planned
    now = {point.id: point.describe() for point in points}
    if now != then:
        why = f"this version of labkit plans other points, or a file is another: {_difference(then, now)}"
        raise RunFileError(f"{run.path}: {why}; measure a new run")
    return points


def _difference(then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> str:
    """In what the first point that is planned otherwise differs; in their number, if that does."""
    for before, after in zip(then.values(), now.values(), strict=False):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if names and len(then) == len(now):
            return ", ".join(f"{name} was {before.get(name)!r:.80} and is {after.get(name)!r:.80}" for name in names)
    return f"{len(now)} points, and {len(then)} in the run"


def _measure_points(
    study: Study,
    points: list[Point],
    total: int,
    writer: RunWriter,
    on_progress: ShowProgress,
    on_output: Callable[[str], None] | None,
) -> None:
    done = total - len(points)
    exhausted: dict[Any, float] = {}  # series -> the size at which it ran out of memory
    for same_ranks in _by_ranks(points):
        while same_ranks:
            same_ranks, skipped = _skip(study, same_ranks, exhausted)
            agree([point.id for point in same_ranks])
            for point, reason in skipped:
                writer.end_point(point, "skipped", reason=reason)
            done += len(skipped)
            if not same_ranks:
                break
            on_progress(Progress(done, total, same_ranks[0].title()))
            ended = _measure_group(study, same_ranks, writer, exhausted, on_output, on_progress, done, total)
            done += ended
            same_ranks = same_ranks[ended:]
    shutil.rmtree(_checkpoints(writer), ignore_errors=True)
    on_progress(Progress(done, total, ""))


def _measure_group(
    study: Study,
    points: list[Point],
    writer: RunWriter,
    exhausted: dict[Any, float],
    on_output: Callable[[str], None] | None,
    on_progress: ShowProgress,
    done: int,
    total: int,
) -> int:
    """Measure points of one group of ranks, until all ended or one ran out of memory; returns how many."""
    ended = 0
    # closing: an interrupt must end the ranks now, not when a traceback lets go of the generator
    with closing(_launch(study, points, on_output, _checkpoints(writer))) as events:
        for event in events:
            point = points[event.index]
            if isinstance(event, Row):
                writer.add_row(point, event.rank, event.values)
                if event.rank == 0 and (text := study.progress(point, event.values)):
                    on_progress(Progress(done + ended, total, f"{point.title()}: {text}"))
                continue
            _record_end(writer, point, event)
            shutil.rmtree(_checkpoints(writer) / point.id, ignore_errors=True)
            ended += 1
            if ended < len(points):
                on_progress(Progress(done + ended, total, points[ended].title()))
            if event.status == "oom" and (series := study.series(point)) is not None:
                exhausted[series[0]] = series[1]
                if not is_joined():  # the ranks of a torchrun job all go on to the next point
                    break
    return ended


def _checkpoints(writer: RunWriter) -> Path:
    """Where the workers of a run keep what an interrupted point goes on from; not there once the run is complete."""
    return writer.path.with_suffix(".checkpoints")


def _launch(
    study: Study, points: list[Point], on_output: Callable[[str], None] | None, checkpoints: Path | None = None
) -> Generator[Row | PointEnd, None, None]:
    first = points[0]
    worker: Any = type(study).worker
    return launch(
        partial(worker, checkpoints=checkpoints) if study.keeps_checkpoints else worker,
        points,
        world_size=first.world_size,
        backend=first.backend,
        scheduling=first.scheduling,
        timeout_s=first.timeout_s,
        on_output=on_output,
    )


def _record_end(writer: RunWriter, point: Point, end: PointEnd) -> None:
    details = ""
    if end.failure is not None:
        parts = (end.failure.traceback, end.failure.output_tail)
        details = "\n".join(part.strip() for part in parts if part.strip())
    writer.end_point(point, end.status, reason=end.reason, elapsed_s=end.elapsed_s, facts=end.facts, details=details)


def _skip(
    study: Study, points: list[Point], exhausted: dict[Any, float]
) -> tuple[list[Point], list[tuple[Point, str]]]:
    """Split points into those to measure and those this machine cannot, with the reason."""
    machine = describe_machine()
    remaining, skipped = [], []
    for point in points:
        reason = study.skip_reason(point, machine) or _exhausted_reason(study, point, exhausted)
        if point.fresh_ranks and is_joined():
            reason = "needs new processes, and the ranks of a torchrun job are there already"
        if reason is None:
            remaining.append(point)
        else:
            skipped.append((point, reason))
    return remaining, skipped


def _exhausted_reason(study: Study, point: Point, exhausted: dict[Any, float]) -> str | None:
    series = study.series(point)
    if series is None or series[0] not in exhausted or series[1] < exhausted[series[0]]:
        return None
    return "a smaller point of this series ran out of memory"


def _by_ranks(points: Iterable[Point]) -> list[list[Point]]:
    """Neighbors that can share one group of ranks."""
    return [list(group) for _, group in groupby(points, key=_rank_key)]


def _rank_key(point: Point) -> tuple[Any, ...]:
    shared = (point.world_size, point.backend, point.scheduling, point.timeout_s)
    return (*shared, point.id) if point.fresh_ranks else shared


def _take_part(study: Study, points: list[Point]) -> None:
    """A rank of torchrun other than the first: the points that the first one chooses, nothing written."""
    for same_ranks in _by_ranks(points):
        chosen = set(agree(None))
        if to_measure := [point for point in same_ranks if point.id in chosen]:
            for _ in _launch(study, to_measure, None):
                pass
