"""Worker of the sharding lab: a check, the bytes of one step, seconds, or memory.

``time``    interleaved: parameters are checked, a step's bytes counted, its parts timed
``memory``  one after the other: a rank's bytes after a step, and the peak of a step
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.optim import SGD, AdamW, Optimizer

from labkit.bench.check import max_over_ranks, refusal_columns
from labkit.bench.memory import process_peak, return_memory_when_freed
from labkit.costs.communication import STAGES, sent_bytes, sharding_calls
from labkit.costs.memory import PARTS, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import ModelPoint
from labkit.nn.training import Trainer, Workload, build_workload
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.sharding import whole_parameters
from labkit.parallel.traffic import recorded_traffic
from labkit.parallel.transport import AUTO, POINT_TO_POINT, transport_in_use
from labkit.studies.shared.alternatives import check_and_time, row_of
from labkit.studies.shared.checks import STEPS, Reference, train_in_one_process
from labkit.studies.shared.held import held_bytes
from labkit.studies.shared.sharding_strategies import LABKITS, shard

COPIES = 5  # of the parameters per implementation: parameters, gradients, two states, messages
# An expensive update and a cheap one. AdamW's `eps` is above the rounding of a gradient, which
# three ranks add in another order than one process. SGD's `lr` makes an update large compared with
# rounding.
OPTIMIZERS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 1e-3, "eps": 1e-5}),
    "SGD": (SGD, {"lr": 0.5}),
}
# Of the bytes held, that a peak must show: small tensors may lie in memory that the process had
# before, and below `MIN_HELD_BYTES` most tensors do.
MIN_PEAK_SHARE = 0.98
MIN_HELD_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class ShardingPoint(ModelPoint):
    """A model, batch, optimizer and transport, and the implementations to compare."""

    kind: str
    """ "time" or "memory"."""
    size: str
    transport: str
    """Transport of labkit's implementations; torch's use the backend."""
    implementations: tuple[str, ...]
    optimizer: str = "AdamW"
    host_ranks: int = 0
    """Ranks on this host, which share its memory."""

    @property
    def needed_bytes(self) -> float:
        models = 1  # memory is measured one after the other
        if self.kind == "time":
            models = len(self.implementations) + 1
        return models * COPIES * 4 * n_parameters(SIZES[self.size])


def measure(point: ShardingPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of one point, by implementation."""
    device = use_device(point.device)
    transport = point.transport
    if device == "cpu" and transport != POINT_TO_POINT:
        # A row names the transport that was used, which "auto" does not.
        transport, reason = transport_in_use()
        if point.transport not in (AUTO, transport):
            for name in point.implementations:
                yield {"implementation": name} | refusal_columns(reason)
            return
    measure_kind = _measure_memory if point.kind == "memory" else _measure_steps
    for row in measure_kind(point, device):
        yield {"transport": transport} | row


def make_workload(point: ShardingPoint, device: str, rank: int) -> Workload:
    """Return the model, and the batch of a rank."""
    sizes = {"batch": point.batch, "context_length": point.context_length}
    return build_workload(SIZES[point.size], **sizes, device=device, seed=point.batch_seed(rank))


def make_trainer(name: str, point: ShardingPoint, workload: Workload) -> Trainer:
    """Return a copy of the model in its shards, and its optimizer."""
    optimizer, settings = OPTIMIZERS[point.optimizer]
    model, sharded = shard(name, workload.build(), optimizer, transport=point.transport, **settings)
    return Trainer(model, sharded, workload.loss)


def _train_in_one_process(point: ShardingPoint, device: str) -> tuple[Workload, Reference]:
    """Return this rank's workload, and the parameters after a training in one process."""
    workloads = [make_workload(point, device, rank) for rank in range(dist.get_world_size())]
    # All begin with the first one's parameters: a rank's seed is for its batch.
    build = workloads[0].copied().build
    workloads[0] = Workload(build, workloads[0].loss)
    optimizer, settings = OPTIMIZERS[point.optimizer]
    reference = train_in_one_process(
        workloads, lambda model: optimizer(model.parameters(), **settings)
    )
    return Workload(build, workloads[dist.get_rank()].loss), reference


def _check(
    name: str, point: ShardingPoint, workload: Workload, reference: Reference
) -> tuple[dict[str, Any], Trainer, list[Any]]:
    """Train as long as the reference.

    Returns error and status, the trainer, and the calls of its last step.
    """
    trainer = make_trainer(name, point, workload)
    for _ in range(STEPS):
        with recorded_traffic() as calls:
            trainer.run()
    return reference.check(whole_parameters(trainer.model)), trainer, calls


def _measure_steps(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    """Yield seconds by part of a step, interleaved, then its bytes by collective."""
    against = _train_in_one_process(point, device)
    traffic = list[dict[str, Any]]()

    def check(name: str) -> tuple[dict[str, Any], dict[str, Callable[[], None]]]:
        columns, trainer, calls = _check(name, point, *against)
        if columns["status"] == "ok" and name in LABKITS:
            traffic.extend(_traffic_rows(name, calls, 4 * n_parameters(SIZES[point.size])))
        return columns, trainer.phases

    rows = {name: {"implementation": name} for name in point.implementations}
    yield from check_and_time(
        rows, check, "part", device=device, before=dist.barrier, **point.rounds
    )
    yield from traffic


def _traffic_rows(name: str, calls: list[Any], model_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield bytes that this rank sent in one step, by collective, and the formula's.

    The ranks' flags are left out.
    """
    p = dist.get_world_size()
    expected = {
        call.collective: sent_bytes([call], p) for call in sharding_calls(model_bytes, name)
    }
    sent: Counter[str] = Counter()
    for call in calls:
        if call.is_payload:
            sent[call.collective] += call.sent_bytes
    for collective in dict.fromkeys([*expected, *sent]):
        formula = expected.get(collective, 0.0)
        if formula or sent[collective]:
            yield {
                "implementation": name,
                "status": "ok",
                "collective": collective,
                "model_bytes": model_bytes,
                "sent_bytes": sent[collective],
                "formula_bytes": formula,
            }


def _measure_memory(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    """Yield the bytes of the tensors held after a step, and the step's peak, by implementation."""
    return_memory_when_freed()
    # The check trains a small model. Memory that libraries allocate once then is part of no peak.
    small = ShardingPoint.of(point, size="nano", batch=1)
    against = _train_in_one_process(small, device)

    def check(name: str) -> Mapping[str, Any]:
        return _check(name, small, *against)[0]

    rows = {
        name: row_of(name, partial(check, name), device=device) for name in point.implementations
    }
    workload = make_workload(point, device, dist.get_rank()).copied()
    gc.collect()
    # Libraries' objects stay: looking at them each time would take a tenth of this point's time.
    gc.freeze()
    for name, row in rows.items():
        # Now: the strategy before is full of cycles, which would be freed inside this one's peak.
        gc.collect()
        dist.barrier()
        if row["status"] == "ok":
            row |= row_of(name, partial(_measure_one, name, point, workload, device), device=device)
        yield {"implementation": name} | row


def _measure_one(
    name: str, point: ShardingPoint, workload: Workload, device: str
) -> dict[str, Any]:
    with process_peak(device) as resting:
        trainer = make_trainer(name, point, workload)
        trainer.run()  # allocates optimizer state and buffers
    # Not `trainer.run`, which drops the gradients: a rank holds them from step to step.
    with process_peak(device) as step:
        trainer.forward()
        trainer.backward()
        trainer.optimizer.step()
    held = held_bytes(trainer.model, trainer.optimizer)
    formula = {}
    if name in STAGES:
        states = state_bytes(n_parameters(SIZES[point.size]), name, dist.get_world_size())
        formula = {f"formula_{part}_bytes": states[part] for part in PARTS}
    # What the trainer holds at rest, and what a step adds to that.
    peak = None
    if resting.end_bytes is not None and step.growth_bytes is not None:
        peak = resting.end_bytes + step.growth_bytes
    reason = _no_peak_reason(peak, sum(held.values()))
    # A point's peak is the largest of all ranks: without one of them it would be too low.
    if max_over_ranks(float(reason is not None)) > 0:
        return held | formula | refusal_columns(reason or "another rank has no peak")
    return held | formula | {"peak_bytes": peak}


def _no_peak_reason(peak: int | None, held: int) -> str | None:
    """Return why the peak is unknown.

    The system may reclaim memory between two looks, and misses small tensors.
    """
    if peak is None:
        return "the system does not say what a process's peak is"
    if held < MIN_HELD_BYTES:
        return "the system sees no peak of a model so small"
    if peak < MIN_PEAK_SHARE * held:
        return "the system counted less memory at the peak than the rank's tensors hold"
    return None
