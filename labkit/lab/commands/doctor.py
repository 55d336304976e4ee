"""The tables of `labkit doctor`: this machine, and the labs and profiles that it can run."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from labkit.lab.config import PROFILES
from labkit.lab.declaration import Lab
from labkit.lab.pages import cards
from labkit.lab.point import planned_s
from labkit.lab.project import notebooks_directory, project_root
from labkit.lab.units import format_bytes, format_seconds
from labkit.machine.cgroups import available_memory_bytes
from labkit.machine.description import describe_machine
from labkit.parallel.transport.library import unavailable_reason

SHM = Path("/dev/shm")
# NVIDIA recommends at least this much for containers; by default Docker gives them 64 MiB.
MIN_SHM_BYTES = 2**30


def machine_rows() -> list[tuple[str, str]]:
    """Return facts about this machine that matter for measuring, as (name, value)."""
    machine = describe_machine()
    facts = {name.lower(): value for name, value in cards.machine_rows(machine).items()}
    # A page names the processor in the label of a machine without GPUs; here it always stands.
    facts["processor"] = f"{machine.cpu}, {machine.cores_text}"
    facts["memory"] += f", {format_bytes(available_memory_bytes())} available"
    if machine.gpus:
        facts["gpu"] += (
            f"; {', '.join(format_bytes(gpu.available_bytes) for gpu in machine.gpus)} free"
        )
    else:
        facts["gpu"] += ": labs run on the CPU, points that need a GPU are skipped"
    backends = [
        name
        for name, has in (("gloo", dist.is_gloo_available), ("nccl", dist.is_nccl_available))
        if has()
    ]
    shared_memory = "compiled"
    reason = unavailable_reason()  # the first call compiles the transport
    if reason:
        shared_memory = (
            f"not available ({reason}): CPU ranks send point to point, which takes longer"
        )
    # labkit's ranks do without /dev/shm, but not NCCL's and DataLoader's.
    if SHM.is_dir() and shutil.disk_usage(SHM).total < MIN_SHM_BYTES:
        size = format_bytes(shutil.disk_usage(SHM).total)
        shared_memory += (
            f"; {SHM} has only {size}: NCCL and workers of a DataLoader may fail (--shm-size=1g)"
        )
    facts |= {"backends": ", ".join(backends), "shared memory": shared_memory}
    facts |= {"notebooks": str(notebooks_directory()), "results": f"below {project_root()}"}
    return list(facts.items())


def lab_rows(studies: Iterable[Lab]) -> Iterator[tuple[str, ...]]:
    """Yield lab, profile, points, points possible here, their time, the commonest refusal."""
    machine = describe_machine()
    for study in studies:
        profiles = study.profiles_on(machine)
        for profile in PROFILES:
            reasons = {
                point: point.skip_reason(machine)
                for point in study.plan(profiles[profile], machine)
            }
            possible = [point for point, reason in reasons.items() if not reason]
            refusals = [reason for reason in reasons.values() if reason]
            commonest = max(set(refusals), key=refusals.count, default="")
            # Without a point there is no time, not a time of 0.
            planned = format_seconds(planned_s(possible)) if possible else ""
            yield study.name, profile, str(len(reasons)), str(len(possible)), planned, commonest
