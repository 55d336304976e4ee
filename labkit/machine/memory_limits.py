"""How much main memory can be had, and whether the kernel killed for want of it: limits of cgroups count.

Apart from `machine`, so that a rank can ask without importing more. A container's or a batch system's limit is that of
a cgroup, or of one above it. `root` is the directory that `proc` and `sys` are in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")


@dataclass(frozen=True)
class _Files:
    """Where a version of the cgroup file system says what."""

    mount: str
    limit: str
    used: str
    kills: str
    cache: str
    """Of `memory.stat`: what is given back before anything is killed or swapped."""


_VERSION_1 = _Files(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    "total_inactive_file",
)
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "memory.events", "inactive_file")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Main memory that can still be had without swapping, in bytes; honors the limits of cgroups (containers)."""
    available = psutil.virtual_memory().available
    for folder, files, _ in _cgroups(root):
        limit, used = _number(folder / files.limit), _number(folder / files.used)
        if limit is not None and used is not None:
            cache = _number(folder / "memory.stat", files.cache) or 0
            available = min(available, max(0, limit - used + cache))
    return available


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The least memory that a cgroup of this process allows, in bytes; None if that is more than there is."""
    limits = [_number(folder / files.limit) for folder, files, _ in _cgroups(root)]
    least = min((limit for limit in limits if limit is not None), default=None)
    return least if least is not None and least < psutil.virtual_memory().total else None


def oom_kills(root: Path = ROOT) -> int | None:
    """How many processes of this one's cgroup the kernel has killed for want of memory; None if it does not say.

    Counted before the process dies. Other processes of the cgroup count as well, and so do kills for want of memory
    in the whole machine. Those above it count only where they set a limit: others' processes are in them, too.
    """
    for folder, files, is_own in _cgroups(root):
        count = _number(folder / files.kills, "oom_kill")
        if count is not None and (is_own or _number(folder / files.limit) is not None):
            return count
    return None


def _cgroups(root: Path) -> Iterator[tuple[Path, _Files, bool]]:
    """The cgroups that may limit the memory of this process, and which is its own: that first, then those above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            # A container may know the path that its host gives it, and see its own cgroup as the topmost.
            if (root / files.mount / folder / files.used).exists():
                yield root / files.mount / folder, files, folder in (inside, Path())


def _number(file: Path, name: str = "") -> int | None:
    """The number in a file, or that after a name; None without: no such file, or the word "max" for no limit."""
    found = re.search(rf"^{name} ?(\d+)$", _text(file), re.MULTILINE)
    return int(found[1]) if found else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
