"""Whether this build of torch can compute on the GPUs, the reason if not, and facts about them.

NVML counts GPUs that CUDA cannot use: with a driver older than torch's CUDA, off the bus, or split
by MIG. So CUDA is initialized and counts again.
"""

import os
import re
import subprocess
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
HIDDEN_BY = "CUDA_VISIBLE_DEVICES"
NEARLY_FULL_BYTES = 2**30
"""With less free memory than this, libraries cannot make their work areas."""

SLOWED_BY = {"heat": 0x60, "a hardware limit": 0x88}
"""Bits of NVML's clock event reasons: thermal slowdown by software and hardware, hardware slowdown
and power brake."""


def no_gpu_reason() -> str | None:
    """Return why labs run on the CPU despite a GPU, in one line; None if there is no GPU, or all
    can be used."""
    has_driver = NVIDIA_DRIVER.exists()
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            "an NVIDIA driver is loaded, but this torch is built without CUDA"
            if has_driver
            else None
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every call warns of a driver that is too old
        try:
            if torch.cuda.device_count() > 0:
                torch.cuda.init()
            count = torch.cuda.device_count()
            reason = next(filter(None, map(_no_kernels_reason, range(count))), None)
        except Exception as error:  # of several types, by what fails
            message = re.split(r"(?<=\w)\. |\n", str(error), maxsplit=1)[0]
            return (
                f"CUDA does not start: {message or type(error).__name__} (driver"
                f" {driver_version() or 'unknown'})"
            )
    if count == 0 and has_driver:
        hidden = (
            f"{HIDDEN_BY} is {os.environ[HIDDEN_BY]!r}"
            if HIDDEN_BY in os.environ
            else "a container without GPUs?"
        )
        return f"an NVIDIA driver is loaded, but CUDA sees no GPU ({hidden})"
    return reason


def has_code_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return whether a build for `architectures` (`torch.cuda.get_arch_list()`) has code for a GPU
    of this capability.

    Machine code ("sm_86") runs on its major version from its minor version up, PTX ("compute_90")
    on every newer GPU (CUDA C++ programming guide, "Application compatibility"). With suffix "a"
    code runs on that version alone, with "f" on its major version. A list that names none of these,
    as AMD's, is trusted.
    """
    matches = re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(architectures))
    for kind, major, minor, suffix in matches:
        built = int(major), int(minor)
        is_newer_in_reach = kind + suffix == "compute" or (
            suffix != "a" and built[0] == capability[0]
        )
        if capability == built or (capability > built and is_newer_in_reach):
            return True
    return not matches


def _no_kernels_reason(index: int) -> str | None:
    properties = torch.cuda.get_device_properties(index)
    architectures = torch.cuda.get_arch_list()
    if has_code_for((properties.major, properties.minor), architectures):
        return None
    return (
        f"{properties.name} has compute capability {properties.major}.{properties.minor}, and this"
        f" torch is built for {', '.join(architectures)} ({HIDDEN_BY} hides a GPU)"
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version, such as "580.65.06"; None if unknown."""
    with suppress(OSError):
        if match := re.search(r"Kernel Module\s.*?(\d+(\.\d+)+)", NVIDIA_DRIVER.read_text()):
            return match[1]
    return None


def library_versions() -> dict[str, str | None]:
    """Versions that decide how fast GPUs are: torch's build, CUDA, cuDNN, NCCL, the driver."""
    cudnn = torch.backends.cudnn.version()
    nccl = None
    with suppress(Exception):  # a build without NCCL
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = {
        "torch build": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn and str(cudnn),
    }
    return versions | {"NCCL": nccl, "driver": driver_version()}


def free_memory_bytes() -> dict[str, int]:
    """Free memory of each GPU by UUID, without a CUDA context on any; empty without
    `nvidia-smi`."""
    return {
        uuid: int(free) * 2**20
        for uuid, free in _query("gpu", "uuid,memory.free")
        if free.isdigit()
    }


class GpuLoad(NamedTuple):
    """What slows the GPUs of this process: the worst value of any."""

    other_processes: int
    slowed_by: str
    """Why a GPU runs below its clock: "heat", "a hardware limit", or ""; a power cap does not
    count."""
    clock_share: float
    """Of the highest clock; low on an idle GPU."""
    temperature: int
    """Degrees Celsius."""
    power_limit_w: float


def gpu_load(own: Collection[int]) -> GpuLoad | None:
    """The load of the GPUs that CUDA sees, without the processes `own`; None without
    `nvidia-smi`."""
    visible = {
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    }
    states: list[list[str]] = []
    # before driver 535 the second
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        fields = f"uuid,clocks.sm,clocks.max.sm,temperature.gpu,power.limit,{reasons}"
        states = states or [row[1:] for row in _query("gpu", fields) if row[0] in visible]
    with suppress(ValueError):  # a value that this GPU does not have
        clocks, highest, degrees, watts = zip(*(map(float, row[:4]) for row in states), strict=True)
        slowed = [
            name
            for name, mask in SLOWED_BY.items()
            if any(int(row[4], 16) & mask for row in states)
        ]
        pids = [int(pid) for uuid, pid in _query("compute-apps", "gpu_uuid,pid") if uuid in visible]
        share = min(clock / most for clock, most in zip(clocks, highest, strict=True))
        others = len({*pids} - {*own})
        return GpuLoad(others, "".join(slowed[:1]), round(share, 2), int(max(degrees)), min(watts))
    return None


def link_types() -> str | None:
    """The GPUs' connections by `nvidia-smi topo` ("NV18", "NODE, SYS"); None if unknown."""
    rows = [line.split() for line in _nvidia_smi("topo", "-m")]
    matrix = [
        row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row
    ]
    return (
        ", ".join(sorted({link for row in matrix for link in row[: len(matrix)]} - {"X"})) or None
    )


def is_nearly_full() -> bool:
    """Return whether the current GPU has too little free memory for libraries to start."""
    with suppress(Exception):
        return torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < NEARLY_FULL_BYTES
    return False


def _query(kind: str, fields: str) -> list[list[str]]:
    """Rows of a query of `nvidia-smi`, whose first field is a UUID; a row that lacks a field is
    left out."""
    rows = [
        line.split(", ")
        for line in _nvidia_smi(f"--query-{kind}={fields}", "--format=csv,noheader,nounits")
    ]
    return [
        [row[0].removeprefix("GPU-"), *row[1:]] for row in rows if len(row) == 1 + fields.count(",")
    ]


def _nvidia_smi(*arguments: str) -> Iterator[str]:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        yield from subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.splitlines()
