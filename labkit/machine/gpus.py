"""Whether this build of torch can compute on the GPUs that are there, and if it cannot, why.

NVML counts GPUs that CUDA cannot use: a driver older than the CUDA that torch is built with, a GPU that torch has no
kernels for. Asking such a GPU for more than its number raises, or works until the first kernel is launched.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)([af]?)")


def why_unusable() -> str | None:
    """Why labs run on the CPU although there is a GPU, in one line; None if there is none, or all can be used."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "an NVIDIA driver is loaded, but this torch is built without CUDA" if NVIDIA_DRIVER.exists() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the driver is too old comes as a warning first, from every call
        count = torch.cuda.device_count()
        if count > 0 and not torch.cuda.is_available():
            return _why_cuda_does_not_start()
        return next(filter(None, map(_why_no_kernels, range(count))), None)


def has_code_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Whether a build for `architectures` (`torch.cuda.get_arch_list()`) has code for a GPU of this capability.

    Machine code ("sm_86") runs on its major version from its minor version on, PTX ("compute_90") on every newer GPU,
    code with features of one chip ("sm_90a") on that alone (CUDA C++ programming guide, "Application compatibility").
    A build whose list names none of these, as AMD's, is taken at its word.
    """
    found = [match.groups() for match in map(_ARCHITECTURE.fullmatch, architectures) if match]
    return not found or any(_runs(kind, number, suffix, capability) for kind, number, suffix in found)


def _runs(kind: str, number: str, suffix: str, capability: tuple[int, int]) -> bool:
    built_for = divmod(int(number), 10)
    if suffix == "a":
        return capability == built_for
    if kind == "compute" and not suffix:
        return capability >= built_for
    return capability[0] == built_for[0] and capability[1] >= built_for[1]


def _why_cuda_does_not_start() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # of several types, by what fails
        told = re.split(r"(?<=\w)\. |\n", str(error), maxsplit=1)[0]
        return f"CUDA does not start: {told}"
    return "CUDA is not available"


def _why_no_kernels(index: int) -> str | None:
    properties = torch.cuda.get_device_properties(index)
    architectures = torch.cuda.get_arch_list()
    if has_code_for((properties.major, properties.minor), architectures):
        return None
    return (
        f"{properties.name} has compute capability {properties.major}.{properties.minor}, and this torch is built for "
        f"{', '.join(architectures)} (CUDA_VISIBLE_DEVICES hides a GPU)"
    )
