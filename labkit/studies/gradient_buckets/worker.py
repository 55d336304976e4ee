"""What a rank runs to measure one point of the gradient-buckets lab. Imports torch, the wrapper and the instruments.

Bucket sizes take turns on one model: each has parameters, buckets, hooks and an optimizer of its own, but all share
the memory of the weights, so that a model that barely fits is there once. "local" is the same step without
communication. Its updates let the weights of the ranks drift apart, after the gate; times do not depend on them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.bench.clock import Stopwatch
from labkit.lab.point import TimedPoint
from labkit.nn.workloads import Workload, workload_named
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.data_parallel.overlapped import Schedule
from labkit.parallel.ranks.worker import use_device
from labkit.studies.shared.alternatives import row_of, timed_phases
from labkit.studies.shared.gradient_gate import check_gradients, local_means

LOCAL = "local"
SCHEDULES: dict[str, Schedule] = {}
"""A reader's (`plug_in`)."""
STEPS = "steps"


@dataclass(frozen=True, kw_only=True)
class BucketsPoint(TimedPoint):
    """A batch and sequence length, with the bucket sizes compared there."""

    sweep: str = STEPS
    workload: str
    device: str = "cpu"
    """ "cpu" or "cuda"; several ranks may share one CUDA device."""
    batch: int
    """Sequences a rank."""
    sequence: int
    """Tokens of each."""
    buckets_mb: tuple[float | str, ...] = ()
    """MiB, or the name of a schedule."""

    def title(self) -> str:
        return f"{super().title()}, {self.workload}, batch {self.batch}, sequence {self.sequence}"


def measure_point(point: BucketsPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: seconds of steps and of waiting by bucket size."""
    yield from _steps(point, use_device(point.device))


def plug_in(name: str, schedule: Schedule) -> dict[str, Schedule]:
    """A reader's schedule: called with the trained parameters by name, in the order in which backward makes their
    gradients, it returns the names in each bucket, in the order in which buckets are averaged.

    ValueError for a name that is taken.
    """
    if name == LOCAL:
        raise ValueError(f"expected a name other than {LOCAL}")
    SCHEDULES[name] = schedule
    return SCHEDULES


class Trainer:
    """One way to train the workload: buckets of some MiB, or of a schedule, or (None) no communication; plain SGD."""

    def __init__(self, workload: Workload, bucket_mb: float | str | None, weights: nn.Module, device: str):
        model = workload.build()
        for own, shared in zip(model.parameters(), weights.parameters(), strict=True):
            own.data = shared.data
        self.bucket_mb = bucket_mb
        self.ddp: BucketedDDP | None = None
        if isinstance(bucket_mb, str):
            self.ddp = BucketedDDP(model, schedule=SCHEDULES[bucket_mb], finish_in_backward=False)
        elif bucket_mb is not None:
            # no smaller first bucket: a size should mean all buckets
            self.ddp = BucketedDDP(model, bucket_mb=bucket_mb, first_bucket_mb=bucket_mb, finish_in_backward=False)
        self.model: nn.Module = self.ddp or model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.waiting = Stopwatch(device)
        self._loss_of = workload.loss

    def average_gradients(self) -> None:
        """Forward and backward; `waiting` is from the end of the pass until gradients are averaged."""
        self._loss_of(self.model).backward()
        if self.ddp is not None:
            self.waiting.start()
            self.ddp.finish_gradient_synchronization()
            self.waiting.stop()

    def step(self) -> None:
        self.average_gradients()
        self.optimizer.step()
        # gradients take no memory but their buckets' while the others have their turn
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def about(self) -> dict[str, Any]:
        """The buckets that there are: a parameter is never split, so that a bucket may be larger than asked for."""
        if self.ddp is None:
            return _named(None)
        sizes = self.ddp.bucket_bytes
        found = {"buckets": len(sizes), "last_bucket_bytes": sizes[-1], "gradient_bytes": sum(sizes)}
        return _named(self.bucket_mb) | found


def _named(bucket_mb: float | str | None) -> dict[str, Any]:
    if bucket_mb is None or isinstance(bucket_mb, str):
        return {"alternative": bucket_mb or LOCAL}
    return {"alternative": f"{bucket_mb:g} MiB", "bucket_mb": bucket_mb}


def _steps(point: BucketsPoint, device: str) -> Iterator[dict[str, Any]]:
    workload = workload_named(
        point.workload,
        batch=point.batch,
        context_length=point.sequence,
        device=device,
        seed=point.seed_of(dist.get_rank()),
    )
    weights = workload.build()
    local = Trainer(workload, None, weights, device)
    means = local_means(local.parameters, local.average_gradients)
    trainers, rows = {LOCAL: local}, {LOCAL: local.about() | {"check": "ok"}}

    def check(name: str, bucket_mb: float | str) -> dict[str, Any]:
        """The gate: what is averaged must be the mean over ranks of the local gradients."""
        trainer = Trainer(workload, bucket_mb, weights, device)
        error, gate = check_gradients(trainer.parameters, trainer.average_gradients, means)
        if gate == "ok":
            trainers[name] = trainer
        return trainer.about() | {"error": error, "check": gate}

    for bucket_mb in point.buckets_mb:
        about = _named(bucket_mb)
        name = about["alternative"]
        rows[name] = about | row_of(name, partial(check, name, bucket_mb), device=device)
    steps = {name: {"step": trainer.step} for name, trainer in trainers.items()}
    watches = {name: trainer.waiting for name, trainer in trainers.items()}
    yield from timed_phases(rows, steps, watches=watches, device=device, before=dist.barrier, **point.rounds)
