"""Machines that are not here, as `describe_machine` would describe them."""

from collections.abc import Iterable

from labkit.machine.description import GIB, Gpu, Machine, describe_machine

# Name, GiB of memory, compute capability; how many of it `make test` has: in all, 1 to 8.
KINDS = {
    "H100": ("NVIDIA H100 80GB HBM3", 79.1, "9.0", (1, 8)),
    "MIG": ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, "9.0", (1,)),
    "A100": ("NVIDIA A100-SXM4-40GB", 39.4, "8.0", (3,)),
    "A4000": ("NVIDIA RTX A4000", 15.7, "8.6", (2,)),
    "A10G": ("NVIDIA A10G", 22.1, "8.6", (1,)),
    "L40S": ("NVIDIA L40S", 44.4, "8.9", (7,)),
    "laptop": ("NVIDIA GeForce RTX 4060 Laptop GPU", 7.8, "8.9", (1,)),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 31.4, "12.0", (5,)),
    "B200": ("NVIDIA B200", 178.4, "10.0", (4,)),
    "B300": ("NVIDIA B300 SXM6 AC", 268.0, "10.3", (6,)),
}
NO_GPU_REASONS = {
    "driver too old": "CUDA does not start: The NVIDIA driver is too old",
    "V100": "Tesla V100 has compute capability 7.0, this torch is built for sm_75",
    "container": "an NVIDIA driver is loaded, but CUDA sees no GPU",
}


def _machine(gpus: list[Gpu], no_gpu_reason: str | None) -> Machine:
    update = {"host": "elsewhere", "gpus": gpus, "no_gpu_reason": no_gpu_reason}
    return describe_machine().model_copy(update=update)


def _machines(kind: str, counts: Iterable[int]) -> dict[str, Machine]:
    name, gib, capability, _ = KINDS[kind]
    gpu = Gpu(
        name=name,
        memory_bytes=int(gib * GIB),
        compute_capability=capability,
        free_bytes=int((gib - 1) * GIB),
    )
    return {f"{count} {kind}": _machine([gpu] * count, None) for count in counts}


ALL_MACHINES: dict[str, Machine] = {}
MACHINES = {name: _machine([], reason) for name, reason in NO_GPU_REASONS.items()}
for kind, (*_, counts) in KINDS.items():
    ALL_MACHINES |= _machines(kind, range(1, 9))
    MACHINES |= _machines(kind, counts)
