"""Describes this computer, for the provenance of every number.

Devices, memory, peak rates, software versions and labkit's source.
"""

import math
import platform
import re
from contextlib import suppress
from functools import cache
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import BaseModel

from labkit.machine import gpus as cuda_gpus
from labkit.machine.cgroups import available_cores, memory_limit_bytes, quota_cores
from labkit.machine.nvml import GpuState
from labkit.machine.source import Source, describe_source

GIB = 2**30

VERSIONED_PACKAGES = ("torch", "triton", "numpy", "pandas", "papermill", "nbconvert")
# One direction of one NVLink by compute capability, from the data sheets: 600 GB/s are 12 links in
# both directions.
NVLINK_BYTES_PER_S = {"8.0": 25e9, "9.0": 25e9, "10.0": 50e9, "10.3": 50e9}


class Gpu(BaseModel, frozen=True):
    """One CUDA device."""

    name: str
    memory_bytes: int
    compute_capability: str
    free_bytes: int | None = None
    """Unused memory when the machine was described; None if unknown."""

    @property
    def available_bytes(self) -> int:
        if self.free_bytes is None:
            return self.memory_bytes
        return self.free_bytes


class Machine(BaseModel, frozen=True):
    """Provenance of a run. Sizes in bytes; `cores` are those this process may use."""

    host: str
    cpu: str
    instructions: str | None = None
    """Vector instructions that torch uses, such as "AVX512"; None in older runs."""
    cores: int
    cpu_quota: float | None = None
    """Cores' worth of time per second that a cgroup allows, such as 0.5; None: no limit."""
    memory_bytes: int
    gpus: list[Gpu]
    """The GPUs that labs can use: all, or none."""
    gpu_links: str | None = None
    """Their connection by `nvidia-smi topo`, such as "NV18"."""
    exclusive_gpus: bool = False
    """Whether a GPU takes one process at a time."""
    no_gpu_reason: str | None = None
    """Why present GPUs are not used (driver too old, no kernels for them), or None."""
    system: str
    python: str
    versions: dict[str, str | None]
    source: Source | None = None
    """None in older runs, of a labkit outside a git checkout."""

    @property
    def identity(self) -> list[str | None]:
        """Return values that differ between machines."""
        # Virtual ones of one name and processor may differ in instructions.
        return [self.host, self.label, self.instructions]

    @property
    def label(self) -> str:
        """Return a short name for figures and tables: "2x NVIDIA H200", "2-core AMD EPYC"."""
        if not self.gpus:
            return f"{self.cores}-core {self.cpu}"
        # One kind stands for all: labs spread their ranks over equal GPUs.
        name = self.gpus[0].name
        return f"{len(self.gpus)}x {name}" if len(self.gpus) > 1 else name

    def device(self, wanted: str) -> str:
        """Return "cpu" or "cuda"; "auto" is CUDA if there is a GPU."""
        if wanted != "auto":
            return wanted
        return "cuda" if self.gpus else "cpu"

    @property
    def gpu_counts(self) -> list[tuple[int, Gpu]]:
        """Count neighbors that are equal: [(8, the first of them)]."""
        # Free memory differs between equal GPUs, and with time.
        groups = groupby(self.gpus, key=lambda gpu: gpu.model_copy(update={"free_bytes": None}))
        lists = [list(group) for _, group in groups]
        return [(len(equal), equal[0]) for equal in lists]

    @property
    def link_bytes_per_s(self) -> float:
        """Return the data-sheet peak of a GPU's links in one direction, or NaN."""
        # Known only if all GPUs are connected by listed NVLinks.
        links = re.fullmatch(r"NV(\d+)", self.gpu_links or "")
        rates = {NVLINK_BYTES_PER_S.get(gpu.compute_capability, math.nan) for gpu in self.gpus}
        if links is None or len(rates) != 1:
            return math.nan
        return int(links[1]) * rates.pop()

    @property
    def cores_text(self) -> str:
        """Return "2 cores available", with the CPU quota of a cgroup."""
        text = f"{self.cores} core{'s' * (self.cores > 1)} available"
        if self.cpu_quota is not None:
            text += f" (a CPU quota allows {self.cpu_quota:g} cores' worth of time)"
        return text

    def memory_of(self, device: str) -> int:
        """Return bytes of the machine's memory, or of the free memory of its first GPU."""
        if device == "cuda" and self.gpus:
            return self.gpus[0].available_bytes
        return self.memory_bytes

    def backend(self, device: str, world_size: int) -> str:
        """Return "nccl" if every rank has a GPU to itself, else "gloo"."""
        return "nccl" if device == "cuda" and len(self.gpus) >= world_size else "gloo"

    def no_device_reason(self, device: str) -> str | None:
        """Return why nothing can be measured on `device` here, or None."""
        if device != "cuda" or self.gpus:
            return None
        return "needs a CUDA device, and " + (self.no_gpu_reason or "there is none")

    @property
    def slug(self) -> str:
        """Return the label as it appears in file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")[:40]


@cache
def describe_machine() -> Machine:
    """Describe this machine. Cached: `free_bytes` of its GPUs is that of the first call."""
    # All GPUs or none: with some of them unusable, the plan of a lab would fail halfway.
    no_gpu_reason = cuda_gpus.no_gpu_reason()
    states: list[GpuState | None] = []
    versions = {name: _version(name) for name in VERSIONED_PACKAGES}
    gpu_links = None
    if not no_gpu_reason:
        states = [cuda_gpus.gpu_state(index) for index in range(torch.cuda.device_count())]
    gpus = [_gpu(index, state) for index, state in enumerate(states)]
    if gpus:
        versions |= cuda_gpus.library_versions()
    if len(gpus) > 1:
        # A single GPU has no links, and `nvidia-smi` takes half a second.
        gpu_links = cuda_gpus.link_types()
    return Machine(
        host=platform.node(),
        cpu=_cpu_model(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        cores=available_cores(),
        cpu_quota=quota_cores(),
        memory_bytes=min(filter(None, (psutil.virtual_memory().total, memory_limit_bytes()))),
        gpus=gpus,
        gpu_links=gpu_links,
        exclusive_gpus=any(state is not None and state.is_exclusive for state in states),
        no_gpu_reason=no_gpu_reason,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=versions,
        source=describe_source(),
    )


def _gpu(index: int, state: GpuState | None) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        free_bytes=None if state is None else state.free_bytes,
    )


def _cpu_model() -> str:
    with suppress(OSError):  # Linux has it
        text = Path("/proc/cpuinfo").read_text()
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if match is not None:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
