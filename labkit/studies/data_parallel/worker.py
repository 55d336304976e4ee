"""What every rank runs for a point of the data-parallel lab: check a wrapper's gradients, then time its steps.

A wrapper's name may have a bucket size in MiB: "torch@25". `local` is the bare model: the same step without
communication. Alternatives take turns, each with a model and an optimizer of its own.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from labkit.bench.clock import Stopwatch
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import TimedPoint, skip_reason
from labkit.lab.units import counted
from labkit.nn.vision import ResNet50
from labkit.nn.workloads import RESNET50, RESNET50_PARAMETERS, Workload, workload_of
from labkit.parallel.data_parallel import LOCAL, OVER_SHARED_MEMORY, wrap
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.transport import SHARED, transport_in_use
from labkit.studies.data_parallel.timeline import BACKWARD, FINISH, FORWARD, OPTIMIZER, profile_step
from labkit.studies.shared.alternatives import Failed, row_of, run_guarded, timed_phases, timed_rows
from labkit.studies.shared.gradient_check import check_all_used, check_completeness, check_gradients, local_means
from labkit.studies.shared.peaks import peak_of_second

if TYPE_CHECKING:
    from labkit.machine import Machine

DEFAULT_BUCKETS = "default"
EVERY, LAST = "every micro-batch", "the last micro-batch"
RANK_BYTES = 200 * 2**20  # resident memory of a rank, torch included
N_COPIES = 3  # of the parameters per alternative: parameters, gradients, what is on its way


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

    def skip_reason(self, machine: "Machine") -> str | None:
        ranks, models = ranks_here(self.world_size), self._n_models()
        needed = ranks * (RANK_BYTES + N_COPIES * models * 4 * self.parameters)
        return skip_reason(machine, self.device, needed, ranks=ranks, says=f"{counted(models, 'model')} need {{}}")

    def _n_models(self) -> int:
        if self.sweep in ("memory", "timeline"):
            return 1
        return (2 if self.sweep == "accumulation" else 1) * len(self.alternatives) + 1

    def title(self) -> str:
        return f"{super().title()}, {self.workload}, {self.sweep}"


class Trainer:
    """One way to train the workload: a copy of the model under its wrapper, and plain SGD."""

    def __init__(self, name: str, workload: Workload, device: str):
        self.implementation, bucket_mb = split_name(name)
        model = workload.build()
        self.model: Any = model
        if self.implementation != LOCAL:
            # labkit's wrappers finish when they are told to, so that waiting can be told apart
            self.model = wrap(self.implementation, model, bucket_mb=bucket_mb, finish_in_backward=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.waiting = Stopwatch(device)
        self._finish = getattr(self.model, "finish_gradient_synchronization", None)
        self._loss_of = workload.loss
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self._loss_of(self.model)

    def backward(self) -> None:
        """Run backward until gradients are averaged; `waiting` has the time from the end of the pass."""
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None
        if self._finish is not None:  # torch's has finished already
            with record_function(FINISH):
                self.waiting.start()
                self._finish()
                self.waiting.stop()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.forward()
        self.backward()
        self.update()

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        return {FORWARD: self.forward, BACKWARD: self.backward, OPTIMIZER: self.update}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def accumulate(self, micro_batches: int = 1, *, only_last: bool = False) -> None:
        """Gradients of so many micro-batches, averaged after each of them, or after the last one only (`no_sync`)."""
        for micro_batch in range(micro_batches):
            is_silent = only_last and micro_batch < micro_batches - 1
            with self.model.no_sync() if is_silent else nullcontext():
                self.forward()
                self.backward()

    def check_completeness(self) -> str:
        """ "ok", or the rank whose contribution is missing from an average."""
        if self.implementation == LOCAL:
            return "ok"
        return check_completeness(self.parameters, self.accumulate)


def split_name(name: str) -> tuple[str, float | None]:
    """ "torch@25" -> ("torch", 25.0); None for the default buckets."""
    implementation, _, bucket_mb = name.partition("@")
    return implementation, float(bucket_mb) if bucket_mb else None


def measure(point: DataParallelPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: seconds by wrapper and phase, peak bytes, or boxes of a timeline."""
    device = use_device(point.device)
    workload = workload_of(
        ResNet50 if point.workload == RESNET50 else SIZES[point.workload],
        batch=point.batch,
        context_length=point.context_length,
        image_size=point.image_size,
        device=device,
        seed=point.seed_of(dist.get_rank()),
    )
    if point.sweep == "memory":
        yield from _measure_memory(point, workload, device)
        return
    workload = workload.copied()
    if point.sweep == "timeline":
        yield from _measure_timeline(point, workload, device)
    elif point.sweep == "accumulation":
        yield from _measure_accumulation(point, workload, device)
    else:
        yield from _measure_steps(point, workload, device)


def _describe(name: str) -> dict[str, Any]:
    """The columns that name an alternative."""
    implementation, bucket_mb = split_name(name)
    return {"implementation": implementation, "bucket": DEFAULT_BUCKETS if bucket_mb is None else f"{bucket_mb:g} MiB"}


def _measure_steps(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """Seconds of each phase; backward lasts until gradients are averaged, and `waiting` is its end."""
    expected = _local_means(workload, device)
    trainers: dict[str, Trainer] = {}
    rows: dict[str, dict[str, Any]] = {}

    def check(name: str) -> dict[str, Any]:
        trainer, result = Trainer(name, workload, device), dict[str, Any]({"check": "ok"})
        if trainer.implementation == LOCAL:
            trainer.step()  # the others have run, too, before the clock does
        else:
            error, verdict = check_gradients(trainer.parameters, trainer.accumulate, expected)
            result = {"error": error, "check": verdict}
        if result["check"] == "ok":
            trainers[name] = trainer
        return result

    for name in point.alternatives:
        if split_name(name)[0] in OVER_SHARED_MEMORY and transport_in_use()[0] != SHARED:
            rows[name] = _describe(name) | {"not_measured": transport_in_use()[1]}
        else:
            rows[name] = _describe(name) | row_of(name, partial(check, name), device=device)
    phases = {name: one.phases for name, one in trainers.items()}
    watches = {name: one.waiting for name, one in trainers.items()}
    yield from timed_phases(rows, phases, watches=watches, device=device, before=dist.barrier, **point.rounds)


def _local_means(workload: Workload, device: str, micro_batches: int = 1) -> list[Tensor | None]:
    """The gradients that wrappers should arrive at: the mean over ranks of the bare model's."""
    local = Trainer(LOCAL, workload, device)
    means = local_means(local.parameters, partial(local.accumulate, micro_batches))
    check_all_used(local.parameters, means)
    return means


def _measure_accumulation(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """A step over several micro-batches, averaged after each of them or after the last one only."""
    expected = _local_means(workload, device, point.micro_batches)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}

    def check(key: str, name: str, only_last: bool) -> dict[str, Any]:
        trainer = Trainer(name, workload, device)
        accumulate = partial(trainer.accumulate, point.micro_batches, only_last=only_last)
        error, verdict = check_gradients(trainer.parameters, accumulate, expected)
        if verdict == "ok":
            steps[key] = partial(_run_accumulated, trainer, accumulate)
        return {"error": error, "check": verdict}

    for name in point.alternatives:
        for averaged in (EVERY, LAST):
            key, row = f"{name}, {averaged}", _describe(name) | {"averaged_after": averaged}
            rows[key] = row | row_of(key, partial(check, key, name, averaged == LAST), device=device)
    yield from timed_rows(rows, steps, device=device, before=dist.barrier, **point.rounds)


def _run_accumulated(trainer: Trainer, accumulate: Callable[[], None]) -> None:
    accumulate()
    trainer.update()


def _measure_timeline(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    for name in point.alternatives:
        result = run_guarded(name, partial(_profile, name, workload, device), device=device)
        boxes = [{"check": result.reason}] if isinstance(result, Failed) else result
        yield from (_describe(name) | box for box in boxes)


def _profile(name: str, workload: Workload, device: str) -> list[dict[str, Any]]:
    trainer = Trainer(name, workload, device)
    verdict = trainer.check_completeness()
    return profile_step(trainer.phases, device) if verdict == "ok" else [{"check": verdict}]


def _measure_memory(point: DataParallelPoint, workload: Workload, device: str) -> Iterator[dict[str, Any]]:
    """The allocator's peak over a step, model and optimizer included, one wrapper at a time."""
    for name in point.alternatives:
        dist.barrier()
        yield _describe(name) | row_of(name, partial(_peak, name, workload, device), device=device)


def _peak(name: str, workload: Workload, device: str) -> dict[str, Any]:
    verdict = Trainer(name, workload, device).check_completeness()
    if verdict != "ok":
        return {"check": verdict}
    make = partial(Trainer, name, workload, device)
    return {"check": verdict, "peak_bytes": peak_of_second(make, Trainer.step, device=device)}
