"""Measures a lab into a run: first all checks, then the header, then the points.

Under torchrun the first rank of the job makes the decisions and writes the run; the others only
help to measure.
"""

import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from labkit.lab.calibration import FRESH, LIMITS, newest_calibration
from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab, find_lab
from labkit.lab.point import Point
from labkit.lab.project import check_writable, runs_directory
from labkit.lab.runs.executor import Executor, OnOutput, run_as_worker_rank
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.runs.records import RunFileError, RunHeader, RunWriter
from labkit.lab.runs.store import Run
from labkit.lab.user_worker import NO_PLUGINS, Plugins, registered
from labkit.machine.description import describe_machine
from labkit.machine.load import load_before_measuring
from labkit.parallel.ranks import torchrun
from labkit.parallel.ranks.torchrun import broadcast_from_first_rank, job_rank, ranks_by_host

CALIBRATING = (
    "calibrating this machine first, about 15 seconds once per day and version: predictions need it"
)
# A calibration, which a reader waits for, has the fewest repeats that give an interval.
SHORT_LIMITS = {"repeats": 6, "warmup": 1, "model": "nano"}


def measure(
    study: Lab,
    config: LabConfig,
    *,
    profile: str,
    plugins: Plugins = NO_PLUGINS,
    only_plugins: bool = False,
    directory: Path | None = None,
    on_progress: ShowProgress = lambda progress: None,
    on_start: Callable[[Path], None] = lambda path: None,
    on_output: OnOutput = None,
) -> Run:
    """Measure every point of `config` into a new run in `data/runs/<lab>/` and return it, complete.

    Points that fail are recorded with their reason and do not stop the others. Interrupted at any
    moment, the run keeps what was measured and can be resumed. `on_start` gets the run's path
    before anything is measured. The caller's `plugins` are measured with the lab's alternatives,
    or with baselines alone if `only_plugins`.
    """
    _check_job()
    study.check_plugins(plugins)
    # While they are registered, the config may name them, as it names labkit's alternatives.
    with registered(study.register, plugins):
        config = study.with_plugins(config, plugins, only=only_plugins)
        folder = directory or runs_directory() / study.name
        _on_first_rank(lambda: check_writable(folder))
        points = study.plan(config, describe_machine())
        if only_plugins:
            points = [point for point in points if point.mentions({*plugins.alternatives})]
        unavailable = _prepare(study, config, points, on_progress)
        header = _plan(study, config, profile, points).model_copy(
            update={"user_alternatives": list(plugins.alternatives), "is_partial": only_plugins}
        )
        if job_rank() > 0:
            run_as_worker_rank(study, [] if unavailable else points, plugins)
        # Only now: what can be refused must be refused before there is a file.
        with RunWriter.create(folder, header) as writer:
            on_start(writer.path)
            if unavailable:
                for point in points:
                    writer.end_point(point, "skipped", reason=unavailable)
            else:
                executor = Executor(study, plugins, writer, on_progress, on_output)
                executor.measure(points, budget_s=config.budget_s)
        return Run.load(writer.path)


def resume(
    study: Lab,
    path: Path,
    *,
    plugins: Plugins = NO_PLUGINS,
    on_progress: ShowProgress = lambda progress: None,
    on_output: OnOutput = None,
) -> Run:
    """Measure the points of a run that have not ended, and return the whole run.

    RunFileError for a run of another lab, machine or plan; ParameterError if its inputs changed or
    are not available.
    """
    _check_job()
    run = Run.load(path)
    layout = ranks_by_host()
    _on_first_rank(lambda: _check_same_setting(study, run, layout))
    # While they are registered: the run's config names them.
    with registered(study.register, plugins):
        config = study.configure(run.header.profile, run.header.config)
        points = _plan_again(study, run, config)
        remaining = [point for point in points if point.id in set(run.pending)]
        # A run that another process writes is refused before anything is fetched.
        if job_rank() == 0:
            RunWriter.reopen(path).close()
        unavailable = _prepare(study, config, remaining, on_progress)
        if unavailable:
            raise ParameterError(f"{path}: cannot go on: {unavailable}")
        if job_rank() > 0:
            run_as_worker_rank(study, remaining, plugins)
        with RunWriter.reopen(path) as writer:
            # The run was read before its file was locked.
            if Run.load(path).pending != run.pending:
                raise RunFileError(
                    f"{path}: another process has written this run meanwhile; resume it again"
                )
            if remaining:
                writer.start_resumption(_command(), describe_machine().source)
            executor = Executor(study, plugins, writer, on_progress, on_output)
            executor.measure(remaining, done=len(points) - len(remaining))
        return Run.load(path)


def needs_calibration(studies: Iterable[Lab], profile: str) -> bool:
    """Return whether a lab predicts and this machine has no calibration by this labkit of today."""
    predicts = any(question.needs_calibration for lab in studies for question in lab.questions)
    if not predicts or profile == "smoke":  # which must be short
        return False
    _check_job()
    # In a job all other ranks would have to wait.
    if torchrun.is_job_rank():
        return False
    machine = describe_machine()
    calibration = newest_calibration(machine, within=FRESH)
    return calibration is None or calibration.source != str(machine.source)


def calibrate(on_progress: ShowProgress, on_output: OnOutput) -> None:
    """Measure a short run of the lab `limits`."""
    limits = find_lab(LIMITS)
    config = limits.configure("quick", SHORT_LIMITS)
    measure(limits, config, profile="quick", on_progress=on_progress, on_output=on_output)


def _plan(study: Lab, config: LabConfig, profile: str, points: list[Point]) -> RunHeader:
    machine = describe_machine()
    hosts = ranks_by_host()
    return RunHeader(
        lab=study.name,
        profile=profile,
        config=config.model_dump(mode="json"),
        machine=machine,
        command=_command(),
        started=datetime.now(UTC),
        planned={point.id: point.describe() for point in points},
        ranks_by_host=hosts,
        load=load_before_measuring(),
        # Calibrations measure one machine, not the links between several.
        calibration=newest_calibration(machine) if len(hosts or {}) < 2 else None,
    )


def _check_job() -> None:
    """ParameterError if the environment describes a job that is over, or not one of torchrun."""
    try:
        if torchrun.is_job_rank():
            torchrun.job_store()
    except ValueError as error:
        raise ParameterError(str(error)) from None


def _prepare(
    study: Lab, config: LabConfig, points: list[Point], on_progress: ShowProgress
) -> str | None:
    """Fetch the inputs if any of these points can be measured; return why not if that fails."""

    def prepare() -> str | None:
        machine = describe_machine()
        if all(point.skip_reason(machine) for point in points):
            return None
        return study.prepare(config, lambda text: on_progress(Progress(0, 1, text)))

    return _on_first_rank(prepare)


def _on_first_rank(call: Callable[[], str | None]) -> str | None:
    """Return the first rank's result on every rank, or raise its ParameterError on all."""
    # Wait for all ranks: a call may take long, and by now rank 0 must serve the job's store if that
    # is its task.
    broadcast_from_first_rank(None)
    result = None
    error = None
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
        origin = f"{header.machine.label} ({header.machine.host}, {instructions})"
        raise RunFileError(
            f"{run.path}: measured on {origin}, and numbers of two machines do not mix"
        )
    if header.ranks_by_host != layout:
        origin = torchrun.describe_hosts(header.ranks_by_host)
        raise RunFileError(
            f"{run.path}: measured by {origin}, and numbers of two layouts of ranks do not mix"
        )


def _plan_again(study: Lab, run: Run, config: LabConfig) -> list[Point]:
    """Plan a run's points again. RunFileError if they differ from the ones in its header."""
    then = run.header.planned
    now = {point.id: point for point in study.plan(config, run.header.machine)}
    # Of a run of `only_plugins` the plan has fewer points than the lab.
    points = [now[id] for id in then if id in now]
    if {point.id: point.describe() for point in points} != then:
        raise RunFileError(
            f"{run.path}: this labkit plans other points, or a file has changed; measure a new run"
        )
    return points


def _command() -> str:
    """Return the command as typed, without paths of this machine; "notebook" inside a kernel."""
    # A page with this command may be sent to anyone.
    program = Path(sys.argv[0]).name
    if program.startswith("ipykernel") or "ipykernel" in sys.modules:
        return "notebook"
    is_labkit = program in ("labkit", "__main__.py")
    return shlex.join(["labkit", *sys.argv[1:]] if is_labkit else [program])
