"""What a rank runs to measure one point of the sharding lab. Imports torch, the wrappers and the instruments.

``time``    ways to train one model take turns: gate, bytes sent in one step, seconds by part of a step
``memory``  one way after the other: what this rank holds and needs at most at three moments of a step

Messages are counted before they are timed: bytes that are not those of the formulas are wrong results.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.gate import verdict, worst_of_ranks
from labkit.parallel.collectives import all_gather
from labkit.parallel.ranks.device import use_device
from labkit.parallel.sharding import ShardedOptimizer
from labkit.parallel.sharding.implementations import TORCHS, whole_parameters
from labkit.parallel.traffic import recorded_traffic, tcp_bytes_sent
from labkit.parallel.transport import SHARED, empty_for_all_reduce, transport_in_use
from labkit.studies.sharding.memory import measure_memory
from labkit.studies.sharding.step_traffic import tcp_row, traffic_rows
from labkit.studies.sharding.training import OPTIMIZERS, ShardingPoint, Training, workload_of
from labkit.studies.shared.alternatives import Failed, attempt, time_those_that_run

PHASES = ("forward", "backward", "optimizer")
GATHER = "gather"
"""An all-gather of as many bytes as the model has, with nothing else to do."""
UPDATES = "gather of updates"
"""What ends a step of ZeRO-1, with nothing else to do: updated parameters packed, gathered, and copied out."""
GATE_STEPS = 2
LARGEST_ERROR = 1e-2
"""Of a parameter, over the largest change of its tensor."""
BUCKET_BYTES = 25 * 2**20


def measure_point(point: ShardingPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: of each way its gate, and what was measured of it."""
    device = use_device(point.device)
    if device == "cpu" and point.transport == SHARED and transport_in_use()[0] != SHARED:
        for way in point.ways:
            yield {"way": way, "not_measured": transport_in_use()[1]}
        return
    yield from (measure_memory if point.kind == "memory" else _times)(point, device)


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
    dist.barrier()
    before = tcp_bytes_sent()
    with recorded_traffic() as traffic:
        training.run()
    by_tcp = tcp_bytes_sent()
    error = worst_of_ranks(_error(whole_parameters(training.model), expected, start))
    about = {"way": way, "error": error, "gate": verdict(error, LARGEST_ERROR)}
    rows = list(traffic_rows(way, traffic, start)) if way not in TORCHS else tcp_row(before, by_tcp, start)
    if wrong := [row["collective"] for row in rows if not row.pop("is_right")]:
        about["gate"] = f"wrong: bytes sent by {', '.join(wrong)} are not those of the formulas"
    return training, about, rows


def _one_process(point: ShardingPoint, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters before and after training with the batches of all ranks in one process: what all ways must come to."""
    workloads = [workload_of(point, device, rank) for rank in range(dist.get_world_size())]
    model = workloads[0].build()
    start = _copied(model)
    make, settings = OPTIMIZERS[point.optimizer]
    optimizer = make(model.parameters(), **settings)
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
    """Seconds by part, all ways in turns with gathers alone; and of labkit's ways how long steps wait for gathers."""
    actions: dict[str, dict[str, Callable[[], Any]]] = {
        way: dict(zip(PHASES, (one.forward, one.backward, one.step), strict=True)) for way, one in trainings.items()
    }
    if set(trainings) - set(TORCHS):
        buffer = empty_for_all_reduce(model_bytes, torch.uint8, torch.device(device), None, point.transport)
        actions[GATHER] = {GATHER: lambda: _gather(buffer, point.transport)}
    if "zero1" in trainings:
        optimizer = trainings["zero1"].optimizer
        assert isinstance(optimizer, ShardedOptimizer)
        actions[UPDATES] = {UPDATES: optimizer.gather_parameters}
    turns: dict[str, list[int]] = {name: [] for name in actions}

    def prepare(name: str) -> None:
        turns[name].append(len(traffic))
        if name in trainings:
            trainings[name].optimizer.zero_grad()

    options: dict[str, Any] = {"warmup": point.warmup, "repeats": point.repeats, "device": device, "seed": point.id}
    with recorded_traffic() as traffic:
        times, failed = time_those_that_run(actions, prepare=prepare, before=dist.barrier, **options)
    yield from ({"way": way, "gate": reason} for way, reason in failed.items() if way in trainings)
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
