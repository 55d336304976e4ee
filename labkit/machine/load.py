"""What else the machine does while a lab measures: other programs, and other measurements of labkit.

A measurement announces itself by a socket with a name that only the kernel keeps (Linux's abstract ones): it is gone
with the process, however that ends, and any user may read the list of them.
"""

import multiprocessing.forkserver
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

SAMPLE_S = 0.1
MIN_SPAN_S = 0.5
_BUSY = ("user", "nice", "system", "irq", "softirq")  # what guests of this machine take is in user and nice
MIN_BUSY_SHARE = 0.15
"""Of the cores: from here on, and from half a core on, other programs are worth a word. Idle machines stay below."""

_SOCKETS = Path("/proc/net/unix")  # of every user
_NAME = "labkit-measuring-"


class Load(BaseModel):
    """How busy a machine is."""

    model_config = ConfigDict(frozen=True)

    average: float
    """Load average of the last minute: processes that run or want to, those of the measurement included."""
    other_measurements: int
    busy_cores: float | None = None
    """Of the cores this process may use, by other programs; None if that is not known."""
    stolen_cores: float | None = None
    """Of those, taken by other guests of the host (steal time); None if that is not known."""


def load_before_measuring() -> Load:
    """The load as it is before any rank runs. Takes `SAMPLE_S`."""
    meter = LoadMeter()
    time.sleep(SAMPLE_S)
    return meter.load(at_least_s=SAMPLE_S)


class LoadMeter:
    """The load from now on, or since it was last asked for: what others take is what this process and its own do not.

    `knows_own` is False where what belongs to the measurement is not below this process, as in a torchrun job.
    """

    def __init__(self, *, knows_own: bool = True) -> None:
        self._knows_own = knows_own
        self._since = _CoreSeconds.now()

    def load(self, *, at_least_s: float = MIN_SPAN_S) -> Load:
        """The load since then; no cores are told after less than `at_least_s`, of which a tick is too large a part."""
        before, now = self._since, _CoreSeconds.now()
        self._since, elapsed = now, now.at - before.at
        load = Load(average=round(os.getloadavg()[0], 2), other_measurements=other_measurements())
        if elapsed < at_least_s or not self._knows_own:
            return load
        others = ((now.busy - before.busy) - (now.own - before.own)) / elapsed
        stolen = (now.stolen - before.stolen) / elapsed
        # ticks may add up to a little more than there was, or less
        cores = {"busy_cores": round(min(max(0.0, others), now.cores), 2), "stolen_cores": round(stolen, 2)}
        return load.model_copy(update=cores)


@dataclass(frozen=True)
class _CoreSeconds:
    """Since the machine started, of the cores that this process may use: busy, and stolen; by this process and its own.

    A tick of the kernel, 10 ms, is the least that is seen.
    """

    at: float
    busy: float
    stolen: float
    own: float
    cores: int

    @classmethod
    def now(cls) -> "_CoreSeconds":
        every = psutil.cpu_times(percpu=True)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
        of_cores = [times for core, times in enumerate(every) if core in usable]
        busy = sum(getattr(times, name, 0.0) for times in of_cores for name in _BUSY)
        stolen = sum(getattr(times, "steal", 0.0) for times in of_cores)
        own = 0.0
        for process in own_processes():
            with suppress(psutil.Error):  # it has ended, and its time is its parent's
                own += sum(process.cpu_times()[:4])  # user and system, its own and of children that ended
        return cls(time.monotonic(), busy, stolen, own, len(of_cores))


def own_processes() -> set[psutil.Process]:
    """This process and all below it; and all below its fork server, which another process may have started for it."""
    heads = [psutil.Process()]
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    if (pid := getattr(server, "_forkserver_pid", None)) is not None:
        with suppress(psutil.NoSuchProcess):
            heads.append(psutil.Process(pid))
    own = set(heads)
    for head in heads:
        with suppress(psutil.NoSuchProcess):
            own.update(head.children(recursive=True))
    return own


def is_busy(load: Load, cores: int) -> bool:
    """Whether other programs or other guests of the host take enough of so many cores to be worth a word."""
    least = max(0.5, MIN_BUSY_SHARE * cores)
    return (load.busy_cores or 0.0) + (load.stolen_cores or 0.0) >= least


def disturbances(load: Load, cores: int) -> list[str]:
    """What a user should know of the load before a measurement, a sentence each."""
    found = []
    if load.other_measurements:
        found.append("Another labkit measurement runs on this machine: both take longer than they would alone.")
    elif is_busy(load, cores):
        taken = (load.busy_cores or 0.0) + (load.stolen_cores or 0.0)
        found.append(f"Other programs keep {taken:.1f} of {cores} cores busy: times may be too long.")
    return found


@contextmanager
def announced() -> Iterator[None]:
    """Have other processes count this one among their `other_measurements` meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sign:
        if sys.platform == "linux":
            with suppress(OSError):  # nowhere to say it: the measurement matters more
                sign.bind(f"\0{_NAME}{os.getpid()}-{time.monotonic_ns()}")
        yield


def other_measurements() -> int:
    """How many other processes of this machine measure now, of any user and any checkout."""
    try:
        names = [line.rpartition("@")[2] for line in _SOCKETS.read_text().splitlines()]
    except OSError:
        return 0
    return sum(name.startswith(_NAME) and not name.startswith(f"{_NAME}{os.getpid()}-") for name in names)
