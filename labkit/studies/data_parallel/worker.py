"""What every rank runs for a point of the data-parallel lab: check a wrapper's gradients, then time its steps.

A wrapper's name may have a bucket size in MiB: "torch@25". `local` is the bare model: the same step without
communication. Alternatives take turns, each with its model and optimizer.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.memory import peak_of_second
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import TimedPoint
from labkit.nn.training import RESNET50, RESNET50_PARAMETERS, Workload, build_workload
from labkit.nn.vision import ResNet50
from labkit.parallel.data_parallel import LOCAL, OVER_SHARED_MEMORY, wrap
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.transport import SHARED, transport_in_use
from labkit.studies.data_parallel.timeline import profile_step
from labkit.studies.shared.alternatives import Failed, row_of, run_guarded, timed_rows
from labkit.studies.shared.gradient_check import check_all_used, check_completeness, check_gradients, local_means
from labkit.studies.shared.trainer import BACKWARD, Trainer

DEFAULT_BUCKETS = "default"
EVERY, LAST = "every micro-batch", "the last micro-batch"
WAITING = "waiting"
N_COPIES = 3  # of the parameters per alternative: parameters, gradients, messages


@dataclass(frozen=True, kw_only=True)
class DataParallelPoint(TimedPoint):
    """A workload, and the wrappers that are compared on it."""

    sweep: str
    """ "wrappers", "buckets", "accumulation", "memory" or "timeline"."""
    workload: str
    alternatives: tuple[str, ...]
    device: str = "cpu"
    batch: int = 4
    """Sequences or images per rank."""
    context_length: int = 128
    image_size: int = 224
    micro_batches: int = 1

    @property
    def parameters(self) -> int:
        return RESNET50_PARAMETERS if self.workload == RESNET50 else n_parameters(SIZES[self.workload])

    @property
    def series(self) -> tuple[Hashable, float]:
        return (self.sweep, self.world_size, self.batch, self.context_length), self.parameters

    @property
    def contests(self) -> int:
        return int(self.sweep not in ("memory", "timeline"))

    @property
    def needed_bytes(self) -> float:
        models = len(self.alternatives) * (2 if self.sweep == "accumulation" else 1) if self.contests else 1
        return N_COPIES * (models + 1) * 4 * self.parameters

    def title(self) -> str:
        return f"{super().title()}, {self.workload}, {self.sweep}"


def measure(point: DataParallelPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: seconds by wrapper and phase, peak bytes, or boxes of a timeline."""
    device = use_device(point.device)
    workload = build_workload(
        ResNet50 if point.workload == RESNET50 else SIZES[point.workload],
        batch=point.batch,
        context_length=point.context_length,
        image_size=point.image_size,
        device=device,
        seed=point.batch_seed(dist.get_rank()),
    ).copied()
    if not point.contests:
        yield from _look_at_each(point, workload, device)
    elif point.sweep == "accumulation":
        yield from _time_accumulation(point, workload, device)
    else:
        yield from _time_steps(point, workload, device)


def make_trainer(name: str, workload: Workload, device: str) -> Trainer:
    """The workload under a wrapper, or bare, with plain SGD."""
    implementation, bucket_mb = split_name(name)
    model = wrapped = workload.build()
    if implementation != LOCAL:
        # labkit's wrappers finish on request, so that waiting is timed apart
        wrapped = wrap(implementation, model, bucket_mb=bucket_mb, finish_in_backward=False)
    return Trainer(wrapped, torch.optim.SGD(model.parameters(), lr=1e-4), workload.loss, device)


def split_name(name: str) -> tuple[str, float | None]:
    """ "torch@25" -> ("torch", 25.0); None for the default buckets."""
    implementation, _, bucket_mb = name.partition("@")
    return implementation, float(bucket_mb) if bucket_mb else None


def _describe(name: str) -> dict[str, Any]:
    """The columns that name an alternative."""
    implementation, bucket_mb = split_name(name)
    bucket = DEFAULT_BUCKETS if bucket_mb is None else f"{bucket_mb:g} MiB"
    return {"alternative": name, "implementation": implementation, "bucket": bucket}


def accumulate(trainer: Trainer, micro_batches: int = 1, *, only_last: bool = False) -> None:
    """Add up gradients of micro-batches, averaged after each of them, or after the last one only (`no_sync`)."""
    for micro_batch in range(micro_batches):
        is_silent = only_last and micro_batch < micro_batches - 1
        with trainer.model.no_sync() if is_silent else nullcontext():
            trainer.forward()
            trainer.backward()


def _compute_means(workload: Workload, device: str, micro_batches: int = 1) -> list[Tensor | None]:
    """The gradients that wrappers should compute: the mean over ranks of the bare model's."""
    local = make_trainer(LOCAL, workload, device)
    parameters = dict(local.model.named_parameters())
    means = local_means(parameters, partial(accumulate, local, micro_batches))
    check_all_used(parameters, means)
    return means


def _time_steps(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """Seconds of each phase; backward lasts until gradients are averaged, and `waiting` is its end."""
    expected = _compute_means(workload, device)
    trainers: dict[str, Trainer] = {}
    rows: dict[str, dict[str, Any]] = {}

    def check(name: str) -> dict[str, Any]:
        trainer, result = make_trainer(name, workload, device), dict[str, Any]({"check": "ok"})
        if name == LOCAL:
            trainer.step()  # a first step, as the others take in their check
        else:
            error, verdict = check_gradients(
                dict(trainer.model.named_parameters()), partial(accumulate, trainer), expected
            )
            result = {"error": error, "check": verdict}
        if result["check"] == "ok":
            trainers[name] = trainer
        return result

    for name in point.alternatives:
        if split_name(name)[0] in OVER_SHARED_MEMORY and transport_in_use()[0] != SHARED:
            rows[name] = _describe(name) | {"not_measured": transport_in_use()[1]}
        else:
            rows[name] = _describe(name) | row_of(name, partial(check, name), device=device)
    phases = {name: trainer.phases for name, trainer in trainers.items()}
    for row in timed_rows(rows, phases, device=device, before=dist.barrier, **point.rounds):
        yield row
        if row.get("phase") == BACKWARD and (laps := trainers[row["alternative"]].waiting.seconds):
            yield row | {"phase": WAITING, "seconds": laps[-len(row["seconds"]) :]}


def _time_accumulation(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """Seconds of a step over several micro-batches, averaged after each of them or after the last one only."""
    expected = _compute_means(workload, device, point.micro_batches)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}

    def check(key: str, name: str, only_last: bool) -> dict[str, Any]:
        trainer = make_trainer(name, workload, device)
        run = partial(accumulate, trainer, point.micro_batches, only_last=only_last)
        error, verdict = check_gradients(dict(trainer.model.named_parameters()), run, expected)
        steps[key] = partial(_accumulate_and_update, trainer, run)
        return {"error": error, "check": verdict}

    for name in point.alternatives:
        for averaged in (EVERY, LAST):
            key, row = f"{name}, {averaged}", _describe(name) | {"averaged_after": averaged}
            rows[key] = row | row_of(key, partial(check, key, name, averaged == LAST), device=device)
    yield from timed_rows(rows, steps, device=device, before=dist.barrier, **point.rounds)


def _accumulate_and_update(trainer: Trainer, run: Callable[[], None]) -> None:
    run()
    trainer.update()


def _look_at_each(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """The timeline or the peak memory of a step, one wrapper after the other."""
    look = _profile if point.sweep == "timeline" else _peak
    for name in point.alternatives:
        dist.barrier()
        rows = run_guarded(name, partial(_check_and_look, name, workload, device, look), device=device)
        for row in [{"check": rows.reason}] if isinstance(rows, Failed) else rows:
            yield _describe(name) | row


def _check_and_look(
    name: str, workload: Workload, device: str, look: Callable[[Callable[[], Trainer], str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    trainer, make = make_trainer(name, workload, device), partial(make_trainer, name, workload, device)
    verdict = check_completeness(dict(trainer.model.named_parameters()), partial(accumulate, trainer))
    del trainer
    return look(make, device) if verdict == "ok" else [{"check": verdict}]


def _profile(make: Callable[[], Trainer], device: str) -> list[dict[str, Any]]:
    return profile_step(make().phases, device)


def _peak(make: Callable[[], Trainer], device: str) -> list[dict[str, Any]]:
    """The allocator's peak over a step, model and optimizer included."""
    return [{"check": "ok", "peak_bytes": peak_of_second(make, Trainer.step, device=device)}]
