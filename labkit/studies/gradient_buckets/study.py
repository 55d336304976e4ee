"""The gradient-buckets lab: its parameters, the points it measures, and what it expects of them."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from labkit.costs.memory import activation_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab import capacity
from labkit.lab.agreement import Known, step_times
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import SIZES, shape_named
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.gradient_buckets.findings import QUESTIONS
from labkit.studies.gradient_buckets.model import PREDICTED
from labkit.studies.gradient_buckets.worker import LOCAL, SCHEDULES, STEPS, BucketsPoint, measure_point, plug_in

MIB = 2**20
RANK_BYTES = 200 * MIB  # a rank's own resident memory, torch included
COPIES = 4  # of the parameters, beside the buckets: weights, one being built, local gradients, their means

WorkloadName = Annotated[str, one_of(lambda: SIZES)]
Megabytes = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class BucketsConfig(TimedConfig):
    """What a reader may set. Bucket sizes are in MiB."""

    workloads: Annotated[list[WorkloadName], Field(min_length=1)]
    world_sizes: Annotated[list[Annotated[int, Field(ge=2, le=1024)]], Field(min_length=1)] = [2]
    buckets_mb: Annotated[list[Megabytes], Field(min_length=1)]
    schedules: list[Annotated[str, one_of(lambda: SCHEDULES)]] = []
    """A reader's own, by name."""
    batches: Annotated[list[Count], Field(min_length=1)]
    """Sequences a rank."""
    sequences: Annotated[list[Count], Field(min_length=1)]
    """Tokens of a sequence."""
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 600.0


class GradientBucketsStudy(Study):
    """The same training step with buckets of several sizes, and without communication, in turns."""

    name = "gradient_buckets"
    title = "Gradient buckets"
    summary = "How long a data-parallel step waits for its gradients, and whether the bucket size matters here."
    questions = QUESTIONS
    profiles = {
        "smoke": BucketsConfig(
            workloads=["nano"],
            buckets_mb=[1.0, 100.0],
            batches=[1],
            sequences=[8, 16],
            warmup=1,
            repeats=6,
        ),
        "quick": BucketsConfig(
            workloads=["mini"],
            buckets_mb=[1.0, 10.0, 100.0],
            batches=[2],
            sequences=[16, 64],
            warmup=1,
            rounds_s=6.5,
        ),
        "standard": BucketsConfig(
            workloads=["mini"],
            world_sizes=[2, 4],
            buckets_mb=[1.0, 3.0, 10.0, 30.0, 100.0],
            batches=[2, 4],
            sequences=[32, 128],
        ),
        "paper": BucketsConfig(
            workloads=["small", "xl"],
            buckets_mb=[1.0, 10.0, 100.0, 1000.0],
            batches=[2, 4],
            sequences=[128, 256, 512],
            warmup=5,
            repeats=20,
            ratio_within=0.0,
            rounds_s=None,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    predicted = PREDICTED
    plugs_into = "schedules"
    plug_in = staticmethod(plug_in)

    def points(self, config: BucketsConfig, machine: Machine) -> Sequence[BucketsPoint]:
        """By world size one point per model, batch and sequence length."""
        device = machine.device(config.device)
        points = []
        for world_size in sorted(set(config.world_sizes)):
            here: dict[str, Any] = {"world_size": world_size, "device": device}
            here["backend"] = machine.backend(device, ranks_here(world_size))
            sizes = (*sorted(set(config.buckets_mb)), *config.schedules)
            points += [
                BucketsPoint.of(config, workload=workload, batch=batch, sequence=sequence, buckets_mb=sizes, **here)
                for workload in dict.fromkeys(config.workloads)
                for batch in sorted(set(config.batches))
                for sequence in sorted(set(config.sequences))
            ]
        return points

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        local = select(frame, ["seconds", "workload", "sequence"], sweep=STEPS, alternative=LOCAL, phase="step")
        about = {"size": local["workload"], "context_length": local["sequence"], "precision": "float32"}
        yield step_times(local.assign(part="step", **about), "SGD")

    def skip_reason(self, point: BucketsPoint, machine: Machine) -> str | None:
        ranks = ranks_here(point.world_size)
        return capacity.skip_reason(machine, point.device, ranks * (RANK_BYTES + _rank_bytes(point)), ranks=ranks)

    def series(self, point: BucketsPoint) -> tuple[Hashable, float]:
        return (point.world_size, point.workload), point.batch * point.sequence


def _rank_bytes(point: BucketsPoint) -> int:
    """What a rank allocates: weights, gradients, buckets and activations."""
    shape = shape_named(point.workload)
    parameters = 4 * n_parameters(shape)
    return (COPIES + len(point.buckets_mb)) * parameters + activation_bytes(shape, point.batch, point.sequence)


STUDY = GradientBucketsStudy()
