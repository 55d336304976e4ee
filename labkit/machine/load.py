"""Measures the load that disturbs a measurement, on cores, memory and GPUs."""

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import median_low

import numpy as np
import psutil
from pydantic import BaseModel

from labkit.machine.cgroups import throttled_periods
from labkit.machine.description import describe_machine
from labkit.machine.gpus import MIN_UTILIZATION, GpuLoad, gpu_load, utilization_by_others

SAMPLE_S = 0.1
# CPU time that shows how many others wait for the same cores: dozens of time slices.
SPIN_S = 0.2
# The kernel counts time in ticks of 10 ms: shorter spans say too little.
MIN_SPAN_S = 0.5
# Guests that this machine hosts are in user and nice.
BUSY = ("user", "nice", "system", "irq", "softirq")
# Share of the cores from which other programs count, if it is at least half a core. Idle machines
# stay below.
MIN_BUSY_SHARE = 0.15
MIN_THROTTLED_SHARE = 0.05
# Ratios from which ranks wake up late (round trip over the run's fastest) or memory is slow (copy
# over its median). Copies take up to 1.85 times the median on a quiet machine, and 2 to 4 times
# while memory is slow.
LATE_PING = 5.0
SLOW_COPY = 2.0


class Load(BaseModel, frozen=True):
    """How busy a machine is; None: unknown."""

    busy_cores: float | None = None
    """Cores' worth of time that other programs used, among the cores this process may use."""
    stolen_cores: float | None = None
    """Cores' worth of time that other virtual machines of the host got; not in `busy_cores`."""
    throttled_share: float | None = None
    """Share of scheduling periods in which a CPU quota held this process back, if there is one."""
    ping_s: float | None = None
    """Mean round trip between two CPU ranks before the point (`bench.probe`)."""
    exchange_s: float | None = None
    """The same with 1 MiB each way, which depends on the caches that the ranks' cores share."""
    copy_s: float | None = None
    """A copy of 64 MB before the point."""
    gpu: GpuLoad | None = None
    """Its utilization is that before any rank ran."""


def load_before_measuring() -> Load:
    """Measure the load before any rank runs. Takes `SAMPLE_S`."""
    meter = LoadMeter()
    time.sleep(SAMPLE_S)
    return meter.load(at_least_s=SAMPLE_S)


def slowdown_by_others() -> float:
    """Return how many times as long this thread takes as if it ran alone: 1 on a free core."""
    start_s = time.perf_counter()
    before_s = time.thread_time()
    own_s = 0.0
    while own_s < SPIN_S:
        own_s = time.thread_time() - before_s
    return max(1.0, (time.perf_counter() - start_s) / own_s)


class LoadMeter:
    """Measures the load by others than this process and its descendants.

    It is made before the ranks start, since only then all use of a GPU is that of others.
    """

    def __init__(self, *, owns_all_ranks: bool = True) -> None:
        """`owns_all_ranks`: False if other processes have ranks here, as in a torchrun job."""
        self._owns_all_ranks = owns_all_ranks
        self._has_gpus = bool(describe_machine().gpus)
        self._gpu_utilization = None
        if self._has_gpus:
            self._gpu_utilization = utilization_by_others()
        self._before = _read_times()

    def load(self, *, at_least_s: float = MIN_SPAN_S) -> Load:
        """Measure the load since the last call; cores are None for a span below `at_least_s`."""
        before = self._before
        self._before = _read_times()
        at_s, busy_s, stolen_s, own_s, throttled, periods = (self._before - before).tolist()
        gpu = None
        throttled_share = None
        if self._has_gpus:
            gpu = self._gpu_load()
        if periods > 0:  # there is a quota
            throttled_share = round(throttled / periods, 3)
        load = Load(throttled_share=throttled_share, gpu=gpu)
        # Ranks of other processes of a job would count as other programs.
        if at_s < at_least_s or not self._owns_all_ranks:
            return load
        # Ticks round up, so that the difference may be below zero.
        others = max(0.0, busy_s - own_s) / at_s
        return load.model_copy(
            update={"busy_cores": round(others, 2), "stolen_cores": round(stolen_s / at_s, 2)}
        )

    def _gpu_load(self) -> GpuLoad | None:
        load = gpu_load()
        return load and replace(load, utilization=self._gpu_utilization)


def _read_times() -> np.ndarray:
    """Return seconds of the clock, busy, stolen and own seconds of cores, and a quota's periods.

    The periods are two numbers, throttled ones and all. Only differences mean something.
    """
    # Only the cores that this process may use: load on others does not slow it down.
    every = psutil.cpu_times(percpu=True)
    usable: Collection[int] = range(len(every))
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
    cores = [times for core, times in enumerate(every) if core in usable]
    busy = sum(getattr(times, name, 0.0) for times in cores for name in BUSY)
    stolen = sum(getattr(times, "steal", 0.0) for times in cores)
    own = 0.0
    for process in _own_processes():
        with suppress(psutil.Error):  # it has ended, and its time has moved to its parent
            own += sum(process.cpu_times()[:4])  # user and system, of itself and of ended children
    return np.array([time.monotonic(), busy, stolen, own, *throttled_periods()])


def _own_processes() -> list[psutil.Process]:
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def busy_points(loads: Mapping[str, Load], cores: int) -> dict[str, str]:
    """Return why times may be too long, by point; probes are compared within these points."""
    pings = [load.ping_s for load in loads.values() if load.ping_s is not None]
    copies = [load.copy_s for load in loads.values() if load.copy_s is not None]
    reasons = {}
    for point, load in loads.items():
        # Probes have no absolute limit: machines differ, so the best of the run is the measure.
        late = (load.ping_s or 0.0) / min(pings, default=1.0)
        slow = (load.copy_s or 0.0) / median_low(copies or [1.0])
        reason = busy_reason(load, cores)
        if reason:
            reasons[point] = reason
        elif late > LATE_PING:
            reasons[point] = f"ranks woke up late ({late:.0f} times the best)"
        elif slow > SLOW_COPY:
            reasons[point] = f"memory was slow ({slow:.1f} times the median copy)"
    return reasons


def busy_reason(load: Load, cores: int) -> str:
    """Return a phrase for what slows a measurement down; "" if nothing does."""
    # In the order of how sure the cause is; the first one is named.
    taken = (load.busy_cores or 0.0) + (load.stolen_cores or 0.0)
    held_back = load.throttled_share or 0.0
    if load.gpu and (load.gpu.utilization or 0.0) >= MIN_UTILIZATION:
        return "another program used a GPU"
    if load.gpu and load.gpu.slowed_by:
        at = ""
        if load.gpu.temperature is not None:
            at = f", at {load.gpu.temperature:.0f} °C"
        return f"{load.gpu.slowed_by} slowed a GPU down{at}"
    if taken >= max(0.5, MIN_BUSY_SHARE * cores):
        others = "other virtual machines of the host"
        if (load.busy_cores or 0.0) >= taken / 2:
            others = "other programs"
        return f"{others} took {taken:.1f} of {cores} cores"
    if held_back >= MIN_THROTTLED_SHARE:
        return f"a CPU quota held processes back in {100 * held_back:.0f}% of all periods"
    return ""
