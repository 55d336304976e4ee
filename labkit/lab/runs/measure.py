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
from labkit.lab.runs.executor import Executor, OnOutput, run_as_worker_rank
from labkit.lab.runs.progress import Progress, ShowProgress, Tally
from labkit.lab.runs.store import Run, RunFileError, RunHeader
from labkit.lab.runs.writer import RunWriter
from labkit.lab.user_plugins import Plugins, check_plugins, registered, with_plugin_names
from labkit.machine import describe_machine
from labkit.machine.load import announced, load_before_measuring
from labkit.parallel.ranks.hosts import describe_hosts
from labkit.parallel.ranks.torchrun import broadcast_from_first_rank, job_rank, ranks_by_host


def measure(
    study: Lab,
    config: LabConfig,
    *,
    profile: str,
    alternatives: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    only_plugins: bool = False,
    directory: Path | None = None,
    on_progress: ShowProgress = lambda progress: None,
    on_start: Callable[[Path], None] = lambda path: None,
    on_output: OnOutput = None,
) -> Run:
    """Measure every point of `config` into a new run in `data/runs/<lab>/`; returns it, complete.

    Points that fail are recorded with their reason and do not stop the others. Interrupted at any moment, the
    run keeps what was measured and can be resumed. `on_start` gets the run's path before anything is measured.
    `alternatives` and `models` are the caller's, by name: measured with the study's (or with baselines alone, if
    `only_plugins`), and registered only meanwhile.
    """
    plugins = Plugins(alternatives or {}, models or {})
    check_plugins(study, plugins)
    with registered(study.register, plugins):
        config = with_plugin_names(study, config, plugins, only=only_plugins)
        folder = directory or runs_directory() / study.name
        _on_first_rank(lambda: check_writable(folder))
        _check_inputs(study, config, on_progress)
        points = study.plan(config, describe_machine())
        if only_plugins:
            points = [point for point in points if point.mentions({*plugins.alternatives, *plugins.models})]
        unavailable = _prepare(study, config, points, on_progress)
        header = _plan(study, config, profile, points)
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
                Executor(study, plugins, writer, tally, on_output).measure(points)
        return Run.load(writer.path)


def resume(
    study: Lab,
    path: Path,
    *,
    alternatives: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    on_progress: ShowProgress = lambda progress: None,
    on_output: OnOutput = None,
) -> Run:
    """Measure the points of a run that have not ended. RunFileError if it is of another lab, machine or plan.

    ParameterError if what they need has changed or is not available. Everything else that may refuse comes before
    anything is fetched.
    """
    run, layout = Run.load(path), ranks_by_host()
    _on_first_rank(lambda: _check_same_setting(study, run, layout))
    plugins = Plugins(alternatives or {}, models or {})
    with registered(study.register, plugins):  # the run's config names them
        config = _configure_again(study, run)
        if run.pending:
            _check_inputs(study, config, on_progress)
        points = _plan_again(study, run, config)
        remaining = [point for point in points if point.id in set(run.pending)]
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
            Executor(study, plugins, writer, tally, on_output).measure(remaining)
        return Run.load(path)


def _plan(study: Lab, config: LabConfig, profile: str, points: list[Point]) -> RunHeader:
    """The header of a new run."""
    machine, hosts = describe_machine(), ranks_by_host()
    planned = {point.id: point.describe() for point in points}
    return RunHeader(
        lab=study.name,
        profile=profile,
        config=config.model_dump(mode="json"),
        machine=machine,
        command=_command(),
        started=datetime.now(UTC),
        planned=planned,
        ranks_by_host=hosts,
        load=load_before_measuring(),
        # a calibration of one machine has no links between hosts
        calibration=newest_calibration(machine) if len(hosts or {}) < 2 else None,
    )


def _check_inputs(study: Lab, config: LabConfig, on_progress: ShowProgress) -> None:
    """ParameterError on every rank for a bad file that the config names."""
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
    """The result of the first rank's call on every rank, or its ParameterError."""
    # All are here: a call may take long, and where rank 0 serves the job's store, it must do so by now.
    broadcast_from_first_rank(None)
    result, error = None, None
    if job_rank() == 0:
        try:
            result = call()
        except ParameterError as refusal:
            error = refusal
    result, message = broadcast_from_first_rank([result, error and str(error)])
    if message is not None:
        raise error or ParameterError(message)
    return result


def _check_same_setting(study: Lab, run: Run, layout: dict[str, list[int]] | None) -> None:
    """RunFileError for a run of another lab, machine, or layout of ranks (`ranks_by_host`)."""
    header = run.header
    if header.lab != study.name:
        raise RunFileError(f"{run.path}: a run of the lab {header.lab!r}, not of {study.name!r}")
    if header.machine.identity != describe_machine().identity:
        instructions = header.machine.instructions or "unknown instructions"
        there = f"{header.machine.label} ({header.machine.host}, {instructions})"
        raise RunFileError(f"{run.path}: measured on {there}, and numbers of two machines do not mix")
    if header.ranks_by_host != layout:
        there = describe_hosts(header.ranks_by_host)
        raise RunFileError(f"{run.path}: measured by {there}, and numbers of two layouts of ranks do not mix")


def _configure_again(study: Lab, run: Run) -> LabConfig:
    """The config of a run. ParameterError for unknown names, such as alternatives of another notebook."""
    try:
        return study.configure(run.header.profile, run.header.config)
    except ParameterError as error:
        raise ParameterError(f"{error}; a run with a notebook's alternatives goes on there, by lab.resume()") from None


def _plan_again(study: Lab, run: Run, config: LabConfig) -> list[Point]:
    """The points of a run, planned again from its config. RunFileError if they are not the ones in its header."""
    then = run.header.planned
    every = {point.id: point for point in study.plan(config, run.header.machine)}
    points = [every[identifier] for identifier in then if identifier in every]  # `only_plugins` leaves others out
    now = {point.id: point.describe() for point in every.values()}
    if {point.id: point.describe() for point in points} == then:
        return points
    difference = f"{len(now)} points, and {len(then)} in the run"
    for before, after in zip(then.values(), now.values(), strict=False):
        changes = [name for name in before | after if before.get(name) != after.get(name)]
        if changes and len(then) == len(now):
            words = (f"{name} was {before.get(name)!r:.80} and is {after.get(name)!r:.80}" for name in changes)
            difference = ", ".join(words)
            break
    reason = f"this version of labkit plans other points, or a file is another: {difference}"
    raise RunFileError(f"{run.path}: {reason}; measure a new run")


def _command() -> str:
    """The command as typed, without the paths of this machine; "notebook" inside a kernel."""
    program = Path(sys.argv[0]).name
    if program.startswith("ipykernel") or "ipykernel" in sys.modules:
        return "notebook"
    is_labkit = program in ("labkit", "__main__.py")
    return shlex.join(["labkit", *sys.argv[1:]] if is_labkit else [program])
