"""A check: correctness of every implementation, then the fixed set, then the baseline."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from labkit.check import TOLERANCE
from labkit.check.comparison import NOT_COMPARABLE, Change, compare
from labkit.check.facts import (
    Difference,
    describe_hardware,
    differences,
    has_lost_hardware,
    is_alike,
    torch_version,
)
from labkit.check.sessions import SessionTimes
from labkit.check.worker import CheckPoint, measure_quantities, sizes_on
from labkit.lab.config import Gain, ParameterError, Repeats, Seconds, Sessions, TimedConfig, Warmup
from labkit.lab.declaration import Lab
from labkit.lab.point import Point, repeat_in_sessions
from labkit.lab.project import check_writable, lock_file, project_root, runs_directory, write_file
from labkit.lab.runs.measure import measure
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.runs.store import Run, RunFileError, find_run
from labkit.lab.units import counted, join_words
from labkit.lab.user_checks import SHORTEST, Correctness, measure_checks, verdicts
from labkit.machine.description import Machine, describe_machine
from labkit.studies import load_lab

# On any number of cores: baselines of other numbers of ranks could not be compared.
CPU_RANKS = 2
# Compiled naive attention is torch's, and slow to compile.
ATTENTION = ["tiled", "flash", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa"]
# Labs that compare results with an exact one before they time, with what makes each short.
LABS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"implementations": ATTENTION},
    "all_reduce": {},
    "data_parallel": {},
    "sharding": {"optimizers": ["AdamW"]},
    "sync_batchnorm": {"alternatives": ["labkit", "torch"]},
}


class CheckConfig(TimedConfig):
    """How often the fixed set is measured; the set itself has no parameters."""

    warmup: Warmup = 2
    repeats: Repeats = 20
    rounds_s: Seconds | None = 2.5
    gain: Gain = 0.0  # nothing is compared within a run, so no gain can plan its rounds
    sessions: Sessions = 8
    timeout_s: float = 120.0


def _points(config: CheckConfig, machine: Machine) -> Iterator[Point]:
    """Yield one rank and all ranks on each device, in new processes for every session."""
    places: list[dict[str, Any]] = [{}, {"world_size": CPU_RANKS, "backend": "gloo"}]
    if machine.gpus:
        smallest = min(gpu.memory_bytes for gpu in machine.gpus)
        on_gpu = {"device": "cuda", "sizes": sizes_on(smallest)}
        places.append(on_gpu)
        if len(machine.gpus) > 1:
            places.append(on_gpu | {"world_size": len(machine.gpus), "backend": "nccl"})
    points = [CheckPoint.of(config, **place) for place in places]
    yield from points
    yield from repeat_in_sessions(points, config.sessions)


CHECK = Lab(
    name="check",
    title="Has this machine changed?",
    summary=(
        "A fixed small set of quantities, compared with an earlier measurement of the same machine"
    ),
    config=CheckConfig,
    points=_points,
    worker=measure_quantities,
    questions=(),
)


class Status(IntEnum):
    """Exit status of a check."""

    # 2 is a mistake of the caller, as of every command.
    OK = 0
    WRONG = 1
    """A result is wrong or missing."""
    SLOWER = 3
    """The machine lost speed, cores, threads or GPUs."""
    NOTHING_COMPARED = 4
    """No quantity could be compared: there is no baseline, or the machine was busy in all."""


@dataclass(frozen=True)
class CheckResult:
    """Results of a check."""

    run: Run
    baseline: Sequence[Run]
    """The newest run last; empty if nothing was compared."""
    correctness: list[Correctness]
    changes: list[Change]
    tolerance: float = TOLERANCE

    @property
    def is_wrong(self) -> bool:
        """Whether a result is wrong, or a point of the fixed set failed."""
        return any(self.run.failures()) or any(outcome.is_bad for outcome in self.correctness)

    @property
    def slower(self) -> list[Change]:
        """Quantities slower than the baseline by more than the tolerance."""
        return [
            change
            for change in self.changes
            if change.verdict == "slower" and change.ratio > 1 + self.tolerance
        ]

    @property
    def circumstances(self) -> list[Difference]:
        """Changes of the software since the baseline, which may explain others."""
        if not self.baseline:
            return []
        return [
            difference
            for difference in differences(self.baseline[-1], self.run)
            if not difference.forbids
        ]

    @property
    def nothing_compared_reason(self) -> str | None:
        """The most frequent reason if no quantity could be compared, or None."""
        reasons = [change.reason for change in self.changes]
        if not reasons or any(change.verdict != NOT_COMPARABLE for change in self.changes):
            return None
        return max(set(reasons), key=reasons.count)

    @property
    def status(self) -> Status:
        """Exit status of the check."""
        if self.is_wrong:
            return Status.WRONG
        has_lost = bool(self.baseline) and has_lost_hardware(self.baseline[-1], self.run)
        if has_lost or self.slower:
            return Status.SLOWER
        if self.nothing_compared_reason is not None:
            return Status.NOTHING_COMPARED
        return Status.OK


def check_machine(
    baseline: Sequence[Run],
    show: ShowProgress,
    on_output: Callable[[str], None] | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> CheckResult:
    """Check correctness, then the baseline. ParameterError while another check runs."""
    folder = checks_directory()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Two checks at once would each find the machine busy, and slower.
        try:
            lock_file(lock.fileno(), folder / "lock")
        except BlockingIOError:
            raise ParameterError(
                "another check runs here: start this one when that has ended"
            ) from None
        correctness = list(check_correctness(show, on_output))
        options: Any = {"directory": folder, "on_progress": show, "on_output": on_output}
        run = measure(CHECK, CHECK.configure("quick", {}), profile="quick", **options)
    return CheckResult(run, baseline, correctness, compare(baseline, run), tolerance)


def check_correctness(
    show: ShowProgress, on_output: Callable[[str], None] | None
) -> Iterator[Correctness]:
    """Yield the verdict on each implementation at each place."""
    n_gpus = len(describe_machine().gpus)
    places = []
    for device in ("cpu", "cuda"):
        for lab in map(load_lab, LABS):
            # A lab without the parameter has points of every backend: once is enough.
            if device == "cpu" or (n_gpus and "device" in lab.config.model_fields):
                places.append((device, lab))
    with TemporaryDirectory(prefix="labkit-check-", ignore_cleanup_errors=True) as folder:
        for index, (device, lab) in enumerate(places):
            show(Progress(index, len(places), f"correct? {lab.name}, {device}"))
            wanted = {**SHORTEST, **LABS[lab.name], "device": device}
            yield from verdicts(lab, measure_checks(lab, wanted, Path(folder), on_output=on_output))


def checks_directory() -> Path:
    """Folder of the fixed set's runs."""
    return runs_directory() / CHECK.name


def baseline_folder(machine: Machine) -> Path:
    """Return the folder of this host's baseline."""
    # By host alone: a GPU more or less is a change of the machine, not another machine.
    name = re.sub(r"[^\w-]+", "-", machine.host) or "host"
    return project_root() / "data" / "baselines" / name


def load_baseline(against: str | None, say: Callable[[str], None] = lambda line: None) -> list[Run]:
    """Return the run that `--against` names, or this machine's saved runs.

    Of these, the ones of the newest run's hardware and torch. `say` gets a line for each choice
    that a reader might not expect. Raises RunFileError, which names the file, for a damaged one,
    and ParameterError for a lab's run.
    """
    folder = _find_baseline_folder(describe_machine())
    if against is not None:
        return [_load_check(find_run([checks_directory(), folder], against))]
    runs = [_load_check(path) for path in sorted(folder.glob("*.jsonl"))]
    if not runs:
        return []
    if folder != baseline_folder(describe_machine()):
        say(
            f"the baseline was saved on {runs[-1].header.machine.host}, which has the same"
            " processor, cores and GPUs"
        )
    used = [run for run in runs if is_alike(runs[-1], run)]
    left_out = [run for run in runs if run not in used]
    if left_out:
        torches = join_words(sorted({str(torch_version(run)) for run in left_out}))
        say(
            f"left out of the baseline: {counted(len(left_out), 'run')} (torch {torches}), because"
            f" the newest (torch {torch_version(runs[-1])}) is of other hardware or another torch"
        )
    return used


def _load_check(path: Path) -> Run:
    run = Run.load(path)
    if run.header.lab != CHECK.name:
        raise ParameterError(
            f"{path.name}: a run of {run.header.lab}; expected one that `labkit check` wrote"
        )
    return run


def _find_baseline_folder(machine: Machine) -> Path:
    """Return the folder of this host's baseline, or that of an equal machine if it has none."""
    # Containers and clouds give a machine another name at every start.
    local = baseline_folder(machine)
    if any(local.glob("*.jsonl")):
        return local
    # The newest baseline of equal hardware: memory and disk do not change what is compared.
    for path in sorted(local.parent.glob("*/*.jsonl"), key=lambda path: path.name, reverse=True):
        with suppress(RunFileError):
            if describe_hardware(Run.load(path).header.machine) == describe_hardware(machine):
                return path.parent
    return local


def no_baseline_reason(result: CheckResult) -> str | None:
    """Return why a run must not be a baseline, or None."""
    if result.is_wrong:
        return "something is wrong or failed"
    # A baseline with a gap would make the quantity "not comparable" from now on.
    times = SessionTimes(result.run)
    reason = next(filter(None, map(times.missing_reason, times.names)), None)
    return reason and f"{reason}; save it while the machine is quiet"


def save_baseline(result: CheckResult) -> Path:
    """Add a run to this machine's baseline, and return its file."""
    folder = _find_baseline_folder(result.run.header.machine)
    path = folder / result.run.path.name
    write_file(path, result.run.path.read_bytes())
    return path
