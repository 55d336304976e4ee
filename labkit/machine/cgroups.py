"""Limits that cgroups (containers, batch systems) set on this process: main memory, processor time, and kills.

A limit may be that of a cgroup above this process's. `root` is the directory that holds `proc` and `sys`. Ranks import
this module, and not `description`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class _Cgroup(NamedTuple):
    """A folder of either version of the cgroup file system; `is_own` is False above this process's cgroup."""

    folder: Path
    version: int
    is_own: bool

    def number(self, *files: str, name: str = "") -> int | None:
        """The number in the file of this version, or the one after a name in it; None for no file, or "max"."""
        match = re.search(rf"^{name} ?(\d+)$", _text(self.folder / files[self.version - 1]), re.MULTILINE)
        return int(match[1]) if match else None

    def memory_limit(self) -> int | None:
        return self.number("memory.limit_in_bytes", "memory.max")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Main memory that is available without swapping, in bytes, within the limits of cgroups (containers)."""
    available = psutil.virtual_memory().available
    for cgroup in _cgroups("memory", root):
        limit, used = cgroup.memory_limit(), cgroup.number("memory.usage_in_bytes", "memory.current")
        if limit is not None and used is not None:  # the cache is reclaimed before anything is killed
            cache = ("total_inactive_file", "inactive_file")[cgroup.version - 1]
            cached = cgroup.number("memory.stat", "memory.stat", name=cache) or 0
            available = min(available, max(0, limit - used + cached))
    return available


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The smallest memory limit of this process's cgroups, in bytes; None if that is more than there is."""
    limits = [cgroup.memory_limit() for cgroup in _cgroups("memory", root)]
    smallest = min((limit for limit in limits if limit is not None), default=None)
    return smallest if smallest is not None and smallest < psutil.virtual_memory().total else None


def oom_kills(root: Path = ROOT) -> int | None:
    """Number of processes of this one's cgroup that the kernel has killed for lack of memory; None if unknown.

    The count rises before the process dies. It includes the cgroup's other processes, and kills for lack of memory in
    the whole machine. A cgroup above it counts only if it sets a limit, since it holds other users' processes, too.
    """
    for cgroup in _cgroups("memory", root):
        count = cgroup.number("memory.oom_control", "memory.events", name="oom_kill")
        if count is not None and (cgroup.is_own or cgroup.memory_limit() is not None):
            return count
    return None


def quota_cores(root: Path = ROOT) -> float | None:
    """Cores' worth of time per second that the cgroups allow, 0.5 for half a core; None without a limit."""
    quotas = []
    for cgroup in _cgroups("cpu", root):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if cgroup.version == 1 else ("cpu.max",)
        numbers = " ".join(_text(cgroup.folder / file) for file in files).split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):  # not "max", or -1
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def available_cores() -> int:
    """Cores this process may use by its affinity mask and the CPU quota of its cgroups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(quota_cores() or cores)))


def throttled_periods(root: Path = ROOT) -> tuple[int, int]:
    """Scheduling periods in which a CPU quota held this process's cgroups back, and all of them; (0, 0): no quota."""
    stats = [
        [cgroup.number("cpu.stat", "cpu.stat", name=name) or 0 for name in ("nr_throttled", "nr_periods")]
        for cgroup in _cgroups("cpu", root)
    ]
    throttled, periods = max(stats, default=[0, 0])
    return throttled, periods


def _cgroups(controller: str, root: Path) -> Iterator[_Cgroup]:
    """The cgroups that may limit this process: its own first, then those above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, mount = (1, f"sys/fs/cgroup/{controller}") if controllers else (2, "sys/fs/cgroup")
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            # A container may have its host's path, and see its own cgroup at the top.
            if any((root / mount / folder).glob(f"{controller}.*")):
                yield _Cgroup(root / mount / folder, version, folder in (inside, Path()))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
