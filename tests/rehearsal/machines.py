"""Machines that are not here, as `describe_machine` would describe them."""

from itertools import product

from labkit.machine.description import GIB, Gpu, Machine, describe_machine

# Name, GiB of memory, compute capability.
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
NO_GPU_REASONS = {
    "driver too old": "CUDA does not start: The NVIDIA driver is too old",
    "V100": "Tesla V100 has compute capability 7.0, this torch is built for sm_75",
    "container": "an NVIDIA driver is loaded, but CUDA sees no GPU",
}
# Each kind, and each count from 1 to 8: all pairs are among the slow tests.
QUICK = {
    "1 H100", "8 H100", "1 MIG", "3 A100", "2 A4000", "1 A10G", "7 L40S", "1 laptop", "5 RTX 5090",
    "4 B200", "6 B300",
}  # fmt: skip


def _machine(gpus: list[Gpu], no_gpu_reason: str | None) -> Machine:
    update = {"host": "elsewhere", "gpus": gpus, "no_gpu_reason": no_gpu_reason}
    return describe_machine().model_copy(update=update)


def _gpu(name: str, gib: float, capability: str) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=int(gib * GIB),
        compute_capability=capability,
        free_bytes=int((gib - 1) * GIB),
    )


ALL_MACHINES = {
    f"{count} {kind}": _machine([_gpu(*KINDS[kind])] * count, None)
    for count, kind in product(range(1, 9), KINDS)
}
MACHINES = {name: ALL_MACHINES[name] for name in sorted(QUICK)}
MACHINES |= {name: _machine([], reason) for name, reason in NO_GPU_REASONS.items()}
