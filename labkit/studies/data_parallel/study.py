"""The data-parallel lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from labkit.lab import capacity
from labkit.lab.agreement import Known, step_times
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.own_models import model_names, parameters_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import SIZES
from labkit.nn.workloads import RESNET50, RESNET50_PARAMETERS
from labkit.parallel.data_parallel.implementations import IMPLEMENTATIONS, LOCAL, OVER_SHARED_MEMORY, TORCH, register
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.data_parallel.findings import QUESTIONS
from labkit.studies.data_parallel.worker import DataParallelPoint, measure_point

MIB = 2**20
RANK_BYTES = 200 * MIB  # a rank's own resident memory, torch included
COPIES = 3  # of the parameters, for each alternative: parameters, gradients, what is on its way

WorkloadName = Annotated[str, one_of(lambda: (RESNET50, *model_names()))]
Implementation = Annotated[str, one_of(lambda: IMPLEMENTATIONS)]
Megabytes = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class DataParallelConfig(TimedConfig):
    """What a reader may set. Bucket sizes are in MiB on every side."""

    workloads: Annotated[list[WorkloadName], Field(min_length=1)]
    world_sizes: Annotated[list[Annotated[int, Field(ge=2, le=1024)]], Field(min_length=1)] = [2]
    implementations: Annotated[list[Implementation], Field(min_length=1)] = list(IMPLEMENTATIONS)
    buckets_mb: list[Megabytes]
    """Sizes of every bucket in the sweep; everywhere else buckets are as without a size."""
    bucket_workloads: list[WorkloadName]
    accumulation_workloads: list[WorkloadName]
    micro_batches: Annotated[int, Field(ge=2, le=1024)] = 4
    batch: Count = 4
    image_size: Annotated[int, Field(ge=32, le=4096)] = 224
    context_length: Count = 128
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 600.0


class DataParallelStudy(Study):
    """Ways to average gradients, on Transformers and ResNet-50."""

    name = "data_parallel"
    title = "Data-parallel training"
    summary = "How to average gradients over ranks on this machine, with which bucket size, and what it costs a step."
    questions = QUESTIONS
    profiles = {
        "smoke": DataParallelConfig(
            workloads=["nano"],
            buckets_mb=[1.0],
            bucket_workloads=["nano"],
            accumulation_workloads=["nano"],
            micro_batches=2,
            batch=1,
            image_size=32,
            context_length=16,
            warmup=1,
            repeats=3,
        ),
        "quick": DataParallelConfig(
            workloads=["mini", "nano"],
            buckets_mb=[1.0, 100.0],
            bucket_workloads=["mini"],
            accumulation_workloads=["nano"],
            micro_batches=2,
            batch=2,
            image_size=32,
            context_length=32,
            warmup=1,
            rounds_s=5.0,
        ),
        "standard": DataParallelConfig(
            workloads=["resnet50", "mini"],
            world_sizes=[2, 4],
            buckets_mb=[1.0, 5.0, 10.0, 25.0, 100.0],
            bucket_workloads=["resnet50", "mini"],
            accumulation_workloads=["resnet50", "mini"],
            image_size=64,
            context_length=64,
        ),
        "paper": DataParallelConfig(
            workloads=["resnet50", "medium"],
            buckets_mb=[4.0 * elements for elements in range(3, 28, 2)],
            bucket_workloads=["resnet50"],
            accumulation_workloads=["resnet50"],
            batch=32,
            warmup=20,
            repeats=20,
            ratio_within=0.0,
            rounds_s=None,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    plugs_into = "implementations"
    plug_in = staticmethod(register)
    models_into = ("workloads",)

    def points(self, config: DataParallelConfig, machine: Machine) -> Sequence[DataParallelPoint]:
        """By world size: all implementations, the bucket sizes, accumulation, a timeline, the memory."""
        points = [
            point
            for world_size in sorted(set(config.world_sizes))
            for point in _points_of_world(config, world_size, machine)
        ]
        return list({point.id: point for point in points}.values())

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        local = select(
            frame, ["seconds", "phase", "workload"], sweep="implementations", implementation=LOCAL, workload=list(SIZES)
        )
        yield step_times(local.assign(part=local["phase"], size=local["workload"], precision="float32"), "SGD")

    def skip_reason(self, point: DataParallelPoint, machine: Machine) -> str | None:
        ranks, copies = ranks_here(point.world_size), _copies(point)
        needed = ranks * (RANK_BYTES + COPIES * copies * 4 * (_parameters(point.workload) or 0))
        return capacity.skip_reason(machine, point.device, needed, ranks=ranks, says=f"{copies} copies need {{}}")

    def series(self, point: DataParallelPoint) -> tuple[Hashable, float] | None:
        parameters = _parameters(point.workload)
        return ((point.sweep, point.world_size), parameters) if parameters else None


def _parameters(workload: str) -> int | None:
    return RESNET50_PARAMETERS if workload == RESNET50 else parameters_of(workload)


def _copies(point: DataParallelPoint) -> int:
    """Models there at once: one each, and in turns the one whose gradients are what is expected."""
    if point.sweep in ("memory", "timeline"):
        return 1
    each = 2 if point.sweep == "accumulation" else 1  # with no_sync and without
    return each * len(point.alternatives) + 1


def _points_of_world(config: DataParallelConfig, world_size: int, machine: Machine) -> Iterator[DataParallelPoint]:
    device = machine.device(config.device)
    possible = [name for name in IMPLEMENTATIONS if device == "cpu" or name not in OVER_SHARED_MEMORY]
    all_of_them = tuple(name for name in possible if name in config.implementations)
    swept = tuple(name for name in (TORCH, "bucketed") if name in all_of_them)
    here: dict[str, Any] = {"world_size": world_size, "device": device, "micro_batches": 1}
    here["backend"] = machine.backend(device, ranks_here(world_size))
    for workload in config.workloads:
        names = (LOCAL, *all_of_them)
        yield DataParallelPoint.of(config, sweep="implementations", workload=workload, alternatives=names, **here)
    for workload in config.bucket_workloads if swept else []:
        for bucket_mb in sorted(set(config.buckets_mb)):
            # the default is in every comparison, so that bucket sizes can be compared through it
            names = tuple(alternative for name in swept for alternative in (name, f"{name}@{bucket_mb!r}"))
            of_size: dict[str, Any] = {"bucket_mb": bucket_mb, "alternatives": names}
            yield DataParallelPoint.of(config, sweep="buckets", workload=workload, **of_size, **here)
    for workload in config.accumulation_workloads if swept else []:
        several = here | {"micro_batches": config.micro_batches}
        yield DataParallelPoint.of(config, sweep="accumulation", workload=workload, alternatives=swept, **several)
    # Neither the profiler nor the allocator knows of shared memory: it is copied by a thread, and mapped.
    seen = tuple(name for name in all_of_them if name not in OVER_SHARED_MEMORY)
    for workload in config.workloads[:1] if seen else []:
        for sweep in ("timeline", "memory"):
            yield DataParallelPoint.of(config, sweep=sweep, workload=workload, alternatives=seen, **here)


STUDY = DataParallelStudy()
