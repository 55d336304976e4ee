"""Worker of the data-parallel lab: check a wrapper's gradients, then time its steps.

A wrapper's name may have a bucket size in MiB: "torch@25". `local` is the bare model: the same step
without communication. Alternatives take turns, each with its model and optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import OK, refusal_columns, status_columns
from labkit.bench.clock import Stopwatch
from labkit.bench.memory import measure_second_peak
from labkit.bench.trace import TraceEvent, profile_call
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import ModelPoint
from labkit.nn import training
from labkit.nn.training import (
    BACKWARD,
    FINISH,
    FORWARD,
    OPTIMIZER,
    RESNET50,
    Trainer,
    Workload,
    build_workload,
)
from labkit.nn.vision import ResNet50
from labkit.parallel.data_parallel import LOCAL, OVER_SHARED_MEMORY, wrap
from labkit.parallel.ranks.worker import use_device
from labkit.studies.shared.alternatives import check_and_time, row_of, shared_memory_refusal
from labkit.studies.shared.checks import check_completeness, check_gradients, local_means

DEFAULT_BUCKETS = "default"
EVERY = "every micro-batch"
LAST = "the last micro-batch"
WAITING = "waiting"
# Sweeps that measure one wrapper after the other: another model in memory would be in the peak.
ONE_BY_ONE = ("memory", "timeline")
# Events of running collectives, not of the calls that launch them.
COLLECTIVES = (
    "gloo:all_reduce",
    "nccl:all_reduce",
    "ncclDevKernel_AllReduce",
    "ncclKernel_AllReduce",
)
# Autograd runs it once per parameter, when the gradient is complete.
LAST_GRADIENT = "torch::autograd::AccumulateGrad"
ALL_REDUCE = "all-reduce"

N_COPIES = 3  # of the parameters per alternative: parameters, gradients, messages


@dataclass(frozen=True, kw_only=True)
class DataParallelPoint(ModelPoint):
    """A workload, and the wrappers that are compared on it."""

    sweep: str
    """ "wrappers", "buckets", "accumulation", "memory" or "timeline"."""
    workload: str
    alternatives: tuple[str, ...]
    image_size: int = 224
    micro_batches: int = 1

    @property
    def parameters(self) -> int:
        if self.workload == RESNET50:
            return training.RESNET50_PARAMETERS
        return n_parameters(SIZES[self.workload])

    @property
    def needed_bytes(self) -> float:
        models = len(self.alternatives)
        if self.sweep in ONE_BY_ONE:
            models = 1
        elif self.sweep == "accumulation":  # each averages after every micro-batch, or the last
            models *= 2
        return N_COPIES * (models + 1) * 4 * self.parameters  # and the bare model


def measure(point: DataParallelPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of one point: seconds by wrapper and phase, peak bytes, or boxes of a timeline."""
    device = use_device(point.device)
    model = ResNet50 if point.workload == RESNET50 else SIZES[point.workload]
    sizes = {name: getattr(point, name) for name in ("batch", "context_length", "image_size")}
    seed = point.batch_seed(dist.get_rank())
    # Copied: all wrappers begin with the same parameters.
    workload = build_workload(model, **sizes, device=device, seed=seed).copied()
    if point.sweep == "accumulation":
        yield from _time_accumulation(point, workload, device)
    elif point.sweep in ONE_BY_ONE:
        yield from _inspect_each(point, workload, device)
    else:
        yield from _time_steps(point, workload, device)


def make_trainer(name: str, workload: Workload, device: str) -> Trainer:
    """Return the workload under a wrapper, or bare, with plain SGD."""
    implementation, bucket_mb = split_name(name)
    model = wrapped = workload.build()
    if implementation != LOCAL:
        # labkit's wrappers finish after `backward()`, not inside it, so that waiting is timed
        # separately.
        wrapped = wrap(implementation, model, bucket_mb=bucket_mb, finish_in_backward=False)
    # Plain SGD: the optimizer is the same for all wrappers, and should be a small part of a step.
    return Trainer(wrapped, torch.optim.SGD(model.parameters(), lr=1e-4), workload.loss, device)


def split_name(name: str) -> tuple[str, float | None]:
    """ "torch@25" -> ("torch", 25.0); None for the default buckets."""
    implementation, _, bucket_mb = name.partition("@")
    return implementation, float(bucket_mb) if bucket_mb else None


def _describe(name: str) -> dict[str, Any]:
    """Return the columns that name an alternative."""
    implementation, bucket_mb = split_name(name)
    bucket = DEFAULT_BUCKETS if bucket_mb is None else f"{bucket_mb:g} MiB"
    return {"alternative": name, "implementation": implementation, "bucket": bucket}


def accumulate(
    trainer: Trainer, micro_batches: int = 1, *, only_last: bool = False, then_update: bool = False
) -> None:
    """Add up gradients of micro-batches, averaged after each or after the last (`no_sync`)."""
    for micro_batch in range(micro_batches):
        is_silent = only_last and micro_batch < micro_batches - 1
        with trainer.model.no_sync() if is_silent else nullcontext():
            trainer.forward()
            trainer.backward()
    if then_update:
        trainer.optimizer_step()


def _compute_means(workload: Workload, device: str, micro_batches: int = 1) -> list[Tensor]:
    """Return the gradients that wrappers should compute: means of the bare model's."""
    local = make_trainer(LOCAL, workload, device)
    return local_means(local.model, partial(accumulate, local, micro_batches))


def _time_steps(
    point: DataParallelPoint, workload: Workload, device: str
) -> Iterator[dict[str, Any]]:
    """Yield seconds of each phase of a step.

    Backward lasts until gradients are averaged; `waiting` is its part after autograd.
    """
    expected = _compute_means(workload, device)
    watches = dict[str, Stopwatch]()

    def check(name: str) -> tuple[dict[str, Any], dict[str, Callable[[], None]]]:
        trainer = make_trainer(name, workload, device)
        watches[name] = Stopwatch(device)
        trainer.waiting = watches[name].lap
        if name == LOCAL:
            trainer.run()  # a warm-up; the other alternatives have theirs in their check
            return dict(OK), trainer.phases
        columns = check_gradients(trainer.model, partial(accumulate, trainer), expected)
        return columns, trainer.phases

    rows = {name: _describe(name) for name in point.alternatives}
    for row in rows.values():
        if row["implementation"] in OVER_SHARED_MEMORY:
            row |= shared_memory_refusal()
    for row in check_and_time(rows, check, device=device, before=dist.barrier, **point.rounds):
        yield row
        if row.get("phase") == BACKWARD and watches[row["alternative"]].seconds:
            # Only the last laps: warm-up and the check have some, too.
            waiting_s = watches[row["alternative"]].seconds[-len(row["seconds"]) :]
            # Marked as a sum: it is a part of backward, and must not make the step longer.
            yield row | {"phase": WAITING, "seconds": waiting_s, "is_sum": True}


def _time_accumulation(
    point: DataParallelPoint, workload: Workload, device: str
) -> Iterator[dict[str, Any]]:
    """Yield seconds of a step over several micro-batches.

    Gradients are averaged after each of them, or after the last one only.
    """
    expected = _compute_means(workload, device, point.micro_batches)

    def check(name: str) -> tuple[dict[str, Any], Callable[[], None]]:
        wrapper, _, averaged = name.partition(", ")
        trainer = make_trainer(wrapper, workload, device)
        run = partial(accumulate, trainer, point.micro_batches, only_last=averaged == LAST)
        return check_gradients(trainer.model, run, expected), partial(run, then_update=True)

    rows = {
        f"{name}, {averaged}": _describe(name) | {"averaged_after": averaged}
        for name in point.alternatives
        for averaged in (EVERY, LAST)
    }
    yield from check_and_time(rows, check, device=device, before=dist.barrier, **point.rounds)


def _inspect_each(
    point: DataParallelPoint, workload: Workload, device: str
) -> Iterator[dict[str, Any]]:
    """Yield the timeline or the peak memory of a step, one wrapper after the other."""
    for name in point.alternatives:
        # A rank that is still freeing the wrapper before would be late in this one's collectives.
        dist.barrier()
        inspect = partial(_inspect, point.sweep, name, workload, device)
        columns = row_of(name, inspect, device=device)
        rows = columns.pop("rows", [columns])
        for row in rows:
            yield _describe(name) | row


def _inspect(sweep: str, name: str, workload: Workload, device: str) -> dict[str, Any]:
    """Return the columns of this wrapper, or several rows as `rows`."""
    make = partial(make_trainer, name, workload, device)
    trainer = make()
    parameters = dict(trainer.model.named_parameters())
    wrong = check_completeness(parameters, partial(accumulate, trainer))
    if wrong is not None:
        return status_columns(wrong)
    if sweep == "timeline":
        return {"rows": profile_step(trainer.run, device)}
    del trainer
    return measure_second_peak(make, Trainer.run, device=device)


def profile_step(step: Callable[[], None], device: str) -> list[dict[str, Any]]:
    """Return one row per box of the second step, with its lane and times.

    `lane`, `start_s`, `duration_s`, and `during_s` of collectives.

    The step has ranges of its phases. Backward ends with the last gradient; `during_s` is the part
    of a collective before that.
    """
    step()  # allocates buffers and, in torch's DDP, arranges the buckets
    boxes = _find_boxes(profile_call(step, device=device, before=dist.barrier))
    if not boxes[ALL_REDUCE]:
        return [refusal_columns("the profiler saw none of the collectives")]
    start = boxes[FORWARD][0][0]
    end_of_backward = boxes[BACKWARD][-1][1]
    rows = []
    for lane, spans in boxes.items():
        for begin, end in spans:
            row: dict[str, Any] = {
                "lane": lane,
                "status": "ok",
                "start_s": begin - start,
                "duration_s": end - begin,
            }
            if lane == ALL_REDUCE:
                row["during_s"] = max(0.0, min(end, end_of_backward) - begin)
            rows.append(row)
    return rows


def _find_boxes(events: Sequence[TraceEvent]) -> dict[str, list[tuple[float, float]]]:
    """Return (start, end) in seconds, by lane.

    Backward ends with the last gradient on a CPU, and with its last kernel other than a collective
    on a GPU; what the wrapper launches when it finishes comes after.
    """
    collectives = [event for event in events if event.name.startswith(COLLECTIVES)]
    others = [
        event
        for event in events
        if not event.name.startswith(COLLECTIVES) and FINISH not in event.ranges
    ]
    boxes = {
        phase: [_span([event for event in others if phase in event.ranges])]
        for phase in (FORWARD, BACKWARD, OPTIMIZER)
    }
    last = [event for event in others if event.name == LAST_GRADIENT]
    if last:
        boxes[BACKWARD] = [(boxes[BACKWARD][0][0], _span(last)[1])]
    # Without the barrier's own all-reduce, which comes before.
    start = boxes[FORWARD][0][0]
    return boxes | {ALL_REDUCE: [_span([event]) for event in collectives if event.start_s >= start]}


def _span(events: Sequence[TraceEvent]) -> tuple[float, float]:
    start_s = min(event.start_s for event in events)
    return start_s, max(event.start_s + event.duration_s for event in events)
