"""Machines that are not here, as `describe_machine` would describe them."""

from labkit.machine.description import GIB, Gpu, Machine, describe_machine

KINDS = {
    "H100": ("NVIDIA H100 80GB HBM3", 79.1, "9.0"),
    "MIG": ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, "9.0"),
    "A100": ("NVIDIA A100-SXM4-40GB", 39.4, "8.0"),
    "A4000": ("NVIDIA RTX A4000", 15.7, "8.6"),
    "A10G": ("NVIDIA A10G", 22.1, "8.6"),
    "L40S": ("NVIDIA L40S", 44.4, "8.9"),
    "laptop": ("NVIDIA GeForce RTX 4060 Laptop GPU", 7.8, "8.9"),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 31.4, "12.0"),
    "B200": ("NVIDIA B200", 178.4, "10.0"),
    "B300": ("NVIDIA B300 SXM6 AC", 268.0, "10.3"),
}


def with_gpus(count: int, kind: str) -> Machine:
    name, gib, capability = KINDS[kind]
    gpu = Gpu(
        name=name,
        memory_bytes=int(gib * GIB),
        compute_capability=capability,
        free_bytes=int((gib - 1) * GIB),
    )
    update = {"host": "elsewhere", "gpus": [gpu] * count, "no_gpu_reason": None}
    return describe_machine().model_copy(update=update)


def _without_gpus(reason: str) -> Machine:
    update = {"host": "elsewhere", "gpus": [], "no_gpu_reason": reason}
    return describe_machine().model_copy(update=update)


# Each kind, and each count from 1 to 8: all pairs are among the slow tests.
MACHINES = {
    "one H100": with_gpus(1, "H100"),
    "eight H100": with_gpus(8, "H100"),
    "MIG": with_gpus(1, "MIG"),
    "three A100": with_gpus(3, "A100"),
    "two A4000": with_gpus(2, "A4000"),
    "A10G": with_gpus(1, "A10G"),
    "seven L40S": with_gpus(7, "L40S"),
    "laptop": with_gpus(1, "laptop"),
    "five RTX 5090": with_gpus(5, "RTX 5090"),
    "four B200": with_gpus(4, "B200"),
    "six B300": with_gpus(6, "B300"),
    "driver too old": _without_gpus("CUDA does not start: The NVIDIA driver is too old"),
    "V100": _without_gpus("Tesla V100 has compute capability 7.0, this torch is built for sm_75"),
    "container": _without_gpus("an NVIDIA driver is loaded, but CUDA sees no GPU"),
}
