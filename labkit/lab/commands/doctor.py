"""What this machine is and what it can run: the tables of `labkit doctor`."""

from collections.abc import Iterable, Iterator

import torch.distributed as dist

from labkit.lab.config import PROFILES
from labkit.lab.declaration import Lab
from labkit.lab.point import planned_s
from labkit.lab.project import notebooks_directory, project_root
from labkit.lab.units import format_bytes, format_seconds
from labkit.machine import Machine, available_memory_bytes, describe_machine
from labkit.parallel.transport.build import unavailable_reason


def machine_rows() -> list[tuple[str, str]]:
    """(name, value) of what matters for measuring here."""
    machine = describe_machine()
    memory = f"{format_bytes(machine.memory_bytes)}, {format_bytes(available_memory_bytes())} available"
    gpus = [
        f"{f'{count}x ' * (count > 1)}{gpu.name}, {format_bytes(gpu.memory_bytes)}, "
        f"{format_bytes(gpu.available_bytes)} free"
        for count, gpu in machine.gpu_counts
    ]
    links = [f"connected by {machine.gpu_links}"] if machine.gpu_links else []
    backends = [name for name, has in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available)) if has()]
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.versions.items())
    return [
        ("machine", machine.label),
        ("processor", f"{machine.cpu}, {machine.cores_text}, {machine.instructions}"),
        ("memory", memory),
        (
            "gpu",
            "; ".join(gpus + links) or f"{_no_gpu(machine)}: labs run on the CPU, points that need a GPU are skipped",
        ),
        ("backends", ", ".join(backends)),
        ("shared memory", shared_memory_status()),
        ("system", f"{machine.system}, Python {machine.python}"),
        ("versions", versions),
        ("source", str(machine.source)),
        ("notebooks", str(notebooks_directory())),
        ("results", f"below {project_root()}"),
    ]


def shared_memory_status() -> str:
    """Whether ranks of this machine can share memory, and why not; compiles what is needed at its first call."""
    reason = unavailable_reason()
    return f"not available ({reason}): CPU ranks send point to point, which takes longer" if reason else "compiled"


def _no_gpu(machine: Machine) -> str:
    return f"not used, {machine.no_gpu_reason}" if machine.no_gpu_reason else "none"


def lab_rows(studies: Iterable[Lab]) -> Iterator[tuple[str, ...]]:
    """(lab, profile, planned points, points this machine can run, their planned time, the commonest reason why not)."""
    machine = describe_machine()
    for study in studies:
        profiles = study.profiles_on(machine)
        for profile in PROFILES:
            reasons = {point: point.skip_reason(machine) for point in study.plan(profiles[profile], machine)}
            possible = [point for point, reason in reasons.items() if not reason]
            refusals = [reason for reason in reasons.values() if reason]
            commonest = max(set(refusals), key=refusals.count) if refusals else ""
            planned = format_seconds(planned_s(possible)) if possible else ""
            yield study.name, profile, str(len(reasons)), str(len(possible)), planned, commonest
