"""Facts in which two checks differ: of the machine, or of its software."""

import math
from dataclasses import dataclass
from typing import Any

from labkit.check.sessions import timed_rows
from labkit.check.worker import THREADS
from labkit.lab.runs.store import Run
from labkit.machine.description import Machine


@dataclass(frozen=True)
class Difference:
    """A fact in which two runs differ."""

    name: str
    before: str
    now: str
    forbids: bool
    """Whether it is of the machine; one of its software may explain a change instead."""

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.now}"


def differences(before: Run, now: Run) -> list[Difference]:
    """Return the facts in which two runs differ, those that forbid a comparison first."""
    result = []
    for describe, forbids in ((_describe_measured, True), (_describe_software, False)):
        facts_before = describe(before)
        facts_now = describe(now)
        for name in dict.fromkeys((*facts_before, *facts_now)):
            # As text: a version of None in one run and a missing one in another are the same.
            then = str(facts_before.get(name) or "none")
            today = str(facts_now.get(name) or "none")
            if then != today:
                result.append(Difference(name, then, today, forbids))
    return result


def describe_hardware(machine: Machine) -> dict[str, Any]:
    """Return what two machines must have in common for a comparison of their times."""
    cores = str(machine.cores)
    if machine.cpu_quota is not None:
        cores += f" (quota {machine.cpu_quota:g})"
    gpus = ", ".join(f"{count}x {gpu.name}" for count, gpu in machine.gpu_counts)
    return {"processor": machine.cpu, "cores": cores, "GPUs": gpus or machine.no_gpu_reason}


def has_lost_hardware(before: Run, now: Run) -> bool:
    """Return whether ranks have fewer cores, threads or GPUs of the same machine than before."""
    amounts = []
    for run in (before, now):
        machine = run.header.machine
        threads = timed_rows(run)["threads"].max()  # NaN without rows
        amounts.append(
            (machine.cores, machine.cpu_quota or machine.cores, len(machine.gpus), threads)
        )
    # Fewer cores of another processor are another machine, not a loss.
    has_less = any(now < then for then, now in zip(*amounts, strict=True))
    return has_less and before.header.machine.cpu == now.header.machine.cpu


def is_same_machine(before: Run, now: Run) -> bool:
    """Return whether times of two runs may be compared."""
    return not any(difference.forbids for difference in differences(before, now))


def is_alike(newest: Run, run: Run) -> bool:
    """Return whether two runs are of one machine and torch: then their spread is its drift."""
    return is_same_machine(newest, run) and torch_version(newest) == torch_version(run)


def torch_version(run: Run) -> str | None:
    return run.header.machine.versions.get("torch")


def _describe_measured(run: Run) -> dict[str, Any]:
    """Return the machine's hardware and the set of quantities, by its number."""
    # Another set is like another machine: nothing of it can be compared.
    numbers = [point.get("number") or 0 for point in run.header.planned.values()]
    return describe_hardware(run.header.machine) | {"set of quantities": max(numbers, default=0)}


def _describe_software(run: Run) -> dict[str, Any]:
    machine = run.header.machine
    threads = timed_rows(run)["threads"].max()
    return {
        **machine.versions,
        "host": machine.host,
        "system": machine.system,
        "Python": machine.python,
        "labkit": str(machine.source),
        "links of GPUs": machine.gpu_links,
        f"threads ({THREADS})": None if math.isnan(threads) else f"{threads:.0f}",
    }
