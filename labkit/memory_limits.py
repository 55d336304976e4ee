"""How much main memory can be had. Apart from `machine`, so that a rank can ask without importing more."""

from pathlib import Path

import psutil


def available_memory_bytes() -> int:
    """Main memory that can still be had without swapping, in bytes; honors a cgroup limit (containers)."""
    available = psutil.virtual_memory().available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _cgroup_bytes(file: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", file).read_text())
    except (OSError, ValueError):  # no cgroup v2, or the word "max": no limit
        return None
