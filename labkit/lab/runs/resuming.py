"""Whether a run can be taken up again here: by its lab, machine, layout of ranks, and plan."""

from collections.abc import Mapping
from typing import Any

from labkit.lab.config import LabConfig, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.point import Point
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import describe_machine
from labkit.parallel.ranks.hosts import describe_hosts


def check_same_setting(study: Lab, run: Run, layout: dict[str, list[int]] | None) -> None:
    """RunFileError for a run of another lab, machine, or layout of ranks (`ranks_by_host`).

    For the first rank: its machine is the one in the header.
    """
    header = run.header
    if header.lab != study.name:
        raise RunFileError(f"{run.path}: a run of the lab {header.lab!r}, not of {study.name!r}")
    if header.machine.identity != describe_machine().identity:
        instructions = header.machine.instructions or "instructions not told"
        there = f"{header.machine.label} ({header.machine.host}, {instructions})"
        raise RunFileError(f"{run.path}: measured on {there}, and numbers of two machines do not mix")
    if header.ranks_by_host != layout:
        there = describe_hosts(header.ranks_by_host)
        raise RunFileError(f"{run.path}: measured by {there}, and numbers of two layouts of ranks do not mix")


def config_again(study: Lab, run: Run) -> LabConfig:
    """The config of a run. ParameterError for what is no longer known, as a reader's own is in another process."""
    try:
        return study.configure(run.header.profile, run.header.config)
    except ParameterError as error:
        raise ParameterError(f"{error}; if it is of a notebook's own, the run goes on there, by lab.resume()") from None


def replan(study: Lab, run: Run, config: LabConfig) -> list[Point]:
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
