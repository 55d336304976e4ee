"""How much CPU time a cgroup allows this process, and how often it was held back: containers and batch systems.

`root` is the directory that `proc` and `sys` are in.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def quota_cores(root: Path = ROOT) -> float | None:
    """The least number of cores that a cgroup of this process allows, in CPU seconds per second; None: no limit."""
    quotas = [quota for folder in _cgroups(root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def throttled_periods(root: Path = ROOT) -> tuple[int, int]:
    """Scheduling periods so far in which this process's cgroups were held back, and all of them; (0, 0): no quota."""
    counts = [(_number(stat, "nr_throttled"), _number(stat, "nr_periods")) for stat in _stats(root)]
    return max(counts, default=(0, 0))


def _cgroups(root: Path) -> Iterator[Path]:
    """The CPU cgroup of this process and those above it, for both versions of the cgroup file system."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and "cpu")
        inside = Path(path.lstrip("/"))
        # A container may know the path that its host gives it, and see its own cgroup as the topmost.
        yield from (mount / folder for folder in (inside, *inside.parents) if (mount / folder).is_dir())


def _quota(folder: Path) -> float | None:
    text = _text(folder / "cpu.max") or " ".join(_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    found = re.fullmatch(r"(\d+)\s+(\d+)", text.strip())
    return int(found[1]) / int(found[2]) if found else None


def _stats(root: Path) -> Iterator[str]:
    return (_text(folder / "cpu.stat") for folder in _cgroups(root))


def _number(text: str, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
