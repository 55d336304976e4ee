"""What else the machine does while a lab measures: other programs, and other measurements of labkit.

A measurement announces itself by a locked file in the machine's folder for temporary files. The lock ends with the
process, however that ends, and any user may test it.
"""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

SAMPLE_S = 0.1
LEAST_BUSY_SHARE = 0.15
"""Of the cores: from here on, and from half a core on, other programs are worth a word. Idle machines stay below."""

_FILE = re.compile(r"labkit-measuring-(\d+)-.*")


class Load(BaseModel):
    """How busy a machine is."""

    model_config = ConfigDict(frozen=True)

    average: float
    """Load average of the last minute: processes that run or want to, those of the measurement included."""
    other_measurements: int
    busy_cores: float | None = None
    """Of the cores this process may use, while it measures nothing; None while it does."""


def load_before_measuring() -> Load:
    """The load as it is before any rank runs. Takes `SAMPLE_S`."""
    shares = psutil.cpu_percent(interval=SAMPLE_S, percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    busy = sum(share for core, share in enumerate(shares) if core in usable) / 100
    return load_while_measuring().model_copy(update={"busy_cores": round(busy, 2)})


def load_while_measuring() -> Load:
    return Load(average=round(os.getloadavg()[0], 2), other_measurements=other_measurements())


def disturbances(load: Load, cores: int) -> list[str]:
    """What a user should know of the load before a measurement, a sentence each."""
    found = []
    if load.other_measurements:
        found.append("Another labkit measurement runs on this machine: both take longer than they would alone.")
    elif load.busy_cores is not None and load.busy_cores >= max(0.5, LEAST_BUSY_SHARE * cores):
        found.append(f"Other programs keep {load.busy_cores:.1f} of {cores} cores busy: times may be too long.")
    return found


@contextmanager
def announced() -> Iterator[None]:
    """Have other processes count this one among their `other_measurements` meanwhile."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="labkit-starting-", dir=_folder())
    except OSError:  # nowhere to say it: the measurement matters more
        yield
        return
    path = Path(name)
    try:
        os.fchmod(descriptor, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        path = path.rename(path.with_name(f"labkit-measuring-{os.getpid()}-{path.name[-8:]}"))
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _folder() -> Path:
    return Path(tempfile.gettempdir())


def other_measurements() -> int:
    """How many other processes of this machine measure now, of any user and any checkout."""
    count = 0
    for path in _folder().glob("labkit-measuring-*"):
        match = _FILE.fullmatch(path.name)
        if match is None or int(match.group(1)) == os.getpid():
            continue
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()  # its process was killed
            except BlockingIOError:
                count += 1
            finally:
                os.close(descriptor)
    return count
