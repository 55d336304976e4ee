"""What this computer is: devices, memory, known peak rates, software versions, labkit's source.

Everything a reader needs to judge a number that was measured here, and nothing that is guessed:
an unknown device has no peak rate, a version that cannot be read is None.
"""

import os
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from labkit.machine import gpus as cuda_gpus
from labkit.machine.cpu_quota import quota_cores
from labkit.machine.source import Source, describe_source

GIB = 2**30

# Dense bf16 tensor-core peaks in TFLOP/s, from the vendor's data sheets, by the whole device name as the driver
# gives it (patterns, because memory and connector are part of it). A near name is another device: an H100 NVL, a
# laptop's RTX 4090 and a GB200 have peaks of their own.
DENSE_BF16_PEAK_TFLOPS = {
    r"H100( 80GB HBM3)?": 989.0,
    r"H100 PCIe": 756.0,
    r"H200": 989.0,
    r"A100[- ](SXM4|PCIE|PG509)?[- ]?[48]0GB( PCIe)?": 312.0,
    r"L40S": 362.0,
    r"GeForce RTX 4090": 165.0,
    r"B200": 2250.0,
}

VERSIONED_PACKAGES = ("torch", "triton", "numpy", "pandas", "papermill", "nbconvert")


class Gpu(BaseModel):
    """One CUDA device."""

    model_config = ConfigDict(frozen=True)

    name: str
    memory_bytes: int
    compute_capability: str
    dense_bf16_peak_tflops: float | None
    """Data-sheet peak, None for a device that is not listed."""


class Machine(BaseModel):
    """Provenance of a run. Sizes in bytes; `cores` are those this process may use."""

    model_config = ConfigDict(frozen=True)

    host: str
    cpu: str
    instructions: str | None = None
    """Vector instructions that torch computes with, as "AVX512"; None in runs from before it was told."""
    cores: int
    memory_bytes: int
    gpus: list[Gpu]
    """Those that labs can use: all, or none."""
    why_no_gpus: str | None = None
    """Why the GPUs that are there are not used (driver too old, no kernels for them), or None."""
    system: str
    python: str
    versions: dict[str, str | None]
    source: Source | None = Field(validation_alias=AliasChoices("source", "git"))  # `git` in older runs
    """None in older runs, for a labkit outside a git checkout."""
    float32_products: dict[str, str] | None = None
    """How a GPU does "matmul" and "convolution" of float32: "ieee" or "tf32"; None in runs from before it was told."""

    @property
    def identity(self) -> list[str | None]:
        """What tells machines apart. Virtual ones of one name and processor may differ in instructions."""
        return [self.host, self.label, self.instructions]

    @property
    def label(self) -> str:
        """A short name for figures and tables, e.g. "NVIDIA H200" or "2-core AMD EPYC"."""
        if self.gpus:
            count = f"{len(self.gpus)}x " if len(self.gpus) > 1 else ""
            return count + self.gpus[0].name
        return f"{self.cores}-core {self.cpu}"

    def device(self, wanted: str) -> str:
        """ "cpu" or "cuda"; "auto" is CUDA where there is a GPU."""
        if wanted != "auto":
            return wanted
        return "cuda" if self.gpus else "cpu"

    def memory_of(self, device: str) -> int:
        """Bytes of a device, "cpu" or "cuda": the machine's, or its first GPU's."""
        return self.gpus[0].memory_bytes if device == "cuda" and self.gpus else self.memory_bytes

    def backend(self, device: str, world_size: int) -> str:
        """ "nccl" if every rank has a GPU to itself, else "gloo": ranks on a CPU, or that share a GPU."""
        return "nccl" if device == "cuda" and len(self.gpus) >= world_size else "gloo"

    def why_no_device(self, device: str) -> str | None:
        """Why nothing can be measured on `device` here, or None."""
        if device != "cuda" or self.gpus:
            return None
        return "needs a CUDA device, and " + (self.why_no_gpus or "there is none")

    @property
    def slug(self) -> str:
        """The label as it appears in file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")[:40]


@cache
def describe_machine() -> Machine:
    """The machine this process runs on. Cached: nothing in it changes while a process lives."""
    why_no_gpus = cuda_gpus.why_unusable()
    return Machine(
        host=platform.node(),
        cpu=_cpu_model(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        cores=available_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=[] if why_no_gpus else [_gpu(i) for i in range(torch.cuda.device_count())],
        why_no_gpus=why_no_gpus,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={name: _version(name) for name in VERSIONED_PACKAGES},
        source=describe_source(),
        float32_products=_float32_products(),
    )


def available_cores() -> int:
    """Cores this process may use: by the affinity mask, and by the CPU quota of its cgroups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(quota_cores() or cores)))


def dense_bf16_peak_tflops(device_name: str) -> float | None:
    """Data-sheet peak of a device in TFLOP/s, or None: an unlisted device gets no number."""
    name = device_name.removeprefix("NVIDIA ")
    matches = (peak for pattern, peak in DENSE_BF16_PEAK_TFLOPS.items() if re.fullmatch(pattern, name))
    return next(matches, None)


def _float32_products() -> dict[str, str]:
    """How CUDA does "matmul" and "convolution", as torch is set up: as "ieee" float32, or "tf32", 10 bits of 23."""
    backends: Any = torch.backends  # a module that types do not know all of
    settings = {"matmul": backends.cuda.matmul, "convolution": backends.cudnn.conv}
    # "none" leaves it to a setting that is IEEE where nobody changed it
    return {name: each.fp32_precision.replace("none", "ieee") for name, each in settings.items()}


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
        dense_bf16_peak_tflops=dense_bf16_peak_tflops(properties.name),
    )


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else (platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
