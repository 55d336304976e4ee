"""What a rank runs to measure one point of the sharding lab. Imports torch, the wrappers and the instruments.

``time``    ways to train one model take turns: gate, bytes sent in one step, seconds by part of a step
``memory``  one way after the other: what this rank holds and needs at most at three moments of a step

Messages are counted before they are timed: bytes that are not those of the formulas are wrong results.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from labkit.bench.gate import verdict, worst_of_ranks
from labkit.bench.memory import peak_memory_growth, return_memory_when_freed
from labkit.costs.sharding import PARTS, STAGES, state_bytes
from labkit.lab.point import Point
from labkit.nn.workloads import Workload, workload_named
from labkit.parallel.collectives import all_gather
from labkit.parallel.ranks.device import use_device
from labkit.parallel.sharding.implementations import TORCHS, held_tensors, n_bytes, shard, whole_parameters
from labkit.parallel.traffic import recorded_traffic
from labkit.parallel.transport import SHARED, empty_for_all_reduce, transport_in_use
from labkit.studies.sharding.step_traffic import traffic_rows
from labkit.studies.shared.alternatives import Failed, attempt, time_those_that_run

PHASES = ("forward", "backward", "optimizer")
GATHER = "gather"
"""An all-gather of as many bytes as the model has, with nothing else to do."""
GATE_STEPS = 2
LARGEST_ERROR = 1e-2
"""Of a parameter, over the largest change of its tensor."""
LEAST_PEAK = 0.98  # of what is held: small tensors may lie in memory that the process had before
BUCKET_BYTES = 25 * 2**20
SETTINGS: Mapping[str, Any] = {"lr": 1e-3, "eps": 1e-5}
"""Of AdamW. `eps` is above what rounding makes of a gradient: three ranks add in another order than one process."""


@dataclass(frozen=True, kw_only=True)
class ShardingPoint(Point):
    """A model, a batch, a transport, and the ways that are compared on it."""

    kind: str
    size: str
    transport: str
    """What labkit's ways send by; torch's send by the backend."""
    ways: tuple[str, ...]
    device: str = "cpu"
    batch: int = 1
    context_length: int = 32
    machine_bytes: int = 0
    """Memory of the device, or of the machine whose ranks share it."""
    warmup: int = 0
    repeats: int = 6
    seed: int = 0

    def title(self) -> str:
        return f"{super().title()}, {self.kind}, {self.size}, {self.transport}, batch {self.batch}"


def measure_point(point: ShardingPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: of each way its gate, and what was measured of it."""
    device = use_device(point.device)
    if device == "cpu" and point.transport == SHARED and transport_in_use()[0] != SHARED:
        for way in point.ways:
            yield {"way": way, "not_measured": transport_in_use()[1]}
        return
    yield from (_memory if point.kind == "memory" else _times)(point, device)


def _workload(point: ShardingPoint, device: str, rank: int) -> Workload:
    seed = (1000 * point.seed + rank) % 2**63
    return workload_named(point.size, batch=point.batch, context_length=point.context_length, device=device, seed=seed)


class Training:
    """One way to train: a copy of the model in its shards, and AdamW."""

    def __init__(self, way: str, point: ShardingPoint, device: str):
        self._workload = _workload(point, device, dist.get_rank())
        self.model, self.optimizer = shard(way, self._workload.build(), AdamW, transport=point.transport, **SETTINGS)
        self._loss: Tensor | None = None

    def forward(self) -> None:
        self._loss = self._workload.loss(self.model)

    def backward(self) -> None:
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None

    def step(self) -> None:
        self.optimizer.step()

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.forward()
        self.backward()
        self.step()


def _times(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    start, expected = _one_process(point, device)
    trainings: dict[str, Training] = {}
    for way in point.ways:
        found = attempt(way, partial(_checked_steps, way, point, device, start, expected), device=device)
        if isinstance(found, Failed):
            yield {"way": way, "gate": found.reason}
            continue
        training, about, rows = found
        yield from (about | row for row in rows)
        if about["gate"] == "ok":
            trainings[way] = training
        else:
            yield about
    del expected
    yield from _timed_rows(point, device, trainings, sum(value.nbytes for value in start.values()))


def _checked_steps(
    way: str, point: ShardingPoint, device: str, start: dict[str, Tensor], expected: dict[str, Tensor]
) -> tuple[Training, dict[str, Any], list[dict[str, Any]]]:
    """A training after `GATE_STEPS` steps, what the gate says of it, and what its last step has sent."""
    training = Training(way, point, device)
    training.run()
    with recorded_traffic() as traffic:
        training.run()
    error = worst_of_ranks(_error(whole_parameters(training.model), expected, start))
    about = {"way": way, "error": error, "gate": verdict(error, LARGEST_ERROR)}
    rows = list(traffic_rows(way, traffic, start)) if way not in TORCHS else []
    if wrong := [row["collective"] for row in rows if not row.pop("is_right")]:
        about["gate"] = f"wrong: bytes sent by {', '.join(wrong)} are not those of the formulas"
    return training, about, rows


def _one_process(point: ShardingPoint, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters before and after training with the batches of all ranks in one process: what all ways must come to."""
    workloads = [_workload(point, device, rank) for rank in range(dist.get_world_size())]
    model = workloads[0].build()
    start = _copied(model)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    for _ in range(GATE_STEPS):
        optimizer.zero_grad()
        for workload in workloads:
            (workload.loss(model) / len(workloads)).backward()
        optimizer.step()
    return start, _copied(model)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def _error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Largest deviation of a parameter over the largest change of its tensor: 1 where it has not been updated."""
    if found.keys() != expected.keys():
        return float("inf")
    errors = [(found[name] - one).abs().max() / (one - start[name]).abs().max() for name, one in expected.items()]
    return float(torch.stack(errors).max())


def _timed_rows(
    point: ShardingPoint, device: str, trainings: Mapping[str, Training], model_bytes: int
) -> Iterator[dict[str, Any]]:
    """Seconds by part, all ways in turns with a gather alone; and of labkit's ways how long steps wait for gathers."""
    actions: dict[str, dict[str, Callable[[], Any]]] = {
        way: dict(zip(PHASES, (one.forward, one.backward, one.step), strict=True)) for way, one in trainings.items()
    }
    if set(trainings) - set(TORCHS):
        buffer = empty_for_all_reduce(model_bytes, torch.uint8, torch.device(device), None, point.transport)
        actions[GATHER] = {GATHER: lambda: _gather(buffer, point.transport)}
    turns: dict[str, list[int]] = {name: [] for name in actions}

    def prepare(name: str) -> None:
        turns[name].append(len(traffic))
        if name in trainings:
            trainings[name].optimizer.zero_grad()

    options: dict[str, Any] = {"warmup": point.warmup, "repeats": point.repeats, "device": device, "seed": point.id}
    with recorded_traffic() as traffic:
        times, failed = time_those_that_run(actions, prepare=prepare, before=dist.barrier, **options)
    yield from ({"way": way, "gate": reason} for way, reason in failed.items() if way != GATHER)
    borders = sorted(at for of_way in turns.values() for at in of_way)
    for way, by_part in times.items():
        for part, seconds in by_part.items():
            yield {"way": way, "gate": "ok", "part": part, "seconds": seconds}
        starts = turns[way][point.warmup :] if way in trainings and way not in TORCHS and device == "cpu" else []
        ends = [next((at for at in borders if at > start), len(traffic)) for start in starts]
        rounds = [
            [call for call in traffic[start:end] if call.collective == "all_gather"]
            for start, end in zip(starts, ends, strict=True)
        ]
        if any(rounds):
            yield {
                "way": way,
                "gate": "ok",
                "part": "waiting for gathers",
                "seconds": [sum(call.waited_s for call in calls) for calls in rounds],
                "gathering_s": [sum(call.end_s - call.start_s for call in calls) for calls in rounds],
                "gathers": [len(calls) for calls in rounds],
                "in_time": [sum(call.waited_s == 0 for call in calls) for calls in rounds],
            }


def _gather(buffer: Tensor, transport: str) -> None:
    for bucket in buffer.split(BUCKET_BYTES):
        all_gather(bucket, transport=transport)


def _memory(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    """Three rows a way: what a rank holds by part, as its tensors say, and the peak that the system saw, once.

    A peak below what is held is none: something else was freed meanwhile. Such a row says so and has no peak.
    """
    return_memory_when_freed()
    failed: dict[str, str] = {}
    for way in point.ways:
        done = attempt(way, partial(_make_what_stays, way, point, device), device=device)
        if isinstance(done, Failed):
            failed[way] = done.reason
    for way in point.ways:
        gc.collect()  # the way before, which is full of cycles, would be freed within this one's peak
        dist.barrier()
        rows = attempt(way, partial(_memory_of, way, point, device), device=device) if way not in failed else []
        if isinstance(rows, Failed):
            failed[way] = rows.reason
        else:
            yield from rows
    yield from ({"way": way, "gate": reason} for way, reason in failed.items())


def _make_what_stays(way: str, point: ShardingPoint, device: str) -> None:
    """What libraries make once is no part of any peak."""
    Training(way, ShardingPoint.of(point, size="nano", batch=1), device).run()


def _memory_of(way: str, point: ShardingPoint, device: str) -> list[dict[str, Any]]:
    with peak_memory_growth(device) as init:
        training = Training(way, point, device)
    about = {"way": way, "gate": "ok"}
    held = {"init": _held(training)}
    with peak_memory_growth(device) as first:  # makes what stays: optimizer state, buffers
        training.run()
        training.optimizer.zero_grad()
    with peak_memory_growth(device) as before:
        training.forward()
        training.backward()
    held["before step"] = _held(training)
    with peak_memory_growth(device) as after:
        training.step()
    held["after step"] = _held(training)
    resting = _total(init.kept_bytes, first.kept_bytes)
    peaks = {
        "init": init.growth_bytes,
        "before step": _total(resting, before.growth_bytes),
        "after step": _total(resting, before.kept_bytes, after.growth_bytes),
    }
    parameters = dict(_workload(point, "meta", 0).build().named_parameters())
    formula = _formula(way, parameters) if way in STAGES else {}
    return [
        about | parts | formula | {"moment": moment} | _checked(peaks[moment], sum(parts.values()))
        for moment, parts in held.items()
    ]


def _checked(peak: int | None, held: int) -> dict[str, Any]:
    if peak is None or peak >= LEAST_PEAK * held:
        return {"peak_bytes": peak}
    return {"peak_bytes": None, "gate": f"wrong: a peak of {peak} bytes while {held} are held"}


def _held(training: Training) -> dict[str, int]:
    tensors = held_tensors(training.model, training.optimizer)
    return {f"{part}_bytes": n_bytes(tensors[part]) for part in PARTS}


def _formula(way: str, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    replicated = sum(value.numel() for value in parameters.values() if value.dim() < 2)
    n = sum(value.numel() for value in parameters.values())
    states = state_bytes(n, way, dist.get_world_size(), replicated=replicated)
    return {f"formula_{part}_bytes": states[part] for part in PARTS}


def _total(*n_bytes: int | None) -> int | None:
    known = [n for n in n_bytes if n is not None]
    return sum(known) if len(known) == len(n_bytes) else None
