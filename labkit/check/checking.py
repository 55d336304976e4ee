"""The course of a check: correctness of every implementation first, then the fixed set, then the baseline."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.check import TOLERANCE
from labkit.check.comparison import LEAST_SESSIONS, Change, circumstances, compare, different_set, lost_hardware
from labkit.check.declaration import CHECK, correctness_labs
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.project import check_writable, project_root, runs_directory, write_file
from labkit.lab.runs.measure import measure
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.runs.store import Run, find_run
from labkit.machine import Machine, describe_machine
from labkit.machine.load import announced, other_measurements

ALTERNATIVES = ("implementation", "algorithm", "alternative")
"""Columns by which labs name what is checked."""
MOST_RUNS = 10
"""Of a baseline: older ones are not looked at."""


@dataclass(frozen=True)
class Correctness:
    """One implementation at one place: "ok", "not measured", or what is wrong."""

    lab: str
    device: str
    ranks: int
    name: str
    verdict: str
    reason: str | None = None
    details: str = ""
    """Traceback and last output, if a whole point failed."""

    @property
    def is_bad(self) -> bool:
        return self.verdict not in ("ok", "not measured")


@dataclass(frozen=True)
class CheckResult:
    """What a check has found of this machine."""

    run: Run
    baseline: Sequence[Run]
    """Runs of the baseline, the newest last; none: nothing was compared."""
    correctness: list[Correctness]
    changes: list[Change]
    circumstances: list[str] = field(default_factory=list)
    tolerance: float = TOLERANCE

    @property
    def slower(self) -> list[Change]:
        """Quantities slower than the baseline by more than the tolerance."""
        return [one for one in self.changes if one.verdict == "slower" and (one.ratio or 0) > 1 + self.tolerance]

    @property
    def failures(self) -> list[tuple[str, str, str]]:
        """Point, reason and traceback of what was to be timed and was not."""
        return list(self.run.failures())

    @property
    def status(self) -> int:
        """Exit status: 1 if a result is wrong or missing, 3 if the machine lost speed, cores or GPUs, else 0."""
        if self.failures or any(one.is_bad for one in self.correctness):
            return 1
        has_lost = bool(self.baseline) and lost_hardware(self.baseline[-1], self.run)
        return 3 if has_lost or self.slower else 0


def check_machine(
    baseline: Sequence[Run],
    show: ShowProgress,
    on_output: Callable[[str], None] | None = None,
    *,
    tolerance: float = TOLERANCE,
    sessions: int | None = None,
) -> CheckResult:
    """Check what is right, then measure the fixed set and compare it with the baseline.

    ParameterError while another measurement runs on this machine.
    """
    if other := other_measurements():
        raise ParameterError(f"labkit measures here already ({other}): check this machine when that has ended")
    check_writable(checks_directory())
    with announced():
        correctness = list(check_correctness(show, on_output))
        config = CHECK.configure("quick", {"sessions": sessions})
        options: Any = {"directory": checks_directory(), "on_progress": show, "on_output": on_output}
        run = measure(CHECK, config, profile="quick", **options)
    notes = list(circumstances(baseline[-1], run)) if baseline else []
    return CheckResult(run, baseline, correctness, compare(baseline, run), notes, tolerance)


def check_correctness(show: ShowProgress, on_output: Callable[[str], None] | None) -> Iterator[Correctness]:
    """Yield each implementation of the labs on every device and transport of this machine."""
    devices = ["cpu", *(["cuda"] if describe_machine().gpus else [])]
    labs = [(device, *pair) for device in devices for pair in correctness_labs(device)]
    folder = Path(tempfile.mkdtemp(prefix="labkit-check-"))
    try:
        for index, (device, lab, config) in enumerate(labs):
            show(Progress(index, len(labs), f"correct? {lab.name}, {device}"))
            yield from _verdicts(lab, measure(lab, config, profile="smoke", directory=folder, on_output=on_output))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verdicts(lab: Lab, run: Run) -> Iterator[Correctness]:
    """Yield a verdict per alternative, device, ranks and transport; and per point that did not end well."""
    frame = run.frame()
    name = next((column for column in ALTERNATIVES if column in frame), None)
    if name is not None:
        rows = frame.reindex(columns=[name, "transport", "backend", "device", "world_size", "check", "not_measured"])
        rows["device"] = rows["device"].fillna(rows["backend"].map({"nccl": "cuda"}).fillna("cpu"))
        rows["transport"] = rows["transport"].astype(object).fillna("")
        for (device, ranks, transport, one), group in rows.groupby(["device", "world_size", "transport", name]):
            over = f" over {transport}" if transport not in ("", one) else ""
            verdict, reason = _worst(group)
            yield Correctness(lab.name, str(device), int(ranks), f"{one}{over}", verdict, reason)
    coverage, details = run.coverage(), {point: text for point, _, text in run.failures()}
    for point in coverage[coverage["status"] != "ok"].to_dict("records"):
        place = str(point.get("device") or "cpu"), int(point["world_size"])
        verdict = "not measured" if point["status"] == "skipped" else str(point["status"])
        yield Correctness(lab.name, *place, "all", verdict, point["reason"], details.get(point["point"], ""))


def _worst(rows: pd.DataFrame) -> tuple[str, str | None]:
    """The verdict of the first row that is not ok, if any; "not measured" with the reason if none was checked."""
    checks = rows["check"].dropna()
    if len(bad := checks[checks != "ok"]):
        verdict, _, reason = str(bad.iloc[0]).partition(": ")
        return verdict, reason or None
    if len(checks):
        return "ok", None
    reasons = rows["not_measured"].dropna()
    return "not measured", str(reasons.iloc[0]) if len(reasons) else "it has no check"


def checks_directory() -> Path:
    """Runs of the fixed set."""
    return runs_directory() / CHECK.name


def baseline_folder(machine: Machine) -> Path:
    """Where this host keeps its baseline. A GPU more or less is a change of the machine, and not another one."""
    host = re.sub(r"[^\w-]+", "-", machine.host) or "host"
    return project_root() / "data" / "baselines" / host


def load_baseline(against: str | None) -> list[Run]:
    """The run that `--against` names, or this machine's saved ones that are comparable with the newest of them.

    RunFileError, which names the file, if one is damaged; ParameterError if it is of a lab.
    """
    folder = baseline_folder(describe_machine())
    paths = sorted(folder.glob("*.jsonl")) if against is None else [find_run([checks_directory(), folder], against)]
    runs = [Run.load(path) for path in paths[-MOST_RUNS:]]
    for run in runs:
        if run.header.lab != CHECK.name:
            raise ParameterError(f"{run.path.name}: a run of {run.header.lab}; expected one that `labkit check` wrote")
    return [run for run in runs if different_set(runs[-1], run) is None]


def save_baseline(run: Run) -> Path:
    """Add a run to this machine's baseline. ParameterError if it was disturbed."""
    points = run.coverage()
    points = points[points["status"] != "skipped"]
    is_good = (points["status"] == "ok") & ~points["point"].isin(list(run.busy))
    counts = is_good.groupby([points["device"], points["world_size"]]).sum()
    if counts.empty or counts.min() < LEAST_SESSIONS:
        reason = next(iter(run.busy.values()), None) or "some points failed"
        raise ParameterError(f"no baseline was saved: {reason}; save it while the machine is quiet")
    path = baseline_folder(run.header.machine) / run.path.name
    write_file(path, run.path.read_bytes())
    return path
