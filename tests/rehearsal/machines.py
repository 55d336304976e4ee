"""Machines that are not here, as `describe_machine` would describe them."""

from labkit.machine import Gpu, Machine, describe_machine
from labkit.machine.description import GIB, dense_bf16_peak_tflops


def _with(count: int, name: str, gib: float, capability: str, **others) -> Machine:
    gpu = Gpu(
        name=name,
        memory_bytes=int(gib * GIB),
        compute_capability=capability,
        dense_bf16_peak_tflops=dense_bf16_peak_tflops(name),
    )
    return describe_machine().model_copy(
        update={"host": "elsewhere", "gpus": [gpu] * count, "no_gpu_reason": None} | others
    )


TOO_OLD = "CUDA does not start: The NVIDIA driver on your system is too old (found version 12040)"
MACHINES = {
    "one H100": _with(1, "NVIDIA H100 80GB HBM3", 79.1, "9.0"),
    "two A100": _with(2, "NVIDIA A100-SXM4-80GB", 79.3, "8.0"),
    "RTX 4090": _with(1, "NVIDIA GeForce RTX 4090", 23.5, "8.9"),
    "eight H100": _with(8, "NVIDIA H100 80GB HBM3", 79.1, "9.0"),
    "driver too old": _with(0, "", 0, "", no_gpu_reason=TOO_OLD),
}
