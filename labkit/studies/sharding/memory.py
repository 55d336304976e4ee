"""Memory of one way after the other: what a rank holds, and what it needs at most at three moments of a step."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from labkit.bench.memory import peak_memory_growth, return_memory_when_freed
from labkit.costs.sharding import PARTS, STAGES, state_bytes
from labkit.lab.own_models import shape_of
from labkit.parallel.sharding.implementations import LABKITS, TORCHS, held_tensors, n_bytes, whole_parameters
from labkit.studies.sharding.gate import train_in_one_process
from labkit.studies.sharding.training import ShardingPoint, Training, workload_of
from labkit.studies.shared.alternatives import Failed, attempt

LEAST_PEAK = 0.98  # of what is held: small tensors may lie in memory that the process had before
LEAST_SEEN = 2**20  # bytes held: below, most tensors lie there


def measure_memory(point: ShardingPoint, device: str) -> Iterator[dict[str, Any]]:
    """Three rows a way: what a rank holds by part, as its tensors say, and the peak that the system saw, once.

    A peak below what is held is none: something else was freed meanwhile. Such a row says so and has no peak. Nor has
    one of a model too small for the system to see.
    """
    return_memory_when_freed()
    parameters = _parameters(point, device)
    failed: dict[str, str] = {}
    for way in point.ways:
        gate = attempt(way, partial(_make_what_stays, way, point, device), device=device)
        if gate != "ok":
            failed[way] = gate.reason if isinstance(gate, Failed) else gate
    gc.collect()
    gc.freeze()  # what is left has been looked at: each time again would be a tenth of this point's time
    for way in point.ways:
        gc.collect()  # the way before, which is full of cycles, would be freed within this one's peak
        dist.barrier()
        if way in failed:
            continue
        rows = attempt(way, partial(_memory_of, way, point, device, parameters), device=device)
        if isinstance(rows, Failed):
            failed[way] = rows.reason
        else:
            yield from rows
    yield from ({"way": way, "check": reason} for way, reason in failed.items())


def _make_what_stays(way: str, point: ShardingPoint, device: str) -> str:
    """What libraries make once is no part of any peak. "ok", or what is wrong of a reader's way."""
    small = ShardingPoint.of(point, size="nano", batch=1)
    training, gate = Training(way, small, device), "ok"
    if way in LABKITS + TORCHS:  # where they are timed, they are checked
        training.run()
        return gate
    for reference in train_in_one_process(small, device):
        training.run()
        gate = reference.check(whole_parameters(training.model))[1] if gate == "ok" else gate
    return gate


def _memory_of(way: str, point: ShardingPoint, device: str, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    with peak_memory_growth(device) as init:
        training = Training(way, point, device)
    about = {"way": way, "check": "ok"}
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
    formula = _formula(way, parameters) if way in STAGES else {}
    return [
        about | parts | formula | {"moment": moment} | _seen(moment, peaks[moment], parts)
        for moment, parts in held.items()
    ]


def _seen(moment: str, peak: int | None, parts: Mapping[str, int]) -> dict[str, Any]:
    """The peak, unless the system cannot have seen all of it: it may take memory back between two looks."""
    held = sum(parts.values())
    if held < LEAST_SEEN or peak is None:
        return {"peak_bytes": None}
    if peak < LEAST_PEAK * held:
        return {"peak_bytes": None, "not_measured": f"the system counted less at its peak ({moment}) than it holds"}
    return {"peak_bytes": peak}


def _held(training: Training) -> dict[str, int]:
    tensors = held_tensors(training.model, training.optimizer)
    return {f"{part}_bytes": n_bytes(tensors[part]) for part in PARTS}


def _parameters(point: ShardingPoint, device: str) -> list[nn.Parameter]:
    """Of the model, without memory. A reader's is made and computed with, once: it may fail, and what stays is made."""
    is_transformer = shape_of(point.size) is not None
    workload = workload_of(point, "meta" if is_transformer else device, 0)
    model = workload.build()
    if not is_transformer:
        workload.loss(model).backward()
    return [nn.Parameter(one.detach().to("meta"), one.requires_grad) for one in model.parameters()]


def _formula(way: str, parameters: Sequence[nn.Parameter]) -> dict[str, float]:
    """By part; what is frozen has neither gradients nor states."""
    states = dict(_states(way, [one for one in parameters if one.requires_grad]))
    states["parameters"] = _states(way, parameters)["parameters"]
    return {f"formula_{part}_bytes": states[part] for part in PARTS}


def _states(way: str, parameters: Sequence[nn.Parameter]) -> Mapping[str, float]:
    replicated = sum(one.numel() for one in parameters if one.dim() < 2)
    n = sum(one.numel() for one in parameters)
    return state_bytes(n, way, dist.get_world_size(), replicated=replicated)


def _total(*n_bytes: int | None) -> int | None:
    known = [n for n in n_bytes if n is not None]
    return sum(known) if len(known) == len(n_bytes) else None
