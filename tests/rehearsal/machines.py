"""Machines that are not here, as `describe_machine` would describe them."""

from labkit.machine.description import GIB, Gpu, Machine, describe_machine


def _machine(
    count: int, name: str, gib: float, capability: str, no_gpu_reason: str | None = None
) -> Machine:
    free_bytes = int((gib - 1) * GIB)
    gpu = Gpu(
        name=name, memory_bytes=int(gib * GIB), compute_capability=capability, free_bytes=free_bytes
    )
    update = {"host": "elsewhere", "gpus": [gpu] * count, "no_gpu_reason": no_gpu_reason}
    return describe_machine().model_copy(update=update)


MACHINES = {
    "one H100": _machine(1, "NVIDIA H100 80GB HBM3", 79.1, "9.0"),
    "eight H100": _machine(8, "NVIDIA H100 80GB HBM3", 79.1, "9.0"),
    "MIG": _machine(1, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, "9.0"),
    "two A100": _machine(2, "NVIDIA A100-SXM4-80GB", 79.3, "8.0"),
    "two A4000": _machine(2, "NVIDIA RTX A4000", 15.7, "8.6"),
    "RTX 4090": _machine(1, "NVIDIA GeForce RTX 4090", 23.5, "8.9"),
    "laptop": _machine(1, "NVIDIA GeForce RTX 4060 Laptop GPU", 7.8, "8.9"),
    "B200": _machine(1, "NVIDIA B200", 178.4, "10.0"),
    "driver too old": _machine(
        0, "", 0, "", "CUDA does not start: The NVIDIA driver on your system is too old"
    ),
    "V100": _machine(
        0,
        "",
        0,
        "",
        "Tesla V100-SXM2-16GB has compute capability 7.0, and this torch is built for sm_75",
    ),
    "container": _machine(
        0, "", 0, "", "an NVIDIA driver is loaded, but CUDA sees no GPU (a container without GPUs?)"
    ),
}
