"""Limits that cgroups (containers, batch systems) set on this process.

Main memory, processor time, and kills. A limit may be that of a cgroup above this process's. `root`
is the directory that holds `proc` and `sys`. Ranks import this module, and not `description`.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")


class _Cgroup(NamedTuple):
    """A folder of the cgroup file system; `is_own` is False above this process's cgroup."""

    folder: Path
    is_own: bool

    def text(self, *files: str) -> str:
        """Return the contents of those of the files that are there."""
        return "".join(_text(self.folder / file) for file in files)

    def number(self, *files: str, name: str = "") -> int | None:
        """Return the number that a file consists of, or the one after `name` in it, or None."""
        match = re.search(rf"^{name} ?(\d+)$", self.text(*files), re.MULTILINE)
        return int(match[1]) if match else None

    def memory_limit(self) -> int | None:
        return self.number("memory.max", "memory.limit_in_bytes")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Return bytes of main memory that are available without swapping, within cgroups' limits."""
    available = psutil.virtual_memory().available
    for cgroup in _cgroups("memory", root):
        limit = cgroup.memory_limit()
        used = cgroup.number("memory.current", "memory.usage_in_bytes")
        # The kernel reclaims the cache before it kills anything.
        if limit is not None and used is not None:
            caches = (
                cgroup.number("memory.stat", name=f"{scope}inactive_file") or 0
                for scope in ("total_", "")
            )
            available = min(available, max(0, limit - used + max(caches)))
    return available


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the smallest memory limit of the cgroups in bytes; None if there is less memory."""
    total = psutil.virtual_memory().total
    limits = [cgroup.memory_limit() for cgroup in _cgroups("memory", root)]
    # Above what there is, a limit limits nothing.
    return min((limit for limit in limits if limit is not None and limit < total), default=None)


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes of this one's cgroup the kernel has killed for lack of memory.

    None if unknown.
    The count rises before the process dies. It includes the cgroup's other processes, and kills for
    lack of memory in the whole machine. A cgroup above it counts only if it sets a limit, since it
    holds other users' processes, too.
    """
    for cgroup in _cgroups("memory", root):
        count = cgroup.number("memory.events", "memory.oom_control", name="oom_kill")
        if count is not None and (cgroup.is_own or cgroup.memory_limit() is not None):
            return count
    return None


def quota_cores(root: Path = ROOT) -> float | None:
    """Return cores' worth of time per second that cgroups allow, such as 0.5; None: no limit."""
    quotas = []
    for cgroup in _cgroups("cpu", root):
        # Files of version 2 of the cgroup file system have other names than those of version 1.
        numbers = cgroup.text("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us").split()
        # Without a limit the quota is "max" or -1.
        if len(numbers) >= 2 and all(number.isdigit() for number in numbers[:2]):
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def available_cores() -> int:
    """Return cores that this process may use, by affinity and CPU quota, at least 1."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(quota_cores() or cores)))


def throttled_periods(root: Path = ROOT) -> tuple[int, int]:
    """Return periods in which a CPU quota held this process back, and all; (0, 0): no quota."""
    names = ("nr_throttled", "nr_periods")
    # A process is held back by each cgroup above it: the one that does so most counts.
    stats = [
        [cgroup.number("cpu.stat", name=name) or 0 for name in names]
        for cgroup in _cgroups("cpu", root)
    ]
    throttled, periods = max(stats, default=[0, 0])
    return throttled, periods


def _cgroups(controller: str, root: Path) -> Iterator[_Cgroup]:
    """Yield the cgroups that may limit this process: its own first, then those above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            inside = Path(path.lstrip("/"))
            for folder in (inside, *inside.parents):
                # A container may have its host's path, and see its own cgroup at the top.
                if any((top / folder).glob(f"{controller}.*")):
                    yield _Cgroup(top / folder, folder in (inside, Path()))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
