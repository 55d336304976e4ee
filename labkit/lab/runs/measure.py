"""Measuring: the pending points of a study on their ranks, every row into the run as it comes."""

import shlex
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from labkit.bench.heartbeat import Beat
from labkit.lab.calibration import newest_calibration
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.own import Own, check_own, known, with_names, worker_with
from labkit.lab.point import Point, by_ranks
from labkit.lab.project import check_writable, runs_directory
from labkit.lab.runs.heard import heard, split
from labkit.lab.runs.progress import Progress, ShowProgress, Tally
from labkit.lab.runs.resuming import check_same_setting, config_again, replan
from labkit.lab.runs.store import Run, RunFileError, RunHeader
from labkit.lab.runs.writer import RunWriter
from labkit.lab.study import Study
from labkit.machine import describe_machine
from labkit.machine.load import Load, LoadMeter, announced, load_before_measuring
from labkit.parallel.launch import Again, PointEnd, RankFailure, Row, launch
from labkit.parallel.ranks.capacity import why_too_many
from labkit.parallel.ranks.joined import broadcast_from_first_rank, is_joined, joined_rank, ranks_by_host


def measure(
    study: Study,
    config: LabConfig,
    *,
    profile: str,
    alternatives: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    directory: Path | None = None,
    on_progress: ShowProgress = lambda progress: None,
    on_start: Callable[[Path], None] = lambda path: None,
    on_output: Callable[[str], None] | None = None,
) -> Run:
    """Measure every point of `config` into a new run in `data/runs/<lab>/`; returns it, complete.

    Points that fail are recorded with their reason and do not stop the others. Interrupted at any moment, the
    run keeps what was measured and can be resumed. `on_start` gets the run's path before anything is measured.
    `alternatives` and `models` are the caller's own, by name, measured with the study's; known only meanwhile.
    """
    own = Own(alternatives or {}, models or {})
    check_own(study, own)
    with known(study.plug_in, own):
        config = with_names(study, config, own)
        machine = describe_machine()
        folder = directory or runs_directory() / study.name
        _on_first_rank(lambda: check_writable(folder))
        _check_inputs(study, config, on_progress)
        points = list(study.points(config, machine))
        unavailable = _prepare(study, config, points, on_progress)
        load, hosts = load_before_measuring(), ranks_by_host()
        header = RunHeader(
            lab=study.name,
            profile=profile,
            config=config.model_dump(mode="json"),
            machine=machine,
            command=_command(),
            started=datetime.now(UTC),
            planned={point.id: point.describe() for point in points},
            ranks_by_host=hosts,
            load=load,
            # of one machine: links between hosts are not among what it knows
            calibration=newest_calibration(machine) if len(hosts or {}) < 2 else None,
        )
        if len(header.planned) != len(points):
            raise ValueError(f"{study.name}: the plan names a point twice")
        if joined_rank() > 0:  # under torchrun the first rank writes; the others only take part
            _take_part(study, [] if unavailable else points, own)
            raise SystemExit(0)
        with RunWriter.create(folder, header) as writer, announced():
            on_start(writer.path)
            if unavailable:
                for point in points:
                    writer.end_point(point, "skipped", reason=unavailable)
            else:
                tally = Tally(on_progress, writer.path, [point.id for point in points], len(points))
                _measure_points(study, points, writer, tally, on_output, own)
        return Run.load(writer.path)


def resume(
    study: Study,
    path: Path,
    *,
    alternatives: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    on_progress: ShowProgress = lambda progress: None,
    on_output: Callable[[str], None] | None = None,
) -> Run:
    """Measure the points of a run that have not ended. RunFileError if it is of another lab, machine or plan.

    ParameterError if what they need is no longer what it was, or not to be had. Whatever else may refuse has been
    looked at before anything is fetched.
    """
    run, layout = Run.load(path), ranks_by_host()
    _on_first_rank(lambda: check_same_setting(study, run, layout))
    own = Own(alternatives or {}, models or {})
    with known(study.plug_in, own):  # the run's config names them
        config = config_again(study, run)
        pending = set(run.pending)
        if pending:
            _check_inputs(study, config, on_progress)
        points = replan(study, run, config)
        remaining = [point for point in points if point.id in pending]
        if joined_rank() > 0:
            _prepare_again(study, path, config, remaining, on_progress)
            _take_part(study, remaining, own)
            raise SystemExit(0)
        with RunWriter.reopen(path) as writer, announced():
            if Run.load(path).pending != run.pending:  # what was read before the file was locked
                raise RunFileError(f"{path}: another process has written this run meanwhile; resume it again")
            _prepare_again(study, path, config, remaining, on_progress)
            if remaining:
                writer.begin_again(_command(), describe_machine().source)
            tally = Tally(on_progress, path, [point.id for point in remaining], len(points))
            _measure_points(study, remaining, writer, tally, on_output, own)
        return Run.load(path)


def _check_inputs(study: Study, config: LabConfig, on_progress: ShowProgress) -> None:
    """ParameterError on every rank for what the first one finds wrong with the files that the config names."""
    _on_first_rank(lambda: study.check_inputs(config, lambda text: on_progress(Progress(0, 1, text))))


def _prepare(study: Study, config: LabConfig, points: list[Point], on_progress: ShowProgress) -> str | None:
    """Fetch what these points need, if any of them can be measured here; the reason why it cannot be had."""

    def prepare() -> str | None:
        machine = describe_machine()
        if all(study.skip_reason(point, machine) for point in points):
            return None
        return study.prepare(config, lambda text: on_progress(Progress(0, 1, text)))

    return _on_first_rank(prepare)


def _prepare_again(study: Study, path: Path, config: LabConfig, points: list[Point], on_progress: ShowProgress) -> None:
    if unavailable := _prepare(study, config, points, on_progress):
        raise ParameterError(f"{path}: cannot go on: {unavailable}")


def _on_first_rank(call: Callable[[], str | None]) -> str | None:
    """What the first rank's call returns, on every rank; what it raises, every rank raises."""
    # All are here: a call may take long, and where rank 0 serves the job's store, it must do so by now.
    broadcast_from_first_rank(None)
    result, error, is_of_run = None, None, False
    if joined_rank() == 0:
        try:
            result = call()
        except ParameterError as found:
            error, is_of_run = str(found), isinstance(found, RunFileError)
    result, error, is_of_run = broadcast_from_first_rank([result, error, is_of_run])
    if error is not None:
        raise RunFileError(error) if is_of_run else ParameterError(error)
    return result


def _command() -> str:
    """What the user typed, without the paths of this machine; "notebook" inside a kernel."""
    program = Path(sys.argv[0]).name
    if program.startswith("ipykernel") or "ipykernel" in sys.modules:
        return "notebook"
    is_labkit = program in ("labkit", "__main__.py")
    return shlex.join(["labkit", *sys.argv[1:]] if is_labkit else [program])


def _measure_points(
    study: Study,
    points: list[Point],
    writer: RunWriter,
    tally: Tally,
    on_output: Callable[[str], None] | None,
    own: Own,
) -> None:
    exhausted: dict[Any, float] = {}  # series -> the size at which it ran out of memory
    for same_ranks in by_ranks(points):
        while same_ranks:
            same_ranks, skipped = _skip(study, same_ranks, exhausted)
            broadcast_from_first_rank([point.id for point in same_ranks])
            for point, reason in skipped:
                writer.end_point(point, "skipped", reason=reason)
                tally.skipped(point.id)
            if not same_ranks:
                break
            tally.tell(same_ranks[0].title())
            ended = _measure_group(study, same_ranks, writer, exhausted, on_output, tally, own)
            same_ranks = same_ranks[ended:]
    shutil.rmtree(_checkpoints(writer), ignore_errors=True)
    tally.tell("")


def _measure_group(
    study: Study,
    points: list[Point],
    writer: RunWriter,
    exhausted: dict[Any, float],
    on_output: Callable[[str], None] | None,
    tally: Tally,
    own: Own,
) -> int:
    """Measure points of one group of ranks, until all ended or one ran out of memory; returns how many."""
    ended, meter = 0, LoadMeter(knows_own=not is_joined())
    beats: dict[int, list[Beat]] = {}
    # closing: an interrupt must end the ranks now, not when a traceback lets go of the generator
    with closing(_launch(study, points, on_output, own, _checkpoints(writer))) as events:
        for event in events:
            point = points[event.index]
            if isinstance(event, Row):
                values, call, noted = split(event.values)
                if noted is not None:
                    beats[event.rank] = noted
                    continue
                writer.add_row(point, event.rank, values, call)
                if event.rank == 0 and (text := study.progress(point, values)):
                    tally.tell(f"{point.title()}: {text}")
                continue
            if isinstance(event, Again):
                writer.measure_again(point, event.alternative, event.reason, _details(event.failure))
                tally.tell(f"{point.title()}: again, without {event.alternative} ({event.reason})")
                beats.clear()
                continue
            _record_end(writer, point, event, meter.load(), [beats[rank] for rank in sorted(beats)])
            beats.clear()
            shutil.rmtree(_checkpoints(writer) / point.id, ignore_errors=True)
            ended += 1
            tally.ended(point.id)
            if ended < len(points):
                tally.tell(points[ended].title())
            if event.status == "oom" and (series := study.series(point)) is not None:
                exhausted[series[0]] = series[1]
                if not is_joined():  # the ranks of a torchrun job all go on to the next point
                    break
    return ended


def _checkpoints(writer: RunWriter) -> Path:
    """Where the workers of a run keep what an interrupted point goes on from; not there once the run is complete."""
    return writer.path.with_suffix(".checkpoints")


def _launch(
    study: Study,
    points: list[Point],
    on_output: Callable[[str], None] | None,
    own: Own,
    checkpoints: Path | None = None,
) -> Generator[Row | Again | PointEnd, None, None]:
    first = points[0]
    worker = worker_with(study, own)
    return launch(
        partial(heard, worker, **({"checkpoints": checkpoints} if study.keeps_checkpoints else {})),
        points,
        world_size=first.world_size,
        backend=first.backend,
        scheduling=first.scheduling,
        timeout_s=first.timeout_s,
        on_output=on_output,
    )


def _record_end(writer: RunWriter, point: Point, end: PointEnd, load: Load, beats: list[list[Beat]]) -> None:
    writer.end_point(
        point,
        end.status,
        reason=end.reason,
        elapsed_s=end.elapsed_s,
        facts=end.facts,
        details=_details(end.failure),
        load=load,
        beats=beats,
    )


def _details(failure: RankFailure | None) -> str:
    parts = (failure.traceback, failure.output_tail) if failure is not None else ()
    return "\n".join(part.strip() for part in parts if part.strip())


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
        if reason is None and not is_joined():
            reason = why_too_many(point.world_size)
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


def _take_part(study: Study, points: list[Point], own: Own) -> None:
    """A rank of torchrun other than the first: the points that the first one chooses, nothing written."""
    for same_ranks in by_ranks(points):
        chosen = set(broadcast_from_first_rank(None))
        if to_measure := [point for point in same_ranks if point.id in chosen]:
            for _ in _launch(study, to_measure, None, own):
                pass
