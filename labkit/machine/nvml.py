"""Reads the state of GPUs from NVML, the driver's management library, without a CUDA context.

The library comes with the driver, as `nvidia-smi` does, and torch loads it in the same way to count
GPUs. It is loaded once per process: `nvidia-smi` takes up to a second to start, before every point.
"""

import ctypes
from contextlib import suppress
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

# Of nvml.h.
SUCCESS = 0
SM_CLOCK = 1
CORE_SENSOR = 0
EXCLUSIVE_MODES = (1, 3)  # of a thread (in older drivers), of a process


class Utilization(ctypes.Structure):
    """Percent of the last second, or less, in which a kernel ran, or memory was used."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class Memory(ctypes.Structure):
    """Bytes."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU. None: it does not say, as a laptop's, a virtual GPU or a MIG slice."""

    utilization_percent: int | None
    clock_mhz: int | None
    max_clock_mhz: int | None
    temperature: int | None
    """Degrees Celsius."""
    power_limit_mw: int | None
    clock_reasons: int | None
    """Bits that say why the clock is below its highest."""
    free_bytes: int | None
    is_exclusive: bool
    """Whether it takes one process at a time."""


def read_gpu(uuid: str) -> GpuState | None:
    """Return the state of the GPU, or MIG slice, that CUDA gives this UUID; None without NVML.

    By UUID: NVML counts in the order of the bus, CUDA as CUDA_VISIBLE_DEVICES says.
    """
    nvml = _library()
    handle = c_void_p()
    names = [f"{kind}-{uuid}".encode() for kind in ("GPU", "MIG")]
    if nvml is None or all(nvml.nvmlDeviceGetHandleByUUID(x, byref(handle)) for x in names):
        return None

    # Each value by itself: one that a GPU lacks hides no other.
    def read(function: str, value: Any, *arguments: int) -> Any:
        with suppress(AttributeError):  # an older driver has no such function
            if getattr(nvml, function)(handle, *arguments, byref(value)) == SUCCESS:
                return value
        return None

    def read_number(function: str, *arguments: int) -> int | None:
        return getattr(read(function, c_uint(), *arguments), "value", None)

    # Drivers before 535 know the reasons by the older name only.
    reasons = read("nvmlDeviceGetCurrentClocksEventReasons", c_ulonglong())
    if reasons is None:
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons", c_ulonglong())
    return GpuState(
        utilization_percent=getattr(
            read("nvmlDeviceGetUtilizationRates", Utilization()), "gpu", None
        ),
        clock_mhz=read_number("nvmlDeviceGetClockInfo", SM_CLOCK),
        max_clock_mhz=read_number("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
        temperature=read_number("nvmlDeviceGetTemperature", CORE_SENSOR),
        power_limit_mw=read_number("nvmlDeviceGetPowerManagementLimit"),
        clock_reasons=getattr(reasons, "value", None),
        free_bytes=getattr(read("nvmlDeviceGetMemoryInfo", Memory()), "free", None),
        is_exclusive=read_number("nvmlDeviceGetComputeMode") in EXCLUSIVE_MODES,
    )


@cache
def _library() -> Any:
    """Return NVML, initialized; None without a driver, or if it does not start."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == SUCCESS:
            return library
    return None
