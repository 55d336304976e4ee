"""Whether this build of torch can compute on the GPUs, the reason if not, and their load.

NVML counts GPUs that CUDA cannot use: with a driver older than torch's CUDA, off the bus, or split
by MIG. So CUDA is initialized and counts again.
"""

import os
import re
import subprocess
import textwrap
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.machine.nvml import GpuState, read_gpu

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
PCI_DEVICES = Path("/sys/bus/pci/devices")
HIDDEN_BY = "CUDA_VISIBLE_DEVICES"
# The oldest driver by CUDA's major version (CUDA Toolkit release notes, minor version
# compatibility).
NEEDED_DRIVERS = {"12": "525", "13": "580"}
MAX_REASON = 120
# With less free memory than this, libraries cannot make their work areas.
NEARLY_FULL_BYTES = 2**30

# Bits of NVML's clock event reasons: thermal slowdown by software and hardware, hardware slowdown
# and power brake.
SLOWED_BY = {"heat": 0x60, "a hardware limit": 0x88}

# Share of the time from which another program uses a GPU; a desktop that is drawn stays below.
MIN_UTILIZATION = 0.1
# The longest span over which NVML averages it.
UTILIZATION_SPAN_S = 1.0


def no_gpu_reason() -> str | None:
    """Return why labs run on the CPU despite a GPU; None if there is none, or all can be used."""
    has_driver = NVIDIA_DRIVER.exists()
    if torch.version.cuda is None and torch.version.hip is None:
        if not has_driver:
            return None
        return "an NVIDIA driver is loaded, but this torch is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every call warns of a driver that is too old
        try:
            # This build of torch may have no machine code for a GPU that CUDA finds.
            count = count_gpus()
            reason = next(filter(None, map(_no_kernels_reason, range(count))), None)
        except Exception as error:  # of several types, by what fails
            return _start_failure(error)
    if count == 0 and has_driver:
        hidden = "a container without GPUs?"
        if HIDDEN_BY in os.environ:
            hidden = f"{HIDDEN_BY} is {os.environ[HIDDEN_BY]!r}"
        return f"an NVIDIA driver is loaded, but CUDA sees no GPU ({hidden})"
    return reason


def _start_failure(error: Exception) -> str:
    """Return why CUDA does not start, in at most `MAX_REASON` characters."""
    driver = driver_version() or "unknown"
    cuda = torch.version.cuda or ""
    needed = NEEDED_DRIVERS.get(cuda.partition(".")[0])
    if "too old" in str(error) and needed is not None:
        return f"driver {driver} is too old: this torch, for CUDA {cuda}, needs {needed} or newer"
    message = re.split(r"(?<=\w\w)\. |\n|, e\.g\. ", str(error), maxsplit=1)[0]
    reason = f"CUDA does not start: {message or type(error).__name__} (driver {driver})"
    return textwrap.shorten(reason, MAX_REASON, placeholder="...")


def has_code_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return whether a build has code for a GPU of this capability.

    `architectures` are those of `torch.cuda.get_arch_list()`.

    Machine code ("sm_86") runs on its major version from its minor version up, PTX ("compute_90")
    on every newer GPU (CUDA C++ programming guide, "Application compatibility"). With suffix "a"
    code runs on that version alone, with "f" on its major version. A list that names none of these,
    as AMD's, is trusted.
    """
    matches = re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(architectures))
    for kind, major, minor, suffix in matches:
        built = (int(major), int(minor))
        is_any_ptx = kind == "compute" and not suffix
        is_same_major = suffix != "a" and built[0] == capability[0]
        if capability == built or (capability > built and (is_any_ptx or is_same_major)):
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
    """Return the NVIDIA driver's version, such as "580.65.06"; None if unknown."""
    with suppress(OSError):
        if match := re.search(r"Kernel Module\s.*?(\d+(\.\d+)+)", NVIDIA_DRIVER.read_text()):
            return match[1]
    return None


def library_versions() -> dict[str, str | None]:
    """Return what decides how fast GPUs are: versions, and the arithmetic of float32 matmuls."""
    cudnn = torch.backends.cudnn.version()
    nccl = None
    with suppress(Exception):  # a build without NCCL
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = {
        "torch build": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn and str(cudnn),
    }
    # TF32 is faster and less exact; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 of some images asks for it.
    matmul: Any = torch.backends.cuda.matmul
    arithmetic = None
    if matmul.fp32_precision == "tf32":
        arithmetic = "TF32"
    return versions | {"NCCL": nccl, "driver": driver_version(), "float32 matmuls": arithmetic}


@dataclass(frozen=True)
class GpuLoad:
    """The load of the GPUs of this process: the worst value of any. None: no GPU says it.

    A laptop's or a virtual GPU may lack some of the values.
    """

    utilization: float | None = None
    """Share of the last second, or less, in which a kernel ran."""
    slowed_by: str = ""
    """Why a GPU is slowed down: "heat", "a hardware limit", or ""; a power cap does not count."""
    clock_share: float | None = None
    """Of the highest clock; low on an idle GPU."""
    temperature: float | None = None
    """Degrees Celsius."""
    power_limit_w: float | None = None


def gpu_load() -> GpuLoad | None:
    """Return the load of the GPUs that CUDA sees; None without NVML.

    Not their processes: NVML answers with ids of the host, which a container does not have, and
    other ranks of a job or a server of MPS are no other program.
    """
    # GPUs that CUDA_VISIBLE_DEVICES hides may be hot without harm.
    states = [state for state in map(gpu_state, range(count_gpus())) if state is not None]
    if not states:
        return None
    # A clock counts relative to the highest of the same GPU: they may be of several kinds.
    shares = [
        round(state.clock_mhz / state.max_clock_mhz, 2)
        for state in states
        if state.clock_mhz is not None and state.max_clock_mhz
    ]
    reasons = [state.clock_reasons or 0 for state in states]
    slowed_by = [
        name for name, mask in SLOWED_BY.items() if any(reason & mask for reason in reasons)
    ]
    percents = _known(state.utilization_percent for state in states)
    milliwatts = _known(state.power_limit_mw for state in states)
    return GpuLoad(
        utilization=max((percent / 100 for percent in percents), default=None),
        slowed_by=slowed_by[0] if slowed_by else "",
        clock_share=min(shares, default=None),
        temperature=max(_known(state.temperature for state in states), default=None),
        power_limit_w=min((limit / 1000 for limit in milliwatts), default=None),
    )


def gpu_state(index: int) -> GpuState | None:
    """Return what NVML says about a GPU of CUDA; None if it says nothing."""
    properties: Any = torch.cuda.get_device_properties(index)
    return read_gpu(str(getattr(properties, "uuid", "")))


def utilization_by_others() -> float | None:
    """Return the utilization of the GPUs while this process leaves them alone; None if unknown.

    The value is that of the last second, in which ranks of this process may have ended: a high one
    is read again.
    """
    load = gpu_load()
    if load is not None and (load.utilization or 0.0) >= MIN_UTILIZATION:
        time.sleep(UTILIZATION_SPAN_S)
        load = gpu_load()
    if load is None:
        return None
    return load.utilization


def count_gpus() -> int:
    """Return how many GPUs CUDA can use, which initializes CUDA: before, it answers for NVML."""
    if torch.cuda.device_count() > 0:
        torch.cuda.init()
    return torch.cuda.device_count()


def cores_beside(index: int, devices: Path = PCI_DEVICES) -> set[int]:
    """Return the cores of the NUMA node that a GPU hangs on; empty if unknown."""
    properties: Any = torch.cuda.get_device_properties(index)
    cores: set[int] = set()
    with suppress(AttributeError, OSError, ValueError):  # an older torch, no sysfs
        slot = f"{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        folder = devices / f"{properties.pci_domain_id:04x}:{slot}"
        text = (folder / "local_cpulist").read_text()
        for part in filter(None, text.strip().split(",")):  # "0-47,96-143"
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def link_types() -> str | None:
    """Return the GPUs' connections by `nvidia-smi topo` ("NV18", "NODE, SYS"); None if unknown."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    matrix = []
    for line in result.stdout.splitlines():
        name, *links = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name) and "X" in links:  # the heading has none
            matrix.append(links)
    # Columns after those of the GPUs are network cards and affinities.
    kinds = {link for links in matrix for link in links[: len(matrix)]} - {"X"}
    return ", ".join(sorted(kinds)) or None


def is_nearly_full() -> bool:
    """Return whether the current GPU has too little free memory for libraries to start."""
    with suppress(Exception):
        return torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < NEARLY_FULL_BYTES
    return False


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
