"""Measuring a lab into a new run, or what a run still lacks: what may refuse, then the header, then the points."""

import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.lab.calibration import newest_calibration
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.point import Point
from labkit.lab.project import check_writable, runs_directory
from labkit.lab.runs.executor import measure_points, run_as_worker_rank
from labkit.lab.runs.progress import Progress, ShowProgress, Tally
from labkit.lab.runs.resuming import check_same_setting, config_again, replan
from labkit.lab.runs.store import Run, RunFileError, RunHeader
from labkit.lab.runs.writer import RunWriter
from labkit.lab.user_plugins import Plugins, check_plugins, registered, with_plugin_names
from labkit.machine import describe_machine
from labkit.machine.load import announced, load_before_measuring
from labkit.parallel.ranks.torchrun import broadcast_from_first_rank, job_rank, ranks_by_host


def measure(
    study: Lab,
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
    plugins = Plugins(alternatives or {}, models or {})
    check_plugins(study, plugins)
    with registered(study.register, plugins):
        config = with_plugin_names(study, config, plugins)
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
        if job_rank() > 0:  # under torchrun the first rank writes; the others only take part
            run_as_worker_rank(study, [] if unavailable else points, plugins)
            raise SystemExit(0)
        with RunWriter.create(folder, header) as writer, announced():
            on_start(writer.path)
            if unavailable:
                for point in points:
                    writer.end_point(point, "skipped", reason=unavailable)
            else:
                tally = Tally(on_progress, writer.path, [point.id for point in points], len(points))
                measure_points(study, points, writer, tally, on_output, plugins)
        return Run.load(writer.path)


def resume(
    study: Lab,
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
    plugins = Plugins(alternatives or {}, models or {})
    with registered(study.register, plugins):  # the run's config names them
        config = config_again(study, run)
        pending = set(run.pending)
        if pending:
            _check_inputs(study, config, on_progress)
        points = replan(study, run, config)
        remaining = [point for point in points if point.id in pending]
        if job_rank() > 0:
            _prepare_again(study, path, config, remaining, on_progress)
            run_as_worker_rank(study, remaining, plugins)
            raise SystemExit(0)
        with RunWriter.reopen(path) as writer, announced():
            if Run.load(path).pending != run.pending:  # what was read before the file was locked
                raise RunFileError(f"{path}: another process has written this run meanwhile; resume it again")
            _prepare_again(study, path, config, remaining, on_progress)
            if remaining:
                writer.start_resumption(_command(), describe_machine().source)
            tally = Tally(on_progress, path, [point.id for point in remaining], len(points))
            measure_points(study, remaining, writer, tally, on_output, plugins)
        return Run.load(path)


def _check_inputs(study: Lab, config: LabConfig, on_progress: ShowProgress) -> None:
    """ParameterError on every rank for what the first one finds wrong with the files that the config names."""
    _on_first_rank(lambda: study.check_inputs(config, lambda text: on_progress(Progress(0, 1, text))))


def _prepare(study: Lab, config: LabConfig, points: list[Point], on_progress: ShowProgress) -> str | None:
    """Fetch what these points need, if any of them can be measured here; the reason why it cannot be had."""

    def prepare() -> str | None:
        machine = describe_machine()
        if all(point.skip_reason(machine) for point in points):
            return None
        return study.prepare(config, lambda text: on_progress(Progress(0, 1, text)))

    return _on_first_rank(prepare)


def _prepare_again(study: Lab, path: Path, config: LabConfig, points: list[Point], on_progress: ShowProgress) -> None:
    if unavailable := _prepare(study, config, points, on_progress):
        raise ParameterError(f"{path}: cannot go on: {unavailable}")


def _on_first_rank(call: Callable[[], str | None]) -> str | None:
    """What the first rank's call returns, on every rank; what it raises, every rank raises."""
    # All are here: a call may take long, and where rank 0 serves the job's store, it must do so by now.
    broadcast_from_first_rank(None)
    result, error, is_of_run = None, None, False
    if job_rank() == 0:
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
