"""The gradient-buckets lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, field_validator

from labkit.costs.memory import activation_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab import capacity
from labkit.lab.agreement import AllReduceTime, Known, step_times
from labkit.lab.config import Count, Device, LabConfig, Repeats, Seed, TimeoutSeconds, Warmup, one_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import SIZES, shape_named
from labkit.parallel.ranks.joined import ranks_here
from labkit.studies.gradient_buckets.findings import QUESTIONS
from labkit.studies.gradient_buckets.worker import LOCAL, PROBE, SCHEDULES, STEPS, BucketsPoint, measure_point, plug_in

MIB = 2**20
RANK_BYTES = 200 * MIB  # a rank's own resident memory, torch included
COPIES = 4  # of the parameters, beside the buckets: weights, one being built, local gradients, their means

WorkloadName = Annotated[str, one_of(lambda: SIZES)]
Megabytes = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class BucketsConfig(LabConfig):
    """What a reader may set. Bucket sizes are in MiB."""

    workload: WorkloadName
    world_sizes: Annotated[list[Annotated[int, Field(ge=2, le=1024)]], Field(min_length=1)] = [2]
    buckets_mb: Annotated[list[Megabytes], Field(min_length=1)]
    schedules: list[Annotated[str, one_of(lambda: SCHEDULES)]] = []
    """A reader's own, by name."""
    batches: Annotated[list[Count], Field(min_length=1)]
    """Sequences a rank."""
    sequences: Annotated[list[Count], Field(min_length=1)]
    """Tokens of a sequence."""
    probe_bytes: Annotated[list[Annotated[int, Field(ge=4, le=2**40, multiple_of=4)]], Field(min_length=2)]
    """Two sizes or more of single all-reduces, which give bandwidth and cost of a call."""
    probe_repeats: Repeats = 40
    warmup: Warmup = 2
    repeats: Repeats = 10
    device: Device = "auto"
    seed: Seed = 0
    timeout_s: TimeoutSeconds = 600.0

    @field_validator("probe_bytes")
    @classmethod
    def _differ(cls, sizes: list[int]) -> list[int]:
        if len(set(sizes)) < 2:
            raise ValueError("should name two sizes that differ, or bandwidth and cost of a call cannot be told apart")
        return sizes


class GradientBucketsStudy(Study):
    """The same training step with buckets of several sizes, and without communication, in turns."""

    name = "gradient_buckets"
    title = "Gradient buckets"
    summary = "How long a data-parallel step waits for its gradients, and whether the bucket size matters here."
    questions = QUESTIONS
    profiles = {
        "smoke": BucketsConfig(
            workload="nano",
            buckets_mb=[1.0, 100.0],
            batches=[1],
            sequences=[8, 16],
            probe_bytes=[4096, MIB],
            warmup=1,
            repeats=6,
        ),
        "quick": BucketsConfig(
            workload="mini",
            buckets_mb=[1.0, 10.0, 100.0],
            batches=[2],
            sequences=[16, 64],
            probe_bytes=[4096, 25 * MIB],
        ),
        "standard": BucketsConfig(
            workload="mini",
            world_sizes=[2, 4],
            buckets_mb=[1.0, 3.0, 10.0, 30.0, 100.0],
            batches=[2, 4],
            sequences=[32, 128],
            probe_bytes=[4096, 25 * MIB],
            repeats=15,
        ),
        "paper": BucketsConfig(
            workload="xl",
            buckets_mb=[1.0, 10.0, 100.0, 1000.0],
            batches=[2, 4],
            sequences=[128, 256, 512],
            probe_bytes=[4096, 100 * MIB],
            warmup=5,
            repeats=20,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    plugs_into = "schedules"
    plug_in = staticmethod(plug_in)

    def points(self, config: BucketsConfig, machine: Machine) -> Sequence[BucketsPoint]:
        """By world size: single all-reduces first, then one point a (batch, sequence length)."""
        device = machine.device(config.device)
        points = []
        for world_size in sorted(set(config.world_sizes)):
            here: dict[str, Any] = {"world_size": world_size, "device": device}
            here["backend"] = machine.backend(device, ranks_here(world_size))
            probe = {"probe_bytes": sorted(set(config.probe_bytes)), "repeats": config.probe_repeats}
            points.append(BucketsPoint.of(config, sweep=PROBE, buckets_mb=(), **probe, **here))
            buckets_mb = (*sorted(set(config.buckets_mb)), *config.schedules)
            sizes: dict[str, Any] = {"buckets_mb": buckets_mb, "probe_bytes": ()}
            points += [
                BucketsPoint.of(config, sweep=STEPS, batch=batch, sequence=sequence, **sizes, **here)
                for batch in sorted(set(config.batches))
                for sequence in sorted(set(config.sequences))
            ]
        return points

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        local = select(frame, ["seconds", "workload", "sequence"], sweep=STEPS, alternative=LOCAL, phase="step")
        about = {"size": local["workload"], "context_length": local["sequence"], "precision": "float32"}
        yield step_times(local.assign(part="step", **about), "SGD")
        probes = select(frame, ["seconds", "n_bytes"], sweep=PROBE, device="cpu", backend="gloo")
        yield Known(AllReduceTime, probes.assign(algorithm="torch", over="gloo"))

    def skip_reason(self, point: BucketsPoint, machine: Machine) -> str | None:
        ranks = ranks_here(point.world_size)
        return capacity.skip_reason(machine, point.device, ranks * (RANK_BYTES + _rank_bytes(point)), ranks=ranks)

    def series(self, point: BucketsPoint) -> tuple[Hashable, float]:
        return (point.sweep, point.world_size), (point.batch or 1) * (point.sequence or 1)


def _rank_bytes(point: BucketsPoint) -> int:
    """What a rank allocates: tensors of single all-reduces, or weights, gradients, buckets and activations."""
    if point.sweep == PROBE:
        return 8 * sum(point.probe_bytes)  # the check is in float64
    shape = shape_named(point.workload)
    parameters = 4 * n_parameters(shape)
    return (COPIES + len(point.buckets_mb)) * parameters + activation_bytes(
        shape, point.batch or 1, point.sequence or 1
    )


STUDY = GradientBucketsStudy()
