"""What else the machine does while a lab measures: other programs, other measurements of labkit, a CPU quota.

A measurement announces itself by a socket with a name that only the kernel keeps (Linux's abstract ones): it is gone
with the process, however that ends, and any user may read the list of them.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from labkit.machine.cgroups import throttled_periods
from labkit.machine.description import describe_machine
from labkit.machine.gpus import GpuLoad, gpu_load

SAMPLE_S = 0.1
MIN_SPAN_S = 0.5
_BUSY = ("user", "nice", "system", "irq", "softirq")  # what guests of this machine take is in user and nice
MIN_BUSY_SHARE = 0.15
"""Share of the cores from which other programs count, if it is at least half a core. Idle machines stay below."""
MIN_WAITING_SHARE = 0.3
"""Share of the last ten seconds in which a process waited for a core; before a measurement only, which waits, too."""
MIN_THROTTLED_SHARE = 0.05
LATE_PING, SLOW_COPY = 5.0, 1.5
"""How many times the fastest of a run a point's probe takes when its ranks wake up late, or when memory is slow."""

_PRESSURE = Path("/proc/pressure/cpu")
FORK_SERVERS: list[int] = []
"""Ids of processes that this one's ranks descend from, but it did not start."""

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
    waiting_share: float | None = None
    """Share of the last 10 s in which some process waited for a core (Linux's PSI); None if that is not known."""
    throttled_share: float | None = None
    """Share of scheduling periods in which a CPU quota held this process back; None without a quota."""
    ping_s: float | None = None
    """Mean round trip between two ranks before the point (`bench.probe`); None with one rank, or on GPUs."""
    copy_s: float | None = None
    """A copy of 64 MB before the point."""
    gpu: GpuLoad | None = None
    """None without GPUs, and in older runs."""


def load_before_measuring() -> Load:
    """The load as it is before any rank runs. Takes `SAMPLE_S`."""
    meter = LoadMeter()
    time.sleep(SAMPLE_S)
    return meter.load(at_least_s=SAMPLE_S).model_copy(update={"waiting_share": _waiting_share()})


def _waiting_share() -> float | None:
    try:
        found = re.search(r"^some avg10=([\d.]+)", _PRESSURE.read_text(), re.MULTILINE)
    except OSError:
        return None
    return float(found[1]) / 100 if found else None


class LoadMeter:
    """The load from now on, or since it was last asked for: what others take is what this process and its own do not.

    `knows_own` is False where what belongs to the measurement is not below this process, as in a torchrun job.
    """

    def __init__(self, *, knows_own: bool = True) -> None:
        self._knows_own = knows_own
        self._since, self._periods = _CoreSeconds.now(), throttled_periods()

    def load(self, *, at_least_s: float = MIN_SPAN_S) -> Load:
        """The load since then; no cores are told after less than `at_least_s`, of which a tick is too large a part."""
        before, now = self._since, _CoreSeconds.now()
        self._since, elapsed = now, now.at - before.at
        (held_back, periods), (held_before, before_them) = throttled_periods(), self._periods
        self._periods = held_back, periods
        share = round((held_back - held_before) / (periods - before_them), 3) if periods > before_them else None
        average = round(os.getloadavg()[0], 2)
        gpu = gpu_load({process.pid for process in own_processes()}) if describe_machine().gpus else None
        load = Load(average=average, other_measurements=other_measurements(), throttled_share=share, gpu=gpu)
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
    for pid in FORK_SERVERS:
        with suppress(psutil.NoSuchProcess):
            heads.append(psutil.Process(pid))
    own = set(heads)
    for head in heads:
        with suppress(psutil.NoSuchProcess):
            own.update(head.children(recursive=True))
    return own


def busy_points(loads: Mapping[str, Load], cores: int) -> dict[str, str]:
    """Why the times of a point may be too long, by point, as a phrase; probes are compared within these points."""
    pings = [load.ping_s for load in loads.values() if load.ping_s is not None]
    copies = [load.copy_s for load in loads.values() if load.copy_s is not None]
    reasons = {point: _busy_reason(load, cores) for point, load in loads.items()}
    for point, load in loads.items():
        if load.ping_s is not None and load.ping_s > LATE_PING * min(pings):
            reasons[point] = reasons[point] or f"ranks woke up late ({load.ping_s / min(pings):.0f} times the best)"
        if load.copy_s is not None and load.copy_s > SLOW_COPY * min(copies):
            reasons[point] = reasons[point] or f"memory was slow ({load.copy_s / min(copies):.1f} times the best copy)"
    return {point: reason for point, reason in reasons.items() if reason}


def _busy_reason(load: Load, cores: int) -> str:
    """What takes cores from a measurement, as a phrase; "" if nothing does."""
    taken = (load.busy_cores or 0.0) + (load.stolen_cores or 0.0)
    if load.other_measurements:
        return "another labkit measurement ran"
    if load.gpu and load.gpu.other_processes:
        return "another program used a GPU"
    if load.gpu and load.gpu.slowed_by:
        return f"{load.gpu.slowed_by} slowed a GPU down, at {load.gpu.temperature} °C"
    if taken >= max(0.5, MIN_BUSY_SHARE * cores):
        return f"other programs took {taken:.1f} of {cores} cores"
    if (load.throttled_share or 0.0) >= MIN_THROTTLED_SHARE:
        return f"a CPU quota held processes back in {100 * (load.throttled_share or 0.0):.0f}% of all periods"
    if (load.waiting_share or 0.0) >= MIN_WAITING_SHARE:
        return f"processes waited for a core {100 * (load.waiting_share or 0.0):.0f}% of the time"
    return ""


def disturbances(load: Load, cores: int) -> list[str]:
    """What a user should know of the load before a measurement, a sentence each."""
    reason = _busy_reason(load, cores)
    return [f"Busy machine: {reason}; times may be too long."] if reason else []


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
