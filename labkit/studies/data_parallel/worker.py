"""What a rank runs to measure one point of the data-parallel lab. Imports torch, the wrappers and the instruments.

Alternatives (`alternatives.py`) take turns, each with a copy of the model and an optimizer of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labkit.bench.operators import OperatorRecord
from labkit.costs.transformer import SIZES
from labkit.lab.own_models import source_of
from labkit.lab.point import TimedPoint
from labkit.nn.vision import ResNet50
from labkit.nn.workloads import RESNET50, Workload, workload_of
from labkit.parallel.data_parallel.implementations import LOCAL, OVER_SHARED_MEMORY
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.transport import SHARED, transport_in_use
from labkit.studies.data_parallel.alternatives import PHASES, Alternative, split_name
from labkit.studies.data_parallel.timeline import (
    MOST_PROFILED_STEPS,
    added_by_averaging,
    operators_of_step,
    timeline_rows,
)
from labkit.studies.shared.alternatives import Failed, attempt, row_of, timed_phases, timed_rows
from labkit.studies.shared.gradient_gate import check_all_used, check_gradients, local_means
from labkit.studies.shared.peaks import peak_of_second


@dataclass(frozen=True, kw_only=True)
class DataParallelPoint(TimedPoint):
    """A workload and the alternatives that are compared on it."""

    sweep: str
    workload: str
    alternatives: tuple[str, ...]
    bucket_mb: float | None = None
    """The size that a point of the bucket sweep compares with the default, in MiB."""
    device: str = "cpu"
    """ "cpu" or "cuda"; several ranks may share one CUDA device."""
    batch: int = 4
    context_length: int = 128
    image_size: int = 224
    micro_batches: int = 1

    def title(self) -> str:
        return f"{super().title()}, {self.workload}, {self.sweep}"


def measure_point(point: DataParallelPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: seconds by alternative and phase, peak bytes, or boxes of a timeline."""
    device = use_device(point.device)
    workload = workload_of(
        ResNet50 if point.workload == RESNET50 else source_of(point.workload),
        batch=point.batch,
        context_length=point.context_length,
        image_size=point.image_size,
        device=device,
        seed=point.seed_of(dist.get_rank()),
    )
    if point.sweep == "memory":
        yield from _memory(point, workload, device)
        return
    if point.workload in (RESNET50, *SIZES):  # a reader's may be no model that can be copied
        workload = workload.copied()
    if point.sweep == "timeline":
        yield from _timeline(point, workload, device)
    elif point.sweep == "accumulation":
        yield from _accumulation(point, workload, device)
    else:
        yield from _phases(point, workload, device)


def _phases(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    right, rows = _right_ones(point, workload, device)
    turns = {name: dict(zip(PHASES, (one.forward, one.backward, one.step), strict=True)) for name, one in right.items()}
    watches = {name: one.waiting for name, one in right.items()}
    yield from timed_phases(rows, turns, watches=watches, device=device, before=dist.barrier, **point.rounds)


def _right_ones(
    point: DataParallelPoint, workload: Workload, device: str
) -> tuple[dict[str, Alternative], dict[str, dict[str, Any]]]:
    """The gate: alternatives whose gradients are the mean of all ranks' local ones; and the rows of all."""
    expected = _expected(workload, device)
    right: dict[str, Alternative] = {}
    rows: dict[str, dict[str, Any]] = {}

    def check(name: str) -> dict[str, Any]:
        alternative, found = Alternative(name, workload, device), dict[str, Any]({"check": "ok"})
        if alternative.implementation != LOCAL:
            error, gate = check_gradients(alternative.parameters, alternative.accumulate, expected)
            found = {"error": error, "check": gate}
        if found["check"] == "ok":
            right[name] = alternative
        return found

    for name in point.alternatives:
        implementation, bucket_mb = split_name(name)
        if implementation in OVER_SHARED_MEMORY and transport_in_use()[0] != SHARED:
            rows[name] = {"implementation": name, "not_measured": transport_in_use()[1]}
        else:
            about: dict[str, Any] = {"implementation": implementation, "of_bucket_mb": bucket_mb}
            rows[name] = about | row_of(name, partial(check, name), device=device)
    return right, rows


def _expected(workload: Workload, device: str, micro_batches: int = 1) -> list[Tensor | None]:
    local = Alternative(LOCAL, workload, device)
    means = local_means(local.parameters, partial(local.accumulate, micro_batches))
    check_all_used(local.parameters, means)
    return means


def _accumulation(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """A step over several micro-batches: gradients averaged after each, or (`no_sync`) after the last one only.

    The gate: either way they are the mean over ranks of what every rank accumulates by itself.
    """
    expected = _expected(workload, device, point.micro_batches)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}

    def check(key: str, name: str, only_last: bool) -> dict[str, Any]:
        alternative = Alternative(name, workload, device)
        accumulate = partial(alternative.accumulate, point.micro_batches, only_last=only_last)
        error, gate = check_gradients(alternative.parameters, accumulate, expected)
        if gate == "ok":
            steps[key] = partial(_accumulated_step, alternative, accumulate)
        return {"error": error, "check": gate}

    for name in point.alternatives:
        for kind in ("every", "last"):
            key, about = f"{name} {kind}", {"implementation": split_name(name)[0], "synchronized": kind}
            rows[key] = about | row_of(key, partial(check, key, name, kind == "last"), device=device)
    yield from timed_rows(rows, steps, device=device, before=dist.barrier, **point.rounds)


def _accumulated_step(alternative: Alternative, accumulate: Callable[[], None]) -> None:
    accumulate()
    alternative.step()


def _timeline(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """Boxes and counts of one step of each implementation; of a wrong one only what is wrong."""
    local, steps = Alternative(LOCAL, workload, device), min(point.repeats, MOST_PROFILED_STEPS)
    local.run()
    alone = operators_of_step(local)
    for name in point.alternatives:
        found = attempt(name, partial(_lanes_and_counts, name, workload, device, alone, steps), device=device)
        if isinstance(found, Failed):
            yield {"implementation": split_name(name)[0], "check": found.reason}
        else:
            yield from found


def _lanes_and_counts(
    name: str, workload: Workload, device: str, alone: OperatorRecord, steps: int
) -> list[dict[str, Any]]:
    alternative = Alternative(name, workload, device)
    about = {"implementation": alternative.implementation, "check": alternative.completeness()}
    if about["check"] != "ok":
        return [about]
    rows = list(timeline_rows(alternative, device, steps))
    if alternative.implementation not in OVER_SHARED_MEMORY:  # whose thread is not seen
        rows.append(about | added_by_averaging(alternative, alone))
    return rows


def _memory(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """Peak of the allocator over a step, model and optimizer included, one implementation at a time."""
    for name in point.alternatives:
        dist.barrier()
        implementation, bucket_mb = split_name(name)
        about: dict[str, Any] = {"implementation": implementation, "of_bucket_mb": bucket_mb}
        yield about | row_of(name, partial(_peak, name, workload, device), device=device)


def _peak(name: str, workload: Workload, device: str) -> dict[str, Any]:
    if (gate := Alternative(name, workload, device).completeness()) != "ok":
        return {"check": gate}
    make = partial(Alternative, name, workload, device)
    return {"check": gate, "peak_bytes": peak_of_second(make, Alternative.run, device=device)}
