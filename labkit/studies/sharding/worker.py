"""What every rank runs for a point of the sharding lab: a check, the bytes of one step, seconds, or memory.

``time``    implementations take turns: parameters are checked, bytes of one step counted, parts of a step timed
``memory``  one implementation after the other: bytes that this rank holds, and its peak, at three moments of a step
"""

import gc
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from labkit.bench.check import max_over_ranks
from labkit.bench.memory import peak_memory_growth, return_memory_when_freed
from labkit.costs.sharding import PARTS, STAGES, moved_bytes, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import TimedPoint, skip_reason
from labkit.lab.units import counted
from labkit.nn.workloads import Workload, workload_of
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.sharding.implementations import (
    LABKITS,
    held_tensors,
    n_bytes,
    shard,
    whole_parameters,
)
from labkit.parallel.traffic import recorded_traffic
from labkit.parallel.transport import SHARED, transport_in_use
from labkit.studies.shared.alternatives import Failed, row_of, run_guarded, timed_phases
from labkit.studies.shared.training_check import STEPS, train_in_one_process

if TYPE_CHECKING:
    from labkit.machine import Machine

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
INIT, BEFORE_STEP, AFTER_STEP = "init", "before step", "after step"
RANK_BYTES = 300 * 2**20  # resident memory of a rank, torch included
COPIES = 5  # of the parameters per implementation: parameters, gradients, two states, messages
FLOAT32 = "float32"
OPTIMIZERS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = MappingProxyType(
    {"AdamW": (AdamW, {"lr": 1e-3, "eps": 1e-5}), "SGD": (SGD, {"lr": 0.5})}
)
"""One that costs much per parameter, one that costs little. AdamW's `eps` is above the rounding of a gradient: three
ranks add in another order than one process. SGD's `lr` is such that rounding is little beside an update."""
MIN_PEAK_SHARE = 0.98  # of the bytes held: small tensors may lie in memory that the process had before
MIN_HELD_BYTES = 2**20  # below, most tensors lie there


@dataclass(frozen=True, kw_only=True)
class ShardingPoint(TimedPoint):
    """A model, a batch, an optimizer, a transport, and the implementations that are compared on them."""

    kind: str
    """ "time" or "memory"."""
    size: str
    transport: str
    """Of labkit's implementations; torch's send by the backend."""
    implementations: tuple[str, ...]
    optimizer: str = "AdamW"
    device: str = "cpu"
    batch: int = 1
    context_length: int = 32
    host_ranks: int = 0
    """Ranks on this host, which share its memory."""

    @property
    def series(self) -> tuple[Hashable, float]:
        return (self.kind, self.transport, self.optimizer, self.world_size, self.batch), n_parameters(SIZES[self.size])

    @property
    def contests(self) -> int:
        return int(self.kind == "time")

    def skip_reason(self, machine: "Machine") -> str | None:
        ranks = ranks_here(self.world_size)
        models = 1 if self.kind == "memory" else len(self.implementations) + 1
        needed = ranks * (RANK_BYTES + models * COPIES * 4 * n_parameters(SIZES[self.size]))
        return skip_reason(machine, self.device, needed, ranks=ranks, says=f"{counted(models, 'model')} need {{}}")

    def title(self) -> str:
        return f"{super().title()}, {self.kind}, {self.size}, {self.optimizer}, {self.transport}"


class Trainer:
    """One implementation: a copy of the model in its shards, and its optimizer."""

    def __init__(self, implementation: str, point: ShardingPoint, workload: Workload):
        optimizer, settings = OPTIMIZERS[point.optimizer]
        self.model, self.optimizer = shard(
            implementation, workload.build(), optimizer, transport=point.transport, **settings
        )
        self._workload = workload
        self._finish = getattr(self.model, "finish_gradient_synchronization", None)
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self._workload.loss(self.model)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None
        if self._finish is not None:  # labkit's and torch's have finished; a user's may not have
            self._finish()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward()
        self.backward()
        self.update()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that this rank holds now, by part."""
        tensors = held_tensors(self.model, self.optimizer)
        return {f"{part}_bytes": n_bytes(tensors[part]) for part in PARTS}


def make_workload(point: ShardingPoint, device: str, rank: int) -> Workload:
    """The model, and the batch of a rank."""
    return workload_of(
        SIZES[point.size],
        batch=point.batch,
        context_length=point.context_length,
        device=device,
        seed=point.seed_of(rank),
    )


def measure(point: ShardingPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point, by implementation."""
    device = use_device(point.device)
    if device == "cpu" and point.transport == SHARED and transport_in_use()[0] != SHARED:
        for name in point.implementations:
            yield {"implementation": name, "not_measured": transport_in_use()[1]}
        return
    yield from (_measure_memory if point.kind == "memory" else _measure_steps)(point, device)


def _measure_steps(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    """Bytes of one step by collective, then seconds by part of a step, all implementations in turns."""
    workloads = [make_workload(point, device, rank) for rank in range(dist.get_world_size())]
    reference = train_in_one_process(workloads, *OPTIMIZERS[point.optimizer])
    trainers: dict[str, Trainer] = {}
    traffic: list[dict[str, Any]] = []

    def check(name: str) -> dict[str, Any]:
        trainer = Trainer(name, point, workloads[dist.get_rank()])
        for _ in range(STEPS):
            with recorded_traffic() as calls:
                trainer.step()
        error, verdict = reference.check(whole_parameters(trainer.model))
        if verdict == "ok":
            trainers[name] = trainer
            traffic.extend(_traffic_rows(name, calls, list(reference.expected.values())) if name in LABKITS else ())
        return {"error": error, "check": verdict}

    rows = {
        name: {"implementation": name} | row_of(name, partial(check, name), device=device)
        for name in point.implementations
    }
    yield from traffic
    phases = {
        name: {FORWARD: one.forward, BACKWARD: one.backward, OPTIMIZER: one.update} for name, one in trainers.items()
    }
    yield from timed_phases(rows, phases, "part", device=device, before=dist.barrier, **point.rounds)


def _traffic_rows(name: str, calls: list[Any], parameters: list[Tensor]) -> Iterator[dict[str, Any]]:
    """Bytes that this rank sent in one step, by collective, beside the formula; flags of the ranks left out."""
    p, n = dist.get_world_size(), sum(value.nbytes for value in parameters)
    scalars = sum(value.nbytes for value in parameters if value.dim() == 0)  # whole on every rank
    expected = moved_bytes(n, name, replicated_bytes=scalars)
    sent: Counter[str] = Counter()
    for call in calls:
        if call.dtype == FLOAT32:
            sent[call.collective] += call.sent_bytes
    for collective in dict.fromkeys([*expected, *sent]):
        formula = expected.get(collective, 0) * (2 if collective == "all_reduce" else 1) * (p - 1) / p
        if formula or sent[collective]:
            yield {
                "implementation": name,
                "check": "ok",
                "collective": collective,
                "sent_bytes": sent[collective],
                "formula_bytes": formula,
                "model_bytes": n,
            }


def _measure_memory(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    """Rows of each implementation at three moments: bytes held by part, as its tensors say, and the peak until then."""
    return_memory_when_freed()
    checks = _check_small(point, device)
    gc.collect()
    gc.freeze()  # objects of libraries stay: looking at them each time would be a tenth of this point's time
    for name, row in checks.items():
        gc.collect()  # the one before, which is full of cycles, would be freed within this one's peak
        dist.barrier()
        rows: list[dict[str, Any]] | Failed = [row]
        if row["check"] == "ok":
            rows = run_guarded(name, partial(_memory_of, name, point, device), device=device)
        for one in [{"check": rows.reason}] if isinstance(rows, Failed) else rows:
            yield {"implementation": name, "check": "ok"} | one


def _check_small(point: ShardingPoint, device: str) -> dict[str, dict[str, Any]]:
    """Check trainings of a small model. Memory that libraries allocate once then is part of no peak."""
    small = ShardingPoint.of(point, size="nano", batch=1)
    workloads = [make_workload(small, device, rank) for rank in range(dist.get_world_size())]
    reference = train_in_one_process(workloads, *OPTIMIZERS[small.optimizer])

    def check(name: str) -> dict[str, Any]:
        trainer = Trainer(name, small, workloads[dist.get_rank()])
        for _ in range(STEPS):
            trainer.step()
        return {"check": reference.check(whole_parameters(trainer.model))[1]}

    return {name: row_of(name, partial(check, name), device=device) for name in point.implementations}


def _memory_of(name: str, point: ShardingPoint, device: str) -> list[dict[str, Any]]:
    workload = make_workload(point, device, dist.get_rank())
    held = {}
    with peak_memory_growth(device) as init:
        trainer = Trainer(name, point, workload)
    held[INIT] = trainer.held_bytes()
    with peak_memory_growth(device) as first:  # allocates optimizer state and buffers
        trainer.step()
    with peak_memory_growth(device) as before:
        trainer.forward()
        trainer.backward()
    held[BEFORE_STEP] = trainer.held_bytes()
    with peak_memory_growth(device) as after:
        trainer.optimizer.step()
    held[AFTER_STEP] = trainer.held_bytes()
    resting = _total(init.end_bytes, first.end_bytes)
    peaks = {
        INIT: init.growth_bytes,
        BEFORE_STEP: _total(resting, before.growth_bytes),
        AFTER_STEP: _total(resting, before.end_bytes, after.growth_bytes),
    }
    formula = _formula_bytes(name, trainer.model) if name in STAGES else {}
    reason = next(filter(None, (_unseen_reason(peaks[moment], sum(held[moment].values())) for moment in held)), None)
    # The largest of the other ranks or moments would be too low.
    is_unseen = max_over_ranks(float(reason is not None)) > 0
    missing: dict[str, Any] = {"not_measured": reason or "another rank has no peak"}
    rows: list[dict[str, Any]] = [
        {"moment": moment, **parts} | (missing if is_unseen else {"peak_bytes": peaks[moment]})
        for moment, parts in held.items()
    ]
    rows[-1] |= formula
    return rows


def _unseen_reason(peak: int | None, held: int) -> str | None:
    """Why a peak is none: the system may take memory back between two looks, and does not see small tensors."""
    if held < MIN_HELD_BYTES or peak is None:
        return "the system sees no peak of a model so small"
    if peak < MIN_PEAK_SHARE * held:
        return "the system counted less memory at the peak than the rank's tensors hold"
    return None


def _formula_bytes(name: str, model: nn.Module) -> dict[str, float]:
    parameters = list(model.parameters())
    scalars = sum(one.numel() for one in parameters if one.dim() == 0)
    states = state_bytes(sum(one.numel() for one in parameters), name, dist.get_world_size(), replicated=scalars)
    return {f"formula_{part}_bytes": states[part] for part in PARTS}


def _total(*n_bytes: int | None) -> int | None:
    return None if None in n_bytes else sum(n for n in n_bytes if n is not None)
