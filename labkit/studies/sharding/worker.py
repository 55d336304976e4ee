"""What a rank runs to measure one point of the sharding lab. Imports torch, the wrappers and the instruments.

``time``    ways to train one model take turns: gate, bytes sent in one step, seconds by part of a step
``memory``  one way after the other: what this rank holds and needs at most at three moments of a step

Messages are counted before they are timed: bytes that are not those of the formulas are wrong results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.sharding.implementations import LABKITS, TORCHS, whole_parameters
from labkit.parallel.traffic import Collective, recorded_traffic, tcp_bytes_sent
from labkit.parallel.transport import POINT_TO_POINT, SHARED, transport_in_use
from labkit.studies.sharding.gate import OneProcess, train_in_one_process
from labkit.studies.sharding.memory import measure_memory
from labkit.studies.sharding.step_traffic import tcp_row, traffic_rows
from labkit.studies.sharding.training import ShardingPoint, Training
from labkit.studies.shared.alternatives import Failed, attempt, time_those_that_run

PHASES = ("forward", "backward", "optimizer")
GATHER = "gather"
"""An all-gather of as many bytes as the model has, with nothing else to do."""
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
    references = train_in_one_process(point, device)
    model_bytes = sum(value.nbytes for value in references[0].expected.values())
    trainings: dict[str, Training] = {}
    for way in point.ways:
        found = attempt(way, partial(_checked_steps, way, point, device, references), device=device)
        if isinstance(found, Failed):
            yield {"way": way, "check": found.reason}
            continue
        training, about, rows = found
        yield from (about | row for row in rows)
        if about["check"] == "ok":
            trainings[way] = training
        else:
            yield about
    del references
    yield from _timed_rows(point, device, trainings, model_bytes)


def _checked_steps(
    way: str, point: ShardingPoint, device: str, references: Sequence[OneProcess]
) -> tuple[Training, dict[str, Any], list[dict[str, Any]]]:
    """A training after as many steps, what the gate says of it, and what its last step has sent."""
    training, (*before_last, reference) = Training(way, point, device), references
    for earlier in before_last:
        training.run()
        if way not in LABKITS + TORCHS:
            error, gate = earlier.check(whole_parameters(training.model))
            if gate != "ok":
                return training, {"way": way, "error": error, "check": gate}, []
    dist.barrier()
    before = tcp_bytes_sent()
    with recorded_traffic() as traffic:
        training.run()
    dist.barrier()  # it comes behind what is still in the sockets' buffers, which count what has left them
    by_tcp = tcp_bytes_sent()
    error, gate = reference.check(whole_parameters(training.model))
    about = {"way": way, "error": error, "check": gate}
    rows = list(traffic_rows(way, traffic, reference.expected, reference.trained)) if way not in TORCHS else []
    if way not in LABKITS:
        known = sum(call.sent_bytes for call in traffic) if point.transport == POINT_TO_POINT else 0
        rows += tcp_row(before, by_tcp, known, reference.expected)
    if wrong := [row["collective"] for row in rows if not row.pop("is_right")]:
        about["check"] = f"wrong: bytes sent by {', '.join(wrong)} are not those of the formulas"
    return training, about, rows


def _timed_rows(
    point: ShardingPoint, device: str, trainings: Mapping[str, Training], model_bytes: int
) -> Iterator[dict[str, Any]]:
    """Seconds by part, all ways in turns with gathers alone; and of labkit's ways how long steps wait for gathers."""
    actions: dict[str, dict[str, Callable[[], Any]]] = {
        way: dict(zip(PHASES, (one.forward, one.backward, one.step), strict=True)) for way, one in trainings.items()
    }
    if set(trainings) & set(LABKITS):
        buffer = torch.empty(model_bytes, dtype=torch.uint8, device=device)
        actions[GATHER] = {GATHER: lambda: _gather(buffer, point.transport)}
    turns: list[tuple[str, int]] = []  # whose it is, and how many calls were recorded before it

    def prepare(name: str) -> None:
        turns.append((name, len(traffic)))
        if name in trainings:
            trainings[name].optimizer.zero_grad()

    with recorded_traffic() as traffic:
        times, failed = time_those_that_run(
            actions, prepare=prepare, before=dist.barrier, device=device, **point.rounds
        )
    yield from ({"way": way, "check": reason} for way, reason in failed.items() if way in trainings)
    gathers: dict[str, list[list[Collective]]] = {name: [] for name in actions}
    for (name, start), (_, end) in pairwise([*turns, ("", len(traffic))]):
        gathers[name].append([call for call in traffic[start:end] if call.collective == "all_gather"])
    for way, by_part in times.items():
        for part, seconds in by_part.items():
            yield {"way": way, "check": "ok", "part": part, "seconds": seconds}
        is_seen = way in trainings and way not in TORCHS and device == "cpu"
        rounds = gathers[way][point.warmup :] if is_seen else []
        if any(rounds):
            yield {
                "way": way,
                "check": "ok",
                "part": "waiting for gathers",
                "seconds": [sum(call.waited_s for call in calls) for calls in rounds],
                "gathering_s": [sum(call.end_s - call.start_s for call in calls) for calls in rounds],
                "gathers": [len(calls) for calls in rounds],
                "in_time": [sum(call.waited_s == 0 for call in calls) for calls in rounds],
            }


def _gather(buffer: Tensor, transport: str) -> None:
    for bucket in buffer.split(BUCKET_BYTES):
        all_gather(bucket, transport=transport)
